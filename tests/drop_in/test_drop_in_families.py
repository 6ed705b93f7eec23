"""Every proven family through mlx-lm's own interface, paged, against mlx-lm's dense caches."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from model.test_parity_families import TOLERANCE
from support.family_config_parts import VOCAB_SIZE
from support.family_configs import config_of
from support.metal_stand_ins import standing_in
from support.parity import family_model, relative_rms
from support.plain import plain_caches

# isort: split
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import cache as mlx_lm_cache

from mlx_paged import drop_in
from mlx_paged.drop_in.caches import dense_copy, sequence_of
from mlx_paged.drop_in.paged_store import PagedStore
from mlx_paged.drop_in.registry import forget_all, stores_of
from mlx_paged.model.families import PROVEN
from mlx_paged.model.layout import Mode

mlx_lm_generate = sys.modules["mlx_lm.generate"]
pytestmark = pytest.mark.usefixtures("paged")

PAGED = sorted(PROVEN)
RECURRENT = {*(m for m, mode in PROVEN.items() if mode is Mode.REGROUPED), "baichuan_m1"}
TEXT = [int(t) for t in np.random.default_rng(5).integers(1, VOCAB_SIZE, 60)]


def logits(model: nn.Module, tokens: list[int], caches: list[Any]) -> np.ndarray:
    out = model(mx.array([tokens]), cache=caches)[0, -1]
    return np.array(out.astype(mx.float32), dtype=np.float64)


def dense_logits(model: nn.Module, *chunks: list[int]) -> np.ndarray:
    caches = plain_caches(model)
    return [logits(model, chunk, caches) for chunk in chunks][-1]


@pytest.fixture
def model(module: str) -> Iterator[nn.Module]:
    with standing_in(module):
        yield family_model(config_of(module))


@pytest.mark.one_in(16)
@pytest.mark.parametrize("module", PAGED)
def test_a_prompt_in_pieces_forks_and_files(module, model, tmp_path) -> None:
    caches = mlx_lm_cache.make_prompt_cache(model)
    assert sequence_of(caches) is not None, "it runs on dense caches"

    def check(got: np.ndarray, expected: np.ndarray) -> None:
        assert relative_rms(got, expected) < TOLERANCE

    pieces = [TEXT[:17], TEXT[17:18], TEXT[18:19], TEXT[19:41]]
    for i, piece in enumerate(pieces):
        check(logits(model, piece, caches), dense_logits(model, *pieces[: i + 1]))
    # A fork goes another way; the original goes on as if nothing had been.
    fork = copy.deepcopy(caches)
    check(logits(model, [7, 8], fork), dense_logits(model, *pieces, [7, 8]))
    # As mlx-lm's own caches, from memory and from a file.
    own = [dense_copy(c) for c in caches]
    check(logits(model, [5], own), dense_logits(model, *pieces, [5]))
    file = str(tmp_path / "cache.safetensors")
    mlx_lm_cache.save_prompt_cache(file, caches)
    loaded = mlx_lm_cache.load_prompt_cache(file)
    assert [type(c) for c in loaded] == [type(c) for c in plain_caches(model)]
    check(logits(model, [5], loaded), dense_logits(model, *pieces, [5]))
    if module in RECURRENT:  # as in mlx-lm
        assert not mlx_lm_cache.can_trim_prompt_cache(caches)
        check(logits(model, [3, 4], caches), dense_logits(model, *pieces, [3, 4]))
    else:
        assert mlx_lm_cache.trim_prompt_cache(caches, 9) == 9
        check(logits(model, [3, 4], caches), dense_logits(model, TEXT[:32], [3, 4]))
    for store in stores_of(model):
        store.check_integrity()


@pytest.mark.one_in(16)
@pytest.mark.parametrize("module", PAGED)
def test_a_batch_and_its_prefixes(module, model) -> None:
    texts = [TEXT[:50], TEXT[:40] + [3] * 9, TEXT[10:15]]
    for _ in range(2):
        batch = mlx_lm_generate.BatchGenerator(model, max_tokens=1, prefill_step_size=24)
        uids = batch.insert(texts)
        found = {}
        while responses := batch.next_generated():
            found.update({r.uid: np.array(r.logprobs.astype(mx.float32)) for r in responses})
        for uid, text in zip(uids, texts):
            expected = mx.array(dense_logits(model, text[:-1], text[-1:]))
            expected = np.array(expected - mx.logsumexp(expected))
            assert relative_rms(found[uid], expected) < TOLERANCE
    assert drop_in.stats(model).num_cached_tokens >= 32 + 2 * 32


# Llama 4's chunks are no whole blocks here, so it is compared at its first use, which evaluates
# its experts, and MLX's CPU backend multiplies those in float32 only.
@pytest.mark.one_in(8)
@pytest.mark.parametrize("module", [m for m in PAGED if m != "llama4"])
def test_logits_have_the_dtype_that_they_have_in_mlx_lm(module, model, monkeypatch) -> None:
    tokens = mx.array([TEXT[:3]])  # (nothing of this is evaluated)
    monkeypatch.setattr(PagedStore, "_schedule", lambda store: None)
    for dtype in (mx.float16, mx.bfloat16):
        model.set_dtype(dtype)
        forget_all()
        expected = model(tokens, cache=plain_caches(model)).dtype
        caches = mlx_lm_cache.make_prompt_cache(model)
        assert sequence_of(caches) is not None
        assert model(tokens, cache=caches).dtype == expected
