"""Runs a coding agent from npm against `mlx-paged serve`, offline, for one turn with a tool.

The agent is asked to read a file and report its contents. The embedded model is too small for that,
so a proxy between the two sets request fields that a client could have set itself: it names the
tool that must be called, and narrows the schemas until the grammar leaves one answer. The test
covers the protocol, not the model.

An agent's script (`codex.py`, `claude_code.py`, `opencode.py`) defines its installation,
configuration, start and checks:

    python scripts/agents/codex.py --folder /tmp/codex

The configuration is the one in `examples/agents`, for the embedded model.
The folder receives the agent, a copy of the model, the agent's home, and `log.txt`. Installation
needs the network; everything else runs in a network namespace that has only loopback.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Iterator
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

NOTE, WORD = "note.txt", "walnut"
TASK = f"Read the file {NOTE} and say which word it is about."
#: JSON Schema of the answer.
ANSWER = {
    "type": "object",
    "properties": {"word": {"type": "string", "enum": [WORD]}},
    "required": ["word"],
    "additionalProperties": False,
}
#: Agents send 14,000 tokens or more in their first request.
MAX_MODEL_LEN = 65536
_PATIENCE = 900  # timeout of each wait in seconds
_CONFIGURATIONS = Path(__file__).parents[2] / "examples/agents"
_SERVE = "from mlx_paged.cli.main import main; main()"

Body = dict[str, Any]


class Agent(ABC):
    """One agent.

    Attributes:
        package: Its npm package.
        program: Its command, as linked by npm.
    """

    package: ClassVar[str]
    program: ClassVar[str]

    @abstractmethod
    def command(self, program: Path, home: Path, url: str) -> tuple[list[str], dict[str, str]]:
        """Returns the command that starts it in the note's folder.

        Args:
            home: An empty folder for its configuration.
            url: The proxy's URL, without a path.

        Returns:
            The command, and additional environment variables.
        """

    @abstractmethod
    def change(self, path: str, body: Body) -> None:
        """Changes a request on its way to the server, so that only one answer is possible."""

    @abstractmethod
    def check(self, exchanges: list[Exchange], output: str) -> None:
        """Checks the turn; raises `AssertionError` if anything is wrong.

        Args:
            output: The agent's output.
        """


class Exchange:
    """A request of the agent, and the server's answer.

    Attributes:
        body: The body as the agent sent it; None if there was none.
        status: HTTP status of the answer.
        answer: Body of the answer.
    """

    def __init__(self, method: str, path: str, body: Body | None) -> None:
        self.method = method
        self.path = path
        self.body = body
        self.status = 0
        self.answer = b""

    @property
    def events(self) -> list[dict[str, Any]]:
        """The events of a streamed answer."""
        lines = self.answer.decode().splitlines()
        found = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        return [json.loads(data) for data in found if data != "[DONE]"]

    @property
    def choices(self) -> list[dict[str, Any]]:
        """The choices of a streamed chat."""
        return [choice for event in self.events for choice in event.get("choices", ())]

    def __str__(self) -> str:
        size = f", {len(json.dumps(self.body))} characters" if self.body else ""
        counts: dict[str, int] = {}
        for event in self.events:
            kind = event.get("type") or event["object"]  # chunks of chats have no type
            counts[kind] = counts.get(kind, 0) + 1
        told = "".join(f"\n    {number:4} {kind}" for kind, number in counts.items())
        return f"{self.method} {self.path}{size}: {self.status}{told}"


def main(agent: Agent) -> None:
    """Installs the agent, then runs it without a network."""
    parser = argparse.ArgumentParser(description=type(agent).__doc__)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / agent.program)
    parser.add_argument("--offline", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder: Path = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if options.offline:
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        run(agent, folder)
        return
    subprocess.run(
        ["npm", "install", "--no-fund", "--no-audit", "--prefix", folder, agent.package], check=True
    )
    script = [sys.executable, sys.argv[0], "--folder", str(folder), "--offline"]
    sys.exit(subprocess.run(["unshare", "--map-root-user", "--net", *script]).returncode)


def run(agent: Agent, folder: Path) -> None:
    """Runs one turn; writes `log.txt` to the folder.

    Raises:
        AssertionError: A check failed.
    """
    check_offline()
    program = folder / "node_modules" / ".bin" / agent.program
    work, home = fresh(folder / "work"), fresh(folder / "home")
    (work / NOTE).write_text(f"The word is {WORD}.\n")
    log: list[str] = [f"{agent.package} {version(folder, agent.package)}"]
    try:
        with serving(folder) as server, proxy(server, agent) as (url, exchanges):
            command, environment = agent.command(program, home, url)
            log.append(f"$ {' '.join(command)}")
            done = subprocess.run(
                command, cwd=work, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True, timeout=_PATIENCE,
                env={**os.environ, "HOME": str(home), "PWD": str(work), **environment},
            )  # fmt: skip
            log += [done.stdout, *map(str, exchanges)]
        assert done.returncode == 0, f"{agent.program} ended with {done.returncode}"
        for exchange in exchanges:
            assert exchange.status == 200, f"{exchange}: {exchange.answer.decode()}"
        agent.check(exchanges, done.stdout)
        log.append("everything is as it should be")
    except BaseException as error:
        log.append(f"{type(error).__name__}: {error}")
        raise
    finally:
        (folder / "log.txt").write_text("\n".join(log) + "\n")
        print("\n".join(log))


def check_offline() -> None:
    """Checks that there is no network except loopback."""
    names = [name for _, name in socket.if_nameindex()]
    assert names == ["lo"], f"there is a network: {names}"


def fresh(folder: Path) -> Path:
    """Makes an empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def version(folder: Path, package: str) -> str:
    """Version of an installed package."""
    about = json.loads((folder / "node_modules" / package / "package.json").read_text())
    return str(about["version"])


