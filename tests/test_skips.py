"""The summary line of tests skipped for a missing program."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support import programs
from support.interpreters import python_path


def test_missing_programs_are_summed_up_in_one_line() -> None:
    reasons = [programs.needs(name, found=False).kwargs["reason"] for name in ("tmux", "Chromium")]
    line = programs.summary([*reasons, f"Skipped: {reasons[1]}", "only the CPU rounds"])
    assert line == (
        "Skipped tests: 2 without Chromium, 1 without tmux. To run them: scripts/install_apt.sh"
    )


def test_nothing_is_said_where_nothing_is_missing() -> None:
    assert programs.summary(["only the CPU rounds", "no nvcc"]) == ""


def test_the_line_is_printed_at_the_end_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "test_page.py").write_text(
        "from support.programs import needs\n"
        '@needs("Chromium", found=False)\n'
        "def test_page(): ...\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider"]
    tests = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": python_path(tests, tests.parent)}
    run = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    line = "Skipped tests: 1 without Chromium. To run them: scripts/install_apt.sh"
    assert line in run.stdout.splitlines(), run.stdout
