import os

import pytest

from anysize.files import write_atomic


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
    with pytest.raises(OSError, match="No space left"):
        write_atomic(path, b"two")
    monkeypatch.undo()
    assert path.read_bytes() == b"one"
    assert [f.name for f in tmp_path.iterdir()] == ["a.bin"]
