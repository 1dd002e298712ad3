"""Someone's own net through all verbs, as processes."""

import shutil
import signal
from pathlib import Path

import pytest
from tests.cli.command import anysize
from tests.cli.test_commands import start, wait_for_steps
from tests.flow.runs import assert_same_results

NETS = Path(__file__).parents[1] / "models" / "small_nets.py"
RUN_TOML = """
[data]
root = "data"
[plan]
images_per_step = 2
max_canvases = 2
[model]
net = "nets:SmallUnet"
[model.arguments]
width = 16
dropout = 0.2
[optim]
kind = "adamw"
[train]
epochs = 2
precision = "float32"
log_every = 1
checkpoint_every = 2
"""


@pytest.fixture
def folder(workspace):
    shutil.copy(NETS, workspace / "nets.py")
    (workspace / "run.toml").write_text(RUN_TOML)
    return workspace


def test_a_net_is_trained_killed_resumed_and_used_by_every_verb(folder):
    anysize("train", "run.toml", "--set", "train.run=whole", cwd=folder)
    process = start("train", "run.toml", cwd=folder)
    wait_for_steps(folder / "run", 3)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert "Resuming after step" in anysize("train", "run.toml", "--resume", cwd=folder)
    assert_same_results(folder / "whole", folder / "run")

    assert "stripe" in anysize("evaluate", "run", cwd=folder)
    anysize("report", "run", "--examples", 1, cwd=folder)
    assert "data:image" in (folder / "run" / "report.html").read_text()

    said = anysize("export", "run", "-o", "net.onnx", cwd=folder)
    assert "of the range of the logits" in said

    # Weights that left their run folder are someone else's until a person says otherwise.
    (folder / "nets.py").write_text(f"print('code of the net')\n{NETS.read_text()}")
    shutil.copy(folder / "run" / "weights.safetensors", folder / "w.safetensors")
    (folder / "run.toml").unlink()
    use = ("predict", "w.safetensors", "data/images/s01.png", "-o", "out")
    said = anysize(*use, cwd=folder, code=2)
    assert "nets:SmallUnet(width=16, dropout=0.2)" in said
    assert "--trust-net" in said
    assert "code of the net" not in said
    assert "code of the net" in anysize(*use, "--trust-net", cwd=folder)
    assert (folder / "out" / "masks" / "s01.png").is_file()


@pytest.mark.slow
def test_the_doctor_diagnoses_a_run(folder):
    said = anysize("doctor", "run.toml", "--seconds", 10, cwd=folder, code=1)
    assert "forward" in said
