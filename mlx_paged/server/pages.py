"""Serves the files of the chat page and the API reference, with their headers.

Text files are compressed for clients that accept gzip: once, when they are first asked for. The
compressed form has an ETag of its own, because a cache must not take one for the other.
"""

from __future__ import annotations

import gzip
import os
import threading
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import anyio
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.staticfiles import NotModifiedResponse, StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

_WEB = Path(__file__).parent / "web"
_HEADERS = {
    # Browsers revalidate files each time, because the files change together.
    "Cache-Control": "no-cache",
    # Sites that answers link to must not learn this server's address.
    "Referrer-Policy": "no-referrer",
}
_PAGE_HEADERS = {
    **_HEADERS,
    # Only resources from this server: it works offline, and no foreign code runs. Only the
    # sanitizer makes elements from text.
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data: blob:; "
    "media-src blob:; style-src 'self'; frame-ancestors 'none'; base-uri 'none'; "
    "form-action 'none'; require-trusted-types-for 'script'; trusted-types dompurify",
}
# Previews of HTML and diagrams that models wrote: no origin, no network, no way out of their frame.
_SANDBOX_POLICY = (
    "sandbox allow-scripts; default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; "
    "img-src data:; font-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
)
# Fonts and pictures are compressed already.
_COMPRESSIBLE = (".css", ".html", ".js", ".json", ".md", ".svg", ".txt")
_SMALLEST, _LEVEL = 1024, 6


def page(name: str) -> Callable[[Request], Awaitable[Response]]:
    """Returns an endpoint for an HTML page.

    Args:
        name: Name of its file.
    """
    sender, path = _Sender(directory=_WEB), _WEB / name

    async def endpoint(request: Request) -> Response:
        about = await anyio.to_thread.run_sync(os.stat, path)
        return sender.respond(str(path), about, request.scope, _PAGE_HEADERS, "text/html")

    return endpoint


def files() -> ASGIApp:
    """Returns the files that pages load, by their paths below the mount."""
    return _Sender(directory=_WEB)


def accepts_gzip(accepted: str) -> bool:
    """True if an `Accept-Encoding` header allows gzip, and prefers nothing else to it."""
    weights = {}
    for part in accepted.lower().split(","):
        coding, *parameters = (each.strip() for each in part.split(";"))
        weights[coding] = 1.0
        for parameter in parameters:
            name, _, value = parameter.partition("=")
            if name.strip() == "q":
                try:
                    weights[coding] = float(value)
                except ValueError:
                    weights[coding] = 0.0
    weight = weights.get("gzip", weights.get("x-gzip", weights.get("*", 0.0)))
    return weight > 0.0 and weight >= weights.get("identity", 0.0)


class _Sender(StaticFiles):
    """Sends files of a folder, or says that the client's copies are current."""

    def file_response(
        self,
        full_path: str | os.PathLike[str],
        stat_result: os.stat_result,
        scope: Scope,
        status_code: int = 200,
    ) -> Response:
        headers, media_type = _HEADERS, None
        if Path(full_path) == _WEB / "sandbox.html":
            headers = {**_HEADERS, "Content-Security-Policy": _SANDBOX_POLICY}
        if str(full_path).endswith(".woff2"):
            media_type = "font/woff2"  # unknown to Python before 3.14
        return self.respond(os.fspath(full_path), stat_result, scope, headers, media_type)

    def respond(
        self,
        path: str,
        about: os.stat_result,
        scope: Scope,
        headers: Mapping[str, str],
        media_type: str | None = None,
    ) -> Response:
        """Returns the response for a file.

        Args:
            about: The file's status, for its size and time.
        """
        asked = Headers(scope=scope)
        response: Response = FileResponse(path, stat_result=about, media_type=media_type)
        if path.endswith(_COMPRESSIBLE) and about.st_size >= _SMALLEST:
            response.headers["Vary"] = "Accept-Encoding"
            # A range counts bytes of the file itself, so it is sent uncompressed.
            accepted = ",".join(asked.getlist("accept-encoding"))
            if "range" not in asked and accepts_gzip(accepted):
                response = _Compressed(path, about, response.headers)
        if self.is_not_modified(response.headers, asked):
            response = NotModifiedResponse(response.headers)
        response.headers.update(headers)
        return response


class _Stamp(NamedTuple):
    """Differs between two contents of a file."""

    modified: int  # nanoseconds
    num_bytes: int


class _Cache:
    """The compressed contents of files. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[str, tuple[_Stamp, bytes]] = {}  # by path

    def get(self, path: str, stamp: _Stamp) -> bytes | None:
        """Returns what is there already."""
        known, content = self._found.get(path, (None, b""))
        return content if known == stamp else None

    def make(self, path: str, stamp: _Stamp) -> bytes:
        """Returns the compressed file. Only one of several threads compresses it."""
        with self._lock:
            content = self.get(path, stamp)
            if content is None:
                content = gzip.compress(Path(path).read_bytes(), _LEVEL, mtime=0)
                self._found[path] = stamp, content
            return content


_cache = _Cache()


class _Compressed(Response):
    """A file's compressed content.

    Args:
        headers: Those of the file as it is.
    """

    def __init__(self, path: str, about: os.stat_result, headers: Mapping[str, str]) -> None:
        super().__init__(headers=headers)
        self._path = path
        self._stamp = _Stamp(about.st_mtime_ns, about.st_size)
        self.headers["Content-Encoding"] = "gzip"
        self.headers["ETag"] = headers["etag"].removesuffix('"') + '-gzip"'
        del self.headers["Accept-Ranges"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        content = _cache.get(self._path, self._stamp)
        if content is None:
            content = await anyio.to_thread.run_sync(_cache.make, self._path, self._stamp)
        self.headers["Content-Length"] = str(len(content))
        self.body = b"" if scope["method"] == "HEAD" else content
        await super().__call__(scope, receive, send)
