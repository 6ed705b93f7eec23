"""`mlx_paged.drop_in.store(model)`: looking at a store, capping, clearing; stores that shrink."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
from support.models import random_tokens, tiny_config, tiny_model
from support.plain import plain_mlx_lm

# isort: split
import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
from mlx_lm.models import cache as mlx_lm_cache

import mlx_paged
from mlx_paged import drop_in
from mlx_paged.drop_in.model_store import NoStoreError
from mlx_paged.drop_in.registry import stores_of
from mlx_paged.errors import InvalidParameterError

mlx_lm_generate = sys.modules["mlx_lm.generate"]
pytestmark = pytest.mark.usefixtures("paged")
_rng = np.random.default_rng(11)
LONG = random_tokens(_rng, 1500)  # more than a store has at first
SHORT = random_tokens(_rng, 90)


@pytest.fixture
def model() -> nn.Module:
    return tiny_model(tiny_config("llama"))


def tokens_of(model: nn.Module, prompt: list[int], **options: Any) -> list[int]:
    options.setdefault("max_tokens", 6)
    return [t for t, _ in mlx_lm_generate.generate_step(mx.array(prompt), model, **options)]


def plain(model: nn.Module, prompt: list[int]) -> list[int]:
    with plain_mlx_lm():
        return tokens_of(model, prompt)


def integrity(model: nn.Module) -> None:
    for store in stores_of(model):
        store.check_integrity()
        for pool in store.pools():
            assert len(pool) == store.kv.pool.num_blocks


def test_what_a_store_shows(model) -> None:
    store = drop_in.store(model)  # made here
    assert store.stats() == drop_in.stats(model)
    assert store.block_size == 32
    assert store.bytes_per_token == 4 * 2 * 2 * 16 * 4  # layers, keys and values, heads, dim, fp32
    caches = mlx_lm_cache.make_prompt_cache(model)
    tokens_of(model, SHORT, prompt_cache=caches)
    stats = store.stats()
    assert stats.num_used_blocks == 3  # of 96 tokens
    assert stats.num_used_blocks + stats.num_cached_blocks + stats.num_free_blocks == 32
    del caches
    assert store.stats().num_used_blocks == 0
    assert store.stats().num_cached_blocks == 3
    assert store.nbytes == store.stats().nbytes == 33 * 32 * store.bytes_per_token
    assert "3 cached, 29 free" in repr(store)


def test_models_without_a_store_say_why(model, recwarn) -> None:
    from mlx_lm.models import phi3small

    with pytest.raises(InvalidParameterError, match=r"^model must be a model as mlx_lm\.load"):
        drop_in.store("a path")
    other = nn.Linear(2, 2)
    with pytest.raises(NoStoreError, match="Linear"):
        drop_in.store(other)
    with pytest.raises(NoStoreError, match=r"no paged store: .*'phi3small'"):
        drop_in.store(unproven(phi3small))
    store = drop_in.store(model)
    mlx_paged.unpatch()
    with pytest.raises(NoStoreError, match="not paged at the moment"):
        drop_in.store(model)
    with pytest.raises(NoStoreError, match="forgotten"):
        store.stats()
    mlx_paged.patch()
    drop_in.store(model)


def unproven(module: Any) -> nn.Module:
    """A model whose family is not proven."""
    args = module.ModelArgs(
        model_type="phi3small", hidden_size=64, dense_attention_every_n_layers=2,
        ff_intermediate_size=64, gegelu_limit=20, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=96, layer_norm_epsilon=1e-5,
        blocksparse_block_size=32, blocksparse_num_local_blocks=2, blocksparse_vert_stride=2,
    )  # fmt: skip
    return module.Model(args)


@pytest.mark.parametrize("value", [-1, 1.5, "1", True, None])
def test_limits_are_checked(model, value) -> None:
    store = drop_in.store(model)
    for name in ("limit", "limit_tokens"):
        with pytest.raises(InvalidParameterError, match=f"^{name} must be a number of"):
            setattr(store, name, value)


def test_clearing_forgets_prefixes_and_gives_memory_back(model) -> None:
    expected = plain(model, LONG)
    store = drop_in.store(model)
    least = store.nbytes
    assert tokens_of(model, LONG) == expected
    grown = store.nbytes
    assert grown > least
    assert store.clear() == grown - least
    assert store.stats().num_cached_blocks == 0
    assert tokens_of(model, LONG) == expected
    assert store.stats().num_cached_tokens == 0  # nothing was found
    integrity(model)


def test_live_caches_go_on_when_a_store_is_cleared_and_shrinks(model) -> None:
    """They lie where they must move: the highest blocks are theirs."""
    follow_up = SHORT[:20]
    expected = plain(model, [*LONG[:200], *follow_up])
    store = drop_in.store(model)
    tokens_of(model, LONG)
    tokens_of(model, LONG[::-1])
    caches = mlx_lm_cache.make_prompt_cache(model)
    model(mx.array([LONG[:200]]), cache=caches)  # (nobody knows its tokens: blocks of its own)
    forked = copy.deepcopy(caches)
    [own] = stores_of(model)
    assert max(caches[0].sequence.tables.blocks) > 40
    grown = store.nbytes
    assert store.clear() > 0
    assert store.nbytes < grown / 2
    assert max(caches[0].sequence.tables.blocks) < own.kv.pool.num_blocks
    integrity(model)
    for each in (caches, forked):
        assert tokens_of(model, follow_up, prompt_cache=each) == expected
    integrity(model)


def test_a_limit_in_bytes_or_tokens_holds_and_prefixes_within_it_stay(model) -> None:
    expected = plain(model, SHORT)
    store = drop_in.store(model)
    tokens_of(model, LONG)
    tokens_of(model, LONG[::-1])
    assert tokens_of(model, SHORT) == expected
    store.limit_tokens = 1024 + 32
    assert store.limit == (1024 + 32) * store.bytes_per_token
    assert store.nbytes <= store.limit
    assert store.stats().num_cached_blocks > 0
    found = store.stats().num_cached_tokens
    assert tokens_of(model, SHORT) == expected  # the newest are kept
    assert store.stats().num_cached_tokens == found + len(SHORT) - 1
    integrity(model)
    store.limit = 0
    assert store.nbytes <= (1024 + 32) * store.bytes_per_token  # what a store has at least
    # The limit stays when the weights change.
    model.update({"model": {"embed_tokens": {"weight": model.model.embed_tokens.weight * 2}}})
    tokens_of(model, SHORT)
    assert drop_in.store(model).limit == 0


def test_a_store_that_grew_for_live_caches_shrinks_when_they_are_gone(model) -> None:
    store = drop_in.store(model)
    store.limit_tokens = 1024
    least = store.nbytes
    caches = [mlx_lm_cache.make_prompt_cache(model) for _ in range(3)]
    for i, each in enumerate(caches):
        tokens_of(model, LONG[i:], prompt_cache=each)
    active = mx.get_active_memory()
    grown = store.nbytes
    assert grown >= 3 * 1500 * store.bytes_per_token
    del caches, each
    assert store.nbytes == least
    assert active - mx.get_active_memory() >= (grown - least) * 0.9  # the device has it back
    integrity(model)


def test_progress_is_reported_as_by_mlx_lm(model) -> None:
    """The entire sequence of calls, for a prompt of which nothing is cached."""

    def reported(prompt: list[int], **options: Any) -> list[tuple[int, int]]:
        calls: list[tuple[int, int]] = []
        tokens_of(
            model,
            prompt,
            max_tokens=2,
            prefill_step_size=64,
            prompt_progress_callback=lambda *call: calls.append(call),
            **options,
        )
        return calls

    for length in (1, 2, 31, 32, 64, 65, 66, 129, 300):
        prompt = LONG[:length]
        with plain_mlx_lm():
            expected = reported(prompt)
            caches = mlx_lm_cache.make_prompt_cache(model)
            expected_more = [reported(prompt, prompt_cache=caches) for _ in range(2)]
        assert reported(prompt) == expected
        # Now it is in the store, but for the last token.
        first, *others, last = reported(prompt)
        assert (first, last) == (expected[0], expected[-1])
        assert others == ([(length - 1, length)] if length > 1 else [])
        drop_in.store(model).clear()
        caches = mlx_lm_cache.make_prompt_cache(model)
        assert [reported(prompt, prompt_cache=caches) for _ in range(2)] == expected_more
        drop_in.store(model).clear()


def test_batches_report_progress_as_mlx_lm_does(model) -> None:
    def reported(prompt: list[int]) -> list[Any]:
        batch = mlx_lm_generate.BatchGenerator(model, max_tokens=2, prefill_step_size=64)
        batch.insert([prompt])
        found: list[Any] = []
        while True:
            prompts, tokens = batch.next()
            found += [(r.progress, r.end_of_segment, r.end_of_prompt) for r in prompts]
            if any(r.finish_reason for r in tokens):
                return found

    for length in (1, 2, 31, 64, 65, 129, 300):
        with plain_mlx_lm():
            expected = reported(LONG[:length])
        assert reported(LONG[:length]) == expected
        assert reported(LONG[:length])[-1] == expected[-1]
        drop_in.store(model).clear()


def test_the_function_is_not_hidden_by_a_module() -> None:
    assert callable(drop_in.store)
    assert callable(mlx_lm.generate)
