"""Schemas that are not enforced where calls are not JSON, and those that would take for ever."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import httpx
import jsonschema
import pytest
from support.server_helpers import ENGINE, RunningServer, running

from mlx_paged.server import turn_preparation
from mlx_paged.server.config import ServerConfig

ASK: list[Any] = [{"role": "user", "content": "Describe something."}]
CHATS = "/v1/chat/completions"
# Shows the calls of Qwen3-Coder.
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}\n{% endfor %}"
    "{# <tool_call> <function=f> <parameter=a> #}"
    "{% for message in messages %}{{ message.content }}\n{% endfor %}"
)
BIT = {"enum": [0, 1]}
ABC = {"a": BIT, "b": BIT, "c": BIT}
WHERE = "tools[0].function.parameters"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    config = ServerConfig(chat_template=TEMPLATE, tool_call_parser="qwen3_coder")
    with running(config, **ENGINE) as server:
        yield server


def body(schema: dict[str, Any], *, strict: bool = False, **more: Any) -> dict[str, Any]:
    function = {"name": "f", "parameters": {"type": "object", **schema}, "strict": strict}
    return {"messages": ASK, "tools": [{"type": "function", "function": function}],
            "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 100,
            **more}  # fmt: skip


def test_numbers_of_parameters_are_enforced(server) -> None:
    closed = {"properties": ABC, "additionalProperties": False}
    with server.client() as client:
        for counts in ({"minProperties": 2}, {"minProperties": 1, "maxProperties": 2}):
            schema = {**closed, **counts}
            answer = client.post(CHATS, json=body(schema, strict=True, n=8, seed=1))
            assert answer.status_code == 200, answer.text
            assert "x-structured-outputs-relaxed" not in answer.headers
            ended = [c for c in answer.json()["choices"] if c["finish_reason"] == "tool_calls"]
            for choice in ended:
                [call] = choice["message"]["tool_calls"]
                jsonschema.validate(json.loads(call["function"]["arguments"]), schema)
            assert ended


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"properties": ABC, "minProperties": 4}, "minProperties"),
        ({"properties": {"a": {"type": "string", "pattern": "a$|^b"}}}, "properties.a.pattern"),
        ({"properties": ABC, "required": ["a"], "if": {"required": ["b"]},
          "then": {"required": ["c"]}}, "if"),
        ({"properties": ABC, "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ],
)  # fmt: skip
def test_what_is_not_enforced_is_told_and_where_strict_refused(server, schema, path) -> None:
    with server.client() as client:
        told = client.post(CHATS, json=body(schema))
        assert told.status_code == 200, told.text
        assert f"{WHERE}.{path}" in told.headers["x-structured-outputs-relaxed"].split(", ")
        refused = client.post(CHATS, json=body(schema, strict=True))
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == f"{WHERE}.{path}"


def test_references_that_stand_for_any_number_of_schemas_are_refused(server) -> None:
    definitions: dict[str, Any] = {"d0": {"type": "string"}}
    for i in range(1, 10):
        definitions[f"d{i}"] = {"anyOf": [{"$ref": f"#/$defs/d{i - 1}"}] * 10}
    schema = {"properties": {"a": {"$ref": "#/$defs/d9"}}, "$defs": definitions}
    with server.client() as client:
        refused = client.post(CHATS, json=body(schema))
    assert refused.status_code == 400 and "fewer alternatives" in refused.text


@pytest.mark.parametrize("is_tool", [True, False])
def test_a_schema_that_takes_long_to_prepare_holds_nothing_up(server, is_tool: bool) -> None:
    compiler = server.engine.engine.intake.grammar_compiler
    finish, begun = threading.Event(), threading.Event()
    prepare_schema = turn_preparation.prepare_schema

    def slow(schema: Any, **options: Any) -> Any:
        if schema.get("title") == "hostile":
            begun.set()
            while not finish.is_set():  # (of CPU time there is a limit)
                sum(range(1000))
        return prepare_schema(schema, **options)

    hostile = {"title": "hostile", "properties": ABC}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": hostile}}
    asked = body(hostile) if is_tool else {"messages": ASK, "response_format": form}

    async def ask() -> tuple[list[httpx.Response], httpx.Response]:
        async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
            # (More than the server has threads for texts.)
            slow = [asyncio.ensure_future(client.post(CHATS, json=asked)) for _ in range(4)]
            await asyncio.to_thread(begun.wait, 300)
            other = await client.post(CHATS, json={"messages": ASK, "max_tokens": 1})
            return await asyncio.gather(*slow), other

    with (
        mock.patch.object(turn_preparation, "prepare_schema", slow),
        mock.patch.object(compiler, "_timeout", 0.2),
    ):
        try:
            refused, other = asyncio.run(ask())
        finally:
            finish.set()
    assert other.status_code == 200
    for answer in refused:
        assert answer.status_code == 400 and "compiles within" in answer.text
        param = WHERE if is_tool else "response_format.json_schema.schema"
        assert answer.json()["error"]["param"] == param
