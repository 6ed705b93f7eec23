"""The passes over a step's graph: the nodes that each one takes in, and those that it leaves."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest
from support.mixtures import ROUTERS, Experts, softmax_and_last
from support.simulated import needs_simulator, sim_ext, simulated

from mlx_paged import executables, ops
from mlx_paged.model.plan import build_plan

pytestmark = needs_simulator

Build = Callable[..., mx.array | list[mx.array]]
SIZE = 64
X = (3, SIZE)


def weight(n: int = SIZE, k: int = SIZE, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.ones((n, k), dtype)


def fusions(name: str, build: Build, *arrays: mx.array) -> list[tuple[str, list[str]]]:
    with simulated():
        inputs = executables.placeholders(arrays or [mx.zeros(X)])
        made = build(*inputs)
        return sim_ext.run_pass(inputs, made if isinstance(made, list) else [made], name)


def linear(x: mx.array, n: int = SIZE) -> mx.array:
    """On a GPU without kernels of its own: MLX's product."""
    return ops.linear(x, weight(n, x.shape[-1]))


# --- Gate and up ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "build",
    [
        lambda x: ops.silu_mul(linear(x), linear(x)),
        lambda x: ops.silu_mul(linear(x[:, None]), linear(x[:, None])),
        lambda x: ops.silu_mul(linear(x).reshape(3, 1, SIZE), linear(x).reshape(3, 1, SIZE)),
    ],
)
def test_gate_and_up_of_one_input_are_one_node(build: Build) -> None:
    assert fusions("gate_up", build) == [("silu_mul", ["Matmul", "Matmul"])]


def shared_gate(x: mx.array) -> list[mx.array]:
    gate = linear(x)
    return [ops.silu_mul(gate, linear(x)), gate]


def gate_read_in_another_shape(x: mx.array) -> list[mx.array]:
    gate = linear(x)
    return [ops.silu_mul(gate.reshape(3, 1, SIZE), linear(x).reshape(3, 1, SIZE)), gate]


@pytest.mark.parametrize(
    "build",
    [
        shared_gate,
        gate_read_in_another_shape,
        lambda x: ops.silu_mul(linear(x), linear(x * 2.0)),
        lambda x: ops.silu_mul(linear(x), x),
        lambda x: ops.silu_mul(*[linear(x)] * 2),
        lambda x: ops.silu_mul(linear(x).reshape(6, 32), linear(x).reshape(6, 32)),  # other rows
    ],
)
def test_other_gates_stay_apart(build: Build) -> None:
    assert fusions("gate_up", build) == []


@pytest.mark.parametrize("same", [True, False])
def test_gate_and_up_of_the_same_experts(same: bool) -> None:
    matrices = mx.ones((4, 16, SIZE))

    def build(x: mx.array, chosen: mx.array, others: mx.array) -> mx.array:
        gate = ops.expert_linear(x, chosen, matrices, for_program=True)
        up = ops.expert_linear(x, chosen if same else others, matrices, for_program=True)
        return ops.silu_mul(gate, up)

    indices = mx.zeros((3, 2), mx.uint32)
    found = fusions("gate_up", build, mx.zeros((3, 2, 1, SIZE)), indices, indices)
    assert found == ([("silu_mul", ["expert_linear"] * 2)] if same else [])


# --- Residuals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "build",
    [
        lambda x: x + linear(x),
        lambda x: linear(x) + x,
        lambda x: x + mx.matmul(x, weight().T),
        lambda x: x[:, None] + linear(x)[:, None],
    ],
)
def test_a_product_adds_its_residual(build: Build) -> None:
    [(node, parts)] = fusions("residual", build)
    assert (node, parts) == ("Add", ["Matmul"])


def summed_twice(x: mx.array) -> list[mx.array]:
    product = linear(x)
    return [x + product, product]


@pytest.mark.parametrize("build", [summed_twice, lambda x: x + x, lambda x: x + linear(x[:1])])
def test_other_sums_stay_sums(build: Build) -> None:
    assert fusions("residual", build) == []


# --- Adapters -------------------------------------------------------------------------------------


