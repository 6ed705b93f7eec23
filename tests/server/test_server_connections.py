"""Connections: clients that stop sending or leave, and requests that are not as they should be."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from support.server_helpers import RunningServer, drained, running

from mlx_paged.server import connection, stream_response

PROMPT = "def is_even(n: int) -> bool:\n"
BODY = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0, "ignore_eos": True}
# It takes as many steps as an answer has tokens, at least.
LONG = {**BODY, "max_tokens": 3500, "n": 8}
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running() as server:
        yield server


def post(body: dict[str, Any], version: str = "1.1", padding: int = 0) -> bytes:
    raw = json.dumps(body).encode() + b" " * padding
    head = f"POST /v1/completions HTTP/{version}\r\nHost: localhost\r\n"
    head += "Content-Type: application/json\r\n"
    return f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw


def asked(server: RunningServer, request: bytes, *, half_close: bool = False) -> bytes:
    """Sends these bytes and nothing more; returns what the server answers."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=300) as sock:
        with contextlib.suppress(ConnectionError):
            sock.sendall(request)
            if half_close:
                sock.shutdown(socket.SHUT_WR)
        return drained(sock)


def until_given_up(server: RunningServer, steps_before: int) -> None:
    """Waits until a request of `LONG` is not computed any more, though it is not finished."""
    server.wait_idle()
    assert server.stats().num_steps - steps_before < LONG["max_tokens"]


# Clients that stop sending.


