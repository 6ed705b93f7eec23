"""Tools of MCP servers in a chat: consent, results, and servers that misbehave."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from support.mcp_files import MCP_SERVER
from support.scripted_engine import ScriptedEngine
from support.server_helpers import ENGINE, running, until
from support.tmux import PROGRAM, home, needs_tmux, terminal

from mlx_paged.cli.chat.conversation import Call, Conversation, Message, Turn
from mlx_paged.cli.chat.local import LocalBackend
from mlx_paged.cli.chat.remote import RemoteBackend
from mlx_paged.cli.chat.session import ChatSession, handle
from mlx_paged.cli.chat.tools import ChatTools, Consent, escaped
from mlx_paged.cli.entry import ExitCode, status_of
from mlx_paged.cli.main import app
from mlx_paged.errors import MlxPagedError
from mlx_paged.mcp import ServerSpec, read_arguments, read_config
from mlx_paged.server.config import ServerConfig

SERVER = str(MCP_SERVER)
SPEC = ServerSpec("test", sys.executable, (SERVER,), {"SECRET": "told"})


def call(name: str, **arguments: Any) -> str:
    """A call in Hermes's syntax."""
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


@pytest.fixture(scope="module")
def tools() -> Iterator[ChatTools]:
    with ChatTools([SPEC], ["test__add"]) as tools:
        yield tools


class Asked:
    """Notes for the user, and what they answer."""

    def __init__(self, *answers: Consent) -> None:
        self.notes: list[str] = []
        self.questions: list[str] = []
        self._answers = list(answers)

    def note(self, text: Any) -> None:
        self.notes.append(str(text))

    def ask(self, question: str) -> Consent:
        self.questions.append(question)
        return self._answers.pop(0)


def run(tools: ChatTools, asked: Asked, name: str, /, **arguments: Any) -> str:
    tools.ask = asked.ask
    try:
        return tools.call(Call("1", name, json.dumps(arguments)), asked.note)
    finally:
        tools.ask = None


# --- Files ----------------------------------------------------------------------------------------


def test_a_file_of_servers(tmp_path) -> None:
    path = tmp_path / "mcp.json"
    servers = {
        "a": {"command": "uvx", "args": ["x"], "env": {"K": "v"}, "type": "stdio"},
        "b": {"url": "https://b.test/mcp", "headers": {"Authorization": "t"}, "timeout": 5},
        "c": {"command": "c", "disabled": True},
    }
    path.write_text(json.dumps({"mcpServers": servers, "theme": "dark"}))
    assert read_config(path) == (
        ServerSpec("a", "uvx", ("x",), {"K": "v"}),
        ServerSpec("b", url="https://b.test/mcp", headers={"Authorization": "t"}, timeout=5),
    )


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ({}, "either a command or a url"),
        ({"command": "x", "url": "http://x"}, "either a command or a url"),
        ({"command": "x", "headers": {}}, "must be of command, args, env, cwd, type, timeout"),
        ({"command": 3}, "command in mcpServers.s"),
        ({"command": "x", "args": "y"}, "args in mcpServers.s"),
        ({"command": "x", "env": {"A": 1}}, "env in mcpServers.s"),
        ({"url": "ftp://x"}, "begins with http:// or https://"),
        ({"url": "http://x", "type": "sse"}, "must be http or streamable-http"),
        ({"url": "http://x", "timeout": 0}, "seconds, more than 0"),
        ("x", "must be an object"),
    ],
)
def test_a_wrong_file_says_what_is_wrong(tmp_path, entry, told) -> None:
    path = tmp_path / "mcp.json"
    path.write_text(json.dumps({"mcpServers": {"s": entry}}))
    with pytest.raises(MlxPagedError) as caught:
        read_config(path)
    assert told in str(caught.value)


@pytest.mark.parametrize("text", ("", "[]", "{", '{"mcpServers": []}', None))
def test_a_file_that_is_no_configuration(tmp_path, text) -> None:
    path = tmp_path / "mcp.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(MlxPagedError, match=r"mcp\.json"):
        read_config(path)
    assert status_of(app, ["chat", "--mcp", str(path)]) == ExitCode.FAILED


@pytest.mark.parametrize("text", ("[]", "x", '{"a": 1, "a": 2}', '{"a": NaN}', "{}}", "[" * 9999))
def test_arguments_that_are_refused(text) -> None:
    with pytest.raises(MlxPagedError, match="arguments"):
        read_arguments(text)


# --- Calls ----------------------------------------------------------------------------------------


