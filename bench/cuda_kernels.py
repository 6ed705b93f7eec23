"""Primitives on an NVIDIA GPU against its copy bandwidth, and decode attention against its peers.

python bench/cuda_kernels.py

Needs PyTorch: its profiler reads the GPU's own clock for every kernel of the process, MLX's too,
and its SDPA is one of the peers. Pools are turned over, so that no case is served from the cache.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import cycle
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import numpy as np
from harness import print_table, save

from mlx_paged import ops
from mlx_paged.attention.plan import build_plan

REPEAT = 30
PAST_CACHE = 400 << 20  # bytes of pools to turn over
TORCH = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


@dataclass(frozen=True)
class Case:
    name: str
    lens: tuple[int, ...]
    group: int = 4
    dim: int = 128
    block_size: int = 32
    kv_heads: int = 8

    @property
    def kv_bytes(self) -> int:
        return 2 * 2 * sum(self.lens) * self.kv_heads * self.dim


SKEWED = (256,) * 28 + (8192,) * 4
CASES = [
    *(Case("32 x 4096", (4096,) * 32, group=g) for g in (1, 2, 4, 8)),
    *(Case("32 x 4096", (4096,) * 32, dim=d) for d in (64, 256)),
    Case("32 x 4096", (4096,) * 32, block_size=16),
    *(Case("8 x 4096", (4096,) * 8, group=g) for g in (1, 4)),
    Case("1 x 4096", (4096,)),
    Case("1 x 65536", (65536,)),
    Case("28 x 256 + 4 x 8192", SKEWED),
    Case("the same bytes, balanced", (sum(SKEWED) // 32,) * 32),
]


def kernel_seconds(run: Callable[[], object]) -> float:
    """Median over repetitions of the GPU's time in the kernels of one `run`."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    mx.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(REPEAT):
            run()
        mx.synchronize()
        torch.cuda.synchronize()
    spans: dict[str, list[float]] = {}
    for event in found.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and "Mem" not in event.name:
            spans.setdefault(event.name, []).append(event.time_range.elapsed_us())
    if not spans:
        raise RuntimeError("the profiler saw no kernel")
    per_run = [statistics.median(times) * round(len(times) / REPEAT) for times in spans.values()]
    return sum(per_run) / 1e6


def copy_bandwidth() -> float:
    """Bytes a second of a device-to-device copy, read and written bytes both counted."""
    source = torch.ones(1 << 31, dtype=torch.uint8, device="cuda")
    target = torch.zeros_like(source)
    times = []
    for _ in range(10):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return 2 * source.nbytes / statistics.median(times)


