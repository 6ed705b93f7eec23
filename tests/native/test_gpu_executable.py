"""Decode steps as one list of launches, on the simulated GPU: against the graphs that they were
read from, and each kernel against float64."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support import family_configs
from support.gpu_executables import with_programs
from support.mixtures import ROUTERS, Experts, Router, chosen_by, logits_apart, softmax_and_last
from support.models import GREEDY, StepDriver, step_of, tiny_config, tiny_model
from support.platforms import CUDA_PROGRAMS, run_as_on
from support.quantized import raw
from support.reference import DTYPES, bits
from support.simulated import launches, needs_simulator, sim_ext, simulated

from mlx_paged import executables, ops
from mlx_paged.engine.sampling.sequence_sampler import SamplingRow
from mlx_paged.kernels import set_piece_tokens
from mlx_paged.model.graph_runner import Refusals, Repeat
from mlx_paged.model.kv_formats import FORMATS
from mlx_paged.model.plan import build_plan
from mlx_paged.model.taps import FINAL

pytestmark = needs_simulator

# Largest error of a row, relative to the row's norm.
TOLERANCE = {mx.float32: 1e-6, mx.float16: 1e-3, mx.bfloat16: 8e-3}

WIDE = {"hidden_size": 128}  # (where the head dim is hidden_size / heads)
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": tiny_config("llama", head_dim=32),
    "llama with biases": tiny_config(
        "llama", head_dim=32, tied=False, attention_bias=True, mlp_bias=True
    ),
    "traditional RoPE": tiny_config("llama", head_dim=32, rope_traditional=True),
    "windows": tiny_config(
        "llama",
        head_dim=32,
        layer_types=["full_attention", "sliding_attention"] * 2,
        sliding_window=8,
    ),
    "qwen2": tiny_config("qwen2", **WIDE),
    "qwen3": tiny_config("qwen3", head_dim=32, tied=False),
    "phi3": tiny_config("phi3", **WIDE),  # (its projections are one matrix)
    "smollm3": tiny_config("smollm3", head_dim=32),  # (layers without RoPE)
}


def driver_of(config: dict[str, Any]) -> StepDriver:
    return StepDriver(tiny_model(config), config["model_type"], block_size=8)


def new_tokens(rng: np.random.Generator, count: int) -> list[int]:
    return rng.integers(0, 96, count).tolist()


# --- Whole steps ----------------------------------------------------------------------------------


def steps_of_both(
    rng: np.random.Generator,
    ours: StepDriver,
    graphs: StepDriver,
    works: list[dict[str, int]],
    tolerance: float,
) -> Iterator[list[np.ndarray]]:
    """Yields our logits of each step, and checks them against those of graphs."""
    for work in works:
        tokens = {sequence: new_tokens(rng, count) for sequence, count in work.items()}
        expected = graphs.step(tokens)
        with simulated():
            actual = ours.step(tokens)
        for sequence, logits in expected.items():
            np.testing.assert_allclose(actual[sequence], logits, atol=tolerance)
        yield [actual[sequence] for sequence in tokens]


WORKS = [{"a": 7, "b": 1}, {"a": 1, "b": 1, "c": 9}, {"a": 1, "b": 1, "c": 1}]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_gives_what_its_graph_gives(rng, name: str) -> None:
    ours, graphs = driver_of(CONFIGS[name]), driver_of(CONFIGS[name])
    steps = with_programs(ours, residual_in_product=len(name) % 2 == 0)
    for logits in steps_of_both(rng, ours, graphs, WORKS, 2e-5):
        greedy, rows = steps.newest_greedy(), np.array(logits)
        for found in (greedy.tokens, greedy.reported):
            np.testing.assert_array_equal(np.array(found), rows.argmax(axis=1))
        np.testing.assert_array_equal(np.array(greedy.largest), rows.max(axis=1))
    for mine, theirs in zip(ours.caches, graphs.caches, strict=True):
        for pool, other in ((mine.key_pool, theirs.key_pool), (mine.value_pool, theirs.value_pool)):
            np.testing.assert_allclose(np.array(pool), np.array(other), atol=2e-5)


def test_hidden_states_are_further_outputs(rng) -> None:
    """The inputs of layers are sums that a program otherwise keeps to itself."""
    ours, graphs = driver_of(CONFIGS["llama"]), driver_of(CONFIGS["llama"])
    steps = with_programs(ours)
    for driver in (ours, graphs):
        driver.runner.model.tap([1, 3, FINAL])
    for work in ({"a": 7, "b": 1}, {"a": 1, "b": 1}):
        tokens = {name: new_tokens(rng, count) for name, count in work.items()}
        hidden = []
        for driver in (graphs, ours):
            rows = [driver.schedule(name, own) for name, own in tokens.items()]
            if driver is graphs:
                launched, expected = driver.launch(*rows)
            else:
                with simulated():
                    launched, actual = driver.launch(*rows)
            assert launched.hidden is not None
            hidden.append(np.array(launched.hidden))
        np.testing.assert_allclose(hidden[1], hidden[0], atol=2e-5)
        for name, logits in expected.items():
            np.testing.assert_allclose(actual[name], logits, atol=2e-5)
    assert len(steps.made) == 2


@pytest.mark.one_in(8)
@pytest.mark.parametrize("name", ["llama", "qwen3", "smollm3", "windows"])
@pytest.mark.parametrize("kv_format", FORMATS)
def test_steps_with_quantized_pools(rng, kv_format: str, name: str) -> None:
    """Keys and values are quantized and rotated as they are without a program."""
    ours, graphs = (
        StepDriver(
            tiny_model(CONFIGS[name]), CONFIGS[name]["model_type"], block_size=8,
            kv_format=FORMATS[kv_format],
        )
        for _ in range(2)
    )  # fmt: skip
    steps = with_programs(ours)
    assert len(list(steps_of_both(rng, ours, graphs, WORKS, 1e-4))) == len(steps.made) == 3
    for mine, theirs in zip(ours.caches, graphs.caches, strict=True):
        for pool, other in ((mine.key_pool, theirs.key_pool), (mine.value_pool, theirs.value_pool)):
            # (Products in another order of sums: a number between two codes may get the other.)
            assert (raw(pool) != raw(other)).mean() < 1e-3


# The families whose steps are executables, with the settings of `family_configs`, and the
# operations that keep some others from it.
FAMILIES = sorted(set(family_configs.compiled_families("on a GPU")) - set(CONFIGS))
REFUSED_FAMILIES = {
    "cohere": "layer_norm",
    "gemma2": "Multiply",  # scaled embeddings
    "gpt_oss": "ArgPartition",  # experts with another activation
    "olmo2": "Add",  # of what has been normed
    "qwen2_moe": "Sigmoid",  # a shared expert
}


def family_driver(family: str) -> StepDriver:
    fields = {"hidden_size": 128, "head_dim": 32, **family_configs.CONFIGS[family]}
    return driver_of({**family_configs.BASE, **fields, "model_type": family})


@pytest.mark.one_in(4)
@pytest.mark.parametrize("family", FAMILIES)
def test_families_that_are_programs(rng, family: str) -> None:
    ours, graphs = family_driver(family), family_driver(family)
    steps = with_programs(ours)
    works = [{"a": 9, "b": 1}, {"a": 1, "b": 1}]
    assert len(list(steps_of_both(rng, ours, graphs, works, 5e-5))) == len(steps.made) == 2


@pytest.mark.parametrize("family", REFUSED_FAMILIES)
def test_families_that_are_none(family: str) -> None:
    driver = family_driver(family)
    with_programs(driver)
    reason = f"this graph: the operation {REFUSED_FAMILIES[family]}$"
    with simulated(), pytest.raises(ValueError, match=reason):
        driver.step({"a": [1], "b": [2]})


@pytest.mark.parametrize("has_alibi", [False, True])
def test_sinks(rng, has_alibi: bool) -> None:
    """No dense family of mlx-lm has them."""
    queries, _ = values_of(rng, 3, 4, 64, dtype=mx.float32)
    pools = [values_of(rng, 4, 8, 2, 64, dtype=mx.float32)[0] for _ in range(2)]
    keys, new_values = (values_of(rng, 3, 2, 64, dtype=mx.float32)[0] for _ in range(2))
    sinks, _ = values_of(rng, 4, dtype=mx.float32)
    identity = mx.eye(256)
    plan = build_plan([[1], [2], [3]], [3, 8, 5], [1, 1, 1], block_size=8)
    arrays = [getattr(plan, f) for f in plan.__dataclass_fields__ if f != "bounds"]
    mx.eval(identity, arrays)

    def build(queries, keys, new_values, *rest: mx.array) -> list[mx.array]:
        *arrays, key_pool, value_pool = rest
        plan = ops.AttentionPlan(*arrays)
        written = ops.write_kv(key_pool, value_pool, keys, new_values, plan.slot_mapping)
        slopes = mx.array([0.5, -0.1, 0.0, 2.0]) if has_alibi else None
        options = {"window": 4, "sinks": sinks, "alibi_slopes": slopes}
        out = ops.paged_attention(queries, *written, plan, scale=0.1, **options)
        return [ops.linear(out.reshape(3, -1), identity), *written]

    copies = [mx.array(np.array(pool)) for pool in pools]
    mx.eval(copies)
    expected = build(queries, keys, new_values, *arrays, *copies)
    mx.eval(expected)
    actual, _ = run(build, queries, keys, new_values, *arrays, *pools)
    for mine, theirs in zip(actual, expected, strict=True):
        np.testing.assert_allclose(np.array(mine), np.array(theirs), atol=1e-5)


def kernels_of(
    config: dict[str, Any], rows: int, *, dtype: mx.Dtype, cuda: bool, **options: Any
) -> list[str]:
    """The launches of a decode step of this many rows."""
    model = tiny_model(config)
    model.set_dtype(dtype)
    mx.eval(model.parameters())
    driver = StepDriver(model, config["model_type"], block_size=16, num_blocks=2 + rows, **options)
    with simulated():
        steps = with_programs(driver)
        driver.step({str(i): [i] for i in range(rows)})
        program, inputs = steps.made[-1]
        described = sim_ext.gpu_executable_launches(program._executable, inputs, cuda=cuda)
    return [launch["kernel"] for launch in described]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize(("rows", "tiles"), [(1, 1), (8, 1), (16, 2), (17, 4), (60, 8)])
def test_a_layer_is_few_kernels_with_cuda(rows: int, tiles: int, family: str) -> None:
    """Seven; heads that are normed (qwen3) are rotated and written by a kernel of their own."""
    config = tiny_config(family, head_dim=64, tied=False, num_hidden_layers=3, vocab_size=112)
    kernels = kernels_of(config, rows, dtype=mx.bfloat16, cuda=True)
    linear = f"linear_stream_bfloat16_{tiles}"
    attention = "paged_decode_tensor_bfloat16_64_n1"
    norm, write, table = "add_rms_norm_bfloat16", "rope_write_bfloat16", "gather_rows_bfloat16"
    layer = [norm, linear, attention, linear, norm, linear, linear]
    assert len(layer) == 7  # (and a merge where contexts are split)
    layer += [write] if family == "qwen3" else []
    ends = [norm, table, linear, "greedy_tokens_bfloat16"]
    assert sorted(kernels) == sorted([*layer * 3, table, "rope_rotations", *ends])
    assert kernels[-4:] == ends


MIXTURE: dict[str, Any] = {
    **tiny_config("qwen3", head_dim=64, tied=False, num_hidden_layers=3, vocab_size=112),
    **{"model_type": "qwen3_moe", "decoder_sparse_step": 1, "mlp_only_layers": []},
    **{"moe_intermediate_size": 32, "norm_topk_prob": True},
    **{"num_experts": 8, "num_experts_per_tok": 4},
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("rows", "tiles", "linear_tiles"), [(1, 1, 1), (9, 2, 2), (60, 8, 8)])
def test_a_mixture_is_few_kernels_with_cuda(rows: int, tiles: int, linear_tiles: int) -> None:
    """Four, besides the norm and the router's product."""
    kernels = kernels_of(MIXTURE, rows, dtype=mx.bfloat16, cuda=True)
    linear, expert = f"linear_stream_bfloat16_{linear_tiles}", f"expert_stream_bfloat16_{tiles}"
    norm, write = "add_rms_norm_bfloat16", "rope_write_bfloat16"
    attention = [norm, linear, write, "paged_decode_tensor_bfloat16_64_n1", linear]
    mixture = [norm, linear, "route_experts_bfloat16", expert, expert, "combine_experts_bfloat16"]
    of_layers = [k for k in kernels if k not in ("gather_rows_bfloat16", "rope_rotations")]
    assert of_layers[: 3 * 11] == (attention + mixture) * 3


