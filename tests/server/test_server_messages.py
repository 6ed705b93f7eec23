"""Anthropic's API: what a body becomes, and what an answer becomes, whole and streamed."""

from __future__ import annotations

import asyncio
import json
import pkgutil
import re
import threading
import typing
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from support.messages_helpers import ANSWERS, blocks_of, error_of, joined, streamed, whole
from support.scripted_engine import ScriptedEngine
from support.server_helpers import ENGINE, RunningServer, running

from mlx_paged.server import stream_response
from mlx_paged.server.config import ServerConfig
from mlx_paged.server.generation import Generation, Piece
from mlx_paged.server.messages.bodies import CountBody, MessagesBody
from mlx_paged.server.messages.tools import call_id, use_id

WEATHER = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"enum": [1, 2]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
NOW = {"type": "custom", "name": "now", "input_schema": {"type": "object", "properties": {}}}
OSLO = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
CLOCK = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
THOUGHT = "<think>\nSix of 7.\n</think>\n\n42"
# A model that is free may think for as long as it likes.
BRIEFLY = {"type": "enabled", "budget_tokens": 8}
COUNT = "/v1/messages/count_tokens"
PDF = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0xLjcK/w=="}  # broken
# It writes down what it is given.
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{% if m.reasoning %}({{ m.reasoning }}){% endif %}"
    "{{ m.content }}{% endfor %}{% if add_generation_prompt %}"
    "[effort {{ reasoning_effort }}, think {{ enable_thinking }}, x {{ x }}]{% endif %}"
)


def body_of(content: Any = "hello", **fields: Any) -> dict[str, Any]:
    return {
        "model": "demo", "max_tokens": 200, "messages": [{"role": "user", "content": content}],
        **fields,
    }  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    config = ServerConfig(served_model_names=("demo",), tool_template=True, chat_template=TEMPLATE)
    options: dict[str, Any] = {**ENGINE, "max_model_len": 2048, "reasoning_parser": "qwen3"}
    with running(config, lambda: ScriptedEngine.from_model(**options)) as server:
        yield server


@pytest.fixture
def engine(server: RunningServer) -> Iterator[ScriptedEngine]:
    assert isinstance(server.engine, ScriptedEngine)
    yield server.engine
    server.engine.script.clear()


@pytest.fixture
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def prompt_of(client: httpx.Client, engine: ScriptedEngine, **body: Any) -> str:
    """The model's prompt."""
    engine.says("ok")
    whole(client, {**body_of(), **body})
    return engine.prompts[-1].partition("[effort")[0]


# Answers.


def test_a_text(client, engine) -> None:
    engine.says("Hello there.")
    answer = whole(client, body_of())
    assert answer["content"] == [{"type": "text", "text": "Hello there."}]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
    assert answer["model"] == "demo" and answer["id"].startswith("msg_")
    usage = answer["usage"]
    assert usage["input_tokens"] > 0 and usage["output_tokens"] > 2


def test_a_stream_makes_the_same_message(client, engine) -> None:
    text = f"{THOUGHT}, so:\n{OSLO}\n{CLOCK}"
    body = body_of(tools=[WEATHER, NOW])
    engine.says(text, text)
    answer = whole(client, body)
    found = streamed(client, body)
    made = joined(found)
    kinds = [block["type"] for block in answer["content"]]
    assert kinds == ["thinking", "text", "tool_use", "tool_use"]
    for block in (*answer["content"], *made["content"]):
        block.pop("id", None)
    same = ("content", "stop_reason", "stop_sequence", "model", "role", "type")
    assert {name: made[name] for name in same} == {name: answer[name] for name in same}
    assert made["usage"]["output_tokens"] == answer["usage"]["output_tokens"]
    # In pieces as they come.
    deltas = [e["delta"]["type"] for e in found if e["type"] == "content_block_delta"]
    assert deltas.count("input_json_delta") > 3 and deltas.count("thinking_delta") > 1
    assert deltas.count("signature_delta") == 1


