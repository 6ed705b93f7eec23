"""Layers with a sliding window, paged: what slid out is freed, and answers stay mlx-lm's."""

from __future__ import annotations

import copy
import os
import random
import sys
from collections.abc import Callable
from typing import Any

import pytest
from support.family_configs import config_of
from support.models import random_tokens, tiny_config, tiny_model
from support.parity import family_model
from support.plain import plain_caches

# isort: split
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import cache as mlx_lm_cache

from mlx_paged import drop_in
from mlx_paged.core import PrefixQuery
from mlx_paged.drop_in import paged_store
from mlx_paged.drop_in.caches import PagedRotatingKVCache, sequence_of
from mlx_paged.drop_in.registry import forget_all, stores_of
from mlx_paged.drop_in.runner import WINDOW_SLACK

mlx_lm_generate = sys.modules["mlx_lm.generate"]
pytestmark = pytest.mark.usefixtures("paged")

BLOCK = 32
WINDOW = 24
# Blocks that rows of a window see at most, with those kept behind it and the one being written.
VIEW = (WINDOW + WINDOW_SLACK + BLOCK - 2) // BLOCK + 2
TEXT = random_tokens(np.random.default_rng(5), 700)


def mixed() -> nn.Module:
    """Full attention and windows in turn, as in Gemma 3."""
    kinds = ["full_attention", "sliding_attention"] * 2
    return tiny_model(tiny_config("llama", layer_types=kinds, sliding_window=WINDOW))


def only_windows() -> nn.Module:
    """Windows in all layers, as in Mistral 7B."""
    model = tiny_model(tiny_config("mistral", sliding_window=WINDOW))
    model.make_cache = lambda: [mlx_lm_cache.RotatingKVCache(WINDOW) for _ in model.layers]
    return model


KINDS: dict[str, Callable[[], nn.Module]] = {
    "mixed": mixed,
    "only windows": only_windows,
    "gemma3_text": lambda: family_model(config_of("gemma3_text")),
    "recurrent_gemma": lambda: family_model(config_of("recurrent_gemma")),
}
_models: dict[str, nn.Module] = {}


@pytest.fixture
def model(kind: str) -> nn.Module:
    """One model for all tests of a kind; each test begins with an empty store."""
    if kind not in _models:
        _models[kind] = KINDS[kind]()
    forget_all()
    return _models[kind]


kinds = pytest.mark.parametrize("kind", KINDS)
plain_kinds = pytest.mark.parametrize("kind", ["mixed", "only windows"])
one_kind = pytest.mark.parametrize("kind", ["mixed"])


def new_cache(model: nn.Module) -> list[Any]:
    return mlx_lm_cache.make_prompt_cache(model)


def tokens_of(model: nn.Module, prompt: list[int], **options: Any) -> list[int]:
    options.setdefault("max_tokens", 8)
    return [t for t, _ in mlx_lm_generate.generate_step(mx.array(prompt), model, **options)]


def plain_tokens(model: nn.Module, prompt: list[int], **options: Any) -> list[int]:
    return tokens_of(model, prompt, prompt_cache=plain_caches(model), **options)


def logits(model: nn.Module, tokens: list[int], caches: list[Any]) -> mx.array:
    return model(mx.array([tokens]), cache=caches)[0, -1]


def plain_logits(model: nn.Module, tokens: list[int]) -> mx.array:
    return logits(model, tokens, plain_caches(model))


def close(a: mx.array, b: mx.array) -> bool:
    return bool(mx.allclose(a, b, rtol=1e-4, atol=1e-3))


def integrity(model: nn.Module) -> None:
    for store in stores_of(model):
        store.check_integrity()


def is_bounded(model: nn.Module, num_sequences: int = 1) -> bool:
    windows = len(stores_of(model)[0].flat.windows)
    return drop_in.stats(model).num_used_window_blocks <= windows * VIEW * num_sequences


# --- Memory ---------------------------------------------------------------------------------------


