"""Reads the bytes of a URL in a prompt. Prompts come from strangers, so URLs are restricted.

- `data:` URLs contain their bytes.
- `file:` URLs name files under one folder, after symbolic links are resolved.
- `http:` and `https:` URLs are fetched from public addresses. A host is looked up once for each
  request, and the connection goes to the checked address. Redirects are followed here, each checked
  like a URL of the prompt. Proxies from the environment are not used.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import socket
import stat
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, unquote, unquote_to_bytes, urljoin, urlsplit

from mlx_paged.addresses import Reach, UnreachableHostError, addresses_of
from mlx_paged.multimodal.items import Deadline, Unusable

if TYPE_CHECKING:
    import ssl

    import httpcore2

_MAX_URL = 8192  # characters of a URL to fetch
_REDIRECTS = (301, 302, 303, 307, 308)
_PORTS = {"http": 80, "https": 443}
# Seconds between two checks, by a thread that reads a socket, that anybody still waits.
_TURN = 0.25
# Seconds for one address if there are others.
_PATIENCE = 5.0
# Seconds for a TLS handshake, which cannot be interrupted.
_HANDSHAKE = 10.0
_USER_AGENT = "mlx-paged"
_BASE64_HEAD = re.compile(r"[^,]*;base64", re.IGNORECASE)
_UNSAFE = re.compile(r"[\x00-\x20\x7f\\]")


def read_url(
    url: str,
    *,
    max_bytes: int,
    max_redirects: int,
    local_path: Path | None,
    domains: Sequence[str] | None,
    deadline: Deadline,
) -> bytes:
    """Returns the bytes of a URL.

    Args:
        max_bytes: Larger contents are refused before they are read completely.
        max_redirects: Maximum redirects.
        local_path: Resolved folder of files that URLs may name; None allows no files.
        domains: Hosts to fetch from, whatever their addresses; None: any with a public address.
        deadline: The time limit.

    Raises:
        Unusable: The URL is not allowed, or has no content.
        CancelledError: The request was cancelled.
    """
    scheme = url[:16].partition(":")[0].lower()
    if scheme == "data":
        return data_of(url, max_bytes)
    if scheme == "file":
        return _local_file(url, max_bytes, local_path, deadline)
    if scheme in _PORTS:
        return _fetch(url, max_bytes, max_redirects, domains, deadline)
    raise Unusable("it must be a data:, http:, https: or file: URL")


# data:


def data_of(url: str, max_bytes: int) -> bytes:
    """Returns the bytes of a `data:` URL.

    Raises:
        Unusable: It is malformed, or too long.
    """
    head, comma, body = url[5:].partition(",")
    if not comma:
        raise Unusable("its data: URL has no comma before the data")
    if not _BASE64_HEAD.fullmatch(head):
        if len(body) > 3 * max_bytes:
            raise _too_large(max_bytes)
        found = unquote_to_bytes(body)
        if len(found) > max_bytes:
            raise _too_large(max_bytes)
        return found
    return from_base64(unquote(body) if "%" in body else body, max_bytes)


def from_base64(text: str, max_bytes: int) -> bytes:
    """Decodes base64, standard or URL-safe, padded or not. Ignores spaces and line ends.

    Raises:
        Unusable: It is not base64, or too long.
    """
    if len(text) * 3 // 4 > max_bytes * 2:  # before any copy; there may be many spaces
        raise _too_large(max_bytes)
    try:
        raw = text.encode("ascii")
    except UnicodeEncodeError:
        raise Unusable("its data is not base64") from None
    try:
        found = binascii.a2b_base64(raw, strict_mode=True)
    except binascii.Error:
        raw = raw.translate(bytes.maketrans(b"-_", b"+/"), b" \t\r\n").rstrip(b"=")
        try:
            found = base64.b64decode(raw + b"=" * (-len(raw) % 4), validate=True)
        except binascii.Error:
            raise Unusable("its data is not base64") from None
    if len(found) > max_bytes:
        raise _too_large(max_bytes)
    return found


# file:


def _local_file(url: str, max_bytes: int, allowed: Path | None, deadline: Deadline) -> bytes:
    if allowed is None:
        raise Unusable("files may not be named: allowed_local_media_path is not set")
    try:
        parts = urlsplit(url)
        if parts.netloc not in ("", "localhost"):
            raise Unusable("a file: URL must have no host")
        path = Path(unquote(parts.path, errors="strict")).resolve(strict=True)
    except (OSError, ValueError, RuntimeError):
        # One message for missing and forbidden files, so that clients cannot learn which exist.
        raise Unusable("there is no such file under allowed_local_media_path") from None
    if not path.is_relative_to(allowed):
        raise Unusable("there is no such file under allowed_local_media_path")
    return read_file(path, max_bytes, deadline)


def read_file(path: Path, max_bytes: int, deadline: Deadline) -> bytes:
    """Returns the bytes of a regular file.

    Raises:
        Unusable: There is none, or it is too large.
        CancelledError: The request was cancelled.
    """
    try:
        # Non-blocking, because a pipe may have no writer.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with open(descriptor, "rb") as file:
            about = os.fstat(descriptor)
            if not stat.S_ISREG(about.st_mode):
                raise Unusable("it is not a regular file")
            if about.st_size > max_bytes:
                raise _too_large(max_bytes)
            chunks: list[bytes] = []
            left = max_bytes + 1
            while left and (chunk := file.read(min(left, 1 << 20))):
                deadline.check()
                chunks.append(chunk)
                left -= len(chunk)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "its name is wrong"
        raise Unusable(f"the file cannot be read: {reason}") from None
    if not left:
        raise _too_large(max_bytes)
    return b"".join(chunks)


# http: and https:


def _fetch(
    url: str, max_bytes: int, max_redirects: int, domains: Sequence[str] | None, deadline: Deadline
) -> bytes:
    try:
        import httpcore2
    except ImportError:
        raise Unusable("URLs need the package httpx2: pip install 'mlx-paged[vision]'") from None

    for _ in range(max_redirects + 1):
        parts = _checked(url, domains)
        try:
            found = _get(parts, max_bytes, domains, deadline)
        except (httpcore2.TimeoutException, TimeoutError):
            deadline.check()
            raise Unusable(f"{parts.hostname} does not answer") from None
        except (
            httpcore2.NetworkError,
            httpcore2.ProtocolError,
            httpcore2.UnsupportedProtocol,
            httpcore2.ConnectionNotAvailable,
            OSError,
            ValueError,
        ):
            deadline.check()
            raise Unusable(f"it cannot be fetched from {parts.hostname}") from None
        if isinstance(found, bytes):
            return found
        url = found
    raise Unusable(f"it redirects more than {max_redirects} times")


def _checked(url: str, domains: Sequence[str] | None) -> SplitResult:
    """Splits a URL that may be fetched."""
    # Parsers disagree about these characters, and the checked host must be the one to connect to.
    if len(url) > _MAX_URL or _UNSAFE.search(url):
        raise Unusable(f"its URL must have at most {_MAX_URL} characters, and no spaces")
    try:
        parts = urlsplit(url)
        port, host = parts.port, parts.hostname
    except ValueError:
        raise Unusable("its URL is not well formed") from None
    if parts.scheme not in _PORTS or not host or port == 0:
        raise Unusable("its URL must be http: or https: with a host")
    if "@" in parts.netloc:
        raise Unusable("its URL must have no user name")
    if domains is not None and _plain(host) not in domains:
        raise Unusable("its host is not one of allowed_media_domains")
    return parts


def _plain(host: str) -> str:
    return host.lower().rstrip(".")


def _get(
    parts: SplitResult, max_bytes: int, domains: Sequence[str] | None, deadline: Deadline
) -> bytes | str:
    """Makes one request; returns the bytes of the answer, or the target of a redirect."""
    import httpcore2

    host = parts.hostname
    assert host is not None
    default = _PORTS[parts.scheme]
    is_v6 = ":" in host
    shown = f"[{host}]" if is_v6 else host
    if parts.port not in (None, default):
        shown += f":{parts.port}"
    try:
        name = host.encode("ascii" if is_v6 or host.isascii() else "idna")
        target = parts.path or "/"
        if parts.query:
            target += f"?{parts.query}"
        encoded = _percent_encoded(target)
    except UnicodeError:
        raise Unusable("its URL is not well formed") from None
    url = httpcore2.URL(
        scheme=parts.scheme.encode(), host=name, port=parts.port or default, target=encoded
    )
    headers: dict[bytes | str, bytes | str] = {
        "Host": shown.encode("idna").decode() if not shown.isascii() else shown,
        "User-Agent": _USER_AGENT,
        "Accept": "*/*",
        "Accept-Encoding": "identity",  # so that no compressed bomb is unpacked
        "Connection": "close",
    }
    backend = _pinned_backend(Reach.PUBLIC if domains is None else Reach.ANY, deadline)
    context = _ssl_context() if parts.scheme == "https" else None
    with (
        httpcore2.ConnectionPool(ssl_context=context, network_backend=backend) as pool,
        pool.stream("GET", url, headers=headers) as response,
    ):
        found = {name.lower(): value for name, value in response.headers}
        if response.status in _REDIRECTS and b"location" in found:
            location = found[b"location"].decode("latin-1")
            try:
                return urljoin(parts.geturl(), location)
            except ValueError:
                raise Unusable("it redirects to a URL that is not well formed") from None
        if response.status != 200:
            raise Unusable(f"{host} answered with status {response.status}")
        if found.get(b"content-encoding", b"identity").lower() != b"identity":
            raise Unusable(f"{host} sent compressed data, which was not requested")
        length = found.get(b"content-length", b"")
        if length.isdigit() and int(length[:20]) > max_bytes:
            raise _too_large(max_bytes)
        chunks, size = [], 0
        for chunk in response.iter_stream():
            deadline.check()
            size += len(chunk)
            if size > max_bytes:
                raise _too_large(max_bytes)
            chunks.append(chunk)
        return b"".join(chunks)


def _percent_encoded(target: str) -> bytes:
    return target.encode("ascii") if target.isascii() else _escape(target)


def _escape(target: str) -> bytes:
    return b"".join(
        bytes([byte]) if byte < 128 else b"%%%02X" % byte for byte in target.encode("utf-8")
    )


@lru_cache(maxsize=1)
def _ssl_context() -> ssl.SSLContext:
    import httpx2

    return httpx2.create_ssl_context()


def _pinned_backend(reach: Reach, deadline: Deadline) -> httpcore2.NetworkBackend:
    """A network that connects to checked addresses, and obeys `deadline`."""
    import httpcore2

    class Stream(httpcore2.NetworkStream):
        def __init__(self, sock: socket.socket) -> None:
            self._socket = sock

        def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
            while True:
                self._socket.settimeout(min(_TURN, deadline.check()))
                try:
                    return self._socket.recv(max_bytes)
                except TimeoutError:
                    pass

        def write(self, buffer: bytes, timeout: float | None = None) -> None:
            self._socket.settimeout(deadline.check())
            self._socket.sendall(buffer)

        def close(self) -> None:
            self._socket.close()

        def start_tls(
            self,
            ssl_context: ssl.SSLContext,
            server_hostname: str | None = None,
            timeout: float | None = None,
        ) -> httpcore2.NetworkStream:
            self._socket.settimeout(min(_HANDSHAKE, deadline.check()))  # for the whole handshake
            try:
                wrapped = ssl_context.wrap_socket(self._socket, server_hostname=server_hostname)
            except BaseException:
                self.close()
                raise
            return Stream(wrapped)

        def get_extra_info(self, info: str) -> Any:
            return None

    class Backend(httpcore2.NetworkBackend):
        def connect_tcp(
            self,
            host: str,
            port: int,
            timeout: float | None = None,
            local_address: str | None = None,
            socket_options: Iterable[Any] | None = None,
        ) -> httpcore2.NetworkStream:
            try:
                *others, last = addresses_of(host, port, reach)
            except UnreachableHostError as error:
                named = ": allowed_media_domains must name it" if reach is Reach.PUBLIC else ""
                raise Unusable(f"{error}{named}" if error.is_forbidden else str(error)) from None
            for each in others:
                with suppress(OSError):  # such as for IPv6, if this machine has none
                    return Stream(_connected(each, min(_PATIENCE, deadline.check())))
            return Stream(_connected(last, deadline.check()))

    return Backend()


def _connected(where: tuple[Any, ...], timeout: float) -> socket.socket:
    family, kind, protocol, address = where
    sock = socket.socket(family, kind, protocol)
    try:
        sock.settimeout(timeout)
        sock.connect(address)
    except BaseException:
        sock.close()
        raise
    return sock


def _too_large(max_bytes: int) -> Unusable:
    return Unusable(f"it has more than {max_bytes} bytes")
