"""Sampling: the right distribution, and every row's token its own business."""

from __future__ import annotations

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_paged.engine.sampling.sampler import SamplingRow, keys_of, sample

VOCAB_SIZE = 50
GREEDY = SamplingRow(0.0, 0, 0)


def logits_of(num_rows: int, seed: int = 0, scale: float = 2.0) -> mx.array:
    return mx.random.normal((num_rows, VOCAB_SIZE), key=mx.random.key(seed)) * scale


def tokens_of(logits: mx.array, rows: list[SamplingRow]) -> list[int]:
    tokens = sample(logits, rows).tokens
    assert tokens.shape == (len(rows),) and tokens.dtype == mx.int32
    return tokens.tolist()  # type: ignore[return-value]


def test_temperature_zero_is_argmax() -> None:
    logits = logits_of(20)
    expected = np.array(logits).argmax(axis=1).tolist()
    assert tokens_of(logits, [SamplingRow(0.0, seed, 3) for seed in range(20)]) == expected


def test_the_first_of_equal_logits_is_greedy() -> None:
    assert tokens_of(mx.zeros((2, VOCAB_SIZE)), [GREEDY] * 2) == [0, 0]


@pytest.mark.parametrize("temperature", [1e-3, 1e-6, 1e-30, 1e-38, 1e-40, 1e-60])
def test_temperature_near_zero_is_nearly_greedy(temperature: float) -> None:
    # Far enough apart for the smallest temperature here that is not rounded to 0.
    logits = mx.array(np.random.default_rng(0).permuted([range(VOCAB_SIZE)] * 8, axis=1))
    logits = logits.astype(mx.float32)
    rows = [SamplingRow(temperature, seed, 1) for seed in range(8)]
    assert tokens_of(logits, rows) == np.array(logits).argmax(axis=1).tolist()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("counter", ["seed", "position"])
def test_tokens_follow_the_distribution(temperature: float, counter: str) -> None:
    """Chi-square over rows that differ in one counter alone; the seeds are fixed."""
    num_draws, num_tokens = 20_000, 8
    logits = np.random.default_rng(1).normal(size=num_tokens).astype(np.float32)
    rows = [
        SamplingRow(temperature, i, 5) if counter == "seed" else SamplingRow(temperature, 5, i)
        for i in range(num_draws)
    ]
    batch = mx.broadcast_to(mx.array(logits), (num_draws, num_tokens))
    counts = np.bincount(np.array(sample(batch, rows).tokens), minlength=num_tokens)
    weights = np.exp(logits.astype(np.float64) / temperature)
    expected = num_draws * weights / weights.sum()
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 24.3, "the 0.1% point of chi-square with 7 degrees of freedom"
    # The draws of neighbouring counters are independent, too: as many repeats as chance has.
    tokens = np.array(sample(batch, rows).tokens)
    repeats = (tokens[1:] == tokens[:-1]).mean()
    assert abs(repeats - (expected**2).sum() / num_draws**2) < 0.02


