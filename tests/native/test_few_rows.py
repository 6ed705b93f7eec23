"""Products of up to 16 rows with dense and quantized weights, in steps on the simulated GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from support.gpu_executables import with_programs
from support.mixtures import Experts, chosen_by, logits_apart
from support.models import StepDriver, tiny_config, tiny_model
from support.platforms import run_as_on
from support.reference import DTYPES, bits
from support.simulated import launches, needs_simulator, simulated
from support.weight_formats import FORMATS, dequantized, quantized

from mlx_paged import executables, ops
from mlx_paged.model import patches

pytestmark = needs_simulator

Form = tuple[str, int, int]  # mode, bits, group size
DENSE: Form = ("dense", 16, 1)
# One group size per mode and number of bits.
FORMS: list[Form] = [
    ("affine", 2, 128), ("affine", 3, 32), ("affine", 4, 64), ("affine", 5, 128),
    ("affine", 6, 32), ("affine", 8, 64), ("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16),
]  # fmt: skip
# Largest error of a row, relative to the row's norm.
TOLERANCE = {mx.float32: 1e-6, mx.float16: 1e-3, mx.bfloat16: 8e-3}
# More units of 32 elements than a SIMD-group has lanes; rows of the weight that do not fill one.
N, K = 43, 1152


def form_name(form: Form) -> str:
    mode, width, group = form
    return "dense" if form == DENSE else f"{mode}-{width}-{group}"


def short(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")


def kernel_name(function: str, form: Form, dtype: mx.Dtype, tile: int) -> str:
    weight = "" if form == DENSE else f"_{form[0]}_{form[1]}"
    return f"{function}_{short(dtype)}{weight}_m{tile}"


class Weight:
    """A random weight and its values in float64."""

    def __init__(
        self, rng: np.random.Generator, form: Form, dtype: mx.Dtype, n: int = N, k: int = K
    ) -> None:
        self.form = form
        if form == DENSE:
            self.arrays = [mx.array(rng.standard_normal((n, k)).astype(np.float32)).astype(dtype)]
            mx.eval(self.arrays)
            self.exact = exact(self.arrays[0])
        else:
            mode, width, group = form
            self.arrays = quantized(rng, n, k, mode, width, group, dtype)
            self.exact = dequantized(self.arrays, mode, width, group)

    def multiply(self, x: mx.array, bias: mx.array | None = None) -> mx.array:
        if self.form == DENSE:
            return ops.linear(x, self.arrays[0], bias)
        mode, width, group = self.form
        weight, scales, *biases = self.arrays
        return ops.quantized_linear(
            x, weight, scales, *(biases or [None]), bias,
            group_size=group, bits=width, mode=mode, for_program=True,
        )  # fmt: skip


def exact(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def normal(rng: np.random.Generator, *shape: int, dtype: mx.Dtype) -> mx.array:
    array = mx.array(rng.standard_normal(shape).astype(np.float32)).astype(dtype)
    mx.eval(array)
    return array


def run(build: Callable[..., mx.array], *inputs: mx.array) -> tuple[mx.array, list[dict[str, Any]]]:
    """The result of a program, and its launches."""
    mx.eval(inputs)
    with simulated():
        unknown = executables.placeholders(inputs)
        [out] = executables.GpuExecutable(unknown, [build(*unknown)])(list(inputs))
        mx.eval(out)
        return out, launches()


def assert_close(got: mx.array, expected: np.ndarray, tolerance: float) -> None:
    assert got.shape == expected.shape
    error = np.linalg.norm(exact(got) - expected, axis=-1)
    assert (error <= tolerance * np.linalg.norm(expected, axis=-1)).all()


# --- Linear layers --------------------------------------------------------------------------------


@pytest.mark.one_in(20)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("form", [DENSE, *FORMS], ids=form_name)
def test_rows_have_the_same_bits_in_any_company_and_read_a_weight_once(
    rng, dtype, form: Form
) -> None:
    weight = Weight(rng, form, dtype)
    x = normal(rng, 16, K, dtype=dtype)
    whole = None
    counts = range(16, 0, -1) if form[:2] == ("affine", 4) else (16, 9, 5, 3, 2, 1)
    for count in counts:
        out, [launch] = run(weight.multiply, x[16 - count :])
        whole = bits(out) if whole is None else whole
        np.testing.assert_array_equal(bits(out), whole[16 - count :])
        assert_close(out, exact(x)[16 - count :] @ weight.exact.T, 2 * TOLERANCE[dtype])
        tile = 1 if count == 1 else 4 if count <= 4 else 16
        assert launch["kernel"] == kernel_name("product_rows", form, dtype, tile)
        assert weight_bytes(launch, weight.arrays) == sum(a.nbytes for a in weight.arrays)


def weight_bytes(launch: dict[str, Any], arrays: list[mx.array]) -> int:
    """Bytes that a product reads of its weight, which is its second argument, and of scales."""
    return sum(launch["traffic"][1 + i][0] for i in range(len(arrays)))


@pytest.mark.one_in(32)
@pytest.mark.parametrize("form", FORMATS, ids=form_name)
def test_products_in_every_format(rng, form: Form) -> None:
    """Against float64 and against MLX, with a bias and a residual."""
    weight = Weight(rng, form, mx.float32, 20, 256)
    x, bias, residual = (normal(rng, *s, dtype=mx.float32) for s in ((5, 256), (20,), (5, 20)))
    out, [_] = run(lambda x, residual: residual + weight.multiply(x, bias), x, residual)
    expected = exact(x) @ weight.exact.T + exact(bias) + exact(residual)
    assert_close(out, expected, 3e-6)
    mode, width, group = form
    w, scales, *biases = weight.arrays
    of_mlx = mx.quantized_matmul(
        x, w, scales, *(biases or [None]), group_size=group, bits=width, mode=mode
    )
    assert_close(out, exact(of_mlx + bias + residual), 1e-5)


def test_gate_and_up_of_quantized_weights(rng) -> None:
    gate, up = (Weight(rng, ("affine", 4, 32), mx.float32, 40, 64) for _ in range(2))
    x = normal(rng, 3, 64, dtype=mx.float32)
    out, ran = run(lambda x: ops.silu_mul(gate.multiply(x), up.multiply(x)), x)
    g, u = (exact(x) @ w.exact.T for w in (gate, up))
    assert_close(out, g / (1 + np.exp(-g)) * u, 1e-5)
    assert len(ran) == 3


def test_columns_that_are_no_multiple_of_32_are_refused(rng) -> None:
    weight = Weight(rng, ("nvfp4", 4, 16), mx.float32, 8, 48)
    with simulated():
        [x] = executables.placeholders([mx.zeros((2, 48))])
        with pytest.raises(ValueError, match="the operation QuantizedMatmul"):
            executables.GpuExecutable([x], [weight.multiply(x)])


# --- Embeddings -----------------------------------------------------------------------------------


@pytest.mark.one_in(12)
@pytest.mark.parametrize("form", FORMS, ids=form_name)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_rows_of_a_quantized_table(rng, dtype, form: Form) -> None:
    mode, width, group = form
    weight = Weight(rng, form, dtype, 9, 384)
    table, scales, *biases = weight.arrays
    ids = mx.array([3, -1, 9, 0, -10], mx.int32)

    def build(ids: mx.array) -> mx.array:
        return ops.lookup(
            ids, table, scales, *(biases or [None]), group_size=group, bits=width, mode=mode,
            for_program=True,
        )  # fmt: skip

    out, [launch] = run(build, ids)
    assert out.dtype == (dtype if mode == "affine" else mx.bfloat16)
    assert launch["kernel"] == f"lookup_rows_{short(out.dtype)}_{mode}_{width}"
    kept = np.array([0, 1, 3])
    expected = mx.array(weight.exact[np.array([3, 8, 0])], mx.float32).astype(out.dtype)
    np.testing.assert_allclose(
        exact(out)[kept], exact(expected), rtol=2 * TOLERANCE[out.dtype], atol=1e-6
    )
    assert np.isnan(exact(out)[[2, 4]]).all()


# --- Mixtures of experts --------------------------------------------------------------------------


# With the first, a step of a model shares its compiled kernels.
EXPERT_FORMS = sorted([DENSE, *FORMS], key=lambda form: form[:2] != ("affine", 4))


@pytest.mark.one_in(11)
@pytest.mark.parametrize("form", EXPERT_FORMS, ids=form_name)
def test_experts(rng, form: Form) -> None:
    """Against float64. A row's result has the same bits in any company, and every chosen expert's
    matrix is read once for each 16 of its rows."""
    dtype = DTYPES[EXPERT_FORMS.index(form) % 3]
    options = {} if form == DENSE else {"form": form}
    experts = Experts(rng, 5, 128, 128, dtype, has_bias=True, **options)
    x, logits = normal(rng, 21, 1, 128, dtype=dtype), logits_apart(rng, 21, 5, dtype)
    router, top_k = "normalized", 3
    chosen, shares = chosen_by(router, exact(logits)[:, 0], top_k)
    expected = experts.expected(x, chosen, shares)
    matrix_bytes = sum(a.nbytes for a in experts.arrays["gate"]) // 5
    whole = None
    for count, tile in ((21, 16), (4, 4), (1, 1)):
        out, ran = run(
            lambda x, logits: experts.build(x, logits, router, top_k), x[:count], logits[:count]
        )
        whole = bits(out) if whole is None else whole
        np.testing.assert_array_equal(bits(out), whole[:count])
        assert_close(out, expected[:count], 6 * TOLERANCE[dtype])
        items = int(-(-np.unique(chosen[:count], return_counts=True)[1] // 16).sum())
        for launch in ran[1:3]:  # gate and up
            assert launch["kernel"] == kernel_name("expert_rows", form, dtype, tile)
            assert weight_bytes(launch, experts.arrays["gate"]) == items * matrix_bytes


# --- Whole steps ----------------------------------------------------------------------------------

CONFIG = tiny_config("qwen3", head_dim=32)
MIXTURE = {
    **tiny_config("qwen3", head_dim=32, num_hidden_layers=2),
    **{"model_type": "qwen3_moe", "decoder_sparse_step": 1, "mlp_only_layers": []},
    **{"moe_intermediate_size": 64, "num_experts": 6, "num_experts_per_tok": 2},
    "norm_topk_prob": True,
}


def quantized_driver(config: dict[str, Any], form: Form) -> StepDriver:
    model = tiny_model(config)
    mode, width, group = form
    nn.quantize(model, group, width, mode=mode)
    mx.eval(model.parameters())
    return StepDriver(model, config["model_type"], block_size=8)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("form", [("affine", 4, 32), ("affine", 8, 64), ("affine", 6, 32)], ids=str)
@pytest.mark.parametrize("config", [MIXTURE, CONFIG], ids=["qwen3_moe", "qwen3"])
def test_steps_of_quantized_models_are_programs(rng, form: Form, config) -> None:
    ours, graphs = (quantized_driver(config, form) for _ in range(2))
    steps = with_programs(ours)
    works = [{"a": 7, "b": 1}, {"a": 1, "b": 1, "c": 9}, {"a": 1, "b": 1, "c": 1}]
    for work in works:
        tokens = {s: rng.integers(0, 96, count).tolist() for s, count in work.items()}
        expected = graphs.step(tokens)
        with simulated():
            actual = ours.step(tokens)
            kernels = {launch["kernel"] for launch in launches()}
        for sequence, logits in expected.items():
            np.testing.assert_allclose(actual[sequence], logits, atol=2e-4)
        of_format = f"float32_affine_{form[1]}"
        assert any(name.startswith(f"product_rows_{of_format}_m") for name in kernels)
        assert f"lookup_rows_{of_format}" in kernels
    assert len(steps.made) == 3


@pytest.mark.one_in(3)
@pytest.mark.parametrize("form", [("affine", 4, 64), ("affine", 3, 32)], ids=str)
def test_decodes_of_quantized_models_become_programs_of_metal(rng, form: Form) -> None:
    driver = quantized_driver(CONFIG, form)
    steps = driver.runner.model._graph_runner
    run_as_on(driver.runner.model, max_gpu_step_rows=16)
    with simulated():
        for _ in range(5):
            driver.step({s: rng.integers(0, 96, 1).tolist() for s in "ab"})
        kernels = {launch["kernel"] for launch in launches()}
    assert steps._graphs and not steps.refusals.executables
    assert f"product_rows_float32_affine_{form[1]}_m4" in kernels


def test_embeddings_outside_of_programs_are_mlxs(rng) -> None:
    embedding = nn.QuantizedEmbedding(8, 64, group_size=32, bits=4)
    ids = mx.array([1, 2])
    patches.install()
    expected = mx.dequantize(
        embedding.weight[ids], embedding.scales[ids], embedding.biases[ids], 32, 4
    )
    np.testing.assert_array_equal(np.array(embedding(ids)), np.array(expected))