def test_a_mixture_of_many_rows_has_the_kernels_of_few_with_cuda() -> None:
    kernels = Counter(kernels_of(MIXTURE, 130, dtype=mx.bfloat16, cuda=True))
    assert kernels["route_experts_bfloat16"] == kernels["combine_experts_bfloat16"] == 3
    assert kernels["expert_stream_bfloat16_8"] == 6 and kernels["library_product"]


@pytest.mark.parametrize("kv_format", FORMATS)
def test_a_layer_of_quantized_pools_with_cuda(kv_format: str) -> None:
    """Heads are rotated, then quantized, and queries rotated as integer keys are."""
    config = tiny_config("llama", head_dim=64, tied=False, num_hidden_layers=3, vocab_size=112)
    kernels = kernels_of(
        config, 8, dtype=mx.bfloat16, cuda=True, kv_format=FORMATS[kv_format]
    )  # fmt: skip
    suffix = {"int8_k_int4_v": "int8_int4"}.get(kv_format, kv_format)
    linear, norm = "linear_stream_bfloat16_1", "add_rms_norm_bfloat16"
    write = ["rope_write_bfloat16", f"quantize_rows_bfloat16_64_{suffix}"]
    write += [] if kv_format == "fp8" else ["rotate_rows_bfloat16_64"]
    attention = f"paged_decode_tensor_bfloat16_64_n1_{suffix}"
    layer = [norm, linear, *write, attention, linear, norm, linear, linear]
    of_layers = [k for k in kernels if k not in ("gather_rows_bfloat16", "rope_rotations")]
    assert of_layers[: 2 * len(layer)] == layer * 2


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_products_of_many_rows_are_a_librarys_with_cuda(family: str) -> None:
    """Keys and values in one call, as gate and up."""
    config = tiny_config(family, head_dim=64, tied=False, num_hidden_layers=3, vocab_size=112)
    kernels = kernels_of(config, 65, dtype=mx.bfloat16, cuda=True)
    product, attention = "library_product", "paged_decode_tensor_bfloat16_64_n1"
    norm, write, table = "add_rms_norm_bfloat16", "rope_write_bfloat16", "gather_rows_bfloat16"
    layer = [norm, product, product, write, attention, product]
    layer += [norm, product, "silu_mul_bfloat16", product]
    ends = [norm, table, product, "greedy_tokens_bfloat16"]
    assert sorted(kernels) == sorted([*layer * 3, table, "rope_rotations", *ends])
    first_layer = [kernel for kernel in kernels if kernel not in (table, "rope_rotations")]
    assert first_layer[: len(layer)] == layer


