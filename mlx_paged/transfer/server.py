"""PrefillServer: accepts prompts from decode engines and sends them the KV blocks."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from mlx_paged.checksum import crc32
from mlx_paged.offload.segments import Block, Record
from mlx_paged.transfer import local
from mlx_paged.transfer.memory import SharedMemory, Slot
from mlx_paged.transfer.wire import (
    HEARTBEAT,
    WAIT_FRAME,
    Connection,
    PrefillRequest,
    Welcome,
    WireError,
    shared_frame,
)

logger = logging.getLogger(__name__)

#: Maximum concurrent prompts; more are refused. A prompt no longer counts once all its blocks were
#: sent, even if the decode engine still reads some in shared memory.
MAX_PROMPTS = 64
# Maximum connections without a prompt. A further one replaces the oldest, so that peers without the
# secret cannot keep others out.
_MAX_GREETINGS = 64
#: Maximum bytes of blocks that wait to be sent or are in shared memory. Engines copy blocks only
#: between steps, and one step of a GPU fills hundreds of megabytes.
MAX_WAITING_BYTES = 512 << 20
# Seconds after which a decode engine that accepts nothing is given up. It accepts nothing while all
# its blocks are in use.
_STALLED = 60.0
# Connections that the system may queue before `accept`.
_BACKLOG = 64
# Seconds to the next attempt after a connection could not be accepted.
_RETRY = 1.0


class _Waiting(NamedTuple):
    """A block that waits to be sent.

    Attributes:
        slot: Its slot in shared memory; None if its bytes go over the socket.
    """

    block: Block
    slot: Slot | None


class Outgoing:
    """The blocks of one prompt on their way to a decode engine. Thread-safe.

    Args:
        connection: Connection to the decode engine.
        on_room: Called when more blocks may be added.
        memory: Shared with the decode engine; None if that is on another machine.

    Attributes:
        is_gone: True once the receiver has gone.
        is_over: True once no more blocks are added.
        num_waiting_bytes: Bytes that wait to be sent, or are in shared memory and not released yet.
    """

    def __init__(
        self,
        request: PrefillRequest,
        connection: Connection,
        on_room: Callable[[], None],
        memory: SharedMemory | None = None,
    ) -> None:
        self.request = request
        self.is_gone = self.is_over = False
        self.num_waiting_bytes = 0
        self._connection = connection
        self._on_room = on_room
        self._memory = memory
        self._waiting: deque[_Waiting] = deque()
        self._lent: dict[int, Block] = {}  # announced and not released, by offset in shared memory
        self._unsent = bytearray()  # records of such blocks that the socket did not accept at once
        self._is_sending = False  # the bytes of a block: other threads must not send
        self._num_sent_bytes = 0
        self._full_since: float | None = None
        self._failure: str | None = None
        self._changed = threading.Condition()

    @property
    def shares_memory(self) -> bool:
        """True if the decode engine is on this machine."""
        return self._memory is not None

    def take_slot(self, size: int) -> Slot | None:
        """Allocates a slot of `size` bytes; returns None if the bytes must go over the socket."""
        return None if self._memory is None else self._memory.take(size)

    def has_room(self, size: int, share: int) -> bool:
        """Returns True if a block may be added.

        Args:
            size: Bytes of the block and of those that will be added before it.
            share: Maximum of `num_waiting_bytes`; a single block may exceed it.
        """
        with self._changed:
            if self.num_waiting_bytes + size <= share:
                self._full_since = None
                return True
            if self._full_since is None:
                self._full_since = time.monotonic()
            return False

    def add(self, block: Block, slot: Slot | None = None) -> None:
        """Queues a block; its data must not change until `block.on_released` is called.

        Args:
            slot: The slot from `take_slot` that holds the data; None if the data is elsewhere.
        """
        with self._changed:
            if self.is_gone:
                block.on_released()
                return
            self.num_waiting_bytes += block.data.nbytes
            self._waiting.append(_Waiting(block, slot))
            # Without work, the sending thread is not woken: it would compete with the engine.
            if not self._lend():
                self._changed.notify_all()

    def end(self, failure: str | None = None) -> None:
        """Marks the end: all blocks were added, or the prompt failed for a reason."""
        with self._changed:
            if not self.is_over:
                self.is_over, self._failure = True, failure
                self._changed.notify_all()

    def send(self) -> None:
        """Sends the blocks until the end.

        Raises:
            OSError: The receiver has gone, or does not accept them.
        """
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._waiting or self._unsent or self.is_over or self.is_gone, HEARTBEAT
                )
                if self.is_gone:
                    raise ConnectionError("the connection was closed")
                since = self._full_since
                if since is not None and time.monotonic() - since > _STALLED:
                    raise TimeoutError("the decode engine takes no blocks")
                self._lend()
                is_over = self.is_over and (self._failure is not None or not self._waiting)
                block = None
                if not is_over and self._waiting:
                    block, _ = self._waiting.popleft()
                    self._is_sending = True
                elif not is_over and not self._unsent:
                    self._unsent += WAIT_FRAME
            if block is not None:
                self._send(block)
                continue
            self._send_unsent()
            if is_over:
                break
            if self._memory is None and self._connection.is_closed_by_peer:
                raise ConnectionError("the connection was closed")
        self._connection.send_end(self._failure, _STALLED)

    def _send(self, block: Block) -> None:
        data, size = block.data, block.data.nbytes
        record = Record(block.digest, block.group, size, crc32(data), self._num_sent_bytes)
        self._num_sent_bytes += size
        try:
            self._send_unsent()  # the order of blocks is part of the protocol
            self._connection.send_record(record, data, _STALLED)
        finally:
            block.on_released()
            with self._changed:
                self._is_sending = False
                self.num_waiting_bytes -= size
                self._full_since = None
        self._on_room()

    def _lend(self) -> bool:
        """Announces the next blocks in shared memory; returns False if `send` has work left."""
        while self._waiting and not self._is_sending:
            block, slot = self._waiting[0]
            if slot is None:
                break
            self._waiting.popleft()
            self._lent[slot.offset] = block
            record = Record(block.digest, block.group, block.data.nbytes, 0, slot.offset)
            self._unsent += shared_frame(record)
        if self._unsent and not self._is_sending:
            with contextlib.suppress(OSError):  # `send` will raise it
                del self._unsent[: self._connection.send_now(self._unsent)]
        return not self._waiting and not self._unsent

    def _send_unsent(self) -> None:
        while True:
            with self._changed:
                del self._unsent[: self._connection.send_now(self._unsent)]
                if not self._unsent:
                    return
            self._connection.wait_until_writable(_STALLED)

    def collect(self) -> None:
        """Frees slots as the receiver releases them, until it closes the connection."""
        with contextlib.suppress(OSError):
            while True:
                self._release(self._connection.read_released())
        self.leave()

    def release_all(self) -> None:
        """Frees all slots, because the receiver has gone."""
        for offset in list(self._lent):
            self._release(offset)

    def _release(self, offset: int) -> None:
        with self._changed:
            block = self._lent.pop(offset, None)
            if block is None:
                return  # a second release, which is the receiver's mistake and harms no one else
            self.num_waiting_bytes -= block.data.nbytes
            self._full_since = None
        block.on_released()
        self._on_room()

    def leave(self) -> None:
        """Drops everything that was not sent, because the receiver has gone."""
        with self._changed:
            self.is_gone = True
            while self._waiting:
                block, _ = self._waiting.popleft()
                self.num_waiting_bytes -= block.data.nbytes
                block.on_released()
            self._changed.notify_all()


class Prefiller(Protocol):
    """Computes prompts for the server.

    Attributes:
        max_tokens: Maximum tokens of a prompt.
    """

    max_tokens: int

    def refusal(self, request: PrefillRequest) -> str | None:
        """Returns why the engine that sent this prompt is refused; None if it is served."""

    def begin(self, outgoing: Outgoing) -> None:
        """Begins to compute a prompt: adds its blocks to `outgoing`, and finally ends it."""

    def wake(self) -> None:
        """Called when blocks may be added again, and when a receiver has gone."""


class PrefillServer:
    """Listens for decode engines. Each connection has one thread, or two if it shares memory.

    Args:
        address: (host, port) to listen on; port 0 means any free one.
        secret: Shared by both engines.

    Attributes:
        port: The port that it listens on.

    Raises:
        OSError: The address cannot be used.
    """

    def __init__(self, address: tuple[str, int], secret: bytes) -> None:
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._socket = socket.create_server(address, family=family, backlog=_BACKLOG)
        self.port: int = self._socket.getsockname()[1]
        self._secret = secret
        self._local: socket.socket | None = None
        self._local_name = b""
        try:
            self._local, self._local_name = local.listen(_BACKLOG)
        except OSError as error:
            logger.info("[prefill] all blocks go over TCP: %s", error)
        self._memory: SharedMemory | None = None
        self._greeting: dict[Connection, None] = {}  # without a prompt yet, oldest first
        self._connections: set[Connection] = set()  # with a prompt in progress
        self._ending: set[Connection] = set()  # all blocks sent, some not released
        self._outgoing: set[Outgoing] = set()
        self._lock = threading.Lock()
        self._is_closed = False

    def start(self, prefiller: Prefiller) -> None:
        """Begins to accept prompts, for as long as the prefiller exists."""
        reference = weakref.ref(prefiller)
        for listening in (self._socket, self._local):
            if listening is not None:
                threading.Thread(
                    target=self._accept,
                    args=(listening, reference),
                    name="mlx-paged-kv-server",
                    daemon=True,
                ).start()

    def share_of(self, num_prompts: int) -> int:
        """Returns the bytes that may wait for each of `num_prompts` prompts.

        Blocks of finished prompts count against the total until their receivers have them.
        """
        with self._lock:
            ended = (each for each in self._outgoing if each.is_over or each.is_gone)
            num_ended_bytes = sum(each.num_waiting_bytes for each in ended)
        return max(0, MAX_WAITING_BYTES - num_ended_bytes) // num_prompts

    def _accept(self, listening: socket.socket, reference: weakref.ref[Prefiller]) -> None:
        while not self._is_closed:
            try:
                sock, _ = listening.accept()
                connection = Connection(sock)
            except OSError as error:
                if not self._is_closed:  # No file descriptor is left, or the peer has gone.
                    logger.warning("[prefill] a connection could not be accepted: %s", error)
                    time.sleep(_RETRY)
                continue
            prefiller = reference()
            if prefiller is None or not self._begin_greeting(connection):
                connection.close()
            else:
                self._start_serving(connection, prefiller, listening is self._local)
            del prefiller  # A reference here would keep it alive while this thread waits.

    def _start_serving(self, connection: Connection, prefiller: Prefiller, is_local: bool) -> None:
        thread = threading.Thread(
            target=self._serve,
            args=(connection, prefiller, is_local),
            name="mlx-paged-kv-sender",
            daemon=True,
        )
        try:
            thread.start()
        except RuntimeError as error:  # The system allows no further thread.
            logger.warning("[prefill] a connection could not be served: %s", error)
            self._forget(connection)

    def _begin_greeting(self, connection: Connection) -> bool:
        with self._lock:
            if self._is_closed:
                return False
            if len(self._greeting) >= _MAX_GREETINGS:
                oldest = next(iter(self._greeting))
                del self._greeting[oldest]
                oldest.close()
            self._greeting[connection] = None
            return True

    def _serve(self, connection: Connection, prefiller: Prefiller, is_local: bool) -> None:
        try:
            connection.greet_as_server(self._secret)
            memory = None
            if is_local:
                memory = self._shared_memory()
                local.offer(connection, memory)
            else:
                connection.send_welcome(Welcome(prefiller.max_tokens, self._local_name))
            request = connection.read_request(prefiller.max_tokens)
            refusal = prefiller.refusal(request)
            if refusal is not None:
                connection.send_refusal(refusal, _STALLED)
                return
            if not self._take(connection):
                connection.send_end("the prefill engine has too many prompts", _STALLED)
                return
            outgoing = Outgoing(request, connection, prefiller.wake, memory)
            self._send(outgoing, connection, prefiller)
        except WireError as error:
            logger.warning("[prefill] a connection was refused: %s", error)
        except OSError as error:
            logger.info("[prefill] a connection has ended: %s", error)
        finally:
            self._forget(connection)

    def _forget(self, connection: Connection) -> None:
        connection.close()
        with self._lock:
            self._greeting.pop(connection, None)
            self._connections.discard(connection)
            self._ending.discard(connection)

    def _take(self, connection: Connection) -> bool:
        """Admits the prompt of a connection; returns False if there are too many."""
        with self._lock:
            if connection.is_closed or len(self._connections) >= MAX_PROMPTS:
                return False
            del self._greeting[connection]
            self._connections.add(connection)
            return True

    def _send(self, outgoing: Outgoing, connection: Connection, prefiller: Prefiller) -> None:
        collector = None
        if outgoing.shares_memory:
            collector = threading.Thread(
                target=outgoing.collect, name="mlx-paged-kv-collector", daemon=True
            )
            collector.start()
        with self._lock:
            self._outgoing.add(outgoing)
        try:
            prefiller.begin(outgoing)
            outgoing.send()
        finally:
            outgoing.leave()
            prefiller.wake()
            if collector is not None:
                # The receiver may still read slots. It closes the connection when it is done.
                connection.end_sending()
                with self._lock:
                    self._connections.discard(connection)
                    self._ending.add(connection)
                collector.join()
                outgoing.release_all()
            with self._lock:
                self._outgoing.discard(outgoing)

    def _shared_memory(self) -> SharedMemory:
        """Returns the memory shared with all decode engines on this machine."""
        with self._lock:
            if self._memory is None:
                self._memory = SharedMemory(MAX_WAITING_BYTES)
            return self._memory

    def give_back(self) -> int:
        """Returns unused pages of shared memory to the system; returns their bytes."""
        memory = self._memory
        return 0 if memory is None else memory.discard_free()

    def close(self) -> None:
        """Closes all connections and sockets."""
        with self._lock:
            self._is_closed = True
            connections = [*self._greeting, *self._connections, *self._ending]
            if self._memory is not None:
                self._memory.close()  # first: closing connections frees slots still in use
        for connection in connections:
            connection.close()
        for listening in (self._socket, self._local):
            if listening is not None:
                with contextlib.suppress(OSError):
                    listening.shutdown(socket.SHUT_RDWR)  # wakes `accept`
                listening.close()
        local.remove_file(self._local_name)
