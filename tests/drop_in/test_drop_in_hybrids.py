"""Models with recurrent state through mlx-lm's own interface, paged.

Answers are compared with single runs of plain mlx-lm, which pads nothing; its batches do, and are
wrong for these models.
"""

from __future__ import annotations

import copy
import sys
import threading
from typing import Any

import pytest
from support.family_config_parts import VOCAB_SIZE
from support.family_configs import config_of
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
from mlx_paged.drop_in.registry import forget_all, stores_of
from mlx_paged.model.families import PROVEN
from mlx_paged.model.layout import LayerSpec, Mode

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


@pytest.mark.one_in(13)
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


# One family for each kind of cache: states beside attention, states alone, both in one layer's
# list, a window, a state of integers that grows with the first tokens.
KINDS = ["jamba", "mamba", "falcon_h1", "recurrent_gemma", "longcat_flash_ngram"]
HYBRID = pytest.mark.parametrize("module", ["jamba"])
kinds = pytest.mark.parametrize("module", KINDS)


def known_tokens(model: nn.Module) -> int:
    return drop_in.stats(model).num_cached_tokens


# --- Prefixes -------------------------------------------------------------------------------------


@kinds
def test_a_prompt_is_computed_from_its_last_block_on(module, model) -> None:
    prompt = TEXT[:100]
    expected = plain_tokens(model, prompt)
    assert tokens_of(model, prompt) == expected
    assert known_tokens(model) == 0
    assert tokens_of(model, prompt) == expected
    assert known_tokens(model) == 96
    integrity(model)


@HYBRID
def test_a_third_prompt_continues_where_a_second_one_left_the_first(module, model) -> None:
    head = TEXT[:70]
    for tail, num_known in [([1] * 30, 0), ([2] * 30, 0), ([3] * 30, 64)]:
        before = drop_in.stats(model)
        assert tokens_of(model, head + tail) == plain_tokens(model, head + tail)
        assert known_tokens(model) - (before.num_cached_tokens if before else 0) == num_known


@HYBRID
@pytest.mark.parametrize("in_batch", [False, True])
def test_the_next_turn_finds_the_answer(module, model, in_batch) -> None:
    prompt = TEXT[:20]
    answer = plain_tokens(model, prompt, max_tokens=60)
    if in_batch:
        assert batch_tokens(model, [prompt], max_tokens=60) == [answer]
    else:
        assert tokens_of(model, prompt, max_tokens=60) == answer
    turn = [*prompt, *answer, *TEXT[50:60]]
    assert tokens_of(model, turn) == plain_tokens(model, turn)
    assert known_tokens(model) == 64
    # Only the newest state of an answer is kept.
    [store] = stores_of(model)
    assert len(store.snapshots) == 2  # (the other is that of `turn`, whose prompt has 90 tokens)


@HYBRID
def test_prompts_that_come_together_share_whatever_the_steps(module, model) -> None:
    head = TEXT[:75]
    prompts = [head + [t] * 10 for t in range(1, 6)]
    expected = [plain_tokens(model, prompt) for prompt in prompts]
    for step in (2048, 50, 7):
        forget_all()
        assert batch_tokens(model, prompts, prefill_step_size=step) == expected
        assert known_tokens(model) == 4 * 64
        integrity(model)


@HYBRID
def test_states_that_nobody_uses_take_limited_memory(module, model, monkeypatch) -> None:
    monkeypatch.setenv("MLX_PAGED_CACHE_BYTES", "300000")
    prompts = [[t, *TEXT[:50]] for t in range(1, 40)]
    expected = [plain_tokens(model, prompt, max_tokens=2) for prompt in prompts[:3]]
    for prompt in prompts:
        tokens_of(model, prompt, max_tokens=2)
    [store] = stores_of(model)
    state_bytes = store.flat.layout.bytes_per_slot
    assert 1 < len(store.snapshots) <= 150_000 // state_bytes < len(prompts)
    assert store.flat.states.nbytes == len(store.snapshots) * state_bytes
    assert [tokens_of(model, prompt, max_tokens=2) for prompt in prompts[:3]] == expected
    integrity(model)


