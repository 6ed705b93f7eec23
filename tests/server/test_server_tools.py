"""Chats with tools: what the prompt offers, what calls become, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.scripted_engine import ScriptedEngine
from support.server_helpers import ENGINE, RunningServer, events, running, validate

from mlx_paged.server import responses
from mlx_paged.server.config import ServerConfig

WEATHER = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
NOW = {"name": "now"}
TOOLS = [{"type": "function", "function": WEATHER}, {"type": "function", "function": NOW}]
OSLO = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
CLOCK = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
ASK = [{"role": "user", "content": "What is the weather in Oslo?"}]
CHATS = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    config = ServerConfig(tool_template=True)
    make = lambda: ScriptedEngine.from_model(**ENGINE, max_model_len=2048)  # noqa: E731
    with running(config, make) as server:
        yield server


@pytest.fixture(scope="module")
def engine(server: RunningServer) -> ScriptedEngine:
    assert isinstance(server.engine, ScriptedEngine)
    return server.engine


@pytest.fixture
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def ask(client: httpx.Client, **body: Any) -> dict[str, Any]:
    """The only choice of a whole answer."""
    response = client.post(CHATS, json={"messages": ASK, "tools": TOOLS, **body})
    assert response.status_code == 200, response.text
    validate(responses.ChatAnswer, response.json())
    [choice] = response.json()["choices"]
    return choice


def stream(client: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    """The choices of a stream's events."""
    body = {"messages": ASK, "tools": TOOLS, "stream": True, **body}
    response = client.post(CHATS, json=body)
    assert response.status_code == 200, response.text
    found = events(response)
    for event in found:
        validate(responses.ChatChunk, event)
    return [choice for event in found for choice in event["choices"]]


def joined(choices: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that the chunks of one choice make together, as the SDK joins them."""
    message: dict[str, Any] = {"content": "", "tool_calls": []}
    for choice in choices:
        delta = choice["delta"]
        message["content"] += delta.get("content") or ""
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(message["tool_calls"]):
                assert call["id"] and call["type"] == "function"
                message["tool_calls"].append({**call, "function": {**call["function"]}})
            else:
                assert call["index"] == len(message["tool_calls"]) - 1
                assert set(call) == {"index", "function"} and set(call["function"]) == {"arguments"}
                function = message["tool_calls"][-1]["function"]
                function["arguments"] += call["function"]["arguments"]
    return message


def names_and_arguments(calls: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    return [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls]


def test_a_call_is_told_from_the_text(client, engine) -> None:
    engine.says(f"Let me look.\n{OSLO}")
    choice = ask(client)
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me look."
    calls = choice["message"]["tool_calls"]
    assert names_and_arguments(calls) == [("get_weather", {"city": "Oslo"})]
    assert calls[0]["type"] == "function" and calls[0]["id"]


def test_a_call_without_text_has_no_content(client, engine) -> None:
    engine.says(OSLO)
    message = ask(client)["message"]
    assert message["content"] is None and len(message["tool_calls"]) == 1


def test_a_stream_is_the_same_in_pieces(client, engine) -> None:
    engine.says(f"Let me look.\n{OSLO}\n{CLOCK}")
    choices = stream(client)
    assert choices[-1]["finish_reason"] == "tool_calls"
    assert [c["finish_reason"] for c in choices[:-1]] == [None] * (len(choices) - 1)
    message = joined(choices)
    assert message["content"] == "Let me look."
    assert names_and_arguments(message["tool_calls"]) == [
        ("get_weather", {"city": "Oslo"}),
        ("now", {}),
    ]
    first, second = message["tool_calls"]
    assert first["id"] != second["id"]
    # In pieces as they come, not whole calls.
    pieces = [c for c in choices if c["delta"].get("tool_calls")]
    assert len(pieces) > 6


def test_several_answers_have_calls_of_their_own(client, engine) -> None:
    engine.says(OSLO)
    response = client.post(CHATS, json={"messages": ASK, "tools": TOOLS, "n": 3})
    calls = [choice["message"]["tool_calls"][0] for choice in response.json()["choices"]]
    assert len({call["id"] for call in calls}) == 3
    engine.says(OSLO)
    choices = stream(client, n=3)
    for index in range(3):
        message = joined([c for c in choices if c["index"] == index])
        assert names_and_arguments(message["tool_calls"]) == [("get_weather", {"city": "Oslo"})]


def test_a_call_that_is_cut_is_reported(client, engine) -> None:
    """(mlx-lm #905: it crashed; others lose it.)"""
    engine.says(OSLO)
    choice = ask(client, max_tokens=30)
    assert choice["finish_reason"] == "length"
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert OSLO.find(call["function"]["arguments"]) > 0
    engine.says(OSLO)
    choices = stream(client, max_tokens=30)
    assert choices[-1]["finish_reason"] == "length"
    assert (
        joined(choices)["tool_calls"][0]["function"]["arguments"] == call["function"]["arguments"]
    )


def test_a_call_that_the_end_token_ends_is_whole(client, engine) -> None:
    """(mlx-lm #1373: it was lost.)"""
    for text in (OSLO.removesuffix("</tool_call>"), OSLO.removesuffix("\n</tool_call>")):
        engine.says(text)
        choice = ask(client)
        assert choice["finish_reason"] == "tool_calls"
        assert names_and_arguments(choice["message"]["tool_calls"])[0][1] == {"city": "Oslo"}


def test_arguments_after_an_empty_call_are_not_lost(client, engine) -> None:
    """(vLLM #47901.)"""
    engine.says(f"{CLOCK}\n{OSLO}")
    found = joined(stream(client))["tool_calls"]
    assert names_and_arguments(found) == [("now", {}), ("get_weather", {"city": "Oslo"})]


def test_log_probabilities_and_tokens_stay_whole(client, engine) -> None:
    engine.says(f"Hm.\n{OSLO}")
    whole = ask(client, logprobs=True, return_token_ids=True)
    engine.says(f"Hm.\n{OSLO}")
    choices = stream(client, logprobs=True, return_token_ids=True)
    tokens = [t for c in choices for t in c.get("token_ids", ())]
    assert tokens == whole["token_ids"]
    entries = [e for c in choices if c["logprobs"] for e in c["logprobs"]["content"]]
    assert [e["token"] for e in entries] == [e["token"] for e in whole["logprobs"]["content"]]
    assert len(entries) == len(tokens)


def test_the_prompt_offers_the_tools(client, engine) -> None:
    engine.says("Hm.")
    ask(client)
    assert '"get_weather"' in engine.prompts[-1] and '"city"' in engine.prompts[-1]
    engine.says("Hm.")
    ask(client, tool_choice="none")
    assert "get_weather" not in engine.prompts[-1]


def test_a_call_is_text_where_there_are_no_tools(client, engine) -> None:
    engine.says(OSLO)
    choice = ask(client, tool_choice="none")
    assert choice["message"]["content"] == OSLO and choice["finish_reason"] == "stop"
    engine.says(OSLO)
    assert ask(client, tools=[])["message"]["content"] == OSLO


def test_results_and_earlier_calls_reach_the_prompt(client, engine) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    engine.says("Noon.")
    ask(
        client,
        messages=[
            *ASK,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "12:00"}]},
            {"role": "tool", "tool_call_id": "c2", "content": "13:00"},
        ],
    )
    prompt = engine.prompts[-1]
    assert '{"name": "now", "arguments": {}}' in prompt
    assert prompt.index("12:00") < prompt.index("13:00")


def test_developers_and_late_system_messages_are_taken(client, engine) -> None:
    engine.says("Yes.")
    messages = [
        {"role": "developer", "content": "Be brief."},
        *ASK,
        {"role": "assistant", "content": "Well."},
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Go on."},
    ]
    assert ask(client, messages=messages)["message"]["content"] == "Yes."
    assert "Be brief." in engine.prompts[-1] and "Be kind." in engine.prompts[-1]


def test_functions_are_tools_by_their_older_names(client, engine) -> None:
    body = {"tools": None, "functions": [WEATHER, NOW]}
    engine.says(OSLO)
    choice = ask(client, **body)
    assert choice["finish_reason"] == "function_call"
    function = choice["message"]["function_call"]
    assert function["name"] == "get_weather" and json.loads(function["arguments"])
    assert "tool_calls" not in choice["message"]
    engine.says(OSLO)
    deltas = [c["delta"]["function_call"] for c in stream(client, **body)
              if "function_call" in c["delta"]]  # fmt: skip
    assert deltas[0]["name"] == "get_weather"
    assert json.loads("".join(d["arguments"] for d in deltas)) == {"city": "Oslo"}
    engine.says("Noon.")
    messages = [
        *ASK,
        {"role": "assistant", "content": None, "function_call": {"name": "now", "arguments": "{}"}},
        {"role": "function", "name": "now", "content": "12:00"},
    ]
    ask(client, **body, messages=messages)
    assert "12:00" in engine.prompts[-1] and '"name": "now"' in engine.prompts[-1]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
        ({"tools": [{"type": "function", "function": {**NOW, "parameters": {"type": "string"}}}]},
         "tools[0].function.parameters"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": "required", "tools": None}, "tool_choice"),
        ({"functions": [NOW]}, "functions"),
        ({"tools": None, "functions": [NOW], "function_call": {"name": "g"}}, "function_call"),
        ({"tools": None, "function_call": {"name": "g"}}, "function_call"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
         "response_format.json_schema.schema"),
        ({"thinking_token_budget": -2}, "thinking_token_budget"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]},
         "messages[0].tool_calls[0].function"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(client, change, param) -> None:
    response = client.post(CHATS, json={"messages": ASK, "tools": TOOLS, **change})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].startswith(param), response.text


