"""Timing: how long kernels that can serve the same shape take on this machine."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_paged import kernels, ops
from mlx_paged.calibration.cases import MLX, Product, layer_of, merge_kernel
from mlx_paged.calibration.check import (
    Sequences,
    linear_module,
    multiplied,
    multiplied_separately,
    only_product,
    program_of,
    width_of,
)
from mlx_paged.child_jobs import announce
from mlx_paged.kernels import AttentionLayer

# Tests replace the clock and the sizes.
clock: Callable[[], float] = time.perf_counter
CONTEXT = 2048  # tokens of the longest of three sequences
LONG_CONTEXTS = 4, 8192  # number and tokens of sequences whose contexts are split
CALLS = 8  # in one measurement, so that the GPU is busy
FEW_ROWS = 16  # above them, one call is enough
REPEATS = 5


def fastest(run: Callable[[], Any]) -> float:
    """Returns the seconds of the fastest of several runs, after one that does not count."""
    run()
    times = []
    for _ in range(REPEATS):
        start = clock()
        run()
        times.append(clock() - start)
    return min(times)


def attention(layer_name: str, block: str, rows: str, kernel: str) -> float:
    """Times a kernel on sequences of `rows` rows; kernels that are preferred to it do not run."""
    announce([kernel])
    layer, before = layer_of(layer_name), kernels.rejected
    try:
        while (chosen := kernels.attention_kernel(layer, int(rows))) != kernel:
            if not chosen:
                raise ValueError(f"{rows} rows cannot use {kernel}")
            kernels.reject_kernels({*kernels.rejected, chosen})
        sequences = Sequences(layer, int(block), int(rows), CONTEXT)
        plan = sequences.plan(1 << 20)
        sequences.queries = mx.contiguous(sequences.queries)
        mx.eval(sequences.queries, sequences.pools)
        return fastest(lambda: mx.eval([sequences.attend(plan) for _ in range(CALLS)]))
    finally:
        kernels.reject_kernels(before)


def split(layer_name: str, block: str, tokens: str) -> float:
    """Times decodes whose contexts are in pieces of at least `tokens`."""
    layer = layer_of(layer_name)
    announce([kernels.attention_kernel(layer, 1), merge_kernel(layer)])
    sequences = _long_sequences(layer, int(block), *LONG_CONTEXTS)
    kernels.set_piece_tokens(int(tokens))
    try:
        plan = sequences.plan(None)
    finally:
        kernels.set_piece_tokens(0)
    return fastest(lambda: mx.eval([sequences.attend(plan) for _ in range(CALLS)]))


@functools.lru_cache(maxsize=1)  # one after another, jobs time the same with other pieces
def _long_sequences(layer: AttentionLayer, block_size: int, count: int, length: int) -> Sequences:
    sequences = Sequences(layer, block_size, 1, length, count)
    mx.eval(sequences.queries, sequences.pools)
    return sequences


def products(dtype: str, shapes: str, rows: str, way: str) -> float:
    """Times products of one format outside of whole steps, by one of our kernels or MLX's."""
    kind = getattr(mx, dtype)
    modules = _layers(dtype, shapes)
    inputs = {k: mx.ones((int(rows), k), kind) for k in {width_of(module) for module in modules}}
    mx.eval(list(inputs.values()))

    def run(multiply: Callable[..., mx.array]) -> float:
        calls = CALLS if int(rows) <= FEW_ROWS else 1
        return fastest(
            lambda: _evaluate(lambda: [multiply(m, inputs[width_of(m)]) for m in modules], calls)
        )

    if way == MLX:
        return run(multiplied_by_mlx)
    announce([way])
    with only_product(way):
        return run(multiplied_separately)


def multiplied_by_mlx(module: nn.Module, x: mx.array) -> mx.array:
    """A product by MLX's own kernels."""
    if not isinstance(module, nn.QuantizedLinear):
        return x @ module.weight.T
    return mx.quantized_matmul(
        x, module.weight, module.scales, module.get("biases"), transpose=True,
        group_size=module.group_size, bits=module.bits, mode=module.mode,
    )  # fmt: skip


@functools.lru_cache(maxsize=1)  # one after another, jobs time the same layers in other ways
def _layers(dtype: str, shapes: str) -> list[nn.Module]:
    products = [Product.of(text) for text in json.loads(shapes)]
    return [linear_module(product, getattr(mx, dtype)) for product in products]


def step(dtype: str, shapes: str, rows: str, way: str) -> float:
    """Times the norms and products of one decoder layer, as a whole step or as MLX's graph."""
    kind = getattr(mx, dtype)
    modules = _layers(dtype, shapes)
    widths = list(dict.fromkeys(width_of(module) for module in modules))
    weights = {k: mx.ones(k, kind) for k in widths}
    inputs = [mx.ones((int(rows), k), kind) for k in widths]
    mx.eval(inputs, list(weights.values()))

    def build(is_whole: bool, *given: mx.array) -> list[mx.array]:
        norm = ops.rms_norm if is_whole else mx.fast.rms_norm
        normed = {k: norm(x, weights[k], 1e-5) for k, x in zip(widths, given)}
        return [multiplied(module, normed[width_of(module)]) for module in modules]

    if way == "graph":
        return fastest(lambda: _evaluate(lambda: build(False, *inputs)))
    program = program_of(lambda *given: build(True, *given), inputs)
    announce(list(program.kernels))
    return fastest(lambda: _evaluate(lambda: program(inputs)))


def _evaluate(build: Callable[[], list[mx.array]], calls: int | None = None) -> None:
    """One step after another, as an engine without overlap runs them; None: `CALLS`."""
    for _ in range(CALLS if calls is None else calls):
        mx.eval(build())


TIMINGS: dict[str, Callable[..., float]] = {
    "time-attention": attention,
    "time-split": split,
    "time-step": step,
    "time-products": products,
}
