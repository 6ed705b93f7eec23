"""Rebinds functions of mlx and mlx-lm, so that the code of any model runs paged.

- **The attention patch.** Every mlx-lm model (and ``mlx_lm.models.base``) looks up
  ``mx.fast.scaled_dot_product_attention`` when it is called, so one rebinding covers them all.
- **Native forms of operations that MLX composes from many.** On the CPU, RoPE is ten operations,
  RMSNorm six, LayerNorm ten, a linear layer four or five; SwiGLU, GELU and products of experts are
  scalar code. On a GPU, each of these is one MLX kernel, but with CUDA a linear layer of a few rows
  is cuBLAS, which costs the host more than any other operation of a decode step. Native forms have
  no gradient and take no batch of sequences, so only the thread that builds a paged step uses them
  (or for GELU, an encoder's pass). The product with quantized weights has both, and replaces MLX's
  scalar code in every call on the CPU.

Any other call, and any argument that a patch does not support, goes to the original function.
Single modules of a model are changed by `model.overrides`.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, wraps
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers import activations as mlx_activations
from mlx_lm.models import activations, switch_layers

from mlx_paged import ops
from mlx_paged.model.caches import KVHandle, Scores
from mlx_paged.model.towers import TowerOps
from mlx_paged.platform import Platform, is_cpu_default

_FLOATS = (mx.float32, mx.float16, mx.bfloat16)

_mlx_attention = mx.fast.scaled_dot_product_attention
_mlx_rope = mx.fast.rope
_mlx_rms_norm = mx.fast.rms_norm
_mlx_linear = nn.Linear.__call__
_mlx_quantized_linear = nn.QuantizedLinear.__call__
_mlx_layer_norm = mx.fast.layer_norm
_mlx_gelus = {
    "gelu": "none",
    "gelu_approx": "tanh",
    "gelu_fast_approx": "fast",
}  # classes of mlx.nn, with the names that `ops.gelu` uses
_mlx_expert_linear = switch_layers.SwitchLinear.__call__
_mlx_quantized_expert_linear = switch_layers.QuantizedSwitchLinear.__call__
_mlx_switch_glu = switch_layers.SwitchGLU.__call__
_mlx_switch_mlp = switch_layers.SwitchMLP.__call__
_mlx_lm_clipped_swiglu = activations.swiglu_oai
_mlx_as_linear = nn.Embedding.as_linear
_mlx_quantized_as_linear = nn.QuantizedEmbedding.as_linear
_mlx_quantized_embedding = nn.QuantizedEmbedding.__call__
_mlx_lm_swiglu = activations.swiglu

# --- Attention ------------------------------------------------------------------------------------


def scaled_dot_product_attention(
    q: mx.array, k: mx.array, v: mx.array, *, scale: float, **kwargs: Any
) -> mx.array:
    """``mx.fast.scaled_dot_product_attention`` that also takes KV handles.

    Dispatch is on the type of the keys, never on a cache: layers that share their KV with another
    layer pass none.
    """
    if not isinstance(k, KVHandle):
        tower = _building.tower
        out = None if tower is None else tower.attend(q, k, v, scale, kwargs)
        return _mlx_attention(q, k, v, scale=scale, **kwargs) if out is None else out
    mask = kwargs.pop("mask", None)
    sinks = kwargs.pop("sinks", None)
    if mask is not None and not isinstance(mask, Scores):
        raise TypeError(
            "[paged_attention] mask must be None but got "
            f"{mask if isinstance(mask, str) else type(mask).__name__}: "
            "this model asks for a mask that the paged cache did not make"
        )
    if kwargs:
        raise TypeError(f"[paged_attention] unexpected arguments {sorted(kwargs)}")
    cache = k.cache
    # Latent attention takes its values from the keys; the given values are part of the scores.
    values = cache.values if mask is None else k
    if (
        k is not cache.keys
        or v is not values
        or (mask is not None and mask.handle.cache is not cache)
    ):
        raise TypeError(
            "[paged_attention] keys and values must be the two handles of one layer, in that order"
        )
    return cache.attend(q, scale=scale, sinks=sinks, scores=mask)


# --- Other operations -----------------------------------------------------------------------------


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

    rotations: _Rotations | None = None
    is_native: bool = False  # on the CPU, and for a program: all operations
    for_program: bool = False  # the graph becomes an `executables.GpuExecutable`
    on_cuda: bool = False
    linear_dtypes: tuple[mx.Dtype, ...] = ()  # that `ops.linear` supports
    activations: str = "float32"  # of products on the CPU
    experts_apart: bool = False  # layers of experts are called one by one
    by_rows: bool | int = False  # leading rows whose sums do not depend on the others; True: all
    tower: TowerOps | None = None  # set while a tower is built instead, on the CPU


_building = _Building()


def is_native_on_cpu() -> bool:
    """Returns True if this thread builds a step on the CPU, which needs no gradients."""
    return _building.linear_dtypes == (mx.float32,)


@contextmanager
def native_ops(
    positions: mx.array,
    activations: str = "float32",
    *,
    by_rows: bool | int = False,
    platform: Platform | None = None,
) -> Iterator[None]:
    """Makes model code on this thread use the native operations.

    Args:
        positions: ``[num_rows]`` int32: the array that the model's RoPE gets as its offset.
        activations, by_rows: See `ops.linear` and `ops.quantized_linear`; only for the CPU.
        platform: The device of the step; None means MLX's default device.
    """
    platform = platform or Platform.current()
    if platform.on_cpu:
        _building.activations, _building.by_rows = activations, by_rows
        _building.rotations = _Rotations(positions)
        _building.is_native = True
        _building.linear_dtypes = platform.native_dtypes
    elif platform.has_cuda or _building.for_program:
        _building.on_cuda = platform.has_cuda
        _building.linear_dtypes = platform.native_dtypes
        _building.rotations = _Rotations(positions)
        _building.is_native = _building.for_program
    else:
        # With Metal, `ops` has its own products where calibration chose them. Up to 16 rows, a
        # row has the same bits in programs and outside of them.
        _building.linear_dtypes = platform.native_dtypes
    try:
        yield
    finally:
        leave_native_ops()


@contextmanager
def graph_for_program() -> Iterator[None]:
    """Makes graphs built on this thread suitable for a `GpuExecutable`, which consists of
    native forms. A GPU does not run such graphs directly."""
    _building.for_program = True
    try:
        yield
    finally:
        _building.for_program = False


def leave_native_ops() -> None:
    """Ends `native_ops` and `native_tower` on this thread, also after an exception prevented their
    own end."""
    _building.rotations, _building.linear_dtypes, _building.tower = None, (), None
    _building.is_native = _building.on_cuda = False
    _building.activations, _building.by_rows = "float32", False


@contextmanager
def native_tower(platform: Platform | None = None) -> Iterator[None]:
    """Makes a tower's code on this thread use native operations, on the CPU."""
    platform = platform or Platform.current()
    if platform.on_cpu:
        _building.tower = TowerOps()
    try:
        yield
    finally:
        leave_native_ops()


