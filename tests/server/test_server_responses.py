"""The Responses API: what the OpenAI SDK and agents ask of it, whole and streamed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel, Field
from support.responses_helpers import (
    CRM,
    EVENT,
    MODEL,
    PATH,
    WEATHER,
    ask,
    call,
    check_response,
    kinds,
    plain,
    refused,
    stream,
    text_of,
)
from support.scripted_engine import ScriptedEngine
from support.server_helpers import ENGINE, RunningServer, running, validate

from mlx_paged.engine.client import EngineRequest
from mlx_paged.server.config import ServerConfig
from mlx_paged.server.errors import ApiError, context_exceeded, failed, timed_out, unavailable
from mlx_paged.server.responses_api import answers
from mlx_paged.server.responses_api.adapter import failure_code


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    config = ServerConfig(tool_template=True)
    options: dict[str, Any] = {**ENGINE, "max_model_len": 2048}
    with running(config, lambda: ScriptedEngine.from_model(**options)) as server:
        yield server


@pytest.fixture(autouse=True)
def engine(server: RunningServer) -> ScriptedEngine:
    """Nothing is left to say of a test that failed."""
    assert isinstance(server.engine, ScriptedEngine)
    server.engine.script.clear()
    return server.engine


@pytest.fixture
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


@pytest.fixture
def sdk(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


# Text.


def test_penalties_are_shown_as_they_are_applied(client, engine) -> None:
    engine.says("a", "a", "a")
    for asked in ({}, {"presence_penalty": 0.5, "frequency_penalty": -1}):
        whole = ask(client, **asked)
        events = [e["response"] for e in stream(client, **asked) if "response" in e]
        for response in (whole, *events):
            for name in ("presence_penalty", "frequency_penalty"):
                assert response[name] == asked.get(name, 0)


def test_a_temperature_above_two_is_taken(client, engine) -> None:
    engine.says("a")
    assert ask(client, temperature=250.0)["temperature"] == 250


def test_conversations_are_not_compacted(client) -> None:
    answer = client.post(f"{PATH}/compact", json={"model": MODEL, "input": "x"})
    assert answer.status_code == 404 and "truncation" in answer.json()["error"]["message"]
    assert client.get(f"{PATH}/compact").status_code == 404  # no response of that id


def test_a_text_whole_and_streamed(client, engine) -> None:
    engine.says("Hello there", "Hello there")
    whole = ask(client, metadata={"k": "v"}, user="me", instructions="Be brief.")
    assert (whole["status"], text_of(whole)) == ("completed", "Hello there")
    assert whole["metadata"] == {"k": "v"} and whole["instructions"] == "Be brief."
    assert whole["completed_at"] >= whole["created_at"] and whole["error"] is None
    assert engine.prompts[-1].startswith("<|im_start|>system\nBe brief.<|im_end|>")
    usage = whole["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    events = stream(client, instructions="Be brief.")
    assert kinds(events) == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    streamed = events[-1]["response"]
    assert plain(streamed["output"]) == plain(whole["output"])
    assert streamed["usage"]["output_tokens"] == usage["output_tokens"]
    details = streamed["usage"]["input_tokens_details"]
    assert usage["input_tokens"] > details["cached_tokens"] > 0
    assert details["cache_write_tokens"] == 0


def test_the_sdk_whole_streamed_and_async(server, sdk, engine) -> None:
    said = " ".join(f"Hello {i}." for i in range(50))  # (a busy reader gets several tokens at once)
    engine.says("Hello.", said, said, "Hello again.")
    whole = sdk.responses.create(model=MODEL, input="hello")
    assert whole.output_text == "Hello." and whole.status == "completed"
    deltas = [
        event.delta
        for event in sdk.responses.create(model=MODEL, input="hello", stream=True)
        if event.type == "response.output_text.delta"
    ]
    assert "".join(deltas) == said and len(deltas) > 1
    with sdk.responses.stream(model=MODEL, input="hello") as stream:
        snapshots = [e.snapshot for e in stream if e.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert snapshots[-1] == final.output_text == said

    async def work() -> str:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            return (await client.responses.create(model=MODEL, input="hello")).output_text

    assert asyncio.run(work()) == "Hello again."


class Person(BaseModel):
    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=120)


def test_the_sdk_parses_what_the_grammar_forces(sdk) -> None:
    """The model itself answers here: any answer that ends is valid."""
    schema_of: dict[str, Any] = Person.model_json_schema()
    asked: dict[str, Any] = {"model": MODEL, "input": "who?", "max_output_tokens": 400}
    parsed = sdk.responses.parse(**asked, text_format=Person)
    assert isinstance(parsed.output_parsed, Person)
    assert parsed.text.format.schema_["properties"].keys() == schema_of["properties"].keys()
    with sdk.responses.stream(**asked, text_format=Person) as stream:
        for _ in stream:
            pass
        assert isinstance(stream.get_final_response().output_parsed, Person)


def test_forms_of_text(client) -> None:
    for text in (
        {"format": {"type": "json_object"}, "verbosity": "low"},
        {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}},
    ):
        whole = ask(client, text=text, max_output_tokens=300)
        if whole["status"] == "completed":
            assert isinstance(json.loads(text_of(whole)), dict)
        assert whole["text"] == text
    assert text_of(ask(client, structured_outputs={"choice": ["walnut"]})) == "walnut"
    assert text_of(ask(client, guided_choice=["hazel"], text={"verbosity": "high"})) == "hazel"


def test_an_answer_of_nothing_is_a_message(client, engine) -> None:
    engine.says("", "")
    assert text_of(ask(client)) == ""
    assert "output_text.delta" not in kinds(stream(client))


# Tools.


def test_calls_whole_and_streamed(client, engine) -> None:
    said = "Let me see.\n" + call("get_weather", city="Oslo") + "\n" + call("get_weather", city="")
    engine.says(said, said)
    whole = ask(client, tools=[WEATHER])
    assert [item["type"] for item in whole["output"]] == [
        "message", "function_call", "function_call",
    ]  # fmt: skip
    assert text_of(whole) == "Let me see."
    first, second = whole["output"][1:]
    assert json.loads(first["arguments"]) == {"city": "Oslo"}
    assert json.loads(second["arguments"]) == {"city": ""}
    assert first["call_id"] != second["call_id"] and first["status"] == "completed"
    assert "namespace" not in first and whole["tools"] == [WEATHER]
    events = stream(client, tools=[WEATHER])
    of_call = ["output_item.added", "function_call_arguments.delta",
               "function_call_arguments.done", "output_item.done"]  # fmt: skip
    assert kinds(events)[-9:] == [*of_call, *of_call, "completed"]
    assert plain(events[-1]["response"]["output"]) == plain(whole["output"])
    added = [e["item"] for e in events if e["type"] == "response.output_item.added"][1]
    assert added["name"] == "get_weather" and added["arguments"] == "" and added["call_id"]


def test_a_forced_call(sdk) -> None:
    """The grammar forces it; the model itself writes it."""
    for choice in ("required", {"type": "function", "name": "get_weather"}):
        whole = sdk.responses.create(
            model=MODEL, input="weather?", tools=[WEATHER], tool_choice=choice,
            parallel_tool_calls=False, max_output_tokens=300,
        )  # fmt: skip
        [item] = whole.output
        assert item.type == "function_call" and item.status == "completed"
        assert json.loads(item.arguments).keys() == {"city"}
        assert whole.parallel_tool_calls is False


def test_the_sdk_parses_the_arguments_of_calls(sdk, engine) -> None:
    class Weather(BaseModel):
        city: str = Field(max_length=8)

    tool: Any = openai.pydantic_function_tool(Weather)
    [item] = sdk.responses.parse(
        model=MODEL, input="weather?", tools=[tool], tool_choice="required",
        parallel_tool_calls=False, max_output_tokens=600,
    ).output  # fmt: skip
    assert item.type == "function_call" and isinstance(item.parsed_arguments, Weather)


def test_namespaces(client, engine) -> None:
    engine.says(call("crm__find", id=7), call("crm__find", id=7), "Found.")
    whole = ask(client, tools=[CRM, WEATHER])
    assert "The customers.\\n\\nFinds one." in engine.prompts[-1]
    assert '"crm__count"' in engine.prompts[-1] and '"crm__find"' in engine.prompts[-1]
    [item] = whole["output"]
    assert (item["namespace"], item["name"]) == ("crm", "find")
    [added, *_] = [e["item"] for e in stream(client, tools=[CRM, WEATHER]) if "item" in e]
    assert (added["namespace"], added["name"]) == ("crm", "find")
    # Replayed, it has the model's name again.
    output = {"type": "function_call_output", "call_id": item["call_id"], "output": "Ada"}
    ask(client, tools=[CRM], input=[{"role": "user", "content": "7?"}, item, output])
    assert '{"name": "crm__find", "arguments": {"id": 7}}' in engine.prompts[-1]
    for choice in (
        {"type": "function", "name": "find"},
        {"type": "function", "name": "crm__find"},
        {"type": "function", "name": "find", "namespace": "crm"},
        {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": "find"}],
        },
    ):
        [item] = ask(client, tools=[CRM, WEATHER], tool_choice=choice, max_output_tokens=200,
                     parallel_tool_calls=False)["output"]  # fmt: skip
        assert (item["namespace"], item["name"]) == ("crm", "find")
        assert json.loads(item["arguments"]) == {"id": 7}


def test_allowed_tools(client) -> None:
    def allowed(mode: str, *tools: dict[str, Any]) -> dict[str, Any]:
        return {"type": "allowed_tools", "mode": mode, "tools": list(tools)}

    weather, crm = {"type": "function", "name": "get_weather"}, {"type": "namespace", "name": "crm"}
    asked: dict[str, Any] = {"tools": [WEATHER, CRM, {"type": "web_search"}],
                             "max_output_tokens": 300, "parallel_tool_calls": False}  # fmt: skip
    choice = allowed("required", weather)
    whole = ask(client, **asked, tool_choice=choice)
    assert [item["name"] for item in whole["output"]] == ["get_weather"]
    assert whole["tool_choice"] == choice
    [item] = ask(client, **asked, tool_choice=allowed("required", crm))["output"]
    assert item["namespace"] == "crm"
    search = allowed("auto", {"type": "web_search"})
    assert ask(client, **asked, tool_choice=search)["output"][0]["type"] == "message"
    for wrong in (
        allowed("required", {"type": "web_search"}), allowed("auto", {"type": "mcp"}),
        allowed("auto", {"type": "function", "name": "nope"}), {"type": "allowed_tools"},
        allowed("auto", {"type": "namespace", "name": "nope"}),
    ):  # fmt: skip
        assert refused(client, **asked, tool_choice=wrong)["param"].startswith("tool_choice")


def test_a_limited_choice_is_a_grammar(client, engine) -> None:
    """With optional calls, tools outside the allowed ones cannot begin."""
    engine.says("No.", "No.")
    ask(client, tools=[WEATHER, CRM])
    assert engine.params[-1].structured_outputs is None
    weather = {"type": "function", "name": "get_weather"}
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [weather]}
    ask(client, tools=[WEATHER, CRM], tool_choice=choice)
    assert '"crm__find"' in engine.prompts[-1]  # (the prompt is the same: so is its prefix)
    grammar = engine.params[-1].structured_outputs
    assert "get_weather" in grammar.grammar and "crm" not in grammar.grammar


def test_strict_tools_that_cannot_be_held_to_are_refused(client) -> None:
    unique = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    tool = {"type": "function", "name": "f", "parameters": unique, "strict": True}
    space = {"type": "namespace", "name": "n", "tools": [tool]}
    for tools, where in (([tool], "tools[0]"), ([WEATHER, space], "tools[1].tools[0]")):
        error = refused(client, tools=tools)
        assert error["param"].startswith(f"{where}.parameters"), error
        assert "uniqueItems" in error["message"]


def test_web_search_is_ignored_and_said_to_be(client, engine, caplog) -> None:
    engine.says("No.")
    caplog.set_level("INFO", "mlx_paged")
    for kind in ("web_search", "web_search_preview"):
        whole = ask(client, tools=[{"type": kind, "external_web_access": True}])
        assert whole["tools"] == [{"type": kind, "external_web_access": True}]
        assert f"ignored tools: {kind}" in caplog.text
    assert "web_search" not in engine.prompts[-1]


def test_what_the_grammar_relaxes_is_said(client) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True,
              "maxItems": 2, "items": {"enum": [1]}}}, "required": ["a"]}  # fmt: skip
    form = {"type": "json_schema", "name": "x", "schema": schema}
    asked = {"input": "x", "max_output_tokens": 100, "text": {"format": form}}
    answer = client.post(PATH, json=asked)
    assert "uniqueItems" in answer.headers["x-structured-outputs-relaxed"]
    error = refused(client, text={"format": {**form, "strict": True}})
    assert error["param"].startswith("text.format.schema") and "uniqueItems" in error["message"]


# Ends.


def test_answers_that_are_cut_are_incomplete(client, engine) -> None:
    for said, last, limit in (
        ("One two three four five", "message", 4),
        (call("get_weather", city="One two three four five six"), "function_call", 20),
    ):
        engine.says(said, said)
        asked = {"max_output_tokens": limit, "tools": [WEATHER]}
        whole = ask(client, **asked)
        assert whole["status"] == "incomplete" and whole["completed_at"] is None
        assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
        assert whole["usage"]["output_tokens"] == limit
        [item] = whole["output"]
        assert (item["type"], item["status"]) == (last, "incomplete")
        events = stream(client, **asked)
        assert events[-1]["type"] == "response.incomplete"
        assert plain(events[-1]["response"]["output"]) == plain(whole["output"])


def test_a_call_without_an_end_is_told(client, engine) -> None:
    engine.says('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Os')
    whole = ask(client, tools=[WEATHER])
    [item] = whole["output"]
    assert (whole["status"], item["status"]) == ("completed", "incomplete")
    assert item["arguments"] == '{"city": "Os'


def test_a_stream_that_fails_says_so(server, client, engine, monkeypatch) -> None:
    ids: list[str] = []
    submit = engine.submit

    async def noted(request: EngineRequest) -> Any:
        assert request.request_id is not None
        ids.append(request.request_id)
        return await submit(request)

    monkeypatch.setattr(engine, "submit", noted)
    asked = {"input": "hello", "stream": True, "ignore_eos": True}
    with client.stream("POST", PATH, json=asked) as answer:
        lines = answer.iter_lines()
        for line in lines:
            if "output_text.delta" in line:
                break
        server.call(engine.abort(ids[0]))
        rest = [line for line in lines if line]
    assert rest[-2] == "event: response.failed"
    event = json.loads(rest[-1].removeprefix("data: "))
    EVENT.validate_python(event)
    check_response(event["response"])
    assert event["response"]["status"] == "failed"
    assert event["response"]["error"]["code"] == "server_error"
    assert client.get(f"{PATH}/{event['response']['id']}").status_code == 404


def test_codes_of_failures_are_those_that_clients_know() -> None:
    too_long = context_exceeded(10, "it is longer")
    assert failure_code(too_long) == "context_length_exceeded"
    assert failure_code(ApiError(429, "full", code="queue_full")) == "rate_limit_exceeded"
    for error in (timed_out(3), unavailable("no", "shutting_down"), failed("id")):
        assert failure_code(error) == "server_error"


def test_a_reader_that_goes_away(server, client, engine) -> None:
    before = server.num_ended("abort")
    asked = {"input": "hello", "stream": True, "ignore_eos": True, "max_output_tokens": 1800}
    with client.stream("POST", PATH, json=asked) as answer:
        for line in answer.iter_lines():
            if "output_text.delta" in line:
                break
    server.until(lambda: server.num_ended("abort") == before + 1)
    server.wait_idle()


def test_what_is_too_long(client) -> None:
    long = "word " * 4000
    error = refused(client, input=long)
    assert (error["param"], error["code"]) == ("input", "context_length_exceeded")
    assert error["message"].startswith("This model's maximum context length is 2048 tokens.")
    assert refused(client, input=long, stream=True)["code"] == "context_length_exceeded"
    error = refused(client, max_output_tokens=5000)
    assert (error["param"], error["code"]) == ("max_output_tokens", "context_length_exceeded")


def test_truncation_leaves_out_the_oldest(client, engine) -> None:
    turns: list[dict[str, Any]] = [{"role": "developer", "content": "Obey."}]
    for i in range(40):
        turns += [
            {"role": "user", "content": f"question {i}: " + "word " * 60},
            {"type": "function_call", "call_id": f"c{i}", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": f"c{i}", "output": f"output {i}"},
        ]
    turns.append({"role": "user", "content": "the last one"})
    assert refused(client, input=turns)["code"] == "context_length_exceeded"
    engine.says("Yes.")
    asked: dict[str, Any] = {"truncation": "auto", "max_output_tokens": 100}
    whole = ask(client, input=turns, instructions="Be brief.", **asked)
    prompt = engine.prompts[-1]
    assert whole["truncation"] == "auto" and prompt.startswith("<|im_start|>system\nBe brief.")
    assert "Obey." in prompt and "the last one" in prompt and "question 39" in prompt
    assert "question 1:" not in prompt
    kept = [i for i in range(40) if f"question {i}:" in prompt]
    assert kept == list(range(kept[0], 40)) and f"output {kept[0] - 2}\n" not in prompt
    # As few as possible went: there is no room for one more question.
    assert 2048 - 100 - whole["usage"]["input_tokens"] < 120
    error = refused(client, input="word " * 4000, **asked)
    assert error["code"] == "context_length_exceeded"


# Other endpoints.


def test_input_tokens_are_those_of_the_prompt(client, sdk, engine) -> None:
    engine.says("Yes.", "Yes.")
    asked: dict[str, Any] = {"input": "hello", "instructions": "Be brief.", "tools": [CRM]}
    whole = ask(client, **asked)
    counted = client.post(f"{PATH}/input_tokens", json=asked)
    validate(answers.InputTokens, counted.json())
    assert counted.json()["input_tokens"] == whole["usage"]["input_tokens"]
    more = {"previous_response_id": whole["id"], "input": "and now?"}
    found = sdk.responses.input_tokens.count(**more).input_tokens
    assert found == ask(client, **more)["usage"]["input_tokens"]
    error = client.post(f"{PATH}/input_tokens", json={})
    assert (error.status_code, error.json()["error"]["param"]) == (400, "input")


def test_what_ran_within_its_request_has_no_events_later(client, sdk, engine) -> None:
    engine.says("Yes.")
    whole = ask(client, background=False)
    with pytest.raises(openai.BadRequestError, match="background"):
        sdk.responses.cancel(whole["id"])
    with pytest.raises(openai.NotFoundError):
        sdk.responses.cancel("resp_nope")
    answer = client.get(f"{PATH}/{whole['id']}", params={"stream": "true"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream")


# Wrong bodies.

MESSAGE = {"role": "user", "content": "x"}
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
FILE = {"type": "input_file", "file_id": "f"}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"), ({"input": []}, "input"), ({"input": 7}, "input"),
    ({"input": [7]}, "input[0]"), ({"input": [{}]}, "input[0].type"),
    ({"input": [{"type": "computer_call"}]}, "input[0].type"),
    ({"input": [MESSAGE, {"role": "tool", "content": "x"}]}, "input[1].role"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [IMAGE]}]}, "input[0].content[0].image_url"),
    ({"input": [{"role": "user", "content": [FILE]}]},
     "input[0].content[0].file_data"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0]"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": {}}]},
     "input[0].arguments"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": [IMAGE]}]},
     "input[1].output[0].image_url"),
    ({"input": [{"type": "reasoning", "summary": [{"type": "x", "text": "y"}]}]},
     "input[0].summary[0]"),
    ({"input": [{"type": "reasoning", "content": "x"}]}, "input[0].content"),
    ({"input": [{"type": "item_reference"}]}, "input[0].id"),
    ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools[0].type"),
    ({"tools": [{"type": "code_interpreter"}]}, "tools[0].type"),
    ({"tools": [{"type": "mcp", "name": "x"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": "x"}}]}, "tools[0].name"),
    ({"tools": [{"type": "function", "name": "x", "parameters": {"type": "array"}}]},
     "tools[0].parameters"),
    ({"tools": [{"type": "function", "name": "x", "parameters": "{}"}]}, "tools[0].parameters"),
    ({"tools": [WEATHER, WEATHER]}, "tools"), ({"tools": [{"type": "namespace"}]}, "tools[0].name"),
    ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "mcp", "name": "c"}]}]},
     "tools[0].tools[0].type"),
    ({"tool_choice": "required"}, "tool_choice"), ({"tool_choice": "sometimes"}, "tool_choice"),
    ({"tool_choice": {"type": "mcp", "server_label": "x"}}, "tool_choice.type"),
    ({"tool_choice": {"type": "function"}, "tools": [WEATHER]}, "tool_choice.name"),
    ({"tool_choice": {"type": "function", "name": "nope"}, "tools": [WEATHER]}, "tool_choice"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "thing"}}}},
     "text.format.schema.type"),
    ({"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}},
     "structured_outputs"),
    ({"text": {"verbosity": "huge"}}, "text.verbosity"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
    ({"reasoning": {"effort": "low"}, "chat_template_kwargs": {"reasoning_effort": "high"}},
     "reasoning.effort"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ({"chat_template": "x"}, "chat_template"),
    ({"include": ["file_search_call.results"]}, "include[0]"), ({"include": "x"}, "include"),
    ({"top_logprobs": 21}, "top_logprobs"), ({"top_logprobs": -1}, "top_logprobs"),
    ({"max_output_tokens": 0}, "max_output_tokens"), ({"max_tool_calls": 0}, "max_tool_calls"),
    ({"truncation": "middle"}, "truncation"),
    ({"previous_response_id": "x"}, "previous_response_id"),
    ({"conversation": "c"}, "conversation"), ({"prompt": {"id": "p"}}, "prompt"),
    ({"context_management": [{"type": "compaction"}]}, "context_management"),
    ({"watermarking": True}, "watermarking"), ({"n": 2}, "n"),
    ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ({"temperature": -1}, "temperature"), ({"top_p": 0}, "top_p"), ({"stream": "yes"}, "stream"),
    ({"instructions": ["x"]}, "instructions"), ({"metadata": {"a": 1}}, "metadata.a"),
    ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    ({"return_token_ids": True}, "return_token_ids"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param"), WRONG, ids=lambda value: json.dumps(value)[:60])
def test_what_is_wrong_is_refused_by_name(client, body, param) -> None:
    for streams in (False, True):
        error = refused(client, **{"stream": streams, **body})
        assert error["param"] == param, error
        assert error["param"].split(".")[-1] in error["message"]


def test_a_model_that_is_not_served(client) -> None:
    answer = client.post(PATH, json={"input": "x", "model": "gpt-9"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


def test_what_means_nothing_is_taken(client, engine) -> None:
    engine.says("Yes.", "Yes.")
    harmless: dict[str, Any] = {
        "background": False, "conversation": None, "prompt": None, "include": [], "tools": [],
        "tool_choice": "auto", "parallel_tool_calls": True, "max_tool_calls": 3,
        "client_metadata": {"a": {"b": 1}}, "prompt_cache_key": "k", "service_tier": "auto",
        "safety_identifier": "s", "user": "u", "truncation": "disabled", "n": 1,
        "text": {"format": {"type": "text"}}, "reasoning": {"effort": None, "summary": None},
        "stream_options": None, "previous_response_id": None, "context_management": None,
    }  # fmt: skip
    whole = ask(client, **harmless)
    assert whole["max_tool_calls"] == 3 and whole["prompt_cache_key"] == "k"
    ask(client, **dict.fromkeys(harmless))


# Agents, and what they stand on.


def test_langchain(server) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    def get_weather(city: Literal["Oslo", "Rome"]) -> str:
        """The weather of a city."""
        return f"wet in {city}"

    model = ChatOpenAI(
        base_url=f"{server.url}/v1", api_key="none", model=MODEL, use_responses_api=True,
        max_tokens=200,
    )  # fmt: skip
    found = model.with_structured_output(Person, method="json_schema").invoke("who?")
    assert isinstance(found, Person)
    forced = model.bind_tools([get_weather], tool_choice="required", parallel_tool_calls=False)
    asked = forced.invoke("weather?")
    [called] = asked.tool_calls
    assert called["args"]["city"] in ("Oslo", "Rome")
    chunks = list(forced.stream("weather?"))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert len(chunks) > 5 and whole.tool_calls[0]["name"] == "get_weather"
    result = ToolMessage(get_weather(**called["args"]), tool_call_id=called["id"])
    silent = model.bind_tools([get_weather], tool_choice="none", max_tokens=5)
    assert not silent.invoke([HumanMessage("weather?"), asked, result]).tool_calls


def test_the_body_of_codex(client, engine) -> None:
    """Codex CLI 0.169, two turns: a call, and an answer to its output."""
    engine.says(call("exec_command", cmd="cat note.txt"), "It is walnut.")
    strings = {"type": "string"}
    body: dict[str, Any] = {
        "model": MODEL,
        "stream": True,
        "store": False,
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "01a2045d-2fcb-7692-bc2a-c5634dc14a2b",
        "client_metadata": {"session_id": "01a2", "x-codex-turn-metadata": '{"a": 1}'},
        "tools": [
            {"type": "function", "name": "exec_command", "description": "Runs a command.",
             "strict": False, "parameters": {"type": "object", "properties": {
                 "cmd": strings, "yield_time_ms": {"type": "number"},
                 "prefix_rule": {"type": "array", "items": strings}},
                 "required": ["cmd"], "additionalProperties": False}},
            {"type": "namespace", "name": "multi_agent_v1", "description": "Sub-agents.",
             "tools": [{"type": "function", "name": "close_agent", "strict": False,
                        "parameters": {"type": "object", "properties": {"target": strings},
                                       "required": ["target"]}}]},
            {"type": "function", "name": "get_goal", "strict": False,
             "parameters": {"type": "object", "properties": {}, "required": []}},
            {"type": "web_search", "external_web_access": True},
        ],
        "input": [
            {"type": "message", "id": "msg_1", "role": "developer",
             "content": [{"type": "input_text", "text": "You are a coding agent."}]},
            {"type": "message", "id": "msg_2", "role": "developer", "content": [
                {"type": "input_text", "text": "<skills_instructions>"},
                {"type": "input_text", "text": "<permissions instructions>"}]},
            {"type": "message", "id": "msg_3", "role": "user",
             "content": [{"type": "input_text", "text": "<environment_context>"}]},
            {"type": "message", "id": "msg_4", "role": "user",
             "content": [{"type": "input_text", "text": "Read note.txt"}]},
        ],
    }  # fmt: skip
    first = stream(client, **body)[-1]["response"]
    assert '"multi_agent_v1__close_agent"' in engine.prompts[-1]
    [item] = first["output"]
    assert (item["name"], json.loads(item["arguments"])) == (
        "exec_command", {"cmd": "cat note.txt"},
    )  # fmt: skip
    body["input"] += [
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": None,
         "encrypted_content": "gAAAA"},
        {"type": "function_call", "status": "completed", "id": item["id"], "name": item["name"],
         "arguments": item["arguments"], "call_id": item["call_id"]},
        {"type": "function_call_output", "id": "fco_1", "call_id": item["call_id"],
         "output": "walnut"},
    ]  # fmt: skip
    assert text_of(stream(client, **body)[-1]["response"]) == "It is walnut."
    assert "<tool_response>\nwalnut\n</tool_response>" in engine.prompts[-1]
