"""A drafter that knows the answers, and guesses wrong as often as it should."""

from __future__ import annotations

import random
from collections.abc import Sequence as SequenceOf
from typing import Any

from mlx_paged import LLM
from mlx_paged.core import Sequence
from mlx_paged.engine.speculation.acceptance import Draft, Source, kind_of
from mlx_paged.engine.speculation.config import SpeculativeConfig
from mlx_paged.engine.speculation.drafter import Drafter, Wanted
from mlx_paged.engine.speculation.speculator import Speculator


class GuessingDrafter(Drafter):
    """Guesses the answers that it was given, each token right with a given probability.

    Attributes:
        answers: By prompt and index: the tokens of the answer.
    """

    def __init__(self, right: float, vocab_size: int, seed: int = 0) -> None:
        self.answers: dict[tuple[tuple[int, ...], int], SequenceOf[int]] = {}
        self.num_finished = 0
        self._right = right
        self._vocab_size = vocab_size
        self._random = random.Random(seed)

    def draft(self, wanted: SequenceOf[Wanted]) -> list[Draft | None]:
        """See `Drafter`."""
        return [self._draft(each.seq, each.max_drafts) for each in wanted]

    def _draft(self, seq: Sequence, max_drafts: int) -> Draft | None:
        prompt = tuple(seq.request.prompt_token_ids)
        answer = self.answers.get((prompt, seq.index), ())
        begin = len(seq.tokens)
        count = self._random.randint(0, max_drafts)
        known = answer[begin - len(prompt) : begin - len(prompt) + count]
        tokens = tuple(self._guess(token) for token in known)
        return Draft(begin, tokens, kind_of(Source.SEQUENCE, 3)) if tokens else None

    def _guess(self, token: int) -> int:
        if self._random.random() < self._right:
            return token
        return self._random.randrange(self._vocab_size)

    def finish(self, seq: Sequence) -> None:
        """See `Drafter`."""
        self.num_finished += 1


def guess(
    llm: LLM, right: float, num_drafts: int = 4, *, splits: bool = False, **options: Any
) -> GuessingDrafter:
    """Makes an engine verify guesses in every step; returns the drafter, which knows nothing.

    Args:
        splits: Verify as on a GPU: each row is a sequence of its own.
    """
    drafter = GuessingDrafter(right, llm.engine.vocab_size)
    config = SpeculativeConfig(num_speculative_tokens=num_drafts, adaptive=False, **options)
    llm.engine._speculator = Speculator(config, drafter, None)
    if splits:
        llm.engine._runner.splits_drafts = True
    return drafter
