"""top-k, top-p, min-p: mlx-lm's sets of tokens, vLLM's order, and the right distribution."""

from __future__ import annotations

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import sample_utils

from mlx_paged import ops
from mlx_paged.engine.sampling.sampler import SamplingMetadata, SamplingRow, filters_of, sample

VOCAB_SIZE = 200
OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


def row_of(seed: int = 0, position: int = 0, temperature: float = 1.0, **filters: float):
    return SamplingRow(temperature, seed, position, **{**OFF, **filters})


def logits_of(num_rows: int, rng: np.random.Generator, scale: float = 3.0) -> np.ndarray:
    """Peaked and flat rows, the largest logit of each 0."""
    scales = rng.uniform(0.2, scale, (num_rows, 1))
    logits = (rng.normal(size=(num_rows, VOCAB_SIZE)) * scales).astype(np.float32)
    return logits - logits.max(axis=1, keepdims=True)


def kept_by_ours(logits: np.ndarray, rows: list[SamplingRow]) -> np.ndarray:
    filters = filters_of(SamplingMetadata.of(rows), logits.shape[1])
    kept = logits > -np.inf
    if not filters:
        return kept
    columns = mx.zeros(len(rows)), mx.ones(len(rows)), *map(mx.array, filters)
    thresholds = np.array(ops.sampling_thresholds(mx.array(logits), *columns))
    return kept & (logits >= thresholds[:, None])


def kept_by_reference(logits: np.ndarray, row: SamplingRow) -> np.ndarray:
    """min-p, then top-k, then top-p on what is left, in float64, one token after the other."""
    probs = np.exp(logits.astype(np.float64))
    probs /= probs.sum()
    kept = probs >= row.min_p * probs.max() * (1 - 1e-9)
    if 0 < row.top_k < len(logits):
        kept &= logits >= np.sort(logits)[-row.top_k]
    if row.top_p < 1:
        left = np.where(kept, probs, 0)
        left /= left.sum()
        mass = 0.0
        inside = np.zeros_like(kept)
        for value in np.unique(logits[kept])[::-1]:  # equal ones together
            if mass >= row.top_p:
                break
            inside |= logits == value
            mass += left[logits == value].sum()
        kept &= inside
    return kept


@pytest.mark.parametrize("top_k", [1, 2, 7, 25, 26, 100, VOCAB_SIZE - 1])
def test_top_k_is_mlx_lms(rng: np.random.Generator, top_k: int) -> None:
    logits = logits_of(20, rng)
    expected = sample_utils.apply_top_k(mx.array(logits), top_k)
    ours = kept_by_ours(logits, [row_of(top_k=top_k)] * 20)
    np.testing.assert_array_equal(ours, np.isfinite(np.array(expected)))


@pytest.mark.parametrize("top_p", [1e-30, 1e-38, 1e-40, 1e-46, 5e-324])
@pytest.mark.parametrize(
    "filters",
    [{}, {"top_k": 5}, {"top_k": 100}, {"min_p": 0.01}, {"top_k": 5, "min_p": 0.5}],
    ids=str,
)
def test_a_top_p_that_rounds_to_zero_keeps_the_likeliest(
    rng: np.random.Generator, top_p: float, filters: dict
) -> None:
    logits = logits_of(5, rng)
    kept = kept_by_ours(logits, [row_of(top_p=top_p, **filters)] * 5)
    assert (kept.sum(axis=1) == 1).all()
    assert (kept.argmax(axis=1) == logits.argmax(axis=1)).all()


@pytest.mark.parametrize("top_p", [1e-6, 0.1, 0.5, 0.9, 0.95, 0.999])
def test_top_p_is_mlx_lms(rng: np.random.Generator, top_p: float) -> None:
    logits = logits_of(20, rng)
    expected = sample_utils.apply_top_p(mx.array(logits), top_p)
    ours = kept_by_ours(logits, [row_of(top_p=top_p)] * 20)
    np.testing.assert_array_equal(ours, np.isfinite(np.array(expected)))


@pytest.mark.parametrize("min_p", [1e-6, 0.02, 0.1, 0.5, 1.0])
def test_min_p_is_mlx_lms(rng: np.random.Generator, min_p: float) -> None:
    logits = logits_of(20, rng)
    expected = sample_utils.apply_min_p(mx.array(logits), min_p)
    ours = kept_by_ours(logits, [row_of(min_p=min_p)] * 20)
    np.testing.assert_array_equal(ours, np.isfinite(np.array(expected)))


def mixed_rows(count: int, rng: np.random.Generator) -> list[SamplingRow]:
    return [
        row_of(
            i,
            top_k=int(rng.choice([-1, 0, 1, 3, 20, 60, 199, 200, 5000])),
            top_p=float(rng.choice([1.0, 1.0, 0.3, 0.8, 0.95])),
            min_p=float(rng.choice([0.0, 0.0, 0.03, 0.2])),
        )
        for i in range(count)
    ]


def test_rows_with_settings_of_their_own_agree_with_the_reference(
    rng: np.random.Generator,
) -> None:
    logits, rows = logits_of(200, rng), mixed_rows(200, rng)
    ours = kept_by_ours(logits, rows)
    for i, row in enumerate(rows):
        np.testing.assert_array_equal(ours[i], kept_by_reference(logits[i], row), str(row))


