"""The native primitives, typed and documented.

A *pool* is ``[num_blocks, block_size, num_kv_heads, head_dim]``, float32, float16 or bfloat16;
keys and values have one each, and their head dims may differ. A *slot* is
``block * block_size + offset``.

A *quantised* pool has another dtype, which tells its format; writing quantises, and reading undoes
it:

- int8: a code for a number, and for each token and head a scale;
- uint32: a nibble for a number, lowest first, and for each group of 32 dims a scale and a minimum;
- uint8: e4m3, without scales; numbers beyond 448 become 448.

Its first three extents are those of a plain pool, and the last one is what a token and head takes
on average (`allocate_pool` knows it): a block is ``[block_size][num_kv_heads]`` codes of a head,
and behind them ``[num_kv_heads][block_size]`` of its scales in float16. Keys of the first two
formats are rotated before they are quantised, and queries alike, so that outliers of single dims
cost little: `gather_kv` gives them back as they were. Keys and values have the same format, or keys
are int8 and values uint32; every op refuses other pairs.

`write_kv` and `copy_blocks` work **in place, unconditionally**: the arrays they return share the
buffers of those passed in. (A pool that is not dense, or that on a GPU does not begin at a multiple
of 16 bytes of its buffer, is copied; `pool_copies` counts that.) The handle passed in is consumed;
all reads and writes of a pool go through one stream; and a freed block is handed out again only
after the last step that could read it has been evaluated. ``MLX_PAGED_CHECK=1`` makes every op
compare block ids, slots and rows with the arrays that they index before it uses them.

Each op takes an optional ``stream`` (an ``mx.Stream`` or ``mx.Device``) and raises ``ValueError``,
when the graph is built, for an argument that it cannot serve. An op that is said to be CPU only
raises ``RuntimeError`` when a GPU evaluates it: use MLX's own kernels there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_paged.extension import ext

OnKernel = Callable[[int, int], None]  # how many kernels are done, of how many


@dataclass(frozen=True)
class AttentionPlan:
    """The arrays of one step, built once (`model.plan.build_plan`) and shared by all layers.

    A query row is one token; the rows of a sequence are consecutive.
    """

    positions: mx.array  # [num_rows] int32: the token's position in its sequence
    slot_mapping: mx.array  # [num_rows] int32: where its K and V go; -1: nowhere
    block_tables: mx.array  # [num_seqs, max_blocks] int32
    context_lens: mx.array  # [num_seqs] int32: tokens in the pool, this step's included
    query_starts: mx.array  # [num_seqs + 1] int32: first row of each sequence
    # The columns are the fields of WorkItem and MergeItem in metal/kernel_table.h.
    work_items: mx.array  # [num_items, 6] int32: sequence, rows [b, e), blocks [b, e), partial
    merge_items: mx.array  # [num_merges, 4] int32: rows [b, e), first partial, splits
    # [3, num_rows] int32: positions, and the first and the last position of the span that a row
    # sees as a whole, besides what its position and the window let it see; None: no row has one.
    bounds: mx.array | None = None


def allocate_pool(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: mx.Dtype
) -> mx.array:
    """A pool that is allocated but not touched: memory is used from the first write on.

    Args:
        block_size: 8, 16, 32 or 64.
        head_dim: a multiple of 8 up to 576.
        dtype: float32, float16 or bfloat16; int8, uint32 or uint8 for a quantised pool.

    Returns:
        ``[num_blocks, block_size, num_kv_heads, head_dim]`` of undefined contents; the last extent
        of a quantised pool is another.

    Raises:
        MemoryError: there is not enough memory; the message names the bytes.
        ValueError: for a shape of 2^31 slots or more, or of as many elements in a block.
    """
    return ext.allocate_pool([num_blocks, block_size, num_kv_heads, head_dim], dtype)


def has_cuda() -> bool:
    """True if operations run on an NVIDIA GPU now."""
    return ext.has_transfers()


def has_wgmma() -> bool:
    """True if operations run on an NVIDIA GPU on which four warps multiply together (Hopper), for
    which this build has kernels."""
    return ext.has_wgmma()


def upload(*arrays: npt.NDArray[Any], stays: bool = False) -> list[mx.array]:
    """Arrays of numbers on the host, which may change afterwards.

    With CUDA they are sent as one, from pinned memory: what `mx.array` makes lies in memory that
    migrates by page, where the first kernel of a step waits for it. Elsewhere they are `mx.array`s.

    Args:
        arrays: int32, uint32 or float32.
        stays: with CUDA, in that pinned memory: for a step that reads them once, as nothing then
            has to be evaluated before it.
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
    stays: bool,
) -> AttentionPlan | None:
    """The plan of a step, for `model.plan.build_plan`, which says what the numbers are.

    Args:
        tables: ``[num_seqs, max_blocks]``.
        num_blocks: ``[num_seqs]``, of each table.
        context_lens: ``[num_seqs]``.
        query_lens: ``[num_seqs]``.
        bounds: ``[2, num_rows]``, checked.
        on_gpu: whether contexts are split as a GPU needs it.
        pads: block tables, items and merges to sizes that change seldom, in steps of decodes and
            where `num_rows` is given.
        stays: see `upload`.

    Returns:
        None for numbers that are no plan.
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
        stays=stays,
    )
    return None if arrays is None else AttentionPlan(*arrays)


def token_bytes(ids: list[Any], vocab_size: int) -> bytes | None:
    """Token ids as 4 bytes each, in the machine's order.

    Returns:
        None where some are no plain integers in [0, vocab_size).
    """
    return ext.token_bytes(ids, vocab_size)


def to_host(array: mx.array) -> mx.array:
    """The same numbers where NumPy can read them once they are evaluated.

    With CUDA in pinned memory: reading device memory moves it to memory that migrates by page, and
    the kernel that uses it next waits for it. Elsewhere `array` itself.

    Args:
        array: int32.
    """
    return ext.to_host(array) if ext.has_transfers() else array


def wait_actively(array: mx.array, seconds: float) -> bool:
    """Waits for an array whose evaluation has begun, without sleeping and without the interpreter's
    lock; returns early where another thread or process had its turn on this thread's core.

    Args:
        seconds: at most; 0 to 1e6.

    Returns:
        Whether no other had. (One that takes less than half a millisecond does not count.)
    """
    return ext.wait_actively(array, seconds)


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
        keys: ``[num_tokens, num_kv_heads, key_dim]``, the pool's dtype; for quantised pools
            float32, float16 or bfloat16.
        values: ``[num_tokens, num_kv_heads, value_dim]``, the dtype of `keys`.
        slot_mapping: ``[num_tokens]`` int32; -1 writes nothing, nor does any other negative number
            (which ``MLX_PAGED_CHECK=1`` refuses). No slot may occur twice.

    Returns:
        The key pool and the value pool.
    """
    return ext.write_kv(key_pool, value_pool, keys, values, slot_mapping, stream=stream)


