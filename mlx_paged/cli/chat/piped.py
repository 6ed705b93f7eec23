"""A chat without a terminal: a message or a command a line, answers on stdout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mlx_paged.cli.chat.commands import EndOfChat, handle
from mlx_paged.cli.chat.session import ChatSession


def converse(session: ChatSession, lines: Iterable[str]) -> None:
    """Talks until the lines end, or one of them is ``/exit``."""
    try:
        for entered in _joined(lines):
            handle(session, entered)
    except EndOfChat:
        return


def _joined(lines: Iterable[str]) -> Iterator[str]:
    """Lines; one that ends with a backslash goes on in the next."""
    begun: list[str] = []
    for line in lines:
        line = line.rstrip("\r\n")
        if line.endswith("\\"):
            begun.append(line[:-1])
        else:
            yield "\n".join([*begun, line])
            begun.clear()
    if begun:
        yield "\n".join(begun)
