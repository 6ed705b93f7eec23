"""`mlx-paged serve` as a process: its options, signals, and an engine that dies."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from typing import Any

import httpx
import pytest
from support.server_helpers import process, until
from typer.testing import CliRunner
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, unix_connect

from mlx_paged.cli.main import app
from mlx_paged.errors import InvalidParameterError, MlxPagedError
from mlx_paged.server.listener import bound_unix

PROMPT = "def is_even(n: int) -> bool:\n"
LONG = {"prompt": PROMPT, "max_tokens": 2000, "temperature": 0, "ignore_eos": True}


def read_stream(url: str, body: dict[str, Any], lines: list[str]) -> None:
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=300) as response:
        lines.extend(response.iter_lines())


def refuses(url: str) -> bool:
    """True if no connection is accepted any more."""
    try:
        httpx.get(f"{url}/health")
    except httpx.TransportError:
        return True
    return False


def test_sigterm_finishes_running_requests_and_exits_0() -> None:
    with process("--log-format", "json") as (server, url):
        lines: list[str] = []
        body = {**LONG, "max_tokens": 150, "stream": True}
        reader = threading.Thread(target=read_stream, args=(url, body, lines))
        reader.start()
        until(lambda: lines)
        server.send_signal(signal.SIGTERM)
        until(lambda: refuses(url))
        reader.join(300)
        assert lines[-2] == "data: [DONE]" and '"finish_reason":"length"' in "".join(lines)
        _, log = server.communicate(timeout=300)
        assert server.returncode == 0, log
        told = [json.loads(line) for line in log.splitlines()]
        [line] = [t for t in told if t["message"] == "request" and "finish_reason" in t]
        assert line["completion_tokens"] == 150


def test_what_is_not_finished_in_time_is_told_so() -> None:
    with process("--shutdown-timeout", "0.3") as (server, url):
        lines: list[str] = []
        body = {**LONG, "n": 16, "stream": True}
        reader = threading.Thread(target=read_stream, args=(url, body, lines))
        reader.start()
        until(lambda: lines)
        server.send_signal(signal.SIGTERM)
        reader.join(300)
        assert "shutting_down" in "".join(lines) and "data: [DONE]" in lines[-2]
        assert server.wait(300) == 0


NOISE = """
import threading, warnings
import mlx_paged.engine.ranks.start as start
load = start.load
def noisy(*args, **options):
    from transformers.utils import logging
    logging.get_logger("transformers.some.module").warning("a word of transformers")
    from huggingface_hub.utils import logging, tqdm
    logging.get_logger("huggingface_hub.some").warning("a word of the hub")
    list(tqdm(range(3), desc="a bar"))
    warnings.warn("a word of Python")
    def fail():
        raise ValueError("a thread's last word")
    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    return load(*args, **options)
start.load = noisy
from mlx_paged.cli.main import main
main()
"""


def test_every_line_is_json_and_a_second_signal_ends_it_at_once() -> None:
    options = ("--log-format", "json", "--host", "0.0.0.0", "--shutdown-timeout", "600")
    lines: list[dict[str, Any]] = []
    with process(*options, code=NOISE) as (server, url):
        with httpx.stream("POST", f"{url}/v1/completions", json={**LONG, "stream": True}) as answer:
            events = answer.iter_lines()
            next(events)
            for said in ("SIGINT: finishing", "SIGINT again"):
                server.send_signal(signal.SIGINT)
                while not (lines and said in lines[-1]["message"]):
                    lines.append(json.loads(server.stderr.readline()))
            assert "shutting_down" in "".join(events)
        out, log = server.communicate(timeout=300)
    lines += [json.loads(line) for line in log.splitlines()]
    assert out == "" and server.returncode == 0
    told = "\n".join(f"{line['message']} {line.get('exception')}" for line in lines)
    for word in ("transformers", "the hub", "Python"):
        assert told.count(f"a word of {word}") == 1, told
    assert told.count("a thread's last word") == 1 and "a bar" not in told
    # No other traceback, of uvicorn's for instance.
    [failed] = [line for line in lines if line["level"] in ("error", "critical")]
    assert "thread" in failed["message"] and told.count("Traceback") == 1
    # It listens on all addresses, and nobody needs a key.
    [warning] = [line for line in lines if "--api-key" in line["message"]]
    assert warning["level"] == "warning"


def test_a_warning_only_for_other_machines_and_without_a_key(caplog) -> None:
    from mlx_paged.server.config import ServerConfig
    from mlx_paged.server.listener import bind
    from mlx_paged.server.run import warn_if_open_to_all

    for host, keys, names, said in (
        ("127.0.0.1", (), (), ""),
        ("localhost", (), (), ""),
        ("::1", (), (), ""),
        ("0.0.0.0", (), (), "--api-key and --allowed-hosts"),
        ("0.0.0.0", (), ("llm.test",), "--api-key"),
        ("0.0.0.0", ("k",), (), ""),
    ):
        caplog.clear()
        try:
            sock = bind(host, 0, 60)
        except MlxPagedError:
            assert ":" in host  # a machine without IPv6
            continue
        with sock:
            warn_if_open_to_all(sock, ServerConfig(api_keys=keys, allowed_hosts=names))
        options = [name for name in ("--api-key", "--allowed-hosts") if name in caplog.text]
        assert " and ".join(options) == said and len(caplog.records) == bool(said), host


FEW = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (150, 200))
from mlx_paged.cli.main import main
main()
"""


