import ast
import dataclasses
from pathlib import Path

import pytest

import anysize
from anysize.config import (
    DataConfig,
    ModelConfig,
    PixelConvention,
    RunConfig,
    check_model,
    load_config,
)
from anysize.errors import ConfigError
from anysize.tables import from_table, to_toml

SOURCE = Path(anysize.__file__).parent


def write(tmp_path, text):
    path = tmp_path / "run.toml"
    path.write_text(text)
    return path


def test_values_defaults_and_overrides(tmp_path):
    path = write(tmp_path, '[data]\nroot = "d"\n[optim]\nlr = 1\n[model]\nunits = [1, 2, 3, 4]\n')
    config = load_config(path, ["train.epochs=7", "train.run=other run", "plan.max_canvases = 3"])
    assert config.data.root == "d"
    assert config.optim.lr == 1.0
    assert config.model.units == (1, 2, 3, 4)
    assert config.train.epochs == 7
    assert config.train.run == "other run"
    assert config.plan.max_canvases == 3


def test_what_is_written_is_read_back(tmp_path):
    path = write(tmp_path, '[data]\nroot = "a \\"b\\" \\\\ c"\n[augment]\ncrop = [8, 9]\n')
    config = load_config(path)
    assert load_config(write(tmp_path, to_toml(config))) == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[data]\nroot = 'd'\n[optim]\nlearning_rate = 1", "Unknown key `optim.learning_rate`"),
        ("[data]\nroot = 'd'\n[optim]\nmomentun = 1", "Did you mean `optim.momentum`"),
        ("[data]\nroot = 'd'\n[trian]\nepochs = 1", "Did you mean `train`"),
        ("[data]\n", "`data.root` is missing"),
        ("[optim]\nlr = 1", "`data` is missing"),
        ("data = 1", "`data` must be a section"),
        ("[data]\nroot = 1", "`data.root` is 1; it must be of type str"),
        ("[data]\nroot = 'd'\n[train]\nepochs = 1.5", "`train.epochs` is 1.5"),
        ("[data]\nroot = 'd'\n[train]\nepochs = true", "`train.epochs` is True"),
        ("[data]\nroot = 'd'\n[train]\nepochs = 0", "`train.epochs` is 0; it must be at least 1"),
        ("[data]\nroot = 'd'\n[train]\nseed = -1", "seed` is -1; it must be at least 0"),
        ("[data]\nroot = 'd'\n[optim]\nlr = nan", "lr` is nan; it must be a finite number"),
        ("[data]\nroot = 'd'\n[model]\noutput_stride = 12", "must be one of 8, 16, 32"),
        ("[data]\nroot = 'd'\n[model]\ndepth = 35", "must be one of 18, 34, 50, 101"),
        ("[data]\nroot = 'd'\n[model]\nunits = [1, 2]", "it must have 4"),
        (
            "[data]\nroot = 'd'\n[model]\nunits = [1, 2, 0, 1]",
            r"`model.units.2.` is 0; it must",
        ),
        ("[data]\nroot = 'd'\n[model]\nunits = 3", "must be a list"),
        ("[data]\nroot = 'd'\n[model]\ndilation_rule = 'previous'", "first_3x3"),
        ("[data]\nroot = 'd'\n[augment]\nmin_scale = 2.0", "below `augment.min_scale`"),
        ("[data]\nroot = 'd'\n[augment]\ncrop = [3]", "must be .height, width."),
        (
            "[data]\nroot = 'd'\n[augment]\ncrop = [0, 5]",
            r"`augment.crop.0.` is 0; it must",
        ),
        (
            "[data]\nroot = 'd'\n[pixels]\nstd = [1, 1, 0]",
            r"std.2.` is 0; it must be above 0",
        ),
        ("[data]\nroot = 'd'\n[pixels]\nmean = [1]", "three numbers"),
        ("[data]\nroot = 'd'\n[model]\nnum_channels = 1", "`pixels.mean` is .* of length 1"),
        ("[data]\nroot = 'd'\n[model]\nnum_channels = 0", "must be at least 1"),
        (
            "[data]\nroot = 'd'\n[model]\nnum_channels = 1\n"
            "[pixels]\nmean = [0]\nstd = [1]\nchannel_order = 'BGR'",
            '"BGR" is for three channels',
        ),
        ("[data]\nroot = 'd'\n[pixels]\nwhite = 100", "must be at least 255"),
        ("[data]\nroot = 'd'\nlayout = 'coco'", "one of auto, anysize, voc"),
        ("[data]\nroot = 'd'\nmasks = 'rgb'", "one of auto, index, colours"),
        ("[data]\nroot = 'd'\n[pixels]\nmax_value = 0", "pixels.max_value"),
        ("[data]\nroot = 'd'\nval_fraction = 1.0", "must be below 1"),
        ("[data]\nroot = 'd'\ntrain = 'a.txt'", "go together"),
        ("[data]\nroot = 'd'\nimages = \"\\u0000\"", "must not contain the character NUL"),
        ("[data]\nroot = 'd'\n[augment]\nmax_scale = inf", "must be a finite number"),
        ("[data]\nroot = 'd'\n[augment]\nmax_scale = 1000", "must be at most 100"),
        ("[data]\nroot = 'd'\n[augment]\ncontrast = 1.5", "must be at most 1"),
        ("[data]\nroot = 'd'\n[train]\nseed = 1000000000000000000000000", "must be at most 922"),
        ("[data]\nroot = 'd'\n[train]\nprefetch_steps = 10000000000", "must be at most 1000"),
        ("[data]\nroot = 'd'\n[optim]\nmomentum = -5", "must be at least 0"),
        ("[data]\nroot = 'd'\n[optim]\nmomentum = 1.0", "must be at most 0.999999"),
        ("[data]\nroot = 'd'\n[optim]\npower = nan", "must be a finite number"),
        (
            "[data]\nroot = 'd'\n[loss]\nclass_weights = [1, -1]",
            r"weights.1.` is -1; it must",
        ),
        ("[data]\nroot = 'd'\n[loss]\nclass_weights = [nan]", "must be a finite number"),
        ("[data]\nroot = 'd'\n[loss]\nclass_weights = [0, 0]", "are all 0"),
        ("[data", "cannot be read as TOML"),
        pytest.param("x = " + "[" * 100_000, "cannot be read as TOML", id="nested without end"),
        pytest.param("x = " + "1" * 5000, "cannot be read as TOML", id="a long number"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path, text, message):
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(path)
    assert str(path) in str(caught.value)


