"""Files in a chat without a terminal, and how the terminal completes their paths."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from support.media_files import png, saved
from support.openai_stub import StubServer
from support.scripted_chat import Record, Script
from support.server_helpers import running

from mlx_paged.cli.chat.conversation import Conversation
from mlx_paged.cli.chat.local import LocalBackend
from mlx_paged.cli.chat.remote import RemoteBackend
from mlx_paged.cli.chat.session import ChatSession, handle
from mlx_paged.cli.chat.terminal import _Completer
from mlx_paged.demo import vision_model_path
from mlx_paged.demo.pictures import SAMPLES, draw
from mlx_paged.errors import MlxPagedError
from mlx_paged.parsing.definitions import Tool
from mlx_paged.server.config import ServerConfig

CIRCLES = saved(draw(SAMPLES[0].shapes, SAMPLES[0].background))


def chat(*answers: list[Any]) -> ChatSession:
    return ChatSession(Script(*answers), Record(), Conversation())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working and the home directory."""
    for name in ("a.png", "b.png", "my cat.png", "it's.png"):
        (tmp_path / name).write_bytes(name.encode())
    (tmp_path / "broken.png").write_bytes(png()[:60])
    (tmp_path / "circles.png").write_bytes(CIRCLES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def names(content: Any) -> list[str]:
    return [part.get("name") or part["text"] for part in content]


# --- Commands -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entered", "expected"),
    [
        ("a.png", ["a.png"]),
        ("  ~/a.png ", ["a.png"]),
        ("my cat.png", ["my cat.png"]),
        (r"my\ cat.png a.png", ["my cat.png", "a.png"]),
        ("'my cat.png' \"it's.png\"", ["my cat.png", "it's.png"]),
        ("it's.png", ["it's.png"]),
    ],
)
def test_paths_are_read_as_a_shell_does_or_as_one(folder, entered, expected) -> None:
    session = chat(["ok"])
    handle(session, f"/image {entered}")
    assert session.view.errors == []
    handle(session, "What?")
    [asked] = session.backend.asked[0][0]
    assert names(asked["content"]) == [*expected, "What?"]
    data = base64.b64encode(expected[0].encode()).decode()
    assert asked["content"][0]["image_url"] == {"url": f"data:image/png;base64,{data}"}


@pytest.mark.parametrize(
    ("entered", "told"),
    [
        ("/image", "write /image PATH"),
        ("/image none.png", "cannot read none.png: No such file"),
        ("/image a.png none.png", "cannot read none.png: No such file"),
        ("/image 'a.png", "cannot read 'a.png: No such file"),
        ("/video .", "cannot read .: not a regular file"),
        ("/audio /dev/zero", "cannot read /dev/zero: not a regular file"),
        ("/image ~nobody-of-this-name/x", "cannot read ~nobody-of-this-name/x: No such file"),
        ("/media 1", "write /media, /media - or /media -NUMBER, not /media 1"),
        ("/media -1", "write /media, /media - or /media -NUMBER"),
    ],
)
def test_what_cannot_be_attached_is_said(folder, entered, told) -> None:
    session = chat()
    handle(session, entered)
    [error] = session.view.errors
    assert told in error
    assert session.attached == []


def test_attached_files_are_listed_dropped_and_sent_once(folder) -> None:
    (folder / "clip.webm").write_bytes(b"v" * 200_000)
    (folder / "talk.mp3").write_bytes(b"a" * 12_300)
    session = chat(["one"], ["two"])
    for command in ("image a.png b.png", "video clip.webm", "audio talk.mp3", "media"):
        handle(session, f"/{command}")
    listed = [line.split() for line in session.view.notes[-1].strip().splitlines()]
    assert listed == [
        ["1", "image", "a.png", "5", "bytes"],
        ["2", "image", "b.png", "5", "bytes"],
        ["3", "video", "clip.webm", "195.3", "KiB"],
        ["4", "sound", "talk.mp3", "12.0", "KiB"],
    ]
    handle(session, "/media -2")
    handle(session, "What are these?")
    content = session.backend.asked[0][0][0]["content"]
    assert names(content) == ["a.png", "clip.webm", "talk.mp3", "What are these?"]
    assert content[1]["video_url"]["url"].startswith("data:video/webm;base64,dnZ2")
    assert content[2]["input_audio"]["format"] == "mp3"
    handle(session, "And now?")
    assert session.backend.asked[1][0][2]["content"] == "And now?"
    handle(session, "/image b.png")
    handle(session, "/media -")
    assert "no files" in session.view.notes[-1] and session.view.errors == []


def test_a_model_that_takes_none_says_so_at_once(folder) -> None:
    session = chat()
    session.backend.wrong = "it reads text only"
    handle(session, "/image a.png")
    assert session.view.errors == ["it reads text only"] and session.attached == []