def adapted(x: mx.array, slots: mx.array, rank: int = 8, base: mx.array | None = None) -> mx.array:
    a, b = mx.ones((2, rank, x.shape[-1])), mx.ones((2, rank, SIZE))
    return ops.lora(linear(x) if base is None else base, x, slots, a, b)


def fused_adapters(build: Build) -> list[tuple[str, list[str]]]:
    return fusions("adapters", build, mx.zeros(X), mx.zeros(3, mx.int32))


@pytest.mark.parametrize(
    ("build", "node", "count"),
    [
        (lambda x, s: ops.silu_mul(adapted(x, s), adapted(x, s)), "silu_mul", 2),
        (lambda x, s: ops.silu_mul(adapted(x, s)[:, None], adapted(x, s)[:, None]), "silu_mul", 2),
        (lambda x, s: x + adapted(x, s), "Add", 1),
        (lambda x, s: adapted(x, s) + x, "Add", 1),
    ],
)
def test_adapters_take_in_what_follows(build: Build, node: str, count: int) -> None:
    assert fused_adapters(build) == [(node, ["Matmul", "lora"] * count)]


def adapted_and_read(x: mx.array, slots: mx.array) -> list[mx.array]:
    out = adapted(x, slots)
    return [x + out, out]


def base_is_read(x: mx.array, slots: mx.array) -> list[mx.array]:
    base = linear(x)
    return [x + adapted(x, slots, base=base), base]


@pytest.mark.parametrize(
    "build",
    [
        adapted_and_read,
        base_is_read,
        lambda x, s: x + adapted(x, s, base=x * 2.0),
        lambda x, s: x + adapted(x, s, base=linear(x * 2.0)),
        lambda x, s: ops.silu_mul(adapted(x, s), adapted(x, s, rank=16)),
        lambda x, s: ops.silu_mul(adapted(x, s), adapted(x, s + 1)),
        lambda x, s: ops.silu_mul(adapted(x, s), linear(x)),
    ],
)
def test_other_adapters_stay_apart(build: Build) -> None:
    assert fused_adapters(build) == []


def lone_adapters(build: Build) -> list[tuple[str, list[str]]]:
    return fusions("lone_adapters", build, mx.zeros(X), mx.zeros(3, mx.int32))


def test_an_adapter_takes_in_its_product() -> None:
    found = lone_adapters(lambda x, s: ops.silu_mul(adapted(x, s), adapted(x, s)))
    assert found == [("lora", ["Matmul"])] * 2


@pytest.mark.parametrize("build", [base_is_read, lambda x, s: adapted(x, s, base=linear(x * 2.0))])
def test_other_products_stay_apart(build: Build) -> None:
    assert lone_adapters(build) == []


# --- Norms ----------------------------------------------------------------------------------------


def normed(x: mx.array) -> mx.array:
    return ops.rms_norm(x, weight(1)[0], 1e-5)


def test_a_norm_takes_in_the_sum_before_it() -> None:
    # The norm follows the addition that takes it in.
    assert fusions("add_norm", lambda x: normed(x + x)) == [("Add", []), ("", ["rms_norm"])]


def test_other_norms_stay_alone() -> None:
    assert fusions("add_norm", lambda x: normed(x * x)) == []
    assert fusions("add_norm", lambda x: normed(x) + x) == []


# --- Queries, keys and values ---------------------------------------------------------------------

HEADS, HEAD_DIM = 2, 64


def attention(
    x: mx.array,
    *rest: mx.array,
    norm: bool = False,
    traditional: bool = False,
    reads_keys: bool = False,
    ranks: tuple[int, ...] = (),
) -> list[mx.array]:
    *arrays, rotations, key_pool, value_pool = rest
    plan = ops.AttentionPlan(*arrays)
    of_heads = iter(ranks)  # of keys, queries and values; 0: no adapters

    def heads(n: int = HEADS) -> mx.array:
        product = ops.linear(x, weight(n * HEAD_DIM, x.shape[-1], x.dtype))
        if rank := next(of_heads, 0):
            stacks = [mx.ones((2, rank, size), x.dtype) for size in (SIZE, n * HEAD_DIM)]
            product = ops.lora(product, x, plan.positions, *stacks)
        return product.reshape(-1, n, 1, HEAD_DIM)

    def rotated(a: mx.array) -> mx.array:
        if norm:
            a = ops.rms_norm(a, mx.ones((HEAD_DIM,), a.dtype), 1e-5)
        return ops.rope(a, rotations, traditional=traditional)

    rotated_keys = rotated(heads())
    queries, keys, values = (a.squeeze(2) for a in (rotated(heads()), rotated_keys, heads()))
    written = ops.write_kv(key_pool, value_pool, keys, values, plan.slot_mapping)
    out = ops.paged_attention(queries, *written, plan, scale=0.1)
    return [out, *([rotated_keys * 2.0] if reads_keys else []), *written]