def long_model(folder: Path) -> Path:
    """A copy of the embedded model that accepts long prompts, although it was trained on short."""
    import mlx_paged.demo

    copy = folder / "model"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(Path(mlx_paged.demo.__file__).parent / "model", copy)
    config = json.loads((copy / "config.json").read_text())
    config["max_position_embeddings"] = MAX_MODEL_LEN
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def configuration(name: str, url: str) -> str:
    """A file of examples/agents, for this server and the embedded model instead of its own."""
    text = (_CONFIGURATIONS / name).read_text()
    for theirs, ours in (
        ("http://127.0.0.1:8000", url),
        ("qwen3-coder", "mlx-paged-demo"),
        ("65536", str(MAX_MODEL_LEN)),
    ):
        assert theirs in text, f"{name} has no {theirs}"
        text = text.replace(theirs, ours)
    return text


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[int]:
    """Starts `mlx-paged serve`; yields its port when it is ready. Its log is `server.txt`."""
    port = free_port()
    command = [
        sys.executable, "-c", _SERVE, "serve", str(long_model(folder)), "--port", str(port),
        "--served-model-name", "mlx-paged-demo", "--tool-template", "--log-level", "info",
        "--kv-cache-memory", str(1 << 30),
    ]  # fmt: skip
    with (folder / "server.txt").open("w") as log:
        started = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + _PATIENCE
            while not is_ready(port):
                assert started.poll() is None, "the server has ended: see server.txt"
                assert time.monotonic() < deadline, "the server is not ready: see server.txt"
                time.sleep(0.1)
            yield port
        finally:
            started.terminate()
            started.wait()


def is_ready(port: int) -> bool:
    """True if the server accepts requests."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready") as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@contextlib.contextmanager
def proxy(port: int, agent: Agent) -> Iterator[tuple[str, list[Exchange]]]:
    """Runs the proxy between agent and server; yields its address and the list of exchanges."""
    exchanges: list[Exchange] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None: ...

        def _pass(self) -> None:
            sent = self.rfile.read(int(self.headers.get("content-length") or 0))
            body = json.loads(sent) if sent else None
            exchange = Exchange(self.command, self.path, json.loads(sent) if sent else None)
            exchanges.append(exchange)
            if body is not None:
                agent.change(self.path, body)
                sent = json.dumps(body).encode()
            skipped = ("host", "content-length", "connection", "accept-encoding")
            headers = {k: v for k, v in self.headers.items() if k.lower() not in skipped}
            connection = HTTPConnection("127.0.0.1", port, timeout=_PATIENCE)
            connection.request(self.command, self.path, sent or None, headers)
            answer = connection.getresponse()
            exchange.status = answer.status
            self.send_response(answer.status)
            for name in ("content-type", "x-request-id"):
                if name in answer.headers:
                    self.send_header(name, answer.headers[name])
            self.send_header("connection", "close")
            self.end_headers()
            while piece := answer.read1(1 << 16):
                exchange.answer += piece
                self.wfile.write(piece)
                self.wfile.flush()
            self.close_connection = True
            connection.close()

        do_GET = do_POST = do_HEAD = _pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", exchanges
    finally:
        server.shutdown()
        server.server_close()