def test_the_stream_begins_with_a_ping(client, engine) -> None:
    engine.says("a")
    text = client.post(ANSWERS, json=body_of(stream=True)).text
    kinds = [event["type"] for event in blocks_of(text)]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert "[DONE]" not in text


def test_pings_are_events(client, engine, monkeypatch) -> None:
    """Clients give up on streams without events; comments are none."""
    seen = threading.Event()
    pieces = Generation.pieces

    async def held(self: Generation) -> AsyncIterator[Piece]:
        await asyncio.to_thread(seen.wait, 300)
        async for piece in pieces(self):
            yield piece

    monkeypatch.setattr(Generation, "pieces", held)
    monkeypatch.setattr(stream_response, "PING_INTERVAL", 0.05)
    engine.says("a")
    num_pings = 0
    with client.stream("POST", ANSWERS, json=body_of(stream=True)) as response:
        for line in response.iter_lines():
            num_pings += line == "event: ping"
            if num_pings == 3:
                seen.set()
    assert num_pings >= 3


def test_stop_sequences(client, engine) -> None:
    body = body_of(stop_sequences=[" three", " four"])
    engine.says(*["one two three four"] * 2)
    answer = whole(client, body)
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", " three")
    assert answer["content"] == [{"type": "text", "text": "one two"}]
    made = joined(streamed(client, body))
    assert (made["stop_reason"], made["stop_sequence"]) == ("stop_sequence", " three")
    assert made["content"] == answer["content"]


def test_max_tokens(client, engine) -> None:
    engine.says(*["one two three four five"] * 2)
    answer = whole(client, body_of(max_tokens=3))
    assert answer["stop_reason"] == "max_tokens" and answer["usage"]["output_tokens"] == 3
    assert joined(streamed(client, body_of(max_tokens=3)))["stop_reason"] == "max_tokens"


def test_no_tokens_only_fill_the_cache(client, engine) -> None:
    prompt = "a prompt that is new to the server " * 8
    for ask in (whole, lambda *args: joined(streamed(*args))):
        engine.says("never")
        answer = ask(client, body_of(prompt, max_tokens=0))
        assert answer["content"] == [] and answer["stop_reason"] == "max_tokens"
        assert answer["usage"]["output_tokens"] == 0
    assert answer["usage"]["cache_read_input_tokens"] > 30


