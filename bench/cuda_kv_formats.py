"""Decode attention and write_kv of every KV format on an NVIDIA GPU, against bfloat16 pools.

python bench/cuda_kv_formats.py            # some 40 s
python bench/cuda_kv_formats.py --check    # runs the tests of quantized pools first

Measures like bench/cuda_kernels.py. Results are first compared with MLX's attention over gathered
keys and values. Targets: attention at least 1.6 (int8) and 1.9 (int8 keys, int4 values) times as
fast as bfloat16's, write_kv at most 1.3 times as slow.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import cycle
from pathlib import Path

from cuda_kernels import PAST_CACHE, REPEAT, Case, chain, tables_of, time_calls

# isort: split
import mlx.core as mx
import numpy as np
from harness import print_table, save

from mlx_paged import ops
from mlx_paged.model.kv_formats import FORMATS
from mlx_paged.model.plan import build_plan

ROUNDS = 3
CASES = (Case("32 x 4096", (4096,) * 32), Case("32 x 16384", (16384,) * 32))
WRITES = {"32 tokens": 32, "8192 tokens": 8192}
DTYPES = {"bfloat16": (mx.bfloat16, mx.bfloat16)} | {
    name: (getattr(mx, f.keys.value), getattr(mx, f.values.value)) for name, f in FORMATS.items()
}
ASKED = {"int8": 1.6, "int8_k_int4_v": 1.9}
MIN_WRITE = 1 / 1.3


def filled_pools(case: Case, num_blocks: int, name: str) -> list[mx.array]:
    """Random keys and values in every slot."""
    pools = [
        ops.allocate_pool(num_blocks, case.block_size, case.kv_heads, case.dim, dtype)
        for dtype in DTYPES[name]
    ]
    num_slots, piece = num_blocks * case.block_size, 1 << 16
    for begin in range(0, num_slots, piece):
        count = min(piece, num_slots - begin)
        shape = (count, case.kv_heads, case.dim)
        rows = [mx.random.normal(shape, dtype=mx.bfloat16) for _ in range(2)]
        slots = mx.array(np.arange(begin, begin + count, dtype=np.int32))
        pools = list(ops.write_kv(*pools, *rows, slots))
        mx.eval(pools)
    return pools


def attention(case: Case, name: str) -> float:
    tables, num_blocks = tables_of(case)
    copies = max(2, -(-PAST_CACHE // case.kv_bytes))
    pools = [filled_pools(case, num_blocks, name) for _ in range(copies)]
    shape = (len(case.lens), case.kv_heads * case.group, case.dim)
    queries = mx.random.normal(shape, dtype=mx.bfloat16)
    plan = build_plan(tables, list(case.lens), [1] * len(case.lens), block_size=case.block_size)
    mx.eval(queries, *vars(plan).values())
    attend = partial(ops.paged_attention, plan=plan, scale=case.dim**-0.5)
    dense = ops.gather_kv(
        *pools[0], plan.block_tables, plan.context_lens, case.lens[0],
        dtype=None if name == "bfloat16" else mx.bfloat16,
    )  # fmt: skip
    wanted = mx.fast.scaled_dot_product_attention(
        queries[:, :, None], *dense, scale=case.dim**-0.5
    ).squeeze(2)
    difference = mx.abs(attend(queries, *pools[0]) - wanted).max().item()
    assert difference < 0.02, f"{name}: paged and dense attention differ by {difference}"
    del dense, wanted
    turn = cycle(pools)
    return _seconds(chain(lambda q: attend(q, *next(turn)), queries))


def writing(num_tokens: int, name: str) -> float:
    case = Case("", (num_tokens,))
    pools = filled_pools(case, 1 + num_tokens // case.block_size + 1, name)
    shape = (num_tokens, case.kv_heads, case.dim)
    rows = [mx.random.normal(shape, dtype=mx.bfloat16) for _ in range(2)]
    order = np.random.default_rng(0).permutation(num_tokens).astype(np.int32)
    slots = mx.array(order)
    mx.eval(rows, slots)

    def write() -> None:
        written = pools
        for _ in range(REPEAT):
            written = list(ops.write_kv(*written, *rows, slots))
        mx.eval(written)
        pools[:] = written

    return _seconds(write)


def _seconds(run: Callable[[], None]) -> float:
    """Kernel time of one call."""
    return statistics.median(time_calls(run).kernels for _ in range(ROUNDS))


def check() -> None:
    """Runs the tests of quantized pools on the GPU."""
    tests = Path(__file__).parents[1] / "tests/native/test_quantized_pools.py"
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", tests]
    env = {**os.environ, "MLX_PAGED_TEST_DEVICE": "gpu", "MLX_ENABLE_TF32": "0"}
    if subprocess.run(command, env=env, check=False).returncode:
        raise SystemExit("tests of quantized pools failed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="the tests before")
    if parser.parse_args().check:
        check()
    mx.set_default_device(mx.gpu)
    results, missed = [], []
    for what, measure, things in (
        ("attention", attention, {case.name: case for case in CASES}),
        ("write_kv", writing, WRITES),
    ):
        for label, thing in things.items():
            found = {name: measure(thing, name) for name in DTYPES}  # type: ignore[operator]
            base = found["bfloat16"]
            rows = []
            for name, seconds in found.items():
                speed = base / seconds
                asked = ASKED.get(name, 0.0) if what == "attention" else MIN_WRITE
                if speed < asked:
                    missed.append(f"{what} {label} {name}: {speed:.2f}x")
                results.append(
                    {"op": what, "case": label, "format": name, "seconds": seconds, "speed": speed}
                )  # fmt: skip
                rows.append([name, f"{1e6 * seconds:.1f} us", f"{speed:.2f}x"])
            print(f"\n{what}, {label}")
            print_table(["", "kernels", "speed"], rows)
    save("kv_formats-gpu", {"benchmark": "kv_formats", "results": results})
    if missed:
        raise SystemExit(f"failed: slower than asked: {'; '.join(missed)}")
    print("passed: as fast as asked")


if __name__ == "__main__":
    main()