@HYBRID
def test_sequences_that_have_ended_hold_no_state_of_others(module, model) -> None:
    batch = mlx_lm_generate.BatchGenerator(model, max_tokens=3)
    batch.insert([[t, *TEXT[:9]] for t in range(1, 9)])
    kept = []
    while responses := batch.next_generated():
        kept += [r.prompt_cache for r in responses if r.prompt_cache is not None][:1]
    del batch, responses
    [store] = stores_of(model)
    store.synchronize()
    assert store.flat.states.nbytes == len(kept) * store.flat.layout.bytes_per_slot
    assert sum(c.nbytes for c in kept[0] if isinstance(c, PagedArraysCache)) == (
        store.flat.layout.bytes_per_slot
    )


@HYBRID
def test_other_weights_do_not_meet_old_states(module, model) -> None:
    prompt = TEXT[:70]
    tokens_of(model, prompt)
    [store] = stores_of(model)
    assert len(store.snapshots) == 1
    embeddings = model.model.embed_tokens
    weight = embeddings.weight
    try:
        embeddings.weight = weight[::-1]
        assert tokens_of(model, prompt) == plain_tokens(model, prompt)
        assert known_tokens(model) == 0
        store.stats()  # (an old store lets go when it is called)
        assert len(store.snapshots) == 0  # nobody will ask for these again
    finally:
        embeddings.weight = weight


# --- Prompt caches --------------------------------------------------------------------------------


def same_content(ours: list[Any], theirs: list[Any]) -> bool:
    """True if caches hold the same, up to rounding."""

    def leaves(cache: Any) -> list[Any]:
        if isinstance(cache, mlx_lm_cache.CacheList):
            return [leaf for part in cache.caches for leaf in leaves(part)]
        return [cache]

    pairs = [pair for a, b in zip(ours, theirs) for pair in zip(leaves(a), leaves(b))]
    for a, b in pairs:
        assert isinstance(a, type(b)), (a, b)
        if isinstance(b, mlx_lm_cache.ArraysCache):
            states = list(zip(a.cache, b.cache))
        elif isinstance(b, mlx_lm_cache.RotatingKVCache):
            states = [(a.keys, b._temporal_order(b.keys)[:, :, -b.size() :])]
        else:
            states = list(zip(a.keys_and_values(), b.keys_and_values()))
        for x, y in states:
            if x.dtype != y.dtype or not mx.allclose(x, y, rtol=1e-3, atol=1e-3):
                return False
    return len(ours) == len(theirs)


@kinds
def test_caches_have_the_content_of_mlx_lms(module, model, tmp_path) -> None:
    ours, theirs = mlx_lm_cache.make_prompt_cache(model), plain_caches(model)
    assert not mlx_lm_cache.can_trim_prompt_cache(ours)
    assert mlx_lm_cache.trim_prompt_cache(ours, 3) == 0
    file = str(tmp_path / "cache.safetensors")
    for start, end in [(0, 40), (40, 41), (41, 60)]:
        for caches in (ours, theirs):
            tokens_of(model, TEXT[start:end], prompt_cache=caches, max_tokens=0)
        assert same_content(ours, theirs)
    assert [c.nbytes > 0 for c in ours] == [c.nbytes > 0 for c in theirs]
    expected = tokens_of(model, TEXT[60:70], prompt_cache=copy.deepcopy(theirs))
    # Files: ours in plain mlx-lm, plain mlx-lm's here.
    mlx_lm_cache.save_prompt_cache(file, ours, {"key": "value"})
    with plain_mlx_lm():
        loaded, metadata = mlx_lm_cache.load_prompt_cache(file, return_metadata=True)
        assert metadata == {"key": "value"}
        assert [type(c) for c in loaded] == [type(c) for c in theirs]
        assert tokens_of(model, TEXT[60:70], prompt_cache=loaded) == expected
        mlx_lm_cache.save_prompt_cache(file, theirs)
    loaded = mlx_lm_cache.load_prompt_cache(file)
    assert tokens_of(model, TEXT[60:70], prompt_cache=copy.deepcopy(loaded)) == expected
    ours = mlx_lm_cache.make_prompt_cache(model)  # (plain mlx-lm has forgotten the store)
    for source, target in zip(loaded, ours):
        if not isinstance(target, mlx_lm_cache.CacheList):
            target.state = source.state
            assert same_content([target], [source])
    batch = mlx_lm_generate.BatchGenerator(model, max_tokens=NUM_TOKENS)
    uids = batch.insert([TEXT[60:70]] * 2, caches=[loaded, copy.deepcopy(loaded)])
    assert batch._paged.sequences(uids)  # taken in, not run beside
    assert run(batch, uids) == [expected] * 2
    integrity(model)


