"""SegmentIndex: finds the blocks of one model in its segments, also those of other processes."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from mlx_paged.offload.segments import SUFFIX, Header, Record, SegmentError, read_header
from mlx_paged.offload.warnings import Warnings

# Seconds between two looks for segments of other processes.
_LOOK_SECONDS = 1.0
# Seconds after which a use is noted again in the file's time.
_TOUCH_SECONDS = 60.0


class Segment:
    """A segment, and its open descriptor while blocks of it are read.

    Attributes:
        keys: Keys of its blocks in the index.
        is_ours: True if this process wrote it.
    """

    def __init__(self, path: Path, *, is_ours: bool) -> None:
        self.path = path
        self.is_ours = is_ours
        self.keys: list[int] = []
        self._lock = threading.Lock()
        self._fd: int | None = None
        self._num_users = 0
        self._touched_at = 0.0

    def open(self) -> int:
        """Opens the file for one more user; returns its descriptor.

        Raises:
            OSError: It cannot be opened.
        """
        with self._lock:
            if self._fd is None:
                self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            self._num_users += 1
            return self._fd

    def close(self) -> None:
        """Ends one `open`."""
        with self._lock:
            self._num_users -= 1
            if self._num_users == 0 and self._fd is not None:
                os.close(self._fd)
                self._fd = None

    def touch(self) -> None:
        """Notes a use, so that the segment is deleted later."""
        now = time.monotonic()
        if now - self._touched_at >= _TOUCH_SECONDS:
            self._touched_at = now
            with contextlib.suppress(OSError):
                os.utime(self.path)


class SegmentIndex:
    """Maps (digest, group) to a key, and a key to its place. Any thread may call it.

    Args:
        folder: Of the model's segments.
        model: Digest of the model and its cache.
        block_bytes: Bytes of a block of each group.
        first_key: Keys are numbered from here.
    """

    def __init__(
        self,
        folder: Path,
        model: bytes,
        block_bytes: Sequence[int],
        warnings: Warnings,
        *,
        first_key: int = 1,
    ) -> None:
        self._folder = folder
        self._model = model
        self._block_bytes = tuple(block_bytes)
        self._warnings = warnings
        self._lock = threading.RLock()
        self._next_key = first_key
        self._keys: dict[tuple[bytes, int], int] = {}
        self._places: dict[int, tuple[Segment, Record]] = {}
        self._segments: dict[str, Segment] = {}  # by file name
        self._refused: set[str] = set()  # names of files that are no segments of this model
        self._looked_at = float("-inf")

    def __len__(self) -> int:
        """Number of blocks."""
        return len(self._keys)

    @property
    def num_bytes(self) -> int:
        """Bytes of the blocks."""
        with self._lock:
            return sum(record.length for _, record in self._places.values())

    def key(self, digest: bytes, group: int) -> int:
        """The key of a block, or 0."""
        return self._keys.get((digest, group), 0)

    def place(self, key: int) -> tuple[Segment, Record] | None:
        """The place of a block; None if it is gone."""
        return self._places.get(key)

    def look(self, *, now: bool = False) -> None:
        """Looks for new and deleted segments, at most once a second unless `now`."""
        time_now = time.monotonic()
        if not now and time_now - self._looked_at < _LOOK_SECONDS:
            return
        self._looked_at = time_now
        with self._lock:  # or a segment that is written meanwhile would look deleted
            self._look()

    def _look(self) -> None:
        try:
            names = {name for name in os.listdir(self._folder) if name.endswith(SUFFIX)}
        except OSError as error:
            self._warnings.warn("read", "cannot read %s: %s", self._folder, error)
            names = set()
        for name in sorted(names - self._segments.keys() - self._refused):
            self._read(name)
        for name in self._segments.keys() - names:
            self.forget(self._segments[name])

    def _read(self, name: str) -> None:
        path = self._folder / name
        try:
            if path.is_symlink():
                raise SegmentError("it is a link")
            header = read_header(path)
            if header.model != self._model:
                raise SegmentError("it belongs to another model")
            self.add(path, header)
        except FileNotFoundError:
            pass  # deleted meanwhile
        except (SegmentError, OSError) as error:
            self._refused.add(name)
            self._warnings.warn("damaged", "%s is ignored: %s", path, error)

    def add(self, path: Path, header: Header, *, is_ours: bool = False) -> None:
        """Adds the blocks of a segment.

        Raises:
            SegmentError: A block does not have the size of its group.
        """
        sizes = self._block_bytes
        if any(r.group >= len(sizes) or r.length != sizes[r.group] for r in header.records):
            raise SegmentError("its blocks do not have the sizes of this model's")
        with self._lock:
            if path.name in self._segments:
                self._segments[path.name].is_ours |= is_ours
                return
            segment = self._segments[path.name] = Segment(path, is_ours=is_ours)
            for record in header.records:
                if (record.digest, record.group) in self._keys:
                    continue  # another process has written it, too
                key = self._next_key
                self._next_key += 1
                self._keys[record.digest, record.group] = key
                self._places[key] = segment, record
                segment.keys.append(key)

    def forget(self, segment: Segment) -> None:
        """Forgets the blocks of a segment, whose file may be gone."""
        with self._lock:
            if self._segments.pop(segment.path.name, None) is None:
                return
            for key in segment.keys:
                _, record = self._places.pop(key)
                del self._keys[record.digest, record.group]

    def refuse(self, segment: Segment) -> None:
        """Forgets a damaged segment for good, and deletes its file."""
        self._refused.add(segment.path.name)
        self.forget(segment)
        with contextlib.suppress(OSError):
            segment.path.unlink()

    def refuse_ours(self) -> int:
        """Deletes all segments that this process has written; returns their number."""
        with self._lock:
            ours = [segment for segment in self._segments.values() if segment.is_ours]
        for segment in ours:
            self.refuse(segment)
        return len(ours)
