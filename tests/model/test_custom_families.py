"""Families of one's own: registered, compared with the dense cache, then served like any other."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import mlx_paged  # before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import RotatingKVCache
from support.family_config_parts import VOCAB_SIZE
from support.family_configs import config_of
from support.models import dense_logits, embedded, random_tokens
from support.parity import family_model

from mlx_paged import LLM, SamplingParams, ops, register_family
from mlx_paged.errors import UnsupportedModelError
from mlx_paged.model import verify, wrap
from mlx_paged.model.families import require_family, unregister_family
from mlx_paged.model.layout import Mode
from mlx_paged.model.loader import LoadedModel
from mlx_paged.model.verify import difference_from_dense
from mlx_paged.model.wrap import build_paged_model, convert_to_paged

CONFIG = {"model_type": "mine", "vocab_size": VOCAB_SIZE, "hidden_size": 32}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


class Attention(nn.Module):
    """Causal attention with one head, as a user would write it after mlx-lm's."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(size, 3 * size)
        self.rope = nn.RoPE(size)
        self.scale = size**-0.5

    def __call__(self, x: mx.array, cache: Any) -> mx.array:
        q, k, v = (part[:, None] for part in mx.split(self.qkv(x), 3, axis=-1))
        q, k = (self.rope(part, offset=cache.offset) for part in (q, k))
        mask = create_attention_mask(x, cache)
        k, v = cache.update_and_fetch(k, v)
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=self.scale, mask=mask)[:, 0]


class Mine(nn.Module):
    """A model with mlx-lm's conventions: `layers`, and a forward that takes `cache`."""

    model_type = "mine"

    def __init__(self, size: int = CONFIG["hidden_size"], num_layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB_SIZE, size)
        self.layers = [Attention(size) for _ in range(num_layers)]
        self.out = nn.Linear(size, VOCAB_SIZE)

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        x = self.embed(tokens)
        for layer, layer_cache in zip(self.layers, cache):
            x = x + layer(x, layer_cache)
        return self.out(x)


class Mixing(Mine):
    """Wrong on paged caches, and in no way that a graph would show: rows see each other."""

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        x = self.embed(tokens)
        x = x + x.mean(axis=0)
        for layer, layer_cache in zip(self.layers, cache):
            x = x + layer(x, layer_cache)
        return self.out(x)


class Cutting(Mine):
    """Has no one answer: tokens see all others of their chunk."""

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        x = self.embed(tokens)
        x = x + x.mean(axis=1, keepdims=True)
        for layer, layer_cache in zip(self.layers, cache):
            x = x + layer(x, layer_cache)
        return self.out(x)


class Decoding(Mine):
    """Has no one answer: a token alone is another than one of a chunk."""

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        x = self.embed(tokens) * (1.5 if tokens.shape[1] == 1 else 1)
        for layer, layer_cache in zip(self.layers, cache):
            x = x + layer(x, layer_cache)
        return self.out(x)


class ByHand(Attention):
    """Computes attention itself, so it needs dense keys and values."""

    def __call__(self, x: mx.array, cache: Any) -> mx.array:
        q, k, v = (part[:, None] for part in mx.split(self.qkv(x), 3, axis=-1))
        q, k = (self.rope(part, offset=cache.offset) for part in (q, k))
        mask = create_attention_mask(x, cache, return_array=True)
        k, v = cache.update_and_fetch(k, v)
        scores = (q * self.scale) @ k.swapaxes(-1, -2)
        if mask is not None:
            scores = mx.where(mask, scores, -mx.inf)
        return (mx.softmax(scores, axis=-1) @ v)[:, 0]


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    unregister_family("mine")


def mine(kind: type[Mine] = Mine, attention: type[Attention] = Attention) -> Mine:
    mx.random.seed(3)
    model = kind()
    for layer in model.layers:
        layer.__class__ = attention
    model.eval()
    mx.eval(model.parameters())
    return model


def loaded(model: nn.Module) -> LoadedModel:
    return LoadedModel(model, embedded().tokenizer, CONFIG, "mine")


def greedy(model: nn.Module, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(dense_logits(model, [tokens]).argmax()))
    return tokens[len(prompt) :]


def test_an_unknown_family_is_refused_and_told_what_there_is() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'mine'.*no such model.*docs/models.md"):
        LLM(loaded(mine()), kv_cache_memory=1 << 22)


def test_a_registered_family_is_compared_and_served(caplog: pytest.LogCaptureFixture) -> None:
    register_family("mine")
    model, twin = mine(), mine()
    with caplog.at_level(logging.WARNING):
        llm = LLM(loaded(model), kv_cache_memory=1 << 22, max_num_batched_tokens=16)
    [warning] = [r.getMessage() for r in caplog.records if "proven" in r.getMessage()]
    assert "'mine'" in warning and "native paged" in warning
    rng = np.random.default_rng(0)
    prompts = [random_tokens(rng, count) for count in (3, 12, 21, 30)]
    outputs = llm.generate(prompts, GREEDY)
    for prompt, output in zip(prompts, outputs):
        assert output.outputs[0].token_ids == greedy(twin, prompt, 8)


def test_a_model_that_answers_otherwise_is_refused() -> None:
    register_family("mine")
    convert_to_paged(mine(Mixing), "mine", block_size=8)  # the graph shows nothing
    with pytest.raises(UnsupportedModelError, match=r"'mine'.*differ from the dense ones by"):
        build_paged_model(mine(Mixing), CONFIG, block_size=8)
    register_family("mine", verify=False)
    build_paged_model(mine(Mixing), CONFIG, block_size=8)  # as asked


