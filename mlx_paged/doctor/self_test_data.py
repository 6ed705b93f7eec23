"""Random data of the self-test, and the comparison with NumPy."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlx_paged.doctor.self_test import TOLERANCE, WrongResult

BLOCK_SIZE, KV_HEADS, HEAD_DIM = 16, 2, 64


class Data:
    """Arrays of one dtype, the same on every run."""

    def __init__(self, dtype: str) -> None:
        self.name = dtype
        self.dtype: mx.Dtype = getattr(mx, dtype)
        self._rng = np.random.default_rng(0)

    def normal(self, *shape: int) -> mx.array:
        """Normally distributed values, rounded to the dtype."""
        return mx.array(self._rng.standard_normal(shape).astype(np.float32)).astype(self.dtype)

    def pool(self, tables: Sequence[Sequence[int]], lens: Sequence[int], blocks: int) -> mx.array:
        """``[blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM]`` with the sequences' tokens; the rest NaN."""
        pool = np.full((blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM), np.nan, np.float32)
        for table, length in zip(tables, lens):
            for p in range(length):
                token = self._rng.standard_normal((KV_HEADS, HEAD_DIM))
                pool[table[p // BLOCK_SIZE], p % BLOCK_SIZE] = token
        return mx.array(pool).astype(self.dtype)

    def check(self, actual: mx.array, expected: np.ndarray, what: str = "result") -> None:
        """Compares row by row, by the dtype's tolerance.

        Raises:
            WrongResult: another shape, or a row that is too far off.
        """
        if tuple(actual.shape) != expected.shape:
            raise WrongResult(f"{what}: expected shape {expected.shape} but got {actual.shape}")
        rows = expected.reshape(expected.shape[0], -1)
        error = np.linalg.norm(exact(actual).reshape(rows.shape) - rows, axis=1)
        scale = np.maximum(np.linalg.norm(rows, axis=1), 1e-30)
        relative = np.nan_to_num(error / scale, nan=np.inf)
        worst = int(np.argmax(relative))
        if relative[worst] > TOLERANCE[self.name]:
            raise WrongResult(
                f"{what}: row {worst} is off by {relative[worst]:.1e} of its norm, expected "
                f"at most {TOLERANCE[self.name]:.0e}"
            )

    def same(self, actual: mx.array, expected: np.ndarray, what: str) -> None:
        """Compares bit by bit (NaN equals NaN).

        Raises:
            WrongResult: anything differs.
        """
        found = exact(actual)
        if found.shape != expected.shape:
            raise WrongResult(f"{what}: expected shape {expected.shape} but got {found.shape}")
        wrong = ~((found == expected) | (np.isnan(found) & np.isnan(expected)))
        if wrong.any():
            place = tuple(int(i) for i in np.argwhere(wrong)[0])
            raise WrongResult(
                f"{what}: expected {expected[place]} at {place} but got {found[place]}; "
                f"{int(wrong.sum())} of {wrong.size} values differ"
            )


def exact(a: mx.array) -> np.ndarray:
    """A float64 copy; every value of the three dtypes is exact in it."""
    return np.array(a.astype(mx.float32)).astype(np.float64)
