"""The command as a process: what a user types, sees and gets."""

import json
import re
import resource
import signal
import subprocess
import time

import numpy as np
import pytest
from PIL import Image
from tests.cli.command import ANYSIZE, anysize

from anysize.training.events import read_events

VERBS = (
    "demo",
    "check",
    "plan",
    "convert",
    "train",
    "evaluate",
    "predict",
    "export",
    "doctor",
    "why",
    "report",
)


def start(*arguments, cwd):
    return subprocess.Popen(
        [ANYSIZE, *arguments], cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for_steps(run, num_steps):
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        path = run / "events.jsonl"
        if path.is_file():
            steps = [e["step"] for e in read_events(path) if e["event"] == "train"]
            if steps and steps[-1] >= num_steps:
                return
        time.sleep(0.05)
    raise AssertionError("the run did not get under way")


def parts(folder):
    return [p for p in folder.rglob("*") if p.name.endswith(".part")]


@pytest.mark.parametrize("verb", VERBS)
def test_help_shows_an_example(tmp_path, verb):
    said = anysize(verb, "--help", cwd=tmp_path)
    assert re.search(rf"examples?:\n  anysize {verb}", said)
    assert f"anysize {verb}" in anysize("--help", cwd=tmp_path)


def test_the_whole_job(workspace):
    said = anysize("plan", "data", "-o", "plan.json", "--max-canvases", 3, cwd=workspace)
    assert "14" in said
    assert "waste" in said
    said = anysize("plan", "run.toml", cwd=workspace)
    assert "waste" in said
    said = anysize("train", "run.toml", "--set", "train.epochs=2", cwd=workspace)
    assert "valid MP/s" in said
    assert "first visit of canvas" in said
    assert "wait" in said
    said = anysize("evaluate", "run", "--json", "m.json", cwd=workspace)
    for name in ("ground", "disc", "stripe"):
        assert name in said
    scores = json.loads((workspace / "m.json").read_text())
    assert scores["miou"] == pytest.approx(
        json.loads((workspace / "run/metrics.json").read_text())["miou"], abs=1e-6
    )
    anysize("predict", "run", "data/images", "-o", "out", "--probabilities", cwd=workspace)
    for path in (workspace / "data/images").iterdir():
        with Image.open(path) as image, Image.open(workspace / "out/masks" / path.name) as mask:
            assert mask.size == image.size
            assert mask.mode == "P"
            array = np.load(workspace / "out/probabilities" / f"{path.stem}.npy")
            assert array.shape == (3, *mask.size[::-1])
        assert (workspace / "out/overlays" / path.name).is_file()
    Image.effect_noise((301, 243), 60).save(workspace / "large.png")
    tiled = anysize("predict", "run", "large.png", "-o", "t", "--max-pixels", 30_000, cwd=workspace)
    assert "overlapping tiles" in tiled
    with Image.open(workspace / "t/masks/large.png") as mask:
        assert mask.size == (301, 243)
    said = anysize("report", "run", "--examples", 2, cwd=workspace)
    page = (workspace / "run/report.html").read_text()
    assert page.count("<figure>") == 3, "all that were held out"
    assert "worst 1: " in page
    assert "best 1: " in page
    assert "<h2>Confusion" in page
    assert "<h2>Predictions</h2>" in page
    assert "report.html" in said
    assert "data:image/png;base64," in page
    assert "data:image/jpeg;base64," in page


def test_a_script_may_train_in_silence_or_read_events(workspace):
    train = ("train", "run.toml", "--set", "plan.max_canvases=1", "--set", "train.epochs=1")
    assert anysize(*train, "--set", "train.run=a", "--quiet", cwd=workspace) == ""
    assert (workspace / "a/weights.safetensors").is_file()
    said = anysize(*train, "--set", "train.run=b", "--progress", cwd=workspace)
    events = [json.loads(line) for line in said.splitlines()]
    assert events == read_events(workspace / "b/events.jsonl")
    last = [e for e in events if e["event"] == "train"][-1]
    assert (last["step"], last["num_steps"], last["eta_s"]) == (3, 3, 0)
    said = anysize(*train, "--set", "train.run=a", "--quiet", cwd=workspace, code=2)
    assert "is not empty" in said, "errors are said in any case"


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_a_stop_checkpoints_and_the_run_goes_on(workspace, number):
    process = start("train", "run.toml", "--set", "train.epochs=400", cwd=workspace)
    wait_for_steps(workspace / "run", 4)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Go on with --resume" in errors
    assert "Traceback" not in errors
    assert not parts(workspace)
    checkpoint = max((workspace / "run/checkpoints").iterdir())
    step = int(checkpoint.stem.split("-")[1])
    epochs = step // 3 + 1
    said = anysize(
        "train", "run.toml", "--resume", "--set", f"train.epochs={epochs}", cwd=workspace
    )
    assert f"Resuming after step {step}" in said


def test_a_killed_run_resumes_from_its_last_checkpoint(workspace):
    arguments = ("train", "run.toml", "--set", "train.checkpoint_every=2")
    process = start(*arguments, "--set", "train.epochs=400", cwd=workspace)
    wait_for_steps(workspace / "run", 6)
    process.kill()
    process.communicate()
    newest = max(p.name for p in (workspace / "run/checkpoints").glob("step-*"))
    epochs = int(newest.split("-")[1].split(".")[0]) // 3 + 1
    said = anysize(*arguments, "--resume", "--set", f"train.epochs={epochs}", cwd=workspace)
    assert "Resuming after step" in said
    events = read_events(workspace / "run/events.jsonl")
    steps = [e["step"] for e in events if e["event"] == "train"]
    assert steps == sorted(set(steps))


def test_a_full_disk_is_a_message_and_nothing_is_half_written(workspace):
    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))

    said = anysize("train", "run.toml", cwd=workspace, code=2, preexec_fn=limit)
    assert "File too large" in said
    assert not parts(workspace)
    assert not list((workspace / "run").glob("*.safetensors"))