def test_the_order_matters_and_is_vllms() -> None:
    """Top-p of what top-k left: 0.5 of (0.4, 0.3, 0.2) is the first two, of everything three."""
    probs = np.array([0.4, 0.3, 0.2, 0.06, 0.04])
    logits = np.log(probs / 0.4).astype(np.float32)[None]
    assert kept_by_ours(logits, [row_of(top_p=0.75)]).sum() == 3
    assert kept_by_ours(logits, [row_of(top_k=3, top_p=0.75)]).sum() == 2
    assert kept_by_ours(logits, [row_of(min_p=0.5, top_p=0.75)]).sum() == 2


@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_k": 30}], ids=str)
def test_a_token_goes_where_those_above_have_all_of_top_p(filters: dict) -> None:
    """1 and two halves: what is above the halves is exactly half."""
    logits = np.full((1, VOCAB_SIZE), -np.inf, np.float32)
    logits[0, :3] = [0.0, -np.log(2.0), -np.log(2.0)]
    assert kept_by_ours(logits, [row_of(top_p=0.5, **filters)]).sum() == 1
    assert kept_by_ours(logits, [row_of(top_p=0.5001, **filters)]).sum() == 3


def test_equal_logits_are_kept_or_left_out_together(rng: np.random.Generator) -> None:
    """As half precision makes many: no choice among them can then depend on the batch."""
    logits = np.round(logits_of(100, rng) * 2) / 2
    rows = mixed_rows(100, rng)
    ours = kept_by_ours(logits, rows)
    for i, row in enumerate(rows):
        np.testing.assert_array_equal(ours[i], kept_by_reference(logits[i], row), str(row))
        kept = np.unique(logits[i][ours[i]])
        assert not np.isin(logits[i][~ours[i]], kept).any()


def test_a_rows_filter_does_not_depend_on_its_batch(rng: np.random.Generator) -> None:
    logits, rows = np.round(logits_of(64, rng), 1), mixed_rows(64, rng)
    together = kept_by_ours(logits, rows)
    for i in range(64):
        alone = kept_by_ours(logits[i : i + 1], rows[i : i + 1])
        np.testing.assert_array_equal(together[i], alone[0])


def test_banned_tokens_are_no_part_of_a_filter(rng: np.random.Generator) -> None:
    logits = logits_of(3, rng)
    logits[:, ::2] = -np.inf
    logits -= logits.max(axis=1, keepdims=True)
    rows = [row_of(top_k=150), row_of(top_p=0.9), row_of(top_k=3, top_p=0.99)]
    kept = kept_by_ours(logits, rows)
    assert not kept[:, ::2].any()
    for i, row in enumerate(rows):
        np.testing.assert_array_equal(
            kept[i], kept_by_reference(logits[i], row) & (logits[i] > -np.inf)
        )


def test_without_filters_nothing_is_computed() -> None:
    rows = [row_of(top_k=k) for k in (0, -1, 200, 999)]
    assert not filters_of(SamplingMetadata.of(rows), VOCAB_SIZE)
    greedy = [row_of(temperature=0.0, top_k=5, top_p=0.5, min_p=0.1)] * 4
    assert not filters_of(SamplingMetadata.of(greedy), VOCAB_SIZE), "greedy rows have no filters"


@pytest.mark.parametrize(
    "filters",
    [
        {"top_k": 6},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"top_k": 12, "top_p": 0.9, "min_p": 0.02},
        {"top_k": 40, "top_p": 0.7},
    ],
    ids=str,
)
@pytest.mark.parametrize("temperature", [0.6, 1.5])
def test_draws_follow_the_filtered_distribution(filters: dict, temperature: float) -> None:
    """Chi-square against the renormalized probabilities; seeds are fixed."""
    num_draws = 8000
    logits = (np.random.default_rng(5).normal(size=VOCAB_SIZE) * 1.5).astype(np.float32)
    tempered = (logits - logits.max()) / np.float32(temperature)
    kept = kept_by_reference(tempered, row_of(**filters))
    rows = [row_of(i, 3, temperature, **filters) for i in range(num_draws)]
    batch = mx.broadcast_to(mx.array(logits), (num_draws, VOCAB_SIZE))
    counts = np.bincount(np.array(sample(batch, rows).tokens), minlength=VOCAB_SIZE)
    assert counts[~kept].sum() == 0, "a token was sampled that the filters leave out"
    weights = np.exp(tempered.astype(np.float64)) * kept
    expected = (num_draws * weights / weights.sum())[kept]
    chi_square = (((counts[kept] - expected) ** 2) / expected).sum()
    degrees = kept.sum() - 1
    # Wilson and Hilferty's approximation of the 0.1% point.
    limit = degrees * (1 - 2 / (9 * degrees) + 3.09 * np.sqrt(2 / (9 * degrees))) ** 3
    assert chi_square < limit


def test_greedy_rows_ignore_filters_and_seeds(rng: np.random.Generator) -> None:
    logits = mx.array(logits_of(6, rng))
    rows = [row_of(i, temperature=0 if i % 2 else 1.0, top_p=0.9) for i in range(6)]
    tokens = np.array(sample(logits, rows).tokens)
    np.testing.assert_array_equal(tokens[1::2], np.array(logits).argmax(axis=1)[1::2])
    alone = [int(sample(logits[i : i + 1], rows[i : i + 1]).tokens.item()) for i in range(6)]
    assert tokens.tolist() == alone
