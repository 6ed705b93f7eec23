"""Custom tools in chats and responses: offered, called, forced, and sent back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from support.responses_helpers import WEATHER, ask, call, kinds, plain, refused, stream
from support.scripted_engine import ScriptedEngine
from support.server_helpers import ENGINE, RunningServer, running, validate

from mlx_paged.server import responses
from mlx_paged.server.config import ServerConfig

MODEL = "mlx-paged-demo"
CHAT = "/v1/chat/completions"
CODE: Any = {"type": "custom", "name": "run", "description": "Runs Python."}
LARK = 'start: "add(" INT ", " INT ")" LF?\n%import common (INT, LF)'
CALC: Any = {
    "type": "custom", "name": "calc",
    "format": {"type": "grammar", "syntax": "regex", "definition": r"[0-9]{1,3}\n[+*] \"[0-9]\""},
}  # fmt: skip
PROGRAM = 'print("é")\n# \\o/ 😀'
RUN = call("run", input=PROGRAM)


def nested(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as chats have it."""
    rest = {key: value for key, value in tool.items() if key != "type"}
    if "format" in rest:
        grammar = {key: rest["format"][key] for key in ("syntax", "definition")}
        rest["format"] = {"type": "grammar", "grammar": grammar}
    return {"type": tool["type"], tool["type"]: rest}


ASKED: Any = [{"role": "user", "content": "Do it."}]


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


# Responses.


def test_a_call_in_a_response_and_its_result(client, sdk, engine) -> None:
    answer = f"Look:\n{RUN}\n{call('get_weather', city='Oslo')}"
    engine.says(answer, answer, "Done.")
    tools = [CODE, WEATHER]
    whole = ask(client, tools=tools)
    assert '"name": "run"' in engine.prompts[-1] and "Runs Python." in engine.prompts[-1]
    _, custom, function = whole["output"]
    assert (custom["type"], custom["name"], custom["input"]) == ("custom_tool_call", "run", PROGRAM)
    assert custom["id"].startswith("ctc_") and function["type"] == "function_call"
    assert whole["tools"][0] == {**CODE, "format": {"type": "text"}}
    events = stream(client, tools=tools)
    assert plain(events[-1]["response"]["output"]) == plain(whole["output"])
    names = [kind for kind in kinds(events) if "custom" in kind]
    assert names == ["custom_tool_call_input.delta", "custom_tool_call_input.done"]
    deltas = [e["delta"] for e in events if e["type"].endswith("custom_tool_call_input.delta")]
    assert "".join(deltas) == PROGRAM and len(deltas) > 3
    [done] = [e for e in events if e["type"].endswith("custom_tool_call_input.done")]
    assert done["input"] == PROGRAM
    more = sdk.responses.create(
        model=MODEL, previous_response_id=whole["id"], tools=tools,
        input=[
            {"type": "custom_tool_call_output", "call_id": custom["call_id"], "output": "é"},
            {"type": "function_call_output", "call_id": function["call_id"], "output": "wet"},
        ],
    )  # fmt: skip
    assert more.output_text == "Done."
    # The prompt has the call as the model wrote it.
    assert json.dumps(PROGRAM, ensure_ascii=False) in engine.prompts[-1]
    assert "<tool_response>\né\n</tool_response>" in engine.prompts[-1]


def test_the_sdk_streams_a_call(sdk, engine) -> None:
    engine.says(RUN)
    with sdk.responses.stream(model=MODEL, input="a", tools=[CODE]) as found:
        events = [event.type for event in found]
        [item] = found.get_final_response().output
    assert "response.custom_tool_call_input.done" in events
    assert (item.type, item.input) == ("custom_tool_call", PROGRAM)


def test_items_of_another_server_are_rendered(client, engine) -> None:
    items = [
        *ASKED,
        {"type": "custom_tool_call", "call_id": "c", "name": "run", "input": "1", "id": "ctc_1"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "it ran"},
    ]
    engine.says("ok")
    ask(client, input=items, tools=[CODE])
    assert '{"input": "1"}' in engine.prompts[-1] and "it ran" in engine.prompts[-1]
    error = refused(client, input=[items[0], items[2]])
    assert "custom_tool_call_output without its custom_tool_call" in error["message"]


def test_a_custom_tool_within_a_namespace(client, engine) -> None:
    tools = [{"type": "namespace", "name": "py", "description": "Python.", "tools": [CODE]}]
    engine.says(call("py__run", input="1"))
    [item] = ask(client, tools=tools)["output"]
    assert (item["namespace"], item["name"], item["input"]) == ("py", "run", "1")


@pytest.mark.parametrize("choice", [
    {"type": "custom", "name": "calc"},
    "required",
    {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "calc"}]},
], ids=str)  # fmt: skip
def test_an_input_is_held_to_its_grammar(client, engine, choice) -> None:
    """By a model that says what it likes."""
    tools = [CALC] if choice == "required" else [CODE, CALC]
    whole = ask(client, tools=tools, tool_choice=choice, parallel_tool_calls=False)
    assert "(regex)" in engine.prompts[-1] and '"pattern"' not in engine.prompts[-1]
    [item] = whole["output"]
    first, second = item["input"].split("\n")
    assert item["name"] == "calc" and first.isdigit() and len(second) == 5
    assert second[0] in "+*" and second[1:3] == ' "' and second[-1] == '"'