def test_an_answer_ends_where_the_context_does(client, engine) -> None:
    """Clients ask for 32,000 tokens whatever the context has: that is no error."""
    count = client.post(COUNT, json=body_of("x " * 1990)).json()["input_tokens"]
    engine.says("a b c d " * 40)
    answer = whole(client, body_of("x " * 1990, max_tokens=32000))
    assert answer["stop_reason"] == "model_context_window_exceeded"
    usage = answer["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == count
    assert count + usage["output_tokens"] == 2048


def test_a_prompt_that_is_too_long(client) -> None:
    """(Claude Code takes the numbers out of the message, and makes the conversation shorter.)"""
    for content in ("x " * 3000, "x " * 300_000):
        response = client.post(ANSWERS, json=body_of(content))
        error = error_of(response)
        assert response.status_code == 400 and error["type"] == "invalid_request_error"
        assert error["message"].startswith("prompt is too long: ")
    response = client.post(ANSWERS, json=body_of("x " * 3000))
    count = client.post(COUNT, json=body_of("x " * 3000)).json()["input_tokens"]
    message = f"prompt is too long: {count} tokens > 2047 maximum"
    assert error_of(response)["message"] == message


def test_usage_says_what_was_cached(client, engine) -> None:
    body = body_of("a prompt that is used twice, so the second time it is cached " * 4)
    engine.says("a", "a", "a")
    first, second = whole(client, body)["usage"], whole(client, body)["usage"]
    found = streamed(client, body)
    totals = {
        usage["input_tokens"]
        + usage["cache_creation_input_tokens"]
        + usage["cache_read_input_tokens"]
        for usage in (first, second, found[0]["message"]["usage"], found[-2]["usage"])
    }
    assert len(totals) == 1
    assert first["cache_read_input_tokens"] < 20 < second["cache_read_input_tokens"]
    assert found[-2]["usage"]["cache_read_input_tokens"] > 20


def test_sampling_is_passed_on(client, engine) -> None:
    engine.says("a")
    whole(client, body_of(temperature=0.3, top_p=0.9, top_k=7, stop_sequences=["zz"]))
    params = engine.params[-1]
    assert (params.temperature, params.top_p, params.top_k) == (0.3, 0.9, 7)
    assert list(params.stop or ()) == ["zz"] and params.max_tokens == 200


def test_a_reader_that_goes_away(server, client) -> None:
    """An abandoned answer is not generated to its end."""
    aborted = server.num_ended("abort")
    body = body_of(max_tokens=1500, temperature=5, stream=True)
    with client.stream("POST", ANSWERS, json=body) as response:
        next(response.iter_raw())
    server.until(lambda: server.num_ended("abort") == aborted + 1)
    assert server.wait_idle().num_running == 0


# Conversations.


def test_system_prompts_and_their_blocks(client, engine) -> None:
    assert prompt_of(client, engine, system="Be brief.").startswith("[system]Be brief.[user]hello")
    blocks = [
        {"type": "text", "text": "One.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Two."},
    ]
    assert prompt_of(client, engine, system=blocks).startswith("[system]One.\nTwo.[user]hello")
    assert prompt_of(client, engine, system=[]).startswith("[user]hello")


def test_the_billing_header_of_claude_code_is_not_in_the_prompt(client, engine) -> None:
    """It may change with every request, and the prompt would not be cached."""

    def ask(checksum: str) -> dict[str, Any]:
        header = f"x-anthropic-billing-header: cc_version=2.1.197.{checksum}; cc_entrypoint=cli;"
        system = [{"type": "text", "text": header}, {"type": "text", "text": "Be brief. " * 20}]
        engine.says("ok")
        return whole(client, body_of(system=system))

    ask("5b8")
    usage = ask("a17")["usage"]
    assert "billing" not in engine.prompts[-1]
    assert usage["input_tokens"] < 10 < usage["cache_read_input_tokens"]


def test_a_system_message_among_the_messages_omlx_1503(client, engine) -> None:
    """(Bug 13: 422 elsewhere.) Claude Code ends its first request with one."""
    messages = [
        {"role": "user", "content": "a"},
        {"role": "system", "content": "b"},
        {"role": "assistant", "content": "c"},
        {"role": "system", "content": [{"type": "text", "text": "d"}]},
    ]
    prompt = prompt_of(client, engine, messages=messages)
    assert prompt == "[user]a[system]b[assistant]c[system]d"


def test_neighbors_of_one_role_are_one_message(client, engine) -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]},
        {"role": "assistant", "content": "d"},
        {"role": "assistant", "content": [{"type": "text", "text": "e"}]},
        {"role": "user", "content": "f"},
    ]
    prompt = prompt_of(client, engine, messages=messages)
    assert prompt == "[user]a\nb\nc[assistant]d\ne[user]f"


def test_an_answer_goes_on_from_the_last_message(client, engine) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "The answer"}]
    engine.says(" is 4")
    answer = whole(client, body_of(messages=messages))
    assert engine.prompts[-1] == "[user]a[assistant]The answer"
    assert answer["content"] == [{"type": "text", "text": " is 4"}]
    empty = [*messages[:1], {"role": "assistant", "content": []}]
    assert prompt_of(client, engine, messages=empty) == "[user]a"


def test_calls_and_results_are_replayed(client, engine) -> None:
    messages = [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Look it up.", "signature": "x"},
                {"type": "redacted_thinking", "data": "unreadable"},
                {"type": "text", "text": "Let me look."},
                {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Rome"}},
                {"type": "tool_use", "id": "t2", "name": "now", "input": {}, "cache_control": None},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "sunny"},
                {
                    "type": "tool_result", "tool_use_id": "t2", "is_error": True,
                    "content": [{"type": "text", "text": "no clock"}],
                },
                {"type": "text", "text": "So?"},
            ],
        },
    ]  # fmt: skip
    prompt = prompt_of(client, engine, messages=messages, tools=[WEATHER, NOW])
    assert (
        "[assistant](Look it up.)Let me look.\n<tool_call>\n"
        '{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>\n<tool_call>\n'
        '{"name": "now", "arguments": {}}\n</tool_call>'
    ) in prompt
    assert "[user]<tool_response>\nsunny\n</tool_response>" in prompt
    assert prompt.endswith("Error: no clock\n</tool_response>[user]So?")
    assert "unreadable" not in prompt