def copy_blocks(
    pools: Sequence[mx.array],
    block_pairs: mx.array,
    *,
    stream: mx.Stream | mx.Device | None = None,
) -> list[mx.array]:
    """Copies block ``src`` to block ``dst`` in every pool, in place.

    Args:
        pools: arrays of the same ``num_blocks``.
        block_pairs: ``[num_pairs, 2]`` int32 of (src, dst), run in no particular order: no block
            is a destination twice, or both a destination and a source.

    Returns:
        The pools.
    """
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
    """Dense keys and values of whole sequences.

    Args:
        block_tables: ``[num_seqs, max_blocks]`` int32.
        context_lens: ``[num_seqs]`` int32; 0 is allowed.
        dtype: float32, float16 or bfloat16, what quantised pools give; None: the pools' own.

    Returns:
        ``[num_seqs, num_kv_heads, max_context_len, head_dim]`` keys and values, zero past each
        sequence's context.
    """
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
    stream: mx.Stream | mx.Device | None = None,
) -> mx.array:
    """Attention of every query row over its own sequence's blocks: causal, and within the spans
    of ``plan.bounds``.

    Args:
        queries: ``[num_rows, num_q_heads, key_dim]``, the pool's dtype, or for quantised pools
            float32, float16 or bfloat16; ``num_q_heads`` is a multiple of ``num_kv_heads``.
        scale: factor on ``q . k``, at most 2e38.
        window: a row at position p sees keys at positions in ``(p - window, p]``; None: all up to
            p. What the plan's bounds add it sees beyond the window too.
        softcap: scores become ``softcap * tanh(score / softcap)`` (Gemma 2).
        sinks: ``[num_q_heads]`` logits that take part in the softmax but carry no value (gpt-oss).
            -inf is no sink. More than 2e38, or NaN, is refused where the host has the numbers
            already (not with CUDA), and makes the head NaN where it has not.

    Returns:
        ``[num_rows, num_q_heads, value_dim]`` in the dtype of `queries`. Rows that the plan gives
        no work are zero, and so are rows that see no key, or none with a logit above -inf.
    """
    if window is not None and window < 1:
        raise ValueError(f"[paged_attention] window must be None or at least 1 but got {window}")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"[paged_attention] softcap must be None or positive but got {softcap}")
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
        stream=stream,
    )