def tables_of(case: Case) -> tuple[list[list[int]], int]:
    counts = [-(-n // case.block_size) for n in case.lens]
    order = np.random.default_rng(0).permutation(sum(counts)) + 1
    tables = [part.tolist() for part in np.split(order, np.cumsum(counts)[:-1])]
    return tables, sum(counts) + 1


def random_pools(case: Case, num_blocks: int) -> list[mx.array]:
    shape = (num_blocks, case.block_size, case.kv_heads, case.dim)
    pools = [mx.random.normal(shape, dtype=mx.bfloat16) for _ in range(2)]
    mx.eval(pools)
    return pools


def attention(case: Case) -> dict[str, Any]:
    tables, num_blocks = tables_of(case)
    copies = max(1, -(-PAST_CACHE // case.kv_bytes))
    pools = [random_pools(case, num_blocks) for _ in range(copies)]
    shape = (len(case.lens), case.kv_heads * case.group, case.dim)
    queries = mx.random.normal(shape, dtype=mx.bfloat16)
    scale = case.dim**-0.5
    plan = build_plan(tables, list(case.lens), [1] * len(case.lens), block_size=case.block_size)
    mx.eval(queries, *vars(plan).values())
    turn = cycle(pools)

    def paged() -> mx.array:
        out = ops.paged_attention(queries, *next(turn), plan, scale=scale)
        mx.eval(out)
        return out

    result: dict[str, Any] = {"paged": kernel_seconds(paged)}
    if len(set(case.lens)) == 1:
        for name, seconds in dense_peers(case, pools, plan, queries, paged):
            result[name] = seconds
    return result


def dense_peers(
    case: Case, pools: list, plan: ops.AttentionPlan, queries: mx.array, paged: Callable
) -> Iterator[tuple[str, Any]]:
    """The same attention over dense keys and values; a peer that refuses says why."""
    length, scale = case.lens[0], case.dim**-0.5
    dense = [ops.gather_kv(*p, plan.block_tables, plan.context_lens, length) for p in pools]
    mx.eval(dense)
    dense_queries = queries[:, :, None]
    turn, pool_turn = cycle(dense), cycle(pools)

    def mlx_dense() -> mx.array:
        out = mx.fast.scaled_dot_product_attention(dense_queries, *next(turn), scale=scale)
        mx.eval(out)
        return out

    def gathered() -> None:
        keys, values = ops.gather_kv(*next(pool_turn), plan.block_tables, plan.context_lens, length)
        mx.eval(mx.fast.scaled_dot_product_attention(dense_queries, keys, values, scale=scale))

    # Compared where one set of pools serves every call.
    if len(pools) == 1:
        difference = mx.abs(paged() - mlx_dense().squeeze(2)).max().item()
        assert difference < 0.05, f"paged and dense attention differ by {difference}"
        yield "difference", difference
    yield "MLX dense", kernel_seconds(mlx_dense)
    yield "gather + MLX dense", kernel_seconds(gathered)
    dense.clear()
    shape = (len(case.lens), case.kv_heads, length, case.dim)
    tensors = [
        [torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2)] for _ in pools
    ]
    torch_queries = torch.randn(
        (len(case.lens), case.kv_heads * case.group, 1, case.dim),
        dtype=torch.bfloat16, device="cuda",
    )  # fmt: skip
    torch_turn = cycle(tensors)
    for name, backend in TORCH.items():

        def torch_dense(backend: SDPBackend = backend) -> None:
            with sdpa_kernel(backend):
                torch.nn.functional.scaled_dot_product_attention(
                    torch_queries, *next(torch_turn), enable_gqa=case.group > 1
                )

        try:
            yield f"torch {name}", kernel_seconds(torch_dense)
        except RuntimeError as error:
            yield f"torch {name}", str(error).splitlines()[0]


def movement(case: Case) -> list[dict[str, Any]]:
    """write_kv, copy_blocks and gather_kv; read and written bytes both counted."""
    tables, num_blocks = tables_of(case)
    pools = random_pools(case, num_blocks)
    tokens = sum(case.lens)
    rows = mx.random.normal((tokens, case.kv_heads, case.dim), dtype=mx.bfloat16)
    rng = np.random.default_rng(1)
    slots = mx.array(rng.permutation(tokens).astype(np.int32))
    blocks = rng.permutation(num_blocks)
    pairs = mx.array(blocks[: num_blocks // 2 * 2].reshape(-1, 2).astype(np.int32))
    plan = build_plan(tables, list(case.lens), [1] * len(case.lens), block_size=case.block_size)
    mx.eval(rows, slots, pairs, *vars(plan).values())
    length = case.lens[0]
    runs: dict[str, tuple[Callable[[], Any], int]] = {
        "write_kv": (lambda: ops.write_kv(*pools, rows, rows, slots), 2 * case.kv_bytes),
        "copy_blocks": (lambda: ops.copy_blocks(pools, pairs), case.kv_bytes),
        "gather_kv": (
            lambda: ops.gather_kv(*pools, plan.block_tables, plan.context_lens, length),
            2 * case.kv_bytes,
        ),
    }
    return [
        {"op": op, "bytes": moved, "seconds": kernel_seconds(lambda run=run: mx.eval(run()))}
        for op, (run, moved) in runs.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--name", default="kernels-h200", help="bench/results/<name>.json")
    parser.add_argument("--no-save", dest="save", action="store_false")
    options = parser.parse_args()
    mx.set_default_device(mx.gpu)
    copy = copy_bandwidth()
    peers = ["MLX dense", "gather + MLX dense", *(f"torch {name}" for name in TORCH)]
    results, rows = [], []
    for case in CASES:
        found = attention(case)
        mx.clear_cache()
        torch.cuda.empty_cache()
        share = {
            name: case.kv_bytes / seconds / copy
            for name, seconds in found.items()
            if isinstance(seconds, float) and name != "difference"
        }
        fields = {**asdict(case), "lens": case.name}
        results.append({"op": "paged_attention", **fields, "bytes": case.kv_bytes,
                        "seconds": found, "share_of_copy": share})  # fmt: skip
        rows.append([
            f"attention {case.name}", f"{case.group}", f"{case.dim}", f"{case.block_size}",
            f"{found['paged'] * 1e6:.1f}",
            *(f"{share[name]:.0%}" if name in share else "-" for name in ("paged", *peers)),
        ])  # fmt: skip
        print(*rows[-1], flush=True)
    for found in movement(CASES[0]):
        found["share_of_copy"] = found["bytes"] / found["seconds"] / copy
        results.append(found)
        rows.append([found["op"], "", "", "", f"{found['seconds'] * 1e6:.1f}",
                     f"{found['share_of_copy']:.0%}", *[""] * len(peers)])  # fmt: skip
    print(f"\ncopy bandwidth {copy / 1e12:.2f} TB/s, read + written; bfloat16; share of it:\n")
    print_table(["case", "G", "D", "block", "us", "ours", *peers], rows)
    if options.save:
        print(save(options.name, {"copy_bytes_per_second": copy, "results": results}))


if __name__ == "__main__":
    main()
