"""Ctrl-C from the program's first line of ours to its last: status 130, and never a traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.interpreters import python_path

ROOT = Path(__file__).resolve().parents[2]
# Interrupts the program where a module is first imported.
INTERRUPT = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["PLACE"]:
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
"""
# The console script.
SCRIPT = """
from mlx_paged.cli.main import main
main()
"""
# The same when the verb has ended.
ENDING = """
import atexit, signal, sys, threading
place = sys.argv.pop()
from mlx_paged.cli.main import main

class Last:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

if place == "atexit":
    atexit.register(signal.raise_signal, signal.SIGINT)
elif place == "threads":
    thread = threading.Thread(target=lambda: (
        threading.main_thread().join(), signal.raise_signal(signal.SIGINT)))
    thread.start()
else:
    last = Last()
main()
"""
# Twice, while the first one is being told.
TWICE = """
import signal, sys
from mlx_paged.cli import entry
from mlx_paged.cli.main import app, main

print_line = entry.print_line
def told(message):
    print_line(message)
    signal.raise_signal(signal.SIGINT)
entry.print_line = told

@app.command()
def interrupted():
    signal.raise_signal(signal.SIGINT)

sys.argv = ["mlx-paged", "interrupted"]
main()
"""


def run(tmp_path: Path, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    program = tmp_path / "mlx-paged"
    program.write_text(script)
    return execute(str(program), *arguments)


def execute(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], check=False, capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize(
    "place", ["mlx_paged.blas", "mlx_paged.cli", "typer", "mlx_paged.cli.serve", "mlx_paged.demo"]
)
@pytest.mark.parametrize("how", ["script", "module"])
def test_while_the_program_starts(how: str, place: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PLACE", place)
    if how == "script":
        done = run(tmp_path, INTERRUPT + SCRIPT, "--help")
    else:
        (tmp_path / "sitecustomize.py").write_text(INTERRUPT)
        monkeypatch.setenv("PYTHONPATH", python_path(tmp_path, ROOT))
        done = execute("-m", "mlx_paged", "--help")
    assert done.returncode == 130, done.stderr
    assert done.stderr == "mlx-paged: interrupted\n" and done.stdout == ""


@pytest.mark.parametrize("place", ["atexit", "threads", "interpreter"])
def test_while_the_program_ends(place: str, tmp_path: Path) -> None:
    done = run(tmp_path, ENDING, "--version", place)
    # (At the very end the interpreter has no handlers left, and the signal itself ends it.)
    assert done.returncode in ((130, -2, 0) if place == "interpreter" else (130,)), done.stderr
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr


def test_a_second_one_is_quiet_too(tmp_path: Path) -> None:
    done = run(tmp_path, TWICE)
    assert done.returncode == 130
    assert set(done.stderr.splitlines()) == {"mlx-paged: interrupted"}


def test_a_program_that_imports_the_package_keeps_its_handler(tmp_path: Path) -> None:
    script = (
        "import signal, mlx_paged\n"
        "assert signal.getsignal(signal.SIGINT) is signal.default_int_handler\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], check=False, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
