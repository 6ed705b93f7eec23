"""Products with quantized weights on an NVIDIA GPU, against float64; and as part of programs, whose
results have the bits of single products."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU
from mlx_lm.utils import dequantize_model
from support.gpu_executables import with_programs
from support.models import StepDriver, tiny_config, tiny_model
from support.reference import bits
from support.weight_formats import dequantized, quantized

from mlx_paged import executables, ops
from mlx_paged.model import patches
from mlx_paged.model.patches import native_ops

pytestmark = pytest.mark.skipif(not ops.has_cuda(), reason="needs an NVIDIA GPU as the device")

DTYPES = [mx.float16, mx.bfloat16]
FORMATS = [
    *(("affine", b, group) for b in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128)),
    *(("mxfp4", 4, 32), ("mxfp8", 8, 32)),
]
ROWS = [1, 3, 8, 9, 16, 17, 31, 33, 64, 65, 96, 128, 192, 256, 1000]
# n, k; parts with nothing, or less than others.
SHAPES = [(16, 128), (37, 1408), (260, 4096), (300, 3072)]


def exact(a: mx.array) -> np.ndarray:
    return np.array(a.astype(mx.float32)).astype(np.float64)


def multiply(
    x: mx.array, arrays: list[mx.array], form: tuple[str, int, int], bias: Any = None
) -> mx.array:
    mode, width, group = form
    biases = arrays[2] if mode == "affine" else None
    return ops.quantized_linear(
        x, arrays[0], arrays[1], biases, bias, group_size=group, bits=width, mode=mode
    )


def weights(
    rng: np.random.Generator, n: int, k: int, form: tuple[str, int, int], dtype: mx.Dtype
) -> list[mx.array]:
    arrays = quantized(rng, n, k, *form, dtype)
    if form[0] != "affine":  # results that float16 can hold
        arrays[1] = mx.minimum(arrays[1], 124)
    elif form[1] == 8:
        arrays[1] = arrays[1] / 16
    mx.eval(arrays)
    return arrays


def fits(out: mx.array, x: mx.array, weight: np.ndarray, bias: mx.array | None = None) -> bool:
    """True if a result is that of these weights, rounded."""
    unit = 2.0**-11 if out.dtype == mx.float16 else 2.0**-8
    product = exact(x) @ weight.T
    total = product if bias is None else product + exact(bias)
    allowed = 2e-6 * (np.abs(exact(x)) @ np.abs(weight.T)) + 1.1 * unit * np.abs(total)
    if bias is not None:
        allowed += 1.1 * unit * np.abs(product)
    return bool((np.abs(exact(out) - total) <= allowed).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_products(rng, form: tuple[str, int, int], dtype: mx.Dtype) -> None:
    """linear_quantized scales sums; linear_quantized_stream rounds weights to the dtype."""
    for n, k in SHAPES:
        arrays = weights(rng, n, k, form, dtype)
        weight = dequantized(arrays, *form)
        numbers = weight, exact(mx.array(weight.astype(np.float32)).astype(dtype))
        which = set()
        for rows in (r for r in ROWS if r <= 64 or k >= 3072):  # MLX has others
            x = mx.array(rng.standard_normal((rows, k)).astype(np.float32)).astype(dtype)
            bias = mx.array(rng.standard_normal(n).astype(np.float32)).astype(dtype)
            mx.eval(x, bias)
            out = multiply(x[:, None], arrays, form)
            assert out.shape == (rows, 1, n) and out.dtype == dtype
            with_bias = multiply(x, arrays, form, bias)
            which.add(tuple(fits(out[:, 0], x, w) and fits(with_bias, x, w, bias) for w in numbers))
        assert all(any(found) for found in which), (n, k)
        # One or the other for all numbers of rows. (Of few columns the difference can be small.)
        assert any(all(found[i] for found in which) for i in range(2)), (n, k)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "form", [("affine", 4, 64), ("affine", 8, 32), ("affine", 3, 128), ("mxfp4", 4, 32)], ids=str
)
@pytest.mark.parametrize("k", [2432, 3072])
def test_a_row_has_the_same_bits_in_any_company(rng, k: int, form, dtype: mx.Dtype) -> None:
    arrays = weights(rng, 260, k, form, dtype)
    most = 260 if k == 3072 else 64  # MLX has others
    x = mx.random.normal((most, k)).astype(dtype)
    mx.eval(x)
    alone = [bits(multiply(x[i : i + 1], arrays, form))[0] for i in range(most)]
    for rows in (r for r in (2, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 260) if r <= most):
        together = bits(multiply(x[:rows], arrays, form))
        np.testing.assert_array_equal(together, alone[:rows])


def test_what_no_kernel_serves_is_mlxs(rng) -> None:
    form = ("affine", 4, 64)
    arrays = weights(rng, 48, 128, form, mx.float16)
    weight = dequantized(arrays, *form)
    for rows, dtype in ((65, mx.float16), (3, mx.float32)):
        x = mx.random.normal((rows, 128)).astype(dtype)
        np.testing.assert_allclose(
            exact(multiply(x, arrays, form)), exact(x) @ weight.T, rtol=0.02, atol=0.5
        )


def test_experts_of_a_large_step() -> None:
    """More of them at once than the third axis of a grid has room for."""
    patches.install()
    layer = QuantizedSwitchLinear(64, 64, 2, bias=False)
    layer.set_dtype(mx.bfloat16)
    indices = (mx.arange(65_540) >= 65_537).astype(mx.uint32)
    x = mx.random.normal((len(indices), 1, 64)).astype(mx.bfloat16)
    got = exact(layer(x, indices, sorted_indices=True))
    for rows in (slice(0, 4), slice(65_533, 65_540)):
        want = layer(x[rows], indices[rows], sorted_indices=True)
        np.testing.assert_allclose(got[rows], exact(want), rtol=0.02, atol=0.02)


needs_wgmma = pytest.mark.skipif(not ops.has_wgmma(), reason="needs a GPU of sm_90a")


class Experts:
    """Matrices of experts: `given` for operations, `exact` as float64."""

    def __init__(self, rng, shape: tuple[int, int, int], form, dtype: mx.Dtype, bias: bool) -> None:
        mode, width, group = form
        num_experts, n, k = shape
        arrays = weights(rng, num_experts * n, k, form, dtype)
        rounded = mx.array(dequantized(arrays, *form).astype(np.float32)).astype(dtype)
        self.exact = exact(rounded).reshape(shape)
        arrays = [a.reshape(num_experts, n, -1) for a in arrays]
        self.bias = None
        if bias:
            self.bias = mx.array(rng.standard_normal((num_experts, n)).astype(np.float32))
            self.bias = self.bias.astype(dtype)
        mx.eval(arrays, self.bias)
        biases = arrays[2] if mode == "affine" else None
        self.given = ops.ExpertWeights(*arrays[:2], biases, self.bias, group, width, mode)

    def rows_fit(self, out: mx.array, x: mx.array, experts: np.ndarray) -> bool:
        """True if row i of `out` is that of x and expert i."""
        return all(
            fits(
                out[of],
                x[of],
                self.exact[expert],
                None if self.bias is None else self.bias[int(expert)],
            )
            for expert in np.unique(experts)
            for of in [mx.array(np.flatnonzero(experts == expert))]
        )


@needs_wgmma
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_rows_that_are_sorted_by_expert(rng, form: tuple[str, int, int], dtype: mx.Dtype) -> None:
    """Some experts have no row, one has most; scales arrive in spans, or all at once."""
    for n, k in ((384, 2048), (128, 384)):
        for bias in (False, True):
            layer = Experts(rng, (7, n, k), form, dtype, bias)
            for rows in (1, 90, 700, 1500):
                experts = np.sort(np.minimum(rng.integers(0, 14, rows), 5)).astype(np.uint32)
                x = mx.array(rng.standard_normal((rows, k)).astype(np.float32)).astype(dtype)
                out = ops.sorted_expert_linear(x, mx.array(experts), layer.given)
                assert out is not None and out.shape == (rows, n) and out.dtype == dtype
                assert layer.rows_fit(out, x, experts), (n, k, rows)


@needs_wgmma
def test_a_sorted_row_has_the_same_bits_in_any_company(rng) -> None:
    layer = Experts(rng, (4, 256, 768), ("affine", 4, 64), mx.bfloat16, False)
    x = mx.random.normal((1000, 768)).astype(mx.bfloat16)
    experts = mx.array(np.repeat([0, 1, 3], [130, 600, 270]).astype(np.uint32))

    def multiplied(rows: slice) -> np.ndarray:
        out = ops.sorted_expert_linear(x[rows], experts[rows], layer.given)
        assert out is not None
        return bits(out)

    together = multiplied(slice(0, 1000))
    for rows in (slice(0, 1), slice(100, 140), slice(127, 700), slice(500, 1000)):
        np.testing.assert_array_equal(multiplied(rows), together[rows])


@needs_wgmma
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("form", "of_down"),
    [
        (("affine", 4, 64), None), (("affine", 4, 64), ("affine", 8, 64)),
        (("affine", 8, 32), None), (("affine", 3, 128), None), (("mxfp4", 4, 32), None),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("rows", [9, 600])
def test_gated_experts_of_a_prompt(rng, rows: int, form: Any, of_down: Any, dtype) -> None:
    """Each step against the exact one of the step before it."""
    num_experts, hidden, width, top_k = 6, 512, 384, 3
    gate, up = (Experts(rng, (num_experts, width, hidden), form, dtype, True) for _ in range(2))
    down = Experts(rng, (num_experts, hidden, width), of_down or form, dtype, False)
    x = mx.array(rng.standard_normal((rows, hidden)).astype(np.float32)).astype(dtype)
    experts = np.argsort(rng.random((rows, num_experts - 1)), axis=1)[:, :top_k].astype(np.uint32)
    out = ops.expert_glu(x, mx.array(experts), gate.given, up.given, down.given)
    assert out is not None and out.shape == (rows, top_k, hidden) and out.dtype == dtype

    order = np.argsort(experts.reshape(-1), kind="stable")
    places, pairs = mx.array(experts.reshape(-1)[order]), mx.array(order)
    sorted_x = x[pairs // top_k]
    of_gate, of_up = (ops.sorted_expert_linear(sorted_x, places, of.given) for of in (gate, up))
    with native_ops(mx.arange(rows)):
        gated = ops.silu_mul(of_gate, of_up)
    want = ops.sorted_expert_linear(gated, places, down.given)
    np.testing.assert_array_equal(bits(out).reshape(rows * top_k, -1)[order], bits(want))


@needs_wgmma
def test_prompts_of_a_mixture_use_them(rng, monkeypatch) -> None:
    """A model's prompt, against the same model with dequantized weights."""
    patches.install()
    layer = SwitchGLU(256, 128, 8)
    layer.set_dtype(mx.bfloat16)
    nn.quantize(layer, group_size=64, bits=4)
    plain = SwitchGLU(256, 128, 8)
    for name in ("gate_proj", "up_proj", "down_proj"):
        of = layer[name]
        plain[name].weight = mx.dequantize(of.weight, of.scales, of.biases, 64, 4)
    x = mx.random.normal((200, 1, 256)).astype(mx.bfloat16)
    experts = mx.array(np.argsort(rng.random((200, 1, 8)), axis=2)[..., :2].astype(np.uint32))
    mx.eval(layer.parameters(), plain.parameters(), x)
    used = []
    original = ops.expert_glu
    monkeypatch.setattr(ops, "expert_glu", lambda *args: used.append(0) or original(*args))
    with native_ops(mx.arange(200)):
        got = layer(x, experts)
    assert used and got.shape == (200, 1, 2, 256)
    np.testing.assert_allclose(exact(got), exact(plain(x, experts)), rtol=0.05, atol=0.002)


