"""sampling_thresholds against float64, token by token: on the CPU and on the simulated GPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import mlx.core as mx
import numpy as np
import pytest
from support.reference import DTYPES, to_numpy
from support.simulated import launches, needs_simulator, simulated

from mlx_paged import ops, plain_ops

Device = Callable[[], AbstractContextManager[None]]
DEVICES = pytest.mark.parametrize(
    "device", [nullcontext, pytest.param(simulated, marks=needs_simulator)], ids=["cpu", "gpu"]
)
VOCAB_SIZE = 4099  # a multiple of nothing


def columns_of(
    logits: mx.array, temperature, min_p, top_k, top_p
) -> tuple[mx.array, mx.array, mx.array, mx.array, mx.array]:
    """The op's settings for each row of `logits`; shorter lists start again."""
    num_rows = logits.shape[0]
    with np.errstate(divide="ignore"):
        floors = np.log(np.resize(np.float32(min_p), num_rows))
    return (
        logits.max(axis=-1).astype(mx.float32),
        mx.array(np.resize(np.float32(temperature), num_rows)),
        mx.array(floors),
        mx.array(np.resize(np.int32(top_k), num_rows)),
        mx.array(np.resize(np.float32(top_p), num_rows)),
    )


def expected(scaled: np.ndarray, floor: float, top_k: int, top_p: float) -> float:
    """The smallest logit of a row that stays, in float64, from distinct values and their counts."""
    values, counts = np.unique(scaled[scaled >= floor].astype(np.float64), return_counts=True)
    values, counts = values[::-1], counts[::-1]
    if not len(values):
        return floor
    least = floor
    if 0 < top_k < len(scaled) and counts.sum() >= top_k:
        kept = np.cumsum(counts) - counts < top_k
        values, counts = values[kept], counts[kept]
        least = values[-1]
    if top_p < 1:
        mass = np.exp(values) * counts
        least = values[(np.cumsum(mass) - mass < top_p * mass.sum()) & (mass > 0)][-1]
    return float(least)


def check(device: Device, logits: mx.array, columns) -> None:
    with device():
        found = ops.sampling_thresholds(logits, *columns)
        mx.eval(found)
    largest, temperature, floors, top_k, top_p = map(np.array, columns)
    scaled = (to_numpy(logits).astype(np.float32) - largest[:, None]) / temperature[:, None]
    wanted = [expected(*row) for row in zip(scaled, floors, top_k, top_p, strict=True)]
    np.testing.assert_array_equal(np.array(found), np.float32(wanted))


@pytest.mark.one_in(2)
@DEVICES
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_combination(rng, device: Device, dtype: mx.Dtype) -> None:
    """Peaked and flat rows, a third of them masked."""
    settings = [
        (min_p, top_k, top_p)
        for min_p in (0, 0.01)
        for top_k in (0, 1, 50, 4000, VOCAB_SIZE)
        for top_p in (1.0, 1e-30, 0.3, 0.95)
    ]
    scales = np.resize([0.05, 1.0, 4.0, 30.0, 0.001], len(settings))[:, None]
    values = rng.normal(size=(len(settings), VOCAB_SIZE)) * scales
    values[:, ::3] = -np.inf
    logits = mx.array(values.astype(np.float32)).astype(dtype)
    min_p, top_k, top_p = zip(*settings, strict=True)
    check(device, logits, columns_of(logits, [0.7, 1.0, 1.9], min_p, top_k, top_p))


@DEVICES
def test_large_vocabularies(rng, device: Device) -> None:
    """Edges that a float32 sum would lose, in whole chunks of 16 bytes."""
    logits = mx.array((rng.normal(size=(4, 60_000)) * 2).astype(np.float32)).astype(mx.bfloat16)
    logits[3] = 0
    check(device, logits, columns_of(logits, 1, 0, [0, 3000, 0, 0], [0.9, 0.8, 0.9999, 0.5]))


@DEVICES
def test_an_edge_belongs_to_those_above_it(device: Device) -> None:
    """1 and two halves: those above the halves have exactly half."""
    values = np.full((3, 37), -np.inf, np.float32)
    values[:, :3] = [0.0, -np.log(np.float32(2)), -np.log(np.float32(2))]
    logits = mx.array(values)
    with device():
        found = ops.sampling_thresholds(
            logits, *columns_of(logits, 1, [0, 0, 1.0], [0, 2, 0], [0.5, 0.5001, 0.9])
        )
    np.testing.assert_array_equal(np.array(found), [0, values[0, 1], 0])


@DEVICES
def test_rows_that_are_not_finite_end(device: Device) -> None:
    values = np.zeros((4, 40), np.float32)
    values[0], values[1, 5:], values[2], values[3, 7] = np.nan, np.nan, -np.inf, np.inf
    logits = mx.array(values)
    columns = mx.array([np.nan, 0, -np.inf, np.inf]), mx.ones(4), mx.full((4,), -1.0)
    with device():
        for top_k, top_p in ((0, 0.5), (3, 1.0), (39, 0.5)):
            found = ops.sampling_thresholds(
                logits, *columns, mx.full((4,), top_k), mx.full((4,), top_p)
            )
            last = 0.0 if top_k < 39 or top_p < 1 else -1.0
            assert np.array(found).tolist() == [-1.0, last, -1.0, -1.0], (top_k, top_p)


@DEVICES
def test_a_row_is_the_same_in_every_batch(rng, device: Device) -> None:
    logits = mx.array(rng.normal(size=(5, 2048)).astype(np.float32)).astype(mx.float16)
    columns = columns_of(logits, 0.8, [0, 0.02], [0, 40, 3], [0.9, 0.99])
    with device():
        together = np.array(ops.sampling_thresholds(logits, *columns))
        for row in range(5):
            part = slice(row, row + 1)
            alone = ops.sampling_thresholds(logits[part], *(c[part] for c in columns))
            assert np.array(alone).tolist() == [together[row]]


def test_plain_operations_agree(rng) -> None:
    logits = mx.array(rng.normal(size=(12, 3001)).astype(np.float32) * 3).astype(mx.float16)
    columns = columns_of(logits, [0.5, 1], [0, 0, 0.1], [0, 7, 3001, 2000], [1, 0.9, 0.5])
    found = plain_ops.sampling_thresholds(logits, *columns)
    np.testing.assert_array_equal(
        np.array(found), np.array(ops.sampling_thresholds(logits, *columns))
    )


@needs_simulator
def test_each_row_is_a_threadgroup() -> None:
    logits = mx.zeros((3, 1000), mx.bfloat16)
    with simulated():
        mx.eval(ops.sampling_thresholds(logits, *columns_of(logits, 1, 0, 5, 1)))
        [launch] = launches()
        assert launch["kernel"] == "sampling_thresholds_bfloat16"
        assert launch["grid"][0] == 3
        assert ops.sampling_thresholds(logits[:0], *columns_of(logits[:0], 1, 0, 5, 1)).size == 0
