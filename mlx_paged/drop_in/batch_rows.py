"""What a batch knows of one of its sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import TokenBuffer

from mlx_paged.drop_in.sequence import PagedSequence


class Choice(NamedTuple):
    """How the tokens of a sequence are chosen, and when it ends; as mlx-lm takes them."""

    max_tokens: int
    sampler: Callable[[mx.array], mx.array]
    logits_processors: tuple[Any, ...]
    stop_sequences: Any


class Row:
    """One sequence, from its insertion to its last token.

    Attributes:
        tokens: What mlx-lm's caller calls the tokens in the cache: those it said were there, and
            all since. One that is being chosen is not among them yet.
        segments: What is left of the prompt. The batch stops at the end of each segment; the last
            one is the last token alone, which starts the answer.
        num_total: Tokens of the prompt.
        num_processed: Those that are in the cache.
    """

    def __init__(
        self,
        uid: int,
        sequence: PagedSequence,
        tokens: Sequence[int],
        segments: list[list[int]],
        choice: Choice,
    ) -> None:
        self.uid = uid
        self.sequence = sequence
        self.tokens = list(tokens)
        self.segments = segments
        self.choice = choice
        self.num_total = sum(map(len, segments))
        self.num_processed = 0
        self.num_generated = 0
        self.matcher = choice.stop_sequences.matcher()
        self.is_alive = True
        self._context: TokenBuffer | None = None
        # Whether a cache holds what the caller says is not for us to find out: only tokens that the
        # sequence itself knows are ever shared.
        self._head = sequence.trail.tokens() if sequence.is_known else None
        self._num_given = len(self.tokens)

    @property
    def is_at_last_token(self) -> bool:
        """Whether the answer can start."""
        return len(self.segments) == 1 and len(self.segments[0]) == 1

    def known(self) -> list[int] | None:
        """The tokens of the sequence from its start; None where its head is not known."""
        return None if self._head is None else self._head + self.tokens[self._num_given :]

    def prompt(self) -> list[int] | None:
        """The same, and the rest of the prompt."""
        known = self.known()
        return None if known is None else known + [t for s in self.segments for t in s]

    def learn(self) -> None:
        """Lets others share what the sequence has computed."""
        known = self.known()
        if known is not None:
            self.sequence.learn(known)

    def take(self, num_tokens: int) -> list[int]:
        """The next tokens of the prompt, all of one segment: they are about to be in the cache."""
        segment = self.segments[0]
        taken, self.segments[0] = segment[:num_tokens], segment[num_tokens:]
        if not self.segments[0]:
            self.segments.pop(0)
        self.tokens += taken
        self.num_processed += len(taken)
        return taken

    def context(self, newest: mx.array) -> mx.array:
        """Every token up to `newest` (``[1]``, which may be in flight), for logits processors."""
        if self._context is None:
            self._context = TokenBuffer(self.tokens)
        return self._context.update_and_fetch(newest)