@lru_cache(maxsize=64)
def _inv_freqs(dims: int, base: float) -> mx.array:
    """Computes the same bits as MLX: far from 0, an angle magnifies any difference."""
    inv_freqs = _inv_freqs_of(dims, base)
    mx.eval(inv_freqs)
    return inv_freqs


def _too_narrow_for_cuda(a: mx.array, dims: int, offset: int | mx.array) -> bool:
    """Returns True if MLX's RoPE would ask CUDA for 128 threads in z, where 64 is the maximum.

    It fills blocks of 1024 threads with powers of two: pairs of dims in x, one position in y, and
    in z the rows times groups of four heads. With 16 or more pairs, z cannot exceed 64.
    """
    if a.ndim != 4 or a.shape[2] != 1 or not isinstance(offset, mx.array) or offset.ndim != 1:
        return False
    return dims < 32 and a.shape[0] * -(-a.shape[1] // 4) >= 128


def _inv_freqs_of(dims: int, base: float | None) -> mx.array:
    assert base is not None
    half = dims // 2
    return mx.exp(mx.arange(0, -half, -1, dtype=mx.float32) * (math.log(base) / half))


def _rotated(
    a: mx.array, dims: int, positions: mx.array, inv_freqs: mx.array, traditional: bool
) -> mx.array:
    """RoPE of ``[num_rows, num_heads, 1, head_dim]`` in MLX's own operations, in float32."""
    angles = (positions.astype(mx.float32)[:, None] * inv_freqs)[:, None, None]
    cos, sin = mx.cos(angles), mx.sin(angles)
    x = a[..., :dims].astype(mx.float32)
    half = dims // 2
    u, v = (x[..., ::2], x[..., 1::2]) if traditional else (x[..., :half], x[..., half:])
    pairs = [u * cos - v * sin, u * sin + v * cos]
    rotated = mx.stack(pairs, -1).flatten(-2) if traditional else mx.concatenate(pairs, -1)
    rotated = rotated.astype(a.dtype)
    return mx.concatenate([rotated, a[..., dims:]], -1) if dims < a.shape[-1] else rotated


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
    """``mx.fast.rope``; native for a step's rows at their own positions.

    On CUDA, some shapes use MLX's kernel, or its operations where that kernel cannot start.
    """
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
        angles = rotations.get(dims, base, scale, freqs)
        if _building.is_native or ops.serves_rope(a, angles, traditional=traditional):
            return ops.rope(a, angles, traditional=traditional)
    if _building.on_cuda and _too_narrow_for_cuda(a, dims, offset):
        assert isinstance(offset, mx.array)
        inv_freqs = 1 / freqs if freqs is not None else _inv_freqs_of(dims, base)
        return _rotated(a, dims, scale * offset, inv_freqs, traditional)
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
        _building.is_native
        and stream is None
        and x.ndim > 0
        and x.dtype in _FLOATS
        and (weight is None or (weight.dtype == x.dtype and weight.shape == x.shape[-1:]))
    ):
        return ops.rms_norm(x, weight, eps)
    if _building.on_cuda and not _building.is_native:
        # Usually, a layer adds this to its residual.
        ops.add_in_product(x)
    return _mlx_rms_norm(x, weight, eps, stream=stream)


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """``mlx_lm.models.activations.swiglu``."""
    if (
        _building.rotations is not None
        and gate.dtype in _FLOATS
        and gate.dtype == x.dtype
        and gate.shape == x.shape
        and (_building.is_native or ops.serves_silu_mul(gate))
    ):
        return ops.silu_mul(gate, x)
    return _mlx_lm_swiglu(gate, x)


