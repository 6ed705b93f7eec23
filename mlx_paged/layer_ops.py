"""Native primitives for the parts of a layer that have no pool: rotations, norms, activations,
matrix products and adapters, and two ways to change a graph of them.

`ops` has them all by the same names, and says what `stream` is, and which errors all of them raise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from mlx_paged import kernels, plain_ops
from mlx_paged.extension import ext

# As a number of rows: all of them.
_ALL_ROWS = (1 << 31) - 1


def rope_rotations(
    positions: mx.array,
    inv_freqs: mx.array,
    *,
    scale: float = 1.0,
    stream: mx.Stream | mx.Device | None = None,
) -> mx.array:
    """Computes cosines and sines for `rope`, once for all layers of a step. CPU only.

    Args:
        positions: ``[num_rows]`` int32.
        inv_freqs: ``[dims / 2]`` float32: rotation of each pair per position, in radians.
        scale: Factor on the positions.

    Returns:
        ``[num_rows, 2, dims / 2]`` float32: cosines, then sines.
    """
    return ext.rope_rotations(positions, inv_freqs, scale=scale, stream=stream)


def rope(
    x: mx.array,
    rotations: mx.array,
    *,
    traditional: bool = False,
    stream: mx.Stream | mx.Device | None = None,
) -> mx.array:
    """Rotary position embedding of each row's heads, in float32.

    Runs on the CPU, and with CUDA if `serves_rope` is True. No gradient.

    Args:
        x: ``[num_rows, num_heads, 1, head_dim]`` float32, float16 or bfloat16, with any strides.
        rotations: ``[num_rows, 2, dims / 2]`` float32 from `rope_rotations`. Dims from ``dims`` on
            are copied.
        traditional: Pair dim 2i with 2i + 1 instead of i with i + dims / 2.
    """
    return ext.rope(x, rotations, traditional=traditional, stream=stream)


def serves_rope(x: mx.array, rotations: mx.array, *, traditional: bool = False) -> bool:
    """True if this build runs `rope` on these arrays on a GPU.

    Needs CUDA, a 16-bit dtype, rotation of whole heads whose halves are multiples of 16 bytes, and
    not `traditional`.
    """
    return ext.serves_rope(x, rotations, traditional)


def rms_norm(
    x: mx.array,
    weight: mx.array | None,
    eps: float,
    *,
    stream: mx.Stream | mx.Device | None = None,
) -> mx.array:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last axis, in float32. CPU only, no gradient.

    Args:
        x: ``[..., size]`` float32, float16 or bfloat16.
        weight: ``[size]`` in the dtype of `x`; None: ones.
    """
    return ext.rms_norm(x, weight, eps, stream=stream)


def layer_norm(
    x: mx.array,
    weight: mx.array | None,
    bias: mx.array | None,
    eps: float,
    *,
    stream: mx.Stream | mx.Device | None = None,
) -> mx.array:
    """``(x - mean) / sqrt(variance + eps) * weight + bias`` over the last axis, in float32. CPU
    only, no gradient.

    Args:
        x: ``[..., size]`` float32, float16 or bfloat16.
        weight: ``[size]`` in the dtype of `x`; None: ones.
        bias: Like `weight`; None: zeros.
    """
    return ext.layer_norm(x, weight, bias, eps, stream=stream)


def gelu(
    x: mx.array,
    approximation: str = "none",
    *,
    stream: mx.Stream | mx.Device | None = None,
) -> mx.array:
    """Elementwise GELU in float32. CPU only, no gradient.

    Args:
        x: float32, float16 or bfloat16.
        approximation: "none", "tanh" (MLX's "precise") or "fast" (sigmoid-based).
    """
    return ext.gelu(x, approximation, stream=stream)


def silu_mul(
    gate: mx.array, x: mx.array, *, stream: mx.Stream | mx.Device | None = None
) -> mx.array:
    """``gate * sigmoid(gate) * x``, for equal shapes and dtypes.

    Runs on the CPU, and with CUDA if `serves_silu_mul` is True. No gradient.
    """
    return ext.silu_mul(gate, x, stream=stream)