def test_a_wrong_override_is_refused(tmp_path):
    path = write(tmp_path, "[data]\nroot = 'd'")
    with pytest.raises(ConfigError, match=r"section\.key=value"):
        load_config(path, ["epochs=3"])
    with pytest.raises(ConfigError, match=r"Unknown key `train\.epoch`"):
        load_config(path, ["train.epoch=3"])
    with pytest.raises(ConfigError, match=r"`train\.epochs` is"):
        load_config(path, ["train.epochs=" + "1" * 5000])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"depth": 18, "stride_position": "first_1x1"}, "basic units, which have no 1x1"),
        ({"depth": 34, "basic_units": True}, "is for nets that `model.units` describes"),
        ({"depth": 19}, "must be one of 18, 34, 50"),
    ],
)
def test_basic_units_are_those_of_18_and_34_or_of_units(model, message):
    with pytest.raises(ConfigError, match=message):
        check_model(ModelConfig(**model), "run.toml")
    check_model(ModelConfig(depth=50, stride_position="first_1x1"), "run.toml")
    check_model(ModelConfig(units=(1, 1, 1, 1), basic_units=True), "run.toml")


def test_a_missing_file_says_what_to_do(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        load_config(tmp_path / "none.toml")


def test_a_table_of_json_lists_becomes_tuples():
    table = {"mean": [1, 2.5, 3], "channel_order": "BGR"}
    assert from_table(PixelConvention, table, "w").mean == (1.0, 2.5, 3.0)


def test_every_key_is_read_somewhere():
    """A setting that nothing reads is a promise that nothing keeps."""
    read = set()
    for path in SOURCE.rglob("*.py"):
        if path.name != "config.py":
            tree = ast.parse(path.read_text())
            read |= {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
            read |= {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)}
    keys = {
        key.name
        for section in dataclasses.fields(RunConfig)
        for key in dataclasses.fields(_class_of(section.type))
    }
    assert keys - read == set()


def _class_of(name):
    return vars(anysize.config)[name]


def test_every_key_is_in_the_reference_with_its_default():
    reference = (SOURCE.parents[1] / "docs" / "reference.md").read_text()
    for section in dataclasses.fields(RunConfig):
        part = reference.split(f"### `[{section.name}]`")[1].split("###")[0]
        for key in dataclasses.fields(_class_of(section.type)):
            default = "required"
            if (key.default, key.default_factory) != (dataclasses.MISSING,) * 2:
                text = to_toml(RunConfig(data=DataConfig(root="d"))).split(f"[{section.name}]")[1]
                line = next(t for t in text.splitlines() if t.startswith(f"{key.name} = "))
                default = f"`{line.split(' = ')[1]}`"
            assert f"| `{key.name}` | {default} | " in part
