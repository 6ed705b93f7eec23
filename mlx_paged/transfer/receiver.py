"""Receiver: asks a prefill engine for the blocks of prompts, and keeps those that have arrived.

The blocks of a prompt that cannot be admitted yet stay here, and a transfer whose share is full
stops reading until they are taken. Such transfers may hold all threads while a sequence that was
admitted first, such as one of a higher priority, keeps them from being admitted. If that sequence's
own transfer waited for a thread, neither would ever go on. So `urge` runs it on other threads::

      any transfer      [ waits for room ] x MAX_TRANSFERS       until its sequence is admitted
      urged transfers   [ its sequence takes each block at once ]

No further waits are mutual. Blocks travel in one direction, and an engine has one role. A transfer
reads as long as it may hold one block, whatever others hold, and so does the prefill engine for
blocks in shared memory, for which no thread waits here. No lock is held during a wait for the
other end, and both ends give it up: this one after silence, the other one after `_STALLED` seconds.
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
    BEAT,
    OFFSET,
    Connection,
    Kind,
    PrefillRequest,
    PromptError,
    SlowError,
    WireError,
)

logger = logging.getLogger(__name__)

#: Prompts whose blocks arrive at once. Others wait for their turn.
MAX_TRANSFERS = 16
#: The same for prompts whose sequences wait for them with blocks of their own.
MAX_URGED_TRANSFERS = 4
#: Bytes of blocks that have arrived and are not used yet. Prompts have equal shares; one block may
#: exceed that.
MAX_WAITING_BYTES = 256 << 20
# Seconds of silence after which the other engine is taken for dead.
_SILENCE = 10 * BEAT
# Seconds in which at least one block must come, or a prompt's turn.
_PROGRESS = 60.0
# Seconds for which an engine that has failed is not asked again.
_PAUSE = 10.0


class Arrived(NamedTuple):
    """A block that is complete.

    Attributes:
        block: Its number in the prompt.
        data: Its bytes, which must not be written.
        is_shared: True if they are in memory that the prefill engine owns.
        release: Call it, on any thread, once nothing reads `data` any more.
    """

    group: int
    block: int
    data: memoryview
    is_shared: bool
    release: Callable[[], None]


class Incoming:
    """The blocks of one prompt, as they arrive. Any thread may call it.

    Args:
        request: What was asked for.
        numbers: Number of each block of the prompt by its digest.
        block_bytes: Bytes of a block of each group.
        take_buffer: Returns a buffer of a number of bytes.
        give_buffer: Takes it back.
        on_change: Called when a block has arrived, and at the end.

    Attributes:
        is_urged: True if a sequence waited for it before it had begun.
        failure: Why no more blocks come; None while they do, and once all have come.
        num_waiting_bytes: Bytes that have arrived and are not taken yet, without those in shared
            memory.
        num_blocks, num_bytes: Blocks that have arrived, and their bytes.
        num_shared_bytes: Bytes of those that came through shared memory.
        seconds: Time from its making to the last block, or until that took too long; None before,
            and after any other failure.
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
        self._num_lent = 0  # blocks in shared memory that were not given back
        self._given_back = bytearray()  # offsets of released slots, not sent yet
        self._share: Callable[[], int] = lambda: MAX_WAITING_BYTES
        self._made_at = time.monotonic()

    def take(self, group: int, block: int) -> Arrived | None:
        """Takes a block; gives up those before it, which no one needs. None if it is not there."""
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
        """True if no further block can be taken."""
        with self._changed:
            return self.failure is not None or (self._is_complete and not self._waiting)

    def cancel(self) -> None:
        """Ends it: its blocks are no longer wanted."""
        with self._changed:
            self._is_cancelled = True
            self._drop_waiting()
            self._changed.notify_all()
            if self._connection is not None:
                self._connection.end_reading()  # wakes the thread of the transfer
                self._close_if_unused()

    def _close_if_unused(self) -> None:
        """Closes the connection once it is read to its end, or cancelled, and no block is in use.

        A closed connection gives all places in shared memory back.
        """
        is_read = self._is_complete or self._is_cancelled or self.failure is not None
        if is_read and not self._num_lent and self._connection is not None:
            self._connection.close()
            self._connection = None

    def _give_back(self, offset: int) -> None:
        with self._changed:
            self._num_lent -= 1
            self._close_if_unused()
            if self._connection is not None:
                self._given_back += OFFSET.pack(offset)
                self._send_given_back(self._connection)

    def _send_given_back(self, connection: Connection) -> None:
        # This must not block. The next call sends what the socket does not take now.
        with contextlib.suppress(OSError):
            del self._given_back[: connection.send_now(self._given_back)]

    def urge(self) -> bool:
        """Marks it as urged; returns False if it has begun, or was urged before."""
        with self._changed:
            is_first = not (self._has_begun or self.is_urged)
            self.is_urged |= is_first
        return is_first

    # On the thread of the transfer.

    def begin(self) -> bool:
        """Returns True for the first thread, which calls `run`."""
        with self._changed:
            is_first, self._has_begun = not self._has_begun, True
        return is_first

    def run(self, connect: Callable[[], Link], share: Callable[[], int]) -> bool:
        """Receives all blocks; returns False if the engine has failed, so that others would, too.

        Args:
            connect: Connects to the prefill engine.
            share: Returns the maximum of `num_waiting_bytes`, which one block may exceed.
        """
        self._share = share
        failure: str | None = None
        engine_works = is_timed = False
        try:
            if not self._is_cancelled:
                self._ask(connect)
            failure, engine_works, is_timed = None, True, True
        except PromptError as error:
            failure, engine_works, is_timed = str(error), True, isinstance(error, SlowError)
        except (OSError, WireError) as error:
            failure, engine_works = str(error), self._is_cancelled or bool(self.num_blocks)
        except Exception as error:  # memory, or a fault of ours; later transfers need the thread
            logger.exception("[decode] the blocks of a prompt could not be received")
            failure, engine_works = str(error) or type(error).__name__, True
        self._end(failure, is_timed)
        return engine_works

    def _ask(self, connect: Callable[[], Link]) -> None:
        if time.monotonic() - self._made_at > _PROGRESS:
            raise SlowError("too many prompts wait")
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
        if self._given_back:
            with self._changed:
                self._send_given_back(connection)
        return connection.read_kind(_SILENCE)

    def _number_of(self, record: Record) -> int:
        """The number of the block in the prompt.

        Raises:
            WireError: It is no block of the prompt.
        """
        block, group, length = self._numbers.get(record.digest), record.group, record.length
        if block is None or group >= len(self._block_bytes):
            raise WireError("a block of another prompt came")
        if length != self._block_bytes[group]:
            expected = self._block_bytes[group]
            raise WireError(f"a block of {length} bytes came instead of {expected}")
        return block

    def _note_shared(self, record: Record, block: int) -> None:
        if self._memory is None:
            raise WireError("a block in shared memory came, and there is none")
        try:
            data = self._memory.bytes_at(record.offset, record.length)
        except ValueError as error:
            raise WireError(str(error)) from None
        with self._changed:
            if self._is_cancelled:
                return
            self._num_lent += 1
            self.num_shared_bytes += record.length
            release = partial(self._give_back, record.offset)
            self._add(Arrived(record.group, block, data, is_shared=True, release=release))
        self._on_change()

    def _add(self, arrived: Arrived) -> None:
        self._waiting.append(arrived)
        self.num_blocks += 1
        self.num_bytes += arrived.data.nbytes

    def _receive_block(self, connection: Connection, record: Record, block: int) -> None:
        length = record.length
        with self._changed:
            # Until the engine takes blocks, nothing is read, so the other end waits, too.
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
    """Asks one prefill engine, with a thread for each prompt whose blocks arrive.

    Args:
        address: Of the engine.
        secret: Both engines have it.
    """

    def __init__(self, address: tuple[str, int], secret: bytes) -> None:
        self._linker = Linker(address, secret)
        self._paused_until = float("-inf")
        self._any = _Threads(MAX_TRANSFERS, self._run)
        self._urged = _Threads(MAX_URGED_TRANSFERS, self._run)
        self._running: set[Incoming] = set()

    @property
    def is_paused(self) -> bool:
        """True for a while after the engine could not be reached, was silent, broke the protocol or
        refused this one. One that is full, or cannot compute some prompt, is asked again."""
        return time.monotonic() < self._paused_until

    def start(self, incoming: Incoming) -> None:
        """Begins a transfer, now or later."""
        self._any.put(incoming)

    def urge(self, incoming: Incoming) -> None:
        """Begins a transfer that was started and whose sequence has been admitted.

        The sequence must take the blocks as they arrive, or the transfer be cancelled.
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
        """Bytes of one prompt that may wait."""
        return MAX_WAITING_BYTES // len(self._running)

    def close(self) -> None:
        """Ends the threads once they have nothing to do. Cancel the transfers first."""
        self._any.close()
        self._urged.close()


class _Threads:
    """Runs transfers in order, each on a thread. Threads are started as they are needed."""

    def __init__(self, most: int, run: Callable[[Incoming], None]) -> None:
        self._most = most
        self._run_one = run
        self._num = 0
        self._queue: SimpleQueue[Incoming | None] = SimpleQueue()

    def put(self, incoming: Incoming) -> None:
        """Runs a transfer, now or later."""
        self._queue.put(incoming)
        if self._num < self._most:
            self._num += 1
            # A daemon: the interpreter's exit must not wait for another machine.
            threading.Thread(target=self._run, name="mlx-paged-kv-receiver", daemon=True).start()

    def _run(self) -> None:
        while (incoming := self._queue.get()) is not None:
            self._run_one(incoming)

    def close(self) -> None:
        """Ends the threads once they have nothing to do."""
        for _ in range(self._num):
            self._queue.put(None)
