"""A real terminal for tests: a tmux pane that takes keys and shows a user's screen."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from support.programs import needs

TIMEOUT = 300.0
# `mlx-paged`, also where it is not installed.
PROGRAM = [sys.executable, "-m", "mlx_paged"]
needs_tmux = needs("tmux", found=shutil.which("tmux") is not None)


class Terminal:
    """One pane; its screen is text."""

    def __init__(self, socket: str) -> None:
        self._socket = socket

    def _tmux(self, *arguments: str) -> str:
        command = ["tmux", "-L", self._socket, "-f", "/dev/null", *arguments]
        run = subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT)
        return run.stdout

    def start(self, command: str, *, width: int, height: int) -> None:
        size = ["-x", str(width), "-y", str(height)]
        self._tmux("new-session", "-d", "-s", "test", *size, command)

    def type(self, text: str) -> None:
        """Types literal characters."""
        self._tmux("send-keys", "-l", "--", text)

    def press(self, *keys: str) -> None:
        """Presses keys by tmux's names: Enter, Tab, M-Enter, C-c."""
        self._tmux("send-keys", *keys)

    def say(self, text: str) -> None:
        self.type(text)
        self.press("Enter")

    def screen(self, *, colors: bool = False) -> str:
        """All output since the start, including scrolled-off lines."""
        options = ["-e"] if colors else []
        return self._tmux("capture-pane", "-p", "-S", "-", *options).rstrip()

    def wait_for(self, text: str, *, count: int = 1) -> str:
        """Waits until the screen has a text `count` times; returns the screen."""
        deadline = time.monotonic() + TIMEOUT
        while True:
            screen = self.screen()
            if screen.count(text) >= count:
                return screen
            assert time.monotonic() < deadline, f"no {count} x {text!r} on the screen:\n{screen}"
            time.sleep(0.05)


@contextlib.contextmanager
def terminal(
    *command: str, environment: dict[str, str] | None = None, width: int = 80, height: int = 24
) -> Iterator[Terminal]:
    """A pane that runs a command, then shows its exit status as ``status=N``."""
    socket = f"mlx-paged-test-{uuid.uuid4().hex[:8]}"
    variables = [f"{name}={value}" for name, value in (environment or {}).items()]
    line = shlex.join(["env", "-u", "COLUMNS", "-u", "LINES", *variables, *command])
    pane = Terminal(socket)
    pane.start(f"{line}; echo status=$?; sleep 600", width=width, height=height)
    try:
        yield pane
    finally:
        subprocess.run(
            ["tmux", "-L", socket, "kill-server"], check=False, capture_output=True, timeout=TIMEOUT
        )


def home(path: Path) -> dict[str, str]:
    """An environment that keeps the program out of the real home directory."""
    return {
        "HOME": str(path),
        "XDG_STATE_HOME": str(path / "state"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "LANG": "C.UTF-8",
    }
