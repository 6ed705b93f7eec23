"""Kernels of programs for GPUs, in the simulator: against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.mixtures import ROUTERS, Experts, Router, chosen_by, logits_apart, softmax_and_last
from support.reference import DTYPES, bits
from support.simulated import launches, needs_simulator, simulated

from mlx_paged import executables, ops

pytestmark = needs_simulator


# Largest error of a row, relative to the row's norm.
TOLERANCE = {mx.float32: 1e-6, mx.float16: 1e-3, mx.bfloat16: 8e-3}


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


@pytest.mark.one_in(12)
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


@pytest.mark.one_in(32)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("router", "rows", "num_experts", "top_k"),
    [
        ("softmax, last", 1, 5, 2), ("normalized", 9, 40, 8), ("first, softmax", 33, 4, 3),
        ("first, softmax", 17, 130, 3), ("normalized", 40, 2, 2), ("normalized", 150, 12, 8),
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
    name = "normalized" if takes_last else "first, softmax"
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
