"""The end of the server: connections that begin, wait or fall silent do not hold it up."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop
from support.server_helpers import drained, process

from mlx_paged.server.listener import Listener, bind

# Running requests may take longer than a test. Without any the server ends in a second or two; the
# bound is below TLS's own wait for a client, which is 30 s, and so is what Kubernetes grants.
PATIENCE, MOST = "200", 25.0
BODY = {"prompt": "x", "max_tokens": 2, "temperature": 0, "ignore_eos": True}


def request(body: dict[str, Any], *, missing: int = 0) -> bytes:
    raw = json.dumps(body).encode()
    return (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(raw) + missing}\r\n\r\n"
    ).encode() + raw


@pytest.fixture(scope="module")
def certificate(tmp_path_factory) -> tuple[Path, Path]:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl")
    folder = tmp_path_factory.mktemp("tls")
    key, cert = folder / "key.pem", folder / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj",
               "/CN=localhost", "-keyout", str(key), "-out", str(cert)]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    return key, cert


@contextlib.contextmanager
def ending(*options: str) -> Iterator[tuple[int, Callable[[], None]]]:
    """A server: its port, and what sends SIGTERM. It must have ended soon after that."""
    scheme = "https" if "--ssl-certfile" in options else "http"
    with process("--shutdown-timeout", PATIENCE, *options, scheme=scheme) as (server, url):
        sent: list[float] = []

        def stop() -> None:
            sent.append(time.monotonic())
            server.send_signal(signal.SIGTERM)

        yield int(url.rpartition(":")[2]), stop
        _, log = server.communicate(timeout=sent[0] + MOST - time.monotonic())
        assert server.returncode == 0 and "shutdown exceeded" not in log, log


# --- While connections begin ----------------------------------------------------------------------


@pytest.mark.parametrize("factory", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("when", ["accepted", "begun"])
def test_a_connection_that_begins_at_the_end_is_lost_for_its_protocol(factory, when) -> None:
    connections: set[Any] = set()
    lost: list[Any] = []

    class Protocol(asyncio.Protocol):
        idle_since = 0.0

        def connection_made(self, transport: Any) -> None:
            connections.add(self)
            self.transport = transport
            if when == "begun":  # SIGTERM is handled in the same pass of the loop
                listener.close()

        def connection_lost(self, exc: Exception | None) -> None:
            connections.discard(self)
            lost.append(self)

    class Accepting(Listener):
        def _accept(self) -> None:
            super()._accept()
            if when == "accepted" and self._starting:
                self.close()

    async def main() -> None:
        nonlocal listener
        with bind("127.0.0.1", 0, 60) as sock:
            listener = Accepting(sock, Protocol, connections)
            with socket.create_connection(sock.getsockname()) as client:
                client.settimeout(MOST)
                async with asyncio.timeout(MOST):
                    assert await asyncio.to_thread(drained, client) == b""
                    while not lost:
                        await asyncio.sleep(0.01)
                    await listener.wait_closed()
        assert not connections

    listener: Any = None
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main())


@pytest.mark.parametrize("factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_handshake_does_not_hold_up_the_end(certificate, factory) -> None:
    key, cert = certificate
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)

    async def main() -> None:
        with bind("127.0.0.1", 0, 60) as sock:
            listener = Listener(sock, asyncio.Protocol, set(), context)
            with socket.create_connection(sock.getsockname()):
                async with asyncio.timeout(MOST):
                    while not listener._starting:
                        await asyncio.sleep(0.01)
                    listener.close()
                    await listener.wait_closed()

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main())


def test_sigterm_while_clients_connect() -> None:
    with ending() as (port, stop):
        answered = threading.Event()

        def come_and_go() -> None:
            while True:
                try:
                    with socket.create_connection(("127.0.0.1", port), timeout=MOST) as sock:
                        sock.sendall(request(BODY).replace(b"Host", b"Connection: close\r\nHost"))
                        if not drained(sock):
                            return
                        answered.set()
                except OSError:
                    return

        clients = [threading.Thread(target=come_and_go) for _ in range(24)]
        for client in clients:
            client.start()
        assert answered.wait(MOST)
        stop()
        for client in clients:
            client.join()


# --- Connections that are open --------------------------------------------------------------------


def test_sigterm_ends_connections_without_a_whole_request() -> None:
    starts = [b"", b"GET", request(BODY)[:-1], request(BODY, missing=5)]
    with contextlib.ExitStack() as open_, ending() as (port, stop):
        socks = [
            open_.enter_context(socket.create_connection(("127.0.0.1", port), timeout=MOST))
            for _ in range(2 * len(starts))
        ]
        for i, sock in enumerate(socks):
            if i % 2:  # it has had an answer
                sock.sendall(b"GET /ready HTTP/1.1\r\nHost: localhost\r\n\r\n")
                answer = b""
                while not answer.endswith(b"}"):
                    answer += sock.recv(65536)
            sock.sendall(starts[i // 2])
        with socket.create_connection(("127.0.0.1", port), timeout=MOST) as last:
            last.sendall(b"GET /ready HTTP/1.0\r\n\r\n")  # those before were read
            assert drained(last).startswith(b"HTTP/1.1 200")
        stop()
        answers = [drained(sock) for sock in socks]
    assert answers[:4] == [b""] * 4
    for answer in answers[4:]:
        assert answer.startswith(b"HTTP/1.1 503") and b"shutting down" in answer


def test_sigterm_does_not_wait_for_silent_clients_of_tls(certificate) -> None:
    key, cert = certificate
    context = ssl.create_default_context(cafile=cert)
    with contextlib.ExitStack() as open_, ending(
        "--ssl-keyfile", str(key), "--ssl-certfile", str(cert)
    ) as (port, stop):  # fmt: skip

        def connected() -> ssl.SSLSocket:
            sock = open_.enter_context(socket.create_connection(("127.0.0.1", port), timeout=MOST))
            return open_.enter_context(context.wrap_socket(sock, server_hostname="localhost"))

        socks = [connected() for _ in range(4)]
        for sock in socks[:2]:
            sock.sendall(request(BODY))
            assert sock.recv(12) == b"HTTP/1.1 200"
        # One more is in the middle of its handshake.
        open_.enter_context(socket.create_connection(("127.0.0.1", port))).sendall(b"\x16\x03\x01")
        stop()


def test_a_response_in_the_background_does_not_hold_up_the_end() -> None:
    """No client could ask for it any more."""
    body = {"input": "x", "background": True, "ignore_eos": True, "temperature": 0}
    with ending() as (port, stop):
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/responses", json=body)
        assert answer.json()["status"] == "queued"
        stop()