def test_retry_undo_clear_and_files(folder) -> None:
    session = chat([MlxPagedError("busy")], ["one"], ["two"])
    handle(session, "/image a.png")
    handle(session, "What?")
    assert session.view.errors == ["busy"]
    handle(session, "/retry")
    handle(session, "/retry")
    asked = [messages for messages, _ in session.backend.asked]
    assert asked[0] == asked[1] == asked[2] and names(asked[0][0]["content"])[0] == "a.png"
    handle(session, "/undo")
    assert session.view.notes[-1].split("\n")[:2] == ["taken back: What?", "(a.png)"]
    handle(session, "/image a.png")
    handle(session, "/clear")
    assert session.attached == []


def test_errors_name_the_file_and_not_its_place(folder) -> None:
    here = MlxPagedError("messages[0].content[1].image_url: not a readable image")
    there = MlxPagedError("the server answers 400: messages[0].content[0].image_url: too large")
    other = MlxPagedError("messages[7].content[0].image_url: it is not ours")
    session = chat([here], [there], [other])
    handle(session, "/image a.png b.png")
    handle(session, "What?")
    handle(session, "/retry")
    handle(session, "/retry")
    assert session.view.errors == [
        "b.png: not a readable image",
        "the server answers 400: a.png: too large",
        "messages[7].content[0].image_url: it is not ours",
    ]


def test_a_saved_chat_has_its_files(folder) -> None:
    session = chat(["one"])
    handle(session, "/image a.png")
    handle(session, "What?")
    handle(session, "/save chat.json")
    (folder / "a.png").unlink()
    before = session.conversation
    handle(session, "/load chat.json")
    assert session.conversation == before and session.view.errors == []
    saved = json.loads((folder / "chat.json").read_text())
    whole = json.dumps(saved)
    for change in (
        ("data:image/png;base64,", "http://127.0.0.1/"),
        ('"image_url", ', '"image_pil", '),
        ('"name": "a.png"', '"name": 3'),
        ('"text": "What?"', '"text": null'),
        ('"role": "user"', '"role": "assistant"'),
    ):
        assert change[0] in whole
        (folder / "chat.json").write_text(whole.replace(*change))
        handle(session, "/load chat.json")
        assert "must alternate" in session.view.errors[-1], change
    assert session.conversation == before


def test_the_terminal_completes_paths_of_files(folder) -> None:
    def completed(text: str) -> list[str]:
        found = _Completer().get_completions(Document(text), CompleteEvent())
        return sorted(text + completion.text for completion in found)

    assert completed("/im") == ["/imimage"]
    assert completed("/image b") == ["/image b.png", "/image broken.png"]
    assert completed("/image my c") == ["/image my cat.png"]
    assert completed("/image a.png 'my c") == ["/image a.png 'my cat.png"]
    assert completed("/image a.png ci") == ["/image a.png circles.png"]
    assert completed("/video nothing") == []


# --- Who answers ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def local() -> Iterator[LocalBackend]:
    options: dict[str, Any] = {"num_gpu_blocks_override": 256, "max_model_len": 1024}
    backend = LocalBackend(str(vision_model_path()), "vision", **options)
    yield backend
    backend.close()


def ask_about_circles(backend: Any) -> None:
    session = ChatSession(backend, Record(), Conversation(params={"temperature": 0}))
    handle(session, "/image circles.png")
    handle(session, SAMPLES[0].question)
    handle(session, "How many circles are there?")
    assert session.view.errors == []
    assert session.view.answers == ["Three red circles.", "There are three circles."]
    _, second = session.turns
    assert second.cached_tokens is not None and second.cached_tokens >= 64
    handle(session, "/clear")
    handle(session, "/video circles.png")
    handle(session, "/image broken.png")
    handle(session, "What?")
    takes_none, broken = session.view.errors
    assert "takes no videos, only images" in takes_none
    assert broken.endswith("broken.png: its picture is broken: image file is truncated")


def test_an_engine_here_sees_the_picture(folder, local) -> None:
    ask_about_circles(local)
    local.tools = (Tool("strange__tool", "It does little.", {"type": "object"}),)
    session = ChatSession(local, Record(), Conversation(params={"max_tokens": 2}))
    handle(session, "/image circles.png")
    handle(session, "What?")
    assert session.view.errors == [] and len(session.turns) == 1
    given = local._prompt(session.conversation.asking("And?"))
    prompt = local._engine.tokenizer.decode(local._engine.intake.encode(given, "prompt").token_ids)
    assert "strange__tool" in prompt and prompt.count("<image>") == 64
    local.tools = ()


def test_a_server_sees_the_picture(folder) -> None:
    options = {"model": str(vision_model_path()), "max_model_len": 1024}
    with running(ServerConfig(served_model_names=("vision",)), **options) as server:
        backend = RemoteBackend(server.url)
        ask_about_circles(backend)
        backend.close()


def test_what_a_server_gets(folder) -> None:
    with StubServer("fine") as server:
        backend = RemoteBackend(server.url)
        session = ChatSession(backend, Record(), Conversation())
        handle(session, "/image a.png")
        handle(session, "What?")
        [message] = server.requests[0]["messages"]
        data = base64.b64encode(b"a.png").decode()
        assert message["content"] == [
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
            {"type": "text", "text": "What?"},
        ]
        backend.close()


def test_a_chat_with_a_server_does_not_load_mlx() -> None:
    code = "import sys, mlx_paged.cli.chat.session; sys.exit('mlx.core' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
