"""Native forms of what MLX composes of many operations, while a paged step is built.

On the CPU RoPE is ten operations, RMSNorm six, a linear layer four or five, and SwiGLU is compiled
to scalar code. On a GPU each of these is one kernel of MLX's own; but with CUDA a linear layer of a
few rows is cuBLAS, which costs the host more than any other operation of a decode step.

The native forms have no gradient and know no batch of sequences, so they serve the thread that is
building a paged step, and nobody else: any other call, and any argument that they do not take, goes
where it always went.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import activations

from mlx_paged import ops

_FLOATS = (mx.float32, mx.float16, mx.bfloat16)

_mlx_rope = mx.fast.rope
_mlx_rms_norm = mx.fast.rms_norm
_mlx_linear = nn.Linear.__call__
_mlx_quantized_linear = nn.QuantizedLinear.__call__
_mlx_as_linear = nn.Embedding.as_linear
_mlx_quantized_as_linear = nn.QuantizedEmbedding.as_linear
_mlx_lm_swiglu = activations.swiglu


class _Rotations:
    """Cosines and sines of a step's positions, one array for each kind of RoPE in the model."""

    def __init__(self, positions: mx.array) -> None:
        self.positions = positions
        self._arrays: dict[tuple[Any, ...], mx.array] = {}
        self._freqs: list[mx.array] = []  # keeps the ids in the keys unique

    def get(self, dims: int, base: float | None, scale: float, freqs: mx.array | None) -> mx.array:
        key = (dims, base, scale, id(freqs))
        if key not in self._arrays:
            if freqs is None:
                assert base is not None
                inv_freqs = _inv_freqs(dims, base)
            else:
                self._freqs.append(freqs)
                inv_freqs = mx.reciprocal(freqs.astype(mx.float32))
            self._arrays[key] = ops.rope_rotations(self.positions, inv_freqs, scale=scale)
        return self._arrays[key]


class _Building(threading.local):
    """The step that this thread is building."""

    rotations: _Rotations | None = None  # on the CPU
    on_cuda: bool = False
    linear_dtypes: tuple[mx.Dtype, ...] = ()  # of what `ops.linear` takes


_building = _Building()


@contextmanager
def native_ops(positions: mx.array) -> Iterator[None]:
    """Within it, model code on this thread meets the native operations.

    Args:
        positions: ``[num_rows]`` int32: the array that the model's RoPE gets as its offset.
    """
    if mx.default_device() == mx.cpu:
        _building.rotations = _Rotations(positions)
        _building.linear_dtypes = (mx.float32,)
    elif ops.has_cuda():
        _building.on_cuda = True
        _building.linear_dtypes = (mx.float16, mx.bfloat16)
    try:
        yield
    finally:
        _building.rotations, _building.linear_dtypes = None, ()
        _building.on_cuda = False


@lru_cache(maxsize=64)
def _inv_freqs(dims: int, base: float) -> mx.array:
    """The way MLX computes them, to the last bit: far from 0 an angle magnifies any difference."""
    half = dims // 2
    exponents = mx.arange(0, -half, -1, dtype=mx.float32) * (math.log(base) / half)
    inv_freqs = mx.exp(exponents)
    mx.eval(inv_freqs)
    return inv_freqs