def test_other_results_are_read(client, engine) -> None:
    def result(content: Any, **fields: Any) -> list[dict[str, Any]]:
        return [{"type": "tool_result", "tool_use_id": "t", "content": content, **fields}]

    found = {"type": "search_result", "title": "T", "source": "http://s",
             "content": [{"type": "text", "text": "found"}]}  # fmt: skip
    for content, expected in (
        (result(None), ""),
        (result([]), ""),
        (result([found]), "T (http://s)\nfound"),
        (result([{"type": "tool_reference", "tool_name": "now"}]), "The tool now is available."),
        (result("<error>", is_error=True), "Error: <error>"),
        (result("Error: x", is_error=True), "Error: x"),
    ):
        messages = [{"role": "user", "content": content}]
        prompt = prompt_of(client, engine, messages=messages)
        assert prompt == f"[user]<tool_response>\n{expected}\n</tool_response>"


def test_documents_of_text(client, engine) -> None:
    def document(**source: Any) -> dict[str, Any]:
        return {"type": "document", "source": source}

    plain = {
        **document(type="text", media_type="text/plain", data="It rains."), "title": "Oslo",
        "context": "A report.", "citations": {"enabled": False},
    }  # fmt: skip
    encoded = document(type="base64", media_type="text/plain", data="SXQgcmFpbnMuIMOp")
    parts = document(type="content", content=[{"type": "text", "text": t} for t in ("a", "b")])
    opening = "<document>\n<document_content>\n"
    closing = "\n</document_content>\n</document>"
    assert prompt_of(client, engine, messages=[{"role": "user", "content": [plain]}]) == (
        "[user]<document>\n<title>Oslo</title>\n<context>A report.</context>\n"
        f"<document_content>\nIt rains.{closing}"
    )
    for block, text in (
        (encoded, "It rains. é"),
        (parts, "a\nb"),
        (document(type="content", content="c"), "c"),
    ):
        content = [block, {"type": "text", "text": "So?"}]
        prompt = prompt_of(client, engine, messages=[{"role": "user", "content": content}])
        assert prompt == f"[user]{opening}{text}{closing}\nSo?"
        result = [{"type": "tool_result", "tool_use_id": "t", "content": [block]}]
        prompt = prompt_of(client, engine, messages=[{"role": "user", "content": result}])
        assert f"{opening}{text}{closing}" in prompt