def _linear(x: mx.array, weight: mx.array, bias: mx.array | None = None) -> mx.array:
    return ops.linear(
        x, weight, bias, activations=_building.activations, by_rows=_building.by_rows
    )  # fmt: skip


def linear(self: nn.Linear, x: mx.array) -> mx.array:
    """``nn.Linear.__call__``."""
    if x.dtype in _building.linear_dtypes:
        return _linear(x, self["weight"], self.get("bias"))
    return _mlx_linear(self, x)


def layer_norm(
    x: mx.array,
    weight: mx.array | None,
    bias: mx.array | None,
    eps: float,
    *,
    stream: Any = None,
) -> mx.array:
    """``mx.fast.layer_norm``."""
    if (
        is_native_on_cpu()
        and stream is None
        and x.ndim > 0
        and x.dtype in _FLOATS
        and all(
            a is None or (a.dtype == x.dtype and a.shape == x.shape[-1:]) for a in (weight, bias)
        )
    ):
        return ops.layer_norm(x, weight, bias, eps)
    return _mlx_layer_norm(x, weight, bias, eps, stream=stream)


def _gelu(original: Callable[[mx.array], mx.array], approximation: str) -> Any:
    def gelu(x: mx.array) -> mx.array:
        in_step = is_native_on_cpu() and x.dtype in _FLOATS
        if in_step or (_building.tower is not None and x.dtype == mx.float32):
            return ops.gelu(x, approximation)
        return original(x)

    return wraps(original)(gelu)