@pytest.mark.parametrize("kind", [Cutting, Decoding])
def test_a_model_whose_answers_depend_on_the_cut_of_a_prompt_is_refused(kind: type[Mine]) -> None:
    register_family("mine", mode="gathered alone")  # as mlx-lm computes the same chunks
    with pytest.raises(UnsupportedModelError, match=r"'mine'.*depend on where a prompt is cut"):
        build_paged_model(mine(kind), CONFIG, block_size=8)
    register_family("mine", mode="gathered alone", verify=False)
    paged = build_paged_model(mine(kind), CONFIG, block_size=8)
    assert difference_from_dense(paged, VOCAB_SIZE) < 1e-5


@pytest.mark.parametrize("compared", ["difference_from_dense", "difference_where_cut"])
def test_a_comparison_without_a_number_is_no_proof(
    compared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    register_family("mine")
    monkeypatch.setattr(wrap, compared, lambda *args: float("nan"))
    with pytest.raises(UnsupportedModelError, match="nan of their size"):
        build_paged_model(mine(), CONFIG, block_size=8)


def test_what_a_model_rules_out_is_compared_too() -> None:
    """Minus infinity is no number that a difference could be taken of."""
    inf = np.inf
    assert verify._relative(np.array([1.0, -inf, 2]), np.array([1.0, -inf, 2])) == 0
    assert verify._relative(np.array([1.0, 5, 2]), np.array([1.0, -inf, 2])) == inf
    assert verify._relative(np.array([1.0, -inf, 2]), np.array([1.0, 5, 2])) == inf
    assert verify._relative(np.array([1.0, 2]), np.array([1.0, 2, 3])) == inf
    assert np.isnan(verify._relative(np.array([1.0, np.nan]), np.array([1.0, 2])))


def test_the_coarsest_pool_decides_how_exact_an_answer_can_be() -> None:
    paged = convert_to_paged(mine(), "mine", block_size=8)
    exact = verify.tolerance_of(paged)
    first, second = paged.layout.specs
    mixed = (first, replace(second, dtype=mx.bfloat16))
    paged.layout = replace(paged.layout, specs=mixed)
    assert exact < 0.01 < verify.tolerance_of(paged) < 0.2


def test_attention_by_hand_is_given_dense_keys() -> None:
    register_family("mine")
    paged = build_paged_model(mine(attention=ByHand), CONFIG, block_size=8)
    assert paged.layout.mode is Mode.GATHERED
    assert difference_from_dense(paged, VOCAB_SIZE) < 1e-5


def test_a_mode_can_be_asked_for() -> None:
    register_family("mine", mode="gathered alone")
    assert build_paged_model(mine(), CONFIG, block_size=8).layout.mode is Mode.UNIFORM
    register_family("mine", mode=Mode.REGROUPED)
    with pytest.raises(UnsupportedModelError, match="it has no state"):
        build_paged_model(mine(), CONFIG, block_size=8)


def test_what_cannot_be_registered() -> None:
    with pytest.raises(ValueError, match="'llama' is proven"):
        register_family("llama")
    with pytest.raises(ValueError, match="no-such"):
        register_family("mine", mode="no-such")


@pytest.mark.parametrize("window", [12, 200])
def test_the_comparison_goes_past_the_end_of_every_window(
    window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = family_model(config_of("gemma3_text") | {"sliding_window": window})
    paged = convert_to_paged(model, "gemma3_text", block_size=8)
    assert difference_from_dense(paged, VOCAB_SIZE) < 1e-4
    attend = ops.paged_attention

    def one_token_short(*args: Any, window: int | None, **kwargs: Any) -> mx.array:
        return attend(*args, window=window and window - 1, **kwargs)

    monkeypatch.setattr(ops, "paged_attention", one_token_short)
    assert difference_from_dense(paged, VOCAB_SIZE) > 1e-3


@pytest.mark.parametrize("window", [12, 200])
def test_a_prompt_is_cut_behind_the_end_of_every_window(
    window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault that only long contexts show."""
    model = family_model(config_of("gemma3_text") | {"sliding_window": window})
    paged = convert_to_paged(model, "gemma3_text", block_size=8)
    assert verify.difference_where_cut(paged, VOCAB_SIZE) < 1e-4
    make_mask = RotatingKVCache.make_mask

    def one_token_more(self: Any, N: int, window_size: int, **kwargs: Any) -> Any:
        return make_mask(self, N, window_size=window_size + 1, **kwargs)

    monkeypatch.setattr(RotatingKVCache, "make_mask", one_token_more)
    assert verify.difference_where_cut(paged, VOCAB_SIZE) > 1e-3


def test_another_mlx_lm_makes_every_family_unproven(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not require_family({"model_type": "llama"}).verify
    monkeypatch.setattr("mlx_paged.model.families.VERSION", "0.99.0")
    assert require_family({"model_type": "llama"}).verify
    assert mlx_paged.register_family is register_family


def test_a_proven_family_that_runs_in_another_mode_is_compared(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = config_of("smollm3") | {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 12,
    }
    with caplog.at_level(logging.WARNING):
        paged = build_paged_model(family_model(config), config, block_size=8)
    assert paged.layout.mode is Mode.GATHERED
    [warning] = [r.getMessage() for r in caplog.records if "proven" in r.getMessage()]
    assert "'smollm3'" in warning and "gathered" in warning
    caplog.clear()
    build_paged_model(family_model(config_of("smollm3")), config_of("smollm3"), block_size=8)
    assert not caplog.records
