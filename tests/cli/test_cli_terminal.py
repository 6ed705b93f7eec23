"""Tests the command line in a pseudo-terminal."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.interpreters import python_path
from support.openai_stub import StubServer
from support.tmux import PROGRAM, Terminal, home, needs_tmux, terminal

pytestmark = needs_tmux


@pytest.fixture
def chat(tmp_path: Path) -> Iterator[Terminal]:
    """A chat with the embedded model, greedy."""
    command = [*PROGRAM, "chat", "--temperature", "0"]
    with terminal(*command, environment=home(tmp_path), width=100, height=30) as pane:
        pane.wait_for("Ctrl-D ends.")
        yield pane


@contextmanager
def stub_chat(answer: str, folder: Path) -> Iterator[Terminal]:
    """A chat with a server that always gives this answer. `folder`: for the user's files."""
    with StubServer(answer) as server:
        command = [*PROGRAM, "chat", "--server", server.url]
        with terminal(*command, environment=home(folder)) as pane:
            pane.wait_for("Ctrl-D ends.")
            yield pane


def test_an_answer_streams_and_statistics_show_the_reused_prefix(chat) -> None:
    chat.say("Reverse a string")
    chat.wait_for("return text[::-1]")
    chat.say("Return the sum of a list")
    chat.wait_for("return total")
    chat.say("/stats")
    screen = chat.wait_for("KV blocks")
    rows = re.findall(r"│ +(\d+) │ +(\d+) │ +(\d+) │ +[\d.]+ │ +(\d+) │ +[\d.]+ │ +(\w+) │", screen)
    assert [row[0] for row in rows] == ["1", "2"], screen
    assert rows[0][2] == "0"
    assert int(rows[1][2]) > 0, "the second turn reuses the first one's blocks"
    assert {row[4] for row in rows} == {"stop"}
    chat.press("C-d")
    chat.wait_for("status=0")


def test_control_c_stops_the_answer_and_not_the_program(chat) -> None:
    chat.say("/params ignore_eos true")
    chat.wait_for("ignore_eos   true")
    chat.say("Reverse a string")
    chat.wait_for("return text[::-1]")
    chat.press("C-c")
    chat.wait_for("(stopped)")
    chat.say("/params ignore_eos -")
    chat.say("Return the n-th Fibonacci number")
    chat.wait_for("def fib")
    chat.say("/stats")
    screen = chat.wait_for("KV blocks")
    assert "stopped" in screen.split("ended by")[1]
    # At the prompt it throws away what was typed, and nothing else.
    chat.type("nothing")
    chat.press("C-c")
    chat.say("/exit")
    chat.wait_for("status=0")


def test_a_message_of_several_lines(tmp_path) -> None:
    with stub_chat("An answer.", tmp_path) as pane:
        pane.type("Return the sum")
        pane.press("M-Enter")
        pane.type("of squares\\")
        pane.press("Enter")
        pane.say("in a list")
        pane.wait_for("An answer.")
        pane.say(f"/save {tmp_path}/chat.json")
        pane.wait_for("saved 1 turn")
    saved = json.loads((tmp_path / "chat.json").read_text())
    assert saved["messages"][0]["content"] == "Return the sum\nof squares\nin a list"


def test_a_saved_chat_goes_on_in_another_one(chat, tmp_path) -> None:
    file = tmp_path / "chat.json"
    chat.say("/system You write Python")
    chat.say("Reverse a string")
    chat.wait_for("return text[::-1]")
    chat.say(f"/save {file}")
    chat.wait_for("saved 1 turn")
    chat.say("/clear")
    chat.say("/system -")
    chat.wait_for("system message: (none)")
    chat.type("/lo")
    chat.press("Tab")
    chat.wait_for("> /load")
    chat.say(f" {file}")
    chat.wait_for("loaded 1 turn")
    chat.say("/system")
    chat.wait_for("system message: You write Python", count=2)
    chat.say("/retry")
    chat.wait_for("return text[::-1]", count=2)
    chat.press("C-d")
    chat.wait_for("status=0")


def test_what_was_typed_before_comes_back(tmp_path) -> None:
    with stub_chat("unasked", tmp_path) as pane:
        pane.say("/system something remembered")
        pane.wait_for("system message: something remembered")
        pane.press("C-d")
        pane.wait_for("status=0")
    with stub_chat("unasked", tmp_path) as pane:
        pane.press("Up")
        pane.wait_for("> /system something remembered")
    [history] = tmp_path.rglob("chat-history")
    assert history.stat().st_mode & 0o077 == 0, "nobody else reads it"


