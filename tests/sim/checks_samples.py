"""Checks of the simulator's own sample kernel."""

from __future__ import annotations

import numpy as np

from .abi import Buffer
from .checks import check
from .library import SimLibrary


def _row_sums(library: SimLibrary, dtype: type, threads: int, columns: int, seed: int) -> None:
    x = np.random.default_rng(seed).integers(-8, 9, (3, columns)).astype(dtype)
    out = np.empty(3, np.float32)
    params = np.array([(columns, 0.5)], [("columns", np.int32), ("scale", np.float32)])
    report = library.launch(
        f"row_sum_{np.dtype(dtype).name}",
        {0: Buffer(x, label="in"), 1: Buffer(out, "write", "out")},
        grid=3,
        threads=threads,
        constants={2: params},
        seed=seed,
    )
    assert np.array_equal(out, x.astype(np.float32).sum(axis=1) / 2), (out, x.sum(axis=1) / 2)
    assert report.buffers[0].bytes_read == x.nbytes


@check
def full_rows(library: SimLibrary) -> None:
    _row_sums(library, np.float32, 128, 256, 0)


@check
def short_rows(library: SimLibrary) -> None:
    for seed in range(3):
        _row_sums(library, np.float32, 128, 77, seed)


@check
def half_rows(library: SimLibrary) -> None:
    _row_sums(library, np.float16, 64, 100, 1)
