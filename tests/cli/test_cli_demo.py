"""`mlx-paged demo`: what it shows while it loads, and that it cuts no word in a narrow terminal."""

from __future__ import annotations

import contextlib
import gc
import io
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from mlx_paged.cli import demo, progress
from mlx_paged.cli.entry import status_of
from mlx_paged.cli.main import app
from mlx_paged.cli.progress import loading_bar
from mlx_paged.core import FinishReason
from mlx_paged.demo.prompts import CHATS

WORDS = {word for chat in CHATS[: demo.NUM_CHATS] for word in chat.split()}


def output(num_tokens: int) -> Any:
    completion = SimpleNamespace(
        token_ids=[1] * num_tokens, text="x", finish_reason=FinishReason.LENGTH
    )
    metrics = SimpleNamespace(time_to_first_token=12.34, arrival_time=0.0, finished_time=0.1)
    return SimpleNamespace(
        outputs=[completion],
        metrics=metrics,
        prompt_token_ids=[1] * 1234,
        num_cached_tokens=1199,
    )


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_the_table_cuts_no_words(width: int) -> None:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    stats = SimpleNamespace(max_used_blocks=100, max_shared_blocks=25, pool_copies=0)
    engine = SimpleNamespace(config=SimpleNamespace(block_size=32))
    llm: Any = SimpleNamespace(stats=lambda: stats, engine=engine)
    outputs = [output(160) for _ in range(demo.NUM_CHATS)]
    demo._print_table(console, CHATS[: demo.NUM_CHATS], outputs, 2.5, 200, llm)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, shown.splitlines())) <= width
    assert "…" not in shown
    assert set(shown.split()) >= WORDS | {"1234", "1199", "12.34", "160", "1600.0", "length"}
    heads = {"prompt", "from", "cache", "TTFT", "tokens", "ended", "by"}
    assert set(shown.split()) >= heads | {"recomputed", "whole-pool", "copies", "25"}


@pytest.mark.parametrize("width", [12, 23, 46])
def test_a_bar_names_its_chat_in_whole_words(width: int) -> None:
    for chat in CHATS[: demo.NUM_CHATS]:
        told = demo._shortened(chat, width)
        assert len(told) == width
        assert set(told.split()) <= WORDS | {"..."}


def test_a_bar_shows_what_is_being_loaded_and_goes() -> None:
    file = io.StringIO()
    console = Console(file=file, width=60, force_terminal=True)
    with loading_bar(2, console=console) as begin:
        begin("libraries")
        assert not gc.isenabled()
        begin("weights")
    assert gc.isenabled()
    shown = file.getvalue()
    assert "loading weights" in shown
    assert shown.endswith("\x1b[1A\x1b[2K"), "its line is erased"


def test_the_steps_of_a_stage_are_counted() -> None:
    console = Console(file=io.StringIO(), width=60, force_terminal=True)
    with loading_bar(2, console=console) as begin:
        begin("model")
        begin("kernels", 1, 3)  # drawn at the end at the latest
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "loading kernels 2 of 3" in shown


def test_without_a_terminal_nothing_is_drawn() -> None:
    console = Console(file=io.StringIO(), width=60)
    with loading_bar(1, console=console) as begin:
        begin("libraries")
    assert console.file.getvalue() == ""  # type: ignore[attr-defined]


@pytest.mark.parametrize("verb", [["demo", "--no-compare"], ["generate", "x"]])
def test_the_verbs_show_what_they_load(verb: list[str], monkeypatch) -> None:
    begun: list[str] = []

    @contextlib.contextmanager
    def recorded(num_stages: int, **_: Any) -> Iterator[Callable[[str], None]]:
        yield begun.append
        assert len(begun) == num_stages

    monkeypatch.setattr(progress, "loading_bar", recorded)
    monkeypatch.setattr(demo, "loading_bar", recorded)
    assert status_of(app, [*verb, "--max-tokens", "2"]) == 0
    assert begun[0] == "libraries" and len(begun) >= 2
