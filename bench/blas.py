"""MLX's float32 matrix products with and without the BLAS that mlx_paged preloads.

python bench/blas.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

from harness import median_seconds, print_table, save

# (m, n, k) of x [m, k] @ w [n, k].T
SHAPES = [(1, 1024, 1024), (8, 1024, 1024), (32, 4096, 256), (512, 512, 512)]


def measure() -> list[float]:
    """Measures FLOP/s for each of SHAPES in this process."""
    import mlx_paged.extension  # noqa: F401

    # isort: split
    import mlx.core as mx

    mx.set_default_device(mx.cpu)
    found = []
    for m, n, k in SHAPES:
        x, w = mx.random.normal((m, k)), mx.random.normal((n, k))
        mx.eval(x, w)
        found.append(2 * m * n * k / median_seconds(lambda: mx.eval(x @ w.T), repeat=15))  # noqa: B023
    return found


def main() -> None:
    if "--worker" in sys.argv:
        print(json.dumps(measure()))
        return
    by_blas = {}
    for blas in ("off", "auto"):
        done = subprocess.run(
            [sys.executable, __file__, "--worker"],
            env={**os.environ, "MLX_PAGED_BLAS": blas},
            capture_output=True,
            text=True,
            check=True,
        )
        by_blas[blas] = json.loads(done.stdout)
    rows, results = [], []
    for shape, off, auto in zip(SHAPES, by_blas["off"], by_blas["auto"]):
        results.append(
            {"m_n_k": shape, "mlx_flops": off, "openblas_flops": auto, "ratio": auto / off}
        )
        figures = [f"{off / 1e9:.1f}", f"{auto / 1e9:.1f}", f"{auto / off:.0f}x"]
        rows.append([" x ".join(map(str, shape)), *figures])
    print_table(["m x n x k", "MLX's own GFLOP/s", "with OpenBLAS", "ratio"], rows)
    print("\n", save("blas", {"results": results}))


if __name__ == "__main__":
    main()
