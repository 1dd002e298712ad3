"""Systems without the Unix modules fcntl and resource, such as Windows, as processes."""

import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

HIDE = """
import sys


class Hide:
    def find_spec(self, name, path=None, target=None):
        if name in ("fcntl", "resource"):
            raise ModuleNotFoundError(name=name)


for name in ("fcntl", "resource"):
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Hide())
from anysize.cli import main

sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    root = tmp_path_factory.mktemp("workspace")
    for name in ("images", "masks"):
        (root / "data" / name).mkdir(parents=True)
    classes = "".join(f'[[class]]\nname = "c{i}"\ncolour = [{i}, 0, 0]\n' for i in range(2))
    (root / "data/classes.toml").write_text(classes)
    (root / "run.toml").write_text(
        '[data]\nroot = "data"\n[model]\nunits = [1, 1, 1, 1]\nbase_depth = 16\n'
        '[train]\nrun = "run"\nepochs = 1\nprecision = "float32"\n'
    )
    rng = np.random.default_rng(0)
    for i in range(4):
        Image.fromarray(rng.integers(0, 255, (32, 40, 3), np.uint8)).save(
            root / f"data/images/{i}.png"
        )
        Image.fromarray(rng.integers(0, 2, (32, 40), np.uint8)).save(root / f"data/masks/{i}.png")
    return root


def run(workspace, *arguments):
    command = [sys.executable, "-c", HIDE, *arguments]
    return subprocess.run(command, cwd=workspace, capture_output=True, text=True, check=False)


def test_every_step_of_the_main_job_runs(workspace):
    for arguments in (
        ("--help",),
        ("check", "data"),
        ("plan", "data"),
        ("train", "run.toml"),
        ("predict", "run", "data/images", "-o", "predictions"),
    ):
        done = run(workspace, *arguments)
        assert done.returncode == 0, done.stderr
    assert not (workspace / "run/.lock").exists()


def test_a_folder_in_use_is_still_refused(workspace):
    (workspace / "busy").mkdir()
    (workspace / "busy/.lock").write_text("")
    done = run(workspace, "train", "run.toml", "--set", "train.run=busy")
    assert done.returncode == 2
    assert "remove that file" in done.stderr
