"""Hostile files, odd names and odd terminals, met by the command as a process."""

import json
import os
import pty
import re
import resource
import struct
import subprocess

import numpy as np
import pytest
from PIL import Image
from tests.cli.command import ANYSIZE, anysize
from tests.cli.test_commands import start
from tests.flow.runs import events_of, move, run

EVIL = "x\x1b]0;owned\x1b\\y"
"""A name that sets the title of a terminal."""

LONGER = ("--resume", "--set", "train.epochs=3", "--set", "optim.schedule=constant")
PLANNED = ("--set", "plan.file=plan.json", "--set", "plan.images_per_step=2")


@pytest.fixture(scope="module")
def done(tmp_path_factory, make_workspace):
    """A run of one epoch that may be copied."""
    workspace = make_workspace(tmp_path_factory.mktemp("done"))
    run(workspace, "train.epochs=1", "optim.schedule=constant")
    return workspace


@pytest.fixture
def workspace(done, tmp_path):
    return move(done, tmp_path / "workspace")


def rename_images(data, names):
    """Gives images and masks other names, which may be bytes."""
    old = sorted(p.name for p in (data / "images").iterdir())
    for before, name in zip(old, names, strict=False):
        for folder in ("images", "masks"):
            to = os.fsencode(data / folder) + b"/" + os.fsencode(name) + b".png"
            (data / folder / before).rename(os.fsdecode(to))


def test_names_of_all_kinds_work_in_every_verb(workspace):
    top = workspace.parent / "set [old] a[b=c] a\x7fb $x$"
    workspace.rename(top)
    names = [EVIL, b"caf\xe9", "A" * 241, "[red]b", "\u202eb", "new\nline"]
    rename_images(top / "data", names)
    text = (top / "data/classes.toml").read_text()
    (top / "data/classes.toml").write_text(text.replace('"disc"', '"[/disc] $_{x$"'))
    base = f"{top.name}/"
    out = ""
    for arguments in (
        ("check", base + "data"),
        ("plan", base + "data/images", "-o", base + "p.json", "--max-canvases", 2),
        ("train", base + "run.toml", *PLANNED, "--set", "train.run=named"),
        ("evaluate", base + "named", "--data", base + "data"),
        ("predict", base + "named", base + "data/images", "-o", base + "out"),
        ("report", base + "named", "--examples", 2),
        ("init", base + "data/", "-o", base + "x.toml"),
    ):
        out += anysize(*arguments, cwd=top.parent)
    assert not re.search("[\x1b\x7f\u202e\ud800-\udfff]", out)
    assert f"Done. The run is in {top.parent}/set [old] a[b=c] a\\x7fb $x$/named." in out
    assert "[/disc] $_{x$" in out
    assert "images/x\\x1b]0;owned\\x1b\\y.png (" in out
    assert "caf\\udce9.png" in out
    assert "[red]b.png" in out
    masks = [os.fsencode(p.name) for p in (top / "out/masks").iterdir()]
    assert {os.fsencode(name) + b".png" for name in names} <= set(masks)
    assert len(masks) == 14
    Image.new("RGB", (5, 5)).save(top / "data/images" / f"{EVIL}2.png")
    (top / "data/images" / f"{EVIL}2.png").write_bytes(b"")
    out = anysize("plan", "data/images", cwd=top, code=2)
    out += anysize("check", "data", cwd=top, code=1)
    out += anysize("predict", "named", "data/images", "-o", "out2", cwd=top, code=2)
    assert "\x1b" not in out
    assert out.count("\\x1b]0;owned") >= 3


def test_a_folder_whose_name_is_not_utf8_is_refused_before_work_begins(workspace):
    top = workspace.rename(workspace.parent / os.fsdecode(b"caf\xe9"))
    said = anysize("train", "run.toml", "--set", "train.run=other", cwd=top, code=2)
    assert "caf\\udce9/data is not valid UTF-8, as TOML files are. Rename the folder." in said
    assert not (top / "other").exists()