def clipped_swiglu(
    gate: mx.array, x: mx.array, alpha: float = 1.702, limit: float = 7.0
) -> mx.array:
    """``mlx_lm.models.activations.swiglu_oai``."""
    if (
        is_native_on_cpu()
        and gate.dtype in _FLOATS
        and gate.dtype == x.dtype
        and gate.shape == x.shape
    ):
        return ops.clipped_swiglu(gate, x, alpha=alpha, limit=limit)
    return _mlx_lm_clipped_swiglu(gate, x, alpha=alpha, limit=limit)


# Pairs of a row and an expert from which on mlx-lm sorts them.
_MIN_SORTED_PAIRS = 64

# Rows of one `mx.gather_qmm`: a CUDA grid's third axis has no more. A step of 8192 tokens with
# eight experts each has one more.
_MAX_CUDA_MATRICES = (1 << 16) - 1


def expert_linear(
    self: switch_layers.SwitchLinear, x: mx.array, indices: mx.array, sorted_indices: bool = False
) -> mx.array:
    """``SwitchLinear.__call__``."""
    weight = self["weight"]
    if _building.is_native and _are_rows(x) and weight.dtype in _FLOATS:
        if _building.for_program:
            return ops.expert_linear(x, indices, weight, bias=self.get("bias"), for_program=True)
        dtype = mx.result_type(x, weight)
        out = ops.expert_linear(x.astype(mx.float32), indices, weight, bias=self.get("bias"))
        return out.astype(dtype)
    return _mlx_expert_linear(self, x, indices, sorted_indices)


def quantized_expert_linear(
    self: switch_layers.QuantizedSwitchLinear,
    x: mx.array,
    indices: mx.array,
    sorted_indices: bool = False,
) -> mx.array:
    """``QuantizedSwitchLinear.__call__``."""
    # MLX supports a scale for each matrix only on GPUs.
    native = _building.is_native or (self.get("global_scale") is not None and is_cpu_default())
    if native and _are_rows(x) and ops.has_product(self.mode, self.bits, self.group_size):
        dtype = mx.result_type(x, self["scales"]) if self.mode == "affine" else x.dtype
        for_program = _building.for_program
        out = ops.expert_linear(
            x if for_program else x.astype(mx.float32),
            indices,
            self["weight"],
            self["scales"],
            self.get("biases"),
            self.get("bias"),
            self.get("global_scale"),
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
            for_program=for_program,
        )
        return out.astype(dtype)
    if _building.on_cuda and sorted_indices and x.ndim == 3 and _are_rows(x):
        # MLX's kernel would multiply each row of a prompt alone.
        sorted_rows = ops.sorted_expert_linear(x.squeeze(-2), indices, _expert_weights(self))
        if sorted_rows is not None:
            return sorted_rows[:, None]
    too_many = indices.size > _MAX_CUDA_MATRICES and indices.shape == x.shape[:1]
    if too_many and Platform.current().has_cuda:
        parts = range(0, len(indices), _MAX_CUDA_MATRICES)
        rows = [slice(first, first + _MAX_CUDA_MATRICES) for first in parts]
        return mx.concatenate([
            _mlx_quantized_expert_linear(self, x[part], indices[part], sorted_indices)
            for part in rows
        ])  # fmt: skip
    return _mlx_quantized_expert_linear(self, x, indices, sorted_indices)


def _are_rows(x: mx.array) -> bool:
    return x.dtype in _FLOATS and x.ndim >= 2 and x.shape[-2] == 1


def _expert_weights(layer: switch_layers.QuantizedSwitchLinear) -> ops.ExpertWeights:
    return ops.ExpertWeights(
        layer["weight"],
        layer["scales"],
        layer.get("biases"),
        layer.get("bias"),
        layer.group_size,
        layer.bits,
        layer.mode,
    )


# MLX first sorts many rows by expert; ours does that internally.


