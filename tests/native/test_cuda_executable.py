"""Decode steps as device programs on an NVIDIA GPU: the kernels of several products against single
ones, to the same bits, and whole steps, replayed, against the graphs that they were read from."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.adapters import with_adapters
from support.gpu_executables import with_programs
from support.mixtures import Experts, chosen_by, logits_apart
from support.models import StepDriver, tiny_config, tiny_model
from support.reference import bits

from mlx_paged import executables, ops
from mlx_paged.model import patches
from mlx_paged.model.kv_formats import FORMATS
from mlx_paged.model.plan import PaddedTables, build_plan

pytestmark = pytest.mark.skipif(not ops.has_cuda(), reason="needs an NVIDIA GPU as the device")

DTYPES = [mx.float16, mx.bfloat16]
ROWS = [1, 7, 8, 9, 16, 17, 33, 64]


def values(rng: np.random.Generator, *shape: int, dtype: mx.Dtype) -> mx.array:
    array = mx.array(rng.standard_normal(shape).astype(np.float32)).astype(dtype)
    mx.eval(array)
    return array


def exact(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def run(build: Any, *inputs: mx.array, **options: Any) -> mx.array:
    unknown = executables.placeholders(inputs)
    program = executables.GpuExecutable(unknown, [build(*unknown)], **options)
    first = program(list(inputs))[0]
    second = program(list(inputs))[0]
    mx.eval(first, second)
    np.testing.assert_array_equal(bits(first), bits(second))
    return first


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [64, 3072])
def test_a_product_with_a_residual(rng, dtype, k: int) -> None:
    weight, bias = values(rng, 144, k, dtype=dtype), values(rng, 144, dtype=dtype)
    for rows, b in itertools.product(ROWS, (None, bias)):
        x, residual = values(rng, rows, k, dtype=dtype), values(rng, rows, 144, dtype=dtype)
        got = run(lambda x, residual: residual + ops.linear(x, weight, b), x, residual)  # noqa: B023
        np.testing.assert_array_equal(bits(got), bits(residual + ops.linear(x, weight, b)))


def quantized(weight: mx.array) -> Callable[[mx.array], mx.array]:
    arrays = mx.quantize(weight, group_size=64, bits=4)
    mx.eval(arrays)
    return lambda x: ops.quantized_linear(x, *arrays, bits=4, group_size=64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits_of_weight", [16, 4])
@pytest.mark.parametrize(("rank", "num_adapters"), [(16, 8), (40, 3)])
def test_products_with_adapters(
    rng, dtype, bits_of_weight: int, rank: int, num_adapters: int
) -> None:
    """Gates, and a product with a residual: as with kernels of their own, but for rounding. A row
    has the same bits in any company, without an adapter those of the model's own products."""
    n, k = 1024, 1024
    weights = [values(rng, n, k, dtype=dtype) * (0.5 / k**0.5) for _ in range(3)]
    stacks = [values(rng, num_adapters, rank, k, dtype=dtype) * (1 / k**0.5) for _ in range(6)]
    mx.eval(weights, stacks)
    layers = [
        quantized(w) if bits_of_weight == 4 else (lambda x, w=w: ops.linear(x, w)) for w in weights
    ]

    def build(x: mx.array, *slots: mx.array) -> mx.array:
        def layer(i: int, x: mx.array) -> mx.array:
            out = layers[i](x)
            return ops.lora(out, x, slots[0], *stacks[2 * i : 2 * i + 2]) if slots else out

        return x + layer(2, ops.silu_mul(layer(0, x), layer(1, x)))

    for rows in ROWS:
        x = values(rng, rows, k, dtype=dtype)
        chosen = mx.array([i * 7 % (num_adapters + 1) - 1 for i in range(rows)], mx.int32)
        got, plain, apart = run(build, x, chosen), run(build, x), build(x, chosen)
        size = np.abs(exact(apart)).max()
        unit = 2.0**-9 if dtype == mx.float16 else 2.0**-6
        assert np.abs(exact(got) - exact(apart)).max() <= unit * size
        is_plain = np.array(chosen) < 0
        same = (bits(got) == bits(plain)).all(axis=1)
        np.testing.assert_array_equal(same, is_plain)
        few = mx.array([0, rows - 1, rows // 2])
        alone = run(build, x[few], chosen[few])
        np.testing.assert_array_equal(bits(alone), bits(got[few]))


@pytest.mark.parametrize("num_adapters", [1, 8])
def test_products_with_adapters_repeat_their_bits(rng, num_adapters: int) -> None:
    """Where blocks compute units first, and a fence holds one of their warps up."""
    n, k, rows = 8192, 3072, 32
    weights = [values(rng, n, k, dtype=mx.bfloat16) * (1 / k**0.5) for _ in range(2)]
    a = [values(rng, num_adapters, 16, k, dtype=mx.bfloat16) * (1 / k**0.5) for _ in weights]
    b = [values(rng, num_adapters, 16, n, dtype=mx.bfloat16) for _ in weights]
    mx.eval(weights, a)
    chosen = mx.array([i % num_adapters for i in range(rows)], mx.int32)

    def build(x: mx.array, chosen: mx.array) -> mx.array:
        products = (ops.linear(x, weight) for weight in weights)
        adapted = (ops.lora(p, x, chosen, *m) for p, *m in zip(products, a, b, strict=True))
        return ops.silu_mul(*adapted)

    inputs = [values(rng, rows, k, dtype=mx.bfloat16), chosen]
    unknown = executables.placeholders(inputs)
    program = executables.GpuExecutable(unknown, [build(*unknown)])
    first = bits(program(inputs)[0])
    for _ in range(30):
        np.testing.assert_array_equal(bits(program(inputs)[0]), first)


@pytest.mark.parametrize("rows", [17, 32, 64])
def test_adapters_of_a_product_that_takes_all_places(rng, rows: int) -> None:
    """A narrow result of many columns has 32 clusters of eight blocks, as many as run at once. So
    up to 32 rows the blocks also do the work of those that would come first."""
    n, k, num_adapters = 4096, 8192, 3
    layer = quantized(values(rng, n, k, dtype=mx.bfloat16) * (1 / k**0.5))
    a, b = (values(rng, num_adapters, 16, size, dtype=mx.bfloat16) for size in (k, n))
    a *= 1 / k**0.5

    def build(x: mx.array, *slots: mx.array) -> mx.array:
        return ops.lora(layer(x), x, slots[0], a, b) if slots else layer(x)

    x = values(rng, rows, k, dtype=mx.bfloat16)
    chosen = mx.array([i % (num_adapters + 1) - 1 for i in range(rows)], mx.int32)
    got, plain, apart = run(build, x, chosen), run(build, x), build(x, chosen)
    size = np.abs(exact(apart)).max()
    assert np.abs(exact(got) - exact(apart)).max() <= 2.0**-7 * size
    same = (bits(got) == bits(plain)).all(axis=1)
    np.testing.assert_array_equal(same, np.array(chosen) < 0)
    few = mx.array([*range(0, rows, 2), *range(1, 16, 2)])
    np.testing.assert_array_equal(bits(run(build, x[few], chosen[few])), bits(got[few]))


MANY_ROWS = [65, 100, 256, 512]


def assert_rounded(got: mx.array, expected: np.ndarray, times: int = 1) -> None:
    """To its dtype, that many times, but for sums in float32."""
    unit = times * (2.0**-11 if got.dtype == mx.float16 else 2.0**-8)
    size = np.linalg.norm(expected, axis=-1, keepdims=True) / np.sqrt(expected.shape[-1])
    # (Tensor cores cut off some bits of what they add.)
    assert (np.abs(exact(got) - expected) <= unit * np.abs(expected) + 1e-4 * size).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), [(8, 8), (144, 72), (144, 3072), (4096, 320)])
