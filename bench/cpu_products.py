"""Products with weights of every format on the CPU: bytes and operations per second.

python bench/cpu_products.py [--k 2048 --n 8192] [--rows 1 4 8 32 512] [--json out.json]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx

from mlx_paged import ops

FORMATS: dict[str, tuple[str, int, int] | mx.Dtype] = {
    "float32": mx.float32,
    "bfloat16": mx.bfloat16,
    "float16": mx.float16,
    **{f"affine {b} bits": ("affine", b, 64) for b in (2, 3, 4, 5, 6, 8)},
    "mxfp4": ("mxfp4", 4, 32),
    "mxfp8": ("mxfp8", 8, 32),
    "nvfp4": ("nvfp4", 4, 16),
}
# The same weights with rounded activations.
ROUNDED = {
    **{f"{name}, int8": (name, "int8") for name in ("affine 4 bits", "affine 8 bits")},
    **({"bfloat16, rounded": ("bfloat16", "bfloat16")} if "bfloat16" in ops.activations() else {}),
}


def product(name: str, n: int, k: int, copies: int) -> tuple[list[Callable], int]:
    """A product that rotates through weights too large for the caches together, and its bytes."""
    name, activations = ROUNDED.get(name, (name, "float32"))
    form, multiply = FORMATS[name], []
    for i in range(copies):
        weight = mx.random.normal((n, k), key=mx.random.key(i)) / k**0.5
        if isinstance(form, mx.Dtype):
            arrays = [weight.astype(form)]
            multiply.append(lambda x, w=arrays: ops.linear(x, *w, activations=activations))
        else:
            mode, bits, group = form
            arrays = mx.quantize(weight, group, bits, mode)
            if mode == "affine":
                arrays = [arrays[0], *(a.astype(mx.bfloat16) for a in arrays[1:])]
            multiply.append(
                lambda x, w=arrays, g=group, b=bits, m=mode: ops.quantized_linear(
                    x, *w, group_size=g, bits=b, mode=m, activations=activations
                )
            )
        mx.eval(arrays)
    return multiply, sum(a.nbytes for a in arrays)


def main() -> None:
    """Prints a line for each format and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=8192)
    parser.add_argument("--k", type=int, default=2048)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 32, 512])
    parser.add_argument(
        "--formats", nargs="+", default=[*FORMATS, *ROUNDED], choices=[*FORMATS, *ROUNDED]
    )
    parser.add_argument("--copies", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    made = {name: product(name, args.n, args.k, args.copies) for name in args.formats}
    results = []
    for rows in args.rows:
        x = mx.random.normal((rows, args.k), key=mx.random.key(99))
        mx.eval(x)
        best = dict.fromkeys(made, float("inf"))
        for _ in range(args.repeats):  # in turns, so that other load affects all alike
            for name, (multiply, _) in made.items():
                start = time.perf_counter()
                for one in multiply:
                    mx.eval(one(x))
                best[name] = min(best[name], (time.perf_counter() - start) / len(multiply))
        for name, seconds in best.items():
            size = made[name][1]
            result = {
                "format": name,
                "rows": rows,
                "ms": seconds * 1e3,
                "gb_per_s": size / seconds / 1e9,
                "gflops": 2 * rows * args.n * args.k / seconds / 1e9,
            }
            results.append(result)
            print(
                f"{name:19} {rows:4} rows {result['ms']:8.3f} ms {result['gb_per_s']:7.1f} GB/s "
                f"{result['gflops']:8.1f} GFLOP/s",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps(vars(args) | {"json": None, "results": results}, indent=1))


if __name__ == "__main__":
    main()
