"""Who answers a conversation: an engine in this process, or a server."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Protocol

#: `role` and `content`, as in OpenAI's API.
Message = dict[str, str]


@dataclass
class Turn:
    """What is known of one answer.

    Attributes:
        prompt_tokens: Of the whole conversation; None where a server does not tell.
        cached_tokens: Those of them that were not computed again.
        completion_tokens: Of the answer.
        ttft: Seconds until its first token.
        seconds: Until its end.
        finish_reason: "stop", "length", "stopped" by the user, or "error".
    """

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    ttft: float | None = None
    seconds: float = 0.0
    finish_reason: str | None = None

    @property
    def tokens_per_second(self) -> float | None:
        """After the first token."""
        if self.ttft is None or self.completion_tokens is None or self.completion_tokens < 2:
            return None
        return (self.completion_tokens - 1) / max(self.seconds - self.ttft, 1e-9)


class Backend(Protocol):
    """Answers conversations, one at a time.

    Attributes:
        model: Its name.
        turn: Of the last answer; complete when its generator has ended or was closed.
        defaults: What holds for parameters that are not set, as far as it is known.
    """

    model: str
    turn: Turn
    defaults: dict[str, Any]

    def answer(self, messages: list[Message], params: dict[str, Any]) -> Generator[str, None, None]:
        """Pieces of the answer as they come. Closing the generator stops it.

        Args:
            messages: the conversation; the last one is the user's.
            params: fields of `SamplingParams`.

        Raises:
            MlxPagedError: it could not be answered; the next one may.
            KeyboardInterrupt: Ctrl-C, at a moment that harms nothing.
        """
        ...

    def facts(self) -> list[tuple[str, str]]:
        """(what, value) for ``/stats``, besides the turns."""
        ...

    def close(self) -> None:
        """Lets go of connections."""
        ...
