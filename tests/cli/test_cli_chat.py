"""A chat without a terminal: its commands, what it keeps, and who answers."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from support.openai_stub import StubServer
from support.scripted_chat import Record, Script
from support.server_helpers import running

from mlx_paged.cli.chat.conversation import PARAMS, Conversation, Message
from mlx_paged.cli.chat.local import LocalBackend
from mlx_paged.cli.chat.remote import RemoteBackend
from mlx_paged.cli.chat.session import COMMANDS, ChatSession, EndOfChat, handle
from mlx_paged.cli.entry import ExitCode, status_of
from mlx_paged.cli.main import app
from mlx_paged.errors import InvalidParameterError, MlxPagedError
from mlx_paged.server.config import ServerConfig


def chat(*answers: list[Any]) -> ChatSession:
    return ChatSession(Script(*answers), Record(), Conversation())


def said(session: ChatSession) -> list[str]:
    return [message["content"] for message in session.conversation.messages]


# --- Talking --------------------------------------------------------------------------------------


def test_each_turn_carries_all_before_it() -> None:
    session = chat(["a", "b"], ["c"])
    handle(session, "/system be brief")
    handle(session, "one")
    handle(session, "  indented\n")
    assert session.backend.asked[1][0] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "ab"},
        {"role": "user", "content": "  indented\n"},
    ]
    assert said(session) == ["one", "ab", "  indented\n", "c"]
    assert session.backend.num_closed == 2


def test_a_stopped_answer_is_kept_as_far_as_it_came() -> None:
    session = chat(["half", KeyboardInterrupt()], [KeyboardInterrupt()], ["again"])
    handle(session, "one")
    assert said(session) == ["one", "half"] and not session.failed
    handle(session, "two")
    assert said(session) == ["one", "half"], "no answer, no turn"
    handle(session, "/retry")
    assert said(session) == ["one", "half", "two", "again"]
    assert session.view.notes[:2] == ["(stopped)\n"] * 2


def test_an_error_is_a_line_and_the_chat_goes_on() -> None:
    session = chat([MlxPagedError("too long")], ["part", MlxPagedError("broke off")], ["fine"])
    handle(session, "one")
    assert said(session) == [] and session.view.errors == ["too long"]
    handle(session, "two")
    assert said(session) == ["two", "part"] and session.view.errors[-1] == "broke off"
    handle(session, "three")
    assert said(session)[-1] == "fine"
    assert session.failed


def test_an_empty_answer_is_an_answer() -> None:
    session = chat([])
    handle(session, "one")
    assert said(session) == ["one", ""]


def test_an_empty_line_says_nothing() -> None:
    session = chat()
    handle(session, "  \n ")
    assert session.backend.asked == []


# --- Commands -------------------------------------------------------------------------------------


def test_two_slashes_begin_a_message_with_one() -> None:
    session = chat(["ok"])
    handle(session, "//etc/passwd")
    assert said(session)[0] == "/etc/passwd"


@pytest.mark.parametrize(
    ("entered", "told"),
    [
        ("/parms", "there is no command /parms: did you mean /params?"),
        ("/", "there is no command /"),
        ("/clear all", "/clear takes nothing, but got 'all'"),
        ("/load", "write /load FILE"),
        ("/load /nowhere/x", "cannot read /nowhere/x: No such file"),
        ("/save /nowhere/x", "cannot write /nowhere/x: No such file"),
        ("/params top_p", "write /params NAME VALUE"),
        ("/params top_p 3", "top_p must be a number in (0, 1] but got 3"),
        ("/params top_p x", "top_p must be a number in (0, 1] but got 'x'"),
        ("/params n 2", "the parameter must be one of temperature"),
        ("/params max_tokens 0", "max_tokens must be"),
        ("/undo", "there is nothing to take back"),
        ("/retry", "there is nothing to try again"),
    ],
)
def test_a_command_that_cannot_be_done_says_why(entered, told) -> None:
    session = chat()
    handle(session, entered)
    [error] = session.view.errors
    assert told in error
    assert session.conversation == Conversation()


def test_a_chat_that_cannot_be_saved_leaves_no_file(tmp_path, monkeypatch) -> None:
    session = chat(["a"])
    handle(session, "one")
    handle(session, f"/save {tmp_path / 'saved'}")
    before = (tmp_path / "saved").read_text()

    def full(source: str, target: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    handle(session, f"/save {tmp_path / 'saved'}")
    assert session.view.errors == [f"cannot write {tmp_path / 'saved'}: No space left on device"]
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    assert (tmp_path / "saved").read_text() == before


def test_params_are_set_shown_sent_and_reset() -> None:
    session = chat(["a"], ["b"])
    for entered in ("temperature 0.2", 'stop = ["a b", "c"]', "seed=4", "max_tokens 9"):
        handle(session, f"/params {entered}")
    handle(session, '/params logit_bias {"7": -1.5}')
    handle(session, "one")
    expected = {"temperature": 0.2, "stop": ["a b", "c"], "seed": 4, "max_tokens": 9,
                "logit_bias": {7: -1.5}}  # fmt: skip
    assert session.backend.asked[0][1] == expected
    handle(session, "/params temperature -")
    handle(session, "/params max_tokens 5")
    shown = session.view.notes[-1].split("\n")
    assert any(line.split() == ["temperature", "0.7", "(default)"] for line in shown)
    assert any(line.split() == ["max_tokens", "5"] for line in shown)
    handle(session, "two")
    assert "temperature" not in session.backend.asked[1][1]
    assert session.view.errors == []


def test_undo_retry_and_clear() -> None:
    session = chat(["a"], ["b"], ["c"])
    handle(session, "one")
    handle(session, "two")
    handle(session, "/retry")
    assert said(session) == ["one", "a", "two", "c"]
    handle(session, "/undo")
    assert said(session) == ["one", "a"]
    assert "taken back: two" in session.view.notes[-1]
    handle(session, "/system s")
    handle(session, "/clear")
    assert said(session) == [] and session.conversation.system == "s"
    handle(session, "/system -")
    assert session.conversation.system is None


def test_stats_and_help_name_everything() -> None:
    session = chat(["a"])
    handle(session, "one")
    handle(session, "/stats")
    assert "cached" in session.view.notes[0] and "stop" in session.view.notes[0]
    assert "scripted" in session.view.notes[1] and "value" in session.view.notes[1]
    handle(session, "/help")
    shown = "".join(session.view.notes[2:])
    assert all(f"/{name}" in shown for name in COMMANDS)
    with pytest.raises(EndOfChat):
        handle(session, "/exit")


def test_every_parameter_of_a_single_answer_can_be_set() -> None:
    assert {"temperature", "max_tokens", "stop", "logit_bias", "ignore_eos"} <= set(PARAMS)
    assert not {"n", "logprobs", "prompt_logprobs"} & set(PARAMS)


# --- Saving ---------------------------------------------------------------------------------------


def test_a_chat_survives_saving_and_loading(tmp_path) -> None:
    session = chat(["ä\u2028b"], ["c"])
    handle(session, "/system be brief")
    handle(session, "/params top_k 5")
    handle(session, '/params logit_bias {"7": 1}')
    handle(session, "one")
    before = session.conversation
    for _ in range(2):  # the second time it is there
        handle(session, f"/save {tmp_path}/chat.json")
    handle(session, f"/load {tmp_path}/chat.json")
    assert session.conversation == before and session.conversation is not before
    assert session.view.errors == []
    assert [path.name for path in tmp_path.iterdir()] == ["chat.json"]


def test_another_file_is_not_overwritten(tmp_path) -> None:
    (tmp_path / "notes").write_text("mine")
    session = chat()
    handle(session, f"/save {tmp_path}/notes")
    assert "exists and is not a saved chat" in session.view.errors[0]
    assert (tmp_path / "notes").read_text() == "mine"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"format": "else"}, "is not a saved chat"),
        ({"version": 4}, "version 4; this program reads versions 1 to 3"),
        ({"system": 3}, "is damaged: system"),
        ({"params": []}, "is damaged: system or params"),
        ({"params": {"top_p": 7}}, "top_p must be"),
        ({"messages": [{"role": "user", "content": "x"}]}, "must alternate"),
        ({"messages": [{"role": "assistant", "content": "x"}] * 2}, "must alternate"),
        ({"messages": "x"}, "must alternate"),
    ],
)
def test_a_damaged_file_is_refused_and_the_chat_kept(changes, told, tmp_path) -> None:
    session = chat(["a"])
    handle(session, "one")
    handle(session, f"/save {tmp_path}/chat.json")
    saved = json.loads((tmp_path / "chat.json").read_text())
    (tmp_path / "chat.json").write_text(json.dumps({**saved, **changes}))
    handle(session, f"/load {tmp_path}/chat.json")
    assert told in session.view.errors[0]
    assert said(session) == ["one", "a"]


# --- An engine here -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def local() -> LocalBackend:
    return LocalBackend(None, "embedded", num_gpu_blocks_override=200, block_size=8)


def ask(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def test_a_local_engine_reuses_the_turns_before(local) -> None:
    session = ChatSession(local, Record(), Conversation(params={"temperature": 0}))
    handle(session, "Reverse a string")
    handle(session, "Return the sum of a list")
    first, second = session.turns
    assert "text[::-1]" in session.view.answers[0] and "def sum" in session.view.answers[1]
    assert first.cached_tokens == 0 and first.finish_reason == "stop"
    assert second.cached_tokens >= first.prompt_tokens
    assert second.ttft > 0 and second.tokens_per_second > 0


def test_ctrl_c_stops_a_local_answer_between_two_steps(local) -> None:
    answer = local.answer(ask("Reverse a string"), {"ignore_eos": True})
    pieces = [next(answer)]
    before = signal.getsignal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)  # nothing happens here
    with pytest.raises(KeyboardInterrupt):
        pieces.extend(answer)
    assert len(pieces) < 20
    assert local.turn.finish_reason == "stopped" and local.turn.completion_tokens >= 1
    assert signal.getsignal(signal.SIGINT) is not before, "as it was before the answer"
    assert not local._engine.has_unfinished
    assert "text[::-1]" in "".join(local.answer(ask("Reverse a string"), {"temperature": 0}))


def test_a_conversation_that_is_too_long_is_told(local) -> None:
    with pytest.raises(MlxPagedError, match="prompt"):
        next(local.answer(ask("word " * 5000), {}))
    assert "".join(local.answer(ask("Reverse a string"), {"max_tokens": 3}))


def test_what_the_template_refuses_is_told(local, monkeypatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("roles must alternate")

    monkeypatch.setattr(local._engine.tokenizer._tokenizer, "apply_chat_template", refuse)
    with pytest.raises(MlxPagedError, match="template does not take this: roles must alternate"):
        next(local.answer(ask("x"), {}))


# --- A server -------------------------------------------------------------------------------------


def test_a_server_of_ours_answers_as_the_engine_does(local) -> None:
    expected = "".join(local.answer(ask("Reverse a string"), {"temperature": 0}))
    with running(ServerConfig(api_keys=("secret",))) as server:
        with pytest.raises(MlxPagedError, match=r"401: .*\(give --api-key\)"):
            RemoteBackend(server.url, None, None)
        backend = RemoteBackend(server.url + "/v1/", None, "secret")
        assert backend.model == "mlx-paged-demo"
        session = ChatSession(backend, Record(), Conversation(params={"temperature": 0}))
        handle(session, "Reverse a string")
        assert session.view.answers == [expected]
        handle(session, "Return the sum of a list")
        assert session.turns[1].cached_tokens > 0
        assert session.turns[1].prompt_tokens > session.turns[0].prompt_tokens
        handle(session, "/params seed 1e400")
        assert session.view.errors == [
            "seed must be None or an integer in [-2**63, 2**63) but got inf"
        ]
        answer = backend.answer(ask("Reverse a string"), {"ignore_eos": True})
        next(answer)
        answer.close()
        assert backend.turn.finish_reason == "stopped"
        server.wait_idle()
        backend.close()


def test_what_is_sent_to_a_server_and_what_comes_back() -> None:
    text = 'line\u2028separator "quoted" \n\n data: [DONE]'
    with StubServer(text) as server:
        backend = RemoteBackend(server.url, None, "k")
        assert "".join(backend.answer(ask("x"), {"logit_bias": {7: 1.0}, "top_k": 3})) == text
        assert server.requests[0] == {
            "logit_bias": {"7": 1.0},
            "top_k": 3,
            "model": "stub-model",
            "messages": ask("x"),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        assert server.keys == ["Bearer k"]
        turn = backend.turn
        assert (turn.prompt_tokens, turn.cached_tokens, turn.completion_tokens) == (7, 3, 9)
        server.break_next()
        with pytest.raises(MlxPagedError, match="ended the answer too early"):
            list(backend.answer(ask("x"), {}))


def test_a_server_that_is_not_there(capsys) -> None:
    with pytest.raises(InvalidParameterError, match="a URL like"):
        RemoteBackend("localhost:8000")
    assert status_of(app, ["chat", "--server", "http://127.0.0.1:1"]) == ExitCode.FAILED
    [line] = capsys.readouterr().err.splitlines()
    assert "cannot reach http://127.0.0.1:1" in line and "'mlx-paged serve' starts one" in line


# --- Pipes ----------------------------------------------------------------------------------------


def pipe(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))


def test_a_piped_chat_has_answers_on_stdout_and_all_else_on_stderr(monkeypatch, capsys) -> None:
    pipe(monkeypatch, "first\nsecond \\\nline\n/stats\n\n/exit\nnever\n")
    with StubServer("**plain**") as server:
        assert status_of(app, ["chat", "--server", server.url, "--seed", "3"]) == 0
        assert [r["messages"][-1]["content"] for r in server.requests] == ["first", "second \nline"]
        assert {r["seed"] for r in server.requests} == {3}
    captured = capsys.readouterr()
    assert captured.out == "**plain**\n**plain**\n"
    assert "tokens/s" in captured.err


def test_a_piped_chat_that_fails_goes_on_and_says_so_in_the_end(monkeypatch, capsys) -> None:
    pipe(monkeypatch, "first\n/nonsense\nsecond")
    with StubServer("fine") as server:
        server.fail_next(500, "oops")
        assert status_of(app, ["chat", "--server", server.url]) == ExitCode.FAILED
    captured = capsys.readouterr()
    assert captured.out.split() == ["fine"]
    assert "the server answers 500: oops" in captured.err and "/nonsense" in captured.err


def test_a_piped_chat_with_an_engine_here_and_a_loaded_chat(monkeypatch, capsys, tmp_path) -> None:
    pipe(monkeypatch, f"Reverse a string\n/save {tmp_path}/chat\n")
    arguments = ["chat", "--temperature", "0", "--max-tokens", "40", "--system-prompt", "Be brief"]
    assert status_of(app, arguments) == 0, capsys.readouterr().err
    assert "text[::-1]" in capsys.readouterr().out
    pipe(monkeypatch, f"/retry\n/save {tmp_path}/chat\n")
    assert status_of(app, ["chat", "--load", f"{tmp_path}/chat", "--seed", "1"]) == 0
    saved = json.loads((tmp_path / "chat").read_text())
    assert saved["params"] == {"temperature": 0.0, "max_tokens": 40, "seed": 1}
    assert saved["system"] == "Be brief" and len(saved["messages"]) == 2
