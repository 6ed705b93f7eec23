"""Chains: change each draft's logits in a block by the previous draft, so that a block is coherent.

DFlash 2 keeps a few candidates for each position and adds a bilinear form of the previous draft,
the head's state and the candidate. DSpark adds a low-rank transition from the previous draft.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn


class Chain(Protocol):
    """Changes one draft's logits by the previous draft."""

    def step(self, logits: mx.array, states: mx.array, before: mx.array) -> mx.array:
        """``[n, vocab_size]`` logits of one draft of each sequence -> the same, changed.

        Args:
            states: ``[n, hidden_size]``: the head's states that the logits were computed from.
            before: ``[n]`` int32: the token before each draft.
        """


@dataclass(frozen=True)
class SelectorConfig:
    """DFlash 2's choice of candidates.

    Attributes:
        rank: Size of the bilinear form.
        top_k: Candidates for each position.
    """

    rank: int
    top_k: int

    @classmethod
    def of(cls, own: Mapping[str, Any]) -> SelectorConfig:
        """Reads a head's options.

        Raises:
            KeyError, TypeError, ValueError: They do not fit.
        """
        top_k = int(own["selector_top_k"])
        if not 0 < top_k <= own["vocab_size"]:
            expected = f"from 1 to {own['vocab_size']}"
            raise ValueError(f"selector_top_k must be {expected} but is {top_k}")
        return cls(int(own["selector_rank"]), top_k)


class CandidateSelector(nn.Module):  # type: ignore[misc]
    """DFlash 2's chain. Only candidates are possible."""

    def __init__(self, config: SelectorConfig, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self._top_k = config.top_k
        self.predecessor_codebook = nn.Embedding(vocab_size, config.rank)
        self.successor_codebook = nn.Embedding(vocab_size, config.rank)
        self.hidden_projection = nn.Linear(hidden_size, config.rank, bias=False)

    def step(self, logits: mx.array, states: mx.array, before: mx.array) -> mx.array:
        """See `Chain`."""
        candidates = mx.argpartition(logits, -self._top_k, axis=-1)[:, -self._top_k :]
        form = self.predecessor_codebook(before) * self.hidden_projection(states)
        gains = (form[:, None] * self.successor_codebook(candidates)).sum(axis=-1)
        scores = mx.take_along_axis(logits, candidates, axis=-1) + gains
        impossible = mx.full(logits.shape, -mx.inf, scores.dtype)
        return mx.put_along_axis(impossible, candidates, scores, axis=-1)


class MarkovHead(nn.Module):  # type: ignore[misc]
    """DSpark's chain, of its "vanilla" kind."""

    def __init__(self, vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, vocab_size, bias=False)

    def step(self, logits: mx.array, states: mx.array, before: mx.array) -> mx.array:
        """See `Chain`."""
        changed: mx.array = logits + self.markov_w2(self.markov_w1(before))
        return changed
