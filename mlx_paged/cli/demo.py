"""`mlx-paged demo`."""

from __future__ import annotations

from typing import Annotated

import typer

from mlx_paged.cli.options import AsyncScheduling, MaxTokens, Model


def demo(
    model: Model = None,
    max_tokens: MaxTokens = 160,
    compare: Annotated[
        bool, typer.Option(help="Do the same work with mlx-lm, and compare tokens and time.")
    ] = True,
    async_scheduling: AsyncScheduling = True,
) -> None:
    """Answer eight chats at once that share a long system prompt, and show what that saved.

    Examples:
      mlx-paged demo
      mlx-paged demo --model mlx-community/Qwen3-0.6B-4bit --max-tokens 64
      mlx-paged demo --no-compare

    Exit status 1 if a greedy token differs from mlx-lm's.
    """
    from mlx_paged.cli import showcase

    showcase.run(model, max_tokens or 160, compare, async_scheduling=async_scheduling)