@pytest.mark.parametrize(
    ("content", "where"),
    [
        (
            [{"type": "image", "source": {"type": "url", "url": "x"}}],
            "messages.0.content.0.source:",
        ),
        ([{"type": "image", "source": {"type": "file"}}], "messages.0.content.0.source.type"),
        ([{"type": "text", "text": "a"}, {"type": "document"}], "messages.0.content.1.source"),
        *(
            ([{"type": "document", **fields}], f"messages.0.content.0.{where}")
            for fields, where in (
                ({"source": PDF}, "source.data"),
                ({"source": {"type": "url", "url": "http://x/y.pdf"}}, "source.type"),
                ({"source": {"type": "file", "file_id": "f"}}, "source.type"),
                ({"source": {**PDF, "media_type": "text/plain"}}, "source.data"),
                ({"source": {"type": "content", "content": [{"type": "x"}]}},
                 "source.content.0.type"),
                ({"source": {"type": "content"}}, "source.content"),
                ({"source": {"type": "text"}, "citations": {"enabled": True}}, "citations"),
            )
        ),
        (
            [{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image"}]}],
            "messages.0.content.0.content.0.source",
        ),
        ([{"type": "server_tool_use", "id": "s", "name": "web_search"}], "messages.0.content.0"),
        ([{"type": "tool_use", "id": "s", "name": "x", "input": {}}], "messages.0.content.0"),
        ([{"type": "text"}], "messages.0.content.0.text"),
        ([{"type": "tool_result", "content": "x"}], "messages.0.content.0.tool_use_id"),
    ],
    ids=[
        "image", "file", "document", "PDF", "PDF by URL", "stored file", "not text", "odd part",
        "no content", "citations", "image in a result", "server tool", "user's call", "text",
        "id",
    ],
)  # fmt: skip
def test_what_is_no_text_is_refused_by_name(client, content, where) -> None:
    response = client.post(ANSWERS, json=body_of(content))
    error = error_of(response)
    assert response.status_code == 400 and error["type"] == "invalid_request_error"
    assert error["message"].startswith(f"{where} ")


# Tools.


def test_tools_are_offered_with_and_without_a_type(client, engine) -> None:
    prompt = prompt_of(client, engine, tools=[WEATHER, NOW])
    assert '"name": "get_weather"' in prompt and '"name": "now"' in prompt
    assert '"enum": ["Oslo", "Rome"]' in prompt


def test_no_choice_offers_none(client, engine) -> None:
    prompt = prompt_of(client, engine, tools=[WEATHER], tool_choice={"type": "none"})
    assert prompt == "[user]hello"


def test_a_call_ends_the_turn(client, engine) -> None:
    engine.says(f"Let me look.\n{OSLO}")
    answer = whole(client, body_of(tools=[WEATHER]))
    text, call = answer["content"]
    assert text == {"type": "text", "text": "Let me look."}
    assert (call["type"], call["name"], call["input"]) == (
        "tool_use", "get_weather", {"city": "Oslo"},
    )  # fmt: skip
    assert call["id"] and answer["stop_reason"] == "tool_use"


def test_a_forced_tool_is_called_omlx_1258(client) -> None:
    """(Bug 15: text elsewhere.) By grammar, whatever the model is."""
    tools = [WEATHER, NOW]
    for choice, names in (
        ({"type": "tool", "name": "get_weather"}, {"get_weather"}),
        ({"type": "any", "disable_parallel_tool_use": True}, {"get_weather", "now"}),
    ):
        for ask in (whole, lambda *args: joined(streamed(*args))):
            body = body_of(tools=tools, tool_choice=choice, thinking=BRIEFLY, max_tokens=1500)
            answer = ask(client, body)
            [call] = [block for block in answer["content"] if block["type"] != "thinking"]
            assert call["type"] == "tool_use" and call["name"] in names
            if call["name"] == "get_weather":
                assert call["input"]["city"] in ("Oslo", "Rome")
            assert answer["stop_reason"] == "tool_use"


def test_arguments_after_a_call_without_any_are_kept_vllm_47901(client, engine) -> None:
    engine.says(*[f"{CLOCK}\n{OSLO}\n{CLOCK}"] * 2)
    body = body_of(tools=[WEATHER, NOW])
    for answer in (whole(client, body), joined(streamed(client, body))):
        calls = [(block["name"], block["input"]) for block in answer["content"]]
        assert calls == [("now", {}), ("get_weather", {"city": "Oslo"}), ("now", {})]
        assert len({block["id"] for block in answer["content"]}) == 3


def test_a_call_that_is_cut_is_reported(client, engine) -> None:
    """(mlx-lm #905.) Its arguments are those that were written."""
    long = OSLO.replace('"Oslo"', '"Oslo", "note": "a long text that is never finished"')
    engine.says(long, long)
    answer = whole(client, body_of(tools=[WEATHER], max_tokens=40))
    [call] = answer["content"]
    assert call["input"]["city"] == "Oslo" and answer["stop_reason"] == "max_tokens"
    assert "a long text".startswith(call["input"].get("note", "")[:11])
    found = streamed(client, body_of(tools=[WEATHER], max_tokens=40))
    pieces = [e["delta"]["partial_json"] for e in found if e["type"] == "content_block_delta"]
    assert "".join(pieces).startswith('{"city": "Oslo"')
    assert found[-2]["delta"]["stop_reason"] == "max_tokens"


@pytest.mark.parametrize("kind", ["web_search_20250305", "computer_20250124", "bash_20300101"])
def test_tools_that_are_not_here_are_refused_by_name(client, kind) -> None:
    tools = [WEATHER, {"type": kind, "name": "x", "display_width_px": 1, "max_uses": 8}]
    error = error_of(client.post(ANSWERS, json=body_of(tools=tools)))
    assert error["message"].startswith(f"tools.1.type {kind!r} is not supported")


def test_tools_that_anthropic_has_defined(client, engine) -> None:
    """Their input is the documented one, offered to the model and enforced."""
    bash = {"type": "bash_20250124", "name": "bash", "cache_control": {"type": "ephemeral"}}
    edit = {
        "type": "text_editor_20250728", "name": "str_replace_based_edit_tool",
        "max_characters": 9000,
    }  # fmt: skip
    old = {"type": "text_editor_20250124", "name": "str_replace_editor"}
    prompt = prompt_of(client, engine, tools=[bash, edit, old])
    assert '"name": "bash"' in prompt and '"restart"' in prompt
    assert '"insert_text"' in prompt and "9000 characters" in prompt and '"undo_edit"' in prompt
    choice = {"type": "tool", "name": "str_replace_based_edit_tool"}
    body = body_of(
        tools=[bash, {**edit, "strict": True}], tool_choice=choice, thinking=BRIEFLY,
        max_tokens=1500,
    )  # fmt: skip
    call = whole(client, body)["content"][-1]
    assert call["input"]["command"] in ("view", "create", "str_replace", "insert")
    assert isinstance(call["input"]["path"], str)


def test_ids_of_uses_are_anthropics(client, engine) -> None:
    """They come back as those of the calls, whatever form the template has for these."""
    engine.says(CLOCK, CLOCK)
    [call] = whole(client, body_of(tools=[NOW]))["content"]
    [made] = joined(streamed(client, body_of(tools=[NOW])))["content"]
    assert all(re.fullmatch("toolu_[0-9a-f]{24}", use["id"]) for use in (call, made))
    for id in ("a1B2c3D4e", "functions.now:5", "5"):
        assert re.fullmatch("toolu_[a-zA-Z0-9_-]+", use_id(id))
    assert call_id(use_id("a1B2c3D4e")) == "a1B2c3D4e"


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"tools": [{"name": "x"}]}, "tools.0.input_schema"),
        ({"tools": [{"input_schema": {"type": "object"}}]}, "tools.0.name"),
        (
            {"tools": [{"name": "x", "input_schema": {"type": "array"}}]},
            "tools.0.input_schema.type",
        ),
        ({"tools": [{"type": "bash_20250124", "name": "sh"}]}, "tools.0.name"),
        (
            {"tools": [{"type": "bash_20250124", "name": "bash", "input_schema": {}}]},
            "tools.0.input_schema",
        ),
        ({"tools": [NOW, NOW]}, "tools"),
        ({"tools": [NOW], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [NOW], "tool_choice": {"type": "tool", "name": "z"}}, "tool_choice"),
        ({"tools": [NOW], "tool_choice": {"type": "required"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "hard"}}, "thinking.type"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"stop_sequences": [""]}, "stop_sequences.0"),
        ({"mcp_servers": [{"type": "url", "url": "x", "name": "y"}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
        ({"compaction": {"type": "summarize"}}, "compaction"),
        ({"thread": {"type": "create"}}, "thread"),
        ({"priority": 1}, "priority"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
    ],
    ids=str,
)
def test_wrong_fields_are_named(client, fields, where) -> None:
    response = client.post(ANSWERS, json=body_of(**fields))
    error = error_of(response)
    assert response.status_code == 400 and error["type"] == "invalid_request_error"
    assert error["message"].partition(" ")[0].rstrip(":") == where, error


def test_a_message_must_not_end_with_a_call(client) -> None:
    call = {"type": "tool_use", "id": "t", "name": "now", "input": {}}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": [call]}]
    error = error_of(client.post(ANSWERS, json=body_of(messages=messages, tools=[NOW])))
    assert "tool_result must follow" in error["message"]


# Thinking, and the form of the text.


def test_thinking_is_a_block(client, engine) -> None:
    engine.says(THOUGHT)
    answer = whole(client, body_of(thinking={"type": "adaptive"}))
    thinking, text = answer["content"]
    assert (thinking["thinking"], text["text"]) == ("Six of 7.", "42")
    assert thinking["signature"] and thinking["type"] == "thinking"
    tokens = answer["usage"]["output_tokens_details"]["thinking_tokens"]
    assert 0 < tokens < answer["usage"]["output_tokens"]


def test_thinking_is_shown_as_asked(client, engine) -> None:
    for thinking, shown in (
        ({"type": "enabled", "budget_tokens": 1024}, ["Six of 7."]),
        ({"type": "adaptive", "display": "summarized"}, ["Six of 7."]),
        ({"type": "adaptive", "display": "omitted"}, [""]),
        ({"type": "between_tools"}, ["Six of 7."]),
        ({"type": "disabled"}, []),
        (None, ["Six of 7."]),
    ):
        engine.says(THOUGHT, THOUGHT)
        body = body_of(thinking=thinking)
        ways = [whole(client, body)]
        if shown in ([], [""]):
            ways.append(joined(streamed(client, body)))
        engine.script.clear()
        for answer in ways:
            *before, text = answer["content"]
            assert text == {"type": "text", "text": "42"}
            assert [block["thinking"] for block in before] == shown
            assert all(block["signature"] for block in before)
        # (Where it is not said, the template decides.)
        thinks = "" if thinking is None else thinking["type"] != "disabled"
        assert f"think {thinks}," in engine.prompts[-1]


def test_the_budget_of_thinking(client, engine) -> None:
    engine.says(THOUGHT, THOUGHT)
    whole(client, body_of(thinking={"type": "enabled", "budget_tokens": 1024}))
    assert engine.params[-1].thinking_token_budget == 1024
    whole(client, body_of(thinking={"type": "adaptive"}))
    assert engine.params[-1].thinking_token_budget is None


def test_hints_reach_the_template(client, engine) -> None:
    engine.says("a", "a")
    whole(client, body_of(output_config={"effort": "high"}, chat_template_kwargs={"x": 3}))
    assert engine.prompts[-1].endswith("[effort high, think , x 3]")
    whole(
        client,
        body_of(thinking={"type": "disabled"}, chat_template_kwargs={"enable_thinking": True}),
    )
    assert "think True," in engine.prompts[-1]


@pytest.mark.parametrize("field", ["output_config", "output_format"])
def test_a_schema_holds_always(client, field) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, 2, 3]}, "ok": {"type": "boolean"}},
        "required": ["n", "ok"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "schema": schema}
    body = body_of(**{field: {"format": wanted} if field == "output_config" else wanted})
    answer = whole(client, {**body, "max_tokens": 1500, "thinking": BRIEFLY})
    text = next(block["text"] for block in answer["content"] if block["type"] == "text")
    assert set(json.loads(text)) == {"n", "ok"} and answer["stop_reason"] == "end_turn"


