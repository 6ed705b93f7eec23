"""PrefillServer: takes prompts of decode engines, and sends them the blocks."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Protocol

from mlx_paged.checksum import crc32
from mlx_paged.offload.segments import Block, Record
from mlx_paged.transfer.wire import BEAT, Connection, PrefillRequest, WireError

logger = logging.getLogger(__name__)

#: Connections at once; each has one prompt. Further ones are closed.
MAX_CONNECTIONS = 64
#: Bytes of blocks that may wait to be sent, see `share_of`. An engine copies blocks only between
#: steps, and one step of a GPU fills hundreds of megabytes.
MAX_WAITING_BYTES = 512 << 20
# Seconds after which a decode engine that takes nothing is given up. It takes nothing while all its
# blocks are in use.
_STALLED = 60.0
# Seconds after a connection could not be accepted until the next attempt.
_RETRY = 1.0


def share_of(num_prompts: int) -> int:
    """Bytes of one of `num_prompts` prompts that may wait to be sent; one block may exceed them."""
    return MAX_WAITING_BYTES // num_prompts


class Outgoing:
    """The blocks of one prompt on their way to a decode engine. Any thread may call it.

    Args:
        on_room: Called when more blocks may be added.

    Attributes:
        is_gone: True once the receiver is gone.
        num_waiting_bytes: Bytes that wait to be sent.
    """

    def __init__(self, request: PrefillRequest, on_room: Callable[[], None]) -> None:
        self.request = request
        self.is_gone = False
        self.num_waiting_bytes = 0
        self._on_room = on_room
        self._waiting: deque[Block] = deque()
        self._is_over = False
        self._failure: str | None = None
        self._changed = threading.Condition()

    def add(self, block: Block) -> None:
        """Adds a block; its data must not change until it is released."""
        with self._changed:
            if self.is_gone:
                block.on_released()
                return
            self._waiting.append(block)
            self.num_waiting_bytes += block.data.nbytes
            self._changed.notify_all()

    def end(self, failure: str | None = None) -> None:
        """Ends it: all blocks were added, or why not."""
        with self._changed:
            if not self._is_over:
                self._is_over, self._failure = True, failure
                self._changed.notify_all()

    def send_to(self, connection: Connection) -> None:
        """Sends the blocks until the end.

        Raises:
            OSError: The other end is gone, or does not take them.
        """
        offset = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_over, BEAT)
                block = None
                if self._waiting and self._failure is None:
                    block = self._waiting.popleft()
                elif self._is_over:
                    break
            if block is None:
                if connection.is_closed_by_peer:
                    raise ConnectionError("the connection was closed")
                connection.send_wait(_STALLED)
                continue
            data, size = block.data, block.data.nbytes
            record = Record(block.digest, block.group, size, crc32(data), offset)
            offset += size
            try:
                connection.send_record(record, data, _STALLED)
            finally:
                block.on_released()
                with self._changed:
                    self.num_waiting_bytes -= size
            self._on_room()
        connection.send_end(self._failure, _STALLED)

    def leave(self) -> None:
        """Drops everything, because the receiver is gone."""
        with self._changed:
            self.is_gone = True
            while self._waiting:
                block = self._waiting.popleft()
                self.num_waiting_bytes -= block.data.nbytes
                block.on_released()


class Prefiller(Protocol):
    """Computes prompts for the server.

    Attributes:
        max_tokens: Maximum tokens of a prompt.
    """

    max_tokens: int

    def refusal(self, request: PrefillRequest) -> str | None:
        """Why a prompt is not computed; None if it is."""

    def begin(self, outgoing: Outgoing) -> None:
        """Begins to compute a prompt. It adds the blocks, and ends `outgoing`."""

    def wake(self) -> None:
        """Called when blocks may be added again, and when a receiver is gone."""


class PrefillServer:
    """Listens for decode engines, with a thread for each connection.

    Args:
        address: To listen on.

    Attributes:
        port: The port, also if that of `address` was 0.

    Raises:
        OSError: The address cannot be used.
    """

    def __init__(self, address: tuple[str, int], secret: bytes) -> None:
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._socket = socket.create_server(address, family=family, backlog=MAX_CONNECTIONS)
        self.port: int = self._socket.getsockname()[1]
        self._secret = secret
        self._connections: set[Connection] = set()
        self._lock = threading.Lock()
        self._is_closed = False

    def start(self, prefiller: Prefiller) -> None:
        """Begins to take prompts, for as long as the prefiller exists."""
        reference = weakref.ref(prefiller)
        thread = threading.Thread(
            target=self._accept, args=(reference,), name="mlx-paged-kv-server", daemon=True
        )
        thread.start()

    def _accept(self, reference: weakref.ref[Prefiller]) -> None:
        while not self._is_closed:
            try:
                sock, _ = self._socket.accept()
                connection = Connection(sock)
            except OSError as error:
                if not self._is_closed:  # The process has no descriptor left, or the peer left.
                    logger.warning("[prefill] a connection could not be accepted: %s", error)
                    time.sleep(_RETRY)
                continue
            prefiller = reference()
            with self._lock:
                is_taken = len(self._connections) < MAX_CONNECTIONS and not self._is_closed
                if is_taken:
                    self._connections.add(connection)
            if prefiller is None or not is_taken:
                connection.close()
            else:
                threading.Thread(
                    target=self._serve,
                    args=(connection, prefiller),
                    name="mlx-paged-kv-sender",
                    daemon=True,
                ).start()
            del prefiller  # It may end while this thread waits for a connection.

    def _serve(self, connection: Connection, prefiller: Prefiller) -> None:
        try:
            connection.greet_as_server(self._secret)
            request = connection.read_request(prefiller.max_tokens)
            refusal = prefiller.refusal(request)
            if refusal is not None:
                connection.send_end(refusal, _STALLED)
                return
            outgoing = Outgoing(request, prefiller.wake)
            try:
                prefiller.begin(outgoing)
                outgoing.send_to(connection)
            finally:
                outgoing.leave()
                prefiller.wake()
        except WireError as error:
            logger.warning("[prefill] a connection was refused: %s", error)
        except OSError as error:
            logger.info("[prefill] a connection has ended: %s", error)
        finally:
            connection.close()
            with self._lock:
                self._connections.discard(connection)

    def close(self) -> None:
        """Ends all connections."""
        with self._lock:
            self._is_closed = True
            connections = list(self._connections)
        for connection in connections:
            connection.close()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes `accept`
        self._socket.close()
