"""Streams that say nothing for long: what keeps clients that ignore comments."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from openai.types.chat import ChatCompletionChunk
from support.responses_helpers import EVENT
from support.scripted_engine import ScriptedEngine
from support.server_helpers import ENGINE, running

from mlx_paged.server import stream_response
from mlx_paged.server.config import ServerConfig
from mlx_paged.server.generation import Generation, Piece

CHAT = [{"role": "user", "content": "x"}]


@pytest.fixture
def go(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Streams have no pieces until it is set, and are pinged often."""
    go = threading.Event()
    pieces = Generation.pieces

    async def held(self: Generation) -> AsyncIterator[Piece]:
        await asyncio.to_thread(go.wait, 60)
        async for piece in pieces(self):
            yield piece

    monkeypatch.setattr(Generation, "pieces", held)
    monkeypatch.setattr(stream_response, "PING_INTERVAL", 0.05)
    return go


def test_the_role_of_a_chat_comes_with_its_first_piece(go: threading.Event) -> None:
    body = {"messages": CHAT, "stream": True, "max_tokens": 2}
    num_comments, events = 0, []
    with (
        running(ServerConfig()) as server,
        server.client() as client,
        client.stream("POST", "/v1/chat/completions", json=body) as response,
    ):
        for line in response.iter_lines():
            num_comments += line.startswith(":")
            if line.startswith("data: {"):
                assert go.is_set()
                events.append(json.loads(line.removeprefix("data: ")))
            if num_comments > 3:
                go.set()
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert not any("role" in event["choices"][0]["delta"] for event in events[1:])


def test_empty_deltas_come_in_the_form_of_each_api(go: threading.Event) -> None:

    def is_empty_chat(event: dict[str, Any]) -> bool:
        ChatCompletionChunk.model_validate(event)
        return bool(event["choices"]) and event["choices"][0]["delta"] == {}

    def is_empty_completion(event: dict[str, Any]) -> bool:
        [choice] = event["choices"]
        return (choice["text"], choice["finish_reason"]) == ("", None)

    def is_repeated(event: dict[str, Any]) -> bool:
        EVENT.validate_python(event)
        return event["type"] == "response.in_progress"

    cases: list[tuple[str, dict[str, Any], Any]] = [
        ("/v1/chat/completions", {"messages": CHAT}, is_empty_chat),
        ("/v1/completions", {"prompt": "x"}, is_empty_completion),
        ("/v1/responses", {"input": "x"}, is_repeated),
        ("/v1/messages", {"messages": CHAT, "max_tokens": 9}, lambda e: e["type"] == "ping"),
    ]
    config = ServerConfig(stream_keepalive_deltas=True)
    with (
        running(config, lambda: ScriptedEngine.from_model(**ENGINE)) as server,
        server.client() as client,
    ):
        for path, body, is_empty in cases:
            server.engine.says("a b")  # type: ignore[attr-defined]
            go.clear()
            events = []
            with client.stream("POST", path, json={**body, "stream": True}) as response:
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        events.append(json.loads(line.removeprefix("data: ")))
                        if sum(map(is_empty, events)) > 3:
                            go.set()
            assert go.is_set() and "a b" in json.dumps(events[-3:]) + _text(events), path
            if path == "/v1/chat/completions":
                assert events[0]["choices"][0]["delta"]["role"] == "assistant"
            if path == "/v1/responses":
                assert [e["sequence_number"] for e in events] == list(range(len(events)))


def _text(events: list[dict[str, Any]]) -> str:
    """The text of chunks of any API."""
    found = []
    for event in events:
        for choice in event.get("choices", ()):
            found.append(choice.get("text") or choice.get("delta", {}).get("content") or "")
        if event.get("type") == "content_block_delta":
            found.append(event["delta"]["text"])
    return "".join(found)


def test_a_stream_that_is_kept_alive_ends_like_others() -> None:
    config = ServerConfig(stream_keepalive_deltas=True)
    with running(config) as server, server.client() as client:
        body = {"prompt": "x", "stream": True, "max_tokens": 500, "ignore_eos": True}
        for is_cut in (False, True):
            with client.stream("POST", "/v1/completions", json=body) as response:
                lines = []
                for line in response.iter_lines():
                    lines.append(line)
                    if is_cut and line:
                        break
            assert is_cut or "data: [DONE]" in lines
            server.wait_idle()