def test_a_schema_that_cannot_be_enforced_is_refused(client) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    wanted = {"format": {"type": "json_schema", "schema": schema}}
    strict = {"name": "f", "strict": True, "input_schema": schema}
    for fields, where in (
        ({"output_config": wanted}, "output_config.format.schema"),
        ({"output_format": wanted["format"]}, "output_format.schema"),
        ({"tools": [NOW, strict]}, "tools.1.input_schema"),
    ):
        response = client.post(ANSWERS, json=body_of(**fields))
        message = error_of(response)["message"]
        assert response.status_code == 400 and message.startswith(where), message
        assert "uniqueItems" in message


def test_what_a_tool_is_not_held_to_is_said(client) -> None:
    """Not strict, so it is relaxed."""
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True,
              "items": {"type": "boolean"}, "maxItems": 2}}}  # fmt: skip
    tool = {"name": "f", "input_schema": schema}
    body = body_of(tools=[tool], tool_choice={"type": "tool", "name": "f"}, max_tokens=100)
    for stream in (False, True):
        response = client.post(ANSWERS, json={**body, "stream": stream})
        assert "uniqueItems" in response.headers["X-Structured-Outputs-Relaxed"]


# Fields.


@pytest.mark.parametrize(
    ("asked", "body"),
    [
        ("types.message_create_params:MessageCreateParamsStreaming", MessagesBody),
        ("types.message_count_tokens_params:MessageCountTokensParams", CountBody),
        ("types.beta.message_create_params:MessageCreateParamsStreaming", MessagesBody),
    ],
    ids=["messages", "count", "beta"],
)
def test_every_parameter_of_the_sdk_is_known(asked, body) -> None:
    # Imported here: it takes a second, and each worker imports this file.
    parameters = pkgutil.resolve_name(f"anthropic.{asked}")
    known = body.model_fields.keys() | {"betas"}  # (a header)
    assert typing.get_type_hints(parameters).keys() <= known


