"""The command: what a user types, sees and gets."""

import json
import tomllib

import pytest
from tests.doctor.test_diagnose import WAITING, a_step, measured, trial

from anysize.atomic_files import only_process_in
from anysize.cli.main import main
from anysize.doctor import measure as measure_module


@pytest.fixture
def recorded(monkeypatch):
    """Puts recorded measurements in the place of new ones."""

    def use(m):
        monkeypatch.setattr(measure_module, "measure", lambda subject, **_: m)

    return use


def doctor(*arguments, code):
    assert main(["doctor", *map(str, arguments)]) == code


SLOW = measured(
    settings={"train.checkpoint_every": 1},
    steps=WAITING,
    trials=(trial((("train.loader_threads", 2),), (0.7, 0.7, 0.7)),),
)


def test_findings_come_most_costly_first_and_the_exit_code_is_1(workspace, recorded, capsys):
    recorded(SLOW)
    doctor(workspace / "run.toml", code=1)
    said = capsys.readouterr().out
    assert said.index("1. waiting for data: 20.00 s an epoch") < said.index("2. checkpoints: 10.00")
    assert "change:   train.loader_threads = 2" in said
    assert "unaccounted" in said


def test_a_healthy_run_is_told_so_and_the_exit_code_is_0(workspace, recorded, capsys):
    recorded(measured())
    doctor(workspace / "run.toml", "--apply", code=0)
    said = capsys.readouterr().out
    assert "Healthy" in said
    assert "of the device's measured limit" in said
    assert "Nothing to apply" in said
    assert not (workspace / "run-faster.toml").exists()


def test_the_changes_go_to_a_new_file_and_a_rerun_says_what_came_of_them(
    workspace, recorded, capsys
):
    before = (workspace / "run.toml").read_text()
    recorded(SLOW)
    doctor(workspace / "run.toml", "--apply", code=1)
    out = workspace / "run-faster.toml"
    assert f"Wrote {out}" in capsys.readouterr().out
    assert (workspace / "run.toml").read_text() == before
    train = tomllib.loads(out.read_text())["train"]
    assert (train["loader_threads"], train["checkpoint_every"]) == (2, 10)
    recorded(measured())
    doctor(out, code=0)
    said = capsys.readouterr().out
    assert "an epoch took 67.31 s" in said
    assert "were expected; now it takes 37.70 s" in said


def test_a_file_is_named_and_never_written_over(workspace, recorded, capsys):
    recorded(SLOW)
    doctor(workspace / "run.toml", "--apply", workspace / "new.toml", code=1)
    assert (workspace / "new.toml").is_file()
    doctor(workspace / "run.toml", "--apply", workspace / "new.toml", code=2)
    assert "never overwritten" in capsys.readouterr().err


def test_the_json_holds_verdict_and_measurements(workspace, recorded):
    recorded(SLOW)
    doctor(workspace / "run.toml", "--json", workspace / "d.json", code=1)
    table = json.loads((workspace / "d.json").read_text())
    assert table["healthy"] is False
    assert table["findings"][0]["cause"] == "waiting for data"
    assert table["findings"][0]["settings"] == [["train.loader_threads", 2]]
    assert table["wall_s"] == pytest.approx(sum(seconds for _, seconds in table["stages"]))
    assert 0 < table["expected_s"] < table["wall_s"]
    assert table["before"] is None
    assert table["measurements"]["steps"][0]["stages"] == a_step(wait=2.0).stages


def test_bad_input_is_a_message(workspace, capsys):
    doctor(workspace / "nowhere", code=2)
    assert "There is no run in" in capsys.readouterr().err
    doctor(workspace / "nowhere.toml", code=2)
    assert "No such file" in capsys.readouterr().err
    doctor(workspace / "run.toml", "--seconds", "nan", code=2)
    assert "--seconds is nan" in capsys.readouterr().err
    (workspace / "run").mkdir()
    with only_process_in(workspace / "run"):
        doctor(workspace / "run.toml", code=2)
    assert "being trained at this moment" in capsys.readouterr().err
    (workspace / "data").rename(workspace / "moved")
    doctor(workspace / "run.toml", code=2)
    assert str(workspace / "data") in capsys.readouterr().err
    (workspace / "run.toml").write_text("[train\n")
    doctor(workspace / "run.toml", code=2)
    assert "cannot be read as TOML" in capsys.readouterr().err


def test_help_shows_examples(capsys):
    with pytest.raises(SystemExit):
        main(["doctor", "--help"])
    assert "anysize doctor run.toml" in capsys.readouterr().out
