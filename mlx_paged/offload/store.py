"""BlockStore: the blocks of one model on disk, by prefix and group."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

from mlx_paged.offload.folder import OffloadFolder
from mlx_paged.offload.index import Segment, SegmentIndex
from mlx_paged.offload.reader import BlockReader
from mlx_paged.offload.segments import Block, Header, SegmentError
from mlx_paged.offload.warnings import Warnings
from mlx_paged.offload.writer import SegmentWriter

#: Keys are numbered from here, so that they differ from those of host memory.
FIRST_KEY = 1 << 48


class _Pin(NamedTuple):
    segment: Segment
    fd: int


class BlockStore:
    """Reads and writes blocks of one model; never raises for a fault of the disk.

    Args:
        model: Digest of the model and the layout of its cache.
        about: The model in words, for people.
        block_bytes: Bytes of a block of each group.

    Attributes:
        num_read_bytes: Bytes read so far.
        num_damaged: Blocks that could not be read.
    """

    def __init__(
        self,
        folder: OffloadFolder,
        model: bytes,
        about: Mapping[str, Any],
        block_bytes: Sequence[int],
    ) -> None:
        self.folder = folder
        self._about = about
        self.warnings = Warnings()
        self.num_read_bytes = self.num_damaged = 0
        path = folder.model(model)
        folder.trim()
        self._index = SegmentIndex(path, model, block_bytes, self.warnings, first_key=FIRST_KEY)
        self._index.look(now=True)
        self._writer = SegmentWriter(folder, path, model, about, self._written, self.warnings)
        self._reader = BlockReader()
        self._pins: dict[int, _Pin] = {}
        self._num_pins: dict[int, int] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of the blocks that are known."""
        return self._index.num_bytes

    @property
    def has_other_formats(self) -> bool:
        """True if only blocks of the same model in another format are known."""
        name = self._about.get("model")
        return self.is_empty and any(
            about.get("model") == name for about in self.folder.models_about()
        )

    # Finding.

    @property
    def is_empty(self) -> bool:
        """True if no block is known."""
        return len(self._index) == 0

    def look(self) -> None:
        """Looks for segments of other processes, if it has not done so recently."""
        self._index.look()

    def key(self, digest: bytes, group: int) -> int:
        """The key of a block, or 0."""
        return self._index.key(digest, group)

    def has(self, digest: bytes, group: int) -> bool:
        """True if a block is on disk, or will be."""
        return self._writer.holds(digest, group) or self._index.key(digest, group) > 0

    # Reading.

    def pin(self, key: int) -> None:
        """Keeps a block readable until `unpin`, even if its file is deleted."""
        self._num_pins[key] = self._num_pins.get(key, 0) + 1
        if self._num_pins[key] > 1:
            return
        place = self._index.place(key)
        if place is None:
            return
        segment, _ = place
        try:
            self._pins[key] = _Pin(segment, segment.open())
            segment.touch()
        except OSError:
            self._index.forget(segment)  # another process has deleted it

    def unpin(self, key: int) -> None:
        """Ends one `pin`."""
        self._num_pins[key] -= 1
        if not self._num_pins[key]:
            del self._num_pins[key]
            pin = self._pins.pop(key, None)
            if pin is not None:
                pin.segment.close()

    def unpin_all(self) -> None:
        """Ends all pins, because their KV manager was given up."""
        self._num_pins.clear()
        while self._pins:
            _, pin = self._pins.popitem()
            pin.segment.close()

    def read(self, key: int, out: memoryview, done: threading.Event) -> Future[bool] | None:
        """Begins to read a pinned block; None if it is gone.

        Args:
            done: Set afterwards.
        """
        pin, place = self._pins.get(key), self._index.place(key)
        if pin is None or place is None:
            return None
        segment = pin.segment
        fd = segment.open()  # for as long as the read takes: the pin may end before

        def finished() -> None:
            segment.close()
            done.set()

        return self._reader.read(fd, place[1], out, finished)

    def note_read(self, key: int, *, is_good: bool) -> None:
        """Counts a read. A damaged block takes its segment along."""
        place = self._index.place(key)
        if is_good:
            self.num_read_bytes += 0 if place is None else place[1].length
            return
        self.num_damaged += 1
        if place is not None:
            segment, _ = place
            self.warnings.warn("damaged", "%s is damaged and was deleted", segment.path)
            self._index.refuse(segment)

    # Writing.

    @property
    def room(self) -> int:
        """Bytes that may be written now without a wait."""
        return self._writer.room

    @property
    def is_paused(self) -> bool:
        """True for a while after a failed write."""
        return self._writer.is_paused

    @property
    def num_written_bytes(self) -> int:
        """Bytes of files written so far."""
        return self._writer.num_bytes

    def wait_for_room(self, num_bytes: int, timeout: float) -> bool:
        """Waits until `num_bytes` may be written."""
        return self._writer.wait_for_room(num_bytes, timeout)

    def write(
        self,
        digest: bytes,
        group: int,
        data: memoryview,
        on_released: Callable[[], None] = lambda: None,
    ) -> None:
        """Writes a block soon. `data` must not change until `on_released` is called."""
        self._writer.add(Block(digest, group, data, on_released))

    def _written(self, path: Path, header: Header) -> None:
        try:
            self._index.add(path, header, is_ours=True)
        except SegmentError as error:
            raise AssertionError(f"{path}: {error}") from error

    def flush(self, timeout: float = 30.0) -> bool:
        """Writes everything that `write` took; returns False if that takes too long."""
        return self._writer.flush(timeout)

    def distrust(self) -> None:
        """Deletes what this process has written, because its contents may be wrong."""
        self._writer.clear()
        self._writer.flush(30.0)
        count = self._index.refuse_ours()
        if count:
            self.warnings.warn("nan", "deleted %d segments of this process: it met a NaN", count)

    def close(self) -> None:
        """Writes everything and ends the threads."""
        self._writer.close()
        self._reader.close()
