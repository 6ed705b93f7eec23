"""Log-probabilities of a prompt's tokens, gathered over the steps that compute it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlx_paged.engine.outputs import PositionReport
from mlx_paged.engine.sampling.logprobs import LogprobReport, PositionLogprobs


@dataclass(frozen=True)
class PromptTargets:
    """Prompt tokens whose log-probabilities a step is to find.

    Attributes:
        token_ids: Those that follow the sequence's first rows in the step, in order.
        likeliest: Whether the likeliest tokens are wanted, too.
    """

    token_ids: Sequence[int]
    likeliest: bool


class PromptReport:
    """Knows what of a prompt has been reported. All answers of a request share one.

    Args:
        prompt: the request's prompt.
        num_likeliest: tokens to report for each position besides its own.
        report: gives the tokens their texts.
    """

    def __init__(self, prompt: Sequence[int], num_likeliest: int, report: LogprobReport) -> None:
        self._prompt = prompt
        self._num_likeliest = num_likeliest
        self._report = report
        # One for each token so far; the first follows nothing.
        self.positions: list[PositionReport | None] = [None]

    def targets(self, start: int, end: int) -> PromptTargets | None:
        """What is wanted of a step that computes positions `[start, end)` of an answer."""
        end = min(end, len(self._prompt) - 1)
        if start >= end or end < len(self.positions):
            return None  # past the prompt, or computed anew after a preemption
        return PromptTargets(self._prompt[start + 1 : end + 1], bool(self._num_likeliest))

    def record(self, start: int, found: Sequence[PositionLogprobs]) -> None:
        """Takes what the step found whose first position was `start`."""
        for place, position in enumerate(found, start + 1):
            if place == len(self.positions):  # (others are known already)
                self.positions.append(self._report(position, self._num_likeliest))
