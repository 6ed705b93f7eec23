"""What the sampler is told of the rows of a step. Plain numbers and NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]

#: Tokens that may follow: ``[vocab_size]`` booleans, or 32 tokens to an (u)int32, lowest bit first.
Mask = npt.NDArray[np.bool_] | npt.NDArray[np.integer]

#: Stands in `Additions.after` for an addition that does not depend on the newest token.
ALWAYS = -1


class Additions(NamedTuple):
    """Numbers to add to single logits: biases, and -inf for tokens that must not come.

    An addition may depend on the newest token of the row, which may still be on the device.
    """

    ids: IntArray  # [m]; an id may occur again, with -inf
    values: FloatArray  # [m]
    after: IntArray  # [m]: it holds where this is the newest token; ALWAYS


class Penalties(NamedTuple):
    """Tokens that a row has had, but for the newest one if that is still on the device."""

    ids: IntArray  # [m], no id twice
    counts: IntArray  # [m]: times the answer has it; 0: only the prompt does
    repetition: float
    presence: float
    frequency: float


class Edits(NamedTuple):
    """How to change a row's logits before a token is chosen."""

    additions: Additions | None = None
    penalties: Penalties | None = None
    allowed: Mask | None = None
    # Takes the newest token if that was in flight, else None; returns None where all may follow.
    mask: Callable[[int | None], Mask | None] | None = None


class SamplingRow(NamedTuple):
    """What the sampler needs to know of one row.

    Randomness is counter-based: it depends on `seed` and `position` alone, so a row's tokens do not
    depend on who shares its batch, nor on how its prompt was cut into chunks.
    """

    temperature: float  # 0: greedy
    seed: int  # any integer; its low 32 bits count
    position: int  # of the token to be chosen
    top_k: int = 0  # below 1: all
    top_p: float = 1.0
    min_p: float = 0.0
    edits: Edits | None = None
    logprobs: int | None = None  # likeliest tokens to report besides the chosen one


@dataclass(frozen=True)
class SamplingRows:
    """The rows of a step, a column for each number; n is `num_rows`."""

    temperature: FloatArray  # [n] float32
    seed: npt.NDArray[np.uint32]  # [n]: their low 32 bits
    position: npt.NDArray[np.uint32]  # [n]
    top_k: npt.NDArray[np.int64]  # [n]
    top_p: npt.NDArray[np.float64]  # [n]
    min_p: npt.NDArray[np.float64]  # [n]
    edits: list[tuple[int, Edits]]  # of those rows that have any
    logprobs: list[tuple[int, int]]  # of those rows that ask for them: how many

    @classmethod
    def of(cls, rows: Sequence[SamplingRow] | SamplingRows) -> SamplingRows:
        """Columns from rows."""
        if isinstance(rows, SamplingRows):
            return rows
        columns = list(zip(*rows)) or [()] * len(SamplingRow._fields)
        temperature, seeds, positions, top_k, top_p, min_p, edits, logprobs = columns
        return cls(
            np.array(temperature, dtype=np.float32),
            np.array([seed & 0xFFFFFFFF for seed in seeds], dtype=np.uint32),
            np.array(positions, dtype=np.uint32),
            np.array(top_k, dtype=np.int64),
            np.array(top_p, dtype=np.float64),
            np.array(min_p, dtype=np.float64),
            [(i, edit) for i, edit in enumerate(edits) if edit is not None],
            [(i, count) for i, count in enumerate(logprobs) if count is not None],
        )

    def __len__(self) -> int:
        return len(self.temperature)

    def only(self, at: npt.NDArray[np.intp]) -> SamplingRows:
        """Some of the rows, as far as drawing from them goes: without edits and reports."""
        return SamplingRows(
            self.temperature[at],
            self.seed[at],
            self.position[at],
            self.top_k[at],
            self.top_p[at],
            self.min_p[at],
            [],
            [],
        )


class InFlight(NamedTuple):
    """The newest tokens of the rows, where the step before is still sampling them."""

    tokens: mx.array  # [num_samples of the step before] int32
    source: IntArray  # [num_rows] entry of `tokens`; -1: the row's newest token is known

    def on_device(self) -> mx.array:
        """``[num_rows]`` int32: the newest token of each row, -1 where it is known already."""
        source = mx.array(self.source)
        return mx.where(source < 0, -1, self.tokens[mx.maximum(source, 0)])

    def on_host(self) -> list[int | None]:
        """The same after waiting for it. (`tokens` itself is read: an operation on it would queue
        up behind the step that has been launched meanwhile.)"""
        tokens = np.array(self.tokens)
        return [None if i < 0 else int(tokens[i]) for i in self.source]