def inputs_of_attention(dtype: mx.Dtype) -> list[mx.array]:
    plan = build_plan([[1], [2], [3]], [3, 8, 5], [1, 1, 1], block_size=8)
    arrays = [getattr(plan, f) for f in plan.__dataclass_fields__ if f != "bounds"]
    pool = mx.zeros((4, 8, HEADS, HEAD_DIM), dtype)
    return [mx.zeros(X, dtype), *arrays, mx.zeros((3, 2, HEAD_DIM // 2)), pool, pool + 1]


@pytest.mark.parametrize(
    ("options", "dtype", "parts"),
    [
        ({}, mx.bfloat16, ["Matmul", "rope", "Matmul", "rope", "Matmul"]),
        ({"ranks": (0, 8, 8)}, mx.bfloat16, ["Matmul", "rope", "lora"] * 2 + ["Matmul"]),
        ({"ranks": (16, 8, 8)}, mx.bfloat16, ["rope", "rope"]),  # two launches of lora_down
        ({}, mx.float32, ["rope", "rope"]),  # products in float32 do not write
        ({"traditional": True}, mx.bfloat16, ["rope", "rope"]),
        ({"norm": True}, mx.bfloat16, ["rms_norm", "rope", "rms_norm", "rope"]),
    ],
)
def test_a_write_takes_in_its_heads(options: dict, dtype: mx.Dtype, parts: list[str]) -> None:
    found = fusions("qkv_write", lambda *a: attention(*a, **options), *inputs_of_attention(dtype))
    [(node, before), *after] = found
    assert node == "write_kv"
    # The queries' part may follow the write in the graph's order.
    assert sorted([*before, *(part for _, rest in after for part in rest)]) == sorted(parts)


def test_heads_that_are_read_twice_are_refused() -> None:
    with pytest.raises(RuntimeError, match="heads that are used twice"):
        fusions(
            "qkv_write", lambda *a: attention(*a, reads_keys=True),
            *inputs_of_attention(mx.bfloat16),
        )  # fmt: skip


# --- Experts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("router", ROUTERS)
def test_a_mixture_is_one_node(rng: np.random.Generator, router: str) -> None:
    experts = Experts(rng, 8, 40, 16, mx.float32)
    found = fusions(
        "experts",
        lambda x, logits: experts.build(x, logits, router, 2),
        mx.zeros((3, 1, 40)),
        mx.zeros((3, 1, 8)),
    )
    [(node, parts)] = found
    assert node == "Sum" and parts.count("expert_linear") == 3
    assert {"ArgPartition", "GatherAxis", "Softmax", "Multiply", "silu_mul"} <= set(parts)


def test_a_sum_of_other_weights_is_none() -> None:
    def build(x: mx.array) -> mx.array:
        indices, shares = softmax_and_last(x, 2)
        return (mx.take_along_axis(x, indices, axis=-1) * shares).sum(-1)

    assert fusions("experts", build) == []


def test_shares_of_another_sum_are_none(rng: np.random.Generator) -> None:
    def of_others(logits: mx.array, top_k: int) -> tuple[mx.array, mx.array]:
        indices, shares = softmax_and_last(logits, top_k)
        return indices, shares / mx.sum(mx.softmax(logits), axis=-1, keepdims=True)

    experts = Experts(rng, 8, 40, 16, mx.float32)
    arrays = (mx.zeros((3, 1, 40)), mx.zeros((3, 1, 8)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ROUTERS, "of others", of_others)
        assert fusions("experts", lambda *a: experts.build(*a, "of others", 2), *arrays) == []
