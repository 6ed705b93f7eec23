"""`mlx-paged generate`: options reach the engine."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

import mlx_paged.cli.generate as verb
from mlx_paged.cli.main import app
from mlx_paged.engine.llm import LLM


@pytest.mark.parametrize(
    ("flags", "expected"),
    [([], True), (["--async-scheduling"], True), (["--no-async-scheduling"], False)],
)
def test_async_scheduling_can_be_switched_off(flags, expected, monkeypatch) -> None:
    made: list[LLM] = []

    def make(*args: Any, **options: Any) -> LLM:
        made.append(LLM(*args, **options, num_gpu_blocks_override=64))
        return made[-1]

    monkeypatch.setattr(verb, "LLM", make)
    prompt = "def add(a, b):"
    arguments = ["generate", "-p", prompt, "--max-tokens", "8", "--ignore-chat-template", *flags]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    [llm] = made
    assert llm.engine.config.async_scheduling is expected
    assert result.output.strip()
