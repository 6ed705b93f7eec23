"""The benchmark grid, and the reasons why a backend cannot run a case."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

ATTENTION = ("paged_attention",)
MOVEMENT = ("write_kv", "copy_blocks", "gather_kv")
# Layer operations other than matrix products; native on the CPU only.
LAYER = ("rope", "rms_norm", "silu_mul", "greedy_tokens", "linear")
OPS = (*ATTENTION, *MOVEMENT, *LAYER)
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
VOCAB_SIZE = 32768  # for greedy_tokens


@dataclass(frozen=True)
class Case:
    """One operation with one shape; a field that does not affect the operation is None.

    Attributes:
        op: One of `OPS`.
        batch: Number of sequences.
        kv_heads: Number of KV heads.
        head_dim: Head size of keys and values.
        dtype: Dtype of pools and activations.
        context: Mean tokens per sequence.
        rows: Query tokens per sequence: 1 is a decode, up to 8 a draft to verify, more a chunked
            prefill.
        group: Query heads per KV head.
        block_size: Tokens per block.
        window: Sliding window in tokens; None means full attention.
        skew: An eighth of the sequences, at least one, are `skew` times as long as the others.
    """

    op: str
    batch: int
    kv_heads: int
    head_dim: int
    dtype: str
    context: int | None = None
    rows: int | None = None
    group: int | None = None
    block_size: int | None = None
    window: int | None = None
    skew: int | None = None

    def __str__(self) -> str:
        fields = {k: v for k, v in asdict(self).items() if k != "op" and v is not None}
        return f"{self.op}({', '.join(f'{k}={v}' for k, v in fields.items())})"

    @property
    def lens(self) -> list[int]:
        """Context length of each sequence; the sum is ``batch * context``, up to rounding."""
        assert self.context is not None
        skew = self.skew or 1
        num_long = max(1, self.batch // 8) if skew > 1 else 0
        num_short = self.batch - num_long
        short = self.batch * self.context / (num_short + skew * num_long)
        return [round(short)] * num_short + [round(short * skew)] * num_long

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V per token."""
        return 2 * self.kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def num_q_heads(self) -> int:
        """Number of query heads."""
        return self.kv_heads * (self.group or 1)

    @property
    def seen_tokens(self) -> int:
        """Number of tokens, over all sequences, whose K and V at least one row sees."""
        rows = self.rows or 1
        reach = self.window + rows - 1 if self.window else None
        return sum(n if reach is None else min(n, reach) for n in self.lens)

    @property
    def scored_tokens(self) -> int:
        """Number of (row, token) pairs that attention scores."""
        total = 0
        for n in self.lens:
            for position in range(n - (self.rows or 1), n):
                total += min(position + 1, self.window or position + 1)
        return total


# Values of the command-line options, by field name of `Case`.
Grid = dict[str, list[Any]]


def defaults(device: str, *, quick: bool) -> Grid:
    """The default grid."""
    grid: Grid = {
        "batch": [1, 16],
        "context": [1024, 4096],
        "rows": [1],
        "kv_heads": [8],
        "group": [4],
        "head_dim": [128],
        "block_size": [32],
        "dtype": ["float32" if device == "cpu" else "bfloat16"],
        "window": [None],
        "skew": [1],
    }
    if quick:
        grid |= {"batch": [1, 8], "context": [2048], "head_dim": [64]}
        if device != "cpu":
            grid |= {"context": [4096], "head_dim": [128]}
    return grid


def cases(ops: Sequence[str], grid: Grid) -> list[Case]:
    """Yields the grid's cases without duplicates; cases that share data are adjacent."""
    found: dict[Case, None] = {}
    on_pools = [op for op in ops if op not in LAYER]
    for batch, context, heads, dim, block_size, dtype, skew in _product(
        grid, "batch", "context", "kv_heads", "head_dim", "block_size", "dtype", "skew"
    ):
        pool = Case("", batch, heads, dim, dtype, context, block_size=block_size, skew=skew)
        for op in on_pools:
            if op in MOVEMENT:
                found[replace(pool, op=op)] = None
                continue
            for rows, group, window in _product(grid, "rows", "group", "window"):
                found[replace(pool, op=op, rows=rows, group=group, window=window)] = None
    for op in (op for op in ops if op in LAYER):
        for batch, rows, heads, group, dim, dtype in _product(
            grid, "batch", "rows", "kv_heads", "group", "head_dim", "dtype"
        ):
            found[Case(op, batch, heads, dim, dtype, rows=rows, group=group)] = None
    return list(found)


def refusal(
    case: Case, device: str, gpu_head_dims: Collection[int], memory_limit: int | None
) -> str | None:
    """Returns why the backend cannot run a case; None if it can.

    Args:
        device: "cpu" or "gpu".
        gpu_head_dims: Head dims (of keys and values) with GPU kernels.
        memory_limit: Maximum bytes of the inputs; None if unknown.
    """
    if case.op in LAYER:
        if device != "cpu":
            return f"{case.op} is native on the CPU only: a GPU has MLX's own in one kernel"
        if case.op == "linear" and case.dtype != "float32":
            return f"linear is native in float32 only: in {case.dtype} it is MLX's own"
        return None
    if (case.skew or 1) > 1 and case.batch == 1:
        return f"skew {case.skew} needs at least 2 sequences"
    shortest = min(case.lens)
    if shortest < (case.rows or 1):
        return (
            f"rows must be at most the shortest context, {shortest} tokens, but got "
            f"{case.rows or 1}"
        )
    if device != "cpu" and case.op in ATTENTION and case.head_dim not in gpu_head_dims:
        known = ", ".join(map(str, sorted(gpu_head_dims)))
        return f"on a GPU head_dim must be one of {known} but got {case.head_dim}"
    if memory_limit is not None and (needed := needed_bytes(case)) > memory_limit:
        return (
            f"pools and dense copies need {needed / 2**30:.1f} GiB of the "
            f"{memory_limit / 2**30:.1f} GiB that may be used here"
        )
    return None


def needed_bytes(case: Case) -> int:
    """Returns the bytes of the pool, dense copy, and gathered copy (padded to the longest)."""
    lens = case.lens
    return (sum(lens) + 2 * len(lens) * max(lens)) * case.token_bytes


def _product(grid: Grid, *names: str) -> Any:
    return itertools.product(*(grid[name] for name in names))