def test_tools_have_names_that_every_api_takes(tools) -> None:
    names = [tool.name for tool in tools.tools]
    assert "test__add" in names and "test__say_it" in names
    [add] = [tool for tool in tools.tools if tool.name == "test__add"]
    assert add.parameters["properties"].keys() == {"a", "b"}
    assert add.description == "Add two numbers."


def test_a_call_asks_and_shows_all_of_its_arguments(tools) -> None:
    asked = Asked("yes", "no")
    text = "x" * 5000 + "\x1b[2J\x9b\u202e\u200b\U000e0041"
    assert run(tools, asked, "test__say_it", text=text) == text
    [question] = asked.questions
    assert "test__say_it (server test)" in question and "x" * 5000 in question
    assert r"\u001b[2J\u009b\u202e\u200b\udb40\udc41" in question
    assert all(c.isprintable() or c == "\n" for c in question + "".join(asked.notes))
    assert run(tools, asked, "test__say_it", text="no") == "The user refused this call."


def test_always_is_for_one_tool_in_this_session() -> None:
    asked = Asked("always", "no")
    with ChatTools([SPEC]) as tools:
        assert run(tools, asked, "test__say_it", text="a") == "a"
        assert run(tools, asked, "test__say_it", text="b") == "b"
        assert len(asked.questions) == 1 and '"text": "b"' in asked.notes[1]
        assert "refused" in run(tools, asked, "test__add", a=1, b=2)


def test_without_a_terminal_only_named_tools_run(tools) -> None:
    asked = Asked()
    assert tools.call(Call("1", "test__add", '{"a": 1, "b": 2}'), asked.note) == "3"
    answer = tools.call(Call("2", "test__say_it", '{"text": "x"}'), asked.note)
    assert "refused" in answer and "--mcp-allow test__say_it" in asked.notes[-1]


def test_what_goes_wrong_is_told_to_the_model_and_the_user(tools, tmp_path) -> None:
    asked = Asked(*["yes"] * 9)
    assert "[image of type image/png: not shown]" in run(tools, asked, "test__picture")
    assert run(tools, asked, "test__fails").startswith("The call failed: ")
    assert "there is no tool" in run(tools, asked, "test__other")
    assert "not a JSON object" in tools.call(Call("1", "test__add", "[1"), asked.note)
    assert run(tools, asked, "test__environment", name="SECRET") == "told"
    assert run(tools, asked, "test__environment", name="MLX_PAGED_HISTORY_FILE") == "(not set)"
    assert "has ended" in run(tools, asked, "test__dies")
    assert run(tools, asked, "test__say_it", text="alive again") == "alive again"


def test_a_server_that_hangs_and_those_that_do_not_start(tmp_path) -> None:
    specs = [
        ServerSpec("slow", sys.executable, (SERVER,), timeout=0.2),
        ServerSpec("missing", "no-such-program"),
        ServerSpec("ends", sys.executable, ("-c", "import sys; sys.exit('no licence')")),
    ]
    asked = Asked("yes", "yes")
    with ChatTools(specs) as tools:
        missing, ends = tools.errors
        assert "'missing'" in missing and "no-such-program: No such file or directory" in missing
        assert "'ends'" in ends and "no licence" in ends
        told = run(tools, asked, "slow__hangs", path=str(tmp_path / "begun"))
        assert "did not answer within 0.2 s" in told


def test_a_server_over_http(tmp_path) -> None:
    port = tmp_path / "port"
    server = subprocess.Popen([sys.executable, SERVER, str(port)], stderr=subprocess.DEVNULL)
    try:
        until(lambda: port.exists() and port.read_text())
        spec = ServerSpec("web", url=f"http://127.0.0.1:{port.read_text()}/mcp", headers={"K": "v"})
        asked = Asked("yes", "yes")
        with ChatTools([spec]) as tools:
            assert run(tools, asked, "web__add", a=2, b=3) == "5"
            server.kill()
            server.wait()
            assert "web" in run(tools, asked, "web__add", a=2, b=3)
            assert "failed" in asked.notes[-1]
    finally:
        server.kill()
        server.wait()


def test_a_tool_that_no_server_has_cannot_be_allowed() -> None:
    with pytest.raises(MlxPagedError, match="--mcp-allow must be one of test__add"):
        ChatTools([SPEC], ["test__nothing"]).__enter__()


# --- The loop -------------------------------------------------------------------------------------


