"""Calls the Responses API of a test's server; validates everything with OpenAI's own types."""

from __future__ import annotations

import json
from typing import Any

import httpx
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from mlx_paged.server.responses_api import answers
from support.server_helpers import validate

PATH = "/v1/responses"
MODEL = "mlx-paged-demo"
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city.",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 8}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
CRM: Any = {
    "type": "namespace",
    "name": "crm",
    "description": "The customers.",
    "tools": [
        {"type": "function", "name": "find", "description": "Finds one.", "parameters": {
            "type": "object", "properties": {"id": {"enum": [7]}}, "required": ["id"],
            "additionalProperties": False}},
        {"type": "function", "name": "count"},
    ],
}  # fmt: skip


def call(name: str, **arguments: Any) -> str:
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


def ask(client: httpx.Client, **body: Any) -> dict[str, Any]:
    """A whole response."""
    answer = client.post(PATH, json={"input": "hello", "temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    check_response(answer.json())
    found: dict[str, Any] = answer.json()
    return found


def check_response(response: dict[str, Any]) -> None:
    validate(answers.Response, response)
    Response.model_validate(response)


def refused(client: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = client.post(PATH, json={"input": "hello", **body})
    assert answer.status_code == 400, answer.text
    found: dict[str, Any] = answer.json()["error"]
    assert found["message"] and found["type"] == "invalid_request_error"
    return found


EVENT = TypeAdapter[Any](ResponseStreamEvent)


def stream(client: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream, each validated with OpenAI's types, in order."""
    answer = client.post(PATH, json={"input": "hello", "temperature": 0, "stream": True, **body})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    blocks = [b.split("\n") for b in answer.text.split("\n\n") if b and not b.startswith(":")]
    events = []
    for name, data in blocks:
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        EVENT.validate_python(event)
        events.append(event)
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    for event in events:
        if "response" in event:
            check_response(event["response"])
    assert [e["type"] for e in events[:2]] == ["response.created", "response.in_progress"]
    assert events[0]["response"]["output"] == [] and events[0]["response"]["usage"] is None
    check_pieces(events)
    return events


def check_pieces(events: list[dict[str, Any]]) -> None:
    """Checks that a stream's pieces add up to its last event."""
    texts: dict[tuple[str, str], str] = {}
    added, done = [], []
    for event in events:
        kind = event["type"]
        if kind.endswith(".delta"):
            texts[event["item_id"], kind] = texts.get((event["item_id"], kind), "") + event["delta"]
            assert added[event["output_index"]]["id"] == event["item_id"]
        elif kind.endswith(("_text.done", "arguments.done")):
            whole = event.get("text", event.get("arguments"))
            assert texts.get((event["item_id"], kind.removesuffix("done") + "delta"), "") == whole
        elif kind == "response.output_item.added":
            assert event["output_index"] == len(added) == len(done)
            added.append(event["item"])
        elif kind == "response.output_item.done":
            assert event["output_index"] == len(done)
            assert event["item"]["id"] == added[len(done)]["id"]
            done.append(event["item"])
    if events[-1]["type"] != "response.failed":
        assert events[-1]["response"]["output"] == done


def kinds(events: list[dict[str, Any]]) -> list[str]:
    """Event types without consecutive repeats."""
    found: list[str] = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if found[-1:] != [kind]:
            found.append(kind)
    return found


def plain(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items without their ids, which are always new."""
    return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in items]


def text_of(response: dict[str, Any]) -> str:
    [message] = [item for item in response["output"] if item["type"] == "message"]
    [part] = message["content"]
    return str(part["text"])