@given(st.permutations(range(64)), st.integers(1, 64))
def test_a_row_does_not_depend_on_who_shares_its_batch(order: list[int], size: int) -> None:
    logits = logits_of(64)
    rows = [SamplingRow(0.5 + i % 4 / 4, 100 + i // 3, 7 * i) for i in range(64)]
    alone = _alone_tokens()
    chosen = order[:size]
    assert tokens_of(logits[mx.array(chosen)], [rows[i] for i in chosen]) == [
        alone[i] for i in chosen
    ]


_ALONE: list[int] = []


def _alone_tokens() -> list[int]:
    """The token of each of the 64 rows above, sampled in a batch of one."""
    if not _ALONE:
        logits = logits_of(64)
        for i in range(64):
            row = SamplingRow(0.5 + i % 4 / 4, 100 + i // 3, 7 * i)
            _ALONE.extend(tokens_of(logits[i : i + 1], [row]))
    return _ALONE


def test_greedy_and_sampled_rows_mix() -> None:
    logits = logits_of(30)
    rows = [GREEDY if i % 2 else SamplingRow(1.0, i, i) for i in range(30)]
    tokens = tokens_of(logits, rows)
    greedy = np.array(logits).argmax(axis=1).tolist()
    assert tokens[1::2] == greedy[1::2]
    assert tokens[::2] != greedy[::2]
    assert tokens[::2] == tokens_of(logits[::2], rows[::2])


def test_temperatures_of_one_batch_are_each_rows_own() -> None:
    logits = logits_of(3)
    temperatures = (0.2, 1.0, 5.0)
    together = tokens_of(logits, [SamplingRow(t, 3, 3) for t in temperatures])
    apart = [
        tokens_of(logits[i : i + 1], [SamplingRow(t, 3, 3)])[0] for i, t in enumerate(temperatures)
    ]
    assert together == apart


@pytest.mark.parametrize("field", ["seed", "position"])
def test_another_seed_or_position_draws_anew(field: str) -> None:
    flat = mx.zeros((200, VOCAB_SIZE))
    rows = [SamplingRow(1.0, *((i, 9) if field == "seed" else (9, i))) for i in range(200)]
    tokens = tokens_of(flat, rows)
    assert len(set(tokens)) > 30, "all but all of 50 equally likely tokens"
    assert tokens == tokens_of(flat, rows), "and repeats itself"


def test_seed_and_position_are_two_counters() -> None:
    """(seed, position) and (position, seed), or neighbors on the diagonal, share nothing."""
    flat = mx.zeros((100, VOCAB_SIZE))
    ahead = tokens_of(flat, [SamplingRow(1.0, i, i + 1) for i in range(100)])
    swapped = tokens_of(flat, [SamplingRow(1.0, i + 1, i) for i in range(100)])
    same = sum(a == b for a, b in zip(ahead, swapped))
    assert same < 12, "2 are expected by chance"


@pytest.mark.parametrize("seed", [0, -1, 2**31, 2**32, 2**63, -(2**40)])
def test_any_integer_is_a_seed(seed: int) -> None:
    rows = [SamplingRow(1.0, seed, i) for i in range(40)]
    tokens = tokens_of(mx.zeros((40, VOCAB_SIZE)), rows)
    assert tokens == tokens_of(mx.zeros((40, VOCAB_SIZE)), rows)
    # 64 bits count, each of them, and no others.
    assert tokens == tokens_of(
        mx.zeros((40, VOCAB_SIZE)), [row._replace(seed=seed + 2**64) for row in rows]
    )
    for bit in range(64):
        others = [row._replace(seed=seed ^ 1 << bit) for row in rows]
        same = sum(a == b for a, b in zip(tokens, tokens_of(mx.zeros((40, VOCAB_SIZE)), others)))
        assert same < 10, f"bit {bit}: 1 of 40 is expected by chance"


def test_answers_of_seeds_of_32_bits_do_not_change() -> None:
    """Their key is (seed, position): what earlier releases answered to a seed stays."""
    seeds = [0, 1, 2**31 - 1, 2**31, 2**32 - 1]
    assert keys_of(seeds).tolist() == [[seed, 0] for seed in seeds]
    [token] = tokens_of(logits_of(1), [SamplingRow(1.0, 2**31 + 5, 7)])
    key = mx.array([2**31 + 5, 7], dtype=mx.uint32)
    assert token == mx.random.categorical(logits_of(1)[0], key=key).item()


@given(st.lists(st.integers(-(2**63), 2**64 - 1), unique_by=lambda seed: seed % 2**64))
def test_different_seeds_have_different_keys(seeds: list[int]) -> None:
    keys = keys_of(seeds)
    assert keys.dtype == np.uint32 and keys.shape == (len(seeds), 2)
    assert len({tuple(key) for key in keys.tolist()}) == len(seeds)


# --- Rows without a token -------------------------------------------------------------------------

NAN, INF = float("nan"), float("inf")
WAYS = {
    "greedy": GREEDY,
    "drawn": SamplingRow(1.0, 3, 4),
    "hot": SamplingRow(3e38, 3, 4),
    "top_k": SamplingRow(0.8, 3, 4, top_k=3),
    "top_k of many": SamplingRow(0.8, 3, 4, top_k=30),
    "top_p": SamplingRow(0.8, 3, 4, top_p=0.7),
    "min_p": SamplingRow(0.8, 3, 4, min_p=0.1),
    "top_k, top_p": SamplingRow(0.8, 3, 4, top_k=5, top_p=0.7, min_p=0.01),
}


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("way", WAYS)
def test_a_row_without_a_token_says_so(way: str, dtype: mx.Dtype) -> None:
    values = np.array(logits_of(9))
    values[1] = -INF
    values[2] = NAN
    values[3] = INF
    values[4, 17] = NAN
    values[5, 49] = INF
    values[6] = -INF
    values[6, 23] = -5.0  # one token is left
    values[7, ::2] = -INF
    logits = mx.array(values).astype(dtype)
    chosen = sample(logits, [WAYS[way]] * 9)
    tokens = np.array(chosen.tokens)
    assert ((tokens >= 0) & (tokens < VOCAB_SIZE)).all(), "a step may be built on it already"
    found = np.array(chosen.for_host(None))
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, np.where([0, 1, 1, 1, 1, 1, 0, 0, 0], -1, tokens))
    assert tokens[6] == 23 and tokens[7] % 2 == 1
    # Its neighbors in the batch have no part in it.
    good = mx.array([0, 6, 7, 8])
    assert tokens_of(logits[good], [WAYS[way]] * 4) == tokens[[0, 6, 7, 8]].tolist()


def test_a_mask_does_not_hide_what_is_wrong_with_the_model() -> None:
    chosen = sample(mx.zeros((4, VOCAB_SIZE)), [GREEDY] * 4)
    before = mx.array([1.0, NAN, INF, -INF])
    assert chosen.for_host(before).tolist() == [0, -1, -1, -1]


@pytest.mark.parametrize(("seed", "token"), [(48081531, 43), (88959276, 48), (159934640, 20)])
def test_the_only_token_is_drawn_whatever_the_noise(seed: int, token: int) -> None:
    """Its noise is -inf once in 2**32 draws; the first token of all must not come instead."""
    logits = mx.where(mx.arange(VOCAB_SIZE) == token, 2.0, -mx.inf)[None]
    assert tokens_of(logits, [SamplingRow(1.0, seed, 0)]) == [token]
    beside = mx.where(mx.arange(VOCAB_SIZE) == 7, -100.0, logits)
    assert tokens_of(beside, [SamplingRow(1.0, seed, 0)]) == [7], "noise of -inf"


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_logits_are_sampled_in_single(dtype: mx.Dtype) -> None:
    logits = logits_of(16).astype(dtype)
    rows = [SamplingRow(0.7, i, i) for i in range(16)]
    assert tokens_of(logits, rows) == tokens_of(logits.astype(mx.float32), rows)
    assert tokens_of(logits, [GREEDY] * 16) == tokens_of(logits.astype(mx.float32), [GREEDY] * 16)


def test_minus_infinity_is_never_sampled() -> None:
    logits = mx.where(mx.arange(VOCAB_SIZE) % 2 == 0, -mx.inf, 0.0)
    batch = mx.broadcast_to(logits, (500, VOCAB_SIZE))
    tokens = tokens_of(batch, [SamplingRow(3.0, i, 0) for i in range(500)])
    assert all(token % 2 for token in tokens)
