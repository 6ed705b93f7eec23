"""The wire: frames of a connection between a decode engine and a prefill engine.

::

    decode                                     prefill
                    <- magic, nonce
    nonce, proof ->
                    <- proof                   both know the secret
                    <- welcome                 over TCP: the longest prompt, and the name of a local
                                               socket; see `transfer.local`
    request ->                                 a prompt
                    <- RECORD, its bytes       in the order of `PrefillRequest`
                    <- SHARED                  the same, where the bytes are in shared memory
                    <- WAIT                    nothing is ready yet; once a second
                    <- END, or why not         FAILED: this prompt; REFUSED: every prompt
    offsets ->                                 of blocks in shared memory that are no longer needed

All numbers are little-endian. One connection carries one prompt, so that a slow reader delays no
other prompt. A `SHARED` record has the place in shared memory as its offset, and no checksum. Its
place is not used for other blocks until the decode engine has given it back or closed the
connection.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import select
import socket
import struct
import time
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from mlx_paged.offload.digests import DIGEST_BYTES
from mlx_paged.offload.segments import RECORD_BYTES, Record

MAGIC = b"mlxpkt3\n"
#: Seconds that a greeting and a request may take in all.
TO_GREET = 5.0
#: Seconds between two frames.
BEAT = 1.0

_NONCE_BYTES = _PROOF_BYTES = 32
_HEAD = struct.Struct("<B")
_TEXT = struct.Struct("<H")
_MAX_TOKENS = struct.Struct("<I")
_REQUEST = struct.Struct(f"<{DIGEST_BYTES}sIIqBI")
_NO_SALT = 0xFFFFFFFF
_MAX_SALT_BYTES = 1 << 16
_TOKEN_BYTES = 4
_MAX_PRIORITY = (1 << 63) - 1
_MEMORY = struct.Struct("<32sQ")
#: Bytes of an offset in shared memory, as it is given back.
OFFSET = struct.Struct("<Q")
# Bytes that are read ahead of their use: many records of blocks in shared memory.
_AHEAD_BYTES = 8192
# Nearly the maximum that a socket accepts, in seconds.
_FOREVER = 1e6


class Kind(IntEnum):
    """The kind of a frame that a prefill engine sends."""

    RECORD = 1
    WAIT = 2
    END = 3
    FAILED = 4
    SHARED = 5
    REFUSED = 6


#: The frame that says that nothing is ready yet.
WAIT_FRAME = _HEAD.pack(Kind.WAIT)


def shared_frame(record: Record) -> bytes:
    """Returns the frame that announces a block in shared memory."""
    return _HEAD.pack(Kind.SHARED) + record.pack()


class WireError(Exception):
    """The other end refuses all prompts, or sent something that the protocol does not allow; the
    message says what."""


class PromptError(Exception):
    """A prompt is not computed, which says nothing about the next one; the message says why."""


class SlowError(PromptError):
    """The same, because it would have taken too long."""


class Welcome(NamedTuple):
    """A prefill engine's greeting.

    Attributes:
        max_tokens: Maximum tokens of a prompt.
        local_name: Name of its local socket; empty if it has none.
    """

    max_tokens: int
    local_name: bytes


@dataclass(frozen=True)
class PrefillRequest:
    """A prompt that another engine will answer.

    Its blocks are sent in this order: those of the first KV cache group from `first_block` on, then
    what each other group needs to continue after them.

    Attributes:
        identity: Digest of the model and its cache.
        tokens: All tokens of the full blocks and one more, 4 bytes each.
        salt: Salt of its prefixes, as the decode engine's prefix tree has it.
        first_block: Blocks that need not be sent.
        priority, background: See `Request`.
    """

    identity: bytes
    tokens: bytes
    salt: str | None = None
    first_block: int = 0
    priority: int = 0
    background: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // _TOKEN_BYTES

    def encode(self) -> bytes:
        """Returns the frame."""
        salt = b"" if self.salt is None else self.salt.encode("utf-8", "surrogatepass")
        head = _REQUEST.pack(
            self.identity,
            self.num_tokens,
            self.first_block,
            max(-_MAX_PRIORITY, min(self.priority, _MAX_PRIORITY)),
            self.background,
            _NO_SALT if self.salt is None else len(salt),
        )
        return head + salt + self.tokens


class Connection:
    """One end of a connection. Each direction belongs to one thread at a time.

    Args:
        sock: A connected socket of the stream type. The connection owns it.

    Attributes:
        is_closed: True once this end has called `close`.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.is_closed = False
        self._reads = self._sends = sock
        self._ahead = memoryview(b"")
        self._reads_ahead = False
        try:
            self._sends = sock.dup()  # each direction has its own timeout
            if sock.family in (socket.AF_INET, socket.AF_INET6):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:
            self.close()
            raise

    # Greeting.

    def greet_as_server(self, secret: bytes) -> None:
        """Proves to the other end that this one has the secret, and has it do the same.

        Raises:
            WireError: It does not have the secret.
            OSError: It is gone, or takes too long.
        """
        deadline, nonce = time.monotonic() + TO_GREET, secrets.token_bytes(_NONCE_BYTES)
        self.send(MAGIC + nonce, TO_GREET)
        answer = self.read(_NONCE_BYTES + _PROOF_BYTES, deadline)
        nonces = nonce + answer[:_NONCE_BYTES]
        if not hmac.compare_digest(answer[_NONCE_BYTES:], _proof(secret, b"decode", nonces)):
            raise WireError("it has another secret")
        self.send(_proof(secret, b"prefill", nonces), TO_GREET)

    def greet_as_client(self, secret: bytes) -> None:
        """See `greet_as_server`."""
        deadline = time.monotonic() + TO_GREET
        greeting = self.read(len(MAGIC) + _NONCE_BYTES, deadline)
        if not greeting.startswith(MAGIC):
            raise WireError("it is no prefill engine of this version")
        nonce = secrets.token_bytes(_NONCE_BYTES)
        nonces = greeting[len(MAGIC) :] + nonce
        self.send(nonce + _proof(secret, b"decode", nonces), TO_GREET)
        try:
            proof = self.read(_PROOF_BYTES, deadline)
        except ConnectionError:
            raise WireError("it has another secret") from None
        if not hmac.compare_digest(proof, _proof(secret, b"prefill", nonces)):
            raise WireError("it has another secret")

    def send_welcome(self, welcome: Welcome) -> None:
        """Tells the other end what it must know before it asks."""
        name = welcome.local_name
        self.send(_MAX_TOKENS.pack(welcome.max_tokens) + _TEXT.pack(len(name)) + name, TO_GREET)

    def read_welcome(self, timeout: float) -> Welcome:
        """Reads what `send_welcome` has sent."""
        deadline = time.monotonic() + timeout
        [max_tokens] = _MAX_TOKENS.unpack(self.read(_MAX_TOKENS.size, deadline))
        return Welcome(max_tokens, self._read_text(deadline))

    def send_memory(self, fd: int, sight: bytes, num_bytes: int) -> None:
        """Passes a descriptor of shared memory over a local socket. See `transfer.memory`."""
        self._sends.settimeout(TO_GREET)
        socket.send_fds(self._sends, [_MEMORY.pack(sight, num_bytes)], [fd])

    def read_memory(self, timeout: float) -> tuple[int, bytes, int]:
        """Returns what `send_memory` has passed. The caller closes the descriptor."""
        deadline = time.monotonic() + timeout
        self._reads.settimeout(timeout)
        data, fds, _, _ = socket.recv_fds(self._reads, _MEMORY.size, 1)
        try:
            if not data or len(fds) != 1:
                raise ConnectionError("no shared memory came")
            sight, num_bytes = _MEMORY.unpack(data + self.read(_MEMORY.size - len(data), deadline))
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        return fds[0], sight, num_bytes

    # Frames.

    def send_request(self, request: PrefillRequest, timeout: float) -> None:
        """Sends a request. Only frames come back."""
        self._reads_ahead = True
        self.send(request.encode(), timeout)

    def read_request(self, max_tokens: int) -> PrefillRequest:
        """Reads a request.

        Raises:
            WireError: It is none, or too long.
            OSError: The other end is gone, or takes too long.
        """
        deadline = time.monotonic() + TO_GREET
        head = self.read(_REQUEST.size, deadline)
        identity, num_tokens, first_block, priority, background, num_salt = _REQUEST.unpack(head)
        if not 0 < num_tokens <= max_tokens:
            raise WireError(f"a prompt must have 1 to {max_tokens} tokens but has {num_tokens}")
        has_salt = num_salt != _NO_SALT
        if has_salt and num_salt > _MAX_SALT_BYTES:
            raise WireError(f"a salt of {num_salt} bytes is too long")
        try:
            encoded = self.read(num_salt, deadline) if has_salt else None
            salt = None if encoded is None else encoded.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            raise WireError("a salt is no text") from None
        tokens = self.read(num_tokens * _TOKEN_BYTES, deadline)
        return PrefillRequest(identity, tokens, salt, first_block, priority, bool(background))

    def send_record(self, record: Record, data: memoryview, timeout: float) -> None:
        """Sends a block. `timeout` is for each wait until the other end takes some of it."""
        self._send([memoryview(_HEAD.pack(Kind.RECORD) + record.pack()), data.cast("B")], timeout)

    def read_given_back(self) -> int:
        """Reads an offset that was given back, however long that takes.

        Raises:
            OSError: The other end is gone.
        """
        self._reads_ahead = True
        return int(OFFSET.unpack(self.read(OFFSET.size, time.monotonic() + _FOREVER))[0])

    def send_end(self, failure: str | None, timeout: float) -> None:
        """Sends the end: all records were sent, or why they were not."""
        if failure is None:
            self.send(_HEAD.pack(Kind.END), timeout)
        else:
            self._send_reason(Kind.FAILED, failure, timeout)

    def send_refusal(self, reason: str, timeout: float) -> None:
        """Says why no prompt of the other end is computed."""
        self._send_reason(Kind.REFUSED, reason, timeout)

    def _send_reason(self, kind: Kind, reason: str, timeout: float) -> None:
        text = reason.encode("utf-8", "replace")[:1000]
        self.send(_HEAD.pack(kind) + _TEXT.pack(len(text)) + text, timeout)

    def read_kind(self, timeout: float) -> Kind:
        """Reads the kind of the next frame.

        Raises:
            WireError: There is no such kind.
            OSError: The other end is gone, or silent for `timeout` seconds.
        """
        [value] = self.read(_HEAD.size, time.monotonic() + timeout)
        try:
            return Kind(value)
        except ValueError:
            raise WireError(f"there is no frame of kind {value}") from None

    def read_record(self, timeout: float) -> Record:
        """Reads the rest of a `RECORD` up to its bytes, or of a `SHARED`."""
        return Record.unpack(self.read(RECORD_BYTES, time.monotonic() + timeout))

    def read_reason(self, timeout: float) -> str:
        """Reads the rest of a `FAILED` or a `REFUSED`."""
        return self._read_text(time.monotonic() + timeout).decode("utf-8", "replace")

    def _read_text(self, deadline: float) -> bytes:
        [length] = _TEXT.unpack(self.read(_TEXT.size, deadline))
        return self.read(length, deadline)

    # Bytes.

    def send(self, data: bytes, timeout: float) -> None:
        """Sends bytes.

        Raises:
            OSError: The other end is gone, or took none of them for `timeout` seconds.
        """
        self._send([memoryview(data)], timeout)

    def send_now(self, data: bytearray) -> int:
        """Sends what the socket takes at once; returns how many bytes.

        Raises:
            OSError: The other end is gone.
        """
        if not data:
            return 0
        self._sends.settimeout(0.0)
        try:
            return self._sends.send(data)
        except BlockingIOError:
            return 0

    def wait_until_writable(self, timeout: float) -> None:
        """Waits until `send_now` may send something.

        Raises:
            OSError: It takes too long, or this end was closed.
        """
        poll = select.poll()  # `select.select` has a limit of 1024 descriptors
        try:
            poll.register(self._sends, select.POLLOUT)
        except ValueError:
            raise ConnectionError("the connection was closed") from None
        if not poll.poll(timeout * 1000):
            raise TimeoutError("it reads nothing")

    def _send(self, parts: list[memoryview], timeout: float) -> None:
        """Sends parts together, so that a head wakes the other end only once its bytes come."""
        self._sends.settimeout(timeout)
        while parts:
            count = self._sends.sendmsg(parts)
            while parts and count >= parts[0].nbytes:
                count -= parts.pop(0).nbytes
            if count:
                parts[0] = parts[0][count:]

    def read(self, count: int, deadline: float) -> bytes:
        """Reads exactly `count` bytes."""
        data = bytearray(count)
        self.read_into(memoryview(data), deadline)
        return bytes(data)

    def read_into(self, out: memoryview, deadline: float) -> None:
        """Fills `out`.

        Raises:
            OSError: The other end is gone, or the deadline (`time.monotonic`) has passed.
        """
        if self._ahead:
            out = self._take_ahead(out)
        while out:
            if self._reads_ahead and out.nbytes < _AHEAD_BYTES:
                ahead = bytearray(_AHEAD_BYTES)
                count = self._receive(memoryview(ahead), deadline)
                self._ahead = memoryview(ahead)[:count]
                out = self._take_ahead(out)
            else:
                out = out[self._receive(out, deadline) :]

    def _take_ahead(self, out: memoryview) -> memoryview:
        """Fills `out` with what was read ahead; returns what is left of it."""
        count = min(out.nbytes, self._ahead.nbytes)
        out[:count] = self._ahead[:count]
        self._ahead = self._ahead[count:]
        return out[count:]

    def _receive(self, out: memoryview, deadline: float) -> int:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("it is silent")
        self._reads.settimeout(left)
        count = self._reads.recv_into(out)
        if not count:
            raise ConnectionError("the connection was closed")
        return count

    @property
    def is_closed_by_peer(self) -> bool:
        """True if the other end is gone, as far as known. Nothing else may be on its way."""
        self._reads.settimeout(0.0)
        try:
            return not self._reads.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def end_reading(self) -> None:
        """Wakes a thread that reads, and every later one."""
        with contextlib.suppress(OSError):
            self._reads.shutdown(socket.SHUT_RD)

    def end_sending(self) -> None:
        """Ends this end's direction: nothing more will come."""
        with contextlib.suppress(OSError):
            self._sends.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Ends both directions, also for a thread that waits in one."""
        self.is_closed = True
        with contextlib.suppress(OSError):
            self._reads.shutdown(socket.SHUT_RDWR)
        self._reads.close()
        self._sends.close()


def _proof(secret: bytes, end: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, end + nonces, "sha256")
