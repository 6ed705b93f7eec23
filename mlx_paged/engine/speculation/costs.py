"""StepCosts: the time of a step, by its rows, its sequences and their contexts.

Drafts pay off if a step with more rows takes little longer. That depends on machine, model and
weight format: on a GPU five rows cost as much as one; on a CPU in 4 bits, one more row costs half a
step. Steps are measured when the engine starts, and steps of requests correct the measurement.
Drafts without a price use `learned_costs.py` instead.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from mlx_paged.core import StateMove, StepBatch, StepTable
from mlx_paged.core.kv.tree import TOKEN_TYPE
from mlx_paged.engine.faults import reason_of
from mlx_paged.engine.runner import ModelRunner
from mlx_paged.engine.sampling.sequence_sampler import SamplingRow
from mlx_paged.engine.synthetic_steps import synthetic_step

logger = logging.getLogger(__name__)

_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
_SHORT_CONTEXT, _LONG_CONTEXT = 256, 2048
_MAX_SECONDS = 1.0  # of all measurements
_REPEATS = 2
# Weight of a step's time in the correction; times beyond this factor are outliers.
_WEIGHT = 0.1
_MAX_FACTOR = 3.0


class Costs(Protocol):
    """Estimates the time of steps."""

    def seconds(self, num_rows: int, num_seqs: int, context_len: float) -> float:
        """Returns the expected seconds of a step.

        Args:
            num_rows: Rows of all sequences.
            context_len: Mean tokens of context of a sequence.
        """

    def observe(self, num_rows: int, num_seqs: int, context_len: float, seconds: float) -> None:
        """Learns from a step."""

    def age(self) -> None:
        """Halves the weight of past steps with drafts."""


@dataclass
class StepCosts:
    """Seconds of steps.

    Attributes:
        rows: Numbers of rows that were measured, ascending.
        of_rows: Seconds of a step of one sequence with that many rows.
        of_sequences: Seconds of a step of that many sequences with a row each.
        per_context: Seconds for each token of context, of a sequence with one row.
        per_row_context: Seconds for each token of context and further row of a sequence.
        context_len: Tokens of context in the measurements of `of_rows`.
        compiling: Additional seconds of the first step with another number of rows.
    """

    rows: Sequence[int]
    of_rows: Sequence[float]
    of_sequences: Sequence[float]
    per_context: float = 0.0
    per_row_context: float = 0.0
    context_len: int = 0
    compiling: float = 0.0
    _factors: dict[bool, float] = field(default_factory=lambda: {False: 1.0, True: 1.0})

    def seconds(self, num_rows: int, num_seqs: int, context_len: float) -> float:
        """See `Costs`."""
        alone = _interpolated(num_rows, self.rows, self.of_rows)
        more = _interpolated(num_seqs, self.rows, self.of_sequences)
        more -= _interpolated(num_seqs, self.rows, self.of_rows)
        longer = context_len - self.context_len
        attention = num_seqs * self.per_context + (num_rows - num_seqs) * self.per_row_context
        floor = 0.5 * alone
        expected = max(floor, alone + max(0.0, more) + longer * attention)
        return expected * self._factors[num_rows > num_seqs]

    def observe(self, num_rows: int, num_seqs: int, context_len: float, seconds: float) -> None:
        """Corrects the estimates of steps with drafts, or without, by the time of one."""
        has_drafts = num_rows > num_seqs
        factor = self._factors[has_drafts]
        ratio = seconds / (self.seconds(num_rows, num_seqs, context_len) / factor)
        if 1 / _MAX_FACTOR < ratio / factor < _MAX_FACTOR:
            self._factors[has_drafts] = (1 - _WEIGHT) * factor + _WEIGHT * ratio

    def age(self) -> None:
        """See `Costs`."""
        self._factors[True] = (self._factors[True] + self._factors[False]) / 2


def _interpolated(x: int, xs: Sequence[int], values: Sequence[float]) -> float:
    """Linear between two measurements, and beyond the last one."""
    if x > xs[-1] and len(xs) > 1:
        slope = (values[-1] - values[-2]) / (xs[-1] - xs[-2])
        return values[-1] + max(0.0, slope) * (x - xs[-1])
    return float(np.interp(x, xs, values))


def measure(
    runner: ModelRunner,
    *,
    max_num_seqs: int,
    max_context_len: int | None,
    num_tokens: int,
    clock: Callable[[], float] = time.perf_counter,
) -> StepCosts | None:
    """Measures steps in the runner's pools, which no request uses yet.

    Each row has another token, so that experts are chosen like by text. Larger steps are skipped
    once the measurements have taken a second.

    Args:
        num_tokens: Size of the vocabulary.

    Returns:
        None if a step fails.
    """
    start = clock()
    short = min(_SHORT_CONTEXT, max_context_len or _SHORT_CONTEXT)
    long = min(_LONG_CONTEXT, max_context_len or _LONG_CONTEXT)
    measured: list[tuple[int, float, float]] = []
    compiling: list[float] = []
    tokens = np.random.default_rng(0).permutation(num_tokens).astype(np.uint32)

    def seconds(num_seqs: int, num_rows: int, context_len: int) -> tuple[float, float]:
        """Returns the time of the first step, and of the fastest repeat."""
        times: list[float] = []
        while len(times) < 2 or (len(times) <= _REPEATS and clock() - start < _MAX_SECONDS):
            before = clock()
            step = _step(runner, tokens, num_seqs, num_rows, context_len)
            runner.read(runner.launch(step, None))
            times.append(clock() - before)
        return times[0], min(times[1:])

    try:
        for rows in _ROWS:
            if rows > max(short, 1) or (len(measured) > 2 and clock() - start > _MAX_SECONDS):
                break
            first, alone = seconds(1, rows, short)
            compiling.append(max(0.0, first - alone))
            together = seconds(rows, 1, short)[1] if 1 < rows <= max_num_seqs else alone
            measured.append((rows, alone, together))
        per_context = per_row = 0.0
        if long > short:
            one, few = measured[0], measured[min(3, len(measured) - 1)]
            per_context = max(0.0, seconds(1, 1, long)[1] - one[1]) / (long - short)
            longer = max(0.0, seconds(1, few[0], long)[1] - few[1]) / (long - short)
            per_row = max(0.0, longer - per_context) / max(1, few[0] - 1)
    except Exception as error:
        logger.warning("the cost of drafts could not be measured: %s", reason_of(error))
        return None
    finally:
        runner.reset()
    rows_of, alone_of, together_of = zip(*measured)
    costs = StepCosts(rows_of, alone_of, together_of, per_context, per_row, short)
    if runner.model.platform.on_cpu:  # A GPU has compiled all steps that requests may have.
        costs.compiling = float(np.median(compiling))
    logger.info(
        "speculation: a step of 1, 4 and 8 rows takes %.1f, %.1f and %.1f ms",
        *(1e3 * costs.seconds(rows, 1, short) for rows in (1, 4, 8)),
    )
    return costs


def _step(
    runner: ModelRunner,
    tokens: npt.NDArray[np.uint32],
    num_seqs: int,
    num_rows: int,
    context_len: int,
) -> StepBatch:
    """Returns a step with these tokens, which does not write to block 0, which is padding."""
    model = runner.model
    num_blocks = min((len(c.key_pool) for c in model.attention_caches), default=2) - 1
    length = -(-context_len // runner.block_size)
    # Any blocks will do, because their contents are never read.
    tables = [
        (StepTable(tuple(1 + (i * length + j) % num_blocks for j in range(length)), 0),)
        * (1 + len(runner.windows))
        for i in range(num_seqs)
    ]
    settings = SamplingRow(0.0, seed=0, position=context_len)
    return synthetic_step(
        [num_rows] * num_seqs,
        [context_len - num_rows] * num_seqs,
        tables,
        [settings] * (num_seqs * num_rows),
        token_ids=array(TOKEN_TYPE, np.resize(tokens, num_seqs * num_rows).tobytes()),
        num_drafts=array("i", [num_rows - 1]) * num_seqs,
        slots=[StateMove(0, -1)] * num_seqs if model.layout.has_states else [],
    )
