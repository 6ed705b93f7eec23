"""Paged prompt caches in mlx-lm's cache protocol: files, copies, trimming, batches, growth."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import sys
from typing import Any

import pytest
from support.models import embedded_twin, tiny_config, tiny_model
from support.plain import plain_caches
from test_drop_in_generate import chat, dense, integrity, tokens_of

# isort: split
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models.cache import KVCache, RotatingKVCache

from mlx_paged import drop_in, ops
from mlx_paged.demo.prompts import CHATS, SYSTEM_PROMPT
from mlx_paged.drop_in.caches import PagedKVCache, PagedRotatingKVCache
from mlx_paged.drop_in.registry import CACHE_BYTES_VARIABLE, stores_of

pytestmark = pytest.mark.usefixtures("paged")


WINDOWS: dict[str, Any] = {
    "layer_types": ["full_attention", "sliding_attention"] * 2,
    "sliding_window": 24,
}


@pytest.fixture
def model() -> nn.Module:
    return embedded_twin().model


def new_cache(model: nn.Module) -> list[Any]:
    return mlx_lm_cache.make_prompt_cache(model)


def last_logits(model: nn.Module, tokens: list[int], caches: list[Any]) -> mx.array:
    return model(mx.array([tokens]), cache=caches)[0, -1]


def close(a: mx.array, b: mx.array) -> bool:
    return bool(mx.allclose(a, b, rtol=1e-4, atol=1e-3))


# --- Protocol -------------------------------------------------------------------------------------


def test_content_and_numbers_are_those_of_mlx_lms_cache(model) -> None:
    text = chat(CHATS[0], SYSTEM_PROMPT)[:70]
    ours, theirs = new_cache(model), plain_caches(model)
    assert all(isinstance(c, KVCache) for c in ours)
    assert [c.empty() for c in ours] == [c.empty() for c in theirs]
    assert ours[0].keys is None and ours[0].state == (None, None, 0)
    for part in (text[:33], text[33:34], text[34:]):
        assert close(last_logits(model, part, ours), last_logits(model, part, theirs))
    for a, b in zip(ours, theirs):
        assert (a.offset, a.size(), a.empty(), a.is_trimmable()) == (70, 70, False, True)
        assert (b.offset, b.size(), b.empty(), b.is_trimmable()) == (70, 70, False, True)
        for x, y in zip(a.keys_and_values(), b.keys_and_values()):
            assert x.shape == y.shape and mx.allclose(x, y, atol=1e-5)
        keys, values, offset = a.state
        assert offset == 70 and mx.array_equal(keys, a.keys) and mx.array_equal(values, a.values)
        assert a.nbytes == 96 * a.keys.nbytes * 2 // 70  # three blocks
    assert sum(c.nbytes for c in ours) < sum(c.nbytes for c in theirs)


def test_batches_of_equal_length_work_as_with_mlx_lm(model) -> None:
    tokens = np.random.default_rng(0).integers(3, 4000, (3, 50)).tolist()
    ours, theirs = new_cache(model), plain_caches(model)
    for part in (slice(0, 40), slice(40, 41), slice(41, 50)):
        batch = mx.array([row[part] for row in tokens])
        assert close(model(batch, cache=ours), model(batch, cache=theirs))
    assert ours[0].keys.shape == theirs[0].keys_and_values()[0].shape
    with pytest.raises(ValueError, match="batch must be 3 as before but got 1"):
        model(mx.array([[1]]), cache=ours)
    del ours
    assert drop_in.stats(model).num_used_blocks == 0
    integrity(model)


def test_a_cache_of_another_model_is_refused(model) -> None:
    other = tiny_model(tiny_config("llama", num_hidden_layers=6))
    for call in (other, other.model):
        with pytest.raises(ValueError, match="this cache belongs to another model"):
            call(mx.array([[1, 2]]), cache=new_cache(model))


def test_a_mask_of_the_callers_own_is_refused(model) -> None:
    class Masked(type(model)):
        def __call__(self, inputs: mx.array, cache: Any = None, mask: Any = None) -> mx.array:
            return super().__call__(inputs, cache=cache)

    model.__class__ = Masked
    with pytest.raises(TypeError, match=r"\['mask'\] must be None"):
        model(mx.array([[1, 2]]), cache=new_cache(model), mask=mx.ones((2, 2)))


@pytest.mark.parametrize("windows", [False, True])
def test_parts_of_a_model_find_dense_caches(windows) -> None:
    """Code that goes past the model, to its layers, is served as by mlx-lm's caches."""
    model = tiny_model(tiny_config("llama", **(WINDOWS if windows else {})))
    text = [(7 * i) % 90 for i in range(80)]
    ours, theirs = new_cache(model), plain_caches(model)
    for part in (text[:10], text[10:50], text[50:51], text[51:79], text[79:]):
        tokens = mx.array([part])
        assert close(model.model(tokens, cache=ours), model.model(tokens, cache=theirs))
    # And a step of the whole model goes on from there.
    assert close(last_logits(model, [5, 6], ours), last_logits(model, [5, 6], theirs))
    ours[0].trim(1)
    with pytest.raises(ValueError, match=r"layers must have one offset but are at \[81, 82"):
        last_logits(model, [5], ours)


# --- Trimming -------------------------------------------------------------------------------------


def test_trimming(model) -> None:
    text = chat(CHATS[0], SYSTEM_PROMPT)[:100]
    caches = new_cache(model)
    last_logits(model, text, caches)
    assert mlx_lm_cache.can_trim_prompt_cache(caches)
    assert mlx_lm_cache.trim_prompt_cache(caches, 40) == 40
    assert {c.offset for c in caches} == {60}
    expected = last_logits(model, [*text[:60], 9, 8, 7], plain_caches(model))
    assert close(last_logits(model, [9, 8, 7], caches), expected)
    assert drop_in.stats(model).num_used_blocks == 2
    assert mlx_lm_cache.trim_prompt_cache(caches, 1000) == 63
    assert caches[0].empty() and drop_in.stats(model).num_used_blocks == 0
    integrity(model)


def test_results_that_are_asked_for_late_are_those_of_their_time(model) -> None:
    """Lazy logits of before a trim, evaluated after the same slots were written again."""
    text = chat(CHATS[0], SYSTEM_PROMPT)[:60]
    caches = new_cache(model)
    last_logits(model, text[:50], caches)
    lazy = []
    for tail in (text[50:], [7] * 10, [11, 12, 13]):
        lazy.append((tail, last_logits(model, tail, caches)))
        mlx_lm_cache.trim_prompt_cache(caches, len(tail))
    for tail, logits in reversed(lazy):
        assert close(logits, last_logits(model, text[:50] + tail, plain_caches(model)))
    state = caches[0].state[0]
    assert state.shape[2] == 50


# --- Copies ---------------------------------------------------------------------------------------


def test_copies_part_ways_when_they_are_written(model) -> None:
    text = chat(CHATS[0], SYSTEM_PROMPT)[:75]
    original = new_cache(model)
    last_logits(model, text, original)
    used = drop_in.stats(model).num_used_blocks
    copies = [copy.deepcopy(original) for _ in range(3)]
    assert drop_in.stats(model).num_used_blocks == used
    mlx_lm_cache.trim_prompt_cache(copies[1], 30)
    tails = [[1, 2, 3], [4, 5], [6], [8, 9]]
    heads = [text, text, text[:45], text]
    for caches, head, tail in zip([original, *copies], heads, tails):
        expected = last_logits(model, head + tail, plain_caches(model))
        assert close(last_logits(model, tail, caches), expected)
    for caches, head, tail in zip([original, *copies], heads, tails):
        assert caches[0].offset == len(head) + len(tail)
        theirs = plain_caches(model)
        last_logits(model, head + tail, theirs)
        assert mx.allclose(caches[3].keys, theirs[3].keys_and_values()[0], atol=1e-4)
    # The trimmed copy shares the first of three blocks with the others; these share the first two,
    # and each has a last one of its own.
    assert drop_in.stats(model).num_used_blocks == used + 3
    del original, copies, caches
    assert drop_in.stats(model).num_used_blocks == 0
    integrity(model)


