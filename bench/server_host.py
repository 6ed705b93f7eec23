"""Host time of the server per streamed token: event loop, engine thread, garbage collector.

    python bench/server_host.py                               # 256 streams of this checkout
    python bench/server_host.py --against ../other/checkout   # both, in turns
    python bench/server_host.py --engine-process              # besides, two processes

The real server answers over HTTP with a model that computes nothing (`host_time.null_model`). A
step takes `--step-ms` like one on a GPU: the engine's thread waits for it without the interpreter
lock. The client is this process. It only counts and times what arrives.

Prints the CPU microseconds of the event loop's thread per event and of the engine's per token,
how long a step's host work waited for the interpreter lock or a processor, events per token, the
longest gap between two arrivals of one stream, and the collector's pauses.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import json
import os
import selectors
import socket
import statistics
import struct
import sys
import tempfile
import time
import urllib.request
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
POLL_SECONDS = 0.002
VOCAB_SIZE = 4096  # with grammars: all tokens of the embedded tokenizer
HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Connection: close\r\nContent-Length: %d\r\n\r\n"
)
SCHEMA = {
    "type": "object",
    "properties": {"names": {"type": "array", "items": {"type": "string"}, "minItems": 60}},
    "required": ["names"],
}


class Clocks:
    """The clocks of the engine's thread, which another process may read.

    Args:
        path: A file that both processes map.
    """

    _FORM = struct.Struct("=qdd")

    def __init__(self, path: str) -> None:
        self._path = path

    def write(self, steps: int, awake: float) -> None:
        """Call it on the engine's thread.

        Args:
            awake: Seconds in which the thread worked, or waited for the lock or a processor.
        """
        Path(self._path).write_bytes(self._FORM.pack(steps, awake, time.thread_time()))

    def read(self) -> dict[str, float]:
        """The clocks after the last step."""
        data = Path(self._path).read_bytes()
        values = self._FORM.unpack(data) if data else (0, 0.0, 0.0)
        return dict(zip(("steps", "awake", "engine"), values))


class Probe:
    """The CPU time of the server's two threads and the collector's pauses, over HTTP at ``/probe``.

    Args:
        app: The server's application; the probe answers before it.
    """

    def __init__(self, app: Any, clocks: Clocks) -> None:
        self._app = app
        self._clocks = clocks
        self._pauses: list[tuple[int, float]] = []  # generation, seconds
        self._num_collected = 0
        self._begin = 0.0
        gc.callbacks.append(self._on_collection)

    def _on_collection(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._begin = time.perf_counter()
            return
        self._pauses.append((info["generation"], time.perf_counter() - self._begin))
        self._num_collected += info["collected"]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope.get("path") != "/probe":
            await self._app(scope, receive, send)
            return
        full = [seconds for generation, seconds in self._pauses if generation == 2]
        body = json.dumps({
            "loop": time.thread_time(),
            **self._clocks.read(),
            "pauses": sum(seconds for _, seconds in self._pauses),
            "longest_pause": max((seconds for _, seconds in self._pauses), default=0.0),
            "full": len(full),
            "collected": self._num_collected,
            "objects": len(gc.get_objects()),
        }).encode()  # fmt: skip
        self._pauses.clear()
        self._num_collected = 0
        head = [(b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": body})


def paced_engine(
    clocks: Clocks, num_streams: int, step_seconds: float, *, has_grammars: bool
) -> Any:
    """Makes an engine whose steps take the time of a device."""
    import host_time
    import mlx.core as mx

    mx.set_default_device(mx.cpu)
    if has_grammars:
        host_time.VOCAB_SIZE = VOCAB_SIZE
    engine = host_time.null_engine(
        max_num_seqs=num_streams, max_model_len=4096, enable_prefix_caching=False
    )
    read, steps, due, awake, total = engine._executor.read, 0, 0.0, time.perf_counter(), 0.0

    def paced_read() -> Any:
        nonlocal steps, due, awake, total
        now = time.perf_counter()
        steps, total = steps + 1, total + now - awake
        clocks.write(steps, total)
        time.sleep(max(0.0, due - now))
        awake = max(due, now)  # From here on, the device waits for the host.
        due = awake + step_seconds
        return read()

    engine._executor.read = paced_read  # type: ignore[method-assign]
    return engine


def pace_process(make_engine: Any) -> None:
    """Has an engine's process make this engine."""
    from mlx_paged.engine.process import child

    child.make_engine = lambda *_, **__: make_engine()  # type: ignore[assignment]


def run_server(port: int, make_engine: Any, clocks: Clocks, *, engine_process: bool) -> None:
    """Serves until SIGTERM."""
    import asyncio

    from mlx_paged.engine.async_engine import AsyncEngine
    from mlx_paged.server.config import ServerConfig
    from mlx_paged.server.engine_service import EngineService
    from mlx_paged.server.run import serve

    engine: Any
    if engine_process:
        from mlx_paged.engine.process.client import ProcessEngine

        engine = ProcessEngine.from_model(prepare=partial(pace_process, make_engine))
    else:
        engine = AsyncEngine(make_engine)
    asyncio.run(engine.ready())

    def make_service(address: str) -> EngineService:
        service = EngineService(engine, config, address)
        service.app = Probe(service.app, clocks)
        return service

    config = ServerConfig(served_model_names=("null",), log_requests=False)
    sys.exit(serve(make_service, config, port=port))


