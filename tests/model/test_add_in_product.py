"""A residual that is part of the product before it."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_paged import ops
from mlx_paged.model import patches

ROWS, IN, OUT = 7, 48, 32


def normal(*shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    rng = np.random.default_rng(sum(shape))
    array = mx.array(rng.standard_normal(shape).astype(np.float32)).astype(dtype)
    mx.eval(array)
    return array


def as_float64(a: mx.array) -> np.ndarray:
    return np.array(a.astype(mx.float32)).astype(np.float64)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(ROWS,), (ROWS, 1), (1, ROWS)], ids=str)
@pytest.mark.parametrize("is_first", [False, True])
def test_it_is_rounded_once(dtype: mx.Dtype, shape: tuple[int, ...], is_first: bool) -> None:
    x, weight = normal(*shape, IN, dtype=dtype), normal(OUT, IN, dtype=dtype)
    before = normal(*shape, OUT, dtype=dtype)
    product = x @ weight.T
    total = product + before if is_first else before + product
    kept = total  # the same array, as model code has it
    assert ops.add_in_product(total)
    assert not ops.add_in_product(total), "it is a sum no more"
    exact = as_float64(before) + as_float64(x) @ as_float64(weight).T
    expected = mx.array(exact.astype(np.float32)).astype(dtype)
    assert kept.shape == before.shape and kept.dtype == dtype
    tolerance = {mx.float32: 1e-5, mx.float16: 1e-3, mx.bfloat16: 8e-3}[dtype]
    assert np.allclose(as_float64(kept), as_float64(expected), rtol=tolerance, atol=tolerance)
    assert np.allclose(as_float64(product), as_float64(x) @ as_float64(weight).T, atol=0.1)


@pytest.mark.parametrize(
    "sum_of",
    [
        lambda x, w, b: x,  # no sum
        lambda x, w, b: b + x[:, :OUT],  # without a product
        lambda x, w, b: b[:1] + x @ w.T,  # one row for all
        lambda x, w, b: b + (x @ w.T).astype(mx.float32),
        lambda x, w, b: b.astype(mx.float32) + x @ w.T,
        lambda x, w, b: b + mx.transpose(w @ x.T),  # (a product, but of other rows)
        lambda x, w, b: b + (x @ w.T) * 2,
        lambda x, w, b: b + x.reshape(ROWS, 1, IN) @ mx.broadcast_to(w.T, (ROWS, IN, OUT)),
    ],
)  # fmt: skip
def test_others_stay_as_they_are(sum_of: Callable[..., mx.array]) -> None:
    arrays = (normal(ROWS, IN, dtype=mx.float16), normal(OUT, IN, dtype=mx.float16),
              normal(ROWS, OUT, dtype=mx.float16))  # fmt: skip
    expected = sum_of(*arrays)
    mx.eval(expected)
    total = sum_of(*arrays)
    assert not ops.add_in_product(total)
    assert mx.array_equal(total, expected)


def test_what_was_evaluated_stays_as_it_is() -> None:
    x, weight, before = normal(ROWS, IN), normal(OUT, IN), normal(ROWS, OUT)
    product = x @ weight.T
    mx.eval(product)
    assert not ops.add_in_product(before + product)
    total = before + x @ weight.T
    mx.eval(total)
    assert not ops.add_in_product(total)


def test_a_traced_graph_stays_as_it_is() -> None:
    weight = normal(OUT, IN)

    def traced(x: mx.array, before: mx.array) -> mx.array:
        total = before + x @ weight.T
        assert not ops.add_in_product(total)
        return total

    x, before = normal(ROWS, IN), normal(ROWS, OUT)
    assert mx.allclose(mx.compile(traced)(x, before), before + x @ weight.T, atol=1e-5)


class Layer(nn.Module):
    """As mlx-lm's are."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(OUT)
        self.first = nn.Linear(OUT, OUT, bias=False)
        self.second = nn.Linear(OUT, OUT, bias=False)

    def __call__(self, x: mx.array) -> tuple[mx.array, mx.array]:
        h = x + self.first(self.norm(x))
        return h, h + self.second(self.norm(h))


def test_a_model_s_residuals_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU with CUDA. What is computed does not depend on that."""
    layer, x = Layer(), normal(ROWS, 1, OUT)
    mx.eval(layer.parameters())
    expected = layer(x)
    mx.eval(expected)
    found: list[bool] = []
    join = ops.add_in_product
    monkeypatch.setattr(ops, "add_in_product", lambda a: found.append(join(a)) or found[-1])
    patches.ensure_installed()
    monkeypatch.setattr(patches._building, "on_cuda", True)
    actual = layer(x)
    assert found == [False, True], "what comes in is no sum"
    for a, b in zip(actual, expected):
        assert mx.allclose(a, b, atol=1e-5)
    monkeypatch.setattr(patches._building, "is_native", True)
    layer(x)
    assert len(found) == 2, "a program's graph is read as it is"
