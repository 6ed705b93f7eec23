"""apply_token_bitmask, bit for bit against NumPy: on the tests' device and on the simulated GPU."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import mlx.core as mx
import numpy as np
import pytest
from support.reference import DTYPES, address, bits, noncontiguous
from support.simd_processes import run_in_process_of
from support.simulated import launches, needs_simulator, simulated

from mlx_paged import build_info, ops

# Sizes of real vocabularies, and of less than a word, of words and a vector, of a word and one.
VOCABULARIES = [32_000, 151_936, 262_144, 50_257, 1, 31, 33, 48, 64, 1025]
NEGATIVE_INFINITY = {mx.float32: 0xFF800000, mx.float16: 0xFC00, mx.bfloat16: 0xFF80}

Device = Callable[[], AbstractContextManager[None]]
on_devices = pytest.mark.parametrize(
    "device",
    [nullcontext, pytest.param(simulated, marks=needs_simulator)],
    ids=["own", "simulated"],
)


def random_logits(rng: np.random.Generator, rows: int, vocab_size: int, dtype: mx.Dtype):
    """Random words: NaN of every payload, infinities, subnormals and both zeros among them."""
    word = np.uint32 if dtype.size == 4 else np.uint16
    words = rng.integers(0, 1 << 8 * dtype.size, (rows, vocab_size), dtype=np.uint64)
    return mx.array(words.astype(word)).view(dtype)


def random_masks(rng: np.random.Generator, masks: int, vocab_size: int) -> np.ndarray:
    """Words of random bits; among them runs of 0 and of -1, which have paths of their own."""
    words = rng.integers(-(2**31), 2**31, (masks, -(-vocab_size // 32)))
    kind = rng.integers(0, 4, words.shape)
    return np.where(kind == 0, 0, np.where(kind == 1, -1, words)).astype(np.int32)


def expected(logits: np.ndarray, masks: np.ndarray, rows: list[int], dtype: mx.Dtype) -> np.ndarray:
    """The masked logits, compared as words (`bits`)."""
    out = logits.copy()
    for mask, row in zip(masks, rows):
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[: logits.shape[1]]
        lowest = NEGATIVE_INFINITY[dtype]
        magnitude = (1 << 8 * dtype.size - 1) - 1
        is_finite = out[row] & magnitude < lowest & magnitude
        out[row, (allowed == 0) & is_finite] = lowest
    return out


def int32(values: object) -> mx.array:
    return mx.array(np.array(values, np.int32))


def apply(device: Device, logits: mx.array, masks: np.ndarray, rows: list[int]) -> mx.array:
    with device():
        out = ops.apply_token_bitmask(logits, mx.array(masks), int32(rows))
        mx.eval(out)
    return out


# --- Against NumPy --------------------------------------------------------------------------------


@on_devices
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_every_size_of_vocabulary(rng, device, dtype, vocab_size) -> None:
    if device is simulated and vocab_size > 2000:
        vocab_size //= 64  # the simulator takes some 10 us a token
    logits, rows = random_logits(rng, 4, vocab_size, dtype), [3, 0, 2]
    masks = random_masks(rng, 3, vocab_size)
    before = bits(logits)
    out = apply(device, logits, masks, rows)
    assert out.dtype == dtype
    np.testing.assert_array_equal(bits(out), expected(before, masks, rows, dtype))
    np.testing.assert_array_equal(bits(logits), before)  # it is still needed


@on_devices
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", [33, 1000, 4096])
def test_logits_that_nothing_else_needs_are_changed_in_place(
    rng, device, dtype, vocab_size
) -> None:
    if ops.has_cuda():
        pytest.skip("with CUDA, looking where an array is moves it to the host's memory")
    made = random_logits(rng, 5, vocab_size, dtype)
    masks, rows = random_masks(rng, 2, vocab_size), [4, 1]
    want = expected(bits(made), masks, rows, dtype)
    logits = mx.concatenate([made[:2], made[2:]])
    mx.eval(logits)
    del made
    place = address(logits)
    with device():
        # Without a handle of the logits, the operation is their only owner.
        out = [ops.apply_token_bitmask(logits, mx.array(masks), int32(rows))]
        del logits
        mx.eval(out)
    assert address(out[0]) == place
    np.testing.assert_array_equal(bits(out[0]), want)


@on_devices
def test_a_mask_on_a_mask_on_what_a_graph_computes(rng, device) -> None:
    """Each of several masks in one graph passes its buffer on to the next."""
    logits, masks = mx.array(rng.standard_normal((6, 100)).astype(np.float32)), []
    with device():
        out = logits * 2
        for _ in range(3):
            masks.append(random_masks(rng, 6, 100))
            out = ops.apply_token_bitmask(out, mx.array(masks[-1]), int32([5, 4, 3, 2, 1, 0]))
        mx.eval(out)
    want = bits(logits * 2)
    for mask in masks:
        want = expected(want, mask, [5, 4, 3, 2, 1, 0], mx.float32)
    np.testing.assert_array_equal(bits(out), want)


@on_devices
@pytest.mark.parametrize("layout", ["transposed", "strided", "offset"])
def test_arrays_that_are_not_dense(rng, device, layout) -> None:
    logits = random_logits(rng, 4, 130, mx.float16)
    masks, rows = random_masks(rng, 3, 130), [2, 3, 0]
    want = expected(bits(logits), masks, rows, mx.float16)
    np.testing.assert_array_equal(
        bits(apply(device, noncontiguous(logits)[layout], masks, rows)), want
    )
    with device():
        spread = mx.array(np.repeat(masks, 2, axis=1))[:, ::2]
        apart = mx.array(np.repeat(np.array(rows, np.int32), 3))[::3]
        out = ops.apply_token_bitmask(logits, spread, apart)
        mx.eval(out)
    np.testing.assert_array_equal(bits(out), want)


@on_devices
def test_rows_of_a_larger_array_leave_the_others_alone(rng, device) -> None:
    whole = random_logits(rng, 6, 70, mx.float32)
    before = bits(whole)
    masks = random_masks(rng, 1, 70)
    out = apply(device, whole[2:4], masks, [1])
    np.testing.assert_array_equal(bits(out), expected(before[2:4], masks, [1], mx.float32))
    np.testing.assert_array_equal(bits(whole), before)


@on_devices
@pytest.mark.parametrize("dtype", [np.int32, np.uint32])
def test_the_last_word_may_have_bits_past_the_vocabulary(device, dtype) -> None:
    logits = mx.zeros((1, 33))
    masks = np.array([[1 << 31, 0xFFFFFFFE]], np.uint32).view(dtype)
    out = apply(device, logits, masks, [0])
    assert np.flatnonzero(np.array(out)[0] == 0).tolist() == [31]
    masks = np.array([[0, 1]], np.uint32).view(dtype)
    assert np.flatnonzero(np.array(apply(device, logits, masks, [0]))[0] == 0).tolist() == [32]


@on_devices
def test_no_masks_are_nothing_to_do(device) -> None:
    logits = mx.zeros((3, 33))
    place = address(logits)
    assert address(apply(device, logits, np.zeros((0, 2), np.int32), [])) == place
    out = apply(device, mx.zeros((0, 33)), np.zeros((0, 2), np.int32), [])
    assert out.shape == (0, 33)
    if device is simulated:
        assert launches() == []


@on_devices
def test_more_rows_than_a_threadgroup_has_threads(rng, device) -> None:
    logits = random_logits(rng, 300, 40, mx.bfloat16)
    rows = rng.permutation(300)[:290].tolist()
    masks = random_masks(rng, 290, 40)
    want = expected(bits(logits), masks, rows, mx.bfloat16)
    np.testing.assert_array_equal(bits(apply(device, logits, masks, rows)), want)


@pytest.mark.parametrize("simd", [pytest.param("avx2", marks=pytest.mark.long), "baseline"])
def test_other_instruction_sets_and_threads_in_a_process(simd) -> None:
    run_in_process_of(simd, 3, [__file__], "own and (vocabulary or in_place) or asked")


def test_the_instruction_set_is_the_one_that_was_asked_for() -> None:
    assert build_info()["simd"] == os.environ.get("EXPECTED_SIMD", build_info()["simd"])


# --- The simulated GPU ----------------------------------------------------------------------------


@needs_simulator
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_each_logit_is_moved_at_most_once(rng, dtype) -> None:
    logits = random_logits(rng, 4, 2000, dtype)
    masks = np.zeros((2, 63), np.int32)
    apply(simulated, logits, masks, [1, 2])
    (copied,) = launches()
    assert copied["kernel"] == f"apply_token_bitmask_{8 * dtype.size}"
    assert copied["traffic"][3] == (0, logits.nbytes)
    words = bits(logits)[1:3].astype(np.int64)
    lowest = NEGATIVE_INFINITY[dtype]
    num_finite = np.sum(
        words & lowest - (1 << 8 * dtype.size - 1) < lowest - (1 << 8 * dtype.size - 1)
    )
    held = [mx.array(logits)]
    mx.eval(held)
    with simulated():
        out = ops.apply_token_bitmask(held.pop(), mx.array(masks), int32([1, 2]))
        mx.eval(out)
    (in_place,) = launches()
    # Only what is forbidden is written, and what is not finite stays.
    assert in_place["traffic"][3] == (2 * 2000 * dtype.size, num_finite * dtype.size)
    assert in_place["grid"][1] == 2 and copied["grid"][1] == 4


# --- Refusals -------------------------------------------------------------------------------------

LOGITS, MASKS, ROWS = mx.zeros((3, 33)), mx.zeros((2, 2), mx.int32), mx.zeros((2,), mx.int32)
REFUSALS: dict[str, tuple[dict[str, mx.array], str]] = {
    "logits' rank": ({"logits": mx.zeros(33)}, "logits must be of shape (*,*) but got (33)"),
    "logits' dtype": (
        {"logits": mx.zeros((3, 33), mx.int32)},
        "logits must be float32, float16 or bfloat16 but got int32",
    ),
    "vocab_size": ({"logits": mx.zeros((3, 0))}, "vocab_size must be at least 1 but got 0"),
    "rows' rank": ({"rows": MASKS}, "rows must be of shape (*) but got (2,2)"),
    "rows' dtype": ({"rows": mx.zeros(2)}, "rows must be int32 but got float32"),
    "more masks than rows": (
        {"rows": mx.zeros(4, mx.int32)},
        "the number of rows must be at most 3 (those of logits) but got 4",
    ),
    "number of masks": (
        {"rows": mx.zeros(1, mx.int32)},
        "bitmask must be of shape (1,2) but got (2,2)",
    ),
    "words of a mask": (
        {"bitmask": mx.zeros((2, 1), mx.int32)},
        "bitmask must be of shape (2,2) but got (2,1)",
    ),
    "bitmask's dtype": (
        {"bitmask": mx.zeros((2, 2), mx.bool_)},
        "bitmask must be int32 or uint32 but got bool",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name) -> None:
    changed, message = REFUSALS[name]
    arguments = {"logits": LOGITS, "bitmask": MASKS, "rows": ROWS, **changed}
    with pytest.raises(ValueError, match="^" + re.escape(f"[apply_token_bitmask] {message}") + "$"):
        ops.apply_token_bitmask(**arguments)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([0, 3], "rows[1] must be in [0, 3) but got 3"),
        ([-1, 0], "rows[0] must be in [0, 3) but got -1"),
        ([2, 2], "rows[1] must be unique but row 2 appears twice"),
    ],
)
@on_devices
def test_check_mode_names_the_row(monkeypatch, device, rows, message) -> None:
    monkeypatch.setenv("MLX_PAGED_CHECK", "1")
    with device(), pytest.raises(IndexError, match=re.escape(f"[apply_token_bitmask] {message}")):
        mx.eval(ops.apply_token_bitmask(LOGITS, MASKS, int32(rows)))
    right = apply(device, LOGITS, np.zeros((2, 2), np.int32), [2, 0])
    assert np.isneginf(np.array(right)).all(axis=1).tolist() == [True, False, True]
