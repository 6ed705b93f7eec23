"""A Hugging Face hub with a few models, on this machine."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "5f" * 20


class FakeHub:
    """Files of models by hub id.

    Attributes:
        sent: Bytes of files that were sent.
        breaks_after: Ends the connection once, after so many bytes of a file; None: never.
        is_gone: True if no file is sent any more once the connection was ended.
        goes_on: Files are sent beyond their first half only once it is set.
        sizes: Sizes that the hub claims, by file name, in place of the real ones.
    """

    def __init__(self, models: Mapping[str, Mapping[str, bytes]]) -> None:
        self.models = models
        self.sent = 0
        self.breaks_after: int | None = None
        self.is_gone = False
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.sizes: dict[str, int] = {}
        self.url = ""

    @contextmanager
    def running(self) -> Iterator[FakeHub]:
        handler = type("Handler", (_Handler,), {"hub": self})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, *_: Any) -> None:
        """Prints nothing."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        api = parts[:2] == ["api", "models"]
        name = "/".join(parts[2:4] if api else parts[:2])
        files = self.hub.models.get(name)
        if files is None:
            self._error("RepoNotFound", f"no model {name}")
        elif api and parts[4:5] in (["tree"], ["revision"], []):
            revision = parts[5] if len(parts) > 5 else "main"
            if revision not in ("main", COMMIT):
                self._error("RevisionNotFound", f"no revision {revision}")
                return
            entries = [
                {"type": "file", "path": path, "size": len(data), "oid": _etag(data)}
                for path, data in files.items()
            ]
            siblings = [{"rfilename": path, "size": len(files[path])} for path in files]
            info = {"id": name, "modelId": name, "sha": COMMIT, "siblings": siblings}
            self._json(entries if parts[4:5] == ["tree"] else info)
        elif self.hub.is_gone and self.hub.breaks_after is None and self.command == "GET":
            self._error("EntryNotFound", "gone")
        elif parts[2:3] == ["resolve"] and (data := files.get("/".join(parts[4:]))) is not None:
            self._file("/".join(parts[4:]), data)
        else:
            self._error("EntryNotFound", "no such file")

    def _json(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _error(self, code: str, message: str) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", message)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _file(self, path: str, data: bytes) -> None:
        begin = 0
        asked = self.headers.get("Range", "")
        if asked.startswith("bytes="):
            begin = int(asked[len("bytes=") :].split("-")[0])
        self.send_response(206 if begin else 200)
        self.send_header("ETag", f'"{_etag(data)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        if begin:
            self.send_header("Content-Range", f"bytes {begin}-{len(data) - 1}/{len(data)}")
        size = self.hub.sizes.get(path, len(data) - begin)
        self.send_header("Content-Length", str(size))
        self.end_headers()
        if self.command == "HEAD":
            return
        rest = data[begin:]
        most = self.hub.breaks_after
        if most is not None and len(rest) > most:
            rest, self.close_connection, self.hub.breaks_after = rest[:most], True, None
        half = len(rest) // 2
        for part in (rest[:half], rest[half:]):
            self.hub.sent += len(part)
            self.wfile.write(part)
            self.hub.goes_on.wait()


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