def test_it_stays_up_when_descriptors_run_out() -> None:
    """More connections than it may have: idle ones make room, and the log says so."""
    with process(code=FEW) as (server, url):
        port = int(url.rpartition(":")[2])
        idle: list[socket.socket] = []
        for _ in range(400):
            idle.append(socket.create_connection(("127.0.0.1", port), timeout=300))
        lines: list[str] = []
        read_stream(url, {**LONG, "max_tokens": 20, "stream": True}, lines)
        assert lines[-2] == "data: [DONE]"
        families = httpx.get(f"{url}/metrics", timeout=300).text
        open_now, most = (
            float(families.partition(f"\nprocess_{name}_fds ")[2].split()[0])
            for name in ("open", "max")
        )
        assert most == 200 and open_now < 200
        for sock in idle:
            sock.close()
        for _ in range(10):
            assert httpx.get(f"{url}/health", timeout=300).status_code == 200
        server.send_signal(signal.SIGTERM)
        _, log = server.communicate(timeout=300)
    assert server.returncode == 0 and "Traceback" not in log, log
    assert "at most 200 connections" in log
    told = [line for line in log.splitlines() if "cannot accept connections" in line]
    assert told and "too many open files (limit 200" in told[0] and len(told) < 20, log


LOADING = """
import sys, threading
import mlx_paged.engine.async_engine as engine
import mlx_paged.engine.ranks.start as start
def load(*args, **options):
    print("loading", sys.getswitchinterval(), flush=True)
    threading.Event().wait(600)
start.load = load
engine.AsyncEngine._at_exit = lambda self: print("waiting for the thread", flush=True)
from mlx_paged.cli.main import main
main()
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_while_the_model_loads_ends_the_process_at_once(name) -> None:
    with process(code=LOADING, until="live") as (server, url):
        # The engine's thread gets Python's lock soon, however busy the event loop is.
        assert server.stdout.readline() == "loading 0.0005\n"
        assert httpx.get(f"{url}/ready").status_code == 503
        server.send_signal(signal.Signals[name])
        out, log = server.communicate(timeout=300)
        assert server.returncode == 0 and name in log, log
        assert not out, out


INTERRUPTED = """
import io, signal, sys
class Interrupted(io.FileIO):
    def write(self, data):
        written = super().write(data)
        if b"SIGTERM again" in bytes(data):
            signal.raise_signal(signal.SIGTERM)  # to this thread, before the next line is written
        return written
