"""Connections between two engines on one machine, which share memory.

Over TCP, a prefill engine tells the name of a local socket. A decode engine that can connect to it
is on the same machine, and asks for its prompt there; any other one goes on over TCP. On the local
socket, the descriptor of the memory is passed. The decode engine reads the memory's token in it and
tells it, so both know that they see the same memory before any block is sent.
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
from mlx_paged.transfer.memory import TOKEN_BYTES, MemoryView, SharedMemory, sight_of
from mlx_paged.transfer.wire import TO_GREET, Connection, Welcome, WireError

logger = logging.getLogger(__name__)

_YES = b"\1"


# Names. They are bytes, as Linux's begin with a zero.


def listen(backlog: int) -> tuple[socket.socket, bytes]:
    """Returns a local socket that listens, and its name.

    Raises:
        OSError: There is none.
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


def forget(name: bytes) -> None:
    """Removes the file of a socket that was closed, if it has one."""
    if name and not name.startswith(b"\0"):
        private_folder.remove(Path(os.fsdecode(name)).parent)


# The memory.


def offer(connection: Connection, memory: SharedMemory) -> None:
    """Passes the memory to the other end of a local connection.

    Raises:
        WireError: It does not see the memory.
        OSError: It is gone, or takes too long.
    """
    connection.send_memory(memory.fd, sight_of(memory.token), memory.num_bytes)
    told = connection.read(TOKEN_BYTES, time.monotonic() + TO_GREET)
    if not hmac.compare_digest(told, memory.token):
        raise WireError("it does not see the shared memory")
    connection.send(_YES, TO_GREET)


def accept(connection: Connection, known: MemoryView | None) -> MemoryView:
    """Returns the memory that the other end offers: `known` if it is that.

    Raises:
        WireError: The memory is another one than the other end's.
        OSError: It cannot be mapped, or the other end is gone, or takes too long.
    """
    fd, sight, num_bytes = connection.read_memory(TO_GREET)
    try:
        is_known = known is not None and sight_of(known.token) == sight
        memory = known if known is not None and is_known else MemoryView(fd, num_bytes)
    finally:
        os.close(fd)
    if sight_of(memory.token) != sight:
        raise WireError("the shared memory is another one")
    connection.send(memory.token, TO_GREET)
    if connection.read(len(_YES), time.monotonic() + TO_GREET) != _YES:
        raise WireError("the shared memory was refused")
    return memory


class Link(NamedTuple):
    """A connection to a prefill engine that has proven itself.

    Attributes:
        memory: The memory that both share; None if the blocks come over TCP.
        max_tokens: Maximum tokens of a prompt.
    """

    connection: Connection
    memory: MemoryView | None
    max_tokens: int


class Linker:
    """Connects to one prefill engine. Any thread may call it.

    Args:
        address: Its address.
        secret: Both engines have it.
    """

    def __init__(self, address: tuple[str, int], secret: bytes) -> None:
        self._address = address
        self._secret = secret
        self._known: Welcome | None = None  # of the engine whose local socket was used last
        self._memory: MemoryView | None = None
        self._lock = threading.Lock()
        self._told: str | None = None

    def connect(self) -> Link:
        """Returns a new connection, through shared memory if possible.

        Raises:
            WireError: The other end does not have the secret.
            OSError: It cannot be reached.
        """
        known = self._known  # which another thread may change
        if known is not None:
            local = self._local(known)
            if local is not None:
                return local
            self._known = None
        connection = Connection(socket.create_connection(self._address, timeout=TO_GREET))
        try:
            connection.greet_as_client(self._secret)
            welcome = connection.read_welcome(TO_GREET)
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
        """Connects to a local socket; None if that is not possible."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(TO_GREET)
            sock.connect(welcome.local_name)
        except OSError as error:
            sock.close()
            self._tell(f"blocks come over TCP: {error.strerror or error}")
            return None
        connection = Connection(sock)
        try:
            connection.greet_as_client(self._secret)
            with self._lock:  # so that it is mapped once
                memory = self._memory = accept(connection, self._memory)
        except (OSError, WireError) as error:
            connection.close()
            self._tell(f"blocks come over TCP: {error}")
            return None
        self._tell("blocks come through shared memory")
        return Link(connection, memory, welcome.max_tokens)

    def _tell(self, what: str) -> None:
        """Logs what has changed."""
        if what != self._told:
            self._told = what
            logger.info("[decode] %s", what)
