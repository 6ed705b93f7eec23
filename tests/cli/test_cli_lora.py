"""Adapters on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.adapters import fused, greedy, random_layers, write_mlx
from support.models import embedded, embedded_twin

from mlx_paged.cli.entry import status_of
from mlx_paged.cli.main import app
from mlx_paged.cli.options import spread_values

PROMPT = "def add(a, b):\n"


def test_generate_with_an_adapter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_mlx(tmp_path / "x", random_layers(embedded().model, 1, rank=20), scale=1.0)
    options = ["--ignore-chat-template", "--max-tokens", "4", "--dtype", "float32"]
    assert status_of(app, ["generate", PROMPT, *options, "--adapter-path", str(path)]) == 0
    tokenizer = embedded().tokenizer
    tokens = greedy(fused(embedded_twin().model, path), tokenizer.encode(PROMPT), 4)
    assert capsys.readouterr().out.rstrip("\n") == tokenizer.decode(tokens).rstrip("\n")


def test_a_wrong_adapter_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "missing"
    assert status_of(app, ["generate", PROMPT, "--adapter-path", str(missing)]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error == f"mlx-paged: cannot load adapter {str(missing)!r}: there is no such directory"


def test_modules_need_the_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(app, ["serve", "--lora-modules", "a=x", "b=y"]) == 2
    assert "'--lora-modules': must be given with --enable-lora" in capsys.readouterr().err
    assert status_of(app, ["serve", "--enable-lora", "--lora-modules", "a"]) == 2
    assert "'--lora-modules': must be name=path" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "spread"),
    [
        ("serve --lora-modules a=x b=y M", "serve --lora-modules a=x --lora-modules b=y M"),
        ("--lora-modules a=x --port 1 b=y", "--lora-modules a=x --port 1 b=y"),
        ('--lora-modules {"n":1} {"n":2}', '--lora-modules {"n":1} --lora-modules {"n":2}'),
        ("--lora-modules a=x --lora-modules b=y", "--lora-modules a=x --lora-modules b=y"),
        ("serve M", "serve M"),
    ],
)
def test_several_values_after_one_flag(given: str, spread: str) -> None:
    assert spread_values(given.split()) == spread.split()