sys.stderr = io.TextIOWrapper(io.BufferedWriter(Interrupted(2, "w")), line_buffering=True)
from mlx_paged.cli.main import main
main()
"""


def test_a_third_signal_may_interrupt_a_line_of_the_log() -> None:
    with process("--shutdown-timeout", "600", code=INTERRUPTED) as (server, url):
        with httpx.stream("POST", f"{url}/v1/completions", json={**LONG, "stream": True}) as answer:
            events = answer.iter_lines()  # collecting it would close the connection
            next(events)
            server.send_signal(signal.SIGTERM)
            while "SIGTERM: finishing" not in server.stderr.readline():
                pass
            server.send_signal(signal.SIGTERM)
            _, log = server.communicate(timeout=300)
        assert server.returncode == 0 and log.count("\n") == 1 and "SIGTERM again" in log, log


SERVICE = """
import asyncio, sys
from starlette.applications import Starlette
from mlx_paged.server import run
from mlx_paged.server.config import ServerConfig

class Service:
    app, is_draining, is_loading = Starlette(), False, False

    def drain(self):
        self.is_draining = True

    async def finish(self, seconds):
        print(f"finishing for {seconds:g} s", flush=True)
        await asyncio.sleep(0)
        print("finished", flush=True)

    async def watch(self, address):
        print("up", flush=True)
        await asyncio.Event().wait()

sys.exit(run.serve(lambda address: Service(), ServerConfig(shutdown_timeout=7), port=0))
"""


def test_a_service_that_ends_in_order_is_not_cut_short() -> None:
    with subprocess.Popen([sys.executable, "-c", SERVICE], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None and server.stdout.readline() == b"up\n"
        server.terminate()
        out, _ = server.communicate(timeout=300)
        assert (server.returncode, out) == (0, b"finishing for 7 s\nfinished\n")


CRASH = """
import mlx_paged.engine.engine as engine, os
plan = engine.Engine._launch_next
def crash(self):
    if self._num_steps > 20:
        raise RuntimeError("a bug of ours")
    return plan(self)
engine.Engine._launch_next = crash
from mlx_paged.cli.main import main
main()
"""


def test_a_crashed_engine_ends_the_process_with_a_message() -> None:
    with process(code=CRASH) as (server, url):
        said: list[str] = []
        for _ in range(2):  # an engine goes on after an exception, but not after the third in a row
            lines: list[str] = []
            read_stream(url, {**LONG, "stream": True}, lines)
            said.append("".join(lines))
        assert "internal_error" in said[0] and "engine_unavailable" in said[1]
        assert "a bug of ours" not in "".join(said)
        _, log = server.communicate(timeout=300)
        assert server.returncode == 1
        assert "a bug of ours" in log and "the engine has stopped" in log


def test_an_engine_process_that_is_killed_ends_the_server_with_a_message() -> None:
    with process("--frontend-multiprocessing", "--log-format", "json") as (server, url):
        with httpx.stream("POST", f"{url}/v1/completions", json={**LONG, "stream": True}) as answer:
            events = answer.iter_lines()
            next(events)
            found = subprocess.run(["pgrep", "-P", str(server.pid)], capture_output=True, text=True)
            [child] = found.stdout.split()
            os.kill(int(child), signal.SIGKILL)
            told = "".join(events)
        assert "the engine has stopped" in told and told.endswith("data: [DONE]")
        _, log = server.communicate(timeout=300)
        assert server.returncode == 1
    lines = [json.loads(line) for line in log.splitlines()]
    [line] = [line for line in lines if line["level"] == "critical"]
    assert line["message"] == "the engine has stopped: its process has ended (SIGKILL)"


def test_a_model_that_is_not_there_and_an_address_that_is_taken() -> None:
    with process("/no/such/model") as (server, _):
        _, log = server.communicate(timeout=300)
        assert server.returncode == 1 and log.count("/no/such/model") == 1, log
        assert "Traceback" not in log
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        options = ("--port", str(taken.getsockname()[1]), "--log-format", "json")
        with process(*options) as (server, _):
            _, log = server.communicate(timeout=300)
            last = [json.loads(line) for line in log.splitlines()][-1]
            assert server.returncode == 1 and "is in use" in last["message"], log
            assert last["level"] == "critical" and "Traceback" not in log


def test_a_unix_domain_socket_and_the_end_of_websockets(tmp_path) -> None:
    path = tmp_path / "serve.sock"
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(path))
    ends: list[tuple[int | None, list[str]]] = []

    def watch(connection: ClientConnection) -> None:
        kinds: list[str] = []
        with contextlib.suppress(ConnectionClosed):
            kinds.extend(json.loads(message)["type"] for message in connection)
        ends.append((connection.close_code, kinds[-1:]))

    def opened() -> ClientConnection:
        return unix_connect(str(path), uri="ws://any.test/v1/responses")

    with process("--uds", str(path)) as (server, url):
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport, base_url=url, timeout=300) as client:
            body = {"prompt": PROMPT, "max_tokens": 5, "stream": True}
            answer = client.post("/v1/completions", json=body, headers={"Host": "any.test"})
            assert answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n")
        with pytest.raises(InvalidParameterError, match="another server"), bound_unix(path):
            pass
        with opened() as idle, opened() as busy:
            turn = {"input": "x", "max_output_tokens": 300, "ignore_eos": True}
            busy.send(json.dumps({"type": "response.create", **turn}))
            busy.recv(300)
            watchers = [threading.Thread(target=watch, args=(c,)) for c in (idle, busy)]
            for watcher in watchers:
                watcher.start()
            server.send_signal(signal.SIGTERM)
            for watcher in watchers:
                watcher.join(300)
        _, log = server.communicate(timeout=300)
    assert server.returncode == 0 and f"ready: model mlx-paged-demo at http+unix:{path}" in log
    assert not path.exists()
    # A response that runs is finished.
    assert sorted(ends) == [(1001, []), (1001, ["response.incomplete"])]


# macOS refuses connections of a full queue like those of no server.
FULL_QUEUES = [socket.SOCK_STREAM] if sys.platform == "linux" else []


@pytest.mark.parametrize("kind", [*FULL_QUEUES, socket.SOCK_DGRAM])
def test_a_socket_that_does_not_answer_is_not_replaced(tmp_path, kind: socket.SocketKind) -> None:
    """A server's queue of connections is full; or it is no server of streams."""
    path = tmp_path / "socket"
    with contextlib.ExitStack() as stack:
        other = stack.enter_context(socket.socket(socket.AF_UNIX, kind))
        other.bind(str(path))
        if kind == socket.SOCK_STREAM:
            other.listen(0)
            for _ in range(2):
                client = stack.enter_context(socket.socket(socket.AF_UNIX, kind))
                client.setblocking(False)
                client.connect_ex(str(path))
        with pytest.raises(InvalidParameterError, match="another server"), bound_unix(path):
            pass
        assert path.is_socket()


