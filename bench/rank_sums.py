"""All-reduces within a captured step: shared GPU memory against NCCL.

python bench/rank_sums.py --ranks 2 4      # on a machine with that many GPUs

Every size is first checked: close to NCCL's sum, and the same bits on every rank. Then a captured
step of many sums, each followed by a norm, is timed, minus the same step without sums.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable

import mlx_paged.extension  # noqa: F401  (before mlx.core)

# isort: split
import mlx.core as mx
import numpy as np
from harness import environment, print_table, save

from mlx_paged import executables, ops
from mlx_paged.engine.ranks import launch
from mlx_paged.engine.ranks.peers import connect_peers

NUM_SUMS = 56
REPEATS = 30
# [rows, columns] of hidden states in models with 3 and 70 billion parameters.
SHAPES = [(1, 3072), (32, 3072), (1, 8192), (8, 8192), (32, 8192), (128, 8192), (256, 8192)]


def step_us(shape: tuple[int, int], sums: Callable[[mx.array], mx.array]) -> float:
    """Returns the median microseconds of a step with `NUM_SUMS` norms, each after `sums`."""
    weight = mx.ones((shape[1],), dtype=mx.bfloat16)
    [x] = executables.placeholders([mx.zeros(shape, dtype=mx.bfloat16)])
    out = x
    for _ in range(NUM_SUMS):
        out = ops.rms_norm(sums(out), weight, 1e-5)
    # The launch that writes the result is not captured, so add one more norm.
    step = executables.GpuExecutable([x], [ops.rms_norm(out, weight, 1e-5)])
    given = mx.ones(shape, dtype=mx.bfloat16)
    mx.eval(given)
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        mx.eval(step([given]))
        times.append(time.perf_counter() - start)
    return 1e6 * float(np.median(times[5:]))


def check(group: mx.distributed.Group, by_nccl: Callable[..., mx.array]) -> int:
    """Checks sums of all dtypes against NCCL; returns how many it compared.

    Raises:
        AssertionError: A sum is wrong, or differs between ranks.
    """
    compared = 0
    for dtype in (mx.float32, mx.float16, mx.bfloat16):
        for size in (8, 24, 4096, 40_000, 131_072, 300_000, 1_000_000):
            mx.random.seed(size + group.rank())
            for _ in range(3):
                x = mx.random.normal((size,)).astype(dtype)
                got = mx.distributed.all_sum(x, group=group)
                exact = by_nccl(x.astype(mx.float32), group=group)
                error = mx.abs(got.astype(mx.float32) - exact).max().item()
                assert error < 0.1, (dtype, size, error)
                bits = got.view(mx.uint16 if dtype.size == 2 else mx.uint32).astype(mx.int32)
                others = by_nccl(bits, group=group) - bits * group.size()
                assert mx.abs(others).max().item() == 0, (dtype, size, "bits differ")
                compared += 1
    return compared


def of_rank() -> None:
    group = launch.join({}, "nccl")
    by_nccl = mx.distributed.all_sum
    connect_peers(group)
    shared = mx.distributed.all_sum
    if group.rank() == 0:
        print("memory is shared:", shared is not by_nccl, flush=True)
    compared = check(group, by_nccl)
    rows = []
    for shape in SHAPES:
        none = step_us(shape, lambda x: x)
        times = []
        for sums in (by_nccl, shared):
            with_sums = step_us(shape, lambda x, sums=sums: sums(x, group=group))  # type: ignore[misc]
            times.append((with_sums - none) / NUM_SUMS)
        rows.append([f"{shape[0]} x {shape[1]}", *(f"{us:.1f}" for us in times)])
    if group.rank() == 0:
        print(f"{group.size()} ranks, {compared} sums compared")
        print_table(["bfloat16", "NCCL (us)", "shared (us)"], rows)
        found = {"environment": environment(), "ranks": group.size(), "us": rows}
        print(save(f"rank-sums-{group.size()}", found), flush=True)
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", nargs="+", type=int, default=[2])
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        of_rank()
    for size in options.ranks:
        [port] = launch.free_ports(1)
        common = {"NCCL_HOST_IP": "127.0.0.1", "NCCL_PORT": str(port)}
        processes = []
        for rank, device in zip(range(size), launch.visible_gpus(), strict=False):
            own = {"MLX_WORLD_SIZE": str(size), "MLX_RANK": str(rank)}
            own["CUDA_VISIBLE_DEVICES"] = device
            command = [sys.executable, __file__, "--rank"]
            processes.append(subprocess.Popen(command, env={**os.environ, **common, **own}))
        ended = [process.wait() for process in processes]
        assert ended == [0] * size, ended


if __name__ == "__main__":
    main()
