"""A scripted backend and a recording view, for tests of chats without a terminal."""

from __future__ import annotations

import io
from collections.abc import Generator, Iterator
from typing import Any

from rich.console import Console, RenderableType

from mlx_paged.cli.chat.conversation import Message, Turn


class Script:
    """A backend with scripted answers: pieces, and exceptions among them.

    Attributes:
        wrong: Reason why it takes no files.
    """

    model = "scripted"

    def __init__(self, *answers: list[Any]) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[list[Message], dict[str, Any]]] = []
        self.turn = Turn()
        self.defaults = {"temperature": 0.7}
        self.num_closed = 0
        self.wrong: str | None = None

    def answer(self, messages: list[Message], params: dict[str, Any]) -> Generator[str, None, None]:
        self.asked.append((messages, dict(params)))
        self.turn = Turn(prompt_tokens=len(messages), cached_tokens=1, finish_reason="stop")
        try:
            for piece in self.answers.pop(0):
                if isinstance(piece, BaseException):
                    raise piece
                yield piece
        finally:
            self.num_closed += 1

    def refusal(self, kind: str) -> str | None:
        return self.wrong

    def facts(self) -> list[tuple[str, str]]:
        return [("fact", "value")]

    def close(self) -> None: ...


class Record:
    """A view that records everything."""

    def __init__(self) -> None:
        self.answers: list[str] = []
        self.notes: list[str] = []
        self.errors: list[str] = []

    def answer(self, pieces: Iterator[str]) -> None:
        self.answers.append("")
        for piece in pieces:
            self.answers[-1] += piece

    def note(self, what: RenderableType) -> None:
        console = Console(file=io.StringIO(), width=100)
        console.print(what)
        self.notes.append(console.file.getvalue())  # type: ignore[attr-defined]

    def error(self, message: str) -> None:
        self.errors.append(message)
