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

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Required, TypedDict

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_paged import kernels, plain_ops
from mlx_paged.extension import ext
from mlx_paged.layer_ops import (
    ExpertWeights,
    activations,
    add_in_product,
    clipped_swiglu,
    expert_glu,
    expert_linear,
    expert_lora,
    gelu,
    has_product,
    layer_norm,
    linear,
    lookup,
    lora,
    max_product_rows,
    quantized_linear,
    rms_norm,
    rope,
    rope_rotations,
    select_rows,
    serves_rope,
    serves_silu_mul,
    silu_mul,
    sorted_expert_linear,
)

__all__ = [
    # Pools and attention, transfers, sampling.
    "AttentionPlan",
    "AttentionOptions",
    "allocate_pool",
    "has_cuda",
    "has_wgmma",
    "has_wgmma_prefill",
    "upload",
    "plan_attention",
    "to_host",
    "write_kv",
    "copy_blocks",
    "gather_kv",
    "paged_attention",
    "max_shared_rows",
    "greedy_tokens",
    "draw_tokens",
    "sampling_thresholds",
    "apply_token_bitmask",
    "edit_logits",
    "take_rows",
    "pool_copies",
    # Parts of layers without a pool.
    "rope_rotations",
    "rope",
    "serves_rope",
    "rms_norm",
    "layer_norm",
    "gelu",
    "silu_mul",
    "serves_silu_mul",
    "clipped_swiglu",
    "linear",
    "quantized_linear",
    "activations",
    "has_product",
    "max_product_rows",
    "lookup",
    "expert_linear",
    "expert_lora",
    "ExpertWeights",
    "sorted_expert_linear",
    "expert_glu",
    "lora",
    "add_in_product",
    "select_rows",
]


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
    if "write_kv" in kernels.rejected and key_pool.dtype in kernels.DTYPE_NAMES:
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
    if "gather_kv" in kernels.rejected and key_pool.dtype in kernels.DTYPE_NAMES:
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
    activations: str = "float32",
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
        activations: Rounding on the CPU, see `activations`. With "int8", processors with AMX round
            float32 queries, keys, values and probabilities to bfloat16, unless there is a soft cap
            or ALiBi. Sums stay float32.

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
            dtype=None if key_pool.dtype in kernels.DTYPE_NAMES else queries.dtype,
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
        activations=activations,
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
    if f"greedy_tokens_{kernels.DTYPE_NAMES.get(logits.dtype)}" in kernels.rejected:
        return plain_ops.greedy_tokens(logits)
    return ext.greedy_tokens(logits, stream=stream)


def draw_tokens(
    logits: mx.array,
    tokens: mx.array,
    largest: mx.array,
    temperature: mx.array,
    keys: mx.array,
    thresholds: mx.array,
    *,
    stream: mx.Stream | mx.Device | None = None,
) -> mx.array:
    """Draws tokens from the softmax of scaled logits, in one pass over the rows that are drawn.

    A scaled logit is ``(logit - largest) / temperature`` in float32. The random numbers of a row
    are those of ``mx.random.categorical(scaled, key=key)``, so its token is the same, except for
    the rounding of a GPU's logarithm. It depends on nothing but the row.

    Args:
        logits: ``[num_rows, vocab_size]`` float32, float16 or bfloat16.
        tokens: ``[num_rows]`` int32, those of `greedy_tokens`.
        largest: ``[num_rows]`` float32, likewise.
        temperature: ``[num_rows]`` float32. A row of temperature 0 is not drawn.
        keys: ``[num_rows, 2]`` uint32.
        thresholds: ``[num_rows]`` float32: the smallest scaled logit to draw; -inf draws all.

    Returns:
        ``[num_rows]`` int32: the row's `tokens` if it is not drawn, if its largest logit is not
        finite, or if the noise of every token is -inf.
    """
    names = (f"draw_tokens_{kernels.DTYPE_NAMES.get(logits.dtype)}", "merge_draws")
    if any(name in kernels.rejected for name in names):
        return plain_ops.draw_tokens(logits, tokens, largest, temperature, keys, thresholds)
    return ext.draw_tokens(logits, tokens, largest, temperature, keys, thresholds, stream=stream)