def test_a_layer_is_one_operation_within_a_step() -> None:
    layer = nn.QuantizedLinear(128, 48, group_size=64, bits=4)
    layer.set_dtype(mx.bfloat16)
    x = mx.random.normal((3, 1, 128)).astype(mx.bfloat16)
    mx.eval(x, layer.parameters())
    want = exact(layer(x))
    with native_ops(mx.arange(3)):
        got = layer(x)
    np.testing.assert_allclose(exact(got), want, rtol=0.02, atol=0.02)


# --- In programs ----------------------------------------------------------------------------------


def run(build: Any, *inputs: mx.array) -> mx.array:
    unknown = executables.placeholders(inputs)
    program = executables.GpuExecutable(unknown, [build(*unknown)])
    first, second = program(list(inputs))[0], program(list(inputs))[0]
    mx.eval(first, second)
    np.testing.assert_array_equal(bits(first), bits(second))
    return first


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 8, 9, 17, 64])
@pytest.mark.parametrize(("n", "k"), [(320, 256), (1024, 512)])
def test_products_of_programs(rng, n: int, k: int, rows: int, dtype: mx.Dtype) -> None:
    form = ("affine", 4, 64)
    gate, up, back = (weights(rng, *size, form, dtype) for size in ((n, k), (n, k), (k, n)))
    x = (mx.random.normal((rows, k)) / 64).astype(dtype)
    mx.eval(x)
    added = run(lambda x: x + multiply(multiply(x, gate, form), back, form), x)
    np.testing.assert_array_equal(
        bits(added), bits(x + multiply(multiply(x, gate, form), back, form))
    )
    got = exact(run(lambda x: ops.silu_mul(multiply(x, gate, form), multiply(x, up, form)), x))
    g, u = exact(multiply(x, gate, form)), exact(multiply(x, up, form))
    np.testing.assert_allclose(got, u * g / (1 + np.exp(-g)), rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [16, 17, 33, 64, 65, 130])
