"""Images and masks of other kinds through the commands: checked, trained on and predicted."""

import numpy as np
from PIL import Image
from tests.cli.command import anysize

RUN = """
[data]
root = "data"
mask_pattern = "{stem}_mask"
ids = { 0 = "ignore", 7 = "road", 300 = "car" }

[pixels]
float_range = [-1.0, 1.0]

[model]
units = [1, 1, 1, 1]
base_depth = 16
norm = "trained"

[train]
run = "run"
epochs = 1
precision = "float32"
"""


def test_float_tiffs_and_mapped_ids_from_init_to_prediction(tmp_path):
    rng = np.random.default_rng(0)
    for name in ("images", "masks"):
        (tmp_path / "data" / name).mkdir(parents=True)
    for i in range(4):
        pixels = rng.uniform(-1, 1, (40, 48)).astype(np.float32)
        Image.fromarray(pixels).save(tmp_path / f"data/images/{i}.tif")
        ids = rng.choice([0, 7, 300], (40, 48)).astype(np.uint16)
        Image.fromarray(ids).save(tmp_path / f"data/masks/{i}_mask.png")
    (tmp_path / "data/labels.txt").write_text("\n".join(f"n{i}" for i in range(301)))
    (tmp_path / "run.toml").write_text(RUN)
    anysize("init", "data", cwd=tmp_path)
    toml = (tmp_path / "data/classes.toml").read_text()
    assert [line for line in toml.splitlines() if line.startswith("name")] == [
        f'name = "n{i}"' for i in (0, 7, 300)
    ]
    (tmp_path / "data/classes.toml").write_text(
        '[[class]]\nname = "road"\ncolour = [9, 9, 9]\n[[class]]\nname = "car"\n'
        "colour = [0, 0, 142]\n"
    )
    said = anysize("check", "run.toml", cwd=tmp_path)
    assert "ignored" in said
    anysize("train", "run.toml", cwd=tmp_path)
    anysize("predict", "run", "data/images/0.tif", "-o", "out", cwd=tmp_path)
    mask = np.array(Image.open(tmp_path / "out/masks/0.png"))
    assert mask.shape == (40, 48)
    assert set(np.unique(mask)) <= {0, 1}
    # Without the range, the same files are refused by name, in training and in prediction.
    (tmp_path / "run.toml").write_text(RUN.replace("float_range = [-1.0, 1.0]", "white = 65535"))
    said = anysize("train", "run.toml", "--set", 'train.run="other"', cwd=tmp_path, code=2)
    assert ".tif has floating point values" in said