def test_options_from_environment_and_file(tmp_path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        "served-model-name: [from-file, second]\nmax_num_seqs: 7\nmax-queue: 9\nblock_size: 16\n"
    )
    options = ("--config", str(file), "--block-size", "64")
    with process(*options, MLX_PAGED_MAX_QUEUE="11", MLX_PAGED_API_KEY="k1 k2") as (_, url):
        info = httpx.get(f"{url}/server_info", headers={"Authorization": "Bearer k2"}).json()
    assert info["config"]["served_model_names"] == ["from-file", "second"]
    engine = info["engine_config"]
    assert engine["max_num_seqs"] == 7  # the file
    assert engine["max_num_waiting"] == 11  # the environment before the file
    assert engine["block_size"] == 64  # the command line before all


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--block-size", "5"], "block_size must be 8, 16, 32 or 64"),
        (["--ssl-keyfile", "pyproject.toml"], "ssl_keyfile"),
        (["--api-key", ""], "api_key"),
        (["--chat-template", "/none.jinja"], "chat_template"),
        (["--log-config", "README.md"], "log_config"),
        (["--no-enable-chunked-prefill", "--max-model-len", "4096"], "max_num_batched_tokens"),
        (["--uds", "serve.sock", "--port", "9000"], "uds must be given without"),
        (["--nonsense"], "nonsense"),
        (["--config", "README.md"], "README.md"),
    ],
)
def test_a_wrong_option_is_named(options, said) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mlx_paged.server.run.serve", lambda *_, **__: 0)
        if said != "log_config":  # it would take the log away from pytest
            patch.setattr("mlx_paged.server.logs.configure", lambda *_: None)
        result = CliRunner().invoke(app, ["serve", *options])
    assert result.exit_code != 0
    assert said in result.output + str(result.exception)
    assert isinstance(result.exception, (MlxPagedError, SystemExit))
