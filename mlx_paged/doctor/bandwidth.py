"""Memory bandwidth as a copy gets it: bytes read and written, a second."""

from __future__ import annotations

import os
import threading
from itertools import pairwise

import numpy as np

from mlx_paged.doctor.jobs import fastest

_CPU_BYTES = 128 << 20  # beyond the caches
_GPU_BYTES = 512 << 20
_REPEAT = 7


def cpu_copy() -> float:
    """Of a copy by all CPUs that this process may use."""
    source = np.ones(_CPU_BYTES, dtype=np.uint8)
    target = np.zeros_like(source)
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    bounds = np.linspace(0, _CPU_BYTES, (threads or 1) + 1).astype(int).tolist()

    def copy() -> None:
        workers = [
            threading.Thread(target=np.copyto, args=(target[a:b], source[a:b]))
            for a, b in pairwise(bounds)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    return 2 * _CPU_BYTES / fastest(copy, _REPEAT, seconds=1.0)


def gpu_copy() -> float:
    """Of an elementwise operation of MLX, which reads and writes every byte once."""
    import mlx.core as mx

    with mx.stream(mx.gpu):
        a = mx.ones(_GPU_BYTES // 4)
        mx.eval(a)
        return 2 * _GPU_BYTES / fastest(lambda: mx.eval(a + 1), _REPEAT, seconds=1.0)
