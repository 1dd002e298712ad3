"""Writing files so that a reader, or a killed process, never meets half of one."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from anysize.errors import ConfigError

try:
    import fcntl
except ImportError:  # Windows has no such module.
    fcntl = None

LOCK_NAME = ".lock"

_KEPT = 40
"""Characters of a file's name that the name of its temporary file begins with."""

_NO_LOCKS_HERE = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def write_atomic(path: Path, data: bytes) -> None:
    """Writes a file whole or not at all, and durably.

    The bytes go to a temporary file beside the target and are synced; then it replaces the target,
    and the folder is synced. A process that is killed leaves the temporary file behind for
    `remove_unfinished`. A new file follows the umask.

    A link is followed, and its target is replaced; what is no regular file (a device, a FIFO) is
    written through.

    Raises:
        OSError: The disk is full or the folder cannot be written; names `path`, which is as it was.
    """
    with _naming(path):
        path = path.resolve() if path.is_symlink() else path
        if path.exists() and not path.is_file():
            with path.open("wb") as file:
                file.write(data)
            return
        handle, temporary = _open_temporary(path)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
                if fcntl is not None:
                    temporary.replace(path)  # While the lock is held, so that no one removes it.
            if fcntl is None:
                temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def _open_temporary(path: Path) -> tuple[int, Path]:
    """A new file beside `path`, locked as long as it is open, and its name."""
    while True:
        # Only the start of a name, which may be as long as names can be.
        temporary = path.parent / f".{path.name[:_KEPT]}.{secrets.token_hex(4)}.part"
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        if fcntl is None:
            return handle, temporary
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        if os.fstat(handle).st_nlink:
            return handle, temporary
        os.close(handle)  # Removed by `remove_unfinished` before it was locked.


def sync_folder(folder: Path) -> None:
    """Waits until the names in a folder are on disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_unfinished(folder: Path, name: str = "") -> None:
    """Removes the temporary files that killed processes left directly in a folder.

    Those that a living process is writing stay.

    Args:
        folder: Where to look; need not exist.
        name: Of the file that was to be written; empty for any.
    """
    ours = re.compile(
        rf"\.{re.escape(name[:_KEPT]) or f'.{{1,{_KEPT}}}'}\.[0-9a-f]{{8}}\.part", re.DOTALL
    )
    for path in folder.glob(".*.part"):
        if ours.fullmatch(path.name) and stat.S_ISREG(path.lstat().st_mode):
            with contextlib.suppress(OSError):
                _remove_if_left(path)


def _remove_if_left(path: Path) -> None:
    """Removes a temporary file that no process has open; OSError where one has."""
    if fcntl is None:
        path.unlink()  # Windows removes no open file.
        return
    handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
    finally:
        os.close(handle)


def append(handle: int, path: Path, data: bytes) -> None:
    """Appends to an open file, all of it or nothing.

    Raises:
        OSError: The disk is full; names `path`, which is as it was.
    """
    with _naming(path):
        length = os.fstat(handle).st_size
        written = 0
        try:
            while written < len(data):
                written += os.write(handle, data[written:])
        except OSError:
            os.ftruncate(handle, length)
            raise


@contextlib.contextmanager
def only_process_in(folder: Path) -> Iterator[None]:
    """Holds a folder against other processes that would write to it.

    The kernel lets go of the lock when the process ends, in whatever way; the lock file stays. On
    file systems without locks nothing is held.

    Raises:
        ConfigError: Another process holds it.
        OSError: The folder cannot be written.
    """
    if fcntl is None:
        with _only_creator_in(folder):
            yield
        return
    path = folder / LOCK_NAME
    if path.is_symlink():
        raise ConfigError(f"{path} is a link, which no run of Anysize makes. Remove it.")
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _NO_LOCKS_HERE:
                holder = os.pread(handle, 20, 0).strip()
                who = f"process {holder.decode()}" if holder.isdigit() else "another process"
                raise ConfigError(
                    f"{folder} is in use: {who} is training in it. Wait until it has ended, stop "
                    "it (it then writes a checkpoint), or set train.run to another folder."
                ) from None
        # Only for the message above, so a full disk may lose it.
        with contextlib.suppress(OSError):
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def _only_creator_in(folder: Path) -> Iterator[None]:
    """The same on systems without `flock`: whoever creates the file holds the folder.

    It is removed at the end, but a killed process leaves it behind.
    """
    path = folder / LOCK_NAME
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        raise ConfigError(
            f"{folder} is in use: {path} exists. If no process is training in it, for one was "
            "killed, remove that file; or set train.run to another folder."
        ) from None
    try:
        os.close(handle)
        yield
    finally:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Lets errors of writing name the file: a full disk is otherwise reported without one."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        error.filename2 = None
        raise
