"""Models with recurrent state through mlx-lm's own interface, paged.

Answers are compared with single runs of plain mlx-lm, which pads nothing; its batches do, and are
wrong for these models.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
from support.family_configs import VOCAB_SIZE, config_of
from support.metal_stand_ins import standing_in
from support.parity import family_model
from support.plain import plain_caches, plain_mlx_lm

# isort: split
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import cache as mlx_lm_cache

from mlx_paged import drop_in
from mlx_paged.drop_in.caches import PagedArraysCache, sequence_of
from mlx_paged.drop_in.registry import stores_of
from mlx_paged.model.families import PROVEN
from mlx_paged.model.layout import Mode

mlx_lm_generate = sys.modules["mlx_lm.generate"]
pytestmark = pytest.mark.usefixtures("paged")

RECURRENT = sorted({*(m for m, mode in PROVEN.items() if mode is Mode.REGROUPED), "baichuan_m1"})
NUM_TOKENS = 6
_RNG = np.random.default_rng(3)
TEXT = [int(t) for t in _RNG.integers(1, VOCAB_SIZE, 120)]
# Eleven prompts of many lengths, some of which begin alike, and two of which are equal.
PROMPTS = [
    *(TEXT[i : i + length] for i, length in enumerate([1, 2, 7, 19, 33, 40])),
    TEXT[:70],
    [*TEXT[:64], 5, 6, 7],
    [*TEXT[:40], 9],
    TEXT[:70],
    [*TEXT[:70], *TEXT[90:97]],
]


def tokens_of(model: nn.Module, prompt: list[int], **options: Any) -> list[int]:
    options.setdefault("max_tokens", NUM_TOKENS)
    return [t for t, _ in mlx_lm_generate.generate_step(mx.array(prompt), model, **options)]


def plain_tokens(model: nn.Module, prompt: list[int], **options: Any) -> list[int]:
    """A single run of mlx-lm, with its own caches."""
    return tokens_of(model, prompt, prompt_cache=plain_caches(model), **options)


def batch_tokens(model: nn.Module, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    options.setdefault("max_tokens", NUM_TOKENS)
    batch = mlx_lm_generate.BatchGenerator(model, **options)
    return run(batch, batch.insert(prompts))


def run(batch: Any, uids: list[int]) -> list[list[int]]:
    answers: dict[int, list[int]] = {uid: [] for uid in uids}
    while responses := batch.next_generated():
        for r in responses:
            answers[r.uid].append(r.token)
    return list(answers.values())


def integrity(model: nn.Module) -> None:
    for store in stores_of(model):
        store.check_integrity()


@pytest.fixture(scope="module")
def models() -> dict[str, nn.Module]:
    return {}


@pytest.fixture
def model(models: dict[str, nn.Module], module: str) -> nn.Module:
    """One model for all tests of a family; each test begins with an empty store."""
    if module not in models:
        models[module] = family_model(config_of(module))
    return models[module]


@pytest.mark.parametrize("module", RECURRENT)
def test_answers_of_a_batch_are_those_of_single_runs(module, model, recwarn) -> None:
    with standing_in(module):
        expected = [plain_tokens(model, prompt) for prompt in PROMPTS]
        assert batch_tokens(model, PROMPTS) == expected
        stats = drop_in.stats(model)
        assert stats.num_cached_tokens >= 32 + 2 * 64  # they share, though they came together
        assert batch_tokens(model, PROMPTS, prefill_step_size=13) == expected
        assert [tokens_of(model, prompt) for prompt in PROMPTS] == expected
    integrity(model)
    assert not [w for w in recwarn if "mlx_paged" in str(w.message)]
