"""Runs the programs of `examples/` as their docstrings say."""

from __future__ import annotations

import ast
import contextlib
import io
import os
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from unittest import mock

from mlx_paged.cli.entry import status_of
from mlx_paged.cli.main import app
from support.waiting import TIMEOUT

EXAMPLES = Path(__file__).parents[2] / "examples"


def commands(name: str) -> list[list[str]]:
    """The commands in the docstring of an example: lines that begin with "$ ".

    Optional arguments, which are in brackets, are left out.
    """
    text = ast.get_docstring(ast.parse((EXAMPLES / name).read_text()))
    assert text, f"{name} has no docstring"
    lines = [line.removeprefix("$ ") for line in text.splitlines() if line.startswith("$ ")]
    return [shlex.split(line.partition(" [")[0], comments=True) for line in lines]


def command(name: str, program: str) -> list[str]:
    """The first command of an example that runs a program, without the program."""
    return next(found[1:] for found in commands(name) if found[0] == program)


def serve_options(name: str) -> list[str]:
    """The options of the `mlx-paged serve` that an example asks for."""
    verb, *options = command(name, "mlx-paged")
    assert verb == "serve"
    return options


def run(name: str, *arguments: str | Path, folder: Path, **environment: str) -> str:
    """Runs an example in a folder that has `examples/`, as a checkout has.

    Returns:
        What it wrote to stdout.
    """
    return _run([sys.executable, *command(name, "python"), *arguments], folder, environment)


def run_here(name: str, *arguments: str | Path, folder: Path, **environment: str) -> str:
    """Like `run`, in this process: starting Python and importing packages takes longer than most
    examples do."""
    _link_examples(folder)
    out = io.StringIO()
    argv = [*command(name, "python"), *map(str, arguments)]
    with (
        mock.patch.dict(os.environ, environment),
        mock.patch.object(sys, "argv", argv),
        contextlib.chdir(folder),
        contextlib.redirect_stdout(out),
    ):
        runpy.run_path(argv[0], run_name="__main__")
    return out.getvalue()


def run_cli(arguments: list[str], folder: Path) -> str:
    """Runs `mlx-paged` in such a folder, in this process, and returns what it wrote to stdout."""
    _link_examples(folder)
    out = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(out):
        status = status_of(app, arguments)
    assert status == 0, f"{arguments}: {status}\n{out.getvalue()}"
    return out.getvalue()


def _link_examples(folder: Path) -> None:
    link = folder / "examples"
    if not link.exists():
        link.symlink_to(EXAMPLES)


def _run(command: list[str | Path], folder: Path, environment: dict[str, str]) -> str:
    _link_examples(folder)
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout
