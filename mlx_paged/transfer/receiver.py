"""Receiver: requests the blocks of prompts from a prefill engine and buffers those that arrived.

The blocks of a prompt that cannot be admitted yet stay here, and a transfer whose share is full
stops reading until they are taken. Such transfers may occupy all threads while a sequence that was
admitted earlier, such as one of higher priority, keeps theirs from being admitted. If the transfer
of that sequence waited for a thread, neither would ever continue. So `urge` runs it on threads of
its own::

      any transfer      [ waits for room ] x MAX_TRANSFERS       until its sequence is admitted
      urged transfers   [ its sequence takes each block at once ]

Nothing else can deadlock. Blocks travel in one direction, and an engine has one role. A transfer
may always hold one block, whatever others hold, and so may the prefill engine in shared memory, for
which no thread waits here. No lock that the engine takes is held while a thread waits for the peer,
and both ends give up: this one after silence, the other one after `_STALLED` seconds.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple

from mlx_paged.checksum import crc32
from mlx_paged.offload.segments import Record
from mlx_paged.transfer.local import Link, Linker
from mlx_paged.transfer.memory import MemoryView
from mlx_paged.transfer.wire import (
    HEARTBEAT,
    OFFSET,
    Connection,
    Kind,
    PrefillRequest,
    PromptError,
    SlowError,
    WireError,
)

logger = logging.getLogger(__name__)

#: Maximum concurrent transfers; more prompts wait.
MAX_TRANSFERS = 16
#: Maximum concurrent transfers whose sequences already hold blocks.
MAX_URGED_TRANSFERS = 4
#: Maximum bytes of blocks that have arrived and were not taken yet. Prompts have equal shares; a
#: single block may exceed one.
MAX_WAITING_BYTES = 256 << 20
# Seconds of silence after which the prefill engine counts as dead.
_SILENCE = 10 * HEARTBEAT
# Maximum seconds between two blocks, and for which a prompt waits for a thread.
_PROGRESS = 60.0
# Seconds for which a prefill engine that has failed gets no more prompts.
_PAUSE = 10.0


class Arrived(NamedTuple):
    """A block that has arrived completely.

    Attributes:
        group: Its KV cache group.
        block: Its index in the prompt.
        data: ``[size]`` read-only bytes.
        is_shared: True if the bytes are in memory that the prefill engine owns.
        release: To be called, on any thread, once nothing reads `data` any more.
    """

    group: int
    block: int
    data: memoryview
    is_shared: bool
    release: Callable[[], None]


class Incoming:
    """The transfer of one prompt's blocks. Thread-safe.

    Args:
        request: The request to send.
        numbers: Index of each block in the prompt, by digest.
        block_bytes: Bytes of a block, per group.
        take_buffer: Returns a buffer of a number of bytes.
        give_buffer: Takes a buffer back.
        on_change: Called when a block has arrived, and at the end.

    Attributes:
        is_urged: True if a sequence waited for the transfer before it had begun.
        failure: Why no more blocks will arrive; None during the transfer, and if it succeeded.
        num_waiting_bytes: Bytes that have arrived and were not taken yet, except in shared memory.
        num_blocks, num_bytes: Blocks that have arrived, and their bytes.
        num_shared_bytes: Bytes that arrived through shared memory.
        seconds: Time from construction to the last block, or to a timeout; None before, and after
            any other failure.
    """

    def __init__(
        self,
        request: PrefillRequest,
        numbers: Mapping[bytes, int],
        block_bytes: Sequence[int],
        take_buffer: Callable[[int], memoryview],
        give_buffer: Callable[[memoryview], None],
        on_change: Callable[[], None],
    ) -> None:
        self.request = request
        self.is_urged = self._has_begun = False
        self.failure: str | None = None
        self.num_waiting_bytes = self.num_blocks = self.num_bytes = self.num_shared_bytes = 0
        self.seconds: float | None = None
        self._numbers = numbers
        self._block_bytes = block_bytes
        self._take_buffer = take_buffer
        self._give_buffer = give_buffer
        self._on_change = on_change
        self._is_complete = self._is_cancelled = False
        self._waiting: deque[Arrived] = deque()
        self._changed = threading.Condition()
        self._connection: Connection | None = None
        self._memory: MemoryView | None = None
        self._num_lent = 0  # blocks in shared memory that were not released
        self._unsent_releases = bytearray()  # offsets of released slots, not sent yet
        self._share: Callable[[], int] = lambda: MAX_WAITING_BYTES
        self._made_at = time.monotonic()

    def take(self, group: int, block: int) -> Arrived | None:
        """Takes a block, and drops those before it. Returns None if it has not arrived."""
        with self._changed:
            while self._waiting:
                found = self._take()
                self._changed.notify_all()
                if (found.group, found.block) == (group, block):
                    return found
                found.release()
        return None

    def _take(self) -> Arrived:
        found = self._waiting.popleft()
        if not found.is_shared:
            self.num_waiting_bytes -= found.data.nbytes
        return found

    def _drop_waiting(self) -> None:
        while self._waiting:
            self._take().release()

    @property
    def is_over(self) -> bool:
        """True if there are no blocks left to take and no more will arrive."""
        with self._changed:
            return self.failure is not None or (self._is_complete and not self._waiting)

    def cancel(self) -> None:
        """Ends the transfer and drops its blocks."""
        with self._changed:
            self._is_cancelled = True
            self._drop_waiting()
            self._changed.notify_all()
            if self._connection is not None:
                self._connection.end_reading()  # wakes the thread of the transfer
                self._close_if_unused()

    def _close_if_unused(self) -> None:
        """Closes the connection once the transfer has ended and no shared block is in use.

        Closing releases all slots of the prompt.
        """
        is_read = self._is_complete or self._is_cancelled or self.failure is not None
        if is_read and not self._num_lent and self._connection is not None:
            self._connection.close()
            self._connection = None

    def _release_shared(self, offset: int) -> None:
        with self._changed:
            self._num_lent -= 1
            self._close_if_unused()
            if self._connection is not None:
                self._unsent_releases += OFFSET.pack(offset)
                self._send_releases(self._connection)

    def _send_releases(self, connection: Connection) -> None:
        # Must not block. The next call sends what the socket does not accept now.
        with contextlib.suppress(OSError):
            del self._unsent_releases[: connection.send_now(self._unsent_releases)]

    def urge(self) -> bool:
        """Marks the transfer as urged; returns False if it has begun or was urged before."""
        with self._changed:
            is_first = not (self._has_begun or self.is_urged)
            self.is_urged |= is_first
        return is_first

    def fail(self, reason: str) -> None:
        """Fails a transfer that has not begun."""
        if self.begin():
            self._end(reason, is_timed=False)

    # On the thread of the transfer.

    def begin(self) -> bool:
        """Returns True on the first call: of two threads, only one may call `run`."""
        with self._changed:
            is_first, self._has_begun = not self._has_begun, True
        return is_first

    def run(self, connect: Callable[[], Link], share: Callable[[], int]) -> bool:
        """Receives all blocks; returns False if the prefill engine has failed as a whole.

        Args:
            connect: Connects to the prefill engine.
            share: Returns the maximum of `num_waiting_bytes`; a single block may exceed it.
        """
        self._share = share
        failure: str | None = None
        engine_works = is_timed = False
        try:
            if not self._is_cancelled:
                self._request_blocks(connect)
            failure, engine_works, is_timed = None, True, True
        except PromptError as error:
            failure, engine_works, is_timed = str(error), True, isinstance(error, SlowError)
        except (OSError, WireError) as error:
            failure, engine_works = str(error), self._is_cancelled or bool(self.num_blocks)
        except Exception as error:  # such as MemoryError; later transfers need this thread
            logger.exception("[decode] the blocks of a prompt could not be received")
            failure, engine_works = str(error) or type(error).__name__, True
        self._end(failure, is_timed)
        return engine_works

    def _request_blocks(self, connect: Callable[[], Link]) -> None:
        if time.monotonic() - self._made_at > _PROGRESS:
            raise SlowError("too many prompts wait for the prefill engine")
        connection, memory, max_tokens = connect()
        with self._changed:
            self._connection, self._memory = connection, memory
        if self.request.num_tokens > max_tokens:
            raise PromptError(f"the prefill engine takes prompts of at most {max_tokens} tokens")
        if not self._is_cancelled:
            connection.send_request(self.request, _SILENCE)
            self._receive(connection)

    def _end(self, failure: str | None, is_timed: bool) -> None:
        with self._changed:
            if not self._is_cancelled:
                self.failure = failure
                self.seconds = time.monotonic() - self._made_at if is_timed else None
                self._is_complete = failure is None
                if failure is not None:
                    self._drop_waiting()
            self._close_if_unused()
        if not self._is_cancelled:
            self._on_change()

    def _receive(self, connection: Connection) -> None:
        progress_at = time.monotonic()
        while not self._is_cancelled and (kind := self._read_kind(connection)) is not Kind.END:
            if kind is Kind.FAILED or kind is Kind.REFUSED:
                reason = connection.read_reason(_SILENCE)
                raise PromptError(reason) if kind is Kind.FAILED else WireError(reason)
            if kind is Kind.RECORD or kind is Kind.SHARED:
                record = connection.read_record(_SILENCE)
                block = self._number_of(record)
                if kind is Kind.SHARED:
                    self._note_shared(record, block)
                else:
                    self._receive_block(connection, record, block)
                progress_at = time.monotonic()
            elif time.monotonic() - progress_at > _PROGRESS:
                raise SlowError(f"no block came within {_PROGRESS:g} s")

    def _read_kind(self, connection: Connection) -> Kind:
        if self._unsent_releases:
            with self._changed:
                self._send_releases(connection)
        return connection.read_kind(_SILENCE)

    def _number_of(self, record: Record) -> int:
        """Returns the index of a block in the prompt.

        Raises:
            WireError: The block does not belong to the prompt.
        """
        block, group, length = self._numbers.get(record.digest), record.group, record.length
        if block is None or group >= len(self._block_bytes):
            raise WireError("a block of another prompt arrived")
        if length != self._block_bytes[group]:
            expected = self._block_bytes[group]
            raise WireError(f"a block must have {expected} bytes but has {length}")
        return block

    def _note_shared(self, record: Record, block: int) -> None:
        if self._memory is None:
            raise WireError("a block in shared memory arrived, but no memory is shared")
        try:
            data = self._memory.bytes_at(record.offset, record.length)
        except ValueError as error:
            raise WireError(str(error)) from None
        with self._changed:
            if self._is_cancelled:
                return
            self._num_lent += 1
            self.num_shared_bytes += record.length
            release = partial(self._release_shared, record.offset)
            self._add(Arrived(record.group, block, data, is_shared=True, release=release))
        self._on_change()

    def _add(self, arrived: Arrived) -> None:
        self._waiting.append(arrived)
        self.num_blocks += 1
        self.num_bytes += arrived.data.nbytes

    def _receive_block(self, connection: Connection, record: Record, block: int) -> None:
        length = record.length
        with self._changed:
            # Nothing is read until the engine takes blocks, which makes the peer wait, too.
            self._changed.wait_for(lambda: self._is_cancelled or self._has_room(length))
            if self._is_cancelled:
                return
            self.num_waiting_bytes += length
        data = self._take_buffer(length)
        connection.read_into(data, time.monotonic() + _PROGRESS)
        if crc32(data) != record.crc:
            raise WireError("a block is damaged")
        with self._changed:
            if self._is_cancelled:
                return
            release = partial(self._give_buffer, data)
            self._add(Arrived(record.group, block, data, is_shared=False, release=release))
        self._on_change()

    def _has_room(self, size: int) -> bool:
        return not self.num_waiting_bytes or self.num_waiting_bytes + size <= self._share()


class Receiver:
    """Runs the transfers from one prefill engine, each on a thread.

    Args:
        address: (host, port) of the prefill engine.
        secret: Shared by both engines.
    """

    def __init__(self, address: tuple[str, int], secret: bytes) -> None:
        self._linker = Linker(address, secret)
        self._paused_until = float("-inf")
        self._regular = _ThreadPool(MAX_TRANSFERS, self._run)
        self._urged = _ThreadPool(MAX_URGED_TRANSFERS, self._run)
        self._running: set[Incoming] = set()

    @property
    def is_paused(self) -> bool:
        """True for a while after the prefill engine could not be reached, was silent, violated the
        protocol, or refused this engine. A full engine, or one that fails a prompt, is not paused.
        """
        return time.monotonic() < self._paused_until

    def start(self, incoming: Incoming) -> None:
        """Queues a transfer."""
        self._regular.put(incoming)

    def urge(self, incoming: Incoming) -> None:
        """Runs a queued transfer ahead of others, because its sequence has been admitted.

        The sequence must take the blocks as they arrive, or cancel the transfer.
        """
        if incoming.urge():
            self._urged.put(incoming)

    def _run(self, incoming: Incoming) -> None:
        if not incoming.begin():
            return
        self._running.add(incoming)
        engine_works = incoming.run(self._linker.connect, self._share)
        self._running.discard(incoming)
        if not engine_works:
            self._paused_until = time.monotonic() + _PAUSE

    def _share(self) -> int:
        """Returns the bytes that may wait for each running transfer."""
        return MAX_WAITING_BYTES // len(self._running)

    def close(self) -> None:
        """Ends the threads once they are idle. Cancel the transfers first."""
        self._regular.close()
        self._urged.close()


class _ThreadPool:
    """Runs transfers in order. Starts threads as they are needed; one thread may call it."""

    def __init__(self, max_threads: int, run: Callable[[Incoming], None]) -> None:
        self._max_threads = max_threads
        self._run_one = run
        self._num_threads = 0
        self._queue: SimpleQueue[Incoming | None] = SimpleQueue()

    def put(self, incoming: Incoming) -> None:
        """Queues a transfer. It fails if the system allows no thread at all."""
        self._queue.put(incoming)
        if self._num_threads < self._max_threads:
            # A daemon: the interpreter's exit must not wait for another machine.
            thread = threading.Thread(target=self._run, name="mlx-paged-kv-receiver", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # The system allows no further thread.
                logger.warning("[decode] a transfer gets no thread of its own: %s", error)
                if not self._num_threads:
                    incoming.fail(f"no thread could be started: {error}")
            else:
                self._num_threads += 1

    def _run(self) -> None:
        while (incoming := self._queue.get()) is not None:
            self._run_one(incoming)

    def close(self) -> None:
        """Ends the threads once they are idle."""
        for _ in range(self._num_threads):
            self._queue.put(None)
