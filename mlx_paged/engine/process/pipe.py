"""Pipe: sends Python objects between a process and its child, over a socket."""

from __future__ import annotations

import contextlib
import pickle
import socket
import struct
import threading
from collections import deque
from typing import Any

_LENGTH = struct.Struct("<Q")


class Pipe:
    """Sends and receives Python objects. Any thread may send, without blocking; one receives.

    Objects are pickled, so the processes must trust each other.

    Args:
        sock: A connected socket of the stream type. The pipe owns it.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._received = sock.makefile("rb")
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._unsent: deque[memoryview] = deque()  # did not fit in the socket's buffer
        self._is_closed = False
        threading.Thread(target=self._send_rest, name="mlx-paged-pipe", daemon=True).start()

    def send(self, message: Any) -> None:
        """Sends an object. Does nothing if the other process has ended; `receive` reports that.

        Raises:
            Exception: The object cannot be pickled.
        """
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        rest = memoryview(_LENGTH.pack(len(data)) + data)
        with self._lock:
            if not self._unsent:
                # Sent here if it fits: another thread would first wait for the interpreter lock.
                try:
                    sent = self._socket.send(rest, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    sent = 0
                except OSError:
                    return
                rest = rest[sent:]
            if rest:
                self._unsent.append(rest)
                self._changed.notify()

    def receive(self) -> Any:
        """Waits for an object.

        Raises:
            EOFError: The other process closed the pipe, or is gone.
            Exception: The object cannot be unpickled here.
        """
        [length] = _LENGTH.unpack(self._read(_LENGTH.size))
        return pickle.loads(self._read(length))

    def close(self) -> None:
        """Closes both directions, which also wakes a thread blocked in `receive`."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._is_closed = True
            self._changed.notify()

    def flush(self, timeout: float) -> None:
        """Waits until everything is sent, at most `timeout` seconds."""
        with self._lock:
            self._changed.wait_for(lambda: not self._unsent or self._is_closed, timeout)

    def _read(self, count: int) -> bytes:
        try:
            data = self._received.read(count)
        except OSError as error:
            raise EOFError(str(error)) from error
        if len(data) < count:
            raise EOFError("the pipe was closed")
        return data

    def _send_rest(self) -> None:
        while True:
            with self._lock:
                self._changed.wait_for(lambda: self._unsent or self._is_closed)
                if self._is_closed:
                    return
                rest = self._unsent[0]
            try:
                self._socket.sendall(rest)
            except OSError:
                self.close()
            with self._lock:
                self._unsent.popleft()  # Last, so that no other thread sends in between.
                self._changed.notify_all()
