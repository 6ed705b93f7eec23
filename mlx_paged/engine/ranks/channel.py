"""Channel: messages between two processes, over a socket."""

from __future__ import annotations

import contextlib
import select
import socket
import struct

from mlx_paged.engine.ranks.messages import Message, MessageError

_LENGTH = struct.Struct("<I")
# A step of a million tokens with their tables, or an adapter's widest layer.
_MAX_BYTES = 256 << 20


class Channel:
    """Sends and receives messages. Each direction belongs to one thread at a time.

    Args:
        sock: A connected socket of the stream type. The channel owns it.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        sock.setblocking(True)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, data: bytes) -> None:
        """Sends an encoded message.

        Raises:
            OSError: The other process is gone.
        """
        self._socket.sendall(_LENGTH.pack(len(data)) + data)

    def wait(self, timeout: float) -> bool:
        """Waits up to `timeout` seconds; True if `receive` would not block (message or EOF)."""
        poll = select.poll()  # `select.select` refuses descriptors above 1023.
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(1000 * timeout))

    def receive(self) -> Message:
        """Waits for a message.

        Raises:
            EOFError: The other process has closed the channel, or is gone.
            MessageError: The bytes are not a message.
        """
        [length] = _LENGTH.unpack(self._read(_LENGTH.size))
        if length > _MAX_BYTES:
            raise MessageError(f"a message must have at most {_MAX_BYTES} bytes but has {length}")
        return Message.decode(self._read(length))

    def _read(self, count: int) -> bytes:
        data = bytearray(count)
        view, at = memoryview(data), 0
        while at < count:
            try:
                got = self._socket.recv_into(view[at:])
            except OSError as error:
                raise EOFError(str(error)) from error
            if not got:
                raise EOFError("the channel was closed")
            at += got
        return bytes(data)

    def close(self) -> None:
        """Closes both directions, which also wakes a thread blocked in `receive`."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
