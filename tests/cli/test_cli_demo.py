"""`mlx-paged demo` in a narrow terminal: no word is cut."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from mlx_paged.cli import demo
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
