"""Structured outputs and forced calls over HTTP: always valid, in any company; OpenAI's SDK."""

from __future__ import annotations

import asyncio
import enum
import json
import logging
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import httpx
import jsonschema
import openai
import pydantic
import pytest
from support.server_helpers import ENGINE, RunningServer, events, running

from mlx_paged.server.config import ServerConfig

ASK: list[Any] = [{"role": "user", "content": "Describe something."}]
CHATS = "/v1/chat/completions"
_STRING = {"type": "string", "maxLength": 12}


def _object(required: list[str] | None = None, **properties: Any) -> dict[str, Any]:
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names,
            "additionalProperties": False}  # fmt: skip


SCHEMAS: dict[str, dict[str, Any]] = {
    "person": _object(name=_STRING, age={"type": "integer", "minimum": 0, "maximum": 120}),
    "enum": _object(color={"enum": ["red", "green"]}, size={"enum": ["S", None, 3]}),
    "nested": _object(
        place=_object(city=_STRING, zip={"type": "string", "pattern": "^[0-9]{5}$"}),
        lines={"type": "array", "items": _object(n={"enum": [1, 2]}), "maxItems": 2},
    ),
    "any_of": _object(v={"anyOf": [_STRING, {"type": "integer", "maximum": 99}, {"type": "null"}]}),
    "tree": {
        "$ref": "#/$defs/node",
        "$defs": {"node": _object(
            value={"type": "boolean"},
            children={"type": "array", "items": {"$ref": "#/$defs/leaf"}, "maxItems": 2},
        ), "leaf": _object(x={"const": 1})},
    },
    "formats": _object(day={"type": "string", "format": "date"},
                       id={"type": "string", "format": "uuid"}),
    "optional": _object(["c"], a=_STRING, b=_STRING, c={"type": "boolean"}),
    "tuple": _object(t={"type": "array", "prefixItems": [{"type": "boolean"}, _STRING],
                        "items": False, "minItems": 2}),
}  # fmt: skip


def _checked(text: str, schema: dict[str, Any]) -> Any:
    value = json.loads(text)
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    jsonschema.Draft202012Validator(schema, format_checker=checker).validate(value)
    return value


@pytest.fixture(scope="module", params=["overlap", "one after another"])
def server(request: pytest.FixtureRequest) -> Iterator[RunningServer]:
    config = ServerConfig(tool_template=True)
    options = {**ENGINE, "max_model_len": 1024, "num_gpu_blocks_override": 140}
    with running(config, async_scheduling=request.param == "overlap", **options) as server:
        yield server


@pytest.fixture
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


