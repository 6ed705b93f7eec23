"""Every primitive against the machine's copy bandwidth, and attention against MLX's dense SDPA.

python bench/kernels.py                          # the reference shapes, written to bench/results
python bench/kernels.py --batch 1 --context 32768 --group 8 --dtype bfloat16 --no-save
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any

from mlx_paged import ops
from mlx_paged.attention.plan import build_plan

# isort: split
import mlx.core as mx
import numpy as np
from harness import copy_bandwidth, median_seconds, print_table, save


def gpu_copy_bandwidth(megabytes: int = 512) -> float:
    """Bytes per second of a large elementwise operation, read and written bytes both counted."""
    a = mx.ones((megabytes << 20) // 4)
    mx.eval(a)
    return 2 * a.nbytes / median_seconds(lambda: mx.eval(a + 1))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[16])
    parser.add_argument("--context", type=int, nargs="+", default=[2048])
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--group", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--head-dim", type=int, nargs="+", default=[64])
    parser.add_argument("--block-size", type=int, nargs="+", default=[32])
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--window", type=int, default=None)
    parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--name", default="kernels-cpu", help="bench/results/<name>.json")
    parser.add_argument("--no-save", dest="save", action="store_false")
    return parser.parse_args()


class Case:
    """Pools of one shape, filled, with their blocks in random order."""

    def __init__(
        self, batch: int, context: int, heads: int, dim: int, block_size: int, dtype: str
    ) -> None:
        self.batch, self.context, self.heads, self.dim = batch, context, heads, dim
        self.block_size, self.dtype = block_size, getattr(mx, dtype)
        per_sequence = -(-context // block_size)
        num_blocks = batch * per_sequence + 1
        order = np.random.default_rng(0).permutation(num_blocks - 1) + 1
        self.tables = order.reshape(batch, per_sequence).tolist()
        self.pools = []
        for _ in range(2):
            pool = ops.allocate_pool(num_blocks, block_size, heads, dim, self.dtype)
            rows = mx.random.normal((num_blocks * block_size, heads, dim)).astype(self.dtype)
            slots = mx.arange(num_blocks * block_size, dtype=mx.int32)
            pool, _ = ops.write_kv(pool, mx.array(pool), rows, rows, slots)
            self.pools.append(pool)
        mx.eval(self.pools)

    @property
    def kv_bytes(self) -> int:
        return 2 * self.batch * self.context * self.heads * self.dim * self.dtype.size

    def attention(self, group: int, window: int | None) -> dict[str, Any]:
        queries = mx.random.normal((self.batch, self.heads * group, self.dim)).astype(self.dtype)
        scale = self.dim**-0.5
        lens = [self.context] * self.batch
        gpu = mx.default_device() == mx.gpu
        plan = build_plan(self.tables, lens, [1] * self.batch, block_size=self.block_size)
        keys, values = ops.gather_kv(
            *self.pools, plan.block_tables, plan.context_lens, self.context
        )
        dense_queries = queries[:, :, None]
        mx.eval(queries, keys, values, dense_queries, plan.work_items)
        mask = None
        if window:
            mask = mx.arange(self.context) > self.context - 1 - window

        def paged() -> mx.array:
            out = ops.paged_attention(queries, *self.pools, plan, scale=scale, window=window)
            mx.eval(out)
            return out

        def dense() -> mx.array:
            out = mx.fast.scaled_dot_product_attention(
                dense_queries, keys, values, scale=scale, mask=mask
            )
            mx.eval(out)
            return out

        def gathered() -> mx.array:
            dense_kv = ops.gather_kv(
                *self.pools, plan.block_tables, plan.context_lens, self.context
            )
            out = mx.fast.scaled_dot_product_attention(
                dense_queries, *dense_kv, scale=scale, mask=mask
            )
            mx.eval(out)
            return out

        error = mx.abs(paged() - dense().squeeze(2)).max().item()
        assert error < 0.05, f"paged and dense attention differ by {error}"
        seconds, dense_seconds = median_seconds(paged), median_seconds(dense, repeat=3, warmup=1)
        gather = {"gather_over_paged": median_seconds(gathered) / seconds} if gpu else {}
        used = self.kv_bytes * min(window or self.context, self.context) // self.context
        return {
            "op": "paged_attention",
            "group": group,
            "window": window,
            "bytes": used,
            "seconds": seconds,
            "dense_sdpa_seconds": dense_seconds,
            "dense_over_paged": dense_seconds / seconds,
            **gather,
            "max_abs_difference": error,
        }

    def movement(self) -> list[dict[str, Any]]:
        """write_kv, copy_blocks and gather_kv; read and written bytes both counted."""
        tokens = self.batch * self.context
        rows = mx.random.normal((tokens, self.heads, self.dim)).astype(self.dtype)
        slots = mx.array(np.random.default_rng(1).permutation(tokens).astype(np.int32))
        blocks = np.array(self.tables).reshape(-1)
        pairs = mx.array(blocks[: len(blocks) // 2 * 2].reshape(-1, 2).astype(np.int32))
        tables = mx.array(np.array(self.tables, dtype=np.int32))
        lens = mx.full((self.batch,), self.context, dtype=mx.int32)
        mx.eval(rows, slots, pairs, tables, lens)
        runs = {
            "write_kv": lambda: ops.write_kv(*self.pools, rows, rows, slots),
            "copy_blocks": lambda: ops.copy_blocks(self.pools, pairs),
            "gather_kv": lambda: ops.gather_kv(*self.pools, tables, lens, self.context),
        }
        moved = {"write_kv": self.kv_bytes * 2, "copy_blocks": self.kv_bytes,
                 "gather_kv": self.kv_bytes * 2}  # fmt: skip
        return [
            {"op": name, "bytes": moved[name], "seconds": median_seconds(lambda: mx.eval(run()))}  # noqa: B023
            for name, run in runs.items()
        ]


def main() -> None:
    options = parse()
    mx.set_default_device(getattr(mx, options.device))
    measure_copy = gpu_copy_bandwidth if options.device == "gpu" else copy_bandwidth
    copy = measure_copy()
    results = []
    shapes = itertools.product(
        options.batch, options.context, options.head_dim, options.block_size, options.dtype
    )
    for batch, context, dim, block_size, dtype in shapes:
        case = Case(batch, context, options.kv_heads, dim, block_size, dtype)
        shape = {
            "batch": batch,
            "context": context,
            "kv_heads": options.kv_heads,
            "head_dim": dim,
            "block_size": block_size,
            "dtype": dtype,
        }
        found = [case.attention(g, options.window) for g in options.group]
        results += [{**shape, **r} for r in found + case.movement()]
    # The machine's speed drifts: the copy is measured before and after.
    copy = max(copy, measure_copy())
    rows = []
    for r in results:
        r["bytes_per_second"] = r["bytes"] / r["seconds"]
        r["share_of_copy"] = r["bytes_per_second"] / copy
        name = r["op"] + (f" G={r['group']}" if "group" in r else "")
        rows.append(
            [
                name,
                r["dtype"],
                f"{r['batch']} x {r['context']}",
                f"{r['kv_heads']} x {r['head_dim']}",
                str(r["block_size"]),
                f"{r['seconds'] * 1e3:.2f}",
                f"{r['bytes_per_second'] / 1e9:.1f}",
                f"{r['share_of_copy']:.0%}",
                f"{r['dense_over_paged']:.1f}x" if "dense_over_paged" in r else "",
            ]
        )
    print(f"memory copy on all cores: {copy / 1e9:.1f} GB/s (read + written)\n")
    header = [
        "op",
        "dtype",
        "batch",
        "KV heads",
        "block",
        "ms",
        "GB/s",
        "of copy",
        "dense SDPA takes",
    ]
    print_table(header, rows)
    if options.save:
        print("\n", save(options.name, {"copy_bytes_per_second": copy, "results": results}))


if __name__ == "__main__":
    main()