def serves_silu_mul(gate: mx.array) -> bool:
    """True if this build runs `silu_mul` on such arrays on a GPU.

    Needs CUDA, a 16-bit dtype and rows of a multiple of 16 bytes.
    """
    return ext.serves_silu_mul(gate)


def clipped_swiglu(
    gate: mx.array,
    x: mx.array,
    *,
    alpha: float,
    limit: float,
    stream: mx.Stream | mx.Device | None = None,
) -> mx.array:
    """gpt-oss's SwiGLU: ``g * sigmoid(alpha * g) * (clip(x, -limit, limit) + 1)`` with
    ``g = min(gate, limit)``, for equal shapes and dtypes. CPU only, no gradient."""
    return ext.clipped_swiglu(gate, x, alpha=alpha, limit=limit, stream=stream)


def linear(
    x: mx.array,
    weight: mx.array,
    bias: mx.array | None = None,
    *,
    activations: str = "float32",
    by_rows: bool | int = False,
    stream: mx.Stream | mx.Device | None = None,
) -> mx.array:
    """``x @ weight.T + bias``.

    A single operation on the CPU for float32 `x` and a float32, float16 or bfloat16 `weight`, which
    is read without conversion, and with CUDA for up to 64 rows in 16 bits. Otherwise a composition
    of MLX operations.

    Args:
        x: ``[..., k]``.
        weight: ``[n, k]``.
        bias: ``[n]``.
        activations: One of `activations()`. On the CPU, "bfloat16" rounds `x` to bfloat16 if the
            weight is bfloat16 and there are more than 64 rows, where it pays off.
        by_rows: On the CPU, sum each row in the same order for any number of rows, although a BLAS
            multiplies more than 64 rows faster. A number means only that many leading rows. No
            effect with `activations` "bfloat16".

    Returns:
        ``[..., n]``.
    """
    return ext.linear(
        x, weight, bias, activations=activations, by_rows=_num_rows(by_rows), stream=stream
    )


def quantized_linear(
    x: mx.array,
    weight: mx.array,
    scales: mx.array,
    biases: mx.array | None = None,
    bias: mx.array | None = None,
    *,
    group_size: int,
    bits: int,
    mode: str = "affine",
    activations: str = "float32",
    by_rows: bool | int = False,
    for_program: bool = False,
    stream: mx.Stream | mx.Device | None = None,
) -> mx.array:
    """``x @ w.T + bias`` for a matrix ``w`` that `mx.quantize` turned into ``weight``, `scales` and
    `biases`.

    A single operation on the CPU, which reads the weight without conversion and computes in float32
    for all dtypes. Also a single operation with CUDA, in 16 bits with scales of the same dtype, in
    every format except "nvfp4": for up to 64 rows, from sm_90 on up to 512, on sm_90a any number;
    and with Metal, for up to 16 rows in every format, where calibration allows it. Otherwise, and
    if the weight is not evaluated, ``mx.quantized_matmul``.

    On the CPU, `activations` "int8" first rounds each group of 32 numbers of `x` to integers in
    ``[-127, 127]`` with a float32 scale, and multiplies integers. A group with a NaN or an infinity
    makes the row NaN. This applies to affine weights with 4 or 8 bits in groups of 32, 64 or 128;
    others are multiplied as with "float32".

    With "float32", affine weights of 4 bits (AVX2, AVX-512 VNNI) or 8 (VNNI) also meet integers, of
    21 or 22 bits. 32 of them share a power of two, or 64 where as many weights share a scale.
    Errors are like those of float32 sums.

    Args:
        x: ``[..., k]``.
        weight: ``[n, k * bits / 32]`` uint32.
        scales: ``[n, k / group_size]``.
        biases: Like `scales`, for the mode "affine" only.
        bias: ``[n]``, added to the product.
        activations: One of `activations()`; "bfloat16" means "float32" here.
        by_rows: As in `linear`.
        for_program: True if the result becomes part of a `GpuExecutable` and is never evaluated by
            itself.

    Returns:
        ``[..., n]`` in the dtype of ``mx.quantized_matmul``.
    """
    return ext.quantized_linear(
        x, weight, scales, biases, bias, group_size=group_size, bits=bits, mode=mode,
        activations=activations, by_rows=_num_rows(by_rows), for_program=for_program,
        stream=stream,
    )  # fmt: skip


