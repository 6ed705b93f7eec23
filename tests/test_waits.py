"""Tests wait for events: a limit on the time of a wait is for hangs only, see `support.waiting`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.waiting import TIMEOUT

FOLDER = Path(__file__).parent
# Calls whose first argument, or `timeout`, is a limit in seconds; and those that only have that.
POSITIONAL = {"join", "result", "timeout", "wait"}
NAMED = POSITIONAL | {
    *("Client", "HTTPConnection", "communicate", "connect", "create_connection", "delete", "get"),
    *("post", "run", "stream", "wait_procs"),
}
# Shorter limits are for what must not happen, or options of what is tested.
LEAST = 1.0


def limits(tree: ast.AST) -> Iterator[tuple[int, float]]:
    """Yields (line, seconds) of each limit that is a number."""
    for node in ast.walk(tree):
        found: list[ast.expr] = []
        match node:
            case ast.BinOp(ast.Call(ast.Attribute(attr="monotonic" | "time")), ast.Add(), seconds):
                found = [seconds]
            case ast.Call(ast.Attribute(attr=name) | ast.Name(id=name), given, keywords):
                named = {"timeout", "open_timeout"} if name in NAMED else set()
                found = [each.value for each in keywords if each.arg in named]
                if name in POSITIONAL:
                    found += given[:1]
                elif name == "wait_for":
                    found += given[1:2]
        for each in found:
            if isinstance(each, ast.Constant) and isinstance(each.value, (int, float)):
                yield each.lineno, float(each.value)


def test_limits_are_found() -> None:
    source = """
process.wait(60)
thread.join(timeout=5)
asyncio.wait_for(task, 7)
asyncio.timeout(9)
end = time.monotonic() + 30
subprocess.run(command, timeout=120)
"".join(names), future.result(), event.wait(TIMEOUT), page.wait_for("text")
"""
    found = sorted(seconds for _, seconds in limits(ast.parse(source)))
    assert found == [5, 7, 9, 30, 60, 120]


@pytest.mark.parametrize("folder", ["", *sorted(p.name for p in FOLDER.iterdir() if p.is_dir())])
def test_no_wait_ends_before_a_hang_is_certain(folder: str) -> None:
    short = [
        f"{file.relative_to(FOLDER)}:{line}: {seconds:g} s"
        for file in sorted((FOLDER / folder).glob("**/*.py" if folder else "*.py"))
        for line, seconds in limits(ast.parse(file.read_text()))
        if LEAST <= seconds < TIMEOUT
    ]
    assert not short, "\n".join(short)
