"""Tests that chunk boundaries in a prompt do not matter, in mlx-lm alone and with paged caches.

Other requests of a step, prefix hits and preemptions decide where chunks end. A family whose own
prefill of n tokens differs from a prefill of n - 1 and a decode has no answer to compare with.
"""

from __future__ import annotations

from typing import Any

import pytest
from support.family_config_parts import VOCAB_SIZE
from support.family_configs import config_of
from support.metal_stand_ins import standing_in
from support.models import dense_logits
from support.parity import Driver, family_model, relative_difference, relative_rms
from support.plain import plain_caches

# isort: split
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import KVCache, RotatingKVCache

from mlx_paged.errors import UnsupportedModelError
from mlx_paged.model.families import PROVEN
from mlx_paged.model.layout import Mode
from mlx_paged.model.wrap import build_paged_model, convert_to_paged

WINDOW = 5
TOKENS = np.random.default_rng(7).integers(0, VOCAB_SIZE, 24).tolist()
# The first tokens, around the window, and far behind it.
LENGTHS = (1, 2, 3, 5, 6, 7, 14, 22)
TOLERANCE = 1e-5  # RMS of the logits' difference over that of the logits, float32
# Its activations are bfloat16 in a float32 model too: a sum in another order may round otherwise.
LOOSER = {"muse_spark": 1e-3}

# Windows, chunks, recurrent state and sparse selections.
SENSITIVE = sorted(
    module
    for module, mode in PROVEN.items()
    if mode is not Mode.NATIVE
    or module == "llama4"
    or config_of(module) != config_of(module, window=WINDOW)
)


def all_logits(model: nn.Module, tokens: list[int]) -> np.ndarray:
    """``[num_tokens, vocab_size]`` by mlx-lm's own caches, in one forward."""
    logits = model(mx.array([tokens]), cache=plain_caches(model))
    return np.array(logits[0].astype(mx.float32))


def differences_of_cuts(model: nn.Module, expected: np.ndarray) -> list[float]:
    """Relative errors of a decode after n - 1 tokens, and of a second chunk, in mlx-lm alone."""
    cuts = [(TOKENS[: n - 1], TOKENS[n - 1 : n]) for n in LENGTHS[1:]]
    cuts += [(TOKENS[:4], TOKENS[4:]), (TOKENS[:9], TOKENS[9:])]
    return [
        relative_rms(dense_logits(model, cut), expected[len(cut[0]) + len(cut[1]) - 1])
        for cut in cuts
    ]


@pytest.mark.one_in(22)
@pytest.mark.parametrize("module", SENSITIVE)
def test_prompts_of_all_lengths_have_one_answer(module: str) -> None:
    tolerance = LOOSER.get(module, TOLERANCE)
    with standing_in(module):
        config = config_of(module, window=WINDOW)
        model = family_model(config)
        expected = all_logits(model, TOKENS)
        own = differences_of_cuts(model, expected)
        assert all(d < tolerance for d in own), f"mlx-lm's own: {own}"
        # Some begin and some go on, with as many rows, in one step.
        driver = Driver(build_paged_model(model, config, block_size=8))
        got = driver.step({f"{n} at once": TOKENS[:n] for n in LENGTHS})
        got |= driver.step({f"{n} at once": TOKENS[n : n + 1] for n in LENGTHS[:4]})
        got |= driver.step(
            {f"{n} in two": TOKENS[:n] for n in LENGTHS}
            | {f"{n} at once": TOKENS[n : n + 2] for n in LENGTHS[4:]}
        )
        got |= driver.step({f"{n} in two": TOKENS[n : n + 2] for n in LENGTHS})
    differences = {
        name: relative_rms(logits, expected[len(driver.sequences[name].tokens) - 1])
        for name, logits in got.items()
    }
    assert all(d < tolerance for d in differences.values()), differences


@pytest.mark.parametrize("module", ["phi3small", "plamo3"])
def test_what_depends_on_the_cut_in_mlx_lm_is_refused(module: str) -> None:
    """The reason why they are refused, seen in mlx-lm alone."""
    model = family_model(config_of(module, window=WINDOW))
    differences = differences_of_cuts(model, all_logits(model, TOKENS))
    assert sum(d > 1e-2 for d in differences) > len(differences) // 3, differences


def sliding_llama(window: int, cached: int) -> nn.Module:
    """A Llama whose masks have a window of another size than its caches."""
    model = family_model(config_of("llama", window=window))

    def make_cache(self: nn.Module) -> list[KVCache | RotatingKVCache]:
        return [kind for _ in range(2) for kind in (RotatingKVCache(max_size=cached), KVCache())]

    model.__class__ = type("Odd", (type(model),), {"make_cache": make_cache})
    return model


def test_a_mask_that_is_wider_than_its_cache_is_refused() -> None:
    model = sliding_llama(6, 5)
    assert max(differences_of_cuts(model, all_logits(model, TOKENS))) > 1e-2
    with pytest.raises(UnsupportedModelError, match="masks a window of 6 tokens over a cache of 5"):
        convert_to_paged(model, "llama", block_size=8)


def test_the_window_of_a_mask_is_seen_whatever_else_is_asked_of_the_cache() -> None:
    model = sliding_llama(6, 5)
    base = type(model).__call__

    def call(self: nn.Module, tokens: mx.array, cache: Any) -> mx.array:
        logits = base(self, tokens, cache=cache)
        cache[0].make_mask(tokens.shape[1])
        return logits

    model.__class__ = type("Asking", (type(model),), {"__call__": call})
    with pytest.raises(UnsupportedModelError, match="masks a window of 6 tokens over a cache of 5"):
        convert_to_paged(model, "llama", block_size=8)


def test_a_mask_that_is_narrower_than_its_cache_is_what_rows_see() -> None:
    model = sliding_llama(5, 9)
    assert max(differences_of_cuts(model, all_logits(model, TOKENS))) < TOLERANCE
    paged = convert_to_paged(model, "llama", block_size=8)
    assert paged.layout.mode.is_gathered
    assert max(relative_difference(model, Driver(paged), VOCAB_SIZE).values()) < TOLERANCE


@pytest.mark.parametrize(
    ("module", "mode"),
    [
        ("gemma3_text", Mode.GATHERED),
        ("gemma3_text", Mode.UNIFORM),
        ("qwen3_next", Mode.GATHERED),
        ("qwen3_next", Mode.UNIFORM),
        ("llama4", Mode.UNIFORM),
    ],
)
def test_dense_copies_are_right_for_layers_of_every_kind(module: str, mode: Mode) -> None:
    """Whatever an unusual checkpoint of a family has beside what must be copied."""
    model = family_model(config_of(module, window=WINDOW))
    paged = convert_to_paged(model, module, modes=[mode], block_size=8)
    assert max(relative_difference(model, Driver(paged), VOCAB_SIZE).values()) < TOLERANCE