@pytest.mark.one_in(8)
@kinds
def test_a_cache_goes_from_turn_to_turn_and_its_copies_part_ways(module, model) -> None:
    caches, text, forks = mlx_lm_cache.make_prompt_cache(model), [], []
    for turn in ([*TEXT[:37]], [*TEXT[40:45]], [*TEXT[60:100]]):
        forks.append((copy.deepcopy(caches), list(text)))
        text += turn
        answer = tokens_of(model, turn, prompt_cache=caches, max_tokens=9)
        assert answer == plain_tokens(model, text, max_tokens=9)
        text += answer
    for fork, before in forks:
        turn = TEXT[100:104]
        assert tokens_of(model, turn, prompt_cache=fork) == plain_tokens(model, before + turn)
    assert tokens_of(model, [3], prompt_cache=caches) == plain_tokens(model, [*text, 3])
    integrity(model)


@kinds
def test_the_model_can_be_called_by_hand(module, model) -> None:
    caches, expected = mlx_lm_cache.make_prompt_cache(model), plain_caches(model)
    for tokens in ([TEXT[:9], TEXT[9:18]], [[4], [5]], [TEXT[20:37], TEXT[50:67]]):
        out, dense = (model(mx.array(tokens), cache=c) for c in (caches, expected))
        assert mx.allclose(out, dense, rtol=1e-3, atol=1e-3)
    assert sequence_of(caches) is not None
    assert same_content(caches, expected)


@pytest.mark.parametrize("num_tokens", [1, 2])
@pytest.mark.parametrize("module", ["longcat_flash_ngram"])
def test_a_state_that_still_grows_is_taken_in(module, model, num_tokens) -> None:
    caches = plain_caches(model)
    tokens_of(model, TEXT[:num_tokens], prompt_cache=caches, max_tokens=0)
    batch = mlx_lm_generate.BatchGenerator(model, max_tokens=NUM_TOKENS)
    uids = batch.insert([TEXT[num_tokens:9]], caches=[caches])
    assert batch._paged.sequences(uids)
    assert run(batch, uids) == [plain_tokens(model, TEXT[:9])]


@HYBRID
def test_states_are_evaluated_with_the_pools_and_once(module, model, monkeypatch) -> None:
    monkeypatch.setattr(threading, "active_count", lambda: 1)  # so a call by hand is lazy
    caches = mlx_lm_cache.make_prompt_cache(model)
    [store] = stores_of(model)
    num_states = sum(len(spec.shapes) for spec in store.flat.layout.states)
    model(mx.array([TEXT[:5]]), cache=caches)
    assert store.flat.states.has_unfinished
    assert len(store.flat.states.unfinished()) == num_states
    assert not store.flat.states.has_unfinished and not store.flat.states.unfinished()


@HYBRID
def test_parts_of_a_model_find_dense_states(module, model) -> None:
    caches, expected = mlx_lm_cache.make_prompt_cache(model), plain_caches(model)
    for tokens in (TEXT[:9], TEXT[9:10]):
        a, b = (model.model(mx.array([tokens]), c) for c in (caches, expected))
        assert mx.allclose(a, b, rtol=1e-3, atol=1e-3)
    # And the whole model goes on from there; nobody knows which tokens these are.
    a, b = (model(mx.array([TEXT[10:20]]), cache=c) for c in (caches, expected))
    assert mx.allclose(a, b, rtol=1e-3, atol=1e-3)
    answers = [tokens_of(model, TEXT[20:30], prompt_cache=c) for c in (caches, expected)]
    assert answers[0] == answers[1]
    assert known_tokens(model) == 0