class Script:
    """A backend whose answers are (text, calls)."""

    model = "scripted"

    def __init__(self, *answers: tuple[str, list[Call]]) -> None:
        self.answers = list(answers)
        self.asked: list[list[Message]] = []
        self.turn = Turn()
        self.defaults: dict[str, Any] = {}

    def answer(self, messages: list[Message], params: dict[str, Any]) -> Iterator[str]:
        self.asked.append(messages)
        text, calls = self.answers.pop(0)
        self.turn = Turn(finish_reason="tool_calls" if calls else "stop", calls=calls)
        yield from [text] if text else []

    def facts(self) -> list[tuple[str, str]]:
        return []

    def close(self) -> None: ...


class View(Asked):
    def answer(self, pieces: Iterator[str]) -> None:
        self.notes.append("".join(pieces))

    def error(self, message: str) -> None:
        self.notes.append(f"error: {message}")


ADD = Call("c1", "test__add", '{"a": 1, "b": 2}')


def test_results_go_back_until_there_is_an_answer(tools, tmp_path) -> None:
    script = Script(("I add.", [ADD]), ("", [ADD, ADD]), ("It is 3.", []), ("Yes.", []))
    session = ChatSession(script, View(), Conversation(), tools)
    handle(session, "1 + 2?")
    first = [
        {"role": "user", "content": "1 + 2?"},
        {"role": "assistant", "content": "I add.", "tool_calls": [ADD.message()]},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
    ]
    assert script.asked[1] == first
    assert [m["role"] for m in script.asked[2][3:]] == ["assistant", "tool", "tool"]
    assert session.conversation.messages[-1] == {"role": "assistant", "content": "It is 3."}
    handle(session, f"/save {tmp_path}/chat.json")
    assert "saved 1 turn to" in session.view.notes[-1]
    again = ChatSession(script, View(), Conversation(), tools)
    handle(again, f"/load {tmp_path}/chat.json")
    handle(again, "Sure?")
    assert script.asked[3][:3] == first and again.conversation.num_turns == 2
    handle(again, "/undo")
    handle(again, "/undo")
    assert again.conversation.messages == []


def test_the_loop_ends_after_a_number_of_rounds(tools) -> None:
    script = Script(*[("", [ADD])] * 3, ("unasked", []))
    session = ChatSession(script, View(), Conversation(), tools, max_tool_rounds=2)
    handle(session, "Go")
    assert len(script.asked) == 3 and session.failed
    assert "error: not called: the maximum is 2 rounds of calls" in session.view.notes
    assert [m["role"] for m in session.conversation.messages] == [
        "user", "assistant", "tool", "assistant", "tool", "assistant",
    ]  # fmt: skip


def test_control_c_during_a_call_leaves_no_turn_and_the_server_alive(tools) -> None:
    view = View()
    session = ChatSession(Script(("", [ADD]), ("", [ADD]), ("Fine.", [])), view, Conversation())
    session.tools = tools

    class Stopped:
        def call(self, *_: Any) -> str:
            raise KeyboardInterrupt

    session.tools = Stopped()  # type: ignore[assignment]
    handle(session, "Go")
    assert session.conversation.messages == [] and view.notes[-1] == "(stopped)"
    session.tools = tools
    handle(session, "/retry")
    assert session.conversation.messages[-1]["content"] == "Fine."


def test_tools_are_listed(tools) -> None:
    session = ChatSession(Script(), View(), Conversation(), tools)
    handle(session, "/tools")
    table = session.view.notes[-1]
    assert table  # (drawn in the terminal's test)
    handle(ChatSession(Script(), view := View(), Conversation()), "/tools")
    assert "give --mcp" in view.notes[-1]


# --- Models ---------------------------------------------------------------------------------------


def test_a_model_without_a_place_for_tools_is_told_of_them(tools) -> None:
    backend = LocalBackend(None, "demo", num_gpu_blocks_override=500)
    backend.tools = tools.tools[:1]
    assert backend.describes_tools
    messages: list[Message] = [{"role": "user", "content": "1 + 2?"}]

    def forced(text: str) -> str:
        params = {"structured_outputs": {"choice": [text]}, "max_tokens": None}
        return "".join(backend.answer(messages, params))

    assert forced("I add. " + call("test__add", a=1, b=2)).strip() == "I add."
    assert backend.turn.finish_reason == "tool_calls"
    [found] = backend.turn.calls
    assert (found.name, json.loads(found.arguments)) == ("test__add", {"a": 1, "b": 2})
    prompt = backend._engine.tokenizer.decode(backend._prompt(messages))
    assert '"name": "test__add"' in prompt and "Add two numbers." in prompt
    calling = {"role": "assistant", "content": "", "tool_calls": [found.message()]}
    messages += [calling, {"role": "tool", "tool_call_id": found.id, "content": "3"}]
    assert "<tool_response>\n3\n</tool_response>" in backend._engine.tokenizer.decode(
        backend._prompt(messages)
    )
    assert forced("It is 3.") == "It is 3." and not backend.turn.calls
    assert forced('<tool_call>\n{"name": "test__add", "arguments": {"a"') == ""
    assert not backend.turn.calls  # it was cut


