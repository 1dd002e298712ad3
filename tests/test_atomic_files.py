import errno
import multiprocessing
import os
import signal
import stat
import subprocess
import sys

import pytest

from anysize.atomic_files import only_process_in, remove_unfinished, write_atomic
from anysize.errors import ConfigError
from anysize.training.events import EventLog, forget_events_after, read_events


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "a.bin"
    write_atomic(path, b"one")
    write_atomic(path, b"two")
    assert path.read_bytes() == b"two"
    assert [f.name for f in tmp_path.iterdir()] == ["a.bin"]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "a.bin"
    write_atomic(path, b"one")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as caught:
        write_atomic(path, b"two")
    monkeypatch.undo()
    assert caught.value.filename == str(path)
    assert path.read_bytes() == b"one"
    assert [f.name for f in tmp_path.iterdir()] == ["a.bin"]


def test_bytes_are_on_disk_before_the_name_and_the_name_before_the_return(tmp_path, monkeypatch):
    path = tmp_path / "a.bin"
    did = []
    real_sync = os.fsync

    def sync(handle):
        kind = "folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "bytes"
        did.append((kind, path.exists(), len(list(tmp_path.glob(".a.bin.*.part")))))
        real_sync(handle)

    monkeypatch.setattr(os, "fsync", sync)
    write_atomic(path, b"one")
    assert did == [("bytes", False, 1), ("folder", True, 0)]


def hold(folder, ready):
    with only_process_in(folder):
        ready.set()
        signal.pause()


def test_a_folder_is_held_until_its_process_is_killed(tmp_path):
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=hold, args=(tmp_path, ready), daemon=True)
    process.start()
    assert ready.wait(60)
    with (
        pytest.raises(ConfigError, match=f"in use: process {process.pid} is training"),
        only_process_in(tmp_path),
    ):
        pass
    process.kill()
    process.join()
    with only_process_in(tmp_path):
        assert (tmp_path / ".lock").read_text() == f"{os.getpid()}\n"


def test_a_folder_on_a_file_system_without_locks_is_used_without(tmp_path, monkeypatch):
    def none(*_):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr("anysize.atomic_files.fcntl.flock", none)
    with only_process_in(tmp_path):
        pass


EVENT = {"event": "resume", "step": 3}


def test_an_event_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "events.jsonl"
    code = (
        "import resource, sys, pathlib\n"
        "from anysize.training.events import EventLog\n"
        "log = EventLog(pathlib.Path(sys.argv[1]))\n"
        "log.write({'event': 'resume', 'step': 3})\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (60, 60))\n"
        "try:\n    log.write({'event': 'x' * 90, 'step': 4})\n"
        "except OSError as error:\n    print(error.strerror, error.filename)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, path], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"File too large {path}\n"
    assert read_events(path) == [EVENT]
    assert path.read_bytes().endswith(b"}\n")


def test_a_line_that_a_kill_cut_off_is_passed_over_and_healed(tmp_path):
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log.write(EVENT)
        log.write({**EVENT, "step": 4})
        log.write({**EVENT, "step": 5})
    whole = path.read_bytes()
    for cut in range(1, 30):
        path.write_bytes(whole[:-cut])
        steps = [e["step"] for e in read_events(path)]
        assert steps == ([3, 4, 5] if cut == 1 else [3, 4])
        forget_events_after(path, 4)
        with EventLog(path) as log:
            log.write({**EVENT, "step": 6})
        assert [e["step"] for e in read_events(path)] == [3, 4, 6]


def test_evaluations_are_synced(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", synced.append)
    with EventLog(tmp_path / "events.jsonl") as log:
        log.write(EVENT)
        assert not synced
        log.write({"event": "evaluate", "step": 3})
        assert len(synced) == 1


def test_a_link_is_followed_to_its_target(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_bytes(b"old")
    link.symlink_to(target)
    write_atomic(link, b"new")
    assert link.is_symlink()
    assert target.read_bytes() == b"new"


def test_a_fifo_is_written_through(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    write_atomic(fifo, b"scores")
    assert os.read(reader, 10) == b"scores"
    os.close(reader)
    assert fifo.is_fifo()


@pytest.mark.parametrize(("umask", "mode"), [(0o077, 0o600), (0o022, 0o644), (0o002, 0o664)])
def test_a_new_file_follows_the_umask(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        write_atomic(tmp_path / "file", b"")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == mode


def test_a_name_may_be_as_long_as_names_can_be(tmp_path):
    write_atomic(tmp_path / ("n" * 255), b"1")
    assert (tmp_path / ("n" * 255)).read_bytes() == b"1"


def test_a_lock_that_is_a_link_is_refused_and_its_target_kept(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / ".lock").symlink_to(victim)
    with pytest.raises(ConfigError, match="is a link"), only_process_in(tmp_path):
        pass
    assert victim.read_text() == "precious"


def test_only_what_a_killed_process_left_is_removed(tmp_path):
    """Exactly our names, of regular files that no living process writes."""
    ours = tmp_path / ".plan.json.0123abcd.part"
    others = [".plan.json.part", "plan.json.0123abcd.part", ".plan.json.0123ABCD.part", ".part"]
    for name in (*others, ours.name, ".other.json.0123abcd.part"):
        (tmp_path / name).write_bytes(b"half")
    os.mkfifo(tmp_path / ".fifo.0123abcd.part")
    (tmp_path / ".link.0123abcd.part").symlink_to(tmp_path / ".part")
    remove_unfinished(tmp_path, "plan.json")
    assert not ours.exists()
    assert (tmp_path / ".other.json.0123abcd.part").exists()
    remove_unfinished(tmp_path)
    kept = [*others, ".fifo.0123abcd.part", ".link.0123abcd.part"]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(kept)
    remove_unfinished(tmp_path / "nowhere")


WRITER = """
import os, sys
from pathlib import Path
from anysize.atomic_files import write_atomic
os.fsync = lambda handle: (print("writing", flush=True), sys.stdin.read())
write_atomic(Path(sys.argv[1]), b"whole")
"""


def test_what_another_process_is_writing_stays(tmp_path):
    target = tmp_path / "plan.json"
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, target],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert writer.stdout.readline() == "writing\n"
    remove_unfinished(tmp_path)
    writer.communicate("")
    assert writer.returncode == 0
    assert target.read_bytes() == b"whole"
    killed = subprocess.Popen(
        [sys.executable, "-c", WRITER, target], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    killed.stdout.readline()
    killed.kill()
    killed.communicate()
    assert len(list(tmp_path.iterdir())) == 2
    remove_unfinished(tmp_path)
    assert list(tmp_path.iterdir()) == [target]
