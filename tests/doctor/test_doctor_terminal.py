"""`mlx-paged doctor` as a person sees it, in a real terminal."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest
from support.interpreters import python_path, write_site
from support.tmux import PROGRAM, home, needs_tmux, terminal

ROOT = Path(__file__).resolve().parents[2]

pytestmark = needs_tmux


@pytest.mark.one_in(3)
@pytest.mark.parametrize("width", [80, 120])
def test_what_a_healthy_installation_shows(tmp_path: Path, width: int) -> None:
    with terminal(*PROGRAM, "doctor", environment=home(tmp_path), width=width, height=50) as pane:
        screen = pane.wait_for("status=")
        colors = pane.screen(colors=True)
    assert "status=0" in screen, screen
    for title in ("Machine", "Software", "Checks", "What fits"):
        assert title in screen.splitlines() or f"{title} in" in screen, screen
    assert "self-test on the CPU" in screen and "embedded model" in screen
    assert max(map(len, screen.splitlines())) <= width
    assert "looking at" not in screen, "the progress line is gone at the end"
    assert "\x1b[32m" in colors, "green"


def test_a_wrong_kernel_is_shown_with_its_remedy(tmp_path: Path) -> None:
    write_site(
        tmp_path,
        "import sys\n"
        "if any('doctor.jobs' in w for w in getattr(sys, 'orig_argv', [])):\n"
        "    import mlx_paged.ops as ops\n"
        "    right = ops.silu_mul\n"
        "    ops.silu_mul = lambda *a, **k: right(*a, **k) * 2\n",
    )
    environment = {**home(tmp_path), "PYTHONPATH": python_path(tmp_path, ROOT)}
    with terminal(*PROGRAM, "doctor", environment=environment, width=100, height=50) as pane:
        screen = pane.wait_for("status=")
    assert "status=1" in screen, screen
    ending = screen[screen.index("What fits") :]
    assert "BROKEN  self-test on the CPU: silu_mul in float32" in ending
    assert "remedy    report it with the output of `mlx-paged doctor --json`" in ending
    assert "Something is broken." in ending


def test_progress_is_shown_and_control_c_leaves_no_process(tmp_path: Path) -> None:
    with terminal(*PROGRAM, "doctor", environment=home(tmp_path)) as pane:
        pane.wait_for("looking at")
        pane.press("C-c")
        screen = pane.wait_for("status=")
    assert "status=130" in screen and "Traceback" not in screen, screen


def test_json_can_be_piped(tmp_path: Path) -> None:
    command = (
        f"{shlex.join(PROGRAM)} doctor --json | python3 -c 'import json, sys; json.load(sys.stdin)'"
    )
    with terminal("bash", "-c", command, environment=home(tmp_path)) as pane:
        screen = pane.wait_for("status=")
    assert screen.strip() == "status=0", screen


def test_pictures_for_the_documentation_are_made(tmp_path: Path) -> None:
    script = Path(__file__).resolve().parents[2] / "scripts" / "terminal_picture.py"
    picture = tmp_path / "picture.svg"
    shown = ["printf", "\\033[31mred\\033[0m and plain\\n"]
    command = [sys.executable, str(script), str(picture), "--columns", "40", "--", *shown]
    with terminal(*command, environment=home(tmp_path)) as pane:
        pane.wait_for("status=0")
    svg = picture.read_text()
    assert svg.startswith("<svg") and ">red</text>" in svg and "plain" in svg
    assert "\x1b" not in svg and "terminal" in svg