def test_products_of_many_rows(rng, dtype, n: int, k: int) -> None:
    """A library's products with and without a bias and a residual; x is a part of longer rows."""
    weight, bias = values(rng, n, k, dtype=dtype), values(rng, n, dtype=dtype)
    for rows, b, is_added in itertools.product(MANY_ROWS, (None, bias), (False, True)):
        x, residual = values(rng, rows, 2 * k, dtype=dtype), values(rng, rows, n, dtype=dtype)

        def build(x: mx.array, residual: mx.array) -> mx.array:
            product = ops.linear(mx.split(x, 2, axis=1)[1], weight, b)  # noqa: B023
            return residual + product if is_added else product  # noqa: B023

        expected = exact(x)[:, k:] @ exact(weight).T + (0 if b is None else exact(b))
        assert_rounded(run(build, x, residual), expected + is_added * exact(residual))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_gate_and_up_of_many_rows(rng, dtype, has_bias: bool) -> None:
    """Both weights in one call, wherever they are."""
    gate, between, up = (values(rng, 528, 96, dtype=dtype) * 0.2 for _ in range(3))
    biases = [values(rng, 528, dtype=dtype) if has_bias else None for _ in range(2)]
    mx.eval(gate, between, up)
    for rows, (g, u) in itertools.product(MANY_ROWS, ((gate, up), (up, gate))):
        x = values(rng, rows, 96, dtype=dtype)
        got = run(
            lambda x: ops.silu_mul(ops.linear(x, g, biases[0]), ops.linear(x, u, biases[1])),  # noqa: B023
            x,
        )
        a, b = (exact(ops.linear(x, w, bias)) for w, bias in zip((g, u), biases, strict=True))
        assert_rounded(got, a / (1 + np.exp(-a)) * b)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), [(16, 64), (80, 544), (8192, 96)])
