"""Parity of any model's paged forward with mlx-lm's dense caches, on one mixed step.

The driver replaces the engine, with shuffled blocks and poisoned pools; it needs no scheduler, so
it tests the device half alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map_with_path
from mlx_lm.utils import _get_classes

from mlx_paged.model.paged_model import PagedModel
from mlx_paged.model.plan import StateSlots, StepInputs
from support.models import dense_logits, poisoned, rms

NUM_STATE_SLOTS = 48


def family_model(config: Mapping[str, Any], *, seed: int = 0) -> nn.Module:
    """mlx-lm's model for a config, with weights that make every part matter.

    Parameters that mlx-lm initializes to zeros or ones (biases, sinks, decays, norms) get random
    values too: a zero sink or a decay of one would hide a wrong cache.
    """
    config = deepcopy(dict(config))  # some families modify it
    model_class, args_class = _get_classes(config=config)
    mx.random.seed(seed)
    model = model_class(args_class.from_dict(config))

    def vary(path: str, weight: mx.array) -> mx.array:
        if not mx.issubdtype(weight.dtype, mx.floating):
            return weight
        weight = weight.astype(mx.float32)
        noise = mx.random.normal(weight.shape)
        if weight.ndim == 1 or "norm" in path:
            return weight + 0.1 * noise
        if mx.all(weight == weight.reshape(-1)[0]).item():
            return weight + 0.2 * noise
        return weight * 2 if "proj" in path else weight

    model.update(tree_map_with_path(vary, model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    return model


@dataclass
class Tracked:
    """A sequence: its blocks, the tokens in them, and the slot of its state."""

    chunks: list[list[int]] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    slot: int = 0

    @property
    def tokens(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk]


class Driver:
    """Runs steps of a `PagedModel`. Pools are initially NaN, so unwritten slots become visible.

    Attributes:
        adapter_slot: Slot of the sequences' adapter; 0: they have none.
        without_adapter: Names of sequences that have none anyway.
    """

    def __init__(self, paged: PagedModel, *, num_blocks: int = 96, seed: int = 0) -> None:
        self.paged = paged
        paged.allocate(num_blocks, NUM_STATE_SLOTS if paged.layout.has_states else 0)
        for cache in paged.attention_caches:
            cache.key_pool = poisoned(cache.key_pool)
            cache.value_pool = poisoned(cache.value_pool)
        rng = np.random.default_rng(seed)
        self.sequences: dict[str, Tracked] = {}
        self._free = rng.permutation(np.arange(1, num_blocks)).tolist()
        self._free_slots = rng.permutation(np.arange(1, NUM_STATE_SLOTS)).tolist()
        self._copies: list[tuple[int, int]] = []
        self.adapter_slot = 0
        self.without_adapter: set[str] = set()

    def fork(self, name: str, source: str, num_tokens: int) -> None:
        """Starts a sequence with a prefix of another: full blocks are shared, the last is copied.

        With recurrent state, the prefix must be all of the other's tokens: its slot is shared.
        """
        size, old = self.paged.block_size, self.sequences[source]
        num_full, num_partial = divmod(num_tokens, size)
        assert not self.paged.layout.has_states or num_tokens == len(old.tokens)
        new = Tracked([old.tokens[:num_tokens]], old.blocks[:num_full], old.slot)
        if num_partial and self.paged.layout.attention:
            new.blocks.append(self._free.pop())
            self._copies.append((old.blocks[num_full], new.blocks[-1]))
        self.sequences[name] = new

    def preempt(self, name: str) -> list[int]:
        """Takes away a sequence's blocks and state; returns the tokens to recompute."""
        return self.sequences.pop(name).tokens

    def step(self, work: Mapping[str, Sequence[int]]) -> dict[str, np.ndarray]:
        """Runs one step; returns the ``[vocab_size]`` logits after each sequence's last token."""
        size = self.paged.block_size
        sequences = [self.sequences.setdefault(name, Tracked()) for name in work]
        reads = [seq.slot for seq in sequences]
        for seq, tokens in zip(sequences, work.values()):
            seq.chunks.append(list(tokens))
            while len(seq.blocks) * size < len(seq.tokens):
                seq.blocks.append(self._free.pop())
            seq.slot = self._free_slots.pop()
        if self._copies:
            self.paged.copy_blocks(mx.array(self._copies, dtype=mx.int32))
            self._copies = []
        lens = np.array([len(tokens) for tokens in work.values()])
        slots = [0 if name in self.without_adapter else self.adapter_slot for name in work]
        inputs = StepInputs(
            context_lens=np.array([len(seq.tokens) for seq in sequences]),
            query_lens=lens,
            tables=[seq.blocks for seq in sequences],
            logit_rows=np.cumsum(lens) - 1,
            state_slots=StateSlots(reads, [seq.slot for seq in sequences])
            if self.paged.layout.has_states
            else None,
            adapters=np.repeat(slots, lens) if self.adapter_slot else None,
        )
        flat = mx.array([token for tokens in work.values() for token in tokens], dtype=mx.int32)
        logits = self.paged.forward(flat, inputs)
        mx.eval(logits, *self.paged.pools())
        return dict(zip(work, np.array(logits.astype(mx.float32))))


def mixed_step(driver: Driver, new: Callable[[int], list[int]]) -> dict[str, np.ndarray]:
    """Brings sequences to one mixed step and returns its logits.

    That step computes a prefill, two decodes, the second chunk of a chunked prompt, the rest of a
    prompt whose prefix came from another sequence, and all of a preempted sequence again.
    """
    driver.step({"chunked": new(21)})
    driver.step({"long": new(37), "victim": new(9)})
    if driver.paged.layout.has_states:
        driver.fork("forked", "long", 37)
    driver.step({"short": new(5), "long": new(1), "victim": new(1)})
    again = driver.preempt("victim")
    driver.step({"long": new(1), "short": new(1)})
    if not driver.paged.layout.has_states:
        driver.fork("forked", "long", 30)
    return driver.step(
        {
            "long": new(1),
            "short": new(1),
            "prefill": new(17),
            "forked": new(9),
            "chunked": new(10),
            "victim": again + new(1),
        }
    )


def relative_difference(
    model: nn.Module, driver: Driver, vocab_size: int, seed: int = 1
) -> dict[str, float]:
    """RMS of the logits' difference over the RMS of the dense logits, for each sequence."""
    rng = np.random.default_rng(seed)
    logits = mixed_step(driver, lambda count: rng.integers(0, vocab_size, count).tolist())
    differences = {}
    for name, got in logits.items():
        expected = dense_logits(model, driver.sequences[name].chunks)
        differences[name] = relative_rms(got, expected)
    return differences


def relative_rms(got: np.ndarray, expected: np.ndarray) -> float:
    """RMS of the difference over the RMS of the expected values; NaN if any element is NaN.

    Tokens that a model excludes must be -inf in both, otherwise the difference is infinite.
    """
    ruled_out = np.isneginf(expected)
    if not np.array_equal(np.isneginf(got), ruled_out):
        return float("inf")
    return rms(got[~ruled_out] - expected[~ruled_out]) / rms(expected[~ruled_out])
