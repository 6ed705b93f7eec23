"""A chat: takes what the user enters, and keeps conversation, answers and figures together."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Protocol

from rich.console import RenderableType

from mlx_paged.cli.chat.backend import Backend, Message, Turn
from mlx_paged.cli.chat.conversation import Conversation
from mlx_paged.errors import MlxPagedError


class View(Protocol):
    """Where a chat is shown."""

    def answer(self, pieces: Iterator[str]) -> None:
        """Shows an answer as it comes."""
        ...

    def note(self, what: RenderableType) -> None:
        """Shows what a command has to say."""
        ...

    def error(self, message: str) -> None:
        """Shows in a line what went wrong; the chat goes on."""
        ...


class ChatSession:
    """One conversation with one backend.

    Attributes:
        turns: What each answer took, since the program began.
        failed: Whether something went wrong so far.
    """

    def __init__(self, backend: Backend, view: View, conversation: Conversation) -> None:
        self.backend = backend
        self.view = view
        self.conversation = conversation
        self.turns: list[Turn] = []
        self.failed = False
        self._no_answer = False

    def say(self, text: str) -> None:
        """The user says something; shows the answer.

        An answer that was stopped is kept as far as it came. Without an answer the message is not
        part of the conversation; ``/retry`` says it again.
        """
        conversation = self.conversation
        conversation.unanswered = text
        pieces: list[str] = []
        answer = self._kept(pieces, conversation.asking(text))
        stopped = False
        try:
            self.view.answer(answer)
        except KeyboardInterrupt:
            stopped = True
        except MlxPagedError as error:
            self.fail(str(error))
        finally:
            answer.close()
        if pieces or not (stopped or self._no_answer):
            conversation.add(text, "".join(pieces))
            self.turns.append(self.backend.turn)
        if stopped:
            self.view.note("(stopped)")

    def fail(self, message: str) -> None:
        """Shows an error; the chat goes on."""
        self.failed = self._no_answer = True
        self.view.error(message)

    def _kept(self, pieces: list[str], messages: list[Message]) -> Generator[str, None, None]:
        self._no_answer = False
        answer = self.backend.answer(messages, self.conversation.params)
        try:
            for piece in answer:
                pieces.append(piece)
                yield piece
        finally:
            answer.close()
