"""Private folders: temporary folders that do not outlast their process for long.

A process that is killed cannot remove its folder, so the next one to make a folder does. Each
process keeps its folders locked; the system unlocks them when it ends, however it ends. Only
folders of the same user that are unlocked are removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "mlx-paged-run-"  # of nothing else, since such folders are removed
# Precedes the name until the folder is locked, so that no other process removes it.
_UNLOCKED = "new-"
# Descriptors of this process's folders, which hold the locks.
_locks: dict[Path, int] = {}


def make() -> Path:
    """Returns a new folder that only this user may enter, and removes those of dead processes.

    Its path is short, because a Unix socket's is limited to about 100 bytes.

    Raises:
        OSError: It cannot be made.
    """
    _remove_left()
    new = Path(tempfile.mkdtemp(prefix=_UNLOCKED + _PREFIX))
    lock = -1
    try:
        lock = os.open(new, os.O_RDONLY | os.O_DIRECTORY)
        with contextlib.suppress(OSError):  # A file system without locks: nothing is removed.
            fcntl.flock(lock, fcntl.LOCK_EX)
        path = new.with_name(new.name.removeprefix(_UNLOCKED))
        new.rename(path)
    except BaseException:
        if lock >= 0:
            os.close(lock)
        new.rmdir()
        raise
    _locks[path] = lock
    return path


def remove(path: Path) -> None:
    """Removes a folder that `make` returned, and everything in it; does nothing with others."""
    lock = _locks.pop(path, None)
    if lock is not None:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


@contextlib.contextmanager
def temporary() -> Iterator[Path]:
    """Makes a folder, as `make` does, and removes it at the end of the block."""
    path = make()
    try:
        yield path
    finally:
        remove(path)


def _remove_left() -> None:
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # It is none of ours, or another process removes it.
            _remove_unless_locked(path)


def _remove_unless_locked(path: Path) -> None:
    """Raises `OSError` if it is no folder, or a process has locked it."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(folder).st_uid == os.getuid():
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(folder)