@pytest.fixture(scope="module")
def scripted() -> Iterator[Any]:
    config = ServerConfig(tool_template=True)
    with running(config, lambda: ScriptedEngine.from_model(**ENGINE)) as server:
        yield server


def test_a_server_gets_tools_calls_and_results(scripted, tools) -> None:
    scripted.engine.says("I add. " + call("test__add", a=1, b=2), "It is 3.")
    backend = RemoteBackend(scripted.url)
    backend.tools = tools.tools
    session = ChatSession(backend, View(), Conversation(), tools)
    handle(session, "1 + 2?")
    messages = session.conversation.messages
    assert [m["role"] for m in messages] == ["user", "assistant", "tool", "assistant"]
    assert messages[2]["content"] == "3" and messages[3]["content"] == "It is 3."
    assert messages[1]["content"].strip() == "I add."
    assert "<tool_response>\n3\n" in scripted.engine.prompts[-1]
    backend.close()


@needs_tmux
def test_a_terminal_asks_before_each_call(scripted, tmp_path) -> None:
    config = tmp_path / "mcp.json"
    server = {"command": sys.executable, "args": [SERVER]}
    config.write_text(json.dumps({"mcpServers": {"test": server}}))
    notes = tmp_path / "notes"
    note = {"path": str(notes), "text": "one\x1b[2J"}
    scripted.engine.says(
        call("test__note", **note), "Refused.", call("test__note", **note), "Done.",
        call("test__note", **note), call("test__note", **note), "Twice.",
        call("test__hangs", path=str(tmp_path / "begun")),
    )  # fmt: skip
    command = [*PROGRAM, "chat", "--server", scripted.url, "--mcp", str(config)]
    with terminal(*command, environment=home(tmp_path), width=120, height=50) as pane:
        pane.wait_for("Ctrl-D ends.")
        pane.say("/tools")
        pane.wait_for("test__add")
        pane.say("Write it")
        pane.wait_for("The model wants to call test__note (server test)")
        screen = pane.wait_for("in this session:")
        assert r"one\u001b[2J" in screen and not notes.exists()
        pane.say("maybe")
        pane.wait_for("in this session:", count=2)
        pane.say("n")
        pane.wait_for("Refused.")
        assert not notes.exists()
        pane.say("Write it")
        pane.wait_for("in this session:", count=3)
        pane.say("y")
        pane.wait_for("Done.")
        assert notes.read_text() == "one\x1b[2J"
        pane.say("Again")
        pane.wait_for("in this session:", count=4)
        pane.say("a")
        pane.wait_for("Twice.")
        assert notes.read_text() == "one\x1b[2J" * 3
        assert pane.screen().count("in this session:") == 4
        pane.say("Hang")
        pane.wait_for("in this session:", count=5)
        pane.say("y")
        until(lambda: (tmp_path / "begun").exists())
        pane.press("C-c")
        pane.wait_for("(stopped)")
        pane.say("/exit")
        pane.wait_for("status=0")


def test_lines_run_named_tools_only(scripted, tmp_path) -> None:
    config = tmp_path / "mcp.json"
    server = {"command": sys.executable, "args": [SERVER]}
    config.write_text(json.dumps({"mcpServers": {"test": server}}))
    scripted.engine.says(
        call("test__add", a=1, b=2), "Three.", call("test__say_it", text="x"), "Refused."
    )
    command = [*PROGRAM, "chat", "--server", scripted.url, "--mcp", str(config)]
    run = subprocess.run(
        [*command, "--mcp-allow", "test__add"],
        input="Add\nSay\n/tools\n",
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=home(tmp_path),
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split("\n") == ["", "Three.", "", "Refused.", ""]
    assert "test__add gave: 3" in run.stderr and "--mcp-allow test__say_it" in run.stderr


def test_options_that_need_a_file() -> None:
    assert status_of(app, ["chat", "--mcp-allow", "x"]) == ExitCode.USAGE


def test_escapes() -> None:
    assert escaped("a b\n\tä\u202e\u00a0\x9b\ud800") == "a b\n\\u0009ä\\u202e\\u00a0\\u009b\\ud800"