def sampling_thresholds(
    logits: mx.array,
    largest: mx.array,
    temperature: mx.array,
    floors: mx.array,
    top_k: mx.array,
    top_p: mx.array,
    *,
    stream: mx.Stream | mx.Device | None = None,
) -> mx.array:
    """min-p, then top-k, then top-p: the smallest scaled logit of each row to keep.

    A scaled logit is ``(logit - largest) / temperature`` in float32. top-k keeps the `top_k`
    largest of those at the floor or above, and logits equal to the last of them. Of these, top-p
    keeps a logit if those above it have less than `top_p` of their probability. Equal logits are
    all kept or all dropped. Probabilities are summed in float64 on a CPU, and as 64-bit integers in
    units of 2^-40 on a GPU, so a row's result depends on nothing but the row.

    Args:
        logits: ``[num_rows, vocab_size]`` float32, float16 or bfloat16.
        largest: ``[num_rows]`` float32, the maximum of each row.
        temperature: ``[num_rows]`` float32, at least 1e-30 in rows with a filter.
        floors: ``[num_rows]`` float32, at most 0: the logarithm of min_p; -inf keeps all.
        top_k: ``[num_rows]`` int32; all if it is not in ``(0, vocab_size)``.
        top_p: ``[num_rows]`` float32, above 0; all if it is at least 1.

    Returns:
        ``[num_rows]`` float32; the floor if `largest` is not finite.
    """
    if f"sampling_thresholds_{kernels.DTYPE_NAMES.get(logits.dtype)}" in kernels.rejected:
        return plain_ops.sampling_thresholds(logits, largest, temperature, floors, top_k, top_p)
    return ext.sampling_thresholds(
        logits, largest, temperature, floors, top_k, top_p, stream=stream
    )


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


def edit_logits(
    logits: mx.array,
    rows: mx.array,
    factors: mx.array,
    entries: mx.array,
    values: mx.array,
    newest: mx.array,
    *,
    stream: mx.Stream | mx.Device | None = None,
) -> mx.array:
    """Adds values to single logits, then penalizes tokens that a row has had.

    A penalized logit is divided by the repetition penalty if it is above 0, and multiplied by it
    otherwise. Then the frequency penalty times the token's count is subtracted, and the presence
    penalty if the count is above 0; each operation rounds to float32. Works in place if nothing
    else needs `logits`; otherwise copies them. No gradient.

    Args:
        logits: ``[num_rows, vocab_size]`` float32.
        rows: ``[num_edited, 5]`` int32: a distinct row of `logits`; the place in `newest` of its
            newest token, or -1 if `entries` count that already; and begin, middle and end of its
            entries: additions in ``[begin, middle)``, penalized tokens in ``[middle, end)``. A
            newest token is penalized like the others, and counts once more.
        factors: ``[num_edited, 3]`` float32: repetition, presence and frequency penalty of each
            row; 1, 0 and 0 change nothing.
        entries: ``[num_entries, 2]`` int32, at least one. Additions: the token, and the newest
            token after which it applies, or -1 for any; only additions of -inf may repeat a row's
            token. Penalized tokens: the distinct token, and its count.
        values: ``[num_entries]`` float32: the values to add.
        newest: ``[num_newest]`` int32, at least one.

    Returns:
        ``[num_rows, vocab_size]`` float32. The caller makes sure that all numbers are in range;
        ``MLX_PAGED_CHECK=1`` raises ``IndexError`` if they are not.
    """
    if not kernels.rejected.isdisjoint(("edit_logits", "copy_strided_32")):
        return plain_ops.edit_logits(logits, rows, factors, entries, values, newest)
    return ext.edit_logits(logits, rows, factors, entries, values, newest, stream=stream)


def take_rows(
    a: mx.array, ids: mx.array, *, stream: mx.Stream | mx.Device | None = None
) -> mx.array:
    """Returns ``a[ids]``, or elements of each row. No gradient.

    With CUDA, MLX compiles its own gathers when they first run, for seconds each.

    Args:
        a: ``[num_rows, ...]`` of 16 or 32 bits.
        ids: int32 or uint32 in ``[0, num_rows)``: ``[num_ids]``. Or ``[num_rows, num_ids]`` in
            ``[0, width)`` if `a` is ``[num_rows, width]``. The caller makes sure of the ranges;
            ``MLX_PAGED_CHECK=1`` raises ``IndexError`` for others.

    Returns:
        ``[num_ids, ...]``, or ``[num_rows, num_ids]``.
    """
    if f"take_rows_{8 * a.dtype.size}" in kernels.rejected:
        return a[ids] if ids.ndim == 1 else mx.take_along_axis(a, ids, axis=1)
    if ids.ndim == 1:
        width = math.prod(a.shape[1:])
        taken = ext.take_rows(a.reshape(1, a.shape[0], width), ids[None], stream=stream)
        return taken.reshape(len(ids), *a.shape[1:])
    return ext.take_rows(a[..., None], ids, stream=stream).squeeze(-1)


def pool_copies() -> int:
    """Returns the number of whole-pool copies since the process started; 0 if pools are used
    correctly."""
    return ext.pool_copies()


def _has_attention_kernels(queries: mx.array, key_pool: mx.array, value_pool: mx.array) -> bool:
    """False if calibration left no kernel for decodes, drafts or prompts of such a layer."""
    group, key_dim = queries.shape[1] // key_pool.shape[2], queries.shape[2]
    is_plain = value_pool.dtype in kernels.DTYPE_NAMES
    value_dim = value_pool.shape[3] if is_plain else key_dim
    rows = (1, 4, 16)
    return all(ext.attention_kernel(queries.dtype, group, key_dim, value_dim, n) for n in rows)
