"""Runs `pip install --verbose` and shows its progress instead of its output.

python scripts/install_progress.py COMMAND... [--beside COMMAND...]

pip prints nothing while it compiles, which takes minutes. This script parses pip's output and
ninja's lines ``[12/87] Building ...``. At a terminal it draws one line; elsewhere it prints a line
occasionally. If the command fails, it prints the end of the output and returns the exit status. A
second command runs at the same time without being shown. This script needs only Python, because it
runs before anything is installed.
"""

from __future__ import annotations

import queue
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import TextIO

_COMPILED = re.compile(r"\s*\[(\d+)/(\d+)\] ")
# pip's messages at the start of each stage; the last match counts.
_STAGES = (
    (re.compile(r"\s*Collecting |\s*Obtaining "), "fetching packages"),
    (re.compile(r"\s*(Installing build dependencies|Running command pip subprocess)"), "preparing"),
    (re.compile(r"\s*\*\*\* Configuring CMake|\s*Configuring CMake"), "configuring"),
    (re.compile(r"\s*Installing collected packages"), "installing packages"),
)
_LINES_OF_A_FAILURE = 60
_BAR = 24


class Display:
    """Draws the progress.

    Args:
        stream: The stream to draw on.
        at_terminal: Redraw one line; otherwise print a line per stage and per tenth compiled.
    """

    def __init__(self, stream: TextIO, *, at_terminal: bool) -> None:
        self._stream = stream
        self._at_terminal = at_terminal
        self._start = time.monotonic()
        self._stage = "starting"
        self._done = self._total = 0
        self._tenths = 0

    def take(self, line: str) -> None:
        """Processes a line of the command's output."""
        compiled = _COMPILED.match(line)
        if compiled is None:
            stage = next((name for start, name in _STAGES if start.match(line)), None)
            if stage is None or stage == self._stage:
                return
            self._stage, self._total = stage, 0
            self._print(stage)
        else:
            self._done, self._total = map(int, compiled.groups())
            tenths = 10 * self._done // max(1, self._total)
            is_first = self._stage != "compiling"
            self._stage = "compiling"
            if is_first or tenths > self._tenths:
                self._print(f"compiling {self._done}/{self._total}")
            self._tenths = tenths
        self.draw()

    def draw(self) -> None:
        """Redraws the line with the elapsed time."""
        if not self._at_terminal:
            return
        minutes, seconds = divmod(int(time.monotonic() - self._start), 60)
        text = f"{self._stage}  {minutes}:{seconds:02}"
        if self._total:
            filled = _BAR * self._done // self._total
            bar = "#" * filled + "-" * (_BAR - filled)
            text = f"{self._stage} [{bar}] {self._done}/{self._total}  {minutes}:{seconds:02}"
        width = shutil.get_terminal_size().columns - 1
        self._stream.write(f"\r\x1b[K{text[:width]}")
        self._stream.flush()

    def end(self) -> None:
        """Clears the line."""
        if self._at_terminal:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def _print(self, text: str) -> None:
        if not self._at_terminal:
            self._stream.write(f"{text}\n")
            self._stream.flush()


def run(command: Sequence[str], display: Display) -> tuple[int, list[str]]:
    """Runs a command; returns its exit status and the last lines of its output."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    last: deque[str] = deque(maxlen=_LINES_OF_A_FAILURE)
    while True:
        try:
            line = lines.get(timeout=1)
        except queue.Empty:
            display.draw()
            continue
        if line is None:
            return process.wait(), list(last)
        last.append(line)
        display.take(line)


def run_both(
    command: Sequence[str], beside: Sequence[str], display: Display
) -> tuple[int, list[str]]:
    """Like `run`, with a second command at the same time. A failure of the first one stops it."""
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        with subprocess.Popen(beside, stdout=output, stderr=subprocess.STDOUT) as other:
            status, last = run(command, display)
            if status:
                other.terminate()
                return status, last
            display.take("Installing collected packages")
            while other.poll() is None:
                time.sleep(0.1)
                display.draw()
        output.seek(0)
        return other.returncode, list(deque(output, maxlen=_LINES_OF_A_FAILURE))


def main() -> int:
    if len(sys.argv) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    display = Display(sys.stderr, at_terminal=sys.stderr.isatty())
    command, beside = sys.argv[1:], []
    if "--beside" in command:
        at = command.index("--beside")
        command, beside = command[:at], command[at + 1 :]
    try:
        status, last = run_both(command, beside, display) if beside else run(command, display)
    except KeyboardInterrupt:  # the commands received it too
        display.end()
        return 130
    display.end()
    if status:
        sys.stderr.writelines(last)
    return status


if __name__ == "__main__":
    sys.exit(main())