@pytest.mark.parametrize(
    "form",
    [
        *(("affine", 4, 32), ("affine", 4, 64), ("affine", 8, 32), ("affine", 8, 128)),
        *(("affine", 3, 32), ("affine", 3, 64), ("mxfp4", 4, 32), ("mxfp8", 8, 32)),
    ],
    ids=str,
)
def test_values_in_the_order_of_codes(rng, form, rows: int, dtype: mx.Dtype) -> None:
    """On sm_90a from 17 rows on norms and gates write what products alone read in the order of
    their codes; what is a result of the program, too, stays in place. The bits are the same."""
    k, n = 1024, 2048
    gate, up, back = (weights(rng, *size, form, dtype) for size in ((n, k), (n, k), (k, n)))
    inputs = [(mx.random.normal((rows, k)) / 64).astype(dtype) for _ in range(2)]
    scale = (mx.random.normal((k,)) / 256).astype(dtype)  # (float16 can hold the results)
    mx.eval(inputs, scale)

    def build(x: mx.array, residual: mx.array) -> list[mx.array]:
        normed = ops.rms_norm(x + residual, scale, 1e-5)
        gated = ops.silu_mul(multiply(normed, gate, form), multiply(normed, up, form))
        return [multiply(gated, back, form), gated, normed]

    outputs = []
    for num_results in (1, 2, 3):  # neither value, one and both
        unknown = executables.placeholders(inputs)
        program = executables.GpuExecutable(unknown, build(*unknown)[:num_results])
        outputs.append(program(inputs))
    alone, with_gated, with_both = outputs
    assert np.isfinite(exact(alone[0])).all() and np.ptp(exact(alone[0])) > 0
    np.testing.assert_array_equal(bits(alone[0]), bits(with_both[0]))
    np.testing.assert_array_equal(bits(with_gated[0]), bits(with_both[0]))
    np.testing.assert_array_equal(bits(with_gated[1]), bits(with_both[1]))
    np.testing.assert_array_equal(bits(alone[0]), bits(multiply(with_both[1], back, form)))


