"""Primitives on an NVIDIA GPU against its copy bandwidth, and decode attention against its peers.

python bench/cuda_kernels.py

Needs PyTorch: its profiler reads the GPU's clock for every kernel of the process, including MLX's,
and its SDPA is one of the peers. One evaluation calls each contender many times, and each call's
queries are the previous result, as in the layers of a model. There are two times: `kernels` is
spent in kernels; `in a row` is from one call to the next, including gaps. If the host takes longer
to launch a call than the GPU to run it, the gap is the host's. MLX launches kernels one by one,
because the profiler adds some microseconds to every kernel of a CUDA graph. Calls rotate through
pools, so the cache never holds the data of the next one.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import cycle, pairwise
from typing import Any

os.environ["MLX_USE_CUDA_GRAPHS"] = "0"  # before MLX reads it

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import numpy as np
from harness import print_table, save

from mlx_paged import ops
from mlx_paged.model.plan import build_plan

REPEAT = 24  # calls per evaluation
ROUNDS = 5  # over all contenders; results are medians
PAST_CACHE = 400 << 20  # bytes of pools to rotate through, at least three sets
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
GROUPS = (1, 2, 4, 8)
CASES = [
    *(Case("32 x 4096", (4096,) * 32, group=g) for g in GROUPS),
    *(Case("32 x 4096", (4096,) * 32, group=g, block_size=16) for g in GROUPS),
    *(Case("32 x 4096", (4096,) * 32, group=g, dim=d) for d in (64, 256) for g in GROUPS),
    *(Case("32 x 4096", (4096,) * 32, dim=d, block_size=16) for d in (64, 256)),
    *(Case("8 x 4096", (4096,) * 8, group=g) for g in GROUPS),
    *(Case("1 x 4096", (4096,), group=g) for g in (1, 4)),
    *(Case("1 x 65536", (65536,), group=g) for g in (1, 4)),
    Case("28 x 256 + 4 x 8192", SKEWED),
    Case("the same bytes, balanced", (sum(SKEWED) // 32,) * 32),
]
MOVED = Case("64 x 4096", (4096,) * 64)


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
    copies = max(3, -(-PAST_CACHE // case.kv_bytes))
    pools = [random_pools(case, num_blocks) for _ in range(copies)]
    shape = (len(case.lens), case.kv_heads * case.group, case.dim)
    queries = mx.random.normal(shape, dtype=mx.bfloat16)
    scale = case.dim**-0.5
    plan = build_plan(tables, list(case.lens), [1] * len(case.lens), block_size=case.block_size)
    mx.eval(queries, *vars(plan).values())
    turn = cycle(pools)

    def paged(queries: mx.array) -> mx.array:
        return ops.paged_attention(queries, *next(turn), plan, scale=scale)

    contenders = {"paged": chain(paged, queries)}
    if len(set(case.lens)) == 1:
        contenders |= dense_peers(case, pools, plan, queries)
        contenders |= torch_peers(case, copies)
    return compete(contenders)


def dense_peers(
    case: Case, pools: list, plan: ops.AttentionPlan, queries: mx.array
) -> dict[str, Callable[[], None]]:
    """MLX's own attention over dense keys and values, and over gathered ones."""
    length, scale = case.lens[0], case.dim**-0.5
    dense = [ops.gather_kv(*p, plan.block_tables, plan.context_lens, length) for p in pools]
    mx.eval(dense)
    turn, pool_turn = cycle(dense), cycle(pools)

    def attend(queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
        queries = queries[:, :, None]
        out = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale)
        return out.squeeze(2)

    def gathered(queries: mx.array) -> mx.array:
        pool = next(pool_turn)
        gathered = ops.gather_kv(*pool, plan.block_tables, plan.context_lens, length)
        return attend(queries, *gathered)

    paged = ops.paged_attention(queries, *pools[0], plan, scale=scale)
    difference = mx.abs(paged - attend(queries, *dense[0])).max().item()
    assert difference < 0.05, f"paged and dense attention differ by {difference}"
    return {
        "MLX dense": chain(lambda queries: attend(queries, *next(turn)), queries),
        "gather + MLX dense": chain(gathered, queries),
    }


def torch_peers(case: Case, copies: int) -> dict[str, Callable[[], None]]:
    shape = (len(case.lens), case.kv_heads, case.lens[0], case.dim)
    random = partial(torch.randn, dtype=torch.bfloat16, device="cuda")
    turn = cycle([[random(shape) for _ in range(2)] for _ in range(copies)])
    queries = random((len(case.lens), case.kv_heads * case.group, 1, case.dim))

    def repeat(backend: SDPBackend) -> None:
        out = queries
        with sdpa_kernel(backend):
            for _ in range(REPEAT):
                out = torch.nn.functional.scaled_dot_product_attention(
                    out, *next(turn), enable_gqa=case.group > 1
                )

    return {f"torch {name}": partial(repeat, backend) for name, backend in TORCH.items()}