@HYBRID
def test_states_that_do_not_fit_are_refused(module, model) -> None:
    cache = mlx_lm_cache.make_prompt_cache(model)[0]
    with pytest.raises(ValueError, match="recurrent state must be of shape"):
        cache[0] = mx.zeros((1, 3, 7))
    with pytest.raises(ValueError, match="recurrent state must be 2 arrays but got 1"):
        cache.cache = [None]
    with pytest.raises(ValueError, match="of one batch"):
        shapes = stores_of(model)[0].flat.layout.states[0].shapes
        cache.cache = [mx.zeros((1, *shapes[0])), mx.zeros((2, *shapes[1]))]
    with pytest.raises(ValueError, match="without padding"):
        cache.state = ([None, None], mx.array([1]), None)
    tokens_of(model, TEXT[:5], prompt_cache=(caches := mlx_lm_cache.make_prompt_cache(model)))
    with pytest.raises(ValueError, match="batch must be 1"):
        caches[0].cache = [mx.zeros((2, *shape)) for shape in shapes]
    # A reader owns the arrays it read.
    state = caches[0][0]
    state += 1
    assert not mx.array_equal(caches[0][0], state)


@HYBRID
def test_a_cache_that_has_the_whole_prompt_answers(module, model) -> None:
    prompt = TEXT[:40]
    expected = plain_tokens(model, prompt)
    caches = mlx_lm_cache.make_prompt_cache(model)
    tokens_of(model, prompt, prompt_cache=caches, max_tokens=0)
    copied = copy.deepcopy(caches)
    assert tokens_of(model, [], prompt_cache=caches) == expected
    batch = mlx_lm_generate.BatchGenerator(model, max_tokens=NUM_TOKENS)
    uids = batch.insert([[]], caches=[copied], all_tokens=[prompt])
    assert run(batch, uids) == [expected]


@HYBRID
def test_drafts_are_refused_as_by_mlx_lm(module, model) -> None:
    steps = mlx_lm_generate.speculative_generate_step(mx.array(TEXT[:5]), model, model)
    with pytest.raises(ValueError, match="requires a trimmable prompt cache"):
        next(steps)


@pytest.fixture(scope="module")
def quantizable() -> nn.Module:
    """Jamba with heads that MLX can quantize."""
    return family_model({**config_of("jamba"), "num_attention_heads": 2, "num_key_value_heads": 1})


def test_quantized_keys_lie_beside_states(quantizable) -> None:
    model = quantizable
    options = {"kv_group_size": 32, "quantized_kv_start": 30}
    expected = plain_tokens(model, TEXT[:50], kv_bits=4, **options)
    assert tokens_of(model, TEXT[:50], kv_bits=4, **options) == expected
    tokens_of(model, TEXT[:50], kv_bits=8, **options)
    [spec] = {s for s in stores_of(model)[-1].flat.specs if isinstance(s, LayerSpec)}
    assert spec.kv_format.name == "int8"


# --- Batches --------------------------------------------------------------------------------------


@pytest.mark.one_in(6)
@kinds
def test_sequences_come_and_go_and_their_caches_too(module, model) -> None:
    expected = [plain_tokens(model, prompt, max_tokens=12) for prompt in PROMPTS[2:7]]
    batch = mlx_lm_generate.BatchGenerator(model, max_tokens=12)
    answers: dict[int, list[int]] = {}
    caches: dict[int, Any] = {}
    for i, prompt in enumerate(PROMPTS[2:7]):
        assert batch.insert([prompt]) == [i]
        for _ in range(3):
            for r in batch.next()[1]:
                answers.setdefault(r.uid, []).append(r.token)
        if i == 2:
            cache, tokens = batch.extract_cache([1])[1]
            caches[1] = cache, list(tokens)  # goes on
            caches[0] = batch.remove([0], return_prompt_caches=True)[0]  # does not
    last = {}
    while responses := batch.next_generated():
        for r in responses:
            answers.setdefault(r.uid, []).append(r.token)
            last[r.uid] = r
    gone = answers.pop(0)
    assert gone == expected[0][: len(gone)] and len(gone) < 12
    assert list(answers.values()) == expected[1:]
    # An extracted cache continues where it was.
    for cache, tokens in [*caches.values(), (last[3].prompt_cache, last[3].all_tokens)]:
        assert tokens_of(model, [7, 8], prompt_cache=cache) == plain_tokens(model, [*tokens, 7, 8])
    integrity(model)