@pytest.mark.one_in(9)
@kinds
def test_a_long_generation_holds_the_blocks_of_its_window(kind, model) -> None:
    caches = new_cache(model)
    store = drop_in.store(model)
    prompt = TEXT[:300]
    answer = []
    num_tokens = 3 * BLOCK
    steps = mlx_lm_generate.generate_step(
        mx.array(prompt), model, prompt_cache=caches, max_tokens=num_tokens, prefill_step_size=64
    )
    for i, (token, _) in enumerate(steps):
        answer.append(int(token))
        if i % 16 == 0:
            assert is_bounded(model), i
            integrity(model)
    assert answer == plain_tokens(model, prompt, max_tokens=num_tokens)
    stats = store.stats()
    assert stats.num_used_window_blocks > 0
    assert stats.num_used_blocks == 13  # of 396 tokens
    rotating = next(c for c in caches if isinstance(c, PagedRotatingKVCache))
    assert rotating.nbytes <= VIEW * BLOCK * store.bytes_per_token
    del caches, rotating, steps
    assert store.stats().num_used_window_blocks == 0


@plain_kinds
def test_calls_by_hand_hold_the_blocks_of_their_window(kind, model) -> None:
    caches = new_cache(model)
    for start in range(0, 600, 50):
        ours = logits(model, TEXT[start : start + 50], caches)
        # (What a step writes, and reads, is there until the next one.)
        most = VIEW + 50 // BLOCK + 1
        assert drop_in.stats(model).num_used_window_blocks <= most
    assert close(ours, plain_logits(model, TEXT[:600]))
    for token in TEXT[600:640]:
        ours = logits(model, [token], caches)
    assert is_bounded(model)
    assert close(ours, plain_logits(model, TEXT[:640]))
    integrity(model)


@pytest.mark.one_in(3)
@kinds
def test_a_batch_holds_the_blocks_of_its_windows(kind, model) -> None:
    texts = [TEXT[i : i + 120] for i in range(0, 240, 60)]
    num_tokens = 2 * BLOCK
    batch = mlx_lm_generate.BatchGenerator(model, max_tokens=num_tokens, prefill_step_size=64)
    uids = batch.insert(texts)
    answers: dict[int, list[int]] = {uid: [] for uid in uids}
    number = 0
    while responses := batch.next_generated():
        for r in responses:
            answers[r.uid].append(r.token)
        number += 1
        if number % 16 == 0:
            assert is_bounded(model, len(texts))
            integrity(model)
    expected = [plain_tokens(model, text, max_tokens=num_tokens) for text in texts]
    assert list(answers.values()) == expected


@pytest.mark.one_in(4)
@plain_kinds
def test_a_store_that_may_not_grow_uses_the_blocks_of_a_window_again(kind, model) -> None:
    store = drop_in.store(model)
    store.limit = 0
    caches = new_cache(model)
    before = store.stats()
    prompt = [*TEXT, *TEXT[1:]]
    options = {"prefill_step_size": 64, "max_tokens": 70}
    answer = tokens_of(model, prompt, prompt_cache=caches, **options)
    assert answer == plain_tokens(model, prompt, **options)
    stats = store.stats()
    # 1469 tokens are 46 blocks, more than the store had.
    assert stats.num_blocks > before.num_blocks
    assert stats.num_window_blocks == before.num_window_blocks
    integrity(model)


@plain_kinds
def test_blocks_of_a_window_move_when_the_store_shrinks(kind, model) -> None:
    store = drop_in.store(model)
    first, second = new_cache(model), new_cache(model)
    logits(model, TEXT[:1], second)
    logits(model, [*TEXT, *TEXT], first)  # in one piece, so all of it is in the window's pool
    logits(model, TEXT[1:200], second)
    [inner] = stores_of(model)
    num_blocks = inner.kv.attention[1].pool.num_blocks
    assert max(sequence_of(second).tables.attention[1].blocks) > 40
    del first
    store.clear()
    assert inner.kv.attention[1].pool.num_blocks < num_blocks
    assert max(sequence_of(second).tables.attention[1].blocks) < 40
    assert close(logits(model, [5], second), plain_logits(model, [*TEXT[:200], 5]))
    integrity(model)


