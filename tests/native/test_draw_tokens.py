"""draw_tokens: the tokens of mx.random.categorical, on the tests' device and a simulated GPU."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import numpy as np
import pytest
from support.metal_layer_checks import SILENT_KEY, SILENT_SIZE, SILENT_TOKEN
from support.simd_processes import run_in_process_of
from support.simulated import launches, needs_simulator, simulated

from mlx_paged import ops, plain_ops

DTYPES = [mx.float32, mx.float16, mx.bfloat16]


@dataclass(frozen=True)
class Draw:
    """Arguments of `ops.draw_tokens`."""

    logits: mx.array
    tokens: mx.array
    largest: mx.array
    temperature: mx.array
    keys: mx.array
    thresholds: mx.array

    def rows(self, at: list[int]) -> Draw:
        return Draw(*(a[mx.array(at)] for a in self.arrays))

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        return tuple(getattr(self, name) for name in self.__dataclass_fields__)

    def native(self) -> np.ndarray:
        tokens = ops.draw_tokens(*self.arrays)
        assert tokens.dtype == mx.int32
        return np.array(tokens)

    def by_mlx(self) -> np.ndarray:
        return np.array(plain_ops.draw_tokens(*self.arrays))


def draw_of(
    rng: np.random.Generator, num_rows: int, size: int, dtype: mx.Dtype, *, scale: float = 3.0
) -> Draw:
    """Rows of different settings, a fifth of them greedy."""
    scales = rng.uniform(0, scale, (num_rows, 1))
    logits = mx.array((rng.normal(size=(num_rows, size)) * scales).astype(np.float32)).astype(dtype)
    tokens, largest, _ = plain_ops.greedy_tokens(logits)
    draw = Draw(
        logits,
        tokens,
        largest,
        mx.array(np.resize(np.float32([1.0, 0.3, 0.0, 1.7, 40.0]), num_rows)),
        mx.array(rng.integers(0, 1 << 32, (num_rows, 2), dtype=np.uint64).astype(np.uint32)),
        mx.array(np.resize(np.float32([-np.inf, -8.0, -0.5]), num_rows)),
    )
    mx.eval(draw.arrays)
    return draw


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 2, 3, 31, 32, 33, 50, 257, 1000, 4096, 20_003])
def test_tokens_are_mlxs(rng, dtype: mx.Dtype, size: int) -> None:
    draw = draw_of(rng, 40 if size > 1000 else 200, size, dtype)
    np.testing.assert_array_equal(draw.native(), draw.by_mlx())


@pytest.mark.parametrize("scale", [0.0, 0.02, 30.0])
def test_tokens_of_flat_and_peaked_rows_are_mlxs(rng, scale: float) -> None:
    """Ties in half precision, and rows whose other tokens no noise can make win."""
    draw = draw_of(rng, 200, 3000, mx.bfloat16, scale=scale)
    np.testing.assert_array_equal(draw.native(), draw.by_mlx())


@pytest.mark.parametrize("simd", ["avx2", pytest.param("baseline", marks=pytest.mark.long)])
def test_tokens_in_a_process_of(simd: str) -> None:
    run_in_process_of(simd, 2, [__file__], "are_mlxs")


def test_a_row_does_not_depend_on_its_batch(rng) -> None:
    draw = draw_of(rng, 70, 500, mx.float16)
    together = draw.native()
    for some in ([3], [69, 0], list(range(20, 60))):
        np.testing.assert_array_equal(draw.rows(some).native(), together[some])


def test_logits_may_have_any_strides(rng) -> None:
    draw = draw_of(rng, 20, 300, mx.float32)
    spread = mx.repeat(draw.logits, 2, axis=1)[:, ::2]
    mx.eval(spread)
    np.testing.assert_array_equal(replace(draw, logits=spread).native(), draw.native())


def silent_draw(logits: np.ndarray) -> Draw:
    rows = mx.array(logits.astype(np.float32))
    tokens, largest, _ = plain_ops.greedy_tokens(rows)
    keys = mx.array([SILENT_KEY] * len(logits), mx.uint32)
    ones = mx.ones(len(logits))
    return Draw(rows, tokens, largest, ones, keys, -mx.inf * ones)


def check_noise_of_minus_infinity(native: Any) -> None:
    logits = np.full((3, SILENT_SIZE), -np.inf)
    logits[:, SILENT_TOKEN] = [2.0, 2.0, 2.0]
    logits[1, 7] = -1000.0  # wins against any logit whose noise is -inf
    logits[2, [7, 9]] = -1000.0, -np.inf
    draw = silent_draw(logits)
    np.testing.assert_array_equal(native(draw), [SILENT_TOKEN, 7, 7])
    np.testing.assert_array_equal(draw.by_mlx(), [SILENT_TOKEN, 7, 7])


def test_noise_of_minus_infinity_wins_only_alone() -> None:
    check_noise_of_minus_infinity(Draw.native)


def test_rows_that_are_not_finite_keep_their_token(rng) -> None:
    draw = draw_of(rng, 6, 100, mx.float32)
    logits = np.array(draw.logits)
    logits[0, 5], logits[1, 9], logits[2] = np.nan, np.inf, -np.inf
    rows = mx.array(logits)
    tokens, largest, _ = plain_ops.greedy_tokens(rows)
    broken = replace(draw, logits=rows, tokens=tokens, largest=largest)
    np.testing.assert_array_equal(broken.native()[:3], np.array(tokens)[:3])
    np.testing.assert_array_equal(broken.native()[3:], draw.native()[3:])


def test_no_rows() -> None:
    rows = mx.zeros(0)
    keys = mx.zeros((0, 2), mx.uint32)
    assert (
        ops.draw_tokens(mx.zeros((0, 9)), mx.zeros(0, mx.int32), rows, rows, keys, rows).size == 0
    )


# --- On a GPU -------------------------------------------------------------------------------------


def simulated_tokens(draw: Draw) -> np.ndarray:
    with simulated():
        return draw.native()


@needs_simulator
@pytest.mark.parametrize(
    ("dtype", "size"),
    [(mx.float32, 1), (mx.bfloat16, 37), (mx.float16, 1024), (mx.float32, 2088), (mx.bfloat16, 50)],
    ids=str,
)
def test_a_gpu_draws_the_same_tokens(rng, dtype: mx.Dtype, size: int) -> None:
    draw = draw_of(rng, 11, size, dtype)
    expected = draw.native()
    with simulated():
        np.testing.assert_array_equal(draw.native(), expected)
        drawn, merged = launches()
    assert drawn["kernel"].startswith("draw_tokens") and merged["kernel"] == "merge_draws"
    is_drawn = np.array(draw.temperature) > 0
    assert drawn["traffic"][0] == (draw.logits[0].nbytes * is_drawn.sum(), 0)


@needs_simulator
def test_a_row_alone_has_many_simd_groups_of_a_gpu(rng) -> None:
    """More steps than parts: each SIMD-group takes several."""
    for size in (20_001, 70_000):
        draw = draw_of(rng, 1, size, mx.float32)
        expected = draw.native()
        with simulated():
            np.testing.assert_array_equal(draw.native(), expected)
            drawn, _ = launches()
        groups = drawn["grid"][1] * drawn["threadgroup"][0] // 32
        assert 100 < groups < size / 2 / 32


@needs_simulator
def test_noise_of_minus_infinity_on_a_gpu() -> None:
    check_noise_of_minus_infinity(simulated_tokens)


@needs_simulator
def test_a_row_of_a_gpu_does_not_depend_on_its_batch(rng) -> None:
    draw = draw_of(rng, 300, 96, mx.bfloat16)
    together = simulated_tokens(draw)
    for some in ([3], [299, 0]):
        np.testing.assert_array_equal(simulated_tokens(draw.rows(some)), together[some])


# --- Refusals -------------------------------------------------------------------------------------

REFUSALS: dict[str, tuple[dict[str, mx.array], str]] = {
    "logits' shape": (
        {"logits": mx.zeros(8)}, "logits must be of shape (*,*) but got (8)",
    ),
    "logits' dtype": (
        {"logits": mx.zeros((3, 8), mx.int32)},
        "logits must be float32, float16 or bfloat16 but got int32",
    ),
    "vocabulary": ({"logits": mx.zeros((3, 0))}, "vocab_size must be at least 1 but got 0"),
    "tokens": ({"tokens": mx.zeros(3)}, "tokens must be int32 but got float32"),
    "largest": (
        {"largest": mx.zeros(3, mx.float16)}, "largest must be float32 but got float16",
    ),
    "temperature": (
        {"temperature": mx.ones(2)}, "temperature must be of shape (3) but got (2)",
    ),
    "keys": ({"keys": mx.zeros((3, 2), mx.int32)}, "keys must be uint32 but got int32"),
    "keys' shape": (
        {"keys": mx.zeros(3, mx.uint32)}, "keys must be of shape (3,2) but got (3)",
    ),
    "thresholds": (
        {"thresholds": mx.zeros(3, mx.int32)}, "thresholds must be float32 but got int32",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(rng, name: str) -> None:
    changed, message = REFUSALS[name]
    draw = replace(draw_of(rng, 3, 8, mx.float32), **changed)
    with pytest.raises(ValueError, match="^" + re.escape(f"[draw_tokens] {message}") + "$"):
        ops.draw_tokens(*draw.arrays)
