"""Arms in processes of their own: they answer, fail and die in so many words."""

import os
import signal
import sys

import pytest

from anysize.bench.arms import Arm
from anysize.bench.slim import SlimWorker, require_peer
from anysize.bench.summary import BenchError
from anysize.bench.worker import NetWorker
from anysize.config import ModelConfig
from anysize.errors import ConfigError
from anysize.geometry import Canvas, Layout, Placement

TINY = ModelConfig(units=(1, 1, 1, 1), base_depth=16)
IMAGE = Layout(Canvas(1, 40, 50), (Placement(0, 0, 0, 40, 50),))


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_worker_answers_fails_by_name_and_dies_by_name():
    worker = NetWorker(Arm("plain", "all", "float32"), TINY, "cpu")
    try:
        worker.wait_until_ready()
        assert worker.step((IMAGE,)) > 0
        assert worker.step_within((IMAGE,), 60.0) is not None
        assert worker.step_within((IMAGE,), 0.0) is None
        assert worker.flops_a_pixel(IMAGE) > 0
        assert worker.limit_flops_s(0.01) > 0
        assert worker.peak_memory_bytes() > 50e6
        with pytest.raises(BenchError, match='arm "plain, all sizes" failed: '):
            worker.step((Layout(Canvas(1, 0, 50), ()),))
        assert worker.step((IMAGE,)) > 0
        pid = worker._process.pid
        assert pid is not None
        assert os.getpgid(pid) == pid != os.getpgid(0)
        os.kill(pid, signal.SIGINT)
        assert worker.step((IMAGE,)) > 0
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(BenchError, match='arm "plain, all sizes" died of SIGKILL'):
            worker.step((IMAGE,))
    finally:
        worker.close()
    assert not is_alive(pid)


def test_a_net_that_cannot_be_built_is_named():
    worker = NetWorker(Arm("mosaic", "all", "float32"), TINY, "no such device")
    try:
        with pytest.raises(BenchError, match='arm "mosaic, all sizes" failed: RuntimeError'):
            worker.wait_until_ready()
    finally:
        worker.close()


def python_that(tmp_path, code):
    """A program in the place of a Python with tf_slim."""
    (tmp_path / "peer.py").write_text(f"import json, sys, time\n{code}\n")
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path / "peer.py"} "$@"\n')
    program.chmod(0o755)
    return program


SLIM = Arm("tf_slim", "all", "float32")


def test_tf_slim_is_spoken_to_in_lines_of_json(tmp_path):
    program = python_that(
        tmp_path,
        "print('{}', flush=True)\n"
        "for line in sys.stdin:\n"
        "    ((h, w),) = json.loads(line)\n"
        "    print(json.dumps({'seconds': [h / w], 'memory': 123}), flush=True)",
    )
    worker = SlimWorker(SLIM, TINY, program)
    try:
        worker.wait_until_ready()
        assert worker.step((IMAGE,)) == 0.8
        assert worker.peak_memory_bytes() == 123
    finally:
        worker.close()
    assert worker._process.returncode == -signal.SIGKILL


def test_tf_slim_that_dies_is_named_with_its_last_words(tmp_path):
    program = python_that(tmp_path, "print('{}', flush=True)\nsys.exit('no such op')")
    worker = SlimWorker(SLIM, TINY, program)
    try:
        worker.wait_until_ready()
        with pytest.raises(BenchError, match=r'"tf_slim, all sizes" died.*It said: no such op'):
            worker.step((IMAGE,))
    finally:
        worker.close()


def test_a_peer_that_cannot_be_is_told_before_anything_is_measured(tmp_path):
    whole = ModelConfig()
    with pytest.raises(ConfigError, match="is no program"):
        require_peer(tmp_path / "nowhere", whole)
    with pytest.raises(ConfigError, match="has no tf_slim"):
        require_peer(python_that(tmp_path, "sys.exit(1)"), whole)
    with pytest.raises(ConfigError, match="64 channels"):
        require_peer(python_that(tmp_path, ""), TINY)
    require_peer(python_that(tmp_path, ""), whole)
