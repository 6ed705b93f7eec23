"""`/v1/responses` over a WebSocket: turns, what a connection remembers, who may open one."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import httpx
import openai
import pytest
from support.responses_helpers import EVENT, MODEL, check_response
from support.scripted_engine import ScriptedEngine
from support.server_helpers import ENGINE, RunningServer, running
from support.waiting import TIMEOUT
from websockets.exceptions import ConnectionClosed, ConnectionClosedError, InvalidStatus
from websockets.frames import Close
from websockets.sync.client import ClientConnection, connect

from mlx_paged.server.config import ServerConfig
from mlx_paged.server.context import RequestLog
from mlx_paged.server.errors import ApiError
from mlx_paged.server.responses_api import websocket
from mlx_paged.server.router import websocket as tunnel

LONG = {"input": "x", "max_output_tokens": 3000, "ignore_eos": True}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    config = ServerConfig(api_keys=("secret",), allowed_origins=("http://known.test",))
    with running(config, lambda: ScriptedEngine.from_model(**ENGINE)) as server:
        yield server


@pytest.fixture(autouse=True)
def engine(server: RunningServer) -> ScriptedEngine:
    assert isinstance(server.engine, ScriptedEngine)
    server.engine.script.clear()
    return server.engine


@contextmanager
def opened(
    server: RunningServer,
    host: str = "127.0.0.1",
    path: str = "/v1/responses",
    **headers: str,
) -> Iterator[ClientConnection]:
    given = {"Authorization": "Bearer secret", **headers}
    sock = socket.create_connection(("127.0.0.1", server.port))
    url = f"ws://{host}:{server.port}{path}"
    with connect(url, sock=sock, additional_headers=given, open_timeout=TIMEOUT) as found:
        yield found


def send(connection: ClientConnection, **body: Any) -> None:
    connection.send(json.dumps({"type": "response.create", "model": MODEL, **body}))


def events(connection: ClientConnection) -> list[dict[str, Any]]:
    """Those of one turn."""
    found: list[dict[str, Any]] = []
    while not found or found[-1]["type"] not in (
        "response.completed", "response.incomplete", "response.failed", "error",
    ):  # fmt: skip
        found.append(json.loads(connection.recv(60)))
        if found[-1]["type"] != "error":
            EVENT.validate_python(found[-1])
    return found


def turn(connection: ClientConnection, **body: Any) -> dict[str, Any]:
    """The response of a turn."""
    send(connection, **body)
    *_, last = events(connection)
    assert last["type"] == "response.completed", last
    check_response(last["response"])
    found: dict[str, Any] = last["response"]
    return found


def error(connection: ClientConnection, **body: Any) -> dict[str, Any]:
    send(connection, **body)
    [found] = events(connection)
    assert found["status"] == found.pop("status") >= 400
    error: dict[str, Any] = found["error"]
    return error


def text_of(response: dict[str, Any]) -> str:
    return response["output"][-1]["content"][0]["text"]


def test_the_sdk_takes_turns_on_one_connection(server, engine) -> None:
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret") as client,
        client.responses.connect() as connection,
    ):
        answers = []
        for said in ("One.", "Two."):
            engine.says(said)
            connection.response.create(
                model=MODEL, input="hello",
                previous_response_id=answers[-1].id if answers else None,
            )  # fmt: skip
            seen = []
            for event in connection:
                seen.append(event)
                if event.type == "response.completed":
                    answers.append(event.response)
                    break
            assert [e.sequence_number for e in seen] == list(range(len(seen)))
            assert answers[-1].output_text == said
    assert "One." in engine.prompts[-1] and engine.prompts[-1].count("hello") == 2


def test_a_connection_remembers_its_latest_response_only(server, engine) -> None:
    with opened(server) as connection, opened(server) as other:
        engine.says("One.", "Two.", "Three.")
        first = turn(connection, input="1st", store=False)
        refused = error(other, input="2nd", previous_response_id=first["id"])
        assert refused["code"] == "previous_response_not_found"
        second = turn(connection, input="2nd", previous_response_id=first["id"], store=False)
        assert "One." in engine.prompts[-1] and "1st" in engine.prompts[-1]
        reference = {"type": "item_reference", "id": second["output"][-1]["id"]}
        turn(connection, input=[reference, {"role": "user", "content": "x"}], store=False)
        assert "Two." in engine.prompts[-1]
        refused = error(connection, input="x", previous_response_id=first["id"])
        assert refused["code"] == "previous_response_not_found"
        # Nothing was stored, so another connection may go on from none of it.
        headers = {"Authorization": "Bearer secret"}
        stored = httpx.get(f"{server.url}/v1/responses/{second['id']}", headers=headers)
        assert stored.status_code == 404


def test_a_continuation_that_fails_is_forgotten(server, engine) -> None:
    with opened(server) as connection:
        engine.says("One.")
        first = turn(connection, input="1st", store=False)
        wrong = {"previous_response_id": first["id"], "input": "x", "temperature": -1}
        assert error(connection, **wrong)["param"] == "temperature"  # (no turn: it is not read)
        wrong = {"previous_response_id": first["id"], "input": "x", "top_logprobs": 99}
        assert error(connection, **wrong)["param"] == "top_logprobs"
        refused = error(connection, input="x", previous_response_id=first["id"])
        assert refused["code"] == "previous_response_not_found"


def test_stored_responses_are_shared_with_http(server, engine) -> None:
    engine.says("One.", "Two.")
    with opened(server) as connection:
        first = turn(connection, input="1st")
    headers = {"Authorization": "Bearer secret"}
    stored = httpx.get(f"{server.url}/v1/responses/{first['id']}", headers=headers)
    assert stored.json() == first
    with opened(server) as connection:
        turn(connection, input="2nd", previous_response_id=first["id"])
        assert "One." in engine.prompts[-1]


def test_a_prompt_can_be_computed_without_an_answer(server, engine) -> None:
    prompt = "a prompt that is new to the server " * 20
    with opened(server) as connection:
        engine.says("never")
        send(connection, input=prompt, generate=False, store=False)
        found = events(connection)
        assert [e["type"] for e in found] == [
            "response.created", "response.in_progress", "response.completed",
        ]  # fmt: skip
        warmed = found[-1]["response"]
        assert warmed["output"] == [] and warmed["usage"]["output_tokens"] == 0
        engine.says("One.")
        answer = turn(connection, input="now", previous_response_id=warmed["id"])
        assert prompt.strip() in engine.prompts[-1] and text_of(answer) == "One."
        assert answer["usage"]["input_tokens_details"]["cached_tokens"] > 100


def test_messages_wait_for_the_response_before_them(server, engine) -> None:
    engine.says("One.", "Two.")
    with opened(server) as connection:
        send(connection, input="1st")
        send(connection, input="2nd")
        texts = [text_of(events(connection)[-1]["response"]) for _ in range(2)]
        assert texts == ["One.", "Two."]


@pytest.mark.parametrize(
    ("message", "param", "code"),
    [
        ("{", None, "invalid_json"), ("[]", None, "invalid_value"),
        (b"{}", None, "invalid_message"),
        ({"type": "response.cancel"}, "type", "invalid_value"),
        ({"input": "x"}, "type", "missing_field"),
        ({"type": "response.create"}, "input", "missing_field"),
        ({"type": "response.create", "input": "x", "stream": False}, "stream",
         "unsupported_parameter"),
        ({"type": "response.create", "input": "x", "background": True}, "background",
         "unsupported_parameter"),
        ({"type": "response.create", "input": "x", "model": "none"}, "model", "model_not_found"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_an_event_and_the_connection_goes_on(
    server, engine, message, param, code
) -> None:
    with opened(server) as connection:
        connection.send(json.dumps(message) if isinstance(message, dict) else message)
        [found] = events(connection)
        assert (found["error"]["param"], found["error"]["code"]) == (param, code), found
        engine.says("One.")
        assert text_of(turn(connection, input="x")) == "One."


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({"Authorization": "Bearer wrong"}, 401, "invalid_api_key"),
        ({"Origin": "http://evil.test"}, 403, "cross_origin"),
        ({"host": "evil.test"}, 403, "unknown_host"),
        ({"path": "/v1/chat/completions"}, 404, "not_found"),
    ],
)
def test_a_handshake_is_checked_like_a_request(server, headers, status, code, caplog) -> None:
    with pytest.raises(InvalidStatus) as refused, opened(server, **headers):
        pass
    answer = refused.value.response
    assert answer.status_code == status and answer.headers["X-Request-Id"]
    assert json.loads(answer.body)["error"]["code"] == code
    with server.client() as client:
        assert client.get("/health").is_success
    assert "ERROR" not in [record.levelname for record in caplog.records]


def test_allowed_origins_may_open_one(server, engine) -> None:
    engine.says("One.")
    with opened(server, Origin="http://known.test") as connection:
        assert text_of(turn(connection, input="x")) == "One."


def test_a_client_that_leaves_ends_its_response(server, engine) -> None:
    for abrupt in (False, True):
        wanted = server.num_ended("abort") + 1
        with opened(server) as connection:
            send(connection, **LONG)
            connection.recv(60)
            if abrupt:
                connection.socket.shutdown(socket.SHUT_RDWR)
        server.until(lambda wanted=wanted: server.num_ended("abort") == wanted)
        server.wait_idle()


def test_few_messages_may_wait(server, engine, monkeypatch) -> None:
    config = dataclasses.replace(server.context.config, max_body_size=8 << 20)
    monkeypatch.setattr(server.context.models.default, "_config", config)
    for message, number in (("x", 18), ("x" * (5 << 20), 2)):
        with opened(server) as connection:
            send(connection, **LONG)
            connection.recv(60)
            for _ in range(number):
                send(connection, input=message)
            while (event := json.loads(connection.recv(60)))["type"] != "error":
                pass
            assert (event["status"], event["error"]["code"]) == (429, "too_many_messages")
        server.until(lambda: server.context._held_bytes == 0)


@pytest.mark.parametrize("kind", [websocket._Session, tunnel._Tunnel])
def test_messages_that_wait_stay_counted_after_one_is_refused(server, monkeypatch, kind) -> None:
    context, other = server.context, RequestLog("", "POST", "/v1/files", "")
    config = dataclasses.replace(context.config, max_body_memory=4 << 20)
    monkeypatch.setattr(context, "config", config)
    monkeypatch.setattr(type(context.models), "max_body_size", 1 << 30)

    async def hold() -> None:
        connection = kind(SimpleNamespace(), context)
        connection._hold(3 << 20)
        context.hold_body(other, 2 << 20)
        before = context._held_bytes
        with pytest.raises(ApiError, match="in memory must be at most 4194304 bytes together"):
            connection._hold(3 << 20)
        assert context._held_bytes == before
        connection._hold(-(3 << 20))
        assert context._held_bytes == other.held_bytes

    try:
        asyncio.run(hold())
    finally:
        context.release_body(other)


def test_a_process_that_ends_before_the_first_message_closes_the_connection() -> None:
    ended = ConnectionClosedError(Close(1001, "bye"), None)
    upstream = mock.AsyncMock(**{"send.side_effect": ended, "recv.side_effect": ended})

    async def closed() -> mock.AsyncMock:
        client = mock.AsyncMock(scope={"state": {}})
        context = mock.Mock(drained=asyncio.Event())
        connection = tunnel._Tunnel(client, context)
        connection._lease = mock.Mock()
        connection._inbox.put_nowait("{}")
        with mock.patch.object(connection, "_connect", return_value=upstream):
            await connection._work()
        return client

    asyncio.run(closed()).close.assert_awaited_once_with(1001, "bye")


def test_a_message_must_come_in_time() -> None:
    with running(ServerConfig(read_timeout=0.3)) as server, opened(server) as connection:
        connection.socket.sendall(b"\x01\x85\0\0\0\0hello")  # a first fragment, and no last one
        with pytest.raises(ConnectionClosed):
            connection.recv(60)
        assert connection.close_code == 1008 and "did not come within 0.3 s" in (
            connection.close_reason or ""
        )


def test_a_connection_ends_after_its_time(server, monkeypatch) -> None:
    monkeypatch.setattr(websocket, "MAX_AGE", 0.05)
    with opened(server) as connection:
        assert json.loads(connection.recv(60))["error"]["code"] == (
            "websocket_connection_limit_reached"
        )
        with pytest.raises(ConnectionClosed):
            connection.recv(60)