def test_what_changes_no_answer_is_taken(client, engine) -> None:
    """Claude Code sends half of these."""
    harmless = {
        "metadata": {"user_id": json.dumps({"device_id": "0" * 64, "session_id": "1"})},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "cache_control": {"type": "ephemeral"}, "service_tier": "auto", "speed": "fast",
        "inference_geo": "eu", "diagnostics": {"previous_message_id": "msg_1"},
        "mcp_servers": [], "fallbacks": [], "billing_policy": {"bill_to": "self"},
        "user_profile_id": "u", "workspace_id": "w", "fallback_credit_token": "t",
        "a_field_of_tomorrow": {"a": 1},
    }  # fmt: skip
    for body in (harmless, dict.fromkeys(harmless)):
        engine.says("ok")
        headers = {"anthropic-beta": "claude-code-20250219,nobody-knows-2030-01-01"}
        whole(client, body_of(**body), params={"beta": "true"}, headers=headers)


def test_counts_are_those_of_the_prompt(client, engine) -> None:
    call = {"type": "tool_use", "id": "t", "name": "now", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": "noon"}
    body = body_of(
        system="Be brief.", tools=[WEATHER, NOW], thinking={"type": "adaptive"},
        messages=[
            {"role": "user", "content": "time?"}, {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result]},
        ],
    )  # fmt: skip
    engine.says("noon")
    usage = whole(client, body)["usage"]
    body.pop("max_tokens")
    counted = client.post(COUNT, json=body, params={"beta": "true"})
    assert counted.json() == {
        "input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]
    }
    error = error_of(client.post(COUNT, json={**body, "messages": []}))
    assert error["message"].startswith("messages")


@pytest.mark.parametrize("value", [-(1 << 63), -(1 << 63) + 1])
def test_integers_that_end_llguidance_are_refused(client, value) -> None:
    """(Its stack overflows: the whole server was gone.)"""
    for schema, where in (
        ({"enum": [1, value]}, "enum[1]"),
        ({"properties": {"a": {"const": {"b": [value]}}}}, "properties.a.const.b[0]"),
        ({"type": "integer", "minimum": value, "maximum": value}, "minimum"),
        ({"type": "integer", "minimum": -9.3e18, "maximum": -9.3e18}, "maximum"),
    ):
        wanted = {"format": {"type": "json_schema", "schema": schema}}
        error = error_of(client.post(ANSWERS, json=body_of(output_config=wanted)))
        assert error["message"].startswith(f"output_config.format.schema.{where} must be"), error
    grammar = f'start: %json {{"const": {value}}}'
    chat = {
        "messages": [{"role": "user", "content": "x"}],
        "structured_outputs": {"grammar": grammar},
    }
    assert client.post("/v1/chat/completions", json=chat).status_code == 400
