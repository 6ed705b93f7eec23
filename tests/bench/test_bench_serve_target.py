"""`bench serve`: which address it asks, and what it says where a key is missing."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from typer.testing import CliRunner

from mlx_paged.cli.bench.serve import root_of
from mlx_paged.cli.main import app

KEY = "secret"


@pytest.fixture
def server() -> Iterator[tuple[str, list[str]]]:
    """A server that wants a key: its address, and the paths that were asked for."""
    paths: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

        def do_GET(self) -> None:
            paths.append(self.path)
            self._answer({"data": [{"id": "one"}]})

        def do_POST(self) -> None:
            paths.append(self.path)
            self.rfile.read(int(self.headers["content-length"]))
            self._answer(None)

        def _answer(self, body: object) -> None:
            if self.headers.get("authorization") != f"Bearer {KEY}":
                self.send_response(401)
                content = b'{"error": {"message": "no key"}}'
            else:
                self.send_response(200)
                chunk = {"choices": [{"text": "x", "finish_reason": "length"}]}
                stream = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
                content = (stream if body is None else json.dumps(body)).encode()
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=listening.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.server_port}", paths
    finally:
        listening.shutdown()
        thread.join()
        listening.server_close()


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
def test_the_address_is_given_with_or_without_v1(end: str, server) -> None:
    url, paths = server
    arguments = ["bench", "serve", "--base-url", url + end, "--num-prompts", "1", "--api-key", KEY]
    done = CliRunner().invoke(app, [*arguments, "--random-input-len", "4"])
    assert done.exit_code == 0, (done.output, done.exception)
    assert paths == ["/v1/models", "/v1/completions", "/v1/completions"]


def test_a_path_before_v1_is_kept() -> None:
    assert root_of("https://host/openai/v1/") == "https://host/openai"
    assert root_of("https://host/v10") == "https://host/v10"


@pytest.mark.parametrize("model", [[], ["--model", "one"]])
def test_a_missing_key_names_its_option(model: list[str], server) -> None:
    url, _ = server
    given = ["--base-url", url, "--num-prompts", "1", *model]
    done = CliRunner().invoke(app, ["bench", "serve", *given])
    assert done.exit_code != 0
    assert "401" in str(done.exception) and "(give --api-key)" in str(done.exception)
