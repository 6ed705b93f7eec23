"""Tests of Anthropic's API: parses streams into events and validates each with the SDK's models."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import httpx
from pydantic import TypeAdapter

from mlx_paged.server.messages import answers
from support.lazy_module import LazyModule
from support.server_helpers import validate

anthropic: Any = LazyModule("anthropic")
ANSWERS = "/v1/messages"


@cache
def _event() -> TypeAdapter[Any]:
    return TypeAdapter(anthropic.types.RawMessageStreamEvent)


def blocks_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream, including pings; an event's name must equal its type."""
    found = []
    for block in text.split("\n\n"):
        if not block or block.startswith(":"):
            continue
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def message_events(text: str) -> list[dict[str, Any]]:
    """The events of a whole stream without pings; checks that their order is valid."""
    found = blocks_of(text)
    for event in found:
        validate(answers.MessageEvent, event)
    found = [event for event in found if event["type"] != "ping"]
    for event in found:
        _event().validate_python(event)
    assert found[0]["type"] == "message_start"
    assert [e["type"] for e in found[-2:]] == ["message_delta", "message_stop"]
    open_block: int | None = None
    num_blocks = 0
    for event in found[1:-2]:
        if event["type"] == "content_block_start":
            assert open_block is None and event["index"] == num_blocks
            open_block, num_blocks = num_blocks, num_blocks + 1
        else:
            assert event["index"] == open_block
            if event["type"] == "content_block_stop":
                open_block = None
    assert open_block is None
    return found


def joined(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a stream's events add up to."""
    message: dict[str, Any] = dict(found[0]["message"])
    texts: list[str] = []
    for event in found[1:]:
        if event["type"] == "content_block_start":
            message["content"].append(dict(event["content_block"]))
            texts = []
        elif event["type"] == "content_block_delta":
            block, delta = message["content"][-1], dict(event["delta"])
            kind = delta.pop("type")
            [(name, text)] = delta.items()
            if kind == "input_json_delta":
                texts.append(text)
                block["input"] = "".join(texts)
            else:
                block[name] += text
        elif event["type"] == "content_block_stop":
            block = message["content"][-1]
            if isinstance(block.get("input"), str):
                block["input"] = json.loads(block["input"])
        elif event["type"] == "message_delta":
            message |= event["delta"]
            message["usage"] = event["usage"]
    return message


def whole(client: httpx.Client, body: dict[str, Any], **options: Any) -> dict[str, Any]:
    """A non-streamed answer, validated with our declaration and the SDK's model."""
    response = client.post(ANSWERS, json=body, **options)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    validate(answers.MessageAnswer, found)
    anthropic.types.Message.model_validate(found)
    return found


def streamed(client: httpx.Client, body: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    """The events of a streamed answer."""
    response = client.post(ANSWERS, json={**body, "stream": True}, **options)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return message_events(response.text)


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error of a rejected request, which must have Anthropic's body and the request's id."""
    body = response.json()
    validate(answers.MessageError, body)
    assert response.headers["request-id"] == body["request_id"]
    found: dict[str, Any] = body["error"]
    return found
