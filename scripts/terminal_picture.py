"""Makes an SVG picture of a terminal for the documentation.

    python scripts/terminal_picture.py docs/doctor.svg --columns 90 -- mlx-paged doctor
    tmux capture-pane -e -p -t chat | python scripts/terminal_picture.py docs/chat.svg --title chat

The command runs in its own pseudo-terminal, so it prints colors. Without a command, reads colored
text from standard input, for interactive programs in tmux.
"""

from __future__ import annotations

import argparse
import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

# Cursor movements, erasures and window titles, which a picture of the last state ignores.
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-HJKSTfhlnsu]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\r(?!\n)")


def picture(text: str, title: str, columns: int) -> str:
    """SVG of text with ANSI colors; lines longer than `columns` are wrapped."""
    console = Console(record=True, width=columns, file=io.StringIO(), force_terminal=True)
    for line in _CONTROL.sub("", text).replace("\r\n", "\n").rstrip().split("\n"):
        console.print(Text.from_ansi(line), soft_wrap=False)
    return console.export_svg(title=title, theme=MONOKAI)


def run(command: list[str], columns: int) -> tuple[str, int]:
    """A command's output on a terminal of `columns` columns, and its exit status."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 200, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(columns)}
    # Progress goes to stderr, which is not in the picture.
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=subprocess.DEVNULL, env=environment
    ) as process:
        os.close(theirs)
        parts = []
        while part := _read(ours):
            parts.append(part)
    os.close(ours)
    return b"".join(parts).decode(errors="replace"), process.returncode


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:  # Linux raises this when the other end has closed.
        return b""


def _split(arguments: list[str]) -> tuple[list[str], bool, list[str]]:
    if "--" not in arguments:
        return arguments, False, []
    at = arguments.index("--")
    return arguments[:at], True, arguments[at + 1 :]


def main() -> int:
    parser = argparse.ArgumentParser(
        usage="%(prog)s [--title T] [--columns N] FILE [-- COMMAND ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path, help="SVG to write")
    parser.add_argument("--title", help="default: the command")
    parser.add_argument("--columns", type=int, default=100)
    # Everything after "--" is the command. argparse would parse some of it as options.
    ours, dashes, command = _split(sys.argv[1:])
    options = parser.parse_args(ours)
    if dashes and not command:
        parser.error("there is no command after --")
    status = 0
    if command:
        text, status = run(command, options.columns)
    else:
        text = sys.stdin.read()
    if not text.strip():
        print(f"{parser.prog}: nothing was printed (exit status {status})", file=sys.stderr)
        return 1
    title = options.title or " ".join(command)
    options.file.write_text(picture(text, title, options.columns))
    print(f"wrote {options.file} (exit status of the command: {status})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
