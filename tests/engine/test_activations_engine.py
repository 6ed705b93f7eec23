"""The engine with activations that are rounded on the CPU: answers, options."""

from __future__ import annotations

from typing import Any

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from support.embedded_llm import check_at_rest, make
from support.models import embedded, embedded_twin

from mlx_paged import SamplingParams, ops
from mlx_paged.demo.prompts import CHATS
from mlx_paged.engine.config import EngineConfig
from mlx_paged.errors import InvalidParameterError
from mlx_paged.model.loader import LoadedModel

PARAMS = SamplingParams(temperature=0, max_tokens=32)
LOGPROBS = SamplingParams(temperature=0, max_tokens=16, logprobs=2)
ON_CPU = mx.default_device() == mx.cpu
on_cpu = pytest.mark.skipif(not ON_CPU, reason="only the CPU rounds activations")


def quantized(bits: int) -> LoadedModel:
    loaded = embedded_twin()
    nn.quantize(loaded.model, group_size=64, bits=bits)
    mx.eval(loaded.model.parameters())
    return loaded


def prompts() -> list[list[int]]:
    tokenizer = embedded().tokenizer
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": chat}], add_generation_prompt=True
        )
        for chat in CHATS[:6]
    ]  # fmt: skip


def answers(model: LoadedModel, at_once: int = 6, **options: Any) -> list[list[int]]:
    llm = make(model, **options)
    tokens = []
    for i in range(0, 6, at_once):
        outputs = llm.generate(prompts()[i : i + at_once], PARAMS)
        tokens += [output.outputs[0].token_ids for output in outputs]
    check_at_rest(llm)
    return tokens


@on_cpu
@pytest.mark.parametrize("bits", [4, 8])
def test_greedy_answers_are_near_those_of_float_activations(bits: int) -> None:
    expected = answers(quantized(bits))
    found = answers(quantized(bits), cpu_activations="int8")
    same = [
        np.cumprod(np.array(a[: len(b)]) == np.array(b[: len(a)])).mean()
        for a, b in zip(found, expected)
    ]
    assert np.mean(same) > 0.6, same


@on_cpu
def test_answers_do_not_depend_on_the_steps() -> None:
    wanted = answers(quantized(4), cpu_activations="int8")
    for options in ({"at_once": 1}, {"max_num_batched_tokens": 16}, {"async_scheduling": False}):
        assert answers(quantized(4), cpu_activations="int8", **options) == wanted, options


def logprobs(chunk: int, kv_cache_dtype: str) -> list[list[dict[int, float]]]:
    llm = make(
        quantized(8), cpu_activations="int8", max_num_batched_tokens=chunk,
        kv_cache_dtype=kv_cache_dtype,
    )  # fmt: skip
    return [
        [{t: e.logprob for t, e in step.items()} for step in output.outputs[0].logprobs]
        for output in llm.generate([list(range(300, 300 + n)) for n in (150, 90, 20)], LOGPROBS)
    ]


@on_cpu
@pytest.mark.parametrize("kept", ["auto", "int8"])
def test_bits_do_not_depend_on_how_prompts_are_cut(kept: str) -> None:
    whole = logprobs(1024, kept)
    for chunk in (16, 100):
        assert logprobs(chunk, kept) == whole, chunk


def first_logprobs(model: LoadedModel, **options: Any) -> dict[int, float]:
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=5)
    [output] = make(model, **options).generate([[*range(300, 420)]], params)
    logprobs = output.outputs[0].logprobs
    assert logprobs
    return {token: one.logprob for token, one in logprobs[0].items()}


@on_cpu
def test_the_option_reaches_the_products() -> None:
    """Their results differ, by as little as rounding explains."""
    for make_model, name in ((lambda: quantized(4), "int8"), (in_bfloat16, "bfloat16")):
        if name not in ops.activations():
            continue
        found, expected = (
            first_logprobs(make_model(), cpu_activations=n) for n in (name, "float32")
        )
        both = found.keys() & expected.keys()
        differences = [abs(found[token] - expected[token]) for token in both]
        assert len(both) >= 3 and 0 < max(differences) < 0.5, name


def in_bfloat16() -> LoadedModel:
    loaded = embedded_twin()
    for module in loaded.model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            module.set_dtype(mx.bfloat16)
    mx.eval(loaded.model.parameters())
    return loaded


def test_it_is_in_the_salt_of_prefixes() -> None:
    salts = {
        EngineConfig(cpu_activations=name, kv_cache_dtype=kept).salted(salt)
        for name in ("float32", "int8", "bfloat16")
        for kept in ("auto", "int8")
        for salt in (None, "a")
    }
    assert len(salts) == 12


def test_options_are_checked() -> None:
    with pytest.raises(InvalidParameterError, match="cpu_activations must be 'float32' or"):
        EngineConfig(cpu_activations="int4")
    for name in ("bfloat16", "int8"):
        if not ON_CPU or name not in ops.activations():
            with pytest.raises(InvalidParameterError, match="cpu_activations must be"):
                make(cpu_activations=name)
