"""`anysize bench` as a process: bad input, and Ctrl-C."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from tests.cli.command import ANYSIZE, anysize

TINY = ("--units", "1,1,1,1", "--base-depth", "16", "--megapixels", "0.001", "0.004")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--data", "nowhere"), "nowhere"),
        (("--rounds", "0"), "--rounds is 0"),
        (("--images", "-3"), "--images is -3"),
        (("--images-per-step", "9"), "--images-per-step is 9"),
        (("--megapixels", "nan", "nan"), "--megapixels is nan nan"),
        (("--megapixels", "0.1", "99999"), "may be 16 at most"),
        (("--data", ".", "--megapixels", "0.1", "0.2"), "Leave one out"),
        (("--units", "1,1"), "`model.units` has 2 numbers"),
        (("--units", "a,b"), "invalid"),
        (("--net", "no:net"), "No module named 'no'"),
        (("--net", "a:b", "--depth", "101"), "is a setting of the ResNets"),
        (("--net", "a:b", "--argument", "width"), "--argument takes KEY=VALUE"),
        (("--net", "a:b", "--peers", "x"), "Leave one out"),
        (("--json", "no/such/folder/b.json"), "its folder does not exist"),
        (("--json", "."), "is a folder"),
        (("--plot", "b.jpg"), "must end with .png"),
        (("--json", "b.png", "--plot", "b.png"), "same file"),
        (("--peers", "no-python"), "is no program"),
        (("--device", "cuda"), "PyTorch finds none"),
    ],
)
def test_bad_input_is_told_before_anything_is_measured(tmp_path, options, message):
    if "cuda" in options and Path("/dev/nvidia0").exists():
        pytest.skip("there is a GPU")
    said = anysize("bench", "--images", "8", *options, cwd=tmp_path, code=2)
    assert message in said
    assert "starting" not in said
    assert not list(tmp_path.iterdir())


def children_of(pid):
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.append(int(path.parent.name))
    return found


def wait_for(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at /proc")
@pytest.mark.parametrize(
    "moment", ["starting", pytest.param("first visits done", marks=pytest.mark.slow)]
)
def test_ctrl_c_ends_all_processes(tmp_path, moment):
    process = subprocess.Popen(
        [ANYSIZE, "bench", *TINY, "--images", "12", "--json", "b.json"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
        # A test run in the background ignores Ctrl-C, which children inherit.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        assert process.stdout
        while moment not in (line := process.stdout.readline()):
            assert line, process.communicate()
        wait_for(lambda: len(children_of(process.pid)) > 3)
        children = children_of(process.pid)
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, said
    assert said == "anysize: Interrupted.\n"
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children))
    assert not list(tmp_path.iterdir())


def test_help_names_what_it_measures(tmp_path):
    said = re.sub(r"\s+", " ", anysize("bench", "--help", cwd=tmp_path))
    assert "What images of many sizes cost" in said
    assert "anysize bench --full --data photos" in said
