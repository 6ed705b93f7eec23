"""How an answer is drawn while it comes."""

from __future__ import annotations

import io
import re
import threading

import pytest
from rich.console import Console, RenderableType
from support.waiting import TIMEOUT

from mlx_paged.cli.chat.render import (
    LiveAnswer,
    TerminalView,
    finished_part,
    printable,
    rendered,
)
from mlx_paged.cli.options import Markup

MARKDOWN = """# Title

A paragraph with *words*
in two lines.

1. one

   ```python
   x = 1

   y = 2
   ```

2. two
   continued

> quoted

| a | b |
|---|---|
| 1 | 2 |

    indented code

```
fence

- no list
```

<think>
kept
</think>

Setext
======

The end.
"""
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def shown(text: str, markup: Markup) -> str:
    console = Console(file=io.StringIO(), width=60)
    console.print(rendered(text, markup))
    return console.file.getvalue()  # type: ignore[attr-defined]


def drawn(text: str, markup: Markup, *, step: int = 3, terminal: bool = False) -> str:
    console = Console(file=io.StringIO(), width=60, height=8, force_terminal=terminal)
    pieces = (text[i : i + step] for i in range(0, len(text), step))
    TerminalView(console, markup).answer(pieces)
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("end", range(0, len(MARKDOWN), 7))
def test_a_finished_part_is_drawn_the_same_whatever_follows(end) -> None:
    """Drawing the parts one by one is drawing the whole."""
    parts, rest = [], MARKDOWN[:end]
    for piece in (MARKDOWN[end:], ""):
        length = finished_part(rest, "markdown")
        parts.append(rest[:length])
        rest = rest[length:] + piece
    parts.append(rest)
    assert "".join(parts) == MARKDOWN
    words = [line.strip() for p in parts if p.strip() for line in shown(p, "markdown").split("\n")]
    expected = [line.strip() for line in shown(MARKDOWN, "markdown").split("\n")]
    assert [w for w in words if w] == [w for w in expected if w]


def test_what_is_finished() -> None:
    assert finished_part("one\n\ntwo", "markdown") == 5
    assert finished_part("one\n\n", "markdown") == 0, "a line may still make it a heading"
    assert finished_part("- a\n\n- b\n\n", "markdown") == 0, "the list may go on"
    assert finished_part("```\ncode\n\nmore", "markdown") == 0
    assert finished_part("one\ntwo", "plain") == 4
    assert finished_part("one\ntwo\n", "code") == 0


def test_html_is_text_and_links_are_shown() -> None:
    assert "<think> kept </think>" in shown("<think>\nkept\n</think>", "markdown")
    assert "https://example.org" in shown("[here](https://example.org)", "markdown")


@pytest.mark.parametrize("markup", ["markdown", "code", "plain"])
def test_nothing_that_steers_a_terminal_is_drawn(markup) -> None:
    evil = "a\x1b]0;title\x07b\x1b[2Jc\x9b31md\rE\x08f\x7f\tg\n"
    assert printable(evil) == "a]0;titleb[2Jc31mdEf\tg\n"
    assert not set(drawn(evil, markup)) & set("\x1b\x07\x9b\r\x08\x7f")
    colored = ESCAPES.sub("", drawn(evil, markup, terminal=True))
    assert not set(colored) & set("\x1b\x07\x9b\x08\x7f")


@pytest.mark.parametrize("markup", ["markdown", "code", "plain"])
def test_a_long_answer_is_drawn_no_taller_than_the_screen_and_once_in_the_end(markup) -> None:
    text = "".join(f"line {i}\n" for i in range(50))
    console = Console(file=io.StringIO(), width=60, height=8, force_terminal=True)
    answer = LiveAnswer(console, markup)
    for i in range(len(text)):
        answer._text = text[:i]
        height = len(console.render_lines(answer._unfinished(), pad=False))
        assert height <= 8
    lines = [line.rstrip() for line in drawn(text, markup).split("\n")]
    if markup != "markdown":  # where it is one paragraph
        assert [line for line in lines if line] == text.split("\n")[:-1]


def test_nothing_is_redrawn_while_a_finished_part_is_printed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=40, height=10)
    answer = LiveAnswer(console, "plain")
    refresh, printing, redrawn = answer._live.refresh, threading.current_thread(), threading.Event()
    found: list[bool] = []

    def recorded() -> None:
        if threading.current_thread() is not printing:
            redrawn.set()
        refresh()

    def slow(text: str, markup: Markup) -> RenderableType:
        if threading.current_thread() is printing:
            redrawn.clear()
            found.append(redrawn.wait(0.3))
        return rendered(text, markup)

    monkeypatch.setattr(answer._live, "refresh", recorded)
    monkeypatch.setattr("mlx_paged.cli.chat.render.rendered", slow)
    with answer:
        answer.feed("one\ntwo")
        assert redrawn.wait(TIMEOUT)
        answer._looked = 0.0
        answer.feed("\nthree")
        count = len(found)
    assert count and not any(found[:count])