def test_a_copy_costs_references_to_its_blocks_and_no_memory_of_the_device(model) -> None:
    def calls(num_tokens: int) -> int:
        """Calls that a deep copy makes, of Python and of C: its work, counted instead of timed."""
        caches = new_cache(model)
        last_logits(model, [5] * num_tokens, caches)
        mx.eval([c.state for c in caches])
        copy.deepcopy(caches)  # whatever is made once
        count = 0

        def tally(_frame: object, event: str, _arg: object) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(tally)
        try:
            held = copy.deepcopy(caches)
        finally:
            sys.setprofile(None)
        assert held[0].offset == num_tokens
        return count

    # One call takes a reference, another gives back one of the copy that has gone meanwhile.
    assert calls(3000) <= calls(40) + 4 * (3000 // 32)
    caches = new_cache(model)
    last_logits(model, [5] * 1000, caches)
    mx.eval([c.keys for c in caches])
    gc.collect()
    active = mx.get_active_memory()
    held = [copy.deepcopy(caches) for _ in range(50)]
    assert mx.get_active_memory() <= active  # (less, if a collection came between)
    assert held[-1][0].offset == 1000


def test_one_layer_can_be_copied_alone(model) -> None:
    caches = new_cache(model)
    last_logits(model, [1, 2, 3], caches)
    alone = copy.copy(caches[2])
    alone.trim(2)
    assert (alone.offset, caches[2].offset) == (1, 3)
    assert mx.array_equal(alone.keys, caches[2].keys[:, :, :1])


# --- Files ----------------------------------------------------------------------------------------


def test_files_are_those_of_mlx_lm(model, tmp_path) -> None:
    file = str(tmp_path / "prompt.safetensors")
    text, more = chat(CHATS[0], SYSTEM_PROMPT)[:90], chat(CHATS[1])
    expected = dense(tokens_of, model, text + more)
    caches = new_cache(model)
    last_logits(model, text, caches)
    mlx_lm_cache.save_prompt_cache(file, caches, {"model": "embedded"})

    def answer_from_file() -> list[int]:
        loaded, metadata = mlx_lm_cache.load_prompt_cache(file, return_metadata=True)
        assert metadata == {"model": "embedded"}
        assert [type(c) for c in loaded] == [KVCache] * len(caches)
        return tokens_of(model, more, prompt_cache=loaded)

    assert answer_from_file() == expected
    assert dense(answer_from_file) == expected


def test_state_can_be_set_and_pickled(model) -> None:
    text = chat(CHATS[0], SYSTEM_PROMPT)[:90]
    source, target = new_cache(model), new_cache(model)
    last_logits(model, text, source)
    for a, b in zip(source, target):
        b.state = a.state
    expected = last_logits(model, [*text, 5], plain_caches(model))
    assert close(last_logits(model, [5], target), expected)
    loaded = pickle.loads(pickle.dumps(source))
    assert type(loaded[0]) is KVCache
    assert close(last_logits(model, [5], loaded), expected)
    integrity(model)


def test_quantized_and_merged(model) -> None:
    text = chat(CHATS[0], SYSTEM_PROMPT)[:90]
    caches = new_cache(model)
    last_logits(model, text, caches)
    theirs = plain_caches(model)
    last_logits(model, text, theirs)
    for a, b in zip(caches, theirs):
        x, y = a.to_quantized(group_size=32, bits=8), b.to_quantized(group_size=32, bits=8)
        assert x.offset == y.offset == 90
        merged, expected = a.merge([a, new_cache(model)[0]]), b.merge([b, KVCache()])
        assert type(merged) is type(expected)
        assert mx.allclose(merged.keys, expected.keys, atol=1e-5)
        assert mx.allclose(merged.extract(0).keys, a.keys, atol=1e-5)


# --- Windows --------------------------------------------------------------------------------------


@pytest.fixture
def windowed() -> nn.Module:
    return tiny_model(tiny_config("llama", **WINDOWS))


def test_windowed_layers(windowed, tmp_path) -> None:
    text = [(7 * i) % 90 for i in range(80)]
    ours, theirs = new_cache(windowed), windowed.make_cache()
    assert [type(c) for c in ours] == [PagedKVCache, PagedRotatingKVCache] * 2
    for part in (text[:10], text[10:50], text[50:51], text[51:80]):
        assert close(last_logits(windowed, part, ours), last_logits(windowed, part, theirs))
    assert (ours[1].size(), ours[1].offset, ours[1].max_size) == (24, 80, 24)
    assert ours[1].keys.shape[2] == 24
    expected = last_logits(windowed, [*text, 4, 5], windowed.make_cache())
    dense_copy = [c.dense() for c in ours]
    assert [type(c) for c in dense_copy] == [KVCache, RotatingKVCache] * 2
    assert close(last_logits(windowed, [4, 5], dense_copy), expected)
    file = str(tmp_path / "windowed.safetensors")
    mlx_lm_cache.save_prompt_cache(file, ours)
    loaded = mlx_lm_cache.load_prompt_cache(file)
    assert close(last_logits(windowed, [4, 5], loaded), expected)
    again = new_cache(windowed)
    for a, b in zip(loaded, again):
        b.state = mlx_lm_cache.load_prompt_cache(file)[loaded.index(a)].state
    assert close(last_logits(windowed, [4, 5], again), expected)
    # mlx-lm's cannot be trimmed any more once the window is full; these can.
    mlx_lm_cache.trim_prompt_cache(ours, 45)
    expected = last_logits(windowed, [*text[:35], 4, 5], windowed.make_cache())
    assert close(last_logits(windowed, [4, 5], ours), expected)
    integrity(windowed)


# --- Memory ---------------------------------------------------------------------------------------


def test_the_store_grows_and_nothing_is_lost(model) -> None:
    num_blocks, copies = None, ops.pool_copies()
    held = []
    for i in range(6):
        caches = new_cache(model)
        last_logits(model, [(i * 31 + j) % 4000 for j in range(400)], caches)
        held.append(caches)
        num_blocks = num_blocks or drop_in.stats(model).num_blocks
    assert drop_in.stats(model).num_blocks > num_blocks
    for i, caches in enumerate(held):
        text = [(i * 31 + j) % 4000 for j in range(400)] + [9]
        expected = last_logits(model, text, plain_caches(model))
        assert close(last_logits(model, [9], caches), expected)
    assert ops.pool_copies() == copies
    integrity(model)


def test_prefixes_are_dropped_when_they_would_take_too_much_memory(monkeypatch, model) -> None:
    block_bytes = 32 * 6 * 2 * 128 * 4
    monkeypatch.setenv(CACHE_BYTES_VARIABLE, str(40 * block_bytes))
    texts = [[(i * 31 + j) % 4000 for j in range(330)] for i in range(8)]
    for text in texts:
        tokens_of(model, text, max_tokens=1)
    stats = drop_in.stats(model)
    assert stats.num_blocks <= 40 and stats.num_evictions > 0
    # The newest are still there; live caches may have more than the limit.
    tokens_of(model, texts[-1], max_tokens=1)
    assert drop_in.stats(model).num_cached_tokens > 300
    held = []
    for text in texts:
        held.append(new_cache(model))
        last_logits(model, text, held[-1])
    assert drop_in.stats(model).num_blocks >= 8 * 11
    expected = last_logits(model, texts[0] + [9], plain_caches(model))
    assert close(last_logits(model, [9], held[0]), expected)
    integrity(model)
    monkeypatch.setenv(CACHE_BYTES_VARIABLE, "much")
    with pytest.raises(ValueError, match="MLX_PAGED_CACHE_BYTES must be a number of bytes"):
        new_cache(embedded_twin().model)


def test_a_model_that_is_gone_takes_its_store_along() -> None:
    model = embedded_twin().model
    tokens_of(model, [1, 2, 3], max_tokens=1)
    [store] = stores_of(model)
    key = id(model)
    held = new_cache(model)
    from mlx_paged.drop_in import registry

    del model, store
    gc.collect()
    assert key not in registry._stores
    assert held[0].empty()


def test_a_model_can_be_copied_after_use(model) -> None:
    text = chat(CHATS[0])
    expected = tokens_of(model, text)
    twin = copy.deepcopy(model)
    assert tokens_of(twin, text) == expected
    assert drop_in.stats(twin).num_cached_tokens == 0


# --- At random ------------------------------------------------------------------------------------


@pytest.mark.one_in(2)
@pytest.mark.parametrize("seed", range(6))
def test_random_lives_of_caches(seed) -> None:
    """Forks, trims, writes, generation and deaths, each against a cache of mlx-lm's own."""
    rng = random.Random(seed)
    model = tiny_model(tiny_config("llama", num_hidden_layers=2))
    lives: list[tuple[list[Any], list[int]]] = []
    for _ in range(60):
        action = rng.choice(["new", "fork", "trim", "write", "write", "generate", "die"])
        if not lives or (action == "new" and len(lives) < 6):
            lives.append((new_cache(model), []))
        caches, text = lives[i := rng.randrange(len(lives))]
        if action == "fork" and len(lives) < 8:
            lives.append((copy.deepcopy(caches), list(text)))
        elif action == "trim" and text:
            count = rng.randrange(len(text) + 1)
            mlx_lm_cache.trim_prompt_cache(caches, count)
            del text[len(text) - count :]
        elif action == "write":
            tail = [rng.randrange(4) for _ in range(rng.choice([1, 2, 31, 32, 40]))]
            ours = last_logits(model, tail, caches)
            text += tail
            if rng.random() < 0.5:
                assert close(ours, last_logits(model, text, plain_caches(model)))
        elif action == "generate":
            tail = [rng.randrange(4) for _ in range(rng.choice([1, 5, 40, 70]))]
            answer = tokens_of(model, tail, prompt_cache=caches, max_tokens=3)
            expected = tokens_of(model, text + tail, prompt_cache=plain_caches(model), max_tokens=3)
            assert answer == expected
            text += tail + answer
        elif action == "die":
            lives.pop(i)
        del caches
        assert all(c[0].offset == len(t) for c, t in lives)
        integrity(model)
    for caches, text in lives:
        theirs = plain_caches(model)
        if text:
            last_logits(model, text, theirs)
            assert mx.allclose(caches[1].keys, theirs[1].keys_and_values()[0], atol=1e-4)
    lives.clear()
    del caches
    assert drop_in.stats(model).num_used_blocks == 0
