"""StepTimes: seconds of a step, fitted to measured ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

RESULTS = Path(__file__).parents[1] / "results"


@dataclass(frozen=True)
class StepTimes:
    """A linear model of a step.

    Attributes:
        base: Seconds of a step.
        row: More for each sequence that decodes.
        context: More for each token of their contexts.
        prompt: More for each prompt token.
        prompt_context: More for each prompt token and each token before it.
    """

    base: float
    row: float
    context: float
    prompt: float
    prompt_context: float

    def decodes(self, rows: int, context: int, steps: int) -> float:
        """Seconds of consecutive steps of the same sequences; `context` is the first one's."""
        grown = rows * steps * (steps - 1) / 2
        return steps * (self.base + self.row * rows + self.context * context) + self.context * grown

    def chunk(self, start: int, tokens: int) -> float:
        """Seconds that a chunk of a prompt adds to a step. `start` is the number before it."""
        before = tokens * start + tokens * tokens / 2
        return self.prompt * tokens + self.prompt_context * before

    def prefill(self, start: int, end: int) -> float:
        """Seconds of the chunks of a prompt, without the steps that they are in."""
        return self.chunk(start, end - start)

    def scaled(self, decode: float, prefill: float) -> StepTimes:
        """Returns the step times of a machine that is slower by these factors."""
        return replace(
            self,
            base=self.base * decode,
            row=self.row * decode,
            context=self.context * decode,
            prompt=self.prompt * prefill,
            prompt_context=self.prompt_context * prefill,
        )


def fitted(
    decodes: Sequence[tuple[int, int, float]], prompts: Sequence[tuple[int, int, float]]
) -> StepTimes:
    """Fits step times by least squares, relative to the measured seconds. None is negative.

    Args:
        decodes: (rows, tokens of their contexts, seconds of a step)
        prompts: (prompts, tokens of each, seconds until all are computed, base steps included)
    """
    rows, context, seconds = np.array(decodes, float).T
    base, row, per_context = _positive(np.stack([np.ones_like(rows), rows, context], 1), seconds)
    count, length, seconds = np.array(prompts, float).T
    square = count * length * length / 2
    prompt, per_square = _positive(np.stack([count * length, square], 1), seconds - base)
    return StepTimes(base, row, per_context, prompt, per_square)


def _positive(columns: np.ndarray, seconds: np.ndarray) -> list[float]:
    """Least squares of relative errors; columns whose factor would be negative are left out."""
    used = list(range(columns.shape[1]))
    while True:
        scaled = columns[:, used] / seconds[:, None]
        factors = np.linalg.lstsq(scaled, np.ones_like(seconds), rcond=None)[0]
        if (factors >= 0).all():
            found = [0.0] * columns.shape[1]
            for column, factor in zip(used, factors):
                found[column] = float(factor)
            return found
        used.remove(used[int(factors.argmin())])


def h200_3b() -> StepTimes:
    """Llama-3.2-3B in bfloat16 on an H200, from results/calls-gpu.json."""
    parts = json.loads((RESULTS / "calls-gpu.json").read_text())["parts"]
    decodes = []
    for each in parts["decode"]["results"]:
        terms = [term.split(" x ") for term in each["workload"].split(" + ")]
        pairs = [(int(rows), int(context)) for rows, context in terms]
        rows = sum(pair[0] for pair in pairs)
        context = sum(rows * context for rows, context in pairs)
        decodes.append((rows, context, each["mlx_paged"]["step_ms"] / 1000))
    prompts = []
    for each in parts["prefill"]["results"]:
        count, length = map(int, each["workload"].split(" x "))
        prompts.append((count, length, each["mlx_paged"]["seconds"]))
    return fitted(decodes, prompts)