def rope_rotations(
    positions: mx.array,
    inv_freqs: mx.array,
    *,
    scale: float = 1.0,
    stream: mx.Stream | mx.Device | None = None,
) -> mx.array:
    """Cosines and sines for `rope`, once for all layers of a step. CPU only.

    Args:
        positions: ``[num_rows]`` int32.
        inv_freqs: ``[dims / 2]`` float32: radians that a pair turns from one position to the next.
        scale: factor on the positions.

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
    """Rotary position embedding of each row's heads; computed in float32. No gradient. On the CPU,
    and with CUDA where `serves_rope` says so.

    Args:
        x: ``[num_rows, num_heads, 1, head_dim]`` float32, float16 or bfloat16, of any strides.
        rotations: ``[num_rows, 2, dims / 2]`` float32 from `rope_rotations`. Dims from ``dims`` on
            are copied.
        traditional: pair dim 2i with 2i + 1, and not i with i + dims / 2.
    """
    return ext.rope(x, rotations, traditional=traditional, stream=stream)


def serves_rope(x: mx.array, rotations: mx.array, *, traditional: bool = False) -> bool:
    """True if this build runs `rope` of such arrays on a GPU: with CUDA, in 16 bits, of whole heads
    whose halves are multiples of 16 bytes, not traditional.
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
    """Makes a residual's sum part of the product before it.

    If `sum` is ``x + y`` of which nothing has been evaluated, and ``y`` a matrix product, it
    becomes the result of one product that adds ``x`` in float32, before it rounds: one rounding
    instead of two. With CUDA that product takes hardly longer, and no other kernel reads and writes
    all rows.

    Returns:
        Whether it was such a sum. All others stay as they are.
    """
    return ext.add_in_product(sum)


def select_rows(
    a: mx.array,
    rows: mx.array,
    *,
    kept: Sequence[mx.array] = (),
    known: Sequence[tuple[mx.array, mx.array]] = (),
) -> mx.array:
    """``a[rows]``, without computing what of `a` nobody else needs.

    `a` has one row for each token of a step. The operations that lead to it are made again of the
    selected rows alone, as far back as each row depends on itself alone: elementwise ones, norms,
    RoPE, linear layers and changes of shape. Where they end, or the graph has been evaluated
    already, rows are taken. Results may differ from ``a[rows]`` by rounding, as products of other
    sizes do.

    Args:
        a: ``[num_rows, ...]``.
        rows: ``[num_selected]`` int32, each at least 0 and below `num_rows`.
        kept: arrays that are evaluated with the result: what they need is computed of all rows
            anyway, and not made again.
        known: pairs of an array of all rows and what the selected ones of it are.

    Raises:
        ValueError: for rows that are no such array, and for known arrays of other shapes or dtypes.
    """
    return ext.select_rows(a, rows, kept=list(kept), known=list(known))