def switch_glu(self: switch_layers.SwitchGLU, x: mx.array, indices: mx.array) -> mx.array:
    """``SwitchGLU.__call__``."""
    if not _building.is_native:
        out = _prompt_glu(self, x, indices) if _building.on_cuda else None
        return _mlx_switch_glu(self, x, indices) if out is None else out
    x, indices = mx.expand_dims(x, (-2, -3)), mx.stop_gradient(indices)
    x = self.activation(self.up_proj(x, indices), self.gate_proj(x, indices))
    return self.down_proj(x, indices).squeeze(-2)


def _prompt_glu(self: switch_layers.SwitchGLU, x: mx.array, indices: mx.array) -> mx.array | None:
    """`switch_glu` of a prompt's rows with CUDA; None if there is no kernel for it."""
    layers = self.gate_proj, self.up_proj, self.down_proj
    if (
        indices.size < _MIN_SORTED_PAIRS
        or _building.experts_apart
        or type(self.activation) is not switch_layers.SwiGLU
        or not all(isinstance(layer, switch_layers.QuantizedSwitchLinear) for layer in layers)
    ):
        return None
    rows = x.reshape(-1, x.shape[-1])
    experts = indices.reshape(len(rows), indices.shape[-1])
    out = ops.expert_glu(rows, experts, *map(_expert_weights, layers))
    return None if out is None else out.reshape(*indices.shape, out.shape[-1])


def switch_mlp(self: switch_layers.SwitchMLP, x: mx.array, indices: mx.array) -> mx.array:
    """``SwitchMLP.__call__``."""
    if not _building.is_native:
        return _mlx_switch_mlp(self, x, indices)
    x, indices = mx.expand_dims(x, (-2, -3)), mx.stop_gradient(indices)
    return self.fc2(self.activation(self.fc1(x, indices)), indices).squeeze(-2)


def keeps_order_of_pairs(around: type[nn.Module]) -> bool:
    """True if this class calls its layers of experts with pairs of a row and an expert in the order
    of rows, in the step that this thread is building.

    A subclass of mlx-lm's that calls the original says so by an attribute `passes_pairs_on`.
    """
    is_own = around.__call__ in (switch_glu, switch_mlp) or getattr(
        around, "passes_pairs_on", False
    )
    return _building.is_native and is_own


@contextmanager
def separate_experts() -> Iterator[None]:
    """Within it, layers of experts are called one by one, even where one kernel could serve all."""
    _building.experts_apart = True
    try:
        yield
    finally:
        _building.experts_apart = False


def as_linear(self: nn.Embedding, x: mx.array) -> mx.array:
    """``nn.Embedding.as_linear``: the output projection of models with tied embeddings."""
    if x.dtype in _building.linear_dtypes:
        return _linear(x, self["weight"])
    return _mlx_as_linear(self, x)


def quantized_linear(self: nn.QuantizedLinear, x: mx.array) -> mx.array:
    """``nn.QuantizedLinear.__call__``; on the CPU native outside of steps, too."""
    if is_cpu_default():
        return _native_quantized(self, x)
    native = x.dtype in _building.linear_dtypes
    return _as_one_matrix(_native_quantized if native else _mlx_quantized_linear, self, x)


def quantized_as_linear(self: nn.QuantizedEmbedding, x: mx.array) -> mx.array:
    """``nn.QuantizedEmbedding.as_linear``; on the CPU native outside of steps, too."""
    if is_cpu_default():
        return _native_quantized(self, x)
    native = x.dtype in _building.linear_dtypes
    return _as_one_matrix(_native_quantized if native else _mlx_quantized_as_linear, self, x)


def _native_quantized(self: nn.Module, x: mx.array) -> mx.array:
    # Unlike other native forms, it has a gradient and takes any batch.
    return ops.quantized_linear(
        x,
        self["weight"],
        self["scales"],
        self.get("biases"),
        self.get("bias"),
        group_size=self.group_size,
        bits=self.bits,
        mode=self.mode,
        activations=_building.activations,
        by_rows=_building.by_rows,
        for_program=_building.for_program,
    )


def quantized_embedding(self: nn.QuantizedEmbedding, x: mx.array) -> mx.array:
    """``nn.QuantizedEmbedding.__call__``."""
    if not _building.for_program or Platform.current().has_cuda:
        return _mlx_quantized_embedding(self, x)
    return ops.lookup(
        x,
        self["weight"],
        self["scales"],
        self.get("biases"),
        group_size=self.group_size,
        bits=self.bits,
        mode=self.mode,
        for_program=True,
    )