# --- Kernels --------------------------------------------------------------------------------------


def values_of(rng: np.random.Generator, *shape: int, dtype: mx.Dtype) -> tuple[mx.array, Any]:
    """An evaluated array and, in float64, exactly what it holds."""
    array = mx.array(rng.standard_normal(shape).astype(np.float32)).astype(dtype)
    mx.eval(array)
    return array, exact_of(array)


def exact_of(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def assert_close(got: mx.array, expected: np.ndarray, tolerance: float) -> None:
    assert got.shape == expected.shape
    error = np.linalg.norm(exact_of(got) - expected, axis=-1)
    assert (error <= tolerance * (np.linalg.norm(expected, axis=-1) + 1e-30)).all()


def run(
    build: Callable[..., list[mx.array]], *inputs: mx.array, **options: Any
) -> tuple[list[mx.array], list[dict[str, Any]]]:
    """The program of what `build` makes of the inputs, its outputs and its launches."""
    mx.eval(inputs)
    with simulated():
        unknown = executables.placeholders(inputs)
        program = executables.GpuExecutable(unknown, build(*unknown), **options)
        outputs = program(list(inputs))
        mx.eval(outputs)
        return outputs, launches()


def normed(x: np.ndarray, weight: np.ndarray, eps: float = 1e-5) -> np.ndarray:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * weight


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 8), (3, 1, 960), (2, 8200)])
def test_a_norm_after_an_addition(rng, dtype, shape) -> None:
    x, exact = values_of(rng, *shape, dtype=dtype)
    added, exact_added = values_of(rng, *shape, dtype=dtype)
    weight, exact_weight = values_of(rng, shape[-1], dtype=dtype)
    [out], [launch] = run(lambda x, added: [ops.rms_norm(x + added, weight, 1e-5)], x, added)
    expected = exact_of(mx.array(exact + exact_added, mx.float32).astype(dtype))
    assert_close(out, normed(expected, exact_weight), TOLERANCE[dtype])
    assert launch["kernel"].startswith("add_rms_norm") and launch["grid"][0] == shape[0]
    sizes = [x.nbytes, x.nbytes, shape[0] * weight.nbytes]
    assert [launch["traffic"][i] for i in (0, 1, 2)] == [(size, 0) for size in sizes]
    assert [launch["traffic"][i][1] for i in (3, 4)] == [x.nbytes, x.nbytes]