# Chats.


def test_a_call_in_a_chat_and_its_result(client, sdk, engine) -> None:
    tools = [nested(CODE), {"type": "function", "function": {"name": "now"}}]
    engine.says(*[f"{RUN}\n{call('now')}"] * 2)
    found = sdk.chat.completions.create(model=MODEL, messages=ASKED, tools=tools)
    validate(responses.ChatAnswer, found.to_dict())
    choice = found.choices[0]
    assert choice.finish_reason == "tool_calls"
    custom, function = choice.message.tool_calls
    assert (custom.type, custom.custom.name, custom.custom.input) == ("custom", "run", PROGRAM)
    assert (function.type, function.function.name) == ("function", "now")
    body = {"messages": ASKED, "tools": tools, "stream": True}
    pieces: dict[int, list[dict[str, Any]]] = {}
    for line in client.post(CHAT, json=body).text.split("\n\n"):
        if line.startswith("data: {"):
            chunk = json.loads(line.removeprefix("data: "))
            validate(responses.ChatChunk, chunk)
            for piece in chunk["choices"][0]["delta"].get("tool_calls", ()):
                pieces.setdefault(piece["index"], []).append(piece)
    first, *rest = pieces[0]
    assert first["type"] == "custom" and first["custom"] == {"name": "run", "input": ""}
    assert all(piece.keys() == {"index", "custom"} for piece in rest) and len(rest) > 3
    assert "".join(piece["custom"]["input"] for piece in rest) == PROGRAM
    assert pieces[1][0]["type"] == "function" and pieces[1][0]["function"]["name"] == "now"
    history = [
        *ASKED,
        choice.message.to_dict(),
        {"role": "tool", "tool_call_id": custom.id, "content": "é"},
        {"role": "tool", "tool_call_id": function.id, "content": "noon"},
    ]
    engine.says("Done.")
    more = sdk.chat.completions.create(model=MODEL, messages=history, tools=tools)
    assert more.choices[0].message.content == "Done."
    assert json.dumps(PROGRAM, ensure_ascii=False) in engine.prompts[-1]
    assert "<tool_response>\né\n</tool_response>" in engine.prompts[-1]


def test_a_forced_input_of_a_chat(sdk) -> None:
    tool = nested({**CALC, "format": {"syntax": "lark", "definition": LARK}})
    found = sdk.chat.completions.create(
        model=MODEL, messages=ASKED, tools=[nested(CODE), tool],
        tool_choice={"type": "custom", "custom": {"name": "calc"}}, temperature=0,
    )  # fmt: skip
    [made] = found.choices[0].message.tool_calls
    a, b = made.custom.input.rstrip("\n").removeprefix("add(").removesuffix(")").split(", ")
    assert a.isdigit() and b.isdigit()


# Wrong requests.

RECURSIVE = 'start: "(" start ")" | "x"'


@pytest.mark.parametrize(
    ("tool", "where"),
    [
        ({"type": "custom"}, "name"),
        ({**CODE, "format": {"type": "xml"}}, "format.type"),
        ({**CODE, "format": {"type": "grammar", "syntax": "lark"}}, "format.definition"),
        ({**CODE, "format": {"type": "grammar", "definition": "a"}}, "format.syntax"),
        (
            {**CODE, "format": {"type": "grammar", "syntax": "gbnf", "definition": "a"}},
            "format.syntax",
        ),
        *(
            (
                {**CODE, "format": {"type": "grammar", "syntax": syntax, "definition": text}},
                "format.definition",
            )
            for syntax, text in (
                ("lark", RECURSIVE), ("lark", "start: x"), ("regex", "(a"), ("regex", "a(?=b)"),
                ("regex", r"(a)\1"),
            )
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(client, tool, where) -> None:
    error = refused(client, tools=[tool])
    assert error["param"] == f"tools[0].{where}" and where in error["message"]
    if "name" in tool and tool["format"].keys() >= {"syntax", "definition"}:
        answer = client.post(CHAT, json={"messages": ASKED, "tools": [nested(tool)]})
        param = f"tools[0].custom.{where.replace('format.', 'format.grammar.')}"
        # (Paths of fields have four parts at most where the body is not of its form.)
        assert answer.status_code == 400
        assert param.startswith(answer.json()["error"]["param"])


def test_choices_that_are_wrong(client) -> None:
    for choice in ({"type": "custom"}, {"type": "custom", "custom": {"name": "none"}}):
        body = {"messages": ASKED, "tools": [nested(CODE)], "tool_choice": choice}
        answer = client.post(CHAT, json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"].startswith("tool_choice")
    assert refused(client, tools=[CODE], tool_choice={"type": "custom"})["param"] == (
        "tool_choice.name"
    )
    answer = client.post(CHAT, json={"messages": ASKED, "tools": [{"type": "custom"}]})
    assert answer.json()["error"]["param"] == "tools[0].custom"