def test_a_weights_file_that_describes_a_huge_net_is_refused_in_little_memory(workspace):
    def limit():
        resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))

    for model in ({"units": [1000] * 4, "base_depth": 4096}, {"units": [1, 1, 1, 1]}):
        header = {
            "__metadata__": {
                "format": "anysize-weights-2",
                "model": json.dumps(model),
                "pixels": "{}",
            },
            **{
                f"t{i}": {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]}
                for i in range(8)
            },
        }
        text = json.dumps(header).encode()
        (workspace / "w.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(32))
        options = ("--set", "train.weights=w.safetensors", "--set", "train.run=other")
        said = anysize("train", "run.toml", *options, cwd=workspace, code=2, preexec_fn=limit)
        assert re.search(r"w\.safetensors (describes a net of 4000 units|is not of)", said)


def test_an_image_that_memory_does_not_hold_is_named(workspace):
    data = workspace / "data"
    path = data / "images/s03.png"
    size = (9_000, 9_000)
    Image.fromarray(np.zeros((*size, 3), np.uint8)).save(path, compress_level=1)
    Image.fromarray(np.zeros(size, np.uint8)).save(data / "masks/s03.png", compress_level=1)

    def limit():
        resource.setrlimit(resource.RLIMIT_AS, (700 << 20, 700 << 20))

    done = subprocess.run(
        [ANYSIZE, "check", "data", "--max-pixels", "100000000"],
        cwd=workspace,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=limit,
        env={"OPENBLAS_NUM_THREADS": "1", "PATH": os.defpath},
    )
    said = done.stdout + done.stderr
    assert done.returncode in (1, 2)
    assert re.search(r"[Mm]emory .*s03\.png", said), said
    assert "Traceback" not in said


def test_the_report_takes_no_script_from_a_run(workspace):
    path = workspace / "run/metrics.json"
    table = json.loads(path.read_text())
    path.write_text(json.dumps({**table, "step": "<script>alert(1)</script>"}))
    said = anysize("report", "run", "--examples", 0, cwd=workspace, code=2)
    assert "metrics.json is damaged" in said
    scores = {f"<script>{name}": value for name, value in table["iou"].items()}
    path.write_text(json.dumps({**table, "iou": scores}))
    anysize("report", "run", "--examples", 0, cwd=workspace)
    page = (workspace / "run/report.html").read_text()
    assert "<script" not in page
    assert "&lt;script&gt;" in page


def test_a_flipped_bit_in_the_weights_is_noticed(workspace):
    path = workspace / "run/weights.safetensors"
    data = bytearray(path.read_bytes())
    data[-400] ^= 0x80
    path.write_bytes(data)
    said = anysize("evaluate", "run", cwd=workspace, code=2)
    assert "weights.safetensors is damaged: its checksum does not match" in said


def left(folder, name):
    path = folder / f".{name}.0123abcd.part"
    path.write_bytes(b"half")
    return path


def test_what_a_killed_command_left_is_removed_at_its_next_start(workspace):
    (workspace / "out/masks").mkdir(parents=True)
    own = [workspace / ".notes.part", workspace / ".other.json.0123abcd.part"]
    for path in own:
        path.write_bytes(b"the user's")
    for arguments, folder, name in (
        (("plan", "data", "-o", "p.json", "--max-canvases", 1), workspace, "p.json"),
        (("check", "data", "--json", "c.json"), workspace, "c.json"),
        (("evaluate", "run", "--json", "m.json"), workspace, "m.json"),
        (("export", "run", "-o", "model.onnx"), workspace, "model.onnx"),
        (("predict", "run", "data/images", "-o", "out"), workspace / "out/masks", "s03.png"),
        (("report", "run", "--examples", 0), workspace / "run", "report.html"),
        (("init", "data", "-o", "x.toml"), workspace, "x.toml"),
        (("train", "run.toml", *PLANNED, *LONGER), workspace / "run/checkpoints", "step-1"),
    ):
        path = left(folder, name)
        anysize(*arguments, cwd=workspace)
        assert not path.exists(), arguments
    assert all(path.exists() for path in own)


def test_json_on_standard_output_is_all_that_stands_there(workspace):
    for arguments in (("check", "data", "--json", "-"), ("evaluate", "run", "--json", "-")):
        done = subprocess.run(
            [ANYSIZE, *arguments], cwd=workspace, capture_output=True, text=True, check=True
        )
        assert isinstance(json.loads(done.stdout), dict)
    assert not (workspace / "-").exists()


@pytest.mark.parametrize("streams", [(0,), (0, 1, 2)])
def test_closed_standard_streams_do_not_end_training(workspace, streams):
    def close():
        for number in streams:
            os.close(number)

    done = subprocess.run(
        [ANYSIZE, "train", "run.toml", *PLANNED, *LONGER],
        cwd=workspace,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        preexec_fn=close,
    )
    assert done.returncode == 0, done.stderr
    assert events_of(workspace / "run", "evaluate")[-1]["epoch"] == 3


def test_a_reader_that_goes_away_does_not_end_training(workspace):
    with start("train", "run.toml", *PLANNED, *LONGER, cwd=workspace) as process:
        process.stdout.readline()
        process.stdout.close()
        errors = process.stderr.read()
    assert process.returncode == 0, errors
    assert "Nobody reads standard output any more; going on without it." in errors
    assert "Traceback" not in errors
    assert events_of(workspace / "run", "evaluate")[-1]["epoch"] == 3


def test_the_end_of_input_at_a_question_is_a_no(workspace):
    for kind in ("images", "masks"):
        path = workspace / f"data/{kind}/s00.png"
        (workspace / f"data/{kind}/later [old].png").write_bytes(path.read_bytes())
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [ANYSIZE, "train", "run.toml", *PLANNED, *LONGER],
        cwd=workspace,
        stdin=slave,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    os.write(master, b"\x04")  # Ctrl-D
    output, errors = process.communicate(timeout=120)
    os.close(master)
    os.close(slave)
    assert process.returncode == 2, errors
    assert b"later [old]" in output
    assert b"Nothing was done." in errors
    assert b"Traceback" not in errors
