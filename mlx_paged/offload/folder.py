"""OffloadFolder: a folder of segments within a quota, shared by processes and models.

::

    FOLDER/                     0700
      lock                      held while space is counted and taken, and to rename a segment
      3f0c.../                  a model and the layout of its cache
        1732838400-5d41....kv   a segment, 0600; its modification time is its last use
        ....tmp                 a segment being written, of its final size; its writer holds a lock

A process that needs space holds `lock`, counts all files, and deletes the segments that were used
least recently, of any model. So the quota holds for all processes together, and while segments are
written.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mlx_paged.offload.segments import SUFFIX, SegmentError, read_header

#: Free space of the file system that is left alone.
DEFAULT_RESERVE = 2 << 30

_TEMPORARY = ".tmp"
_LOCK = "lock"
_PAGE = 4096
# Left free of the quota, for directories and for what a file system adds.
_SLACK = 64 << 10


class File(NamedTuple):
    """A file of the folder.

    Attributes:
        num_bytes: Space that it takes.
        used_at: Time of its last use, in ns.
    """

    path: Path
    num_bytes: int
    used_at: int


class NoSpace(OSError):
    """The quota or the file system has no room for a segment."""


class OffloadFolder:
    """A folder of segments.

    Args:
        path: Is created if missing.
        quota: Maximum bytes of all files, of all models.
        reserve: Bytes of the file system to leave free.
        free_bytes: Returns the free bytes of the file system; for tests.

    Raises:
        OSError: The folder cannot be made or written.
    """

    def __init__(
        self,
        path: Path,
        quota: int,
        reserve: int = DEFAULT_RESERVE,
        *,
        free_bytes: Callable[[Path], int] | None = None,
    ) -> None:
        self.path = path
        self.quota = quota
        self.reserve = reserve
        self._free_bytes = free_bytes or _free_bytes
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(PermissionError):  # another user's
            path.chmod(0o700)

    def model(self, digest: bytes) -> Path:
        """Returns the folder of a model's segments; creates it if missing."""
        path = self.path / digest.hex()
        path.mkdir(mode=0o700, exist_ok=True)
        return path

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the lock of the folder against other processes and threads."""
        fd = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def files(self) -> list[File]:
        """All files below the folder."""
        found = []
        for folder, _, names in os.walk(self.path):
            for name in names:
                path = Path(folder, name)
                with contextlib.suppress(OSError):  # deleted meanwhile
                    stat = path.lstat()
                    num_bytes = max(-(-stat.st_size // _PAGE) * _PAGE, stat.st_blocks * 512)
                    found.append(File(path, num_bytes, stat.st_mtime_ns))
        return found

    def models_about(self) -> list[Mapping[str, Any]]:
        """What models of the folder are, in words, by their newest readable segments."""
        found = []
        for model in self.path.iterdir():
            paths = sorted(model.glob(f"*{SUFFIX}"), reverse=True) if model.is_dir() else []
            for path in paths[:3]:
                with contextlib.suppress(OSError, SegmentError):
                    found.append(read_header(path).about)
                    break
        return found

    def trim(self) -> None:
        """Deletes leftovers of killed writers, and segments until quota and reserve hold."""
        with self.locked():
            self._clean()
            with contextlib.suppress(NoSpace):  # by other files than segments
                self._make_room(0)

    def create(self, model: Path, num_bytes: int) -> tuple[int, Path]:
        """Creates a file of `num_bytes` bytes for a segment, deleting old ones to make room.

        Returns:
            Its descriptor, which the caller closes after `publish` or `discard`, and its path.

        Raises:
            NoSpace: There is not enough space even without older segments.
            OSError: The file cannot be made.
        """
        with self.locked():
            self._make_room(num_bytes)
            path = model / f"{time.time_ns()}-{secrets.token_hex(8)}{_TEMPORARY}"
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(fd, 0, num_bytes)
                else:
                    os.ftruncate(fd, num_bytes)
            except BaseException:
                os.close(fd)
                path.unlink(missing_ok=True)
                raise
            return fd, path

    def publish(self, fd: int, path: Path) -> Path:
        """Makes a written segment visible; returns its path."""
        os.fsync(fd)
        published = path.with_suffix(SUFFIX)
        # A file that is renamed between being listed and being measured would not be counted.
        with self.locked():
            path.rename(published)
        folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        return published

    def _clean(self) -> None:
        """Deletes files of writers that were killed: those hold no lock."""
        for path, _, _ in self.files():
            if path.suffix != _TEMPORARY:
                continue
            with contextlib.suppress(OSError):
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
                finally:
                    os.close(fd)

    def _make_room(self, num_bytes: int) -> None:
        """Deletes the least recently used segments until `num_bytes` more fit.

        Raises:
            NoSpace: They do not fit even so.
        """
        files = self.files()
        room = self.quota - _SLACK - sum(file.num_bytes for file in files)
        free = self._free_bytes(self.path) - self.reserve
        for file in sorted(files, key=lambda file: file.used_at):
            if num_bytes <= min(room, free):
                break
            if file.path.suffix == SUFFIX:
                with contextlib.suppress(FileNotFoundError):
                    file.path.unlink()
                room += file.num_bytes
                free += file.num_bytes
        if num_bytes > min(room, free):
            limit = "the quota" if room <= free else f"{self.reserve} bytes that stay free"
            raise NoSpace(f"{num_bytes} bytes do not fit within {limit}")


def _free_bytes(path: Path) -> int:
    stat = os.statvfs(path)
    return stat.f_bavail * stat.f_frsize
