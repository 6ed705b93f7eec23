"""Connections between two engines on one machine, which share memory.

Over TCP, a prefill engine announces the name of a local socket. A decode engine that can connect to
that socket is on the same machine and sends its prompt there; any other continues over TCP. The
prefill engine passes the descriptor of the shared memory over the local socket. The decode engine
reads the token at the beginning of that memory and sends it back, so both know that they see the
same memory before any block is sent.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import socket
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

from mlx_paged import private_folder
from mlx_paged.transfer.memory import TOKEN_BYTES, MemoryView, SharedMemory, token_digest
from mlx_paged.transfer.wire import GREETING_TIMEOUT, Connection, Welcome, WireError

logger = logging.getLogger(__name__)

_ACK = b"\1"


# Sockets. Their names are bytes, because abstract names on Linux begin with a zero byte.


def listen(backlog: int) -> tuple[socket.socket, bytes]:
    """Returns a listening local socket and its name.

    Raises:
        OSError: The system refuses to create one.
    """
    return _listen_without_file(backlog) if sys.platform == "linux" else _listen_at_file(backlog)


def _listen_without_file(backlog: int) -> tuple[socket.socket, bytes]:
    return _listening(b"\0" + f"mlx-paged-kv-{secrets.token_hex(16)}".encode(), backlog)


def _listen_at_file(backlog: int) -> tuple[socket.socket, bytes]:
    folder = private_folder.make()
    try:
        return _listening(os.fsencode(folder / "kv.sock"), backlog)
    except OSError:
        private_folder.remove(folder)
        raise


def _listening(name: bytes, backlog: int) -> tuple[socket.socket, bytes]:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(name)
        sock.listen(backlog)
    except OSError:
        sock.close()
        raise
    return sock, name


def remove_file(name: bytes) -> None:
    """Removes the file of a closed socket, if its name is a path."""
    if name and not name.startswith(b"\0"):
        private_folder.remove(Path(os.fsdecode(name)).parent)


# Shared memory.


def offer(connection: Connection, memory: SharedMemory) -> None:
    """Passes the memory to the peer on a local connection.

    Raises:
        WireError: The peer does not see this memory.
        OSError: The peer has gone or takes too long.
    """
    connection.send_memory(memory.fd, token_digest(memory.token), memory.num_bytes)
    token = connection.read(TOKEN_BYTES, time.monotonic() + GREETING_TIMEOUT)
    if not hmac.compare_digest(token, memory.token):
        raise WireError("the peer does not see the shared memory")
    connection.send(_ACK, GREETING_TIMEOUT)


def accept(connection: Connection, known: MemoryView | None) -> MemoryView:
    """Maps the memory that the peer offers; returns `known` if that is the same memory.

    Raises:
        WireError: The mapped memory is not the peer's.
        OSError: The memory cannot be mapped, or the peer has gone or takes too long.
    """
    fd, digest, num_bytes = connection.read_memory(GREETING_TIMEOUT)
    try:
        is_known = known is not None and token_digest(known.token) == digest
        memory = known if known is not None and is_known else MemoryView(fd, num_bytes)
    finally:
        os.close(fd)
    if token_digest(memory.token) != digest:
        raise WireError("the mapped memory is not the shared memory")
    connection.send(memory.token, GREETING_TIMEOUT)
    if connection.read(len(_ACK), time.monotonic() + GREETING_TIMEOUT) != _ACK:
        raise WireError("the shared memory was refused")
    return memory


class Link(NamedTuple):
    """An authenticated connection to a prefill engine.

    Attributes:
        memory: The memory that both engines share; None if blocks come over TCP.
        max_tokens: Maximum tokens of a prompt.
    """

    connection: Connection
    memory: MemoryView | None
    max_tokens: int


class Linker:
    """Connects to one prefill engine. Thread-safe.

    Args:
        address: (host, port) of the prefill engine.
        secret: Shared by both engines.
    """

    def __init__(self, address: tuple[str, int], secret: bytes) -> None:
        self._address = address
        self._secret = secret
        self._known: Welcome | None = None  # greeting that named the local socket last used
        self._memory: MemoryView | None = None
        self._lock = threading.Lock()
        self._last_logged: str | None = None

    def connect(self) -> Link:
        """Returns a new connection, with shared memory if possible.

        Raises:
            WireError: The prefill engine has another secret.
            OSError: The prefill engine cannot be reached.
        """
        known = self._known  # read once: another thread may change it
        if known is not None:
            local = self._local(known)
            if local is not None:
                return local
            self._known = None
        connection = Connection(socket.create_connection(self._address, timeout=GREETING_TIMEOUT))
        try:
            connection.greet_as_client(self._secret)
            welcome = connection.read_welcome(GREETING_TIMEOUT)
            local = self._local(welcome) if welcome.local_name else None
        except BaseException:
            connection.close()
            raise
        if local is None:
            return Link(connection, None, welcome.max_tokens)
        connection.close()
        self._known = welcome
        return local

    def _local(self, welcome: Welcome) -> Link | None:
        """Connects to a local socket; returns None if that fails."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(GREETING_TIMEOUT)
            sock.connect(welcome.local_name)
        except OSError as error:
            sock.close()
            self._log_change(f"blocks come over TCP: {error.strerror or error}")
            return None
        connection = Connection(sock)
        try:
            connection.greet_as_client(self._secret)
            with self._lock:  # so that two threads do not map the same memory twice
                memory = self._memory = accept(connection, self._memory)
        except (OSError, WireError) as error:
            connection.close()
            self._log_change(f"blocks come over TCP: {error}")
            return None
        self._log_change("blocks come through shared memory")
        return Link(connection, memory, welcome.max_tokens)

    def _log_change(self, message: str) -> None:
        """Logs a message unless it is the same as the last one."""
        if message != self._last_logged:
            self._last_logged = message
            logger.info("[decode] %s", message)