@pytest.mark.parametrize("rows", [1, 8, 17, 40, 130])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_steps_of_a_quantized_model(rng, family: str, rows: int) -> None:
    """One program, embeddings and the LM head included. Its logits are as near to those of the same
    weights in float32 as its graph's: these models are sharpened, so that roundings, which differ
    where products of one input are one launch, grow to some percent of them."""
    # Rows of scales that the copy engine can read.
    wide = {"intermediate_size": 512} if rows > 64 else {}
    config = tiny_config(family, hidden_size=512, head_dim=64, tied=False, vocab_size=112, **wide)

    def driver(dtype: mx.Dtype) -> StepDriver:
        model = tiny_model(config)
        nn.quantize(model, group_size=64, bits=4)
        model.set_dtype(mx.bfloat16)
        model.set_dtype(dtype)
        if dtype == mx.float32:
            model = dequantize_model(model)
        mx.eval(model.parameters())
        return StepDriver(model, config["model_type"], block_size=16)

    ours, graphs, exact_model = driver(mx.bfloat16), driver(mx.bfloat16), driver(mx.float32)
    steps = with_programs(ours)
    errors: list[list[float]] = [[], []]
    for _ in range(3):
        tokens = {str(i): rng.integers(0, 96, 1).tolist() for i in range(rows)}
        expected, of_graph = exact_model.step(tokens), graphs.step(tokens)
        with patches.graph_for_program():
            of_program = ours.step(tokens)
        for sequence, logits in expected.items():
            for found, got in zip(errors, (of_program, of_graph), strict=True):
                error = np.linalg.norm(got[sequence] - logits) / np.linalg.norm(logits)
                found.append(float(error))
    mine, theirs = (np.sqrt(np.mean(np.square(found))) for found in errors)
    assert mine <= 1.5 * theirs and max(errors[0]) <= 3 * max(errors[1]), (mine, theirs)
    assert theirs < 0.1
    assert len(steps.made) == 3