@pytest.fixture
def sdk(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def _together(server: RunningServer, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Answers to requests that are sent at once."""

    async def ask() -> list[dict[str, Any]]:
        async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
            answers = await asyncio.gather(*(client.post(CHATS, json=b) for b in bodies))
        for answer in answers:
            assert answer.status_code == 200, answer.text
        return [answer.json()["choices"][0] for answer in answers]

    return asyncio.run(ask())


def test_every_answer_of_a_batch_is_valid(server) -> None:
    """16 of each form, in a pool that they do not all fit into."""
    bodies, expected = [], []
    for seed in range(2):
        for name, schema in SCHEMAS.items():
            base = {"messages": ASK, "seed": seed, "max_tokens": 300}
            form = {"type": "json_schema", "json_schema": {"name": name, "schema": schema}}
            bodies += [{**base, "response_format": form}, {**base, "max_tokens": 20}]
            tool = {"name": name, "parameters": schema, "strict": True}
            bodies.append(
                {**base, "tools": [{"type": "function", "function": tool}],
                 "tool_choice": "required", "parallel_tool_calls": False}
            )  # fmt: skip
            expected += [schema, None, schema]
    choices = _together(server, bodies)
    num_valid = 0
    for choice, schema in zip(choices, expected):
        if schema is None or choice["finish_reason"] == "length":
            continue
        message = choice["message"]
        if calls := message.get("tool_calls"):
            assert choice["finish_reason"] == "tool_calls" and len(calls) == 1
            _checked(calls[0]["function"]["arguments"], schema)
        else:
            _checked(message["content"], schema)
        num_valid += 1
    assert num_valid > 24
    assert server.wait_idle().num_preemptions > 0


def test_what_is_relaxed_is_said(client, caplog) -> None:
    schema = _object(a={"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True})
    form = {"name": "n", "schema": schema}
    body = {"messages": ASK, "response_format": {"type": "json_schema", "json_schema": form}}
    with caplog.at_level(logging.WARNING):
        answer = client.post(CHATS, json=body)
    where = "response_format.json_schema.schema.properties.a.uniqueItems"
    assert answer.headers["x-structured-outputs-relaxed"] == where
    assert "uniqueItems" in caplog.text
    streamed = client.post(CHATS, json={**body, "stream": True})
    assert streamed.headers["x-structured-outputs-relaxed"] == where
    form["strict"] = True
    refused = client.post(CHATS, json=body)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == where


def test_tools_are_relaxed_and_refused_by_their_own_fields(client) -> None:
    schema = _object(a={"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True})
    function = {"name": "f", "parameters": schema}
    body = {"messages": ASK, "tools": [{"type": "function", "function": function}],
            "tool_choice": "required", "max_tokens": 20}  # fmt: skip
    where = "tools[0].function.parameters.properties.a.uniqueItems"
    assert client.post(CHATS, json=body).headers["x-structured-outputs-relaxed"] == where
    function["strict"] = True
    refused = client.post(CHATS, json=body)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == where


@pytest.mark.parametrize(
    ("field", "value", "pattern"),
    [
        ("structured_outputs", {"regex": "[0-9]{3}"}, r"[0-9]{3}"),
        ("structured_outputs", {"choice": ["yes", "no"]}, r"yes|no"),
        ("structured_outputs", {"grammar": 'start: "a" "b"'}, r"ab"),
        ("guided_regex", "[0-9]{3}", r"[0-9]{3}"),
        ("guided_choice", ["yes", "no"], r"yes|no"),
        ("guided_grammar", 'root ::= "a" | "b"', r"a|b"),
        ("guided_json", {"type": "boolean"}, r"true|false"),
    ],
)
def test_both_apis_take_vllms_fields(client, field, value, pattern) -> None:
    import re

    for path, body, text in (
        (CHATS, {"messages": ASK}, lambda c: c["message"]["content"]),
        ("/v1/completions", {"prompt": "x"}, lambda c: c["text"]),
    ):
        # (However many tokens are asked for: the grammar wins.)
        answer = client.post(path, json={**body, field: value, "min_tokens": 8, "max_tokens": 9})
        assert answer.status_code == 200, answer.text
        [choice] = answer.json()["choices"]
        assert re.fullmatch(pattern, text(choice)) and choice["finish_reason"] == "stop"


def test_one_form_at_a_time(client) -> None:
    body = {"messages": ASK, "guided_regex": "a", "response_format": {"type": "json_object"}}
    refused = client.post(CHATS, json=body)
    assert refused.status_code == 400 and "response_format" in refused.json()["error"]["message"]


def test_json_or_a_call(client) -> None:
    """With tools and a format the answer is one of the two."""
    tool = {"name": "person", "parameters": SCHEMAS["person"]}
    form = {"name": "enum", "schema": SCHEMAS["enum"]}
    kinds = set()
    for seed in range(4):
        answer = client.post(CHATS, json={
            "messages": ASK, "seed": seed, "max_tokens": 200, "parallel_tool_calls": False,
            "tools": [{"type": "function", "function": tool}],
            "response_format": {"type": "json_schema", "json_schema": form},
        })  # fmt: skip
        [choice] = answer.json()["choices"]
        if choice["finish_reason"] == "length":
            continue
        calls = choice["message"].get("tool_calls")
        kinds.add(bool(calls))
        if calls:
            _checked(calls[0]["function"]["arguments"], SCHEMAS["person"])
        else:
            _checked(choice["message"]["content"], SCHEMAS["enum"])
    assert kinds


def _pushed(server: RunningServer, wanted: Any) -> dict[str, float]:
    """A `logit_bias` that makes all but impossible what is not one of the wanted tokens."""
    tokenizer = server.engine.engine.tokenizer
    if callable(wanted):
        size = server.engine.engine.vocab_size
        tokens = [t for t in range(size) if wanted(tokenizer.decode([t]))]
    else:
        tokens = list(wanted)
    assert tokens
    return {str(token): 100.0 for token in tokens}


def test_a_model_of_nothing_but_spaces_ends_its_json(server, client) -> None:
    """(oMLX #2990: whitespace until max_tokens.)"""
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMAS["enum"]}}
    bias = _pushed(server, lambda text: text and not text.strip())
    [choice] = client.post(CHATS, json={
        "messages": ASK, "response_format": form, "logit_bias": bias, "max_tokens": 500,
    }).json()["choices"]  # fmt: skip
    assert choice["finish_reason"] == "stop"
    _checked(choice["message"]["content"], SCHEMAS["enum"])
    assert "  " in choice["message"]["content"]  # It was pushed.


def test_an_end_token_does_not_come_within_json(server, client) -> None:
    """(vLLM #42403.)"""
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMAS["nested"]}}
    ends = sorted(server.engine.engine.tokenizer.eos_token_ids)
    [choice] = client.post(CHATS, json={
        "messages": ASK, "response_format": form, "max_tokens": 500, "stop_token_ids": ends,
        "logit_bias": _pushed(server, ends),
    }).json()["choices"]  # fmt: skip
    assert choice["finish_reason"] == "stop"
    _checked(choice["message"]["content"], SCHEMAS["nested"])