def test_gate_and_up(rng, dtype, n: int, k: int) -> None:
    gate, up = (values(rng, n, k, dtype=dtype) * 0.2 for _ in range(2))
    biases = [values(rng, n, dtype=dtype) for _ in range(2)]
    mx.eval(gate, up)
    for rows, b in itertools.product(ROWS, ((None, None), biases)):
        x = values(rng, rows, k, dtype=dtype)
        got = run(
            lambda x: ops.silu_mul(ops.linear(x, gate, b[0]), ops.linear(x, up, b[1])),  # noqa: B023
            x,
        )
        g, u = exact(ops.linear(x, gate, b[0])), exact(ops.linear(x, up, b[1]))
        expected = g / (1 + np.exp(-g)) * u
        unit = 2.0**-10 if dtype == mx.float16 else 2.0**-7
        assert (np.abs(exact(got) - expected) <= unit * np.abs(expected) + 1e-6).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(128, 64, 64), (32, 32, 96), (3072, 1024, 1024)])
def test_three_products_of_one_input(rng, dtype, sizes: tuple[int, int, int]) -> None:
    """Through their sum, of which each has its own part. (A product takes multiples of 32.)"""
    weights = [values(rng, n, 320, dtype=dtype) for n in sizes]
    gather = [values(rng, 64, n, dtype=dtype) * 0.1 for n in sizes]
    mx.eval(gather)

    def build(x: mx.array) -> mx.array:
        parts = [ops.linear(x, w) for w in weights]
        first = ops.linear(parts[0], gather[0])
        for part, g in zip(parts[1:], gather[1:], strict=True):
            first = first + ops.linear(part, g)
        return first

    for rows in ROWS:
        x = values(rng, rows, 320, dtype=dtype)
        np.testing.assert_array_equal(bits(run(build, x)), bits(build(x)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_three_products_of_odd_sizes(rng, dtype) -> None:
    """Sixteen rows of a weight are left over for a block of its own."""
    weights = [values(rng, 48, 96, dtype=dtype) for _ in range(3)]
    ones = mx.ones((48,), dtype)

    def build(x: mx.array, rms_norm: Any = ops.rms_norm) -> mx.array:
        a, b, c = (ops.linear(x, w) for w in weights)
        return rms_norm(rms_norm(a + b, ones, 1e-5) + c, ones, 1e-5)

    for rows in ROWS:
        x = values(rng, rows, 96, dtype=dtype)
        got, expected = run(build, x, residual_in_product=False), build(x, mx.fast.rms_norm)
        # (A norm may round its factor differently than MLX's.)
        np.testing.assert_allclose(exact(got), exact(expected), rtol=2.0**-6, atol=2.0**-6)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("k", [64, 544, 3072])
def test_a_norm_between_products(rng, rows: int, k: int) -> None:
    """A row's results are the same whatever the others are."""
    dtype = mx.bfloat16
    x, residual = values(rng, rows, 96, dtype=dtype), values(rng, rows, k, dtype=dtype)
    first, scale = values(rng, k, 96, dtype=dtype), values(rng, k, dtype=dtype)
    others = [values(rng, n, k, dtype=dtype) for n in (96, 64)]
    back = [values(rng, 64, n, dtype=dtype) for n in (k, 96, 64)]
    eps = 0.5

    def build(x: mx.array, residual: mx.array) -> mx.array:
        total = residual + ops.linear(x, first)
        normed = ops.rms_norm(total, scale, eps)
        parts = [total, *(ops.linear(normed, w) for w in others)]
        out = ops.linear(parts[0], back[0])
        for part, w in zip(parts[1:], back[1:], strict=True):
            out = out + ops.linear(part, w)
        return out

    got = run(build, x, residual)
    total = exact(residual) + exact(x) @ exact(first).T
    normed = total / np.sqrt((total**2).mean(-1, keepdims=True) + eps) * exact(scale)
    parts = [total, *(normed @ exact(w).T for w in others)]
    expected = sum(part @ exact(w).T for part, w in zip(parts, back, strict=True))
    error = np.linalg.norm(exact(got) - expected, axis=-1)
    assert (error <= 0.02 * np.linalg.norm(expected, axis=-1)).all()
    alone = run(build, x[-1:] * 1, residual[-1:] * 1)
    np.testing.assert_array_equal(bits(got)[-1:], bits(alone))


EXPERT_FORMS = [
    *(None, ("affine", 4, 64), ("affine", 8, 32), ("affine", 3, 128), ("affine", 5, 64)),
    *(("mxfp4", 4, 32), ("mxfp8", 8, 32)),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", EXPERT_FORMS, ids=str)
def test_a_mixture(rng, form: tuple[str, int, int] | None, dtype) -> None:
    """A row's results are the same whatever the others are."""
    # (Rows of scales that are no multiples of 16 bytes, but two together are.)
    narrow = 768 if form is None or form[2] < 128 else 1024
    for router, num_experts, top_k, has_bias, (hidden, intermediate) in (
        ("normalized", 24, 8, False, (2048, narrow)), ("first, softmax", 8, 2, True, (1024, 2048)),
    ):  # fmt: skip
        experts = Experts(
            rng, num_experts, hidden, intermediate, dtype, has_bias=has_bias, form=form
        )
        for rows in (*ROWS, 300):
            x = values(rng, rows, 1, hidden, dtype=dtype)
            logits = logits_apart(rng, rows, num_experts, dtype)

            def build(x: mx.array, logits: mx.array) -> mx.array:
                return experts.build(x, logits, router, top_k)  # noqa: B023

            got = run(build, x, logits)
            some = [0, rows // 2, rows - 1]
            chosen, shares = chosen_by(router, exact(logits)[some, 0], top_k)
            expected = experts.expected(x[mx.array(some)], chosen, shares)
            error = np.linalg.norm(exact(got)[some] - expected, axis=-1)
            unit = 2.0**-11 if dtype == mx.float16 else 2.0**-8
            assert (error <= 3 * unit * np.linalg.norm(expected, axis=-1)).all()
            alone = run(build, x[-1:] * 1, logits[-1:] * 1)
            np.testing.assert_array_equal(bits(got)[-1:], bits(alone))


def test_experts_that_no_kernel_serves_are_refused(rng) -> None:
    """Rows of scales are no multiples of 16 bytes."""
    experts = Experts(rng, 4, 320, 64, mx.bfloat16, form=("affine", 4, 64))
    inputs = executables.placeholders(
        [mx.zeros((3, 1, 320), mx.bfloat16), mx.zeros((3, 1, 4), mx.bfloat16)]
    )
    with pytest.raises(ValueError, match="experts with quantized weights"):
        executables.GpuExecutable(inputs, [experts.build(*inputs, "normalized", 2)])


def steps_of(rng: np.random.Generator) -> list[dict[str, list[int]]]:
    def new(count: int) -> list[int]:
        return rng.integers(0, 96, count).tolist()

    names = [str(i) for i in range(6)]
    many = [str(i) for i in range(70)]  # whose products are a library's
    return [
        {"0": new(900), "1": new(20), "2": new(1)},
        *({name: new(1) for name in names[:3]} for _ in range(24)),
        {name: new(1) for name in names},
        *({name: new(1) for name in names} for _ in range(3)),
        *({name: new(1) for name in many} for _ in range(5)),
    ]


MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "num_experts": 8, "num_experts_per_tok": 4, "norm_topk_prob": True,
        "moe_intermediate_size": 96, "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "head_dim", "dtype", "kv_format", "targets"),
    [
        ("llama", 128, mx.bfloat16, None, ()),
        ("llama", 128, mx.bfloat16, None, ("q_proj", "v_proj")),
        ("llama", 64, mx.float16, None, ("k_proj", "o_proj", "gate_proj", "up_proj", "down_proj")),
        ("llama", 64, mx.float16, None, ()),
        ("qwen2", 64, mx.bfloat16, None, ()),
        ("qwen3", 128, mx.bfloat16, None, ()),
        ("llama", 128, mx.bfloat16, "int8", ()),
        ("qwen3", 64, mx.bfloat16, "int8_k_int4_v", ()),
        ("llama", 64, mx.float16, "fp8", ()),
        ("llama", 80, mx.bfloat16, "int4", ()),  # (portable kernels serve it)
        ("qwen3_moe", 64, mx.float16, None, ()),
        ("mixtral", 64, mx.float16, None, ()),
    ],
)
def test_steps_of_a_model(
    rng,
    family: str,
    head_dim: int,
    dtype: mx.Dtype,
    kv_format: str | None,
    targets: tuple[str, ...],
) -> None:
    """The third time a shape occurs it is a program, and blocks and splits are added while it
    repeats. Its logits are as near to those of float32 as the graph's: these models are sharpened,
    so that roundings grow to some percent of them. targets: Layers that adapters change for two of
    three sequences."""
    config = tiny_config(
        family, head_dim=head_dim, hidden_size=4 * head_dim, vocab_size=112, num_hidden_layers=2,
        **MIXTURES.get(family, {}),
    )  # fmt: skip

    def driver(computed_in: mx.Dtype, programs: bool) -> StepDriver:
        model = tiny_model(config)
        model.set_dtype(dtype)
        model.set_dtype(computed_in)
        mx.eval(model.parameters())
        driver = StepDriver(
            model, family, block_size=16, num_blocks=256, kv_format=FORMATS.get(kv_format)
        )
        driver.runner.model._graph_runner.refusals.executables = None if programs else "a test"
        if targets:
            with_adapters(driver, config, targets, {i: i % 3 for i in range(100)})
        return driver

    drivers = [driver(dtype, True), driver(dtype, False), driver(mx.float32, False)]
    errors: list[list[float]] = [[], []]
    for work in steps_of(rng):
        *rounded, expected = (d.step(work) for d in drivers)
        for mine, theirs in zip(errors, rounded, strict=True):
            for sequence, logits in expected.items():
                error = np.linalg.norm(theirs[sequence] - logits) / np.linalg.norm(logits)
                mine.append(float(error))
    if family in MIXTURES:  # a rounding now and then makes a row choose another expert
        errors = [sorted(e)[: len(e) * 9 // 10] for e in errors]
    ours, graphs = (np.sqrt(np.mean(np.square(e))) for e in errors)
    print(f"errors relative to float32: {ours:.4f}, at most {max(errors[0]):.4f}; ", end="")
    print(f"of the graph: {graphs:.4f}, at most {max(errors[1]):.4f}")
    assert ours <= 1.5 * graphs and max(errors[0]) <= 3 * max(errors[1])
    steps = drivers[0].runner.model._graph_runner
    assert not steps.refusals.executables and not steps.refusals.steps
    assert steps._graphs


def test_results_that_are_kept_are_not_overwritten(rng) -> None:
    x = values(rng, 3, 64, dtype=mx.bfloat16)
    weight = values(rng, 48, 64, dtype=mx.bfloat16)
    [unknown] = executables.placeholders([x])
    program = executables.GpuExecutable([unknown], [ops.linear(unknown, weight)])
    kept = [program([x * i])[0] for i in range(6)]
    mx.eval(kept)
    for i, out in enumerate(kept):
        np.testing.assert_array_equal(bits(out), bits(ops.linear(x * i, weight)))


def test_weights_that_were_moved_are_found(rng) -> None:
    """A host that reads an array of the device moves it."""
    x = values(rng, 3, 64, dtype=mx.bfloat16)
    weight = values(rng, 48, 64, dtype=mx.bfloat16) * 1
    mx.eval(weight)
    [unknown] = executables.placeholders([x])
    program = executables.GpuExecutable(
        [unknown], [ops.linear(ops.rms_norm(unknown, x[0], 1e-5), weight)]
    )
    before = bits(program([x])[0])
    assert np.isfinite(np.array(weight.astype(mx.float32))).all()
    np.array(weight.view(mx.uint16))
    np.testing.assert_array_equal(bits(program([x])[0]), before)


def test_products_that_no_kernel_serves_are_refused(rng) -> None:
    x = mx.zeros((3, 64))
    weight = mx.zeros((48, 64))
    mx.eval(x, weight)
    [unknown] = executables.placeholders([x])
    with pytest.raises(ValueError, match="a product of 3 rows, 48 x 64 float32"):
        executables.GpuExecutable([unknown], [mx.matmul(unknown, weight.T)])


def test_steps_through_the_driver_of_tests(rng) -> None:
    """Every step as a program, prompts' too, where they have few rows."""
    config = tiny_config("llama", head_dim=64, hidden_size=256, vocab_size=112)
    model = tiny_model(config)
    model.set_dtype(mx.bfloat16)
    mx.eval(model.parameters())
    ours = StepDriver(model, "llama", block_size=16)
    with patches.graph_for_program():
        steps = with_programs(ours)
        logits = ours.step({"a": [1, 2, 3], "b": [5]})
        more = ours.step({"a": [7], "b": [9]})
    assert all(np.isfinite(row).all() for row in (*logits.values(), *more.values()))
    assert len(steps.made) == 2


def test_plans_in_pinned_memory_are_those_that_are_sent(rng) -> None:
    """Read by a program, by other kernels and by the host; many at once, whose memory is reused."""
    tables = PaddedTables(rng.integers(1, 100, (3, 40)).astype(np.int32), np.array([40, 40, 7]))
    lens = np.array([640, 77, 100])
    weight = values(rng, 48, 64, dtype=mx.bfloat16)
    table = values(rng, 700, 64, dtype=mx.bfloat16)
    [unknown] = executables.placeholders([mx.zeros((3,), mx.int32)])
    program = executables.GpuExecutable([unknown], [ops.linear(table[unknown], weight)])
    results = []
    for i in range(200):
        made = [
            build_plan(tables, lens - i % 60, [1, 1, 1], block_size=16, stays_on_host=stays)
            for stays in (True, False)
        ]
        results += [
            [program([plan.positions])[0], table[plan.positions] @ weight.T] for plan in made
        ]
        if i % 50 == 0:
            for name in ("positions", "block_tables", "work_items", "merge_items"):
                mine, theirs = (np.array(ops.to_host(getattr(plan, name))) for plan in made)
                np.testing.assert_array_equal(mine, theirs)
        mx.async_eval(results[-2:])
    for mine, theirs in zip(results[::2], results[1::2], strict=True):
        for a, b in zip(mine, theirs, strict=True):
            np.testing.assert_array_equal(bits(a), bits(b))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_greedy_tokens_of_a_program(rng, dtype) -> None:
    """In memory that the host reads; each step's stay as they are."""
    weight = values(rng, 4096, 64, dtype=dtype)
    [unknown] = executables.placeholders([mx.zeros((5, 64), dtype)])
    logits = ops.linear(unknown, weight)
    program = executables.GpuExecutable([unknown], [logits, *ops.greedy_tokens(logits)])
    inputs = [values(rng, 5, 64, dtype=dtype) for _ in range(20)]
    inputs[3][2] = mx.nan
    kept = [program([x]) for x in inputs]
    mx.async_eval([reported for *_, reported in kept])
    for i, (logits, tokens, largest, reported) in enumerate(kept):
        rows = exact(logits)
        reports = np.array(reported)
        is_number = ~np.isnan(rows).any(axis=1)
        assert is_number.sum() == (4 if i == 3 else 5)
        np.testing.assert_array_equal(reports[is_number], rows.argmax(axis=1)[is_number])
        assert (reports[~is_number] == -1).all()
        np.testing.assert_array_equal(np.array(largest)[is_number], rows.max(axis=1)[is_number])
        np.testing.assert_array_equal(np.array(tokens)[is_number], reports[is_number])
    loose, *_ = ops.greedy_tokens(kept[0][0])
    np.testing.assert_array_equal(np.array(loose), np.array(kept[0][1]))
