"""Rounded keys, values and activations: a token has the same bits however its prompt is cut.

Rounding turns a difference in the last bit of a sum into another code, now and then. So on the CPU
sums are in one order, whatever rows are in a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, repeat

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from support.family_config_parts import VOCAB_SIZE as OTHER_VOCAB_SIZE
from support.family_configs import config_of
from support.models import StepDriver, random_tokens, tiny_config, tiny_model
from support.parity import family_model
from support.quantized import FORMATS, make_quantized
from support.reference import ON_GPU, bits, make_batch

from mlx_paged import ops
from mlx_paged.model.kv_formats import format_named
from mlx_paged.model.plan import build_plan

pytestmark = pytest.mark.skipif(ON_GPU, reason="only the CPU's sums are in one order")

LENGTH = 150  # more rows than a BLAS is needed for
CUTS = [(1,), (3,), (16,), (17,), (64,), (100, 1)]  # the last size is repeated


@pytest.mark.parametrize(
    "options",
    [{}, {"window": 37}, {"softcap": 3.0, "sinks": mx.array([0.5, -1.0, 2.0, 0.0])}],
    ids=["", "window", "softcap_sinks"],
)
@pytest.mark.parametrize("dims", [(64, 64), (80, 24)], ids=str)
@pytest.mark.parametrize("name", [*FORMATS, "float32", "bfloat16", "rounded"])
def test_attention_of_a_row(rng, name, dims, options) -> None:
    window = options.get("window")
    if name == "rounded":
        name, options = "float32", {**options, "activations": "int8"}
    given = {"key_dim": dims[0], "value_dim": dims[1], "window": window}
    if name in FORMATS:
        batch = make_quantized(rng, [200], [70], name=name, **given)
        plain, pools = batch.plain, (batch.key_pool, batch.value_pool)
    else:
        plain = make_batch(rng, [200], [70], dtype=getattr(mx, name), **given)
        pools = (plain.key_pool, plain.value_pool)
    whole = bits(ops.paged_attention(plain.queries, *pools, plain.plan(), scale=0.2, **options))
    for first, rows in ((0, 1), (1, 2), (5, 5), (9, 9), (17, 33), (69, 1)):
        length = 200 - 70 + first + rows
        plan = build_plan(plain.tables, [length], [rows], block_size=16, window=window)
        queries = plain.queries[first : first + rows]
        part = bits(ops.paged_attention(queries, *pools, plan, scale=0.2, **options))
        np.testing.assert_array_equal(part, whole[first : first + rows])


@pytest.mark.parametrize("window", [None, 4200])
@pytest.mark.parametrize("name", ["int8", "rounded"])
def test_attention_of_a_row_with_a_context_of_several_pieces(rng, name, window) -> None:
    length = 8192 + 9
    shape = {"num_q_heads": 1, "num_kv_heads": 1, "key_dim": 16, "block_size": 64}
    if name == "rounded":
        plain = make_batch(rng, [length], [20], window=window, **shape)
        pools = plain.key_pool, plain.value_pool
    else:
        batch = make_quantized(rng, [length], [20], name=name, window=window, **shape)
        plain, pools = batch.plain, (batch.key_pool, batch.value_pool)
    options = {"scale": 0.2, "activations": "int8" if name == "rounded" else "float32"}
    plan = build_plan(plain.tables, [length], [20], block_size=64, window=window)
    assert len(plan.merge_items) == 1, "the context is cut"
    whole = bits(ops.paged_attention(plain.queries, *pools, plan, **options))
    for row in range(20):
        plan = build_plan(plain.tables, [length - 19 + row], [1], block_size=64, window=window)
        alone = bits(ops.paged_attention(plain.queries[row : row + 1], *pools, plan, **options))
        np.testing.assert_array_equal(alone, whole[row : row + 1])


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "affine8", "affine4", "mxfp4"])
def test_products_of_a_row(rng, kind) -> None:
    x = mx.array(rng.standard_normal((200, 1056)).astype(np.float32))
    weight = mx.array(rng.standard_normal((70, 1056)).astype(np.float32))
    if kind in ("float32", "bfloat16"):
        weight = weight.astype(getattr(mx, kind))
        mx.eval(weight)

        def multiply(x: mx.array) -> mx.array:
            return ops.linear(x, weight, by_rows=True)
    else:
        form = {"mode": kind[:6], "bits": int(kind[6:])} if "affine" in kind else {"mode": kind}
        form = {"group_size": 32, "bits": 4, **form}
        arrays = list(mx.quantize(weight, **form))
        mx.eval(arrays)

        def multiply(x: mx.array) -> mx.array:
            scales = arrays if len(arrays) == 3 else [*arrays, None]
            return ops.quantized_linear(x, *scales, by_rows=True, **form)

    whole = bits(multiply(x))
    for first, rows in ((0, 1), (3, 7), (10, 17), (20, 64), (30, 65), (50, 150)):
        np.testing.assert_array_equal(
            bits(multiply(x[first : first + rows])), whole[first : first + rows]
        )


def llama(weights: str) -> nn.Module:
    config = tiny_config("llama", head_dim=32, hidden_size=128, intermediate_size=256)
    model = tiny_model(config)
    if weights != "float32":
        nn.quantize(model, group_size=32, bits=int(weights))
        mx.eval(model.parameters())
    return model


def logits_of(
    model: nn.Module,
    name: str,
    tokens: Sequence[int],
    sizes: Sequence[int],
    family: str = "llama",
    activations: str = "float32",
) -> np.ndarray:
    """Runs the prompt in chunks of these sizes, repeating the last; returns the last logits."""
    driver = StepDriver(model, family, block_size=16, kv_format=format_named(name))
    driver.runner.model.round_activations(activations)
    at, cuts = 0, chain(sizes, repeat(sizes[-1]))
    while at < len(tokens):
        size = next(cuts)
        logits = driver.step({"a": tokens[at : at + size]})["a"]
        at += size
    return logits


@pytest.mark.one_in(4)
@pytest.mark.parametrize("weights", ["float32", "8", "4"])
@pytest.mark.parametrize("name", FORMATS)
def test_logits_of_a_prompt_that_is_cut(rng, name, weights) -> None:
    model, tokens = llama(weights), random_tokens(rng, LENGTH)
    whole = logits_of(model, name, tokens, [LENGTH])
    for sizes in CUTS:
        found = logits_of(model, name, tokens, sizes)
        assert np.array_equal(found, whole), (sizes, np.abs(found - whole).max())


@pytest.mark.parametrize("weights", ["8", "4"])
def test_logits_of_a_prompt_that_is_cut_with_rounded_activations(rng, weights) -> None:
    model, tokens = llama(weights), random_tokens(rng, LENGTH)
    whole = logits_of(model, "auto", tokens, [LENGTH], activations="int8")
    for sizes in CUTS:
        found = logits_of(model, "auto", tokens, sizes, activations="int8")
        assert np.array_equal(found, whole), (sizes, np.abs(found - whole).max())


def test_steps_with_rounded_activations_round_attention_too(rng, monkeypatch) -> None:
    seen = set()
    attention = ops.paged_attention

    def seeing(*args, activations, **options) -> mx.array:
        seen.add(activations)
        return attention(*args, activations=activations, **options)

    for weights, activations, expected in (
        ("4", "int8", "int8"), ("4", "float32", "float32"), ("float32", "int8", "float32"),
    ):  # fmt: skip
        driver = StepDriver(llama(weights), "llama", block_size=16)
        driver.runner.model.round_activations(activations)
        seen.clear()
        with monkeypatch.context() as patch:
            patch.setattr(ops, "paged_attention", seeing)
            for rows in (15, 1):
                driver.step({"a": random_tokens(rng, rows)})
        assert seen == {expected}


@pytest.mark.parametrize("weights", ["8", "4"])
def test_logits_of_the_first_step_of_weights_that_were_not_evaluated(rng, weights) -> None:
    tokens = random_tokens(rng, LENGTH)
    late = llama("float32")
    nn.quantize(late, group_size=32, bits=int(weights))
    found = logits_of(late, "int8", tokens, [LENGTH])
    np.testing.assert_array_equal(found, logits_of(llama(weights), "int8", tokens, [LENGTH]))


# Experts; a window, soft-caps; sinks and a window; LayerNorm and GELU.
@pytest.mark.parametrize("family", ["mixtral", "gemma2", "gpt_oss", "gpt_neox"])
def test_logits_of_other_families(family) -> None:
    tokens = np.random.default_rng(7).integers(0, OTHER_VOCAB_SIZE, 90).tolist()
    model = family_model(config_of(family))
    whole, *others = (
        logits_of(model, "int4", tokens, sizes, family) for sizes in ([90], [1], [17], [70, 3])
    )
    for found in others:
        np.testing.assert_array_equal(found, whole)
