"""`anysize check` as a process."""

import json
import shutil
import signal
import subprocess

import numpy as np
import pytest
from PIL import Image
from tests.cli.command import ANYSIZE, anysize


def parts(folder):
    return [p for p in folder.rglob("*") if p.name.endswith(".part")]


def test_help_shows_examples(tmp_path):
    said = anysize("check", "--help", cwd=tmp_path)
    assert "examples:\n  anysize check data" in said
    assert "anysize check data" in anysize("--help", cwd=tmp_path)


def test_a_clean_folder_exits_with_0(workspace):
    for what in ("data", "run.toml"):
        said = anysize("check", what, cwd=workspace)
        assert "14 images" in said
        assert "no faults, no warnings." in said


def wrong_label(root):
    path = root / "masks/s03.png"
    mask = np.array(Image.open(path))
    mask[0, 0] = 77
    Image.fromarray(mask).save(path)
    return path.name


def remove_mask(root):
    (root / "masks/s03.png").unlink()
    return "s03.png"


def other_size(root):
    path = root / "masks/s03.png"
    Image.fromarray(np.array(Image.open(path))[:-1]).save(path)
    return path.name


def garbage_image(root):
    (root / "images/s03.png").write_bytes(b"no image at all")
    return "s03.png"


def rotated(root):
    path = root / "images/s03.png"
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.open(path).save(path, exif=exif)
    return "s03.png"


def test_a_fault_exits_with_1_and_a_warning_with_0(workspace):
    named = wrong_label(workspace / "data")
    said = anysize("check", "data", cwd=workspace, code=1)
    assert named in said
    assert "77 (1 pixel)" in said
    assert "What to do: correct the ids" in said
    path = workspace / "data/masks/s03.png"
    Image.fromarray(np.zeros_like(np.array(Image.open(path)))).save(path)
    said = anysize("check", "data", cwd=workspace)
    assert "one_class: 1 warning" in said


def test_json_goes_to_a_file_or_alone_to_standard_output(workspace):
    wrong_label(workspace / "data")
    said = anysize("check", "data", "--json", cwd=workspace, code=1)
    table = json.loads(said)
    assert [f["kind"] for f in table["findings"]] == ["values"]
    said = anysize("check", "data", "--json", "check.json", cwd=workspace, code=1)
    assert "Wrote check.json" in said
    assert json.loads((workspace / "check.json").read_text()) == table


@pytest.mark.parametrize("spoil", [remove_mask, other_size, garbage_image, rotated])
def test_train_refuses_with_the_same_words(workspace, spoil):
    named = spoil(workspace / "data")
    table = json.loads(anysize("check", "run.toml", "--json", cwd=workspace, code=1))
    (message,) = {f["message"] for f in table["findings"] if f["severity"] == "fault"}
    assert named in message
    said = anysize("train", "run.toml", cwd=workspace, code=2)
    assert message in said
    assert not (workspace / "run").exists()


def test_train_refuses_images_above_the_budget_with_the_same_words(workspace):
    setting = "plan.max_pixels_per_step=4500"
    said = anysize("train", "run.toml", "--set", setting, cwd=workspace, code=2)
    arguments = ("check", "run.toml", "--max-pixels", 4500, "--json")
    table = json.loads(anysize(*arguments, cwd=workspace, code=1))
    messages = [f["message"] for f in table["findings"] if f["severity"] == "fault"]
    assert messages
    for message in messages[:10]:
        assert message in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere",), "nowhere"),
        (("none.toml",), "No such file"),
        (("data", "--max-pixels", "0"), "at least 1"),
        (("data/images",), "classes.toml"),
    ],
)
def test_wrong_arguments_are_one_line(workspace, arguments, message):
    said = anysize("check", *arguments, cwd=workspace, code=2)
    assert message in said
    assert len(said.strip().splitlines()) == 1


def many_photos(root):
    """Enough to be interrupted; to be stored upright, each must be encoded."""
    rng = np.random.default_rng(0)
    exif = Image.Exif()
    exif[0x0112] = 3
    noise = rng.integers(0, 256, (400, 500, 3), dtype=np.uint8)
    Image.fromarray(noise).save(root / "a.jpg", exif=exif)
    Image.fromarray(rng.integers(0, 3, (400, 500), dtype=np.uint8)).save(root / "a.png")
    for folder in ("images", "masks"):
        shutil.rmtree(root / "data" / folder)
        (root / "data" / folder).mkdir()
    for i in range(240):
        shutil.copy(root / "a.jpg", root / f"data/images/p{i}.jpg")
        shutil.copy(root / "a.png", root / f"data/masks/p{i}.png")


def test_an_interrupted_check_leaves_nothing(workspace):
    many_photos(workspace)
    process = subprocess.Popen(
        [ANYSIZE, "check", "data"],
        cwd=workspace,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("check: "):
            break
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Interrupted" in errors
    assert "Traceback" not in errors
    assert not parts(workspace)
