"""edit_logits and take_rows, bit for bit: on the tests' device and on the simulated GPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import mlx.core as mx
import numpy as np
import pytest
from support.simulated import launches, needs_simulator, simulated

from mlx_paged import ops, plain_ops

Device = Callable[[], AbstractContextManager[None]]
on_devices = pytest.mark.parametrize(
    "device",
    [nullcontext, pytest.param(simulated, marks=needs_simulator)],
    ids=["own", "simulated"],
)
VOCAB_SIZE = 1000


def edits_of(rng: np.random.Generator, num_rows: int) -> dict[str, np.ndarray]:
    """Random edits of each second row; newest tokens are in flight, known, new and repeated."""
    rows, factors, entries, values, newest = [], [], [], [], []
    for row in range(0, num_rows, 2):
        begin = sum(map(len, entries))
        seen = rng.permutation(VOCAB_SIZE)[: rng.choice([0, 3, 300])]
        newest.append(int(rng.choice(seen)) if len(seen) and row % 4 else int(rng.integers(1000)))
        biased = rng.permutation(VOCAB_SIZE)[: rng.choice([0, 5, 400])]
        banned = np.concatenate([biased[:2], rng.integers(0, VOCAB_SIZE, 3)])
        after = rng.choice([-1, newest[-1], 7], len(biased) + len(banned))
        entries.append(np.stack([np.concatenate([biased, banned]), after], axis=1))
        entries.append(np.stack([seen, rng.integers(0, 4, len(seen))], axis=1))
        values.append(rng.normal(0, 3, len(biased)))
        values.append(np.full(len(banned), -np.inf))
        values.append(np.zeros(len(seen)))
        middle = begin + len(after)
        source = len(newest) - 1 if row % 6 else -1
        rows.append((row, source, begin, middle, middle + len(seen)))
        factors.append((rng.choice([1, 1.3, 0.7]), rng.choice([0, 0.4]), rng.choice([0, 0.37])))
    return {
        "rows": np.array(rows, np.int32),
        "factors": np.array(factors, np.float32),
        "entries": np.concatenate(entries).astype(np.int32),
        "values": np.concatenate(values).astype(np.float32),
        "newest": np.array(newest, np.int32),
    }


def expected_of(logits: np.ndarray, edits: dict[str, np.ndarray]) -> np.ndarray:
    """The edited logits, one by one in float32."""
    out = logits.copy()
    for (row, source, begin, middle, end), factors in zip(edits["rows"], edits["factors"]):
        last = edits["newest"][source] if source >= 0 else -1
        for i in range(begin, middle):
            token, after = edits["entries"][i]
            if after in (-1, last):
                out[row, token] += edits["values"][i]
        counts = {int(token): int(count) for token, count in edits["entries"][middle:end]}
        if last >= 0:
            counts[int(last)] = counts.get(int(last), 0) + 1
        repetition, presence, frequency = factors
        for token, count in counts.items():
            logit = out[row, token]
            logit = logit / repetition if logit > 0 else logit * repetition
            out[row, token] = (logit - frequency * np.float32(count)) - presence * (count > 0)
    return out


@on_devices
@pytest.mark.parametrize("num_rows", [1, 5, 40])
def test_edits_in_place_and_in_a_copy(rng, device, num_rows) -> None:
    numbers = rng.normal(0, 5, (num_rows, VOCAB_SIZE)).astype(np.float32)
    numbers[:, ::50] = 0
    edits = edits_of(rng, num_rows)
    arguments = {name: mx.array(a) for name, a in edits.items()}
    logits = mx.array(numbers)
    mx.eval(logits, arguments)
    with device():
        copied = ops.edit_logits(logits, **arguments)
        in_place = ops.edit_logits(logits + 0, **arguments)
        mx.eval(copied, in_place)
    expected = expected_of(numbers, edits)
    np.testing.assert_array_equal(np.array(copied), expected)
    np.testing.assert_array_equal(np.array(in_place), expected)
    np.testing.assert_array_equal(np.array(logits), numbers)
    np.testing.assert_array_equal(np.array(plain_ops.edit_logits(logits, **arguments)), expected)


@on_devices
def test_values_that_are_not_finite_stay_visible(device) -> None:
    logits = mx.array([[np.nan, np.inf, -np.inf, 1.0]])
    rows, factors = mx.array([[0, -1, 0, 3, 7]], mx.int32), mx.array([[1.0, 0.0, 0.0]])
    entries = mx.array([[0, -1], [1, -1], [3, -1], *([i, 1] for i in range(4))], mx.int32)
    values, newest = mx.array([-np.inf] * 3 + [0.0] * 4), mx.zeros(1, mx.int32)
    with device():
        out = ops.edit_logits(logits, rows, factors, entries, values, newest)
        mx.eval(out)
    np.testing.assert_array_equal(np.array(out), [[np.nan, np.nan, -np.inf, -np.inf]])


@needs_simulator
def test_one_launch_in_place() -> None:
    edits = {name: mx.array(a) for name, a in edits_of(np.random.default_rng(0), 4).items()}
    held = [mx.zeros((4, VOCAB_SIZE)) + 1]
    mx.eval(held, edits)
    with simulated():
        mx.eval(ops.edit_logits(held[0], **edits))
        copied = [launch["kernel"] for launch in launches()]
        out = [ops.edit_logits(held.pop(), **edits)]
        mx.eval(out)
    assert copied == ["copy_strided_32", "edit_logits"]
    assert [launch["kernel"] for launch in launches()] == ["edit_logits"]


@on_devices
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16, mx.int32], ids=str)
def test_rows_and_elements(rng, device, dtype) -> None:
    a = mx.array(rng.integers(-99, 99, (5, 333))).astype(dtype)
    rows = mx.array([4, 0, 0, 2], mx.int32)
    elements = mx.array(rng.integers(0, 333, (5, 21)).astype(np.uint32))
    one, strided = a[:, 0], a[:, ::3]
    mx.eval(a, rows, elements)
    with device():
        found = [
            ops.take_rows(a, rows),
            ops.take_rows(a.reshape(5, 9, 37), rows),
            ops.take_rows(one, rows),
            ops.take_rows(a, elements),
            ops.take_rows(strided, elements[:, ::2] % 111),
        ]
        mx.eval(found)
    expected = [
        a[rows], a.reshape(5, 9, 37)[rows], one[rows], mx.take_along_axis(a, elements, axis=1),
        mx.take_along_axis(strided, elements[:, ::2] % 111, axis=1),
    ]  # fmt: skip
    for got, want in zip(found, expected, strict=True):
        assert got.dtype == dtype and mx.array_equal(got, want)


@on_devices
def test_nothing_to_take_or_edit(device) -> None:
    with device():
        assert ops.take_rows(mx.zeros((3, 4)), mx.zeros(0, mx.int32)).shape == (0, 4)
        edits = (mx.zeros((0, 5), mx.int32), mx.zeros((0, 3)), mx.zeros((1, 2), mx.int32))
        out = ops.edit_logits(mx.ones((2, 3)), *edits, mx.zeros(1), mx.zeros(1, mx.int32))
        mx.eval(ops.take_rows(mx.zeros((3, 4)), mx.zeros(0, mx.int32)), out)
    assert mx.array_equal(out, mx.ones((2, 3)))


# --- Refusals -------------------------------------------------------------------------------------

EDITS = {
    "logits": mx.zeros((3, 9)),
    "rows": mx.array([[2, 0, 0, 1, 2]], mx.int32),
    "factors": mx.ones((1, 3)),
    "entries": mx.zeros((2, 2), mx.int32),
    "values": mx.zeros(2),
    "newest": mx.zeros(1, mx.int32),
}


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("logits", mx.zeros((3, 9), mx.float16), "logits must be float32 but got float16"),
        ("rows", mx.zeros((1, 4), mx.int32), "rows must be of shape (*,5) but got (1,4)"),
        ("factors", mx.zeros((2, 3)), "factors must be of shape (1,3) but got (2,3)"),
        ("entries", mx.zeros((0, 2), mx.int32),
         "the number of entries must be at least 1 but got 0"),
        ("values", mx.zeros(3), "values must be of shape (2) but got (3)"),
        ("newest", mx.zeros(0, mx.int32),
         "the number of newest tokens must be at least 1 but got 0"),
    ],
)  # fmt: skip
def test_refused_edits(name, array, message) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(f"[edit_logits] {message}") + "$"):
        ops.edit_logits(**{**EDITS, name: array})


@pytest.mark.parametrize(
    ("a", "ids", "message"),
    [
        (mx.zeros((3, 2)), mx.zeros(2), "ids must be int32 or uint32 but got float32"),
        (mx.zeros((3, 2), mx.int64), mx.zeros(2, mx.int32),
         "the dtype of a must be of 16 or 32 bits but got int64"),
        (mx.zeros((3, 2)), mx.zeros((2, 1), mx.int32), "ids must be of shape (3,*) but got (2,1)"),
        (mx.zeros((0, 2)), mx.zeros(2, mx.int32),
         "the number of rows must be at least 1 but got 0"),
    ],
)  # fmt: skip
def test_refused_rows(a, ids, message) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(f"[take_rows] {message}") + "$"):
        ops.take_rows(a, ids)


@on_devices
@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("rows", [[3, 0, 0, 1, 2]], "a row must be in [0, 3) but got 3"),
        ("rows", [[0, 1, 0, 1, 2]], "the index of a newest token must be in [0, 1) but got 1"),
        ("rows", [[0, 0, 0, 1, 3]], "the index of an entry must be in [0, 2) but got 2"),
        ("entries", [[0, 0], [9, 0]], "a token must be in [0, 9) but got 9"),
        ("newest", [9], "a newest token must be in [0, 9) but got 9"),
    ],
)
def test_check_mode_names_an_edit_out_of_range(monkeypatch, device, name, array, message) -> None:
    monkeypatch.setenv("MLX_PAGED_CHECK", "1")
    with device(), pytest.raises(IndexError, match=re.escape(f"[edit_logits] {message}")):
        mx.eval(ops.edit_logits(**{**EDITS, name: mx.array(array, mx.int32)}))
    with device():
        mx.eval(ops.edit_logits(**EDITS))


@on_devices
@pytest.mark.parametrize("place", [-1, 3])
def test_check_mode_names_a_row_out_of_range(monkeypatch, device, place) -> None:
    monkeypatch.setenv("MLX_PAGED_CHECK", "1")
    message = f"[take_rows] ids must be in [0, 3) but got {place}"
    with device(), pytest.raises(IndexError, match=re.escape(message)):
        mx.eval(ops.take_rows(mx.zeros((3, 4)), mx.array([0, place], mx.int32)))