def test_caches_of_both_kinds_run_in_one_generator(quantizable) -> None:
    model = quantizable
    head, tail = TEXT[:50], TEXT[60:70]
    expected = plain_tokens(model, head + tail)
    paged, dense = mlx_lm_cache.make_prompt_cache(model), plain_caches(model)
    for caches in (paged, dense):
        tokens_of(model, head, prompt_cache=caches, max_tokens=0)
    dense = [c.to_quantized(32, 8) if hasattr(c, "to_quantized") else c for c in dense]
    batch = mlx_lm_generate.BatchGenerator(model, max_tokens=NUM_TOKENS)
    uids = batch.insert([tail, head + tail], caches=[paged, None])
    assert run(batch, uids) == [expected] * 2
    # Quantized keys are not the store's: that is mlx-lm's to batch, or to refuse.
    uids = batch.insert([tail], caches=[dense])
    assert not batch._paged.sequences(uids)


@HYBRID
def test_the_server_finds_prompts_again(module, model) -> None:
    """Its cache of prompts, as `mlx_lm.server` uses it with a generator."""
    lru = mlx_lm_cache.LRUPromptCache()
    prompts = [TEXT[:40], [*TEXT[:40], *TEXT[50:60]], TEXT[:40]]
    for prompt in prompts:
        cache, rest = lru.fetch_nearest_cache("key", prompt)
        batch = mlx_lm_generate.BatchGenerator(model, max_tokens=NUM_TOKENS)
        [uid] = batch.insert_segments(
            [[rest]],
            caches=None if cache is None else [cache],
            all_tokens=[prompt[: len(prompt) - len(rest)]],
        )
        answer = []
        while True:
            pieces, tokens = batch.next()
            for r in pieces:
                if r.end_of_segment and not r.end_of_prompt:
                    # (as the server keeps prompts of models that cannot be trimmed)
                    [(kept, seen)] = batch.extract_cache([uid]).values()
                    lru.insert_cache("key", list(seen), kept, cache_type="user")
            answer += [r.token for r in tokens]
            if not pieces and not tokens:
                break
        assert answer == plain_tokens(model, prompt)
    integrity(model)


# --- Everything -----------------------------------------------------------------------------------


@pytest.mark.one_in(20)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("module", ["jamba", "mamba"])
def test_random_lives(module, model, seed) -> None:
    rng = np.random.default_rng(seed)
    lives: list[tuple[Any, list[int]]] = [(mlx_lm_cache.make_prompt_cache(model), [])]

    def some_text() -> list[int]:
        # Few different beginnings, so that prefixes meet.
        return TEXT[: int(rng.integers(1, 80))] + [int(t) for t in rng.integers(1, 5, 3)]

    for _ in range(14):
        kind = rng.integers(5)
        i = int(rng.integers(len(lives)))
        caches, tokens = lives[i]
        if kind == 0:
            lives.append((copy.deepcopy(caches), list(tokens)))
        elif kind == 1:
            del lives[i]
        elif kind == 2:
            prompts = [some_text() for _ in range(3)]
            step = int(rng.integers(5, 60))
            expected = [plain_tokens(model, prompt, max_tokens=4) for prompt in prompts]
            assert batch_tokens(model, prompts, max_tokens=4, prefill_step_size=step) == expected
        elif len(tokens) < 200:
            text = some_text()
            expected = plain_tokens(model, tokens + text, max_tokens=5)
            steps = mlx_lm_generate.generate_step(mx.array(text), model, prompt_cache=caches)
            num_tokens = int(rng.integers(1, 6))
            assert [token for (token, _), _ in zip(steps, range(num_tokens))] == expected[
                :num_tokens
            ]
            steps.close()
            if num_tokens < 5:
                # One that is left early is a token ahead of what it has said, at most.
                del lives[i]
            else:
                tokens += [*text, *expected]
        if not lives or kind == 3:
            lives.append((mlx_lm_cache.make_prompt_cache(model), []))
        integrity(model)