@pytest.mark.parametrize("version", ["1.1", "1.0"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_client_that_only_stops_sending_gets_its_answer(server, stream, version) -> None:
    answer = asked(server, post({**BODY, "stream": stream}, version), half_close=True)
    while answer.startswith(INTERIM):
        answer = answer.removeprefix(INTERIM)
        assert version == "1.1"
    assert answer.startswith(b"HTTP/1.1 200 ")
    if stream:
        assert b'"finish_reason":"length"' in answer and b"data: [DONE]" in answer
    else:
        _, _, body = answer.partition(b"\r\n\r\n")
        assert json.loads(body)["usage"]["completion_tokens"] == 60
    server.wait_idle()


def test_all_of_its_requests_are_answered(server) -> None:
    small = {**BODY, "max_tokens": 5}
    requests = post(small) + post({**small, "stream": True}) + post(small) + b"GET /li"
    answer = asked(server, requests, half_close=True).replace(INTERIM, b"")
    assert answer.count(b"HTTP/1.1 200 OK") == 3 and answer.count(b'"finish_reason":"length"') == 3
    assert asked(
        server, b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n", half_close=True
    ).startswith(b"HTTP/1.1 200 OK")


def test_half_a_request_is_no_request(server) -> None:
    assert asked(server, post(BODY)[:-5], half_close=True) == b""
    assert asked(server, post(BODY)[:20], half_close=True) == b""
    assert asked(server, b"", half_close=True) == b""


# Clients that leave.


@pytest.mark.parametrize("when", ["at once", "later"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_client_that_has_left_is_noticed(server, monkeypatch, stream, when) -> None:
    monkeypatch.setattr(connection, "_INTERIM_INTERVAL", 0.05)
    before = server.stats().num_steps
    with socket.create_connection(("127.0.0.1", server.port), timeout=300) as sock:
        sock.sendall(post({**LONG, "stream": stream}))
        if when == "later":  # it only stopped sending, for a while
            sock.shutdown(socket.SHUT_WR)
            assert sock.recv(4096)
        server.until(lambda: server.stats().num_running == 8)
    until_given_up(server, before)


def test_a_stream_that_waits_is_given_up_where_it_waits(monkeypatch) -> None:
    """Nothing of it comes that would show that its client has left."""
    monkeypatch.setattr(stream_response, "PING_INTERVAL", 600)
    with running(max_num_seqs=1) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=300) as first:
            first.sendall(post({**LONG, "n": 1, "stream": True}))
            server.until(lambda: server.stats().num_running == 1)
            with socket.create_connection(("127.0.0.1", server.port), timeout=300) as second:
                second.sendall(post({**LONG, "stream": True}))
                assert second.recv(4096).endswith(b"\r\n\r\n")  # (unread, it would be reset)
                server.until(lambda: server.stats().num_waiting == 8)
            server.until(lambda: server.num_ended("abort") == 1)
            assert server.num_ended("length") == 0  # the first goes on
        server.wait_idle()


def test_a_reset_is_noticed_before_the_answer(server) -> None:
    """Without anything being sent to it, as with HTTP/1.0."""
    before = server.stats().num_steps
    with socket.create_connection(("127.0.0.1", server.port), timeout=300) as sock:
        sock.sendall(post(LONG, "1.0"))
        sock.shutdown(socket.SHUT_WR)
        server.until(lambda: server.stats().num_running == 8)
        # A client's kernel sends the same when the server's keep-alive finds nobody there.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    until_given_up(server, before)


# Requests that are not as they should be.


def error(answer: bytes, status: int) -> str:
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer[:300]
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower()
    message: str = json.loads(body)["error"]["message"]
    return message


@pytest.mark.parametrize("headers", [b"", b"Host: a\r\nHost: b\r\n"], ids=["none", "two"])
def test_a_request_needs_one_host(server, headers) -> None:
    message = error(asked(server, b"GET /live HTTP/1.1\r\n" + headers + b"\r\n"), 400)
    assert "Host" in message


def test_http_1_0_needs_no_host(server) -> None:
    assert asked(server, b"GET /live HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("body", [b"ZZ\r\n", b"1\r\n{\r\nZZ\r\n", b"-1\r\n", b"1\r\n{xx"])
def test_a_bad_chunk_is_400(server, body) -> None:
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n"
    )
    assert "HTTP" in error(asked(server, head + body), 400)


def head_of(size: int, where: str) -> bytes:
    """A head of so many bytes."""
    line, rest = b"GET /live HTTP/1.1\r\n", b"Host: localhost\r\nConnection: close\r\n\r\n"
    missing = size - len(line) - len(rest)
    if where == "line":
        return line.replace(b"/live", b"/live?" + b"a" * (missing - 1)) + rest
    return line + b"X-A: " + b"a" * (missing - 7) + b"\r\n" + rest


@pytest.mark.parametrize("where", ["line", "header"])
def test_a_head_of_64_kib_is_taken_and_a_larger_one_is_not(server, where) -> None:
    """Though it comes in one piece."""
    taken = head_of(64 << 10, where)
    assert len(taken) == 64 << 10
    assert asked(server, taken).startswith(b"HTTP/1.1 200 ")
    assert "65536 bytes" in error(asked(server, head_of((64 << 10) + 1, where)), 431)


def test_a_head_behind_a_large_body_is_measured_alone(server) -> None:
    large = post({**BODY, "max_tokens": 1}, padding=200_000)
    rest = b"GET /live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX-A: " + b"a" * 1000
    answers: list[bytes] = []
    with socket.create_connection(("127.0.0.1", server.port), timeout=300) as sock:
        reading = threading.Thread(target=lambda: answers.append(drained(sock)))
        reading.start()
        sock.sendall(large + rest)
        sock.sendall(b"a" * 60_000)
        sock.sendall(b"\r\n\r\n")
        reading.join(300)
    assert answers[0].count(b"HTTP/1.1 200 OK") == 2, answers[0][-300:]


def test_answers_before_a_bad_request_are_finished(server) -> None:
    answer = asked(server, post({**BODY, "stream": True}) + b"GET /live HTTP/1.1\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 ") and b"data: [DONE]" in answer
    assert answer.count(b"HTTP/1.1") == 1
    server.wait_idle()


@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_errors_do_not_repeat_a_long_path(server, method) -> None:
    with server.client() as client:
        found = client.request(method, "/" + "a" * 60_000)
        assert found.status_code == 404 and len(found.text) < 1000
        assert "there is no /aaa" in found.json()["error"]["message"]
        wrong = client.put("/v1/models/" + "a" * 60_000)
        assert wrong.status_code == 405 and len(wrong.text) < 1000


def test_the_log_does_not_repeat_a_long_path(server, caplog) -> None:
    caplog.set_level("INFO")
    with server.client() as client:
        client.get("/" + "b" * 60_000)
    [record] = [r for r in caplog.records if getattr(r, "path", "").startswith("/bbb")]
    assert len(vars(record)["path"]) < 1000