def movement(case: Case) -> list[dict[str, Any]]:
    """write_kv, copy_blocks and gather_kv; counts both bytes read and bytes written."""
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
    results: list[mx.array] = []

    def write() -> None:
        results[:] = pools
        for _ in range(REPEAT):
            results[:] = ops.write_kv(*results, rows, rows, slots)
        mx.eval(results)

    def copy() -> None:
        results[:] = pools
        for _ in range(REPEAT):
            results[:] = ops.copy_blocks(results, pairs)
        mx.eval(results)

    def gather() -> None:
        tables, lens = plan.block_tables, plan.context_lens
        mx.eval([ops.gather_kv(*pools, tables, lens, length) for _ in range(REPEAT)])

    found = compete({"write_kv": write, "copy_blocks": copy, "gather_kv": gather})
    moved = {"write_kv": 2, "copy_blocks": 1, "gather_kv": 2}
    return [
        {"op": op, "bytes": moved[op] * case.kv_bytes, "seconds": seconds}
        for op, seconds in found.items()
    ]


# --- Times by the GPU's own clock -----------------------------------------------------------------


@dataclass(frozen=True)
class Seconds:
    """Times of one call."""

    kernels: float
    in_a_row: float


def time_calls(repeat: Callable[[], None]) -> Seconds:
    """Medians over the REPEAT calls of one `repeat`."""
    repeat()
    mx.synchronize()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        repeat()
        mx.synchronize()
        torch.cuda.synchronize()
    events = [
        event for event in found.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and "Mem" not in event.name
    ]  # fmt: skip
    spans: dict[str, list[float]] = {}
    for event in events:
        spans.setdefault(event.name, []).append(event.time_range.elapsed_us())
    # Drops kernels that run once per evaluation rather than once per call.
    counts = {name: round(len(times) / REPEAT) for name, times in spans.items()}
    kernels = sum(statistics.median(times) * counts[name] for name, times in spans.items())
    starts = sorted(e.time_range.start for e in events if counts[e.name])[:: sum(counts.values())]
    if len(starts) < REPEAT // 2:
        raise RuntimeError(f"the profiler saw too few kernels: {counts}")
    between = statistics.median(b - a for a, b in pairwise(starts))
    return Seconds(kernels / 1e6, between / 1e6)


def compete(contenders: dict[str, Callable[[], None]]) -> dict[str, Any]:
    """Seconds of each contender, in turns; or the reason why one cannot run."""
    found: dict[str, list[Seconds]] = {name: [] for name in contenders}
    refused: dict[str, str] = {}
    for _ in range(ROUNDS):
        for name, repeat in contenders.items():
            try:
                found[name].append(time_calls(repeat))
            except RuntimeError as error:
                refused[name] = str(error).splitlines()[0]
    return {
        name: {field: statistics.median(asdict(t)[field] for t in times) for field in
               ("kernels", "in_a_row")} if times else refused[name]
        for name, times in found.items()
    }  # fmt: skip


def chain(attend: Callable[[mx.array], mx.array], queries: mx.array) -> Callable[[], None]:
    def repeat() -> None:
        out = queries
        for _ in range(REPEAT):
            out = attend(out)
        mx.eval(out)

    return repeat


def copy_bandwidth() -> float:
    """Bytes per second of a device-to-device copy; counts both bytes read and bytes written."""
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


def share_of(seconds: dict[str, float] | str, num_bytes: int, copy: float) -> dict[str, float]:
    if isinstance(seconds, str):
        return {}
    return {name: num_bytes / value / copy for name, value in seconds.items()}


def percent(share: dict[str, float], name: str) -> str:
    return f"{share[name]:.0%}" if name in share else "-"


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
        share = {name: share_of(seconds, case.kv_bytes, copy) for name, seconds in found.items()}
        fields = {**asdict(case), "lens": case.name}
        results.append({"op": "paged_attention", **fields, "bytes": case.kv_bytes,
                        "seconds": found, "share_of_copy": share})  # fmt: skip
        rows.append([
            f"attention {case.name}", f"{case.group}", f"{case.dim}", f"{case.block_size}",
            f"{found['paged']['kernels'] * 1e6:.1f}", percent(share["paged"], "kernels"),
            *(percent(share.get(name, {}), "in_a_row") for name in ("paged", *peers)),
        ])  # fmt: skip
        print(*rows[-1], flush=True)
    for found in movement(MOVED):
        share = share_of(found["seconds"], found["bytes"], copy)
        results.append({**found, "share_of_copy": share})
        rows.append([found["op"], "", "", "", f"{found['seconds']['kernels'] * 1e6:.1f}",
                     percent(share, "kernels"), percent(share, "in_a_row"),
                     *[""] * len(peers)])  # fmt: skip
    print(f"\ncopy bandwidth {copy / 1e12:.2f} TB/s, read + written; bfloat16; share of it:\n")
    print_table(["case", "G", "D", "block", "us", "kernels", "in a row", *peers], rows)
    if options.save:
        print(save(options.name, {"copy_bytes_per_second": copy, "results": results}))


if __name__ == "__main__":
    main()
