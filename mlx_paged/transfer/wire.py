"""The wire protocol between a decode engine and a prefill engine.

::

    decode                                     prefill
                    <- magic, nonce
    nonce, proof ->
                    <- proof                   both know the secret
                    <- welcome                 over TCP: maximum prompt length, name of a local
                                               socket; see `transfer.local`
    request ->                                 a prompt
                    <- RECORD, its bytes       in the order of `PrefillRequest`
                    <- SHARED                  a record whose bytes are in shared memory
                    <- WAIT                    nothing is ready yet; once a second
                    <- END                     all blocks were sent; or FAILED (this prompt) or
                                               REFUSED (every prompt), with the reason
    offsets ->                                 slots in shared memory that are released

All numbers are little-endian. One connection carries one prompt, so a slow reader delays no other
prompt. The offset of a `SHARED` record is that of its slot in shared memory, and its checksum is 0.
The slot is not reused until the decode engine has released it or closed the connection.
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
#: Seconds for a complete greeting, and for a complete request.
GREETING_TIMEOUT = 5.0
#: Maximum seconds between two frames of a prefill engine.
HEARTBEAT = 1.0

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
#: The offset of a released slot in shared memory.
OFFSET = struct.Struct("<Q")
# Bytes per read of small frames: many records of blocks in shared memory arrive together.
_AHEAD_BYTES = 8192
# Seconds; nearly the longest timeout that a socket accepts.
_FOREVER = 1e6


class Kind(IntEnum):
    """First byte of each frame that a prefill engine sends."""

    RECORD = 1
    WAIT = 2
    END = 3
    FAILED = 4
    SHARED = 5
    REFUSED = 6


#: Tells the decode engine that nothing is ready yet.
WAIT_FRAME = _HEAD.pack(Kind.WAIT)


def shared_frame(record: Record) -> bytes:
    """Returns the frame that announces a block in shared memory."""
    return _HEAD.pack(Kind.SHARED) + record.pack()


class WireError(Exception):
    """The peer refuses all prompts or violates the protocol. The message says how."""


class PromptError(Exception):
    """The prefill engine does not compute this prompt; it may compute others. The message says
    why."""


class SlowError(PromptError):
    """The prompt would have taken too long."""


class Welcome(NamedTuple):
    """A prefill engine's description of itself.

    Attributes:
        max_tokens: Maximum tokens of a prompt.
        local_name: Name of its local socket; empty if it has none.
    """

    max_tokens: int
    local_name: bytes


@dataclass(frozen=True)
class PrefillRequest:
    """A prompt to prefill for another engine.

    Blocks are sent in this order: those of the first KV cache group from `first_block` on, then the
    blocks of each other group that decoding after them requires.

    Attributes:
        identity: Digest of the model and the format of its KV cache.
        tokens: Token ids of the full blocks and one more, 4 bytes each.
        salt: Cache salt, as in the decode engine's prefix tree.
        first_block: Number of leading blocks that the decode engine already has.
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
        """Returns the bytes of the request."""
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
    """One end of a connection. One thread at a time may read, and one may send.

    Args:
        sock: A connected stream socket; closed by `close`.

    Attributes:
        is_closed: True once `close` was called on this end.
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
        """Authenticates both ends to each other: each proves that it has the secret.

        Raises:
            WireError: The peer has another secret.
            OSError: The peer has gone or takes too long.
        """
        deadline, nonce = time.monotonic() + GREETING_TIMEOUT, secrets.token_bytes(_NONCE_BYTES)
        self.send(MAGIC + nonce, GREETING_TIMEOUT)
        answer = self.read(_NONCE_BYTES + _PROOF_BYTES, deadline)
        nonces = nonce + answer[:_NONCE_BYTES]
        if not hmac.compare_digest(answer[_NONCE_BYTES:], _proof(secret, b"decode", nonces)):
            raise WireError("it has another secret")
        self.send(_proof(secret, b"prefill", nonces), GREETING_TIMEOUT)

    def greet_as_client(self, secret: bytes) -> None:
        """The decode engine's part of `greet_as_server`; raises the same errors."""
        deadline = time.monotonic() + GREETING_TIMEOUT
        greeting = self.read(len(MAGIC) + _NONCE_BYTES, deadline)
        if not greeting.startswith(MAGIC):
            raise WireError("it is not a prefill engine of this version")
        nonce = secrets.token_bytes(_NONCE_BYTES)
        nonces = greeting[len(MAGIC) :] + nonce
        self.send(nonce + _proof(secret, b"decode", nonces), GREETING_TIMEOUT)
        try:
            proof = self.read(_PROOF_BYTES, deadline)
        except ConnectionError:
            raise WireError("it has another secret") from None
        if not hmac.compare_digest(proof, _proof(secret, b"prefill", nonces)):
            raise WireError("it has another secret")

    def send_welcome(self, welcome: Welcome) -> None:
        """Sends what a decode engine must know before it sends a prompt."""
        name = welcome.local_name
        self.send(
            _MAX_TOKENS.pack(welcome.max_tokens) + _TEXT.pack(len(name)) + name, GREETING_TIMEOUT
        )

    def read_welcome(self, timeout: float) -> Welcome:
        """Reads what `send_welcome` sends; `timeout` is in seconds."""
        deadline = time.monotonic() + timeout
        [max_tokens] = _MAX_TOKENS.unpack(self.read(_MAX_TOKENS.size, deadline))
        return Welcome(max_tokens, self._read_text(deadline))

    def send_memory(self, fd: int, digest: bytes, num_bytes: int) -> None:
        """Passes a descriptor of shared memory over a local socket.

        Args:
            digest: See `memory.token_digest`.
            num_bytes: Size of the memory.
        """
        self._sends.settimeout(GREETING_TIMEOUT)
        socket.send_fds(self._sends, [_MEMORY.pack(digest, num_bytes)], [fd])

    def read_memory(self, timeout: float) -> tuple[int, bytes, int]:
        """Returns the arguments of `send_memory`. The caller closes the descriptor.

        Raises:
            OSError: The peer sent no descriptor, has gone, or takes too long.
        """
        deadline = time.monotonic() + timeout
        self._reads.settimeout(timeout)
        data, fds, _, _ = socket.recv_fds(self._reads, _MEMORY.size, 1)
        try:
            if not data or len(fds) != 1:
                raise ConnectionError("the peer sent no shared memory")
            digest, num_bytes = _MEMORY.unpack(data + self.read(_MEMORY.size - len(data), deadline))
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        return fds[0], digest, num_bytes

    # Frames.

    def send_request(self, request: PrefillRequest, timeout: float) -> None:
        """Sends a request. Only frames arrive after it, so reading ahead is safe from now on."""
        self._reads_ahead = True
        self.send(request.encode(), timeout)

    def read_request(self, max_tokens: int) -> PrefillRequest:
        """Reads a request of at most `max_tokens` tokens.

        Raises:
            WireError: The request is invalid or too long.
            OSError: The peer has gone or takes too long.
        """
        deadline = time.monotonic() + GREETING_TIMEOUT
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
            raise WireError("a salt is not UTF-8") from None
        tokens = self.read(num_tokens * _TOKEN_BYTES, deadline)
        return PrefillRequest(identity, tokens, salt, first_block, priority, bool(background))

    def send_record(self, record: Record, data: memoryview, timeout: float) -> None:
        """Sends a block. `timeout` applies to each wait until the peer accepts more bytes."""
        self._send([memoryview(_HEAD.pack(Kind.RECORD) + record.pack()), data.cast("B")], timeout)

    def read_released(self) -> int:
        """Waits, without a limit, for the offset of a released slot.

        Raises:
            OSError: The peer has gone.
        """
        self._reads_ahead = True
        return int(OFFSET.unpack(self.read(OFFSET.size, time.monotonic() + _FOREVER))[0])

    def send_end(self, failure: str | None, timeout: float) -> None:
        """Sends END, or FAILED with the reason."""
        if failure is None:
            self.send(_HEAD.pack(Kind.END), timeout)
        else:
            self._send_reason(Kind.FAILED, failure, timeout)

    def send_refusal(self, reason: str, timeout: float) -> None:
        """Tells the peer why none of its prompts will be computed."""
        self._send_reason(Kind.REFUSED, reason, timeout)

    def _send_reason(self, kind: Kind, reason: str, timeout: float) -> None:
        text = reason.encode("utf-8", "replace")[:1000]
        self.send(_HEAD.pack(kind) + _TEXT.pack(len(text)) + text, timeout)

    def read_kind(self, timeout: float) -> Kind:
        """Reads the kind of the next frame.

        Raises:
            WireError: The kind is unknown.
            OSError: The peer has gone, or is silent for `timeout` seconds.
        """
        [value] = self.read(_HEAD.size, time.monotonic() + timeout)
        try:
            return Kind(value)
        except ValueError:
            raise WireError(f"there is no frame of kind {value}") from None

    def read_record(self, timeout: float) -> Record:
        """Reads the record of a `RECORD` (without its bytes) or `SHARED` frame."""
        return Record.unpack(self.read(RECORD_BYTES, time.monotonic() + timeout))

    def read_reason(self, timeout: float) -> str:
        """Reads the reason of a `FAILED` or `REFUSED` frame."""
        return self._read_text(time.monotonic() + timeout).decode("utf-8", "replace")

    def _read_text(self, deadline: float) -> bytes:
        [length] = _TEXT.unpack(self.read(_TEXT.size, deadline))
        return self.read(length, deadline)

    # Bytes.

    def send(self, data: bytes, timeout: float) -> None:
        """Sends all bytes.

        Raises:
            OSError: The peer has gone, or accepted no bytes for `timeout` seconds.
        """
        self._send([memoryview(data)], timeout)

    def send_now(self, data: bytearray) -> int:
        """Sends what the socket accepts without blocking; returns the number of bytes.

        Raises:
            OSError: The peer has gone.
        """
        if not data:
            return 0
        self._sends.settimeout(0.0)
        try:
            return self._sends.send(data)
        except BlockingIOError:
            return 0

    def wait_until_writable(self, timeout: float) -> None:
        """Waits until `send_now` can send something.

        Raises:
            OSError: `timeout` seconds have passed, or this end was closed.
        """
        poll = select.poll()  # `select.select` has a limit of 1024 descriptors
        try:
            poll.register(self._sends, select.POLLOUT)
        except ValueError:
            raise ConnectionError("the connection was closed") from None
        if not poll.poll(timeout * 1000):
            raise TimeoutError("the peer does not read")

    def _send(self, parts: list[memoryview], timeout: float) -> None:
        """Sends parts together, so that the peer is not woken by a header without its bytes."""
        self._sends.settimeout(timeout)
        while parts:
            count = self._sends.sendmsg(parts)
            while parts and count >= parts[0].nbytes:
                count -= parts.pop(0).nbytes
            if count:
                parts[0] = parts[0][count:]

    def read(self, count: int, deadline: float) -> bytes:
        """Reads exactly `count` bytes; see `read_into`."""
        data = bytearray(count)
        self.read_into(memoryview(data), deadline)
        return bytes(data)

    def read_into(self, out: memoryview, deadline: float) -> None:
        """Fills `out`.

        Raises:
            OSError: The peer has gone, or the deadline (`time.monotonic`) has passed.
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
        """Copies buffered bytes to the beginning of `out`; returns the rest of `out`."""
        count = min(out.nbytes, self._ahead.nbytes)
        out[:count] = self._ahead[:count]
        self._ahead = self._ahead[count:]
        return out[count:]

    def _receive(self, out: memoryview, deadline: float) -> int:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the peer is silent")
        self._reads.settimeout(left)
        count = self._reads.recv_into(out)
        if not count:
            raise ConnectionError("the connection was closed")
        return count

    @property
    def is_closed_by_peer(self) -> bool:
        """True if the peer is known to have gone. Valid only while it has nothing to send."""
        self._reads.settimeout(0.0)
        try:
            return not self._reads.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def end_reading(self) -> None:
        """Ends this and every later read, also on another thread."""
        with contextlib.suppress(OSError):
            self._reads.shutdown(socket.SHUT_RD)

    def end_sending(self) -> None:
        """Tells the peer that nothing more will come."""
        with contextlib.suppress(OSError):
            self._sends.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Closes the connection; wakes a thread that waits for either direction."""
        self.is_closed = True
        with contextlib.suppress(OSError):
            self._reads.shutdown(socket.SHUT_RDWR)
        self._reads.close()
        self._sends.close()


def _proof(secret: bytes, end: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, end + nonces, "sha256")
