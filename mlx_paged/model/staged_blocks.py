"""StagedBlockBytes: reads and writes blocks through the stream of a device with its own memory.

Reads and writes are batched into a few operations, which the stream orders with the steps. A call
waits for a running step only if it moves very many blocks::

      host     begin_reads  launch 8            collect(7)           launch 9    collect(8)
      device   ... step 7 ][ gather ][ step 8                       ][ step 9
                                   '-> pinned memory, complete by the end of step 8

Blocks that step 8 reuses may be read until it is launched, since the gather comes before it.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mlx_paged import ops
from mlx_paged.model.block_bytes import BlockBytes, Bytes, NoAccessError, OnRead, Rows
from mlx_paged.model.layout import KVCacheGroupSpec
from mlx_paged.model.paged_model import PagedModel

# Bytes of blocks per transfer, which bounds pinned memory. Its buffers also hold the block ids, and
# their size is the next power of two.
_TRANSFER_BYTES = (32 << 20) - (64 << 10)
# Maximum writes in flight: the host prepares one while the device takes the other.
_MAX_WRITES = 2
# Maximum reads in flight. More are requested only while no sequence runs, so waiting is fine.
_MAX_READS = 8
# Threads that copy blocks out of pinned memory: one core copies a few gigabytes per second, where a
# GPU sends tens. Fewer bytes are not worth waking them.
_COPY_THREADS = min(4, max(1, (os.cpu_count() or 1) // 4))
_MIN_PARALLEL_BYTES = 4 << 20
# An attention block is written as 8 tokens of heads of at most 512 words, see `_Words`.
_TOKENS = 8
_MAX_HEAD = 512
# Words of the "values" that `ops.write_kv` also writes; this is the minimum.
_NO_VALUES = 8


class _Read(NamedTuple):
    block: int
    out: Bytes
    on_read: OnRead | None


class _Reading(NamedTuple):
    """Reads of a group in flight.

    Attributes:
        host: ``[num_reads, num_bytes / 4]`` int32, in memory that the host reads once it is
            evaluated.
        step: The step that was launched next.
    """

    host: mx.array
    reads: Sequence[_Read]
    step: int


class _Words:
    """A view of a pool in a form that `ops.write_kv` takes.

    Whole blocks are written as raw words with any contents (such as packed codes and scales): a
    block counts as a few "tokens" whose "keys" are words.

    Attributes:
        array: ``[blocks, 8, num_heads, head_dim]``.
        num_tokens: Tokens of a block, or 1 for a state slot.
    """

    def __init__(self, rows: Rows) -> None:
        pool, row_bytes = rows.pool, rows.pool.nbytes // rows.num_rows
        if rows.num_rows != pool.shape[0]:  # states: a slot counts as a token already
            self.array, self.num_tokens = pool, 1
        else:
            word = mx.float32 if row_bytes % (_TOKENS * 8 * 4) == 0 else mx.float16
            width, rest = divmod(row_bytes, _TOKENS * word.size)
            dim = next((d for d in range(_MAX_HEAD, 0, -8) if width % d == 0), 0)
            if rest or not dim:
                raise NoAccessError(
                    f"the keys of a block and a layer have {row_bytes} bytes, which is no multiple "
                    f"of {_TOKENS * 8 * 2}; with block_size 32 it is"
                )
            words = pool.reshape(rows.num_rows, -1).view(word)
            self.array = words.reshape(rows.num_rows, _TOKENS, width // dim, dim)
            self.num_tokens = _TOKENS
        blocks, tokens, num_heads, _ = self.array.shape
        self.dtype = self.array.dtype
        self.beside_shape = blocks, tokens, num_heads, _NO_VALUES

    def rows_of(self, data: mx.array) -> mx.array:
        """Cuts ``[1, num_blocks, row_bytes / 4]`` int32 into the "keys" of tokens."""
        _, _, num_heads, dim = self.array.shape
        return data.view(self.dtype).reshape(-1, num_heads, dim)


class _Run(NamedTuple):
    """Parts of a block with equal sizes and distances, such as the keys of all layers.

    One operation splits them.

    Attributes:
        parts: Their indexes among the parts of the block.
        begin, step: Offset of the first part in a block, and distance to the next one, in words of
            4 bytes.
        width: Words of each part.
    """

    parts: Sequence[int]
    begin: int
    step: int
    width: int

    def taken_from(self, data: mx.array) -> list[mx.array]:
        """Returns ``[1, num_blocks, width]`` int32 for each part, of blocks
        ``[num_blocks, num_bytes / 4]``."""
        (num_blocks, num_words), count = data.shape, len(self.parts)
        parts = mx.as_strided(
            data, (count, num_blocks, self.width), (self.step, num_words, 1), self.begin
        )
        return list(mx.split(mx.contiguous(parts), count))


def _runs_of(parts: Sequence[Rows]) -> list[_Run]:
    """Divides the parts of a block into as few runs as their order allows."""
    by_size: dict[int, list[int]] = {}
    for index, part in enumerate(parts):
        by_size.setdefault(part.end - part.begin, []).append(index)
    runs = []
    for size, indices in by_size.items():
        while indices:
            begins = [parts[index].begin for index in indices]
            step, count = (begins[1] - begins[0] if len(begins) > 1 else size), 1
            while count < len(begins) and begins[count] - begins[count - 1] == step:
                count += 1
            runs.append(_Run(indices[:count], begins[0] // 4, step // 4, size // 4))
            indices = indices[count:]
    return runs


class StagedBlockBytes(BlockBytes):
    """Blocks in memory that only the device reads and writes.

    Raises:
        NoAccessError: See `BlockBytes`; also if the blocks have a size that cannot be written.
    """

    def __init__(
        self,
        model: PagedModel,
        groups: Sequence[Sequence[KVCacheGroupSpec]],
        companion: PagedModel | None = None,
    ) -> None:
        super().__init__(model, groups, companion)
        self._to_read: dict[int, list[_Read]] = {}
        self._to_write: dict[int, list[tuple[int, Bytes]]] = {}
        self._reading: deque[_Reading] = deque()
        self._writing: deque[list[mx.array]] = deque()
        self._words: list[list[_Words]] = []
        self._runs: list[list[_Run]] = []
        self._beside: dict[tuple[tuple[int, ...], mx.Dtype], mx.array] = {}
        self._current()
        self._copiers = ThreadPoolExecutor(_COPY_THREADS, thread_name_prefix="mlx-paged-kv-copier")
        self._compile()

    def _on_new_pools(self) -> None:
        self._words = [[_Words(rows) for rows in group] for group in self._rows]
        self._runs = [_runs_of(group) for group in self._rows]
        self._beside = {}

    def _compile(self) -> None:
        """Reads the padding block of each group and writes it back, which compiles all kernels."""
        for group, size in enumerate(self.num_bytes):
            if size:
                block = np.empty(size, dtype=np.uint8)
                self.read(group, 0, block)
                self.collect()
                self.write(group, 0, block)
        self.begin_writes()

    # Reads.

    def read(self, group: int, block: int, out: Bytes, on_read: OnRead | None = None) -> None:
        if self._current()[group]:
            self._to_read.setdefault(group, []).append(_Read(block, out, on_read))
        elif on_read is not None:  # full attention of a model without it has no bytes
            on_read()

    def begin_reads(self, step: int) -> None:
        to_read, self._to_read = self._to_read, {}
        for group, reads in to_read.items():
            batch = max(1, _TRANSFER_BYTES // max(1, self.num_bytes[group]))
            for first in range(0, len(reads), batch):
                if len(self._reading) >= _MAX_READS:
                    self._end(self._reading.popleft())
                part = reads[first : first + batch]
                host = self._gather(group, part)
                mx.async_eval(host)  # type: ignore[no-untyped-call]
                self._reading.append(_Reading(host, part, step))

    def _gather(self, group: int, reads: Sequence[_Read]) -> mx.array:
        [blocks] = ops.upload(np.array([read.block for read in reads], dtype=np.int32))
        parts = [
            rows.pool.reshape(rows.num_rows, -1).view(mx.int32)[blocks]
            for rows in self._current()[group]
        ]
        return ops.to_host(mx.concatenate(parts, axis=1))

    def collect(self, evaluated_step: int | None = None) -> None:
        if evaluated_step is None:
            self.begin_reads(0)
        while self._reading and (evaluated_step is None or self._reading[0].step <= evaluated_step):
            self._end(self._reading.popleft())

    def _end(self, reading: _Reading) -> None:
        """Waits for reads, and hands their bytes over."""
        host, reads, _ = reading
        mx.eval(host)
        rows = np.frombuffer(host, dtype=np.uint8).reshape(len(reads), -1)  # type: ignore[call-overload]
        outs = [read.out for read in reads]
        if host.nbytes >= _MIN_PARALLEL_BYTES and len(reads) > 1:
            # Copies release the interpreter's lock.
            for _ in self._copiers.map(np.copyto, outs, rows):
                pass
        else:
            for out, row in zip(outs, rows, strict=True):
                np.copyto(out, row)
        for read in reads:
            if read.on_read is not None:
                read.on_read()

    # Writes.

    def write(self, group: int, block: int, data: Bytes) -> None:
        if self._current()[group]:
            self._to_write.setdefault(group, []).append((block, data))

    def begin_writes(self) -> None:
        to_write, self._to_write = self._to_write, {}
        for group, writes in to_write.items():
            batch = max(1, _TRANSFER_BYTES // max(1, self.num_bytes[group]))
            for first in range(0, len(writes), batch):
                self._scatter(group, writes[first : first + batch])

    def _scatter(self, group: int, writes: Sequence[tuple[int, Bytes]]) -> None:
        """Begins to write blocks of a group; waits for earlier writes if there are many."""
        while len(self._writing) >= _MAX_WRITES:
            mx.eval(self._writing.popleft())
        numbers = np.array([block for block, _ in writes], dtype=np.int32)
        blocks, *uploaded = ops.upload(numbers, *(data.view(np.int32) for _, data in writes))
        data = mx.stack(uploaded)
        slots: dict[int, mx.array] = {}  # by tokens of a block
        nothing: dict[tuple[Any, ...], mx.array] = {}  # by dtype and shape
        written: list[mx.array] = []
        self._current()
        for run in self._runs[group]:
            for part, taken in zip(run.parts, run.taken_from(data), strict=True):
                words = self._words[group][part]
                count, keys = words.num_tokens, words.rows_of(taken)
                if count not in slots:
                    tokens = mx.arange(count, dtype=mx.int32)
                    slots[count] = (blocks[:, None] * count + tokens).reshape(-1)
                shape = *keys.shape[:2], _NO_VALUES
                if (words.dtype, shape) not in nothing:
                    nothing[words.dtype, shape] = mx.zeros(shape, words.dtype)
                values, beside = nothing[words.dtype, shape], self._beside_of(words)
                # In place: the results have the memory of the pools, and are not needed.
                written += ops.write_kv(words.array, beside, keys, values, slots[count])
        mx.async_eval(written)  # type: ignore[no-untyped-call]
        self._writing.append(written)

    def _beside_of(self, words: _Words) -> mx.array:
        """Returns the unused pool of "values" for a pool of words."""
        key = words.beside_shape, words.dtype
        if key not in self._beside:
            self._beside[key] = ops.allocate_pool(*words.beside_shape, words.dtype)
        return self._beside[key]

    def abandon(self) -> None:
        self._to_read, self._to_write = {}, {}
        self._reading.clear()
        self._writing.clear()