def _num_rows(by_rows: bool | int) -> int:
    return _ALL_ROWS if by_rows is True else int(by_rows)


def activations() -> list[str]:
    """Returns the activation formats of products on this CPU.

    "float32" does not round; see `quantized_linear` for "int8"; see `linear` for "bfloat16", which
    needs AVX-512 BF16.
    """
    return ext.activations()


def has_product(mode: str, bits: int, group_size: int) -> bool:
    """True if the CPU multiplies this ``mx.quantize`` format natively."""
    if mode == "affine":
        return bits in (2, 3, 4, 5, 6, 8) and group_size in (32, 64, 128)
    return (mode, bits, group_size) in (("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16))


def max_product_rows() -> int:
    """Maximum rows of a step whose products with any weights are our own GPU kernels."""
    return ext.max_product_rows()


def lookup(
    ids: mx.array,
    weight: mx.array,
    scales: mx.array | None = None,
    biases: mx.array | None = None,
    *,
    group_size: int = 0,
    bits: int = 0,
    mode: str = "affine",
    for_program: bool = False,
    stream: mx.Stream | mx.Device | None = None,
) -> mx.array:
    """Looks up rows of an embedding weight as float32. CPU only, no gradient.

    Args:
        ids: int32 or uint32 of any shape. Negative ids count from the end; an id out of range gives
            a row of NaN.
        weight: ``[n, k]`` float32, float16 or bfloat16; with `scales`, the output of `mx.quantize`.
        scales: ``[n, k / group_size]``.
        biases: Like `scales`, for the mode "affine" only.
        for_program: True if the result becomes part of a `GpuExecutable`: in the dtype of
            ``mx.dequantize``, and never evaluated by itself.

    Returns:
        ``[*ids.shape, k]`` float32.
    """
    return ext.lookup(
        ids, weight, scales, biases, group_size=group_size, bits=bits, mode=mode,
        for_program=for_program, stream=stream,
    )  # fmt: skip


def expert_linear(
    x: mx.array,
    indices: mx.array,
    weight: mx.array,
    scales: mx.array | None = None,
    biases: mx.array | None = None,
    bias: mx.array | None = None,
    global_scale: mx.array | None = None,
    *,
    group_size: int = 0,
    bits: int = 0,
    mode: str = "affine",
    for_program: bool = False,
    stream: mx.Stream | mx.Device | None = None,
) -> mx.array:
    """Multiplies each row by the transpose of its expert's matrix. CPU only, no gradient.

    Equivalent to ``mx.gather_mm`` or ``mx.gather_qmm`` plus a bias. Rows of one expert are
    multiplied together for any order of `indices`, and weights are read without conversion. The
    result of a row does not depend on other rows.

    Args:
        x: ``[..., 1, k]`` float32.
        indices: int32 or uint32 expert indices, broadcast with the leading axes of `x`. An index
            out of range gives a row of NaN.
        weight: ``[num_experts, n, k]`` float32, float16 or bfloat16; with `scales`, the output of
            `mx.quantize`.
        scales: ``[num_experts, n, k / group_size]``.
        biases: Like `scales`, for the mode "affine" only.
        bias: ``[num_experts, n]``, added to the products.
        global_scale: ``[num_experts]``, for the mode "nvfp4" only, as in `mx.quantize`.
        for_program: True if the result is only part of a graph for a `GpuExecutable` and is not
            evaluated itself. `x` may then be float16 or bfloat16, and the stream may be a GPU's.

    Returns:
        ``[..., 1, n]`` in the dtype of `x`.
    """
    return ext.expert_linear(
        x,
        indices,
        weight,
        scales,
        biases,
        bias,
        global_scale,
        group_size=group_size,
        bits=bits,
        mode=mode,
        for_program=for_program,
        stream=stream,
    )


class ExpertWeights(NamedTuple):
    """Matrices of experts from `mx.quantize`.

    Attributes:
        weight: ``[num_experts, n, k * bits / 32]`` uint32.
        scales: ``[num_experts, n, k / group_size]``.
        biases: Like `scales`, for the mode "affine" only.
        bias: ``[num_experts, n]``, added to the products; None means no bias.
    """

    weight: mx.array
    scales: mx.array
    biases: mx.array | None
    bias: mx.array | None
    group_size: int
    bits: int
    mode: str = "affine"


def sorted_expert_linear(
    x: mx.array,
    experts: mx.array,
    weights: ExpertWeights,
    *,
    stream: mx.Stream | mx.Device | None = None,
) -> mx.array | None:
    """Multiplies rows that are sorted by expert by the transposes of their experts' matrices.

    Equivalent to ``mx.gather_qmm`` plus a bias, for the many rows of a prompt. CUDA on sm_90a, no
    gradient. The result of a row does not depend on other rows.

    Args:
        x: ``[num_rows, k]`` float16 or bfloat16; so are scales that are not bytes.
        experts: ``[num_rows]`` int32 or uint32 in ascending order. The result of a row is undefined
            if its expert is out of range or not in order.

    Returns:
        ``[num_rows, n]`` in the dtype of `x`; None if no kernel serves the product.

    Raises:
        ValueError: An argument has the wrong shape or dtype.
    """
    return ext.sorted_expert_linear(x, experts, weights, stream=stream)


def expert_glu(
    x: mx.array,
    experts: mx.array,
    gate: ExpertWeights,
    up: ExpertWeights,
    down: ExpertWeights,
    *,
    stream: mx.Stream | mx.Device | None = None,
) -> mx.array | None:
    """Computes ``(silu(x @ gate.T) * (x @ up.T)) @ down.T`` for each row's experts.

    Equivalent to mlx-lm's `SwitchGLU`, for the many rows of a prompt. CUDA on sm_90a, no gradient.
    The result of a row does not depend on other rows.

    Args:
        x: ``[num_rows, k]`` float16 or bfloat16; so are scales that are not bytes.
        experts: ``[num_rows, top_k]`` int32 or uint32. The result for an expert out of range is
            undefined.

    Returns:
        ``[num_rows, top_k, n]`` in the dtype of `x`; None if no kernel serves the products.

    Raises:
        ValueError: An argument has the wrong shape or dtype.
    """
    return ext.expert_glu(x, experts, gate, up, down, stream=stream)


def lora(
    base: mx.array,
    x: mx.array,
    adapters: mx.array,
    a: mx.array,
    b: mx.array,
    *,
    stream: mx.Stream | mx.Device | None = None,
) -> mx.array:
    """Adds the low-rank adapter of each row: ``base + (x @ a[adapter].T) @ b[adapter]``.

    The sums of a row do not depend on the other rows.

    Args:
        base: ``[num_rows, ..., n]``, one vector per row: float32 on the CPU, else the dtype of `a`.
        x: ``[num_rows, ..., k]`` like `base`, one vector per row. On a GPU `k` is a multiple of 16
            bytes.
        adapters: ``[num_rows]`` int32. A row whose adapter is out of range keeps its base.
        a: ``[num_adapters, rank, k]`` float32, float16 or bfloat16. Pad adapters of a smaller rank
            with zeros.
        b: ``[num_adapters, rank, n]`` like `a`, multiplied with the adapter's scale.

    Returns:
        Like `base`.

    Raises:
        ValueError: An argument has the wrong shape or dtype.
    """
    name = kernels.DTYPE_NAMES.get(a.dtype)
    if not kernels.rejected.isdisjoint((f"lora_down_{name}", f"lora_up_{name}")):
        return plain_ops.lora(base, x, adapters, a, b)
    return ext.lora(base, x, adapters, a, b, stream=stream)


def expert_lora(
    base: mx.array,
    x: mx.array,
    adapters: mx.array,
    experts: mx.array,
    a: mx.array,
    b: mx.array,
    *,
    stream: mx.Stream | mx.Device | None = None,
) -> mx.array:
    """Adds the low-rank adapter of each row to the products of its experts.

    Pair j of a row gets ``base + (x @ a[adapter, expert].T) @ b[adapter, expert]``. Its sums do not
    depend on the other pairs.

    Args:
        base: ``[..., top_k, 1, n]``: float32 on the CPU, else the dtype of `a`.
        x: ``[..., 1 or top_k, 1, k]`` like `base`. On a GPU `k` is a multiple of 16 bytes.
        adapters: ``[num_rows]`` int32, of the leading axes of `experts`. Out of range: the row
            keeps its base.
        experts: ``[..., top_k]`` int32 or uint32. Out of range: the pair keeps its base.
        a: ``[num_adapters, num_experts, rank, k]`` float32, float16 or bfloat16.
        b: ``[num_adapters, num_experts, rank, n]`` like `a`, multiplied with the adapter's scale.

    Returns:
        Like `base`.

    Raises:
        ValueError: An argument has the wrong shape or dtype.
    """
    stream = mx.default_device() if stream is None else stream
    device = stream.device if isinstance(stream, mx.Stream) else stream
    if device.type == mx.cpu:
        return ext.expert_lora(base, x, adapters, experts, a, b, stream=stream)
    with mx.stream(stream):
        return lora_of_pairs(base, x, adapters, experts, a, b)


def lora_of_pairs(
    base: mx.array, x: mx.array, adapters: mx.array, experts: mx.array, a: mx.array, b: mx.array
) -> mx.array:
    """`expert_lora` as one `lora`, whose rows are pairs. For GPUs."""
    num_adapters, num_experts = a.shape[:2]
    rows = adapters.reshape(*experts.shape[:-1], 1)
    # As uint32, negative experts are large.
    exists = (rows >= 0) & (rows < num_adapters) & (experts.astype(mx.uint32) < num_experts)
    pairs = mx.where(exists, rows * num_experts + experts.astype(mx.int32), -1).reshape(-1)
    x = mx.broadcast_to(x, (*experts.shape, *x.shape[-2:])).reshape(-1, x.shape[-1])
    out = lora(base.reshape(-1, base.shape[-1]), x, pairs, a.flatten(0, 1), b.flatten(0, 1))
    return out.reshape(base.shape)


def add_in_product(sum: mx.array) -> bool:
    """Fuses a residual addition into the matrix product before it.

    If `sum` is an unevaluated ``x + y`` and ``y`` is a matrix product, it becomes one product that
    adds ``x`` in float32 before rounding, so it rounds once instead of twice. With CUDA the product
    takes hardly longer, and a kernel that reads and writes all rows is saved.

    Returns:
        True if `sum` was fused; otherwise it is unchanged.
    """
    fused = ext.add_in_product(sum)
    if fused is None:
        return False
    sum[...] = fused  # model code holds this very array
    return True


def select_rows(
    a: mx.array,
    rows: mx.array,
    *,
    kept: Sequence[mx.array] = (),
    known: Sequence[tuple[mx.array, mx.array]] = (),
) -> mx.array:
    """Returns ``a[rows]`` without computing rows of `a` that nothing else needs.

    `a` has one row per token of a step. The graph is rebuilt for the selected rows only, as far
    back as rows are independent: elementwise operations, norms, RoPE, linear layers and reshapes.
    At the first other operation, or at evaluated arrays, it takes the rows. Results may differ from
    ``a[rows]`` by rounding, because products have other sizes.

    Args:
        a: ``[num_rows, ...]``.
        rows: ``[num_selected]`` int32 in [0, num_rows).
        kept: Arrays that are evaluated along with the result. Their inputs are computed for all
            rows anyway, so they are not rebuilt.
        known: Pairs of an array of all rows and its selected rows.

    Raises:
        ValueError: `rows` is not such an array, or `known` has the wrong shapes or dtypes.
    """
    return ext.select_rows(a, rows, kept=list(kept), known=list(known))
