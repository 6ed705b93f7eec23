"""Records the drafts of a head, and gives the engine the right tokens instead."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged import RequestOutput
from mlx_paged.engine.input_tokens import DraftsInFlight
from mlx_paged.engine.sampling.sampler import sample
from mlx_paged.engine.sampling.sequence_sampler import SamplingRow
from mlx_paged.engine.speculation.acceptance import Draft
from mlx_paged.engine.speculation.drafter import Drafter, StartedDrafts, Wanted
from mlx_paged.engine.speculation.head_drafter import HeadDrafter


class Oracle:
    """Replaces drafts by tokens of the known answers, so that many are accepted.

    A head with random weights would have hardly any accepted.

    Attributes:
        made: The head's own drafts, with the tokens before them.
    """

    def __init__(self, right: float) -> None:
        self.answers: dict[tuple[int, ...], Sequence[int]] = {}
        self.made: list[tuple[list[int], SamplingRow, Draft]] = []
        self._right, self._random = right, random.Random(1)

    def tell(self, outputs: Sequence[RequestOutput]) -> None:
        """Tells it the answers."""
        for output in outputs:
            self.answers[tuple(output.prompt_token_ids)] = output.outputs[0].token_ids

    def replaced(self, wanted: Sequence[Wanted], drafts: list[Draft | None]) -> list[Draft | None]:
        """Drafts with the right tokens, mostly."""
        found: list[Draft | None] = []
        for each, draft in zip(wanted, drafts):
            seq = each.seq
            if draft is not None:
                self.made.append((list(seq.tokens), seq.sampler.row, draft))
                prompt = tuple(seq.request.prompt_token_ids)
                at = len(seq.tokens) - len(prompt)
                known = self.answers.get(prompt, ())[at : at + len(draft.tokens)]
                guess = [t if self._random.random() < self._right else 0 for t in known]
                draft = draft._replace(tokens=tuple(guess) or draft.tokens)
            found.append(draft)
        return found


def recorded(
    monkeypatch: pytest.MonkeyPatch, right: float, kind: type[Drafter] = HeadDrafter
) -> Oracle:
    """Makes an oracle of every drafter of a kind, whose tokens are right with a given
    probability. Drafts that were left on the device are again."""
    oracle, real = Oracle(right), kind.begin

    def begin(self: Drafter, wanted: Sequence[Wanted]) -> StartedDrafts:
        started = real(self, wanted)
        made = started.finish()
        drafts = oracle.replaced(wanted, made)
        if started.in_flight is None:
            return StartedDrafts(lambda: drafts)
        check_in_flight(started.in_flight, wanted, made)
        return StartedDrafts(lambda: drafts, on_device(wanted, drafts))

    monkeypatch.setattr(kind, "begin", begin)
    return oracle


def check_in_flight(
    in_flight: DraftsInFlight, wanted: Sequence[Wanted], drafts: Sequence[Draft | None]
) -> None:
    """The device has the drafts that the host reads, up to the end of an answer."""
    tokens = np.array(in_flight.tokens)
    for each, draft in zip(wanted, drafts):
        if draft is not None:
            own = tokens[in_flight.indices[each.seq.seq_id]].tolist()
            assert own[: len(draft.tokens)] == list(draft.tokens)


def on_device(wanted: Sequence[Wanted], drafts: Sequence[Draft | None]) -> DraftsInFlight:
    """Drafts that the host knows, as if it did not."""
    tokens: list[int] = []
    places: dict[int, list[int]] = {}
    for each, draft in zip(wanted, drafts):
        if draft is not None:
            places[each.seq.seq_id] = [len(tokens) + i for i in range(len(draft.tokens))]
            tokens += draft.tokens
    return DraftsInFlight(mx.array(tokens, dtype=mx.int32), places)


def chooser(row: SamplingRow) -> Callable[[np.ndarray, int], int]:
    """Returns a function from logits and a position to the token that a sequence draws there."""

    def choose(logits: np.ndarray, position: int) -> int:
        settings = row._replace(position=position, logprobs=None)
        scores = mx.array(logits.astype(np.float32))[None]
        return int(sample(scores, [settings]).tokens.item())

    return choose