def test_a_sum_that_is_needed_again_is_kept(rng) -> None:
    x, _ = values_of(rng, 3, 64, dtype=mx.float32)
    added, _ = values_of(rng, 3, 64, dtype=mx.float32)
    weight, _ = values_of(rng, 64, dtype=mx.float32)

    def build(x: mx.array, added: mx.array) -> list[mx.array]:
        total = x + added
        return [ops.rms_norm(total + ops.rms_norm(total, weight, 1e-5), weight, 1e-5)]

    [out], ran = run(build, x, added)
    np.testing.assert_allclose(np.array(out), np.array(build(x, added)[0]), atol=1e-5)
    assert len(ran) == 2


HEADS = {  # rows, query heads, KV heads, key dim, value dim, rotated dims, traditional
    "half the dims": (3, 6, 2, 64, 64, 32, False),
    "all of them": (2, 4, 4, 128, 128, 128, False),
    "pairs": (5, 3, 1, 80, 80, 80, True),
    "other values": (2, 2, 2, 192, 128, 64, True),
    "none": (2, 2, 1, 64, 64, 0, False),
}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("has_norm", [False, True])
def test_heads_are_normed_rotated_and_written(rng, name: str, dtype, has_norm: bool) -> None:
    rows, q_heads, kv_heads, dim, value_dim, dims, traditional = HEADS[name]
    sizes = [q_heads * dim, kv_heads * dim, kv_heads * value_dim]
    packed, exact = values_of(rng, rows, sum(sizes), dtype=dtype)
    weights = [values_of(rng, dim, dtype=dtype) for _ in range(2)]
    positions = rng.integers(0, 5000, rows).astype(np.int32)
    inv_freqs = (10000.0 ** (-np.arange(dims // 2) / max(dims // 2, 1))).astype(np.float32)
    slots = rng.permutation(16)[:rows].astype(np.int32)
    slots[0] = -1
    pools = [values_of(rng, 2, 8, kv_heads, d, dtype=dtype)[0] for d in (dim, value_dim)]
    before = [bits(pool).reshape(16, -1).copy() for pool in pools]
    table = mx.zeros((rows, 1), mx.int32)
    items = mx.array([[i, i, i + 1, 0, 0, -1] for i in range(rows)], mx.int32)
    merges = mx.zeros((0, 4), mx.int32)
    identity = mx.eye(q_heads * value_dim, dtype=dtype)
    mx.eval(identity)

    def build(packed, positions, slots, table, items, merges, keys, values) -> list[mx.array]:
        parts = mx.split(packed, np.cumsum(sizes)[:2].tolist(), axis=1)
        q, k, v = (
            part.reshape(rows, 1, heads, -1)
            for part, heads in zip(parts, (q_heads, kv_heads, kv_heads), strict=True)
        )
        if has_norm:
            q, k = (ops.rms_norm(a, w, 1e-5) for a, (w, _) in zip((q, k), weights, strict=True))
        q, k = q.transpose(0, 2, 1, 3), k.transpose(0, 2, 1, 3)
        if dims:
            rotations = ops.rope_rotations(positions, mx.array(inv_freqs), scale=0.5)
            q, k = (ops.rope(a, rotations, traditional=traditional) for a in (q, k))
        keys, values = ops.write_kv(keys, values, k[:, :, 0], v[:, 0], slots)
        plan = ops.AttentionPlan(positions, slots, table, slots, slots, items, merges)
        out = ops.paged_attention(q.squeeze(2), keys, values, plan, scale=0.1)
        return [ops.linear(out.reshape(rows, -1), identity), keys, values]

    inputs = [packed, mx.array(positions), mx.array(slots), table, items, merges, *pools]
    (_, *written), ran = run(build, *inputs)
    [launch] = [x for x in ran if x["kernel"].startswith("rope_write")]
    assert launch["traffic"][8][1] == pools[0].nbytes // 16 * (rows - 1)

    parts = [
        part.reshape(rows, heads, -1)
        for part, heads in zip(
            np.split(exact, np.cumsum(sizes)[:2], axis=1), (q_heads, kv_heads, kv_heads)
        )
    ]
    keys, values = parts[1:]
    if has_norm:
        keys = normed(keys, weights[1][1])
    angles = ((positions.astype(np.float32) * np.float32(0.5))[:, None] * inv_freqs).astype(float)
    first = slice(0, dims, 2) if traditional else slice(0, dims // 2)
    second = slice(1, dims, 2) if traditional else slice(dims // 2, dims)
    turned = (keys[..., first] + 1j * keys[..., second]) * np.exp(1j * angles)[:, None]
    rotated = keys.copy()
    rotated[..., first], rotated[..., second] = turned.real, turned.imag
    tolerance = TOLERANCE[dtype] * 2
    for pool, rows_of_pool, old in zip(written, (rotated, values), before, strict=True):
        flat = pool.reshape(16, kv_heads, -1)
        for row, slot in enumerate(slots):
            if slot >= 0:
                assert_close(flat[int(slot)], rows_of_pool[row], tolerance)
        others = np.setdiff1d(np.arange(16), slots)
        np.testing.assert_array_equal(bits(pool).reshape(16, -1)[others], old[others])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 8, 11])
@pytest.mark.parametrize("has_residual", [False, True])
def test_a_product(rng, dtype, rows: int, has_residual: bool) -> None:
    x, exact = values_of(rng, rows, 72, dtype=dtype)
    weight, exact_weight = values_of(rng, 42, 72, dtype=dtype)
    residual, exact_residual = values_of(rng, rows, 42, dtype=dtype)

    def build(x: mx.array, residual: mx.array) -> list[mx.array]:
        product = ops.linear(x, weight)
        return [residual + product if has_residual else product]

    [out], [launch] = run(build, x, residual)
    expected = exact @ exact_weight.T + (exact_residual if has_residual else 0)
    assert_close(out, expected, TOLERANCE[dtype] * 2)
    assert launch["traffic"][1] == (weight.nbytes, 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_product_of_mlxs_with_a_bias(rng, dtype) -> None:
    x, exact = values_of(rng, 3, 72, dtype=dtype)
    weight, exact_weight = values_of(rng, 42, 72, dtype=dtype)
    bias, exact_bias = values_of(rng, 42, dtype=dtype)
    [out], ran = run(lambda x: [mx.addmm(bias, x, weight.T)], x)
    assert_close(out, exact @ exact_weight.T + exact_bias, TOLERANCE[dtype] * 2)
    assert len(ran) == 1
    for build in (
        lambda x: mx.addmm(bias, x, weight.T, alpha=2.0),
        lambda x: mx.addmm(mx.ones((3, 42), dtype), x, weight.T),
    ):
        with pytest.raises(ValueError, match="the operation AddMM"):
            run(lambda x: [build(x)], x)  # noqa: B023


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gate_and_up(rng, dtype) -> None:
    x, exact = values_of(rng, 3, 64, dtype=dtype)
    (gate, exact_gate), (up, exact_up) = (values_of(rng, 40, 64, dtype=dtype) for _ in range(2))
    [out], ran = run(lambda x: [ops.silu_mul(ops.linear(x, gate), ops.linear(x, up))], x)
    g, u = exact @ exact_gate.T, exact @ exact_up.T
    assert_close(out, g / (1 + np.exp(-g)) * u, TOLERANCE[dtype] * 3)
    assert len(ran) == 3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gate_that_is_half_of_a_product(rng, dtype) -> None:
    x, exact = values_of(rng, 3, 80, dtype=dtype)

    def build(x: mx.array) -> list[mx.array]:
        return [ops.silu_mul(*mx.split(x, 2, axis=1))]

    [out], [launch] = run(build, x)
    g, u = exact[:, :40], exact[:, 40:]
    assert_close(out, g / (1 + np.exp(-g)) * u, TOLERANCE[dtype])
    assert launch["kernel"].startswith("silu_mul")


# --- Mixtures of experts


@pytest.mark.one_in(8)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("router", "rows", "num_experts", "top_k"),
    [
        ("softmax, last", 1, 5, 2), ("normalised", 9, 40, 8), ("first, softmax", 33, 4, 3),
        ("first, softmax", 17, 130, 3), ("normalised", 40, 2, 2), ("normalised", 150, 12, 8),
    ],
)  # fmt: skip
def test_a_mixture(rng, dtype, has_bias, router: str, rows: int, num_experts: int, top_k: int):
    experts = Experts(rng, num_experts, 40, 16, dtype, has_bias=has_bias)
    x, _ = values_of(rng, rows, 1, 40, dtype=dtype)
    logits = logits_apart(rng, rows, num_experts, dtype)
    [out], ran = run(lambda x, logits: [experts.build(x, logits, router, top_k)], x, logits)
    chosen, shares = chosen_by(router, exact_of(logits)[:, 0], top_k)
    assert_close(out, experts.expected(x, chosen, shares), TOLERANCE[dtype] * 4)
    kernels = ["route_experts", "expert_rows", "expert_rows", "silu_mul", "expert_rows"]
    names = [launch["kernel"].partition("_m")[0] for launch in ran]
    assert names == [
        f"{kernel}_{dtype_name(dtype)}".partition("_m")[0]
        for kernel in (*kernels, "combine_experts")
    ]
    # Each expert's matrix is read once, or once for each 16 of its chosen.
    counts = np.unique(chosen, return_counts=True)[1]
    items = int((-(-counts // 16)).sum())
    assert ran[1]["traffic"][1][0] == items * 16 * 40 * x.itemsize


def dtype_name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")


@pytest.mark.parametrize("takes_last", [False, True])
@pytest.mark.parametrize("values", ["equal", "some equal", "not finite"])
def test_which_of_equal_experts_are_chosen(rng, values: str, takes_last: bool) -> None:
    """Those that a stable sort has first or last. Whatever the numbers, they are `top_k` others."""
    rows, num_experts, top_k = 6, 50, 7
    logits = rng.integers(0, 3, (rows, num_experts)).astype(np.float32)
    if values == "equal":
        logits[:] = 1
    if values == "not finite":
        logits[:] = rng.choice([np.nan, -np.inf, np.inf, -np.nan, 0], logits.shape)
    name = "normalised" if takes_last else "first, softmax"
    # Each expert's result says which it is.
    down = mx.array(np.eye(num_experts, dtype=np.float32))[:, :, None] * mx.ones((1, 1, 4))
    ones = mx.ones((num_experts, 4, 8))

    def build(x: mx.array, logits: mx.array) -> list[mx.array]:
        indices, shares = ROUTERS[name](logits, top_k)
        x = mx.expand_dims(x, (-2, -3))
        gate, up = (ops.expert_linear(x, indices, ones, for_program=True) for _ in range(2))
        y = ops.expert_linear(ops.silu_mul(gate, up), indices, down, for_program=True)
        return [(y.squeeze(-2) * shares[..., None]).sum(axis=-2)]

    down = mx.pad(down, ((0, 0), (0, 2), (0, 0)))  # rows of 16 bytes
    x = mx.ones((rows, 1, 8))
    [out], _ = run(build, x, mx.array(logits)[:, None])
    if values != "not finite":  # (whose experts exist: the simulator would say if they did not)
        found = [set(np.flatnonzero(row)) for row in np.array(out)[:, 0]]
        chosen, _ = chosen_by(name, logits.astype(np.float64), top_k)
        assert found == [set(row) for row in chosen]


def test_mixtures_of_other_forms_are_refused(rng) -> None:
    """Weights that are no share of a softmax, experts without an activation or with another."""
    weight = mx.ones((4, 8, 8))

    router = mx.ones((4, 8))

    def build(x: mx.array, route: Router, activate: Any) -> mx.array:
        indices, shares = route(ops.linear(x, router), 2)
        x = mx.expand_dims(x, (-2, -3))
        gate, up = (ops.expert_linear(x, indices, weight, for_program=True) for _ in range(2))
        y = ops.expert_linear(activate(gate, up), indices, weight, for_program=True)
        return (y.squeeze(-2) * shares[..., None]).sum(axis=-2)

    def raw(logits: mx.array, top_k: int) -> tuple[mx.array, mx.array]:
        indices = mx.argpartition(logits, kth=-top_k, axis=-1)[..., -top_k:]
        return indices, mx.take_along_axis(logits, indices, axis=-1)

    def of_others(logits: mx.array, top_k: int) -> tuple[mx.array, mx.array]:
        _, shares = softmax_and_last(logits, top_k)
        return softmax_and_last(logits[..., ::-1], top_k)[0], shares

    def middle(logits: mx.array, top_k: int) -> tuple[mx.array, mx.array]:
        shares = mx.softmax(logits, axis=-1)
        indices = mx.argpartition(shares, kth=1, axis=-1)[..., 1 : 1 + top_k]
        return indices, mx.take_along_axis(shares, indices, axis=-1)

    with simulated():
        [x] = executables.placeholders([mx.zeros((3, 1, 8))])
        for route, activate in (
            *((route, ops.silu_mul) for route in (raw, of_others, middle)),
            (softmax_and_last, lambda gate, up: ops.clipped_swiglu(gate, up, alpha=1.7, limit=7.0)),
            (softmax_and_last, lambda gate, up: gate),
        ):
            with pytest.raises(ValueError, match="cannot compile this graph"):
                executables.GpuExecutable([x], [build(x, route, activate)])
        # (They are refused for what they are: this one is not.)
        executables.GpuExecutable([x], [build(x, softmax_and_last, ops.silu_mul)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_a_table(rng, dtype) -> None:
    table, _ = values_of(rng, 9, 2200, dtype=dtype)
    rows = [3, 0, -1, 8, 9, -10]
    [out], _ = run(lambda rows: [table[rows]], mx.array(rows))
    for row, values in zip(rows, exact_of(out), strict=True):
        if -9 <= row < 9:
            np.testing.assert_array_equal(values, exact_of(table[row]))
        else:
            assert np.isnan(values).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 37, 96, 1024, 40000])
def test_greedy_tokens(rng, dtype, size: int) -> None:
    values = rng.integers(-3, 3, (8, size)).astype(np.float32)  # (with many equals)
    values[0] = -np.inf
    values[1, size // 2] = np.inf
    values[2, size // 3] = np.nan
    values[3, -1] = 7.0
    values[4, 0] = -np.nan
    logits = mx.array(values).astype(dtype)
    mx.eval(logits)
    with simulated():
        tokens, largest, reported = ops.greedy_tokens(logits)
        mx.eval(tokens, largest, reported)
        [launch] = launches()
    assert launch["kernel"].startswith("greedy_tokens")
    assert launch["traffic"][0] == (logits.nbytes, 0)
    expected = values.max(axis=1)
    np.testing.assert_array_equal(np.array(largest), expected)
    is_number = ~np.isnan(expected)
    got = np.array(tokens)
    np.testing.assert_array_equal(got[is_number], values.argmax(axis=1)[is_number])
    assert ((got >= 0) & (got < size)).all()
    np.testing.assert_array_equal(np.array(reported), np.where(np.isfinite(expected), got, -1))


# --- Steps that are replayed ----------------------------------------------------------------------


def products_of(rng: np.random.Generator, rows: int, size: int) -> tuple[Any, mx.array, mx.array]:
    """A program of two products, an input, and what it gives. (Within `simulated`.)"""
    x, _ = values_of(rng, rows, size, dtype=mx.float32)
    weights = [values_of(rng, size, size, dtype=mx.float32)[0] for _ in range(2)]

    def build(x: mx.array) -> mx.array:
        return ops.linear(ops.linear(x, weights[0]), weights[1])

    [unknown] = executables.placeholders([x])
    program = executables.GpuExecutable([unknown], [build(unknown)])
    expected = build(x)
    mx.eval(expected)
    return program, x, expected


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Fills in the steps, captures and replays of programs."""
    before, counts = sim_ext.step_counts(), {}
    yield counts
    after = sim_ext.step_counts()
    counts |= {name: after[name] - before[name] for name in ("steps", "captures", "replays")}


def test_a_step_is_captured_when_it_repeats_and_its_results_are_new_arrays(rng) -> None:
    with simulated():
        program, x, expected = products_of(rng, 3, 64)
        with counted() as first:
            results = [program([x])[0]]
            mx.eval(results)
        assert first == {"steps": 1, "captures": 0, "replays": 0}
        with counted() as others:
            results += [program([x * scale])[0] for scale in (2, 3)]
            mx.eval(results)
        assert others == {"steps": 2, "captures": 1, "replays": 2}
        for scale, result in zip((1, 2, 3), results, strict=True):
            np.testing.assert_allclose(
                np.array(result), np.array(expected) * scale, rtol=1e-3, atol=1e-3
            )


def test_a_capture_that_fails_leaves_nothing(rng) -> None:
    with simulated():
        program, x, expected = products_of(rng, 3, 64)
        mx.eval(program([x])[0])
        sim_ext.fail_next_capture()
        with pytest.raises(RuntimeError, match="a capture that fails"):
            mx.eval(program([x])[0])
        with counted() as found:
            [result] = program([x])
            mx.eval(result)
        assert found == {"steps": 1, "captures": 1, "replays": 1}
        np.testing.assert_allclose(np.array(result), np.array(expected), rtol=1e-5)


def test_programs_share_their_memory_and_give_it_back(rng) -> None:
    gc.collect()
    with simulated():
        before = sim_ext.step_counts()["memory"]
        made = [products_of(rng, rows, 256) for rows in (8, 1, 2, 3, 4, 5, 6, 7, 8)]
        for _ in range(2):
            for program, x, expected in made:
                [result] = program([x])
                np.testing.assert_allclose(
                    np.array(result), np.array(expected), rtol=1e-3, atol=1e-2
                )
        largest = 2 * 8 * 256 * 4  # its input and the first product
        memory = sim_ext.step_counts()["memory"]
        assert largest <= memory - before <= largest + 4096
        del made, program
        gc.collect()
        assert sim_ext.step_counts()["memory"] == before


def test_memory_that_grows_does_so_in_few_steps(rng) -> None:
    """Graphs captured earlier keep their memory, together no more than the newest."""
    with simulated():
        before = sim_ext.step_counts()["memory"]
        made = [products_of(rng, rows, 256) for rows in range(1, 9)]
        for _ in range(2):
            for program, x, expected in made:
                [result] = program([x])
                np.testing.assert_allclose(
                    np.array(result), np.array(expected), rtol=1e-3, atol=1e-2
                )
        assert sim_ext.step_counts()["memory"] - before <= 4 * 2 * 8 * 256 * 4


def test_attention_that_is_launched_otherwise_is_captured_anew(rng) -> None:
    driver, graphs = driver_of(CONFIGS["llama"]), driver_of(CONFIGS["llama"])
    for each in (driver, graphs):
        with simulated():
            each.step({"a": new_tokens(np.random.default_rng(1), 20), "b": [3]})
    with simulated():
        steps = with_programs(driver)
        driver.step({"a": [1], "b": [2]})
        graphs.step({"a": [1], "b": [2]})
        program, inputs = steps.made[-1]
        with counted() as found:
            for _ in range(3):
                logits, *_ = program([*inputs[:-8], *driver.runner.model.pools()])
                mx.eval(logits)
        assert found == {"steps": 3, "captures": 1, "replays": 3}


def test_a_program_takes_a_plan_of_any_size(rng) -> None:
    """Contexts grow, and their pieces and merges become more. The memory of the inputs grows with
    them, and is captured anew."""
    driver, graphs = driver_of(CONFIGS["llama"]), driver_of(CONFIGS["llama"])
    steps = driver.runner.model._compiled
    run_as_on(driver.runner.model, **CUDA_PROGRAMS)
    for name, count in (("a", 2), ("b", 300)):
        list(steps_of_both(rng, driver, graphs, [{name: count}], 2e-5))
    num_programs = len(steps._graphs)
    with simulated():
        set_piece_tokens(8)
    try:
        with counted() as found:
            # The pieces of contexts of some tokens, and of some more than 300.
            for names in ("a", "b", "a", "b"):
                assert len(list(steps_of_both(rng, driver, graphs, [{names: 1}] * 3, 2e-5))) == 3
    finally:
        with simulated():
            set_piece_tokens(0)
    assert steps.refusals == Refusals()
    assert len(steps._graphs) == num_programs + 1, "one program for a row"
    assert found["steps"] == 12 and found["captures"] >= 2


# --- Refusals -------------------------------------------------------------------------------------

REFUSALS: dict[str, tuple[Callable[[mx.array], Any], str]] = {
    "another operation": (mx.exp, "the operation Exp"),
    "an addition alone": (lambda x: x + x, "the operation Add"),
    "rows of odd sizes": (lambda x: ops.rms_norm(x[:, :7], mx.ones(7), 1e-5), "a norm of rows"),
    "a view of another value": (
        lambda x: ops.rms_norm(x, mx.ones(16), 1e-5)[:, :8],
        "a result that is part",
    ),
    "no dependence": (lambda x: mx.ones((3, 8)), "an output does not depend"),
}


def weights_in_the_middle() -> mx.array:
    """Sixteen weights, two bytes behind a multiple of 16."""
    whole = mx.arange(33, dtype=mx.float16)
    mx.eval(whole)
    part = whole[1:17]
    mx.eval(part)
    return part


def test_weights_that_begin_anywhere_are_refused() -> None:
    part = weights_in_the_middle()
    with simulated():
        [x] = executables.placeholders([mx.zeros((3, 16), mx.float16)])
        for out in (ops.rms_norm(x, part, 1e-5), x @ mx.broadcast_to(part, (16, 16)).T):
            with pytest.raises(ValueError, match=r"16 bytes|not dense"):
                executables.GpuExecutable([x], [out])


@pytest.mark.parametrize("name", REFUSALS)
def test_what_a_program_cannot_run_is_said(name: str) -> None:
    build, reason = REFUSALS[name]
    with simulated():
        [x] = executables.placeholders([mx.zeros((3, 16))])
        with pytest.raises(ValueError, match=reason):
            executables.GpuExecutable([x], [build(x)])


def test_other_shapes_and_dtypes_are_refused() -> None:
    with simulated():
        [x] = executables.placeholders([mx.zeros((3, 16))])
        program = executables.GpuExecutable([x], [ops.rms_norm(x, mx.ones(16), 1e-5)])
        for wrong in ([], [mx.zeros((4, 16))], [mx.zeros((3, 16), mx.float16)]):
            with pytest.raises(ValueError, match="gpu_executable"):
                program(wrong)


# --- Steps with prompts ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3", "windows"])
def test_steps_with_prompts_are_padded_and_become_programs(rng, name: str) -> None:
    """Prompts of other lengths, alone and beside decodes, in as many rows; and one that is not
    sampled from, which is no program and does not keep the others from being one."""
    ours, graphs = driver_of(CONFIGS[name]), driver_of(CONFIGS[name])
    work = [{"a": 5}, {"b": 11}, {"c": 16}, {"d": 7}, {"a": 1, "e": 9}, {"b": 12}]
    steps = ours.runner.model._compiled
    made = []
    run_as_on(ours.runner.model, **CUDA_PROGRAMS)
    with simulated():
        for part in work:
            tokens = {sequence: new_tokens(rng, count) for sequence, count in part.items()}
            with counted() as found:
                actual = ours.step(tokens)
            made.append(found["steps"])
            expected = graphs.step(tokens)
            for sequence, logits in expected.items():
                np.testing.assert_allclose(actual[sequence], logits, atol=2e-5)
    assert made == [1] * 6
    assert steps.refusals == Refusals()


@pytest.mark.parametrize("name", ["llama", "windows"])
def test_steps_as_metal_runs_them(rng, name: str) -> None:
    """Decodes whose shape repeats, encoded anew in each step; nothing is captured."""
    ours, graphs = driver_of(CONFIGS[name]), driver_of(CONFIGS[name])
    steps = ours.runner.model._compiled
    run_as_on(ours.runner.model, max_gpu_step_rows=4)
    with simulated():
        sim_ext.capture_steps(False)
        try:
            captures = sim_ext.step_counts()["captures"]
            num_launches = []
            for part in [{"a": 5, "b": 9, "c": 1}, *[dict.fromkeys("abc", 1)] * 9]:
                tokens = {sequence: new_tokens(rng, count) for sequence, count in part.items()}
                expected = graphs.step(tokens)
                launches()
                actual = ours.step(tokens)
                num_launches.append(len([o for o in launches() if o["kernel"] != "write_kv"]))
                for sequence, logits in expected.items():
                    np.testing.assert_allclose(actual[sequence], logits, atol=2e-5)
            assert sim_ext.step_counts()["captures"] == captures
        finally:
            sim_ext.capture_steps(True)
    assert not steps.refusals.executables and steps._graphs
    # (The graph's operations that are no kernels of ours run on the CPU here.)
    assert min(num_launches[1:]) > num_launches[0]


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_steps_that_are_no_programs_of_metal_run_as_before(rng, family: str) -> None:
    ours, graphs = family_driver(family), family_driver(family)
    run_as_on(ours.runner.model, max_gpu_step_rows=4)
    with simulated():
        for _ in range(5):
            tokens = {sequence: new_tokens(rng, 1) for sequence in "ab"}
            actual, expected = ours.step(tokens), graphs.step(tokens)
            for sequence, logits in expected.items():
                np.testing.assert_allclose(actual[sequence], logits, atol=2e-5)
    assert ours.runner.model._compiled.refusals.steps


def test_a_step_is_under_way_when_the_next_one_is_built(rng, monkeypatch) -> None:
    """Its pools have the handles of before, so nothing built on them waits for it."""
    driver = driver_of(CONFIGS["qwen3"])
    steps = driver.runner.model._compiled
    run_as_on(driver.runner.model, **CUDA_PROGRAMS)
    made, run = [], steps.run

    def watched(*args: Any) -> Any:
        with counted() as found:
            result = run(*args)
        made.append(found["steps"])
        assert made[-1] == 0 or all(a is b for a, b in zip(result[1], args[2], strict=True))
        return result

    monkeypatch.setattr(steps, "run", watched)
    with simulated():
        for _ in range(5):
            driver.step({"a": new_tokens(rng, 1)})
    assert made == [1] * 5


def test_all_that_is_asked_of_a_step_is_under_way_when_it_is_launched(rng, monkeypatch) -> None:
    """A program chooses greedily by itself; what else is asked for is launched behind it."""
    driver, started = driver_of(CONFIGS["qwen3"]), []
    begin = mx.async_eval
    monkeypatch.setattr(mx, "async_eval", lambda *a: started.append(a) or begin(*a))

    def launch(sampling: SamplingRow) -> Any:
        row = driver.schedule("a", new_tokens(rng, 1))._replace(sampling=sampling)
        started.clear()
        return driver.runner.launch(step_of([row], step=9), None)

    run_as_on(driver.runner.model, **CUDA_PROGRAMS)
    drawn, reporting = GREEDY._replace(temperature=1.0), GREEDY._replace(logprobs=2)
    with simulated():
        for _ in range(4):
            launch(GREEDY)
        greedy = launch(GREEDY)
        assert len(started) == 1 and driver.runner.read(greedy).token_ids[0]
        for sampling in (drawn, reporting):
            launched = launch(sampling)
            [_, behind] = started
            results = launched.results
            assert all(any(a is result for a in behind) for result in results)
            driver.runner.read(launched)
        assert len(results) > 1, "log-probabilities too"


def test_prompts_that_are_no_programs_do_not_keep_decodes_from_it(rng) -> None:
    driver = driver_of(CONFIGS["qwen3"])
    steps = driver.runner.model._compiled
    run_as_on(driver.runner.model, **CUDA_PROGRAMS)
    with simulated():
        sim_ext.fail_next_preparation()
        driver.step({"a": new_tokens(rng, 5)})
        assert steps.refusals.prompts and not steps.refusals.executables
        five = steps.repetition_of(5, 1, 1, is_of_arrays=True, may_pad_prompts=True)
        assert five.repeat is Repeat.NOT and five.num_rows == 5
        with counted() as found:
            for _ in range(4):
                driver.step({"a": new_tokens(rng, 1)})
        assert found == {"steps": 4, "captures": 1, "replays": 3}
