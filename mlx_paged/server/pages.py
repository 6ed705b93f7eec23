"""Serves the files of the chat page and the API reference, compressed, with their headers."""

from __future__ import annotations

import os
from pathlib import Path

from starlette.datastructures import Headers
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles
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


def page(name: str) -> ASGIApp:
    """Returns an endpoint for an HTML page.

    Args:
        name: Name of its file.
    """

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        response = FileResponse(_WEB / name, media_type="text/html", headers=_PAGE_HEADERS)
        await response(scope, receive, send)

    return _Compressed(app, name)


def files() -> ASGIApp:
    """The files that pages load, by their paths below the mount."""
    return _Compressed(_WebFiles(directory=_WEB))


class _Compressed:
    """Compresses text files for clients that accept gzip.

    Args:
        app: The application that sends files.
        name: Name of the only file; None takes it from the path.
    """

    def __init__(self, app: ASGIApp, name: str | None = None) -> None:
        self._plain, self._name = app, name
        self._gzip = GZipMiddleware(app, minimum_size=_SMALLEST, compresslevel=_LEVEL)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = self._name or scope["path"]
        # A range counts bytes of the file itself, so it is sent uncompressed.
        is_whole = "range" not in Headers(scope=scope)
        compresses = is_whole and name.endswith(_COMPRESSIBLE)
        await (self._gzip if compresses else self._plain)(scope, receive, send)


class _WebFiles(StaticFiles):
    def file_response(
        self,
        full_path: str | os.PathLike[str],
        stat_result: os.stat_result,
        scope: Scope,
        status_code: int = 200,
    ) -> Response:
        response = super().file_response(full_path, stat_result, scope, status_code)
        response.headers.update(_HEADERS)
        if Path(full_path) == _WEB / "sandbox.html":
            response.headers["Content-Security-Policy"] = _SANDBOX_POLICY
        if isinstance(response, FileResponse) and str(response.path).endswith(".woff2"):
            response.headers["Content-Type"] = "font/woff2"  # unknown to Python before 3.14
        return response
