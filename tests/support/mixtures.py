"""Mixtures of experts in the forms that models use, and their expected results in float64."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np

from mlx_paged import ops

Router = Callable[[mx.array, int], tuple[mx.array, mx.array]]  # (logits, top_k)


def exact(array: mx.array) -> np.ndarray:
    """The values of an array of any dtype, in float64."""
    return np.array(array.astype(mx.float32)).astype(np.float64)


def softmax_and_last(logits: mx.array, top_k: int) -> tuple[mx.array, mx.array]:
    """Indices and weights as in qwen3_moe."""
    shares = mx.softmax(logits, axis=-1, precise=True)
    indices = mx.stop_gradient(mx.argpartition(shares, kth=-top_k, axis=-1)[..., -top_k:])
    return indices, mx.take_along_axis(shares, indices, axis=-1)


def normalized(logits: mx.array, top_k: int) -> tuple[mx.array, mx.array]:
    indices, weights = softmax_and_last(logits, top_k)
    return indices, weights / mx.sum(weights, axis=-1, keepdims=True)


def first_and_softmax(logits: mx.array, top_k: int) -> tuple[mx.array, mx.array]:
    """Indices and weights as in mixtral."""
    indices = mx.argpartition(-logits, kth=top_k - 1, axis=-1)[..., :top_k]
    weights = mx.take_along_axis(logits, indices, axis=-1)
    return indices, mx.softmax(weights, axis=-1, precise=True)


ROUTERS: dict[str, Router] = {
    "softmax, last": softmax_and_last,
    "normalized": normalized,
    "first, softmax": first_and_softmax,
}


def chosen_by(router: str, logits: np.ndarray, top_k: int) -> tuple[np.ndarray, np.ndarray]:
    """Experts that rows choose, and their weights; ties as in a stable sort."""
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    if router == "first, softmax":
        chosen = np.argsort(-logits, axis=1, kind="stable")[:, :top_k]
    else:
        chosen = np.argsort(logits, axis=1, kind="stable")[:, -top_k:]
    weights = np.take_along_axis(shares, chosen, axis=1)
    is_share = router == "softmax, last"
    return chosen, weights if is_share else weights / weights.sum(axis=1, keepdims=True)


class Experts:
    """Random experts with gated products, quantized with `form`: mode, bits and group size."""

    def __init__(
        self,
        rng: np.random.Generator,
        num_experts: int,
        hidden: int,
        intermediate: int,
        dtype: mx.Dtype,
        *,
        has_bias: bool = False,
        form: tuple[str, int, int] | None = None,
    ) -> None:
        self.form = form
        self.arrays: dict[str, list[mx.array]] = {}  # [weight], or [codes, scales]
        self.biases: dict[str, mx.array | None] = {}
        self.exact: dict[str, np.ndarray] = {}  # values that products use
        sizes = {"gate": (intermediate, hidden), "up": (intermediate, hidden)}
        for part, (n, k) in {**sizes, "down": (hidden, intermediate)}.items():
            numbers = rng.standard_normal((num_experts, n, k)).astype(np.float32) / np.sqrt(k)
            weight = mx.array(numbers).astype(dtype)
            self.arrays[part] = [weight]
            if form is not None:
                mode, bits, group_size = form
                self.arrays[part] = list(mx.quantize(weight, group_size, bits, mode))
                weight = mx.dequantize(
                    *self.arrays[part], group_size=group_size, bits=bits, mode=mode
                ).astype(dtype)
            bias = mx.array(rng.standard_normal((num_experts, n)).astype(np.float32)).astype(dtype)
            self.biases[part] = bias if has_bias else None
            mx.eval(self.arrays[part], weight, bias)
            self.exact[part] = exact(weight)

    def product(self, part: str, x: mx.array, indices: mx.array) -> mx.array:
        mode, bits, group_size = self.form or ("affine", 0, 0)
        arrays = self.arrays[part]
        return ops.expert_linear(
            x, indices, *arrays, *[None] * (3 - len(arrays)), self.biases[part],
            group_size=group_size, bits=bits, mode=mode, for_program=True,
        )  # fmt: skip

    def build(self, x: mx.array, logits: mx.array, router: str, top_k: int) -> mx.array:
        """Computes ``[rows, 1, hidden]`` for rows and their router logits, as part of a program."""
        indices, shares = ROUTERS[router](logits, top_k)
        x = mx.expand_dims(x, (-2, -3))
        gate, up = (self.product(part, x, indices) for part in ("gate", "up"))
        y = self.product("down", ops.silu_mul(gate, up), indices).squeeze(-2)
        return (y * shares[..., None]).sum(axis=-2)

    def expected(self, x: mx.array, chosen: np.ndarray, shares: np.ndarray) -> np.ndarray:
        """The same in float64."""
        rows = exact(x)[:, 0]
        out = np.zeros((len(rows), self.exact["down"].shape[1]))
        for row, (experts, weights) in enumerate(zip(chosen, shares, strict=True)):
            for expert, weight in zip(experts, weights, strict=True):
                g, u = (self._exact_product(part, rows[row], expert) for part in ("gate", "up"))
                out[row] += weight * self._exact_product("down", g / (1 + np.exp(-g)) * u, expert)
        return out[:, None]

    def _exact_product(self, part: str, x: np.ndarray, expert: int) -> np.ndarray:
        bias = self.biases[part]
        added = 0 if bias is None else exact(bias[expert])
        return self.exact[part][expert] @ x + added


def logits_apart(
    rng: np.random.Generator, rows: int, num_experts: int, dtype: mx.Dtype
) -> mx.array:
    """``[rows, 1, num_experts]`` logits, spaced so that rounding makes no two shares equal."""
    places = rng.permuted(np.tile(np.arange(num_experts), (rows, 1)), axis=1)
    logits = mx.array(places.astype(np.float32)[:, None] / 16).astype(dtype)
    mx.eval(logits)
    return logits