def test_tokens_of_a_conversation_count_its_tools(client, engine) -> None:
    engine.says("Hm.")
    body = {"messages": ASK, "tools": TOOLS}
    used = client.post(CHATS, json=body).json()["usage"]["prompt_tokens"]
    assert client.post("/tokenize", json=body).json()["count"] == used
    assert client.post("/tokenize", json={"messages": ASK}).json()["count"] < used


CUTS = (2, 4, 7, 10, 13, 16, 20, 25, 30)


def content_of(api: str, answer: dict[str, Any]) -> str:
    """All text of an answer, as one of the APIs has it."""
    if api == "messages":
        return "".join(b["text"] for b in answer["content"] if b["type"] == "text")
    if api == "responses":
        parts = [part for item in answer["output"] for part in item.get("content") or ()]
        return "".join(part["text"] for part in parts if part["type"] == "output_text")
    return answer["choices"][0]["message"]["content"] or ""


def body_for(api: str, **choice: Any) -> tuple[str, dict[str, Any]]:
    """The path and body of a request that offers the tools, in one of the APIs."""
    if api == "messages":
        offered = [{"name": WEATHER["name"], "input_schema": WEATHER["parameters"]}]
        body: dict[str, Any] = {
            "model": "mlx-paged-demo",
            "max_tokens": 200,
            "messages": ASK,
            "tools": offered,
        }
        body |= {"tool_choice": {"type": "any"}} if choice else {}
        return "/v1/messages", body
    if api == "responses":
        body = {"input": "hi", "tools": [{"type": "function", **WEATHER}]}
        return "/v1/responses", {**body, **choice}
    if api == "functions":
        body = {"messages": ASK, "functions": [WEATHER]}
        return CHATS, {**body, **({"function_call": {"name": "get_weather"}} if choice else {})}
    return CHATS, {"messages": ASK, "tools": TOOLS, **choice}


@pytest.mark.parametrize("api", ["chat", "functions", "responses", "messages"])
@pytest.mark.parametrize("forced", [True, False], ids=["forced", "auto"])
def test_a_call_that_max_tokens_cuts_is_not_shown_as_text(client, engine, api, forced) -> None:
    path, body = body_for(api, **({"tool_choice": "required"} if forced else {}))
    limit = "max_output_tokens" if api == "responses" else "max_tokens"
    for count in CUTS:
        engine.says(OSLO)
        answer = client.post(path, json={**body, limit: count}).json()
        assert content_of(api, answer) == "", answer
        ended = answer.get("stop_reason") or answer.get("status")
        if api in ("chat", "functions"):
            ended = answer["choices"][0]["finish_reason"]
        assert ended in ("length", "incomplete", "max_tokens"), answer


@pytest.mark.parametrize("api", ["chat", "functions", "responses", "messages"])
def test_a_stop_string_within_a_call_ends_the_answer(client, engine, api) -> None:
    """There is nothing to call, so it does not end with a call."""
    path, body = body_for(api)
    stop = {"stop_sequences": ["Os"]} if api == "messages" else {"stop": ["Os"]}
    engine.says(f"Let me look.\n{OSLO}")
    response = client.post(path, json={**body, **stop})
    assert response.status_code == 200, response.text
    answer = response.json()
    assert content_of(api, answer) == "Let me look."
    if api == "messages":
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "Os")
    elif api == "responses":
        assert [item["status"] for item in answer["output"]] == ["completed", "incomplete"]
    else:
        assert answer["choices"][0]["finish_reason"] == "stop"
    for text in ("<tool_call>", "get_wea"):  # the name is not known yet
        stop = {"stop_sequences": [text]} if api == "messages" else {"stop": [text]}
        engine.says(f"Let me look.\n{OSLO}")
        assert content_of(api, client.post(path, json={**body, **stop}).json()).strip() == (
            "Let me look."
        )


def test_texts_around_a_call_are_not_run_together(client, engine) -> None:
    engine.says(f"Let me look.{OSLO}Done.")
    assert ask(client)["message"]["content"] == "Let me look.\nDone."
    engine.says(f"Let me look.{OSLO}Done.")
    assert joined(stream(client))["content"] == "Let me look.\nDone."