def load(port: int, num_streams: int, num_tokens: int, fields: dict[str, Any]) -> dict[str, float]:
    """Streams answers to `num_streams` requests at once; returns the figures of a load."""
    before = probe(port)
    selector, longest, events, num_bytes = selectors.DefaultSelector(), 0.0, 0, 0
    begin = time.perf_counter()
    for i in range(num_streams):
        body = {
            "model": "null", "stream": True, "max_tokens": num_tokens, "ignore_eos": True,
            "temperature": 0, "prompt": [2 + i % 200, *range(2, 30)], **fields,
        }  # fmt: skip
        text = json.dumps(body).encode()
        sock = socket.create_connection(("127.0.0.1", port))
        sock.sendall(HEAD % len(text) + text)
        sock.setblocking(False)
        selector.register(sock, selectors.EVENT_READ, [0.0])
    while selector.get_map():
        # Polls, because a client that sleeps in `select` makes the server's writes wake it up.
        time.sleep(POLL_SECONDS)
        for key, _ in selector.select(0):
            data = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
            now, last = time.perf_counter(), key.data
            if not data:
                selector.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]
                continue
            found = data.count(b"data: {")
            events += found
            num_bytes += len(data)
            if found:
                if last[0]:
                    longest = max(longest, now - last[0])
                last[0] = now
    seconds = time.perf_counter() - begin
    after = probe(port)
    tokens = num_streams * num_tokens
    steps, engine, awake = (after[name] - before[name] for name in ("steps", "engine", "awake"))
    return {
        "loop_us_per_event": (after["loop"] - before["loop"]) / events * 1e6,
        "engine_us_per_token": engine / tokens * 1e6,
        "engine_ms_per_step": engine / steps * 1e3,
        "engine_waits_ms_per_step": (awake - engine) / steps * 1e3,
        "tokens_per_s": tokens / seconds,
        "events_per_token": events / tokens,
        "longest_gap_ms": longest * 1e3,
        "gc_ms": after["pauses"] * 1e3,
        "longest_gc_ms": after["longest_pause"] * 1e3,
        "full_collections": after["full"],
        "collected_per_stream": after["collected"] / num_streams,
        "bytes_per_token": num_bytes / tokens,
    }


def probe(port: int) -> dict[str, float]:
    """Reads the server's clocks, and starts new counts of the collector."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/probe", timeout=30) as answer:
        found: dict[str, float] = json.load(answer)
        return found


@contextmanager
def started(checkout: Path, options: argparse.Namespace, *, engine_process: bool) -> Iterator[int]:
    """Starts the server of a checkout; yields its port."""
    from harness import free_port, server_process

    port = free_port()
    command = [sys.executable, str(Path(__file__).resolve()), "--serve", str(port)]
    command += ["--streams", str(options.streams), "--step-ms", str(options.step_ms)]
    command += ["--schema"] if options.schema else []
    command += ["--engine-process"] if engine_process else []
    env = {**os.environ, "PYTHONPATH": str(checkout)}
    with server_process(str(checkout), command, port, env=env, cwd=checkout):
        yield port


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--step-ms", type=float, default=25.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--fields", type=json.loads, default={}, help="of each request, as JSON")
    parser.add_argument("--schema", action="store_true", help="answers follow a JSON schema")
    parser.add_argument("--against", type=Path, help="another checkout, measured in turns")
    parser.add_argument(
        "--engine-process", action="store_true", help="also with the engine in its own process"
    )
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        import server_host  # not `__main__`, which an engine's process does not know

        file = tempfile.NamedTemporaryFile()  # noqa: SIM115 (until the end)
        atexit.register(file.close)
        clocks = server_host.Clocks(file.name)
        make = partial(
            server_host.paced_engine, clocks, options.streams, options.step_ms / 1e3,
            has_grammars=options.schema,
        )  # fmt: skip
        server_host.run_server(options.serve, make, clocks, engine_process=options.engine_process)
        return
    from harness import print_table, save

    fields = dict(options.fields)
    if options.schema:
        fields["structured_outputs"] = {"json": SCHEMA}
    checkouts = {"here": ROOT}
    if options.against is not None:
        checkouts = {"against": options.against.resolve(), **checkouts}
    if options.engine_process:
        checkouts["two processes"] = ROOT
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in checkouts}
    for _ in range(options.rounds):
        for name, checkout in checkouts.items():
            with started(checkout, options, engine_process=name == "two processes") as port:
                load(port, options.streams, 8, fields)  # a small load first
                runs[name].append(load(port, options.streams, options.tokens, fields))
    results = {
        name: {key: statistics.median(run[key] for run in found) for key in found[0]}
        for name, found in runs.items()
    }
    rows = [[key, *(f"{results[name][key]:.2f}" for name in results)] for key in results["here"]]
    print_table(["medians", *results], rows)
    if options.save:
        print(save("server_host-cpu", {"options": str(options), "results": results}))


if __name__ == "__main__":
    main()