def _as_one_matrix(multiply: Callable[..., mx.array], self: nn.Module, x: mx.array) -> mx.array:
    """With CUDA MLX multiplies each ``[1, k]`` of ``[T, 1, k]`` alone, in tiles of many rows."""
    if _building.on_cuda and x.ndim > 2:
        out = multiply(self, x.reshape(-1, x.shape[-1]))
        return out.reshape(*x.shape[:-1], out.shape[-1])
    return multiply(self, x)


# --- Installing -----------------------------------------------------------------------------------


def _gelus() -> list[tuple[Any, str, Any, Any]]:
    """Rebinds activations where models look them up, and where `nn.GELU` does."""
    found = []
    for name, approximation in _mlx_gelus.items():
        original = getattr(nn, name)
        own = _gelu(original, approximation)
        found += [(owner, name, original, own) for owner in (nn, mlx_activations)]
    return found


_REBOUND: tuple[tuple[Any, str, Any, Any], ...] = (  # owner, name, MLX's, ours
    (mx.fast, "scaled_dot_product_attention", _mlx_attention, scaled_dot_product_attention),
    (mx.fast, "rope", _mlx_rope, rope),
    (mx.fast, "rms_norm", _mlx_rms_norm, rms_norm),
    (mx.fast, "layer_norm", _mlx_layer_norm, layer_norm),
    (nn.Linear, "__call__", _mlx_linear, linear),
    (nn.QuantizedLinear, "__call__", _mlx_quantized_linear, quantized_linear),
    (nn.Embedding, "as_linear", _mlx_as_linear, as_linear),
    (nn.QuantizedEmbedding, "as_linear", _mlx_quantized_as_linear, quantized_as_linear),
    (nn.QuantizedEmbedding, "__call__", _mlx_quantized_embedding, quantized_embedding),
    (switch_layers.SwitchLinear, "__call__", _mlx_expert_linear, expert_linear),
    (
        switch_layers.QuantizedSwitchLinear,
        "__call__",
        _mlx_quantized_expert_linear,
        quantized_expert_linear,
    ),
    (switch_layers.SwitchGLU, "__call__", _mlx_switch_glu, switch_glu),
    (switch_layers.SwitchMLP, "__call__", _mlx_switch_mlp, switch_mlp),
    (activations, "swiglu_oai", _mlx_lm_clipped_swiglu, clipped_swiglu),
    *_gelus(),
)


_installing = threading.Lock()


def install() -> None:
    """Rebinds MLX's names, and mlx-lm's and mlx-vlm's in every model module. Idempotent."""
    with _installing:
        _rebind_swiglu(paged=True)
        for owner, name, _, own in reversed(_REBOUND):  # Attention last, as a sign of completion.
            setattr(owner, name, own)


def ensure_installed() -> None:
    """Called for every step, because another part of the program may have uninstalled them."""
    if mx.fast.scaled_dot_product_attention is not scaled_dot_product_attention:
        install()


def uninstall() -> None:
    """Restores the originals."""
    with _installing:
        for owner, name, original, _ in _REBOUND:
            setattr(owner, name, original)
        _rebind_swiglu(paged=False)


# The libraries' own, by package; mlx-vlm's once it is imported.
_swiglus: dict[str, Any] = {"mlx_lm": _mlx_lm_swiglu}


def _rebind_swiglu(*, paged: bool) -> None:
    # Model modules import the function itself; those imported later find it in `activations`.
    of_vlm = getattr(sys.modules.get("mlx_vlm.models.activations"), "swiglu", None)
    if of_vlm is not None:
        _swiglus.setdefault("mlx_vlm", of_vlm)
    for name, module in sys.modules.copy().items():  # Other threads may be importing.
        original = _swiglus.get(name.partition(".models.")[0])
        if original is not None and vars(module).get("swiglu") in (original, swiglu):
            module.swiglu = swiglu if paged else original  # type: ignore[attr-defined]
