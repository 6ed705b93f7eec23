"""scripts/install_progress.py: the progress display of `make` while pip compiles."""

from __future__ import annotations

import importlib.util
import io
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "scripts/install_progress.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install_progress", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Format of pip's and ninja's output.
OUTPUT = [
    "Using pip 25.2 from somewhere\n",
    "Obtaining file:///somewhere\n",
    "  Installing build dependencies: started\n",
    "  Running command pip subprocess to install build dependencies\n",
    "  Collecting nanobind\n",
    "  *** Configuring CMake...\n",
    *(f"  [{i}/87] Building CXX object csrc/{i}.o\n" for i in range(1, 88)),
    "Installing collected packages: mlx-paged\n",
]


def shown(script: ModuleType, *, at_terminal: bool) -> str:
    stream = io.StringIO()
    display = script.Display(stream, at_terminal=at_terminal)
    for line in OUTPUT:
        display.take(line)
    display.end()
    return stream.getvalue()


def test_without_a_terminal_there_are_few_lines(script) -> None:
    lines = shown(script, at_terminal=False).splitlines()
    compiled = [line for line in lines if line.startswith("compiling")]
    assert compiled[0] == "compiling 1/87" and compiled[-1] == "compiling 87/87"
    assert len(compiled) == 11
    others = [line for line in lines if line not in compiled]
    assert others[0] == "fetching packages" and others[-2:] == [
        "configuring",
        "installing packages",
    ]
    assert "\x1b" not in "".join(lines)


def test_at_a_terminal_one_line_is_redrawn(script, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    text = shown(script, at_terminal=True)
    assert "\n" not in text and text.endswith("\r\x1b[K")
    drawn = text.split("\r\x1b[K")
    assert max(map(len, drawn)) < 60
    assert any(line.startswith(f"compiling [{'#' * 12}{'-' * 12}] 44/87  0:") for line in drawn)


def run(code: str, beside: str | None = None) -> subprocess.CompletedProcess[str]:
    second = ["--beside", sys.executable, "-c", beside] if beside is not None else []
    return subprocess.run(
        [sys.executable, SCRIPT, sys.executable, "-c", code, *second],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )


def test_a_command_that_succeeds_is_not_quoted() -> None:
    done = run("print('noise'); print('[1/2] Building a'); print('[2/2] Building b')")
    assert done.returncode == 0 and done.stdout == ""
    assert done.stderr == "compiling 1/2\ncompiling 2/2\n"


def test_a_command_that_fails_shows_its_end_and_its_status() -> None:
    done = run("print('noise\\n' * 500 + 'error: no compiler'); raise SystemExit(7)")
    assert done.returncode == 7
    assert done.stderr.endswith("error: no compiler\n") and done.stderr.count("noise") < 100


def test_a_command_beside_another_one_runs_at_the_same_time(tmp_path: Path) -> None:
    """Each waits for a file of the other."""
    meet = (
        "import pathlib, time\n"
        f"mine, other = (pathlib.Path({str(tmp_path)!r}) / name for name in {{}})\n"
        "mine.touch()\n"
        "while not other.exists(): time.sleep(0.01)\n"
        "print('noise')\n"
    )
    done = run(meet.format(("a", "b")), meet.format(("b", "a")))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "installing packages\n")


def test_a_command_beside_another_one_shows_its_failure() -> None:
    done = run("print('[1/1] Building a')", "print('no such package'); raise SystemExit(3)")
    assert done.returncode == 3
    assert done.stderr == "compiling 1/1\ninstalling packages\nno such package\n"


def test_a_command_that_fails_stops_the_one_beside_it() -> None:
    endless = "import time\nwhile True: time.sleep(1)"
    done = run("raise SystemExit(7)", endless)
    assert done.returncode == 7 and "installing" not in done.stderr
