"""The oracle agrees with MLX's own operations, which are an independent implementation."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_paged import reference

HEADS, KV_HEADS, DIM, CONTEXT, ROWS = 6, 2, 16, 21, 5


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def close(found: np.ndarray, expected: mx.array) -> None:
    assert reference.relative_error(found, np.array(expected).astype(np.float64)) < 1e-5


def visible(window: int | None, bounds: np.ndarray | None) -> np.ndarray:
    """``[ROWS, CONTEXT]``, one pair of positions after another."""
    seen = np.zeros((ROWS, CONTEXT), bool)
    for row in range(ROWS):
        position = CONTEXT - ROWS + row
        for token in range(CONTEXT):
            seen[row, token] = token <= position and (window is None or position - token < window)
            if bounds is not None and bounds[0, row] <= token <= bounds[1, row]:
                seen[row, token] = True
    return seen


SPANS = np.stack([np.arange(ROWS) + CONTEXT - ROWS] * 2)
SPANS[:, 1:4] = [[CONTEXT - ROWS - 9] * 3, [CONTEXT - ROWS + 3] * 3]


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("bounds", [None, SPANS])
def test_attention(rng, window, has_sinks: bool, bounds) -> None:
    queries = rng.standard_normal((ROWS, HEADS, DIM))
    keys, values = (rng.standard_normal((CONTEXT, KV_HEADS, DIM)) for _ in "kv")
    sinks = rng.standard_normal(HEADS) if has_sinks else None
    seen = visible(window, bounds)
    expected = mx.fast.scaled_dot_product_attention(
        *(mx.array(a.astype(np.float32))[None].swapaxes(1, 2) for a in (queries, keys, values)),
        scale=0.3,
        mask=mx.array(seen),
        sinks=None if sinks is None else mx.array(sinks.astype(np.float32)),
    )
    keys[~seen.any(axis=0)], values[~seen.any(axis=0)] = np.nan, np.nan
    found = reference.attention(
        queries, keys, values, scale=0.3, window=window, sinks=sinks, bounds=bounds
    )
    close(found, expected[0].swapaxes(0, 1))


def test_a_soft_cap_bounds_the_scores(rng) -> None:
    queries = rng.standard_normal((1, 1, DIM)) * 1e6
    keys, values = (rng.standard_normal((2, 1, DIM)) for _ in "kv")
    found = reference.attention(queries, keys, values, scale=1.0, softcap=2.0)
    scores = 2.0 * np.sign(keys[:, 0] @ queries[0, 0])
    weights = np.exp(scores) / np.exp(scores).sum()
    np.testing.assert_allclose(found[0, 0], weights @ values[:, 0], rtol=1e-9)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_alibi_is_an_additive_mask(rng, window, has_sinks: bool) -> None:
    """BLOOM adds slope * token and MPT slope * (token - last token): without sinks all rows of
    numbers that differ by a constant are one, and with sinks a row's own token adds 0."""
    queries = rng.standard_normal((ROWS, HEADS, DIM))
    keys, values = (rng.standard_normal((CONTEXT, KV_HEADS, DIM)) for _ in "kv")
    slopes = 2.0 ** -np.arange(1.0, HEADS + 1)
    sinks = rng.standard_normal(HEADS) if has_sinks else None
    token = np.arange(CONTEXT)
    distance = token - token[-ROWS:, None] if has_sinks else np.tile(token, (ROWS, 1))
    mask = np.where(visible(window, None), slopes[:, None, None] * distance, -np.inf)
    expected = mx.fast.scaled_dot_product_attention(
        *(mx.array(a.astype(np.float32))[None].swapaxes(1, 2) for a in (queries, keys, values)),
        scale=0.3,
        mask=mx.array(mask.astype(np.float32)),
        sinks=None if sinks is None else mx.array(sinks.astype(np.float32)),
    )
    found = reference.attention(
        queries, keys, values, scale=0.3, window=window, sinks=sinks, alibi_slopes=slopes
    )
    close(found, expected[0].swapaxes(0, 1))


def test_a_nan_reaches_the_rows_that_see_it_alone(rng) -> None:
    queries, keys = rng.standard_normal((3, 1, DIM)), rng.standard_normal((3, 1, DIM))
    values = rng.standard_normal((3, 1, DIM))
    values[2] = np.nan
    found = reference.attention(queries, keys, values, scale=1.0)
    assert np.isfinite(found[:2]).all() and np.isnan(found[2]).all()


def test_paged_tokens_are_those_of_their_blocks(rng) -> None:
    """Blocks in any order, and rows of one sequence after those of another."""
    pool = rng.standard_normal((6, 4, KV_HEADS, DIM))
    tables, lens, rows = [[3, 1], [5, 2, 4]], [7, 9], [2, 1]
    queries = rng.standard_normal((3, HEADS, DIM))
    found = reference.paged_attention(queries, pool, pool, tables, lens, rows, scale=0.5)
    first, second = (pool[t].reshape(-1, KV_HEADS, DIM)[:n] for t, n in zip(tables, lens))
    parts = ((queries[:2], first), (queries[2:], second))
    expected = [reference.attention(q, tokens, tokens, scale=0.5) for q, tokens in parts]
    np.testing.assert_array_equal(found, np.concatenate(expected))
    dense = reference.gather_kv(pool, tables, lens, 8)
    np.testing.assert_array_equal(dense[0, :, :7], first.swapaxes(0, 1))
    assert not dense[0, :, 7:].any() and dense.shape == (2, KV_HEADS, 8, DIM)


def test_layers(rng) -> None:
    wide, gate = rng.standard_normal((4, 3, DIM)), rng.standard_normal((4, 3, DIM))
    weight, bias = rng.standard_normal(DIM), rng.standard_normal(DIM)
    x, g, w, b = (mx.array(a.astype(np.float32)) for a in (wide, gate, weight, bias))
    close(reference.rms_norm(wide, weight, 1e-5), mx.fast.rms_norm(x, w, 1e-5))
    close(reference.layer_norm(wide, weight, bias, 1e-5), mx.fast.layer_norm(x, w, b, 1e-5))
    close(reference.silu_mul(gate, wide), nn.silu(g) * x)
    for name, function in (
        ("none", nn.gelu),
        ("tanh", nn.gelu_approx),
        ("fast", nn.gelu_fast_approx),
    ):
        close(reference.gelu(wide, name), function(x))
    matrix = rng.standard_normal((7, DIM))
    close(reference.linear(wide, matrix), x @ mx.array(matrix.astype(np.float32)).T)
    angles = np.arange(4)[:, None, None] * 100.0 ** (-np.arange(DIM // 2) / (DIM // 2))
    turned = mx.fast.rope(
        x.swapaxes(0, 1), DIM, traditional=False, base=100.0, scale=1.0, offset=0
    ).swapaxes(0, 1)
    close(reference.rope(wide, np.cos(angles), np.sin(angles)), turned)


def test_errors_of_rows() -> None:
    expected = np.array([[3.0, 4.0], [0.0, 5.0]])
    actual = expected + np.array([[0.0, 0.5], [0.0, 0.0]])
    np.testing.assert_allclose(reference.relative_errors(actual, expected), [0.1, 0.0])
    assert reference.relative_error(actual, expected) == pytest.approx(0.1)
    assert reference.relative_error(actual * np.nan, expected) == np.inf
    assert reference.relative_error(actual[:1], expected) == np.inf
