"""SegmentWriter: collects blocks and writes them as segments, on its own thread."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mlx_paged.offload.folder import NoSpace, OffloadFolder
from mlx_paged.offload.segments import FULL_BYTES, Block, Header, layout
from mlx_paged.offload.warnings import Warnings

#: Bytes that may wait to be written.
MAX_STAGED_BYTES = 128 << 20
# A segment that is not full is written once nothing has come for this long (seconds).
_QUIET_SECONDS = 2.0
# After a failure, nothing is written for this long (seconds).
_PAUSE_SECONDS = 60.0

#: Called on the writer's thread with each new segment.
OnWritten = Callable[[Path, Header], None]


class SegmentWriter:
    """Writes blocks behind the back of the caller, who never waits unless it asks to.

    Args:
        folder: Where space is taken.
        model_folder: Where the segments go.
        model, about: See `segments.Header`.

    Attributes:
        num_bytes: Bytes of files written so far.
    """

    def __init__(
        self,
        folder: OffloadFolder,
        model_folder: Path,
        model: bytes,
        about: Mapping[str, Any],
        on_written: OnWritten,
        warnings: Warnings,
    ) -> None:
        self._folder = folder
        self._model_folder = model_folder
        self._model = model
        self._about = about
        self._on_written = on_written
        self._warnings = warnings
        self.num_bytes = 0
        self._staged: list[Block] = []
        self._names: set[tuple[bytes, int]] = set()  # of blocks staged or being written
        self._num_staged = 0  # bytes, with those being written
        self._last_add = 0.0
        self._flushes = self._closes = False
        self._paused_until = float("-inf")
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    @property
    def room(self) -> int:
        """Bytes that may be added now; 0 for a while after a failure."""
        if self.is_paused:
            return 0
        return MAX_STAGED_BYTES - self._num_staged

    @property
    def is_paused(self) -> bool:
        """True for a while after a failure: what is added is not written."""
        return time.monotonic() < self._paused_until

    def holds(self, digest: bytes, group: int) -> bool:
        """True if a block is about to be written."""
        return (digest, group) in self._names

    def add(self, block: Block) -> None:
        """Adds a block; its data must not change until it is released."""
        with self._changed:
            self._staged.append(block)
            self._names.add((block.digest, block.group))
            self._num_staged += block.data.nbytes
            self._last_add = time.monotonic()
            if self._thread is None:
                # A daemon: `close` waits for it, and a process that is killed must not.
                self._thread = threading.Thread(
                    target=self._run, name="mlx-paged-kv-writer", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()

    def wait_for_room(self, num_bytes: int, timeout: float) -> bool:
        """Waits until `num_bytes` may be added; returns False if that takes too long."""
        with self._changed:
            return self._changed.wait_for(lambda: self.is_paused or self.room >= num_bytes, timeout)

    def flush(self, timeout: float) -> bool:
        """Writes everything; returns False if that takes longer than `timeout` seconds."""
        with self._changed:
            self._flushes = True
            self._changed.notify_all()
            done = self._changed.wait_for(lambda: not self._num_staged, timeout)
            self._flushes = False
            return done

    def clear(self) -> None:
        """Drops what has not been begun to be written."""
        with self._changed:
            self._release(self._staged)
            self._staged.clear()

    def _release(self, blocks: list[Block]) -> None:
        self._num_staged -= sum(block.data.nbytes for block in blocks)
        self._names.difference_update((block.digest, block.group) for block in blocks)
        for block in blocks:
            block.on_released()
        self._changed.notify_all()

    def close(self, timeout: float = 30.0) -> None:
        """Writes everything and ends the thread."""
        thread = self._thread
        with self._changed:
            self._closes = True
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (batch := self._take()):
                    if self._closes:
                        return
                    quiet = _QUIET_SECONDS if self._staged else None
                    self._changed.wait(quiet)
            try:
                self._write(batch)
            except NoSpace as error:
                self._fail("space", "nothing is written: %s", error)
            except Exception as error:  # disk errors, out of memory: keep the thread
                self._fail("write", "cannot write to %s: %s", self._model_folder, error)
            with self._changed:
                self._release(batch)
            del batch  # its memory

    def _take(self) -> list[Block]:
        """Takes the blocks of the next segment; none if it should wait for more."""
        is_quiet = time.monotonic() - self._last_add >= _QUIET_SECONDS
        num_bytes, count = 0, 0
        while num_bytes < FULL_BYTES and count < len(self._staged):
            num_bytes += self._staged[count].data.nbytes
            count += 1
        is_full = num_bytes >= FULL_BYTES
        if not (is_full or is_quiet or self._flushes or self._closes):
            return []
        batch, self._staged = self._staged[:count], self._staged[count:]
        return batch

    def _write(self, batch: list[Block]) -> None:
        begin, header = layout(self._model, self._about, batch)
        fd, path = self._folder.create(self._model_folder, max(len(begin), header.num_bytes))
        try:
            _write_all(fd, memoryview(begin))
            for block in batch:
                _write_all(fd, block.data)
            published = self._folder.publish(fd, path)
        except BaseException:
            with contextlib.suppress(OSError):
                path.unlink()
            raise
        finally:
            os.close(fd)
        self.num_bytes += header.num_bytes
        self._on_written(published, header)

    def _fail(self, kind: str, text: str, *args: object) -> None:
        self._warnings.warn(kind, text, *args)
        self._paused_until = time.monotonic() + _PAUSE_SECONDS
        self.clear()


def _write_all(fd: int, data: memoryview) -> None:
    data = data.cast("B") if data.nbytes else memoryview(b"")
    while data:
        data = data[os.write(fd, data) :]
