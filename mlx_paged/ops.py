"""The native primitives, typed and documented. `executables` has whole steps of them, `kernels` the
GPU kernels behind them.

A *pool* is ``[num_blocks, block_size, num_kv_heads, head_dim]``, float32, float16 or bfloat16. Keys
and values have separate pools, whose head dims may differ. A *slot* is
``block * block_size + offset``.

The dtype of a *quantized* pool is its format. Writes quantize and reads dequantize:

- int8: one code per number, one scale per token and head;
- uint32: one nibble per number, lowest first, one scale and minimum per group of 32 dims;
- uint8: e4m3 without scales; numbers beyond 448 become 448.

Its first three extents are those of a plain pool. The last one is the average size of a token and
head, which `allocate_pool` computes: a block has ``[block_size][num_kv_heads]`` codes of a head,
followed by ``[num_kv_heads][block_size]`` of its scales in float16. In the first two formats, keys
are rotated before they are quantized, and queries the same way, so outliers of single dims cost
little; `gather_kv` returns keys unrotated. Keys and values have the same format, or keys are int8
and values uint32; every op rejects other pairs.

`write_kv` and `copy_blocks` work **in place, unconditionally**: the arrays they return share the
buffers of those passed in. The exception is a pool that is not dense, or that does not start at a
multiple of 16 bytes of its buffer on a GPU: it is copied, and `pool_copies` counts it. The handle
passed in is consumed; all reads and writes of a pool go through one stream; and a freed block is
reused only after the last step that could read it has been evaluated. ``MLX_PAGED_CHECK=1`` makes
every op check block ids, slots and rows against the arrays that they index.

Each op takes an optional ``stream`` (an ``mx.Stream`` or ``mx.Device``), and raises ``ValueError``
at graph construction for an unsupported argument. An op marked CPU only raises ``RuntimeError``
when a GPU evaluates it; use MLX's own kernels there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Required, TypedDict

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_paged import kernels, plain_ops
from mlx_paged.extension import ext

_DTYPE_NAMES = {mx.float32: "float32", mx.float16: "float16", mx.bfloat16: "bfloat16"}
# As a number of rows: all of them.
_ALL_ROWS = (1 << 31) - 1


@dataclass(frozen=True)
class AttentionPlan:
    """The arrays of one step, built once by `model.plan.build_plan` and shared by all layers.

    A query row is one token; the rows of a sequence are consecutive.
    """

    positions: mx.array  # [num_rows] int32: the token's position in its sequence
    slot_mapping: mx.array  # [num_rows] int32: slot for K and V; -1: do not write
    block_tables: mx.array  # [num_seqs, max_blocks] int32
    context_lens: mx.array  # [num_seqs] int32: tokens in the pool, including this step's
    query_starts: mx.array  # [num_seqs + 1] int32: first row of each sequence
    # Columns: fields of WorkItem and MergeItem in metal/kernel_table.h.
    work_items: mx.array  # [num_items, 6] int32: sequence, rows [b, e), blocks [b, e), partial
    merge_items: mx.array  # [num_merges, 4] int32: rows [b, e), first partial, splits
    # [3, num_rows] int32: positions, then the first and last position of a span that the row sees
    # in addition to its causal window; None if no row has such a span.
    bounds: mx.array | None = None


class AttentionOptions(TypedDict, total=False):
    """A layer's options of `paged_attention`, which documents them. Code between a model and the
    operation passes them on as they are."""

    scale: Required[float]
    window: int | None
    softcap: float | None
    sinks: mx.array | None
    alibi_slopes: mx.array | None


def allocate_pool(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: mx.Dtype
) -> mx.array:
    """Allocates a pool without touching it; memory is used from the first write on.

    Args:
        block_size: 8, 16, 32 or 64.
        head_dim: A multiple of 8 up to 576.
        dtype: float32, float16 or bfloat16; int8, uint32 or uint8 for a quantized pool.

    Returns:
        ``[num_blocks, block_size, num_kv_heads, head_dim]`` with undefined contents. The last
        extent of a quantized pool differs.

    Raises:
        MemoryError: Not enough memory; the message has the number of bytes.
        ValueError: The shape has 2^31 or more slots, or elements per block.
    """
    return ext.allocate_pool([num_blocks, block_size, num_kv_heads, head_dim], dtype)


def has_cuda() -> bool:
    """True if operations run on an NVIDIA GPU now."""
    return ext.has_transfers()


def has_wgmma() -> bool:
    """True if operations run on an NVIDIA GPU with warpgroup matrix products (Hopper), and this
    build has kernels for it."""
    return ext.has_wgmma()


def max_product_rows() -> int:
    """Maximum rows of a step whose products are our own GPU kernels, for more weight formats."""
    return ext.max_product_rows()


def has_wgmma_prefill(key_dim: int, value_dim: int, block_size: int) -> bool:
    """True if `paged_attention` has a warpgroup kernel for prefill over such 16-bit pools."""
    return ext.has_wgmma_prefill(key_dim, value_dim, block_size)


def upload(*arrays: npt.NDArray[Any], stays: bool = False) -> list[mx.array]:
    """Copies host arrays to the device; the host arrays may change afterwards.

    With CUDA, sends them in one transfer from pinned memory. `mx.array` would use managed memory,
    which migrates page by page and stalls the first kernel of a step. Elsewhere returns `mx.array`
    copies.

    Args:
        arrays: int32, uint32 or float32.
        stays: With CUDA, leave the arrays in pinned memory. Use this for a step that reads them
            once, because then nothing has to be evaluated before the step.
    """
    if not ext.has_transfers():
        return [mx.array(a) for a in arrays]
    return ext.upload([np.ascontiguousarray(a) for a in arrays], stays=stays)


def plan_attention(
    tables: npt.NDArray[np.int32],
    num_blocks: npt.NDArray[np.int64],
    context_lens: npt.NDArray[np.int64],
    query_lens: npt.NDArray[np.int64],
    *,
    bounds: npt.NDArray[np.int32] | None,
    block_size: int,
    window: int | None,
    rows_per_item: int,
    split_tokens: int | None,
    on_gpu: bool,
    pads: bool,
    num_rows: int | None,
    shared_rows: int,
    stays: bool,
) -> AttentionPlan | None:
    """Builds the plan of a step for `model.plan.build_plan`, which documents the numbers.

    Args:
        tables: ``[num_seqs, max_blocks]``.
        num_blocks: ``[num_seqs]``, length of each table.
        context_lens: ``[num_seqs]``.
        query_lens: ``[num_seqs]``.
        bounds: ``[2, num_rows]``, already validated.
        on_gpu: True to split contexts for a GPU.
        pads: Pad block tables, items and merges to sizes that rarely change. Applies to decode
            steps, and to any step if `num_rows` is given.
        shared_rows: At least 1.
        stays: See `upload`.

    Returns:
        None if the numbers are invalid.
    """
    arrays = ext.plan_attention(
        tables,
        num_blocks,
        context_lens,
        query_lens,
        bounds=bounds,
        block_size=block_size,
        window=window or 0,
        rows_per_item=rows_per_item,
        split_tokens=split_tokens or 0,
        on_gpu=on_gpu,
        pads=pads,
        num_rows=num_rows or 0,
        shared_rows=shared_rows,
        stays=stays,
    )
    return None if arrays is None else AttentionPlan(*arrays)


def to_host(array: mx.array) -> mx.array:
    """Copies an array to memory that NumPy can read once it is evaluated.

    With CUDA this is pinned memory. A direct read would migrate device memory to the host page by
    page, and stall the next kernel that uses it. Elsewhere returns `array` itself.

    Args:
        array: int32.
    """
    return ext.to_host(array) if ext.has_transfers() else array


def write_kv(
    key_pool: mx.array,
    value_pool: mx.array,
    keys: mx.array,
    values: mx.array,
    slot_mapping: mx.array,
    *,
    stream: mx.Stream | mx.Device | None = None,
) -> tuple[mx.array, mx.array]:
    """Writes each token's key and value to its slot, in place.

    Args:
        keys: ``[num_tokens, num_kv_heads, key_dim]``, the pool's dtype; for quantized pools
            float32, float16 or bfloat16.
        values: ``[num_tokens, num_kv_heads, value_dim]``, the dtype of `keys`.
        slot_mapping: ``[num_tokens]`` int32. Negative slots write nothing; ``MLX_PAGED_CHECK=1``
            rejects those other than -1. No slot may occur twice.

    Returns:
        The key pool and the value pool.
    """
    if "write_kv" in kernels.rejected and key_pool.dtype in _DTYPE_NAMES:
        return plain_ops.write_kv(key_pool, value_pool, keys, values, slot_mapping)
    return ext.write_kv(key_pool, value_pool, keys, values, slot_mapping, stream=stream)


def copy_blocks(
    pools: Sequence[mx.array],
    block_pairs: mx.array,
    *,
    stream: mx.Stream | mx.Device | None = None,
) -> list[mx.array]:
    """Copies block ``src`` to block ``dst`` in every pool, in place.

    Args:
        pools: Arrays with the same ``num_blocks``.
        block_pairs: ``[num_pairs, 2]`` int32 of (src, dst), in any order. No block may be a
            destination twice, or both a source and a destination.

    Returns:
        The pools.
    """
    if "copy_blocks" in kernels.rejected:
        return plain_ops.copy_blocks(pools, block_pairs)
    return ext.copy_blocks(list(pools), block_pairs, stream=stream)


def gather_kv(
    key_pool: mx.array,
    value_pool: mx.array,
    block_tables: mx.array,
    context_lens: mx.array,
    max_context_len: int,
    *,
    dtype: mx.Dtype | None = None,
    stream: mx.Stream | mx.Device | None = None,
) -> tuple[mx.array, mx.array]:
    """Gathers dense keys and values of whole sequences.

    Args:
        block_tables: ``[num_seqs, max_blocks]`` int32.
        context_lens: ``[num_seqs]`` int32; 0 is allowed.
        dtype: Output dtype for quantized pools: float32, float16 or bfloat16. None keeps the pools'
            own dtype.

    Returns:
        ``[num_seqs, num_kv_heads, max_context_len, head_dim]`` keys and values, zero past each
        sequence's context.
    """
    if "gather_kv" in kernels.rejected and key_pool.dtype in _DTYPE_NAMES:
        return plain_ops.gather_kv(
            key_pool, value_pool, block_tables, context_lens, max_context_len
        )
    return ext.gather_kv(
        key_pool,
        value_pool,
        block_tables,
        context_lens,
        max_context_len,
        dtype=dtype,
        stream=stream,
    )


def paged_attention(
    queries: mx.array,
    key_pool: mx.array,
    value_pool: mx.array,
    plan: AttentionPlan,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: mx.array | None = None,
    alibi_slopes: mx.array | None = None,
    stream: mx.Stream | mx.Device | None = None,
) -> mx.array:
    """Attention of every query row over its own sequence's blocks, causal plus the spans of
    ``plan.bounds``.

    Args:
        queries: ``[num_rows, num_q_heads, key_dim]``, the pool's dtype; for quantized pools
            float32, float16 or bfloat16. ``num_q_heads`` is a multiple of ``num_kv_heads``.
        scale: Factor on ``q . k``, at most 2e38.
        window: A row at position p sees keys at positions in ``(p - window, p]``; None means all
            through p. Spans of the plan's bounds are visible even outside the window.
        softcap: Scores become ``softcap * tanh(score / softcap)`` (Gemma 2).
        sinks: ``[num_q_heads]`` logits that take part in the softmax but carry no value (gpt-oss).
            -inf disables a head's sink. NaN and values above 2e38 raise an error if the host
            already has the numbers, which is never so with CUDA; otherwise the head becomes NaN.
        alibi_slopes: ``[num_q_heads]`` slopes of ALiBi (Press et al. 2021; BLOOM, MPT): a row at
            position p adds ``slope * (token - p)`` to the score of each token, after the soft cap.
            They are checked like `sinks`, and must be from -1e28 to 1e28.

    Returns:
        ``[num_rows, num_q_heads, value_dim]`` in the dtype of `queries`. Rows without work in the
        plan are zero, and so are rows that see no key with a logit above -inf.
    """
    if window is not None and window < 1:
        raise ValueError(f"[paged_attention] window must be None or at least 1 but got {window}")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"[paged_attention] softcap must be None or positive but got {softcap}")
    if kernels.rejected and not _has_attention_kernels(queries, key_pool, value_pool):
        length = plan.block_tables.shape[1] * key_pool.shape[1]
        dense = gather_kv(
            *(key_pool, value_pool, plan.block_tables, plan.context_lens, length),
            dtype=None if key_pool.dtype in _DTYPE_NAMES else queries.dtype,
        )
        return plain_ops.paged_attention(
            *(queries, *dense, plan),
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
            alibi_slopes=alibi_slopes,
        )
    return ext.paged_attention(
        queries,
        key_pool,
        value_pool,
        plan.positions if plan.bounds is None else plan.bounds,
        plan.block_tables,
        plan.work_items,
        plan.merge_items,
        scale=scale,
        window=window or 0,
        softcap=softcap or 0.0,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        stream=stream,
    )


def max_shared_rows(
    queries: mx.array, key_pool: mx.array, value_pool: mx.array, *, has_alibi: bool = False
) -> int:
    """Returns how many rows of a sequence can share a pass over its context with the same bits.

    A row's sums are then those that it has as the only row. 1 where no kernel for several rows adds
    in the same order, as on Apple GPUs and on the CPU.

    Args:
        queries, key_pool, value_pool: See `paged_attention`; only shapes and dtypes count.
    """
    return ext.max_shared_rows(queries, key_pool, value_pool, has_alibi)


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


def greedy_tokens(
    logits: mx.array, *, stream: mx.Stream | mx.Device | None = None
) -> tuple[mx.array, mx.array, mx.array]:
    """Greedy sampling of tokens and their logits, in one pass.

    Args:
        logits: ``[num_rows, vocab_size]`` float32, float16 or bfloat16.

    Returns:
        ``[num_rows]`` int32 tokens: the first maximum of each row, or any token if the row has a
        NaN. ``[num_rows]`` float32, the logit of each: -inf if all are, NaN if the row has one.
        ``[num_rows]`` int32 tokens for the host: -1 if the logit is not finite.
    """
    if f"greedy_tokens_{_DTYPE_NAMES.get(logits.dtype)}" in kernels.rejected:
        return plain_ops.greedy_tokens(logits)
    return ext.greedy_tokens(logits, stream=stream)


def nucleus_thresholds(
    logits: mx.array,
    floors: mx.array,
    top_p: mx.array,
    *,
    stream: mx.Stream | mx.Device | None = None,
) -> mx.array:
    """top-p: the smallest logit of each row to keep. CPU only.

    A logit is kept if the logits above it have less than `top_p` of the row's probability.
    Probabilities are summed in float64. Equal logits are all kept or all dropped.

    Args:
        logits: ``[num_rows, vocab_size]`` float32; the maximum of each row must be 0.
        floors: ``[num_rows]`` float32, at most 0; logits below the floor are ignored.
        top_p: ``[num_rows]`` float32 in (0, 1).

    Returns:
        ``[num_rows]`` float32; the floor if a row has a NaN.
    """
    return ext.nucleus_thresholds(logits, floors, top_p, stream=stream)


def apply_token_bitmask(
    logits: mx.array,
    bitmask: mx.array,
    rows: mx.array,
    *,
    stream: mx.Stream | mx.Device | None = None,
) -> mx.array:
    """Sets the logits of forbidden tokens to -inf, except NaN and inf.

    NaN and inf stay, so that a mask does not hide a broken row. All other logits, and rows without
    a mask, do not change. Works in place if nothing else needs `logits`; otherwise copies in one
    pass. No gradient.

    Args:
        logits: ``[num_rows, vocab_size]`` float32, float16 or bfloat16.
        bitmask: ``[num_masks, ceil(vocab_size / 32)]`` int32 or uint32, 32 tokens each, lowest bit
            first. A bit of 1 allows the token. Bits past the vocabulary are ignored.
        rows: ``[num_masks]`` int32: the row of `logits` for each mask. The caller must make sure
            that they are distinct and in ``[0, num_rows)``; ``MLX_PAGED_CHECK=1`` raises
            ``IndexError`` if they are not.

    Returns:
        ``[num_rows, vocab_size]`` in the dtype of `logits`; `logits` itself if there are no masks.
    """
    if f"apply_token_bitmask_{8 * logits.dtype.size}" in kernels.rejected:
        return plain_ops.apply_token_bitmask(logits, bitmask, rows)
    return ext.apply_token_bitmask(logits, bitmask, rows, stream=stream)


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
    for all dtypes. Also a single operation with CUDA, for up to 64 rows in 16 bits with scales of
    the same dtype, in every format except "nvfp4"; and with Metal, for up to 16 rows in every
    format, where calibration allows it. Otherwise, and if the weight is not evaluated,
    ``mx.quantized_matmul``.

    On the CPU, `activations` "int8" first rounds each group of 32 numbers of `x` to integers in
    ``[-127, 127]`` with a float32 scale, and multiplies integers. A group with a NaN or an infinity
    makes the row NaN. This applies to affine weights with 4 or 8 bits in groups of 32, 64 or 128;
    others are multiplied as with "float32".

    With "float32", processors with AVX-512 VNNI also use integers for 4-bit affine weights: 22-bit
    integers times a power of two, with errors like those of float32 sums.

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
    name = _DTYPE_NAMES.get(a.dtype)
    if not kernels.rejected.isdisjoint((f"lora_down_{name}", f"lora_up_{name}")):
        return plain_ops.lora(base, x, adapters, a, b)
    return ext.lora(base, x, adapters, a, b, stream=stream)


def has_product(mode: str, bits: int, group_size: int) -> bool:
    """True if the CPU multiplies this ``mx.quantize`` format natively."""
    if mode == "affine":
        return bits in (2, 3, 4, 5, 6, 8) and group_size in (32, 64, 128)
    return (mode, bits, group_size) in (("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16))


def pool_copies() -> int:
    """Number of whole-pool copies since the process started; 0 if pools are used correctly."""
    return ext.pool_copies()


def _has_attention_kernels(queries: mx.array, key_pool: mx.array, value_pool: mx.array) -> bool:
    """False if calibration left no kernel for decodes, drafts or prompts of such a layer."""
    group, key_dim = queries.shape[1] // key_pool.shape[2], queries.shape[2]
    is_plain = value_pool.dtype in _DTYPE_NAMES
    value_dim = value_pool.shape[3] if is_plain else key_dim
    rows = (1, 4, 16)
    return all(ext.attention_kernel(queries.dtype, group, key_dim, value_dim, n) for n in rows)