def silu_mul(
    gate: mx.array, x: mx.array, *, stream: mx.Stream | mx.Device | None = None
) -> mx.array:
    """``gate * sigmoid(gate) * x``, of one shape and dtype. No gradient. On the CPU, and with CUDA
    where `serves_silu_mul` says so.
    """
    return ext.silu_mul(gate, x, stream=stream)


def serves_silu_mul(gate: mx.array) -> bool:
    """True if this build runs `silu_mul` of such arrays on a GPU: with CUDA, in 16 bits, with rows
    of a multiple of 16 bytes.
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
        bias: likewise; None: zeros.
    """
    return ext.layer_norm(x, weight, bias, eps, stream=stream)


def gelu(
    x: mx.array,
    approximation: str = "none",
    *,
    stream: mx.Stream | mx.Device | None = None,
) -> mx.array:
    """GELU in float32, by element. CPU only, no gradient.

    Args:
        x: float32, float16 or bfloat16.
        approximation: "none", "tanh" (mlx's "precise") or "fast" (by a sigmoid).
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
    ``g = min(gate, limit)``, of one shape and dtype. CPU only, no gradient."""
    return ext.clipped_swiglu(gate, x, alpha=alpha, limit=limit, stream=stream)


def greedy_tokens(
    logits: mx.array, *, stream: mx.Stream | mx.Device | None = None
) -> tuple[mx.array, mx.array, mx.array]:
    """Greedy sampling and the logits that it finds, in one pass.

    Args:
        logits: ``[num_rows, vocab_size]`` float32, float16 or bfloat16.

    Returns:
        ``[num_rows]`` int32, the first of each row's largest, and ``[num_rows]`` float32, its
        logit: -inf where all are, NaN where the row holds one (its token is then any). Then
        ``[num_rows]`` int32, the tokens for the host: -1 where that logit is not finite.
    """
    return ext.greedy_tokens(logits, stream=stream)


def nucleus_thresholds(
    logits: mx.array,
    floors: mx.array,
    top_p: mx.array,
    *,
    stream: mx.Stream | mx.Device | None = None,
) -> mx.array:
    """top-p: the least logit of each row that is to be kept. CPU only.

    A logit is kept if those above it have less than `top_p` of the row's probability. Probabilities
    are added up in float64; equal logits have the same answer.

    Args:
        logits: ``[num_rows, vocab_size]`` float32, the largest of each row 0.
        floors: ``[num_rows]`` float32, at most 0: logits below have no part in it.
        top_p: ``[num_rows]`` float32, above 0 and below 1.

    Returns:
        ``[num_rows]`` float32; the floor where a row is NaN.
    """
    return ext.nucleus_thresholds(logits, floors, top_p, stream=stream)


def apply_token_bitmask(
    logits: mx.array,
    bitmask: mx.array,
    rows: mx.array,
    *,
    stream: mx.Stream | mx.Device | None = None,
) -> mx.array:
    """Sets the logits of tokens that must not come to -inf, unless they are NaN or inf.

    (A row with one of these means nothing, which a mask must not hide.) The numbers of the others
    do not change, nor do rows without a mask. Where nothing else needs `logits`, their buffer is
    changed in place; else this is one pass that copies. No gradient.

    Args:
        logits: ``[num_rows, vocab_size]`` float32, float16 or bfloat16.
        bitmask: ``[num_masks, ceil(vocab_size / 32)]`` int32 or uint32: 32 tokens to each, lowest
            bit first. A token may come where its bit is 1. Bits past the vocabulary mean nothing.
        rows: ``[num_masks]`` int32: the row of `logits` that each mask is for. Whoever makes them
            sees to it that they are distinct and in ``[0, num_rows)``; ``MLX_PAGED_CHECK=1``
            raises ``IndexError`` where they are not.

    Returns:
        ``[num_rows, vocab_size]`` in the dtype of `logits`; `logits` itself for no masks.
    """
    return ext.apply_token_bitmask(logits, bitmask, rows, stream=stream)


