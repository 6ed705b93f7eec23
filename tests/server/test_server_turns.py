"""Answers of the server are sent back to it, in every API, with a template that demands much."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.chat_templates import TEMPLATES
from support.scripted_engine import ScriptedEngine
from support.server_helpers import ENGINE, events, running

from mlx_paged.server.config import ServerConfig

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "get_weather", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]
TWO = "\n".join(
    f'<tool_call>\n{{"name": "get_weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>'
    for city in ("Oslo", "Rome")
)
ASK = [{"role": "user", "content": "What is the weather?"}]
CHATS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    """Ids of nine letters and digits, roles that alternate, no text beside calls."""
    config = ServerConfig(chat_template=TEMPLATES["mistral v3"], tool_call_parser="hermes")
    make = lambda: ScriptedEngine.from_model(**ENGINE, max_model_len=2048)  # noqa: E731
    with running(config, make) as server, server.client() as client:
        client.says = server.engine.says  # type: ignore[attr-defined]
        client.prompts = server.engine.prompts  # type: ignore[attr-defined]
        yield client


def post(client: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    response = client.post(path, json={"model": None, **body})
    assert response.status_code == 200, response.text
    return dict(response.json())


def check(client: Any, ids: list[str]) -> None:
    """The last prompt has both calls and their results, with the ids of the answer."""
    prompt = client.prompts[-1]
    assert len(set(ids)) == 2
    for id, city, result in zip(ids, ("Oslo", "Rome"), ("cold", "warm"), strict=True):
        assert re.fullmatch(r"[0-9a-zA-Z]{9}", id)
        assert city in prompt and f"{result}{id}" in prompt


@pytest.mark.parametrize("stream", [False, True])
def test_chats(client: Any, stream: bool) -> None:
    client.says(f"Look.{TWO}", "Done.")
    body = {"messages": ASK, "tools": TOOLS}
    if stream:
        answer = client.post(CHATS, json={**body, "stream": True})
        deltas = [c["delta"] for event in events(answer) for c in event["choices"]]
        begun = [call for d in deltas for call in d.get("tool_calls", ()) if "id" in call]
        calls = [
            {**call, "function": {"name": "get_weather", "arguments": f'{{"city": "{city}"}}'}}
            for call, city in zip(begun, ("Oslo", "Rome"), strict=True)
        ]
        message = {"role": "assistant", "content": None, "tool_calls": calls}
    else:
        message = post(client, CHATS, **body)["choices"][0]["message"]
    ids = [call["id"] for call in message["tool_calls"]]
    results = [
        {"role": "tool", "tool_call_id": id, "content": text}
        for id, text in zip(ids, ("cold", "warm"), strict=True)
    ]
    post(client, CHATS, messages=[*ASK, message, *reversed(results)], tools=TOOLS)
    check(client, ids)


def test_responses(client: Any) -> None:
    client.says(f"Look.{TWO}", "Done.", "Done.")
    tools = [{"type": "function", **FUNCTION}]
    first = post(client, RESPONSES, input=ASK, tools=tools)
    ids = [item["call_id"] for item in first["output"] if item["type"] == "function_call"]
    outputs = [
        {"type": "function_call_output", "call_id": id, "output": text}
        for id, text in zip(ids, ("cold", "warm"), strict=True)
    ]
    post(client, RESPONSES, input=[*ASK, *first["output"], *outputs], tools=tools)
    check(client, ids)
    post(client, RESPONSES, previous_response_id=first["id"], input=outputs, tools=tools)
    check(client, ids)


def test_messages(client: Any) -> None:
    client.says(TWO, "Done.")
    tools = [{"name": "get_weather", "input_schema": PARAMETERS}]
    first = post(client, MESSAGES, max_tokens=100, messages=ASK, tools=tools)
    ids = [block["id"] for block in first["content"] if block["type"] == "tool_use"]
    results: list[dict[str, Any]] = [
        {"type": "tool_result", "tool_use_id": id, "content": text}
        for id, text in zip(ids, ("cold", "warm"), strict=True)
    ]
    # (Text behind the results would break the alternation: it becomes a part of the last one.)
    results.append({"type": "text", "text": "Briefly."})
    answer = {"role": "assistant", "content": first["content"]}
    messages = [*ASK, answer, {"role": "user", "content": results}]
    post(client, MESSAGES, max_tokens=100, messages=messages, tools=tools)
    prompt = client.prompts[-1]
    first_id, second_id = (id.removeprefix("toolu_") for id in ids)
    assert f"cold{first_id}" in prompt and f"warm\n\nBriefly.{second_id}" in prompt


def test_a_refusal_is_400_in_the_template_s_words(client: Any) -> None:
    messages = [{"role": "king", "content": "Obey."}]
    response = client.post(CHATS, json={"messages": messages})
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == "messages"
    assert "unknown role: king" in error["message"]