def spoil_image(root):
    path = root / "images/s03.png"
    path.write_bytes(path.read_bytes()[:200])
    return "s03.png"


def garbage_image(root):
    (root / "images/s03.png").write_bytes(b"no image at all")
    return "s03.png"


def remove_mask(root):
    (root / "masks/s03.png").unlink()
    return "s03"


def other_size(root):
    Image.new("L", (5, 5)).save(root / "masks/s03.png")
    return "s03.png"


def wrong_label(root):
    path = root / "masks/s03.png"
    mask = np.array(Image.open(path))
    mask[0, 0] = 77
    Image.fromarray(mask).save(path)
    return "77"


def no_classes(root):
    (root / "classes.toml").unlink()
    return "classes.toml"


def empty_split(root):
    (root / "train.txt").write_text("")
    (root / "val.txt").write_text("s01\n")
    with (root.parent / "run.toml").open("a") as file:
        file.write("")
    text = (root.parent / "run.toml").read_text()
    text = text.replace('root = "data"', 'root = "data"\ntrain = "train.txt"\nval = "val.txt"')
    (root.parent / "run.toml").write_text(text)
    return "train.txt"


@pytest.mark.parametrize(
    "fault",
    [spoil_image, garbage_image, remove_mask, other_size, wrong_label, no_classes, empty_split],
)
def test_bad_data_is_named(workspace, fault):
    named = fault(workspace / "data")
    said = anysize("train", "run.toml", "--set", "train.seed=3", cwd=workspace, code=2)
    assert named in said
    assert not parts(workspace)


def test_predict_goes_on_past_a_bad_image_and_names_it(workspace):
    anysize("train", "run.toml", "--set", "train.epochs=1", cwd=workspace)
    (workspace / "data/images/bad.jpg").write_bytes(b"\xff\xd8nothing")
    said = anysize("predict", "run", "data/images", "-o", "out", cwd=workspace, code=2)
    assert "bad.jpg" in said
    assert len(list((workspace / "out/masks").iterdir())) == 14


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", "none.toml"), "No such file"),
        (("train", "run.toml", "--set", "optim.momentun=1"), "Did you mean `optim.momentum`"),
        (("train", "run.toml", "--resume"), "no run to resume"),
        (("evaluate", "nowhere"), "nowhere"),
        (("predict", "nowhere", "data/images", "-o", "out"), "nowhere"),
        (("plan", "nowhere"), "nowhere"),
        (("plan", "data", "--max-canvases", "0"), "at least 1"),
        (("report", "nowhere"), "nowhere"),
    ],
)
def test_wrong_arguments_are_one_line(workspace, arguments, message):
    said = anysize(*arguments, cwd=workspace, code=2)
    assert message in said
    assert len(said.strip().splitlines()) == 1


def test_a_gpu_that_is_not_there(workspace):
    environment = {"CUDA_VISIBLE_DEVICES": ""}
    said = anysize(
        "train", "run.toml", "--set", "train.device=cuda", cwd=workspace, code=2, env=environment
    )
    assert "A GPU was asked for" in said