def linear(
    x: mx.array,
    weight: mx.array,
    bias: mx.array | None = None,
    *,
    activations: str = "float32",
    by_rows: bool = False,
    stream: mx.Stream | mx.Device | None = None,
) -> mx.array:
    """``x @ weight.T + bias``.

    One operation on the CPU for float32 `x` and a `weight` of any pool's dtype, which is read as it
    is; and with CUDA for up to 64 rows of 16 bits; else MLX's composition.

    Args:
        x: ``[..., k]``.
        weight: ``[n, k]``.
        bias: ``[n]``.
        activations: one of `activations()`. "bfloat16" rounds `x` to it where the weight is of that
            type and has so many rows (more than 64) that its products are worth it, on the CPU.
        by_rows: on the CPU, the one operation adds up a row in the same order whatever the number
            of rows is, where a BLAS would multiply many rows faster. (With `activations`
            "bfloat16" it does not.)

    Returns:
        ``[..., n]``.
    """
    return ext.linear(x, weight, bias, activations=activations, by_rows=by_rows, stream=stream)


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
    by_rows: bool = False,
    stream: mx.Stream | mx.Device | None = None,
) -> mx.array:
    """``x`` times the transpose of what `mx.quantize` made ``weight``, `scales` and `biases` of.

    One operation on the CPU, which reads the weight as it is and multiplies and sums in float32
    whatever the dtypes are; and with CUDA for up to 64 rows of 16 bits, with scales of the same
    dtype, in every format but "nvfp4".
    Else, and for a weight that is not evaluated, ``mx.quantized_matmul``.
    On the CPU, with `activations` "int8", that one operation rounds `x` first, each group of 32 to
    ``[-127, 127]`` times a float32 scale, and multiplies integers; a group that has a NaN or an
    infinity makes the row NaN. This holds for affine weights of 4 or 8 bits in groups of 32, 64 or
    128; others are multiplied as with "float32". Processors with AVX-512 VNNI multiply affine
    weights of 4 bits so with "float32" too: by integers of 22 bits times a power of two, whose
    errors are like those of sums in float32.

    Args:
        x: ``[..., k]``.
        weight: ``[n, k * bits / 32]`` uint32.
        scales: ``[n, k / group_size]``.
        biases: like `scales`, for the mode "affine" only.
        bias: ``[n]``: added to the product.
        activations: one of `activations()`; "bfloat16" is as "float32" here.
        by_rows: as in `linear`.

    Returns:
        ``[..., n]``, of the dtype that ``mx.quantized_matmul`` gives.
    """
    return ext.quantized_linear(
        x, weight, scales, biases, bias, group_size=group_size, bits=bits, mode=mode,
        activations=activations, by_rows=by_rows, stream=stream,
    )  # fmt: skip


