"""Anthropic's SDK, what Claude Code sends, and errors as both understand them."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal

import httpx
import pytest
from pydantic import BaseModel
from support.lazy_module import LazyModule
from support.messages_helpers import ANSWERS, error_of, message_events
from support.scripted_engine import ScriptedEngine
from support.server_helpers import ENGINE, RunningServer, drained, running

from mlx_paged.server.config import ServerConfig
from mlx_paged.server.errors import unavailable
from mlx_paged.server.generation import Generation, Piece

anthropic: Any = LazyModule("anthropic")

MODEL = "mlx-paged-demo"
ASK: Any = [{"role": "user", "content": "What is the weather in Oslo?"}]
WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
OSLO = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
THOUGHT = "<think>\nSix sevens.\n</think>\n\n42"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    config = ServerConfig(
        api_keys=("secret",), tool_template=True, max_body_size=1 << 20, serve_page=False
    )
    options: dict[str, Any] = {**ENGINE, "max_model_len": 2048, "reasoning_parser": "qwen3"}
    with running(config, lambda: ScriptedEngine.from_model(**options)) as server:
        yield server


@pytest.fixture
def engine(server: RunningServer) -> Iterator[ScriptedEngine]:
    assert isinstance(server.engine, ScriptedEngine)
    yield server.engine
    server.engine.script.clear()


@pytest.fixture
def client(server: RunningServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="secret", max_retries=0) as client:
        yield client


@pytest.fixture
def http(server: RunningServer) -> Iterator[httpx.Client]:
    with server.client(headers={"x-api-key": "secret"}) as client:
        yield client


# The SDK.


def test_a_message(client, engine) -> None:
    engine.says("It rains.")
    message = client.messages.create(model=MODEL, max_tokens=50, messages=ASK)
    assert [block.text for block in message.content] == ["It rains."]
    assert message.stop_reason == "end_turn" and message.usage.output_tokens > 1
    assert message._request_id and message.id == f"msg_{message._request_id}"


def test_a_raw_stream(client, engine) -> None:
    engine.says("It rains.")
    stream = client.messages.create(model=MODEL, max_tokens=50, messages=ASK, stream=True)
    found = list(stream)
    assert found[0].type == "message_start" and found[-1].type == "message_stop"
    texts = [e.delta.text for e in found if e.type == "content_block_delta"]
    assert "".join(texts) == "It rains."


def test_the_stream_helper(client, engine) -> None:
    engine.says(f"{THOUGHT}: so I look.\n{OSLO}")
    arguments, thoughts = [], []
    with client.messages.stream(
        model=MODEL, max_tokens=200, messages=ASK, tools=[WEATHER], thinking={"type": "adaptive"}
    ) as stream:
        for event in stream:
            if event.type == "input_json":
                arguments.append(event.partial_json)
            elif event.type == "thinking":
                thoughts.append(event.thinking)
        message = stream.get_final_message()
    thinking, text, call = message.content
    assert (thinking.thinking, text.text) == ("Six sevens.", "42: so I look.")
    assert "".join(thoughts) == "Six sevens." and len(thoughts) > 1 and thinking.signature
    assert call.input == {"city": "Oslo"} == json.loads("".join(arguments))
    assert message.stop_reason == "tool_use" and message.usage.output_tokens > 20


def test_the_asynchronous_client(server, engine) -> None:
    async def work() -> str:
        async with (
            anthropic.AsyncAnthropic(base_url=server.url, api_key="secret") as client,
            client.messages.stream(model=MODEL, max_tokens=50, messages=ASK) as stream,
        ):
            return "".join([text async for text in stream.text_stream])

    engine.says("It rains.")
    assert asyncio.run(asyncio.wait_for(work(), 300)) == "It rains."


def test_a_turn_with_a_tool(client, engine) -> None:
    """The answer is sent back as it came, thinking and all."""
    engine.says(f"<think>\nLook.\n</think>\n\n{OSLO}", "It rains.")
    first = client.messages.create(model=MODEL, max_tokens=100, messages=ASK, tools=[WEATHER])
    call = first.content[-1]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
    messages = [*ASK, first.to_param(), {"role": "user", "content": [result]}]
    second = client.messages.create(model=MODEL, max_tokens=100, messages=messages, tools=[WEATHER])
    assert second.content[0].text == "It rains." and second.stop_reason == "end_turn"
    assert OSLO in engine.prompts[-1]
    assert "<tool_response>\nrain\n</tool_response>" in engine.prompts[-1]


def test_the_tool_runner(client, engine) -> None:
    asked = []

    @anthropic.beta_tool
    def get_weather(city: Literal["Oslo", "Rome"]) -> str:
        """The weather of a city.

        Args:
            city: its name.
        """
        asked.append(city)
        return "rain"

    for stream in (False, True):
        # (The SDK asks the server to hold the conversation first, and is told that it does not.)
        engine.says(OSLO, "It rains.")
        runner = client.beta.messages.tool_runner(
            model=MODEL, max_tokens=100, messages=ASK, tools=[get_weather], stream=stream
        )
        assert runner.until_done().content[0].text == "It rains."
    assert asked == ["Oslo", "Oslo"]


def test_parse(client) -> None:
    class Weather(BaseModel):
        city: Literal["Oslo", "Rome"]
        rains: bool

    answer = client.messages.parse(
        model=MODEL, max_tokens=1500, messages=ASK, output_format=Weather,
        thinking={"type": "enabled", "budget_tokens": 8},
    )  # fmt: skip
    assert isinstance(answer.parsed_output, Weather)


def test_counts(client, engine) -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=ASK, tools=[WEATHER])
    in_beta = client.beta.messages.count_tokens(model=MODEL, messages=ASK, tools=[WEATHER])
    engine.says("It rains.")
    usage = client.messages.create(model=MODEL, max_tokens=100, messages=ASK, tools=[WEATHER]).usage
    total = usage.input_tokens + usage.cache_read_input_tokens
    assert counted.input_tokens == in_beta.input_tokens == total


def test_the_path_of_betas(client, engine) -> None:
    engine.says(THOUGHT)
    message = client.beta.messages.create(
        model=MODEL, max_tokens=200, messages=ASK, tools=[WEATHER],
        thinking={"type": "enabled", "budget_tokens": 1024},
        betas=["interleaved-thinking-2025-05-14", "context-management-2025-06-27"],
        context_management={"edits": [{"type": "clear_tool_uses_20250919"}]},
    )  # fmt: skip
    assert [block.type for block in message.content] == ["thinking", "text"]


def test_models(client) -> None:
    [model] = client.models.list()
    assert (model.id, model.type, model.max_input_tokens) == (MODEL, "model", 2048)
    assert client.models.retrieve(MODEL).created_at == model.created_at
    with pytest.raises(anthropic.NotFoundError):
        client.models.retrieve("claude-9")


def test_errors_are_the_sdks_own(server, client, monkeypatch) -> None:
    def ask(client: anthropic.Anthropic = client, **change: Any) -> Any:
        asked: dict[str, Any] = {"model": MODEL, "max_tokens": 5, "messages": ASK}
        return client.messages.create(**{**asked, **change})

    def failure(expected: type[anthropic.APIStatusError], **change: Any) -> Any:
        with pytest.raises(expected) as caught:
            ask(**change)
        assert caught.value.request_id and caught.value.api_message
        return caught.value

    assert failure(anthropic.BadRequestError, messages=[]).type == "invalid_request_error"
    assert "too long" in failure(anthropic.BadRequestError, system="x " * 3000).api_message
    assert failure(anthropic.NotFoundError, model="claude-9").type == "not_found_error"
    wrong = client.with_options(api_key="wrong")
    assert failure(anthropic.AuthenticationError, client=wrong).type == "authentication_error"
    large = failure(anthropic.APIStatusError, system="x" * (1 << 21))
    assert (large.status_code, large.type) == (413, "request_too_large")
    monkeypatch.setattr(server.context, "draining", True)
    gone = failure(anthropic.OverloadedError)
    assert (gone.status_code, gone.type) == (529, "overloaded_error")
    assert gone.response.headers["retry-after"]
    monkeypatch.setattr(server.context, "draining", False)

    def broken(*_: Any) -> Any:
        raise RuntimeError("this must not be shown")

    monkeypatch.setattr("mlx_paged.server.messages.endpoints.turn_of", broken)
    failed = failure(anthropic.InternalServerError)
    assert failed.type == "api_error" and "must not be shown" not in failed.api_message


def test_a_full_queue(caplog) -> None:
    config = ServerConfig()
    with running(config, max_num_seqs=1, max_num_waiting=1) as server, server.client() as http:
        body = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        with (
            http.stream("POST", "/v1/completions", json=body),
            anthropic.Anthropic(base_url=server.url, api_key="-", max_retries=0) as client,
        ):
            server.until(lambda: server.stats().num_running == 1)
            with http.stream("POST", "/v1/completions", json=body):
                server.until(lambda: server.stats().num_waiting == 1)
                with pytest.raises(anthropic.RateLimitError) as full:
                    client.messages.create(model=MODEL, max_tokens=5, messages=ASK)
    assert full.value.type == "rate_limit_error"
    assert full.value.response.headers["retry-after"]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError("not shown"), "api_error"),
        (unavailable("the request was aborted", "aborted"), "overloaded_error"),
    ],
    ids=["ours", "the engine's"],
)
def test_an_error_in_a_stream(server, client, engine, monkeypatch, error, kind) -> None:
    pieces = Generation.pieces

    async def breaking(self: Generation) -> AsyncIterator[Piece]:
        number = 0
        async for piece in pieces(self):
            yield piece
            number += 1
            if number == 2:
                raise error

    monkeypatch.setattr(Generation, "pieces", breaking)
    engine.says("one two three")
    with pytest.raises(anthropic.APIStatusError) as caught:
        list(client.messages.create(model=MODEL, max_tokens=50, messages=ASK, stream=True))
    body: Any = caught.value.body
    assert (body["type"], body["error"]["type"]) == ("error", kind) and body["request_id"]
    assert "not shown" not in body["error"]["message"]
    server.wait_idle()


# Errors without an SDK.


def test_paths_and_methods_that_there_are_not(http) -> None:
    for method, path, status in (
        ("GET", ANSWERS, 405), ("POST", f"{ANSWERS}/batches", 404), ("GET", f"{ANSWERS}/x", 404),
    ):  # fmt: skip
        response = http.request(method, path)
        assert response.status_code == status
        error_of(response)
    # Others keep OpenAI's form, unless one of Anthropic's SDKs asks.
    assert "param" in http.get("/v1/nothing").json()["error"]
    error_of(http.get("/v1/nothing", headers={"anthropic-version": "2023-06-01"}))


def test_bodies_that_are_none(http) -> None:
    for content, kind, status in (
        (b"{", "application/json", 400), (b"[]", "application/json", 400),
        (b'{"messages": ' + b"[" * 200, "application/json", 400), (b"x", "text/plain", 415),
    ):  # fmt: skip
        response = http.post(ANSWERS, content=content, headers={"content-type": kind})
        assert response.status_code == status, response.text
        assert error_of(response)["type"] == "invalid_request_error"


def test_keys(server) -> None:
    """As Anthropic's clients send them, or as OpenAI's do; one that is right is enough."""
    right, wrong = {"x-api-key": "secret"}, {"x-api-key": "wrong"}
    bearer = {"authorization": "Bearer secret"}
    with server.client() as http:
        for headers in (right, bearer, {**wrong, **bearer}, {**right, "authorization": "Bearer x"}):
            for path in ("/v1/models", "/metrics"):
                assert http.get(path, headers=headers).status_code == 200, headers
        for headers in ({}, wrong, {"x-api-key": ""}, {"authorization": "secret"}):
            response = http.post(ANSWERS, headers=headers, json={})
            assert response.status_code == 401
            error = error_of(response)
            assert error["type"] == "authentication_error" and "x-api-key" in error["message"]
            assert http.get("/v1/models", headers=headers).json()["error"]["code"]


def test_a_body_that_comes_too_slowly() -> None:
    head = (
        b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: 99\r\n\r\n{"
    )
    with running(ServerConfig(read_timeout=1)) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=300) as sock:
            sock.sendall(head)
            answer = drained(sock)
        with socket.create_connection(("127.0.0.1", server.port), timeout=300) as sock:
            sock.sendall(head.replace(b"Content-Length: 99", b"Transfer-Encoding: chunked") + b"Z")
            broken = drained(sock)
    assert answer.startswith(b"HTTP/1.1 408 ") and broken.startswith(b"HTTP/1.1 400 ")
    for found in (answer, broken):
        body = json.loads(found.partition(b"\r\n\r\n")[2])
        assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"


# Claude Code.

# A request of version 2.1.197, shortened.
CLAUDE_CODE: dict[str, Any] = {
    "model": MODEL,
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>\nToday is Sunday.\n</system-reminder>"},
                {"type": "text", "text": "Read notes.txt", "cache_control": {"type": "ephemeral"}},
            ],
        },
        {"role": "system", "content": "Available agent types: none."},
    ],
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.5b8;"},
        {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "\nYou help.", "cache_control": {"type": "ephemeral"}},
    ],
    "tools": [
        {
            "name": "Read",
            "description": "Reads a file.",
            "input_schema": {
                "$schema": "https://json-schema.org/draft/2020-12/schema",
                "type": "object",
                "properties": {
                    "file_path": {"description": "Absolute.", "type": "string"},
                    "offset": {"type": "integer", "minimum": 0, "maximum": 9007199254740991},
                },
                "required": ["file_path"],
                "additionalProperties": False,
            },
        },
        {"name": "Bash", "description": "Runs.", "input_schema": {"type": "object"}},
    ],
    "metadata": {"user_id": '{"device_id":"10","account_uuid":"","session_id":"98"}'},
    "max_tokens": 32000,
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "stream": True,
}
BETAS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,effort-2025-11-24",
    "x-app": "cli",
    "anthropic-dangerous-direct-browser-access": "true",
}


def test_what_claude_code_sends(http, engine) -> None:
    # (It looks first whether there is a server; this one has no page.)
    assert http.head("/").status_code == 200 and http.get("/").status_code == 404
    read = '<tool_call>\n{"name": "Read", "arguments": {"file_path": "/notes.txt"}}\n</tool_call>'
    engine.says(f"<think>\nRead it.\n</think>\n\nI read it.\n{read}", "The word is banana.")
    asked = {"params": {"beta": "true"}, "headers": BETAS}
    response = http.post(ANSWERS, json=CLAUDE_CODE, **asked)
    found = message_events(response.text)
    kinds = [e["content_block"]["type"] for e in found if e["type"] == "content_block_start"]
    assert kinds == ["thinking", "text", "tool_use"]
    assert found[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    prompt = engine.prompts[-1]
    assert "billing" not in prompt and prompt.index("You help.") < prompt.index("Today is Sunday")
    [call] = [e["content_block"] for e in found if "content_block" in e][2:]
    # The next request repeats all of it, with what came of the call.
    blocks = [
        {"type": "thinking", "thinking": "Read it.", "signature": "x"},
        {"type": "text", "text": "I read it."},
        {**call, "input": {"file_path": "/notes.txt"}},
    ]
    result = {
        "tool_use_id": call["id"], "type": "tool_result", "is_error": True,
        "content": "<tool_use_error>File does not exist.</tool_use_error>",
        "cache_control": {"type": "ephemeral"},
    }  # fmt: skip
    messages = [
        *CLAUDE_CODE["messages"],
        {"role": "assistant", "content": blocks},
        {"role": "user", "content": [result]},
    ]
    response = http.post(ANSWERS, json={**CLAUDE_CODE, "messages": messages}, **asked)
    found = message_events(response.text)
    assert found[-2]["delta"]["stop_reason"] == "end_turn"
    # Most of the prompt was cached.
    usage = found[-2]["usage"]
    assert usage["cache_read_input_tokens"] > usage["input_tokens"]


def test_many_at_once_keep_their_answers_apart(server, client) -> None:
    """Streams of forced calls, each with a tool of its own."""
    made: dict[int, Any] = {}

    def ask(number: int) -> None:
        tool = {**WEATHER, "name": f"tool_{number}"}
        with client.messages.stream(
            model=MODEL, max_tokens=1500, messages=ASK, tools=[tool],
            tool_choice={"type": "tool", "name": tool["name"]},
            thinking={"type": "enabled", "budget_tokens": 8},
        ) as stream:  # fmt: skip
            made[number] = stream.get_final_message()

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    for number in range(8):
        call = made[number].content[-1]
        assert call.name == f"tool_{number}" and call.input["city"] in ("Oslo", "Rome")
    assert server.wait_idle().num_running == 0
