"""Products of few rows with quantized weights on an NVIDIA GPU, against MLX's own.

python bench/cuda_quantized.py            # 4 bits in groups of 64: a minute
python bench/cuda_quantized.py --bits 8

Measures kernel time like bench/cuda_kernels.py, and rotates through weights so that no cache holds
them. Each product is first compared with MLX's. Targets for large 4-bit weights: the weights' bytes
at 60% of 4.2 TB/s for 8 rows, and at 50% for 32.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from itertools import cycle

from cuda_kernels import PAST_CACHE, REPEAT, time_calls

# isort: split
import mlx.core as mx
from harness import print_table, save

from mlx_paged import ops

ROUNDS = 3
ROWS = (1, 8, 16, 32, 64)
SHAPES = ((4096, 4096), (4096, 14336), (14336, 4096), (4096, 128256))  # (k, n) of Llama-3.1-8B
BYTES_PER_SECOND = 4.2e12
ASKED = {8: 0.6, 32: 0.5}  # for large weights, by number of rows
LARGE = 4096 * 14336

Multiply = Callable[..., mx.array]


def seconds_of(
    multiply: Multiply, x: mx.array, weights: list[list[mx.array]], rounds: int
) -> float:
    turn = cycle(weights)

    def repeat() -> None:
        before = x
        outs = []
        for _ in range(REPEAT):
            outs.append(multiply(before, *next(turn)))
            before = mx.depends([x], outs[-1:])[0]  # one after another
        mx.eval(outs)

    return statistics.median(time_calls(repeat).kernels for _ in range(rounds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    options = parser.parse_args()
    form = {"group_size": options.group_size, "bits": options.bits}
    mx.set_default_device(mx.gpu)

    def ours(x: mx.array, w: mx.array, scales: mx.array, biases: mx.array) -> mx.array:
        return ops.quantized_linear(x, w, scales, biases, **form)

    def mlx(x: mx.array, w: mx.array, scales: mx.array, biases: mx.array) -> mx.array:
        return mx.quantized_matmul(x, w, scales, biases, **form)

    results, missed = [], []
    for k, n in SHAPES:
        made = [list(mx.quantize(mx.random.normal((n, k), dtype=mx.bfloat16), **form))]
        mx.eval(made)
        size = sum(a.nbytes for a in made[0])
        made += [[a + 0 for a in made[0]] for _ in range(PAST_CACHE // size)]
        mx.eval(made)
        rows = []
        for num_rows in options.rows:
            x = mx.random.normal((num_rows, k), dtype=mx.bfloat16)
            mx.eval(x)
            want, got = mlx(x, *made[0]), ours(x, *made[0])
            difference = (mx.abs(got - want).max() / mx.abs(want).max()).item()
            assert difference < 0.02, f"{num_rows} x {k} x {n}: {difference} from MLX's"
            seconds, theirs = seconds_of(ours, x, made, ROUNDS), seconds_of(mlx, x, made, 1)
            share = size / seconds / BYTES_PER_SECOND
            if options.bits == 4 and n * k >= LARGE and share < ASKED.get(num_rows, 0):
                missed.append(f"{num_rows} rows, {k} -> {n}: {share:.0%}")
            results.append({
                "rows": num_rows, "k": k, "n": n, **form,
                "seconds": seconds, "mlx_seconds": theirs, "share_of_bandwidth": share,
            })  # fmt: skip
            rows.append([
                str(num_rows), f"{1e6 * seconds:.1f} us", f"{size / seconds / 1e9:.0f} GB/s",
                f"{share:.0%}", f"{1e6 * theirs:.1f} us",
            ])  # fmt: skip
        print(f"\n{k} -> {n}, {size / 1e6:.1f} MB")
        print_table(["rows", "kernels", "weights read", "of 4.2 TB/s", "MLX"], rows)
        del made
    save("quantized-gpu", {"benchmark": "cuda_quantized", "results": results})
    if missed:
        raise SystemExit(f"failed: slower than asked: {'; '.join(missed)}")
    print("passed: as fast as asked")


if __name__ == "__main__":
    main()