def activations() -> list[str]:
    """Returns the activation formats of products on this CPU: "float32" is not rounded; "int8", see
    `quantized_linear`; and where the processor has AVX-512 BF16 "bfloat16", see `linear`.
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
    stream: mx.Stream | mx.Device | None = None,
) -> mx.array:
    """Rows of an embedding's weight as float32, on the CPU, as one operation without a gradient.

    Args:
        ids: int32 or uint32, of any shape; negative ones count from the end, and of one that
            `weight` has not, the row is NaN.
        weight: ``[n, k]`` of any pool's dtype; or with `scales` what `mx.quantize` made.
        scales: ``[n, k / group_size]``.
        biases: like `scales`, for the mode "affine" only.

    Returns:
        ``[*ids.shape, k]`` float32.
    """
    return ext.lookup(
        ids, weight, scales, biases, group_size=group_size, bits=bits, mode=mode, stream=stream
    )


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
    """Each row times the transpose of its expert's matrix, on the CPU, as one operation without a
    gradient: ``mx.gather_mm`` or ``mx.gather_qmm`` with `indices` of matrices, and a bias.

    Rows of one expert are multiplied together, in any order of `indices`, and weights are read as
    they are. A row's numbers do not depend on the others.

    Args:
        x: ``[..., 1, k]`` float32.
        indices: int32 or uint32, broadcast with the leading axes of `x`. A row whose expert is not
            one of `weight` is NaN.
        weight: ``[num_experts, n, k]`` of any pool's dtype; or with `scales` what `mx.quantize`
            made.
        scales: ``[num_experts, n, k / group_size]``.
        biases: like `scales`, for the mode "affine" only.
        bias: ``[num_experts, n]``: added to the products.
        global_scale: ``[num_experts]``, of the mode "nvfp4" only, as `mx.quantize` takes it.
        for_program: the result is part of a graph that becomes a `DeviceProgram`, and is not
            evaluated itself. `x` may have any pool's dtype then, and the stream may be a GPU's.

    Returns:
        ``[..., 1, n]`` of the dtype of `x`.
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


