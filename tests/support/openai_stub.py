"""A minimal OpenAI-compatible server that streams a given text, and can misbehave."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class StubServer:
    """Runs on a free loopback port; a context manager.

    Args:
        text: Text of every answer.
        delay: Seconds between its pieces.
    """

    def __init__(self, text: str, delay: float = 0.0) -> None:
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self._next: tuple[str, Any] | None = None
        self._hanging = threading.Event()
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None: ...

            def do_GET(self) -> None:
                self._send(200, {"data": [{"id": "stub-model"}]})

            def do_POST(self) -> None:
                length = int(self.headers["content-length"])
                stub.requests.append(json.loads(self.rfile.read(length)))
                stub.keys.append(self.headers.get("authorization"))
                mischief, stub._next = stub._next, None
                if mischief and mischief[0] == "fail":
                    status, message = mischief[1]
                    self._send(status, {"error": {"message": message}})
                    return
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.end_headers()
                if mischief and mischief[0] == "hang":
                    stub._hanging.set()
                    time.sleep(5)
                    return
                for i in range(0, len(text), 5):
                    self._event({"choices": [{"delta": {"content": text[i : i + 5]}}]})
                    time.sleep(delay)
                    if mischief and mischief[0] == "break":
                        return
                self._event({"choices": [{"delta": {}, "finish_reason": "stop"}]})
                details = {"cached_tokens": 3}
                usage = {"prompt_tokens": 7, "completion_tokens": 9}
                self._event({"choices": [], "usage": {**usage, "prompt_tokens_details": details}})
                self.wfile.write(b"data: [DONE]\n\n")

            def _event(self, body: dict[str, Any]) -> None:
                data = json.dumps(body, ensure_ascii=False).encode()
                self.wfile.write(b": comment\n\ndata: " + data + b"\n\n")
                self.wfile.flush()

            def _send(self, status: int, body: dict[str, Any]) -> None:
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.end_headers()
                self.wfile.write(json.dumps(body).encode())

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def fail_next(self, status: int, message: str) -> None:
        """Makes the next answer an error."""
        self._next = "fail", (status, message)

    def break_next(self) -> None:
        """Makes the next answer break off."""
        self._next = "break", None

    def hang_next(self) -> None:
        """Makes the next answer never arrive."""
        self._next = "hang", None

    def wait_until_hanging(self) -> None:
        assert self._hanging.wait(300)

    def __enter__(self) -> StubServer:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
