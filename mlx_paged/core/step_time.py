"""StepTimeLimit: sizes the prompt chunks of steps so that a step takes at most a given time.

A GPU that also draws the screen cannot draw while it computes a long step. The limit learns from
measured steps how long the next one would take::

    seconds = base + per_token * prompt tokens + per_pair * pairs + per_decode * decodes

where a pair is a prompt token and a token that it attends to. Recent steps count most. The first
step and single steps that took several times as long as expected teach nothing: they compiled
kernels, or the machine slept.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from mlx_paged.core.step import StepBatch, StepTime

#: Prompt tokens that a step may always have, so that prompts make progress on any machine.
MIN_PROMPT_TOKENS = 32

# Maximum prompt tokens of a step, as a multiple of the largest measured step. The first steps of an
# engine are therefore small.
_GROWTH = 4
_FIRST_TRUSTED = 16  # tokens
_KEPT = 0.95  # weight of a step relative to the next one
_STIFFNESS = 0.01  # pull toward the last estimate, relative to the weight of the measured steps
_OUTLIER = 4.0  # times the expected time
_MAX_SLOWDOWN = 8.0
_RECOVERY = 0.3  # share of a slowdown that a step without slowdown removes
# A prompt token is at most this many times cheaper than those of the last step. Noise can make
# attention look too costly, and then tokens of a new prompt too cheap.
_CHEAPER = 2.0
_NUM_FEATURES = 4


class _Features(NamedTuple):
    """The quantities that determine a step's time."""

    base: float  # always 1
    tokens: float
    pairs: float
    decodes: float


class StepTimeLimit:
    """Learns the times of steps, and limits the prompt tokens of the next ones.

    Args:
        seconds: Time that a step should take at most. Decodes are never delayed for it.

    Raises:
        ValueError: `seconds` is not positive and finite.
    """

    def __init__(self, seconds: float) -> None:
        if not 0 < seconds < math.inf:
            raise ValueError(f"seconds must be positive and finite but got {seconds}")
        self.seconds = seconds
        self._costs = [0.0] * _NUM_FEATURES  # seconds per unit of each feature
        # Sums over the measured steps, for least squares: of x x^T, and of x * seconds.
        self._products = [[0.0] * _NUM_FEATURES for _ in range(_NUM_FEATURES)]
        self._targets = [0.0] * _NUM_FEATURES
        self._slowdown = 1.0  # by which recent steps exceeded the expected time
        self._last_cost = 0.0  # seconds per prompt token of the last step, beyond its other costs
        self._trusted_tokens = _FIRST_TRUSTED
        self._num_measured = -1  # the first step compiles kernels
        self._was_outlier = False

    def expected(self, features: Sequence[float]) -> float:
        """Seconds that a step takes, without the present slowdown."""
        return sum(cost * x for cost, x in zip(self._costs, features))

    def budget(self, num_decodes: int) -> StepTimeBudget:
        """Returns the time and tokens that a step with `num_decodes` decodes has for prompts."""
        base, per_token, per_pair, per_decode = self._costs
        left = self.seconds / self._slowdown - base - per_decode * num_decodes
        min_cost = self._last_cost / _CHEAPER
        return StepTimeBudget(left, _GROWTH * self._trusted_tokens, per_token, per_pair, min_cost)

    def learn(self, batch: StepBatch, time: StepTime) -> None:
        """Learns from a step. Ignores steps without prompts, and those that encode media."""
        if batch.is_decode or (batch.media is not None and batch.media.encoded):
            return
        features = _features(batch.starts, batch.query_lens)
        if features.tokens == 0 or not 0 < time.seconds < math.inf:
            return
        if self._num_measured < 0:
            self._num_measured = 0
            return
        expected = self.expected(features)
        if self._num_measured == 0 or expected <= 0:
            if not time.is_exact:
                return
            # All of it per token: the cautious guess, because a step can only have fewer of them.
            self._costs = [0.0, time.seconds / features.tokens, 0.0, 0.0]
            expected = time.seconds
        ratio = time.seconds / expected
        if not time.is_exact and ratio >= 1:
            return
        if ratio > _OUTLIER and not self._was_outlier:
            self._was_outlier = True
            return
        self._was_outlier = False
        self._num_measured += 1
        if ratio > self._slowdown:
            self._slowdown = min(ratio, _MAX_SLOWDOWN)
        else:
            self._slowdown = max(1.0, self._slowdown + _RECOVERY * (ratio - self._slowdown))
        self._trusted_tokens = max(self._trusted_tokens, int(features.tokens))
        self._fit(features, min(time.seconds, _MAX_SLOWDOWN * expected), expected)
        if features.tokens >= MIN_PROMPT_TOKENS:
            others = self._costs[0] + self._costs[3] * features.decodes
            self._last_cost = max(0.0, time.seconds - others) / features.tokens

    def _fit(self, features: _Features, seconds: float, scale: float) -> None:
        """Adds a step to the sums, and updates the costs to fit them."""
        # Divided by the expected time, large and small steps count alike.
        x = [value / scale for value in features]
        for row, value in zip(self._products, x):
            for j, other in enumerate(x):
                row[j] = _KEPT * row[j] + value * other
        for i, value in enumerate(x):
            self._targets[i] = _KEPT * self._targets[i] + value * seconds / scale
        self._costs = _least_squares(self._products, self._targets, self._costs)


class StepTimeBudget:
    """The time and the tokens that one step has left for prompts."""

    __slots__ = ("_min_cost", "_num_spent", "_per_pair", "_per_token", "_seconds", "_tokens")

    def __init__(
        self, seconds: float, tokens: int, per_token: float, per_pair: float, min_cost: float
    ) -> None:
        self._seconds = seconds
        self._tokens = tokens
        self._per_token = per_token
        self._per_pair = per_pair
        self._min_cost = min_cost
        self._num_spent = 0

    def num_tokens(self, start: int) -> int:
        """Returns the number of tokens that a chunk at position `start` may have; at least 0.

        The chunks of a step may have `MIN_PROMPT_TOKENS` together, even if they take too long.
        """
        fitting = min(
            self._tokens, _num_fitting(self._seconds, self._cost_at(start), self._per_pair)
        )
        return max(fitting, MIN_PROMPT_TOKENS - self._num_spent, 0)

    def spend(self, start: int, num_tokens: int) -> None:
        """Subtracts a chunk."""
        self._num_spent += num_tokens
        self._tokens -= num_tokens
        cost = self._cost_at(start) + self._per_pair * num_tokens / 2
        self._seconds -= num_tokens * cost

    def _cost_at(self, start: int) -> float:
        """Seconds of the first token of a chunk."""
        return max(self._min_cost, self._per_token + self._per_pair * start)


def _num_fitting(seconds: float, cost: float, growth: float) -> int:
    """Returns the largest n whose cost, ``n * cost + growth * n^2 / 2``, is within `seconds`."""
    if seconds <= 0:
        return 0
    divisor = cost + math.sqrt(cost * cost + 2 * growth * seconds)
    limit = 1 << 40
    return limit if 2 * seconds >= limit * divisor else int(2 * seconds / divisor)


def _features(starts: array[int], query_lens: array[int]) -> _Features:
    """Returns the features of a step. A sequence with one token counts as a decode."""
    tokens = pairs = decodes = 0
    for start, length in zip(starts, query_lens):
        if length == 1:
            decodes += 1
        else:
            tokens += length
            pairs += length * start + length * length // 2
    return _Features(1.0, float(tokens), float(pairs), float(decodes))


def _least_squares(
    products: list[list[float]], targets: list[float], last: list[float]
) -> list[float]:
    """Returns costs >= 0 with the least squared errors, close to the last ones where they are
    undetermined."""
    kept = [i for i in range(_NUM_FEATURES) if products[i][i] > 0]
    while kept:
        rows = []
        for i in kept:
            pull = _STIFFNESS * products[i][i]
            row = [products[i][j] + (pull if i == j else 0.0) for j in kept]
            rows.append([*row, targets[i] + pull * last[i]])
        found = _solve(rows)
        lowest = min(found)
        if lowest >= 0:
            costs = [0.0] * _NUM_FEATURES
            for i, value in zip(kept, found):
                costs[i] = value
            return costs
        del kept[found.index(lowest)]
    return last


def _solve(rows: list[list[float]]) -> list[float]:
    """Solves linear equations with a positive definite matrix; each row ends in its right side."""
    size = len(rows)
    for i in range(size):
        for k in range(i + 1, size):
            factor = rows[k][i] / rows[i][i]
            for j in range(i, size + 1):
                rows[k][j] -= factor * rows[i][j]
    found = [0.0] * size
    for i in reversed(range(size)):
        rest = sum(rows[i][j] * found[j] for j in range(i + 1, size))
        found[i] = (rows[i][size] - rest) / rows[i][i]
    return found
