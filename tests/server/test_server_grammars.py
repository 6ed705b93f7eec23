"""Tests structured outputs over HTTP: errors name the field, and come before the answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from unittest import mock

import httpx
import pytest
from support.server_helpers import ENGINE, RunningServer, running

from mlx_paged.engine.grammar import probe
from mlx_paged.server.config import ServerConfig

ASK: list[Any] = [{"role": "user", "content": "Describe something."}]
CHATS, COMPLETIONS, RESPONSES, MESSAGES = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages",
)  # fmt: skip
INVALID = {"type": "object", "properties": {"a": {"type": "objekt"}}}
NESTED = "((([a-z]{1,1000}){1,1000}){1,1000}){1,1000}"
COMPLEX = {"type": "object", "properties": {"a": {"type": "string", "pattern": f"^{NESTED}$"}},
           "required": ["a"]}  # fmt: skip
FINE = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running(ServerConfig(tool_template=True), **ENGINE) as server:
        yield server


def form(schema: Any) -> dict[str, Any]:
    return {
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    }


def tools(*schemas: Any, **more: Any) -> dict[str, Any]:
    functions = [{"name": f"f{i}", "parameters": schema} for i, schema in enumerate(schemas)]
    return {"tools": [{"type": "function", "function": f} for f in functions],
            "tool_choice": "required", **more}  # fmt: skip


def flat(*schemas: Any) -> dict[str, Any]:
    functions = [{"name": f"f{i}", "parameters": schema} for i, schema in enumerate(schemas)]
    return {"tools": [{"type": "function", **f} for f in functions], "tool_choice": "required"}


def inputs(*schemas: Any) -> dict[str, Any]:
    return {"tools": [{"name": f"f{i}", "input_schema": s} for i, s in enumerate(schemas)],
            "tool_choice": {"type": "any"}}  # fmt: skip


def text(schema: Any) -> dict[str, Any]:
    return {"text": {"format": {"type": "json_schema", "name": "n", "schema": schema}}}


WITHIN = "within the limits of this server"
SCHEMA = "response_format.json_schema.schema"


@pytest.mark.one_in(3)
@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("path", "fields", "param", "says"),
    [
        (CHATS, form(INVALID), f"{SCHEMA}.properties.a.type", "a valid JSON schema"),
        (CHATS, form(COMPLEX), SCHEMA, WITHIN),
        (CHATS, form({"$ref": "#"}), SCHEMA, "there is a value"),
        (CHATS, {"structured_outputs": {"regex": NESTED}}, "structured_outputs.regex", WITHIN),
        (CHATS, {"structured_outputs": {"json": COMPLEX}}, "structured_outputs.json", WITHIN),
        (CHATS, {"guided_regex": NESTED}, "guided_regex", WITHIN),
        (CHATS, {"guided_regex": "[a"}, "guided_regex", "a valid grammar"),
        (CHATS, {"guided_choice": []}, "guided_choice", "at least one text"),
        (CHATS, {"guided_json": INVALID}, "guided_json.properties.a.type", "a valid JSON schema"),
        (CHATS, {"response_format": {"type": "structural_tag", "format": {"type": "x"}}},
         "response_format.format.type", "one of"),
        (CHATS, tools(INVALID), "tools[0].function.parameters.properties.a.type", "a valid JSON"),
        (CHATS, tools(FINE, COMPLEX), "tools[1].function.parameters", WITHIN),
        (CHATS, tools(COMPLEX), "tools[0].function.parameters", WITHIN),
        (CHATS, {**tools(FINE, tool_choice="auto"), **form(COMPLEX)}, SCHEMA, WITHIN),
        (COMPLETIONS, form(INVALID), f"{SCHEMA}.properties.a.type", "a valid JSON schema"),
        (COMPLETIONS, form(COMPLEX), SCHEMA, WITHIN),
        (COMPLETIONS, {"guided_grammar": "start: x"}, "guided_grammar", "a valid grammar"),
        (RESPONSES, text(INVALID), "text.format.schema.properties.a.type", "a valid JSON schema"),
        (RESPONSES, text(COMPLEX), "text.format.schema", WITHIN),
        (RESPONSES, flat(FINE, COMPLEX), "tools[1].parameters", WITHIN),
        (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": COMPLEX}}},
         "output_config.format.schema", WITHIN),
        (MESSAGES, {"output_format": {"type": "json_schema", "schema": INVALID}},
         "output_format.schema.properties.a.type", "a valid JSON schema"),
        (MESSAGES, inputs(FINE, COMPLEX), "tools.1.input_schema", WITHIN),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_errors_name_the_field_of_the_request(
    server: RunningServer, path: str, fields: dict[str, Any], param: str, says: str, stream: bool
) -> None:
    body: dict[str, Any] = {"model": "mlx-paged-demo", "stream": stream, "max_tokens": 20}
    body |= {COMPLETIONS: {"prompt": "x"}, RESPONSES: {"input": "x"}}.get(path, {"messages": ASK})
    if path == RESPONSES:
        body["max_output_tokens"] = body.pop("max_tokens")
    with server.client() as client:
        answer = client.post(path, json=body | fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["message"].startswith(f"{param} must be") and says in error["message"], error
    assert error.get("param", param) == param
    assert "structured_outputs" in fields or "structured_outputs" not in answer.text


def test_relaxed_parts_have_the_names_of_the_request(server: RunningServer) -> None:
    schema = {"type": "array", "uniqueItems": True, "maxItems": 1, "items": {"const": 1}}
    asked = [
        (CHATS, {"messages": ASK, **form(schema)}, f"{SCHEMA}.uniqueItems"),
        (CHATS, {"messages": ASK, "guided_json": schema}, "guided_json.uniqueItems"),
        (CHATS, {"messages": ASK, "guided_grammar": f"start: %json {json.dumps(schema)}"},
         "guided_grammar.%json[0].uniqueItems"),
        (COMPLETIONS, {"prompt": "x", **form(schema)}, f"{SCHEMA}.uniqueItems"),
        (RESPONSES, {"input": "x", **text(schema)}, "text.format.schema.uniqueItems"),
    ]  # fmt: skip
    with server.client() as client:
        for path, body, relaxed in asked:
            answer = client.post(path, json=body)
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-structured-outputs-relaxed"] == relaxed


def test_what_fails_within_an_answer_is_not_tried_again(server: RunningServer) -> None:
    """A limit that no probe of a grammar has met: it is due to the request, so 400 and not 500."""
    body = {"messages": ASK, "temperature": 1, "seed": 1, "max_tokens": 64}
    body |= {"structured_outputs": {"regex": NESTED}}

    def post(client: httpx.Client, **more: Any) -> httpx.Response:
        return client.post(CHATS, json={**body, **more})

    with mock.patch.object(probe, "LENGTHS", ()), server.client() as client:
        answer = post(client)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["param"] == "structured_outputs" and "too many expressions" in error["message"]
        streamed = post(client, stream=True)
        assert streamed.status_code == 200 and '"invalid_request_error"' in streamed.text
    with server.client() as client:
        assert client.post(CHATS, json={"messages": ASK, "max_tokens": 2}).status_code == 200


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "limits",
    [
        {"bad_words": ['"', "a", ":", "}", "1", "0"]},
        {"allowed_token_ids": [90, 91, 92]},
        {"logit_bias": {str(i): -100 for i in range(256)}},
        {"min_tokens": 30, "max_tokens": 40},
        {"ignore_eos": True},
        {"stop_token_ids": list(range(256)), "min_tokens": 20},
        {"bad_words": ["{"]},
    ],
)  # fmt: skip
def test_other_parameters_never_leave_an_answer_without_a_token(
    server: RunningServer, limits: dict[str, Any]
) -> None:
    closed = {"type": "object", "properties": {"a": {"enum": [10, 11]}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    body = {"messages": ASK, "temperature": 1, "n": 4, "seed": 3, "max_tokens": 60, **limits}
    with server.client() as client:
        answer = client.post(CHATS, json=body | form(closed))
        called = client.post(CHATS, json=body | tools(closed))
    for found in (answer, called):
        assert found.status_code in (200, 400), found.text
        if found.status_code == 400:
            assert found.json()["error"]["param"] in limits
    if answer.status_code == 200:
        for choice in answer.json()["choices"]:
            if choice["finish_reason"] == "stop" and "stop_token_ids" not in limits:
                assert json.loads(choice["message"]["content"])["a"] in (10, 11)