def test_a_pattern_without_anchors_is_found_anywhere(client) -> None:
    """(LM Studio #2168: it was refused.)"""
    schema = _object(code={"type": "string", "pattern": "[0-9]{2}", "maxLength": 6})
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    answer = client.post(CHATS, json={"messages": ASK, "response_format": form})
    assert answer.status_code == 200, answer.text
    _checked(answer.json()["choices"][0]["message"]["content"], schema)


def test_no_form_is_ignored(client) -> None:
    """(mlx-lm #1007.)"""
    for form, param in (
        ({"type": "json"}, "response_format.type"),
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"schema": SCHEMAS["enum"], "type": "xml_schema"}, "response_format.type"),
    ):
        refused = client.post(CHATS, json={"messages": ASK, "response_format": form})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == param
    refused = client.post(CHATS, json={"messages": ASK, "structured_outputs": {"jsn": {}}})
    assert refused.status_code == 400 and "jsn" in refused.text


# OpenAI's SDK.


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Shape(pydantic.BaseModel):
    kind: Literal["circle", "square"]
    color: Color
    size: Annotated[int, pydantic.Field(ge=1, le=99)]  # (without a limit it may have any digits)


class GetWeather(pydantic.BaseModel):
    city: Literal["Oslo", "Rome"]
    days: int


def test_the_sdk_parses_what_it_asked_for(sdk) -> None:
    answer = sdk.chat.completions.parse(model="mlx-paged-demo", messages=ASK, response_format=Shape)
    [choice] = answer.choices
    assert isinstance(choice.message.parsed, Shape)


def test_the_sdk_says_when_an_answer_was_cut(sdk) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        sdk.chat.completions.parse(
            model="mlx-paged-demo", messages=ASK, response_format=Shape, max_tokens=3
        )


def test_the_sdk_parses_strict_calls(sdk) -> None:
    answer = sdk.chat.completions.parse(
        model="mlx-paged-demo",
        messages=ASK,
        tools=[openai.pydantic_function_tool(GetWeather)],
        tool_choice="required",
        parallel_tool_calls=False,
    )
    [call] = answer.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, GetWeather)
    assert answer.choices[0].finish_reason == "tool_calls"


def test_the_sdk_streams_what_it_parses(sdk) -> None:
    kinds = set()
    with sdk.chat.completions.stream(
        model="mlx-paged-demo",
        messages=ASK,
        tools=[openai.pydantic_function_tool(GetWeather)],
        tool_choice={"type": "function", "function": {"name": "GetWeather"}},
    ) as stream:
        for event in stream:
            kinds.add(event.type)
        [call] = stream.get_final_completion().choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, GetWeather)
    assert "tool_calls.function.arguments.delta" in kinds
    with sdk.chat.completions.stream(
        model="mlx-paged-demo", messages=ASK, response_format=Shape
    ) as stream:
        kinds = {event.type for event in stream}
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Shape)
    assert {"content.delta", "content.done"} <= kinds


def test_a_stream_of_json_is_the_same_in_pieces(client) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMAS["person"]}}
    body = {"messages": ASK, "response_format": form, "seed": 5}
    whole = client.post(CHATS, json=body).json()["choices"][0]["message"]["content"]
    streamed = events(client.post(CHATS, json={**body, "stream": True}))
    text = "".join(e["choices"][0]["delta"].get("content", "") for e in streamed)
    assert text == whole
    _checked(text, SCHEMAS["person"])