def rope(
    a: mx.array,
    dims: int,
    *,
    traditional: bool,
    base: float | None,
    scale: float,
    offset: int | mx.array,
    freqs: mx.array | None = None,
    stream: Any = None,
) -> mx.array:
    """``mx.fast.rope``; native for a step's rows at their own positions."""
    rotations = _building.rotations
    if (
        rotations is not None
        and offset is rotations.positions
        and stream is None
        and (base is None) != (freqs is None)
        and a.ndim == 4
        and a.shape[0] == offset.shape[0]
        and a.shape[2] == 1
        and a.dtype in _FLOATS
        and 0 < dims <= a.shape[3]
        and dims % 2 == 0
        and (freqs is None or freqs.shape == (dims // 2,))
    ):
        return ops.rope(a, rotations.get(dims, base, scale, freqs), traditional=traditional)
    return _mlx_rope(
        a,
        dims,
        traditional=traditional,
        base=base,
        scale=scale,
        offset=offset,
        freqs=freqs,
        stream=stream,
    )


def rms_norm(
    x: mx.array,
    weight: mx.array | None,
    eps: float,
    *,
    stream: Any = None,
) -> mx.array:
    """``mx.fast.rms_norm``."""
    if (
        _building.rotations is not None
        and stream is None
        and x.ndim > 0
        and x.dtype in _FLOATS
        and (weight is None or (weight.dtype == x.dtype and weight.shape == x.shape[-1:]))
    ):
        return ops.rms_norm(x, weight, eps)
    return _mlx_rms_norm(x, weight, eps, stream=stream)


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """``mlx_lm.models.activations.swiglu``."""
    if (
        _building.rotations is not None
        and gate.dtype in _FLOATS
        and gate.dtype == x.dtype
        and gate.shape == x.shape
    ):
        return ops.silu_mul(gate, x)
    return _mlx_lm_swiglu(gate, x)


def linear(self: nn.Linear, x: mx.array) -> mx.array:
    """``nn.Linear.__call__``."""
    if x.dtype in _building.linear_dtypes:
        return ops.linear(x, self["weight"], self.get("bias"))
    return _mlx_linear(self, x)


def as_linear(self: nn.Embedding, x: mx.array) -> mx.array:
    """``nn.Embedding.as_linear``: the output projection of models whose embeddings are tied."""
    if x.dtype in _building.linear_dtypes:
        return ops.linear(x, self["weight"])
    return _mlx_as_linear(self, x)


def quantized_linear(self: nn.QuantizedLinear, x: mx.array) -> mx.array:
    """``nn.QuantizedLinear.__call__``."""
    return _as_one_matrix(_mlx_quantized_linear, self, x)


def quantized_as_linear(self: nn.QuantizedEmbedding, x: mx.array) -> mx.array:
    """``nn.QuantizedEmbedding.as_linear``."""
    return _as_one_matrix(_mlx_quantized_as_linear, self, x)


def _as_one_matrix(multiply: Callable[..., mx.array], self: nn.Module, x: mx.array) -> mx.array:
    """With CUDA MLX multiplies each ``[1, k]`` of ``[T, 1, k]`` alone, in tiles of many rows."""
    if _building.on_cuda and x.ndim > 2:
        out = multiply(self, x.reshape(-1, x.shape[-1]))
        return out.reshape(*x.shape[:-1], out.shape[-1])
    return multiply(self, x)


def install() -> None:
    """Rebinds MLX's names, and mlx-lm's in every model module there is. Twice changes nothing."""
    mx.fast.rope = rope
    mx.fast.rms_norm = rms_norm
    nn.Linear.__call__ = linear
    nn.QuantizedLinear.__call__ = quantized_linear
    nn.Embedding.as_linear = as_linear
    nn.QuantizedEmbedding.as_linear = quantized_as_linear
    _rebind_swiglu(_mlx_lm_swiglu, swiglu)


def uninstall() -> None:
    """Puts back what was there."""
    mx.fast.rope = _mlx_rope
    mx.fast.rms_norm = _mlx_rms_norm
    nn.Linear.__call__ = _mlx_linear
    nn.QuantizedLinear.__call__ = _mlx_quantized_linear
    nn.Embedding.as_linear = _mlx_as_linear
    nn.QuantizedEmbedding.as_linear = _mlx_quantized_as_linear
    _rebind_swiglu(swiglu, _mlx_lm_swiglu)


def _rebind_swiglu(old: Any, new: Any) -> None:
    # Model modules import the function itself; those imported later find it in `activations`.
    for name, module in list(sys.modules.items()):
        if name.startswith("mlx_lm.models.") and vars(module).get("swiglu") is old:
            module.swiglu = new  # type: ignore[attr-defined]