# --- Prefixes -------------------------------------------------------------------------------------


@pytest.mark.one_in(4)
@kinds
def test_what_slid_out_of_a_window_is_found_by_others(kind, model) -> None:
    """Another text that leaves the first one in the middle of what one step computed, or before."""
    expected = tokens_of(model, TEXT[:500], prefill_step_size=128)
    assert expected == plain_tokens(model, TEXT[:500])
    has_states = stores_of(model)[0].has_states
    for cut in (499, 301, 120, 40):
        prompt = [*TEXT[:cut], 3, *TEXT[500:510]]
        wanted = plain_tokens(model, prompt)
        assert tokens_of(model, prompt) == wanted  # (a state is kept by the second, for a third)
        before = drop_in.stats(model).num_cached_tokens
        prompt[cut] = 4
        assert tokens_of(model, prompt) == plain_tokens(model, prompt)
        num_cached = drop_in.stats(model).num_cached_tokens - before
        assert num_cached >= (cut // BLOCK * BLOCK if has_states else cut), cut
    integrity(model)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", ["recurrent_gemma", "mixed", "only windows"])
def test_where_a_window_is_lost_the_prompt_is_computed(kind, model) -> None:
    tokens_of(model, TEXT[:500])
    [store] = stores_of(model)
    store.synchronize()
    store.kv.attention[1].limit_cached(2)  # as memory pressure would
    for cut in (480, 200, 499):
        prompt = [*TEXT[:cut], 3, *TEXT[500:510]]
        assert tokens_of(model, prompt) == plain_tokens(model, prompt), cut
    integrity(model)


@pytest.mark.parametrize("kind", ["recurrent_gemma"])
def test_a_prompt_continues_where_both_state_and_window_are(kind, model) -> None:
    tokens_of(model, TEXT[:300])
    tokens_of(model, TEXT[:500])
    [store] = stores_of(model)
    store.synchronize()
    tip = store.kv.match(PrefixQuery(TEXT[:500])).node
    assert tip.depth == 500 // BLOCK
    states = store.kv.states
    states.forget(tip)
    before = tip.ancestor(300 // BLOCK)  # the state before that is still there, its window is not
    assert before.entries[states.number]
    store.kv.attention[1].forget(before)
    assert store.kv.match(PrefixQuery(TEXT[:500])).num_full_blocks == 0
    assert tokens_of(model, TEXT[:500]) == plain_tokens(model, TEXT[:500])
    integrity(model)


@pytest.mark.one_in(4)
@kinds
def test_turns_of_a_chat(kind, model) -> None:
    text = list(TEXT[:200])
    num_prompts = 0
    for turn in range(4):
        expected = plain_tokens(model, text, max_tokens=40)
        before = drop_in.stats(model).num_cached_tokens if turn else 0
        assert tokens_of(model, text, max_tokens=40) == expected
        if turn:
            found = drop_in.stats(model).num_cached_tokens - before
            assert found >= (num_prompts // BLOCK - 1) * BLOCK
        text += expected
        num_prompts = len(text)
        text += TEXT[300 + 20 * turn : 320 + 20 * turn]
    integrity(model)


# --- Trimming -------------------------------------------------------------------------------------


@plain_kinds
def test_trimming_is_as_in_mlx_lm(kind, model) -> None:
    ours, theirs = new_cache(model), plain_caches(model)
    for part in (TEXT[:10], TEXT[10:20]):
        assert close(logits(model, part, ours), logits(model, part, theirs))
    for caches in (ours, theirs):  # the window is not full yet
        assert mlx_lm_cache.can_trim_prompt_cache(caches)
        assert mlx_lm_cache.trim_prompt_cache(caches, 5) == 5
    assert close(logits(model, TEXT[15:300], ours), logits(model, TEXT[15:300], theirs))
    logits(model, [TEXT[300]], ours)
    for caches in (ours, theirs):
        assert not mlx_lm_cache.can_trim_prompt_cache(caches)
        assert mlx_lm_cache.trim_prompt_cache(caches, 5) == 0
    rotating = next(c for c in ours if isinstance(c, PagedRotatingKVCache))
    assert rotating.offset == 301
    with pytest.raises(ValueError, match="n must be at most what can_trim_prompt_cache allows"):
        rotating.trim(250)
    assert rotating.offset == 301
    assert close(logits(model, [1, 2], ours), plain_logits(model, [*TEXT[:301], 1, 2]))
    for cache in ours:
        assert cache.trim(1000) == 303  # nothing is left that could be wrong
    assert close(logits(model, TEXT[:50], ours), plain_logits(model, TEXT[:50]))
    integrity(model)


@pytest.mark.one_in(5)
@kinds
def test_an_empty_prompt_is_answered_after_the_window_has_slid(kind, model) -> None:
    caches = new_cache(model)
    answer = tokens_of(model, TEXT[:400], prompt_cache=caches, max_tokens=20)
    again = copy.deepcopy(caches)
    assert tokens_of(model, [], prompt_cache=again, max_tokens=8) == plain_tokens(
        model, TEXT[:400] + answer
    )
    for text in (TEXT[:400] + answer, None):
        batch = mlx_lm_generate.BatchGenerator(model, max_tokens=8)
        if text is None and stores_of(model)[0].has_states:
            continue  # (without its text such a prompt cannot be computed again)
        all_tokens = None if text is None else [text]
        batch.insert([[]], caches=[copy.deepcopy(caches)], all_tokens=all_tokens)
        found = []
        while responses := batch.next_generated():
            found += [r.token for r in responses]
        assert found == plain_tokens(model, TEXT[:400] + answer)
    integrity(model)


@pytest.mark.one_in(7)
@plain_kinds
@pytest.mark.parametrize("num_draft_tokens", [3, 40])
def test_drafts_are_taken_back_after_the_window_has_slid(
    kind, model, num_draft_tokens, monkeypatch
) -> None:
    """(mlx-lm does not: its windows cannot be trimmed, and its answers are others then.)"""
    monkeypatch.setattr(paged_store, "WINDOW_SLACK", 1)
    draft = tiny_model(tiny_config("llama", num_hidden_layers=2), seed=4)
    kinds = ["sliding_attention", "full_attention"]
    windowed_draft = tiny_model(
        tiny_config("llama", num_hidden_layers=2, layer_types=kinds, sliding_window=10), seed=4
    )
    prompt = TEXT[:300]
    expected = plain_tokens(model, prompt, max_tokens=40)
    tokens_of(windowed_draft, TEXT[:270], max_tokens=1)  # has less of the prompt than the other
    for other in (draft, windowed_draft, model):
        steps = mlx_lm_generate.speculative_generate_step(
            mx.array(prompt), model, other, num_draft_tokens=num_draft_tokens, max_tokens=40
        )
        assert [int(token) for token, *_ in steps] == expected
        integrity(model)
        integrity(other)


# --- Files and dense caches -----------------------------------------------------------------------


@kinds
def test_files_hold_what_mlx_lms_do(kind, model, tmp_path) -> None:
    file = str(tmp_path / "cache.safetensors")
    caches = new_cache(model)
    answer = tokens_of(model, TEXT[:333], prompt_cache=caches)
    text = [*TEXT[:333], *answer, 3, 1, 4]
    expected = plain_tokens(model, text)
    mlx_lm_cache.save_prompt_cache(file, caches)
    theirs = plain_caches(model)
    tokens_of(model, TEXT[:333], prompt_cache=theirs)
    for a, b in zip(mlx_lm_cache.load_prompt_cache(file), theirs):
        assert type(a) is type(b)
        if isinstance(b, mlx_lm_cache.RotatingKVCache):
            assert (a.offset, a.size()) == (b.offset, b.size())
    loaded = mlx_lm_cache.load_prompt_cache(file)
    assert tokens_of(model, [3, 1, 4], prompt_cache=loaded) == expected
    batch = mlx_lm_generate.BatchGenerator(model, max_tokens=8)  # takes it into the store
    batch.insert([[3, 1, 4]], caches=[mlx_lm_cache.load_prompt_cache(file)])
    found = []
    while responses := batch.next_generated():
        found += [r.token for r in responses]
    assert found == expected
    again = new_cache(model)
    if not stores_of(model)[0].has_states:  # (which say nothing of their place)
        tokens_of(model, TEXT[:400], prompt_cache=again)  # other content, at another place
    for ours, source in zip(again, mlx_lm_cache.load_prompt_cache(file)):
        ours.state = source.state
    assert tokens_of(model, [3, 1, 4], prompt_cache=again) == expected
    integrity(model)


@plain_kinds
def test_layers_by_themselves(kind, model) -> None:
    """Code that calls layers itself, piece by piece, far beyond the window."""
    ours, theirs = new_cache(model), plain_caches(model)
    rng = np.random.default_rng(0)
    start = 0
    for length in (40, 70, 1, 1, 90, 1, 33, 64, 1):
        shape = (1, 2, length, 16)
        for a, b in zip(ours, theirs):
            keys, values = (mx.array(rng.normal(size=shape).astype(np.float32)) for _ in range(2))
            for x, y in zip(a.update_and_fetch(keys, values), b.update_and_fetch(keys, values)):
                if isinstance(b, mlx_lm_cache.RotatingKVCache) and length == 1:
                    y = b._temporal_order(y)
                assert mx.array_equal(x, y), (start, length)
        start += length
    assert is_bounded(model)
    integrity(model)


# --- At random ------------------------------------------------------------------------------------

SEEDS = range(int(os.environ.get("MLX_PAGED_WINDOW_SEEDS", "3")))


@pytest.mark.one_in(5)
@plain_kinds
@pytest.mark.parametrize("seed", SEEDS)
def test_random_lives(kind, model, seed) -> None:
    """Forks, trims, writes, generation, deaths, lost memory: against mlx-lm from the beginning."""
    rng = random.Random(seed)
    store = drop_in.store(model)
    lives: list[tuple[list[Any], list[int]]] = []
    for _ in range(40):
        action = rng.choice(["new", "fork", "trim", "write", "write", "generate", "die", "limit"])
        if not lives or (action == "new" and len(lives) < 5):
            lives.append((new_cache(model), []))
        caches, text = lives[i := rng.randrange(len(lives))]
        if action == "fork" and len(lives) < 6:
            lives.append((copy.deepcopy(caches), list(text)))
        elif action == "trim" and text:
            count = rng.randrange(1, len(text) + 1)
            if rng.random() < 0.5:
                count = mlx_lm_cache.trim_prompt_cache(caches, count)
            else:  # a little, as for drafts
                count = min(count, rng.randrange(1, 40))
                count = count if sequence_of(caches).can_trim_all(count) else 0
                sequence_of(caches).trim_all(count)
            del text[len(text) - count :]
        elif action == "write":
            tail = TEXT[:200] if not text else [rng.randrange(4) for _ in range(rng.randrange(90))]
            tail = tail or [1]
            ours = logits(model, tail, caches)
            text += tail
            assert close(ours, plain_logits(model, text))
        elif action == "generate":
            tail = TEXT[:150] if not text else [rng.randrange(4) for _ in range(rng.randrange(70))]
            tail = tail or [1]
            answer = tokens_of(model, tail, prompt_cache=caches, max_tokens=3, prefill_step_size=60)
            assert answer == plain_tokens(model, text + tail, max_tokens=3)
            text += tail + answer
        elif action == "die":
            lives.pop(i)
        elif action == "limit":
            store.limit_tokens = rng.choice([0, 400, 5000])
            if rng.random() < 0.3:
                store.clear()
        del caches
        assert all(c[0].offset == len(t) for c, t in lives)
        integrity(model)
    for caches, text in lives:
        assert tokens_of(model, [2], prompt_cache=caches) == plain_tokens(model, [*text, 2])
    lives.clear()
    del caches
    assert store.stats().num_used_window_blocks == store.stats().num_used_blocks == 0