MARKDOWN = """# Title

Some *words* and a list:

1. one

   ```python
   x = 1
   ```

2. two

| a | b |
|---|---|
| 1 | 2 |

<think>kept</think> and \x1b]0;taken over\x07 ~~gone~~

```
{code}
```

The end.
"""


def test_markdown_is_drawn_once_and_cannot_steer_the_terminal(tmp_path) -> None:
    lines = [f"line {i} of many" for i in range(60)]  # more than the screen has
    text = MARKDOWN.replace("{code}", "\n".join(lines))
    with StubServer(text, delay=0.002) as server:
        command = [*PROGRAM, "chat", "--server", server.url]
        with terminal(*command, environment=home(tmp_path), height=20) as pane:
            pane.wait_for("Ctrl-D ends.")
            pane.say("hello")
            pane.wait_for("The end.")
            pane.wait_for("\n>", count=2)
            screen = pane.screen()
            pane.press("C-d")
            pane.wait_for("status=0")
    for once in ("Title", "1 x = 1", "2 two", "<think>kept</think>", *lines, "The end."):
        pattern = rf"(?<!\d){re.escape(once)}" if once[0].isdigit() else re.escape(once)
        if once == "1 x = 1":
            pattern = r"\n +x = 1"
        assert len(re.findall(pattern, screen)) == 1, f"{once}:\n{screen}"
    assert "**" not in screen and "```" not in screen and "# Title" not in screen
    assert "]0;taken over" in screen  # as text: the escape before it is gone


def test_errors_of_a_server_are_a_line_and_the_chat_goes_on(tmp_path) -> None:
    with StubServer("fine", delay=0.0) as server:
        server.fail_next(429, "queue is full")
        command = [*PROGRAM, "chat", "--server", server.url, "--api-key", "k"]
        with terminal(*command, environment=home(tmp_path), width=120) as pane:
            pane.wait_for("Ctrl-D ends.")
            pane.say("hello")
            pane.wait_for("the server answers 429: queue is full")
            pane.say("/retry")
            pane.wait_for("fine")
            server.break_next()
            pane.say("again")
            pane.wait_for("the server ended the answer too early")
            pane.press("C-d")
            pane.wait_for("status=0")


def test_control_c_while_a_server_thinks(tmp_path) -> None:
    with StubServer("never", delay=0.0) as server:
        server.hang_next()
        command = [*PROGRAM, "chat", "--server", server.url]
        with terminal(*command, environment=home(tmp_path)) as pane:
            pane.wait_for("Ctrl-D ends.")
            pane.say("hello")
            server.wait_until_hanging()
            pane.press("C-c")
            pane.wait_for("(stopped)")
            pane.say("hello")
            pane.wait_for("\nnever")


def test_the_shell_completes_verbs_and_options(tmp_path) -> None:
    """After --install-completion, in the next shell."""
    with terminal("bash", "-i", environment=home(tmp_path), width=120) as pane:
        pane.say("mlx-paged --install-completion && exec bash -i")
        pane.wait_for("bash completion installed")
        pane.say("echo re''ady")
        pane.wait_for("\nready")
        pane.type("mlx-paged gen")
        pane.press("Tab")
        pane.wait_for("mlx-paged generate")
        pane.type("--over")
        pane.press("Tab")
        pane.wait_for("mlx-paged generate --overwrite")


def test_without_its_extra_a_chat_says_what_to_install(tmp_path) -> None:
    stand_in = tmp_path / "prompt_toolkit"
    stand_in.mkdir()
    error = "raise ModuleNotFoundError('no', name='prompt_toolkit')\n"
    (stand_in / "__init__.py").write_text(error)
    environment = {**home(tmp_path), "PYTHONPATH": python_path(tmp_path)}
    with terminal(*PROGRAM, "chat", environment=environment, width=120) as pane:
        screen = pane.wait_for("status=1")
    assert "not installed (prompt_toolkit): pip install 'mlx-paged[chat]'" in screen


def test_a_batch_shows_a_bar_only_at_a_terminal(tmp_path) -> None:
    lines = [
        {
            "custom_id": f"r{i}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": f"def f{i}(", "max_tokens": 4},
        }
        for i in range(5)
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = [*PROGRAM, "generate", "-i", str(tmp_path / "in.jsonl")]
    with terminal(*command, "-o", f"{tmp_path}/out", environment=home(tmp_path)) as pane:
        screen = pane.wait_for("status=0")
    assert "5/5" in screen and "━" in screen
    assert len((tmp_path / "out").read_text().splitlines()) == 5