def has_product(mode: str, bits: int, group_size: int) -> bool:
    """True if the CPU multiplies a format of ``mx.quantize`` natively."""
    if mode == "affine":
        return bits in (2, 3, 4, 5, 6, 8) and group_size in (32, 64, 128)
    return (mode, bits, group_size) in (("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16))


def most_program_rows() -> int:
    """Rows of a step up to which a `StepProgram` serves on this machine; 0: it serves none.

    None with ``MLX_PAGED_CHECK=1`` either, as a program does not check ids.
    """
    return ext.most_program_rows()


def placeholders(arrays: Sequence[mx.array]) -> list[mx.array]:
    """Arrays of the same shapes and dtypes to build a graph on. Evaluating one is an error."""
    return ext.placeholders(list(arrays))


class StepProgram:
    """A graph of few rows that runs as one operation on the CPU: its operations one after another
    on all threads, with products that share an input side by side.

    Its own are the operations of this module, linear layers and experts whose weights are of any
    format (`linear`, `quantized_linear`, `expert_linear`), arithmetic and some functions by
    element, softmax, sums, partitions and lookups along a row, lookups of rows (`lookup`), and
    changes of shape, on values in float32 whose first axis is the step's rows. Any other operation
    of MLX gets whole arrays between them, and costs what it costs in a graph.

    Args:
        inputs: `placeholders`. Those that only attention reads as a plan's block tables, work and
            merges, and those that nothing reads, may have other sizes in a call.
        outputs: what was built on them: the result, and pools among the inputs, which are written
            in place.

    Raises:
        ValueError: for a graph that is none; it says why. What does not depend on the inputs is
            evaluated, once.
    """

    def __init__(self, inputs: Sequence[mx.array], outputs: Sequence[mx.array]) -> None:
        self._program = ext.StepProgram(list(inputs), list(outputs))

    @property
    def num_nodes(self) -> int:
        """Operations that are MLX's own."""
        return self._program.num_nodes

    def __call__(
        self, inputs: Sequence[mx.array], *, stream: mx.Stream | mx.Device | None = None
    ) -> list[mx.array]:
        """The outputs for these inputs. The pools among them are consumed, as by `write_kv`.

        Raises:
            ValueError: they are not of the shapes and dtypes that were read.
        """
        return self._program(list(inputs), stream=stream)


def most_device_program_rows() -> int:
    """Rows of a step up to which a `DeviceProgram` serves on this machine; 0: it serves none.

    None with ``MLX_PAGED_CHECK=1`` either, as a program does not check ids.
    """
    return ext.most_device_program_rows()


class DeviceProgram:
    """A decode step as one operation of a GPU: its kernels one after another in memory
    that stays, with CUDA captured as a graph and replayed.

    The graph consists of `linear`, `rms_norm`, `rope_rotations`, `rope`, `silu_mul`, `write_kv`,
    `paged_attention` without bounds, `greedy_tokens`, additions before a norm or after a linear
    layer, lookups of rows, and changes of shape that move nothing.

    Args:
        inputs: of `placeholders`.
        outputs: what was built on them: results, and after them pools among the inputs, which are
            written in place. Tokens for the host (`greedy_tokens`) are where `to_host` puts them.
        residual_in_product: an addition after a linear layer is part of it where it can be;
            otherwise it is part of the norm that follows.

    Raises:
        ValueError: for a graph of anything else; it says what the graph has. What does not depend
            on the inputs is evaluated, once.
    """

    def __init__(
        self,
        inputs: Sequence[mx.array],
        outputs: Sequence[mx.array],
        *,
        residual_in_product: bool = True,
    ) -> None:
        self._ext = ext  # (a capsule is of the extension that made it)
        self._program = ext.make_device_program(
            list(inputs), list(outputs), residual_in_product=residual_in_product
        )

    def __call__(
        self,
        inputs: Sequence[mx.array],
        *,
        returns_pools: bool = True,
        stream: mx.Stream | mx.Device | None = None,
    ) -> list[mx.array]:
        """The outputs for these inputs. The pools among them are consumed, as by `write_kv`.

        Args:
            returns_pools: false: the results only, which takes much less of the host's time. What
                is built on the handles of the pools that were given must then be evaluated after
                the results have been (by `mx.async_eval`, say): only that orders the two.

        Raises:
            ValueError: they are not of the shapes and dtypes that were read.
        """
        return self._ext.run_device_program(
            self._program, list(inputs), returns_pools=returns_pools, stream=stream
        )


class ArrayContents(Protocol):
    """See `array_contents`."""

    def are_still_of(self, array: mx.array, /) -> bool:
        """True if this array has them."""


def array_contents(array: mx.array) -> ArrayContents:
    """The contents that `array` has now, remembered without keeping them alive.

    ``array_contents(a).are_still_of(a)`` is false once `a` has been updated in place (``a -= b``,
    ``a[...] = b``), and for another array. Writes that MLX does not see change nothing.
    """
    return ext.ArrayContents(array)


def pool_copies() -> int:
    """Whole-pool copies since the process started; 0 if pools are used correctly."""
    return ext.pool_copies()


def make_room() -> None:
    """Waits for what the CPU's streams have queued, and frees what MLX keeps for reuse.

    As `mx.clear_cache`, but an error in a stream stays with the arrays that it concerns:
    `mx.clear_cache` raises it, and whoever waits for those arrays would not see it.

    It also corrects MLX's count of active tasks. An error in a stream makes the main thread leave
    tasks counted that were never queued, and later evaluations would wait for them for ever.
    """
    ext.make_room()


def compiles_kernels() -> bool:
    """True if GPU kernels are compiled on this machine, when they are first needed (Metal)."""
    if os.environ.get("MLX_PAGED_SIM") == "1":
        return True
    is_metal = "metal" in ext.build_info()["backends"].split()
    return is_metal and mx.default_device() == mx.Device(mx.gpu)


def prepare_kernels(on_kernel: OnKernel | None = None) -> int:
    """Compiles every GPU kernel that later steps may need, for the kinds of attention of which
    graphs have been built in this process; on Metal that takes a part of a second each.

    Args:
        on_kernel: called before each with how many are done and how many there are, and after the
            last.

    Returns:
        How many there are.
    """
    pipelines = ext.pipelines_to_come()
    for done, (name, function_constants) in enumerate(pipelines):
        if on_kernel is not None:
            on_kernel(done, len(pipelines))
        ext.prepare_pipeline(name, function_constants)
    if on_kernel is not None:
        on_kernel(len(pipelines), len(pipelines))
    return len(pipelines)
