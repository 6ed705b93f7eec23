"""Penalties, biases, bans and masks: mlx-lm's processors row by row, in flight or not."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.sample_utils import make_logits_processors
from support.models import embedded

from mlx_paged import SamplingParams
from mlx_paged.core import Request
from mlx_paged.core import Sequence as CoreSequence
from mlx_paged.engine.sampling.logits_processors import (
    ALWAYS,
    InFlight,
    LogitEdits,
    TokenHistory,
    apply_edits,
)
from mlx_paged.engine.sampling.masks import MaskKey, SequenceMasks
from mlx_paged.engine.sampling.sequence_sampler import (
    RequestSampling,
    SequenceSampler,
    TokenMask,
    _LongBadWords,
)
from mlx_paged.errors import InvalidParameterError

VOCAB_SIZE = 4096
PROMPT = [5, 6, 7, 7, 300]
PLAIN = None  # a row without edits
MASKS, SEQ_IDS = SequenceMasks(), itertools.count()


def sampler_of(
    params: SamplingParams, prompt: Sequence[int] = PROMPT, mask: TokenMask | None = None
) -> RequestSampling:
    return RequestSampling(
        params,
        prompt,
        seed=0,
        tokenizer=embedded().tokenizer,
        vocab_size=VOCAB_SIZE,
        token_mask=mask,
    )


def edits_of(
    sampling: RequestSampling, tokens: Sequence[int], position: int, index: int = 0
) -> LogitEdits | None:
    """LogitEdits of the token at a position; None where the request asks for none."""
    sampler = SequenceSampler(sampling, index)
    sequence = CoreSequence(next(SEQ_IDS), Request("r", PROMPT), index, ((False, 0), 0, index))
    sequence.tokens, sequence.sampler = tokens, sampler  # type: ignore[assignment]
    MASKS.watch([sequence])
    key = MaskKey(sequence.seq_id, position)
    return sampler.edits(tokens, key) if sampler.has_edits else None


def row_for(params: SamplingParams, answer: Sequence[int], prompt: Sequence[int] = PROMPT):
    """A row whose answer is known as a whole."""
    tokens = [*prompt, *answer]
    return edits_of(sampler_of(params, prompt), tokens, len(tokens))


def row_in_flight(params: SamplingParams, answer: Sequence[int], prompt: Sequence[int] = PROMPT):
    """The same row while the last token of the answer is still on the device."""
    tokens = [*prompt, *answer]
    return edits_of(sampler_of(params, prompt), tokens[:-1], len(tokens))


def edited(logits: np.ndarray, rows: list[LogitEdits | None], newest: Sequence[int] | None = None):
    """Edited logits; `newest` has a row's token in flight, -1 where it is known."""
    in_flight = None
    if newest is not None:
        # Shuffled, as the rows of the step before need not be those of this one.
        source = np.array([3 * i % 7 if t >= 0 else -1 for i, t in enumerate(newest)], np.int32)
        tokens = np.full(7, 99, np.int32)
        for place, token in zip(source, newest):
            if place >= 0:
                tokens[place] = token
        in_flight = InFlight(mx.array(tokens), source, mx.array(tokens))
    edited_rows = [(i, edits) for i, edits in enumerate(rows) if edits is not None]
    result = apply_edits(mx.array(logits), edited_rows, in_flight, masks=MASKS)
    assert not result.failed
    return np.array(result.logits)


def logits_of(num_rows: int, rng: np.random.Generator) -> np.ndarray:
    return (rng.normal(size=(num_rows, VOCAB_SIZE)) * 4).astype(np.float32)


def test_penalties_and_bias_are_mlx_lms_processors(rng: np.random.Generator) -> None:
    """vLLM's repetition penalty sees prompt and answer, the others the answer alone."""
    logits = logits_of(6, rng)
    rows, expected = [], []
    for i in range(6):
        params = SamplingParams(
            repetition_penalty=[1.0, 1.3, 0.8, 1.1, 1.0, 2.0][i],
            presence_penalty=[0.5, 0.0, -0.7, 0.2, 0.0, 1.5][i],
            frequency_penalty=[0.0, 0.4, 0.3, -0.1, 1.0, 0.0][i],
            logit_bias={3: 5.0, 7: -2.5, 40 + i: 1.0} if i % 2 else None,
        )
        prompt = rng.integers(0, 60, 20).tolist()
        answer = rng.integers(0, 60, 30).tolist()
        rows.append(row_for(params, answer, prompt))
        row = mx.array(logits[i : i + 1])
        everything = make_logits_processors(
            params.logit_bias,
            None if params.repetition_penalty == 1 else params.repetition_penalty,
            1000,
        )
        generated = make_logits_processors(
            None,
            None,
            20,
            params.presence_penalty or None,
            1000,
            params.frequency_penalty or None,
            1000,
        )
        for processor in everything:
            row = processor(mx.array(prompt + answer), row)
        for processor in generated:
            row = processor(mx.array(answer), row)
        expected.append(np.array(row)[0])
    np.testing.assert_allclose(edited(logits, rows), np.stack(expected), rtol=1e-6, atol=1e-5)


@st.composite
def answers_with_params(draw: st.DrawFn) -> list[tuple[SamplingParams, list[int]]]:
    token = st.integers(0, 9)
    cases = []
    for _ in range(draw(st.integers(1, 5))):
        params = SamplingParams(
            repetition_penalty=draw(st.sampled_from([1.0, 1.5])),
            presence_penalty=draw(st.sampled_from([0.0, 0.5])),
            frequency_penalty=draw(st.sampled_from([0.0, 0.25])),
            logit_bias=draw(st.sampled_from([None, {4: 1.0}])),
        )
        cases.append((params, draw(st.lists(token, min_size=0, max_size=6))))
    return cases


@given(answers_with_params())
def test_a_token_in_flight_counts_like_a_known_one(
    cases: list[tuple[SamplingParams, list[int]]],
) -> None:
    logits = np.random.default_rng(1).normal(size=(len(cases), VOCAB_SIZE)).astype(np.float32)
    prompt = [1, 2, 2]
    known = [row_for(params, answer, prompt) for params, answer in cases]
    flying = [
        row_in_flight(params, answer, prompt) if answer else row_for(params, answer, prompt)
        for params, answer in cases
    ]
    newest = [answer[-1] if answer else -1 for _, answer in cases]
    before = logits.copy()
    np.testing.assert_array_equal(edited(logits, flying, newest), edited(logits, known))
    np.testing.assert_array_equal(logits, before)


@given(st.lists(st.lists(st.integers(0, 200), max_size=90), max_size=5))
def test_history_counts(pieces: list[list[int]]) -> None:
    history = TokenHistory([7, 7, 300])
    answer: list[int] = []
    for piece in pieces:
        answer += piece
        history.update([7, 7, 300, *answer], 3)
        history.update([7, 7, 300, *answer], 3)  # nothing new
        found = dict(zip(history.ids.tolist(), history.counts.tolist(), strict=True))
        assert found == {t: answer.count(t) for t in {7, 300, *answer}}


@pytest.mark.parametrize("num_seen", [0, 1, 10, 200])
def test_a_history_grows_with_its_answer(num_seen: int) -> None:
    """Beyond the room that it began with, again and again; none of its counts is lost."""
    prompt = list(range(1000, 1000 + num_seen))
    history = TokenHistory(prompt)
    answer: list[int] = []
    sizes = {len(history._ids)}
    for token in range(2000):
        answer += [token, token // 3, *prompt[:1]]
        history.update([*prompt, *answer], num_seen)
        sizes.add(len(history._ids))
        assert len(history._ids) == len(history._counts)
    assert 3 < len(sizes) < 9, "in few steps"
    found = dict(zip(history.ids.tolist(), history.counts.tolist(), strict=True))
    assert found == {**dict.fromkeys(prompt, 0), **Counter(answer)}


@pytest.mark.parametrize("wrong", [-1, -5, VOCAB_SIZE, 10**6])
def test_an_end_token_that_is_none_bans_nothing(wrong: int, rng: np.random.Generator) -> None:
    """Some configurations have an eos_token_id of -1: as an index it is the last of all tokens."""
    logits = logits_of(1, rng)
    tokenizer = SimpleNamespace(eos_token_ids={wrong, 9}, encode=embedded().tokenizer.encode)
    sampling = RequestSampling(
        SamplingParams(min_tokens=2), PROMPT, seed=0, tokenizer=tokenizer, vocab_size=VOCAB_SIZE
    )
    result = edited(logits, [edits_of(sampling, PROMPT, len(PROMPT))])
    assert np.flatnonzero(np.isneginf(result[0])).tolist() == [9]


def test_bad_words_with_tokens_that_the_model_lacks_ban_nothing() -> None:
    """A tokenizer may have more tokens than its model."""
    params = SamplingParams(bad_words=["return", "while"])
    sampling = RequestSampling(
        params, PROMPT, seed=0, tokenizer=embedded().tokenizer, vocab_size=300
    )
    assert sampling.additions is None and not sampling.long_bad_words


def test_untouched_rows_share_a_batch_with_edited_ones(rng: np.random.Generator) -> None:
    logits = logits_of(4, rng)
    params = SamplingParams(repetition_penalty=1.5, logit_bias={9: 3.0}, bad_words=["return"])
    edit = row_for(params, [9, 11])
    masked = row_for(SamplingParams(allowed_token_ids=[2, 4]), [9, 11])
    result = edited(logits, [PLAIN, edit, PLAIN, masked])
    np.testing.assert_array_equal(result[[0, 2]], logits[[0, 2]])
    np.testing.assert_array_equal(result[1], edited(logits[1:2], [edit])[0])
    np.testing.assert_array_equal(result[3], edited(logits[3:], [masked])[0])


def test_plain_rows_cost_nothing(rng: np.random.Generator) -> None:
    logits = mx.array(logits_of(3, rng)).astype(mx.float16)
    plain = row_for(SamplingParams(temperature=0.7, top_p=0.9, seed=1), [1])
    assert plain is None
    assert apply_edits(logits, [], None).logits is logits


def test_end_and_stop_tokens_are_banned_until_min_tokens(rng: np.random.Generator) -> None:
    logits = logits_of(1, rng)
    params = SamplingParams(min_tokens=3, stop_token_ids=[8, 99999], logit_bias={8: 4.0})
    ends = sorted({8, *embedded().tokenizer.eos_token_ids})
    for count in range(6):
        result = edited(logits, [row_for(params, [1] * count)])[0]
        banned = np.flatnonzero(np.isneginf(result)).tolist()
        assert banned == (ends if count < 3 else [])
        # The count is known even if the newest token is not.
        if count:
            flying = edited(logits, [row_in_flight(params, [1] * count)], [1])[0]
            np.testing.assert_array_equal(flying, result)


def banned_after(params: SamplingParams, answer: list[int]) -> set[int]:
    """The same tokens are banned after an answer whether its last token is in flight or not."""
    logits = np.zeros((1, VOCAB_SIZE), np.float32)
    banned = np.isneginf(edited(logits, [row_for(params, answer)])[0])
    if answer:
        flying = edited(logits, [row_in_flight(params, answer)], [answer[-1]])[0]
        np.testing.assert_array_equal(np.isneginf(flying), banned)
    return set(np.flatnonzero(banned).tolist())


def encode(text: str) -> list[int]:
    return list(embedded().tokenizer.encode(text, add_special_tokens=False))


def test_bad_words_of_one_token_never_come() -> None:
    [bare], [spaced] = encode("return"), encode(" return")
    assert bare != spaced, "two spellings, one word"
    params = SamplingParams(bad_words=["return"])
    for answer in ([], [3], [bare]):
        assert banned_after(params, answer) == {bare, spaced}
    assert banned_after(SamplingParams(bad_words=["  return"]), []) == {bare, spaced}


def test_bad_words_of_several_tokens_are_banned_at_their_last() -> None:
    word = encode("fibonacci_number")
    assert len(word) >= 3
    params = SamplingParams(bad_words=["fibonacci_number"])
    assert word[-1] in banned_after(params, [9, *word[:-1]])
    assert word[-1] in banned_after(params, word[:-1])
    assert banned_after(params, word) == set()
    assert banned_after(params, [*word[:-2], 9]) == set()
    assert banned_after(params, [9, *word[1:-1]]) == set(), "its beginning is another's"
    assert banned_after(params, []) == set()
    # Only the answer counts, as in vLLM: the prompt's end is no beginning of a bad word.
    tokens = [*PROMPT, *word[:-1]]
    edits = edits_of(sampler_of(params, tokens), tokens, len(tokens))
    assert edits is None


def test_bad_words_overlap_in_one_row() -> None:
    """Two words with one last token, of which one applies; and one that is banned by itself."""
    one, two = encode("x_count"), encode("y_count")
    assert one[-1] == two[-1] and len(one) == len(two)
    params = SamplingParams(bad_words=["x_count", "y_count", "return"], logit_bias={one[-1]: 9})
    always = banned_after(params, [])
    assert banned_after(params, one[:-1]) == always | {one[-1]}
    assert banned_after(params, two[:-1]) == always | {one[-1]}


def test_masks_as_booleans_or_packed(rng: np.random.Generator) -> None:
    logits = logits_of(3, rng)
    allowed = rng.random(VOCAB_SIZE) < 0.3
    packed = np.packbits(allowed, bitorder="little").view(np.int32)
    masks = {0: allowed, 1: packed, 2: packed.view(np.uint32)}
    rows = [
        edits_of(sampler_of(SamplingParams(), mask=lambda _, __, m=mask: m), PROMPT, len(PROMPT))
        for mask in masks.values()
    ]
    expected = np.where(allowed, logits, -np.inf)
    np.testing.assert_array_equal(edited(logits, rows), expected)


def test_a_mask_sees_the_answer_with_its_newest_token() -> None:
    seen = []

    def mask(index: int, answer: Sequence[int]) -> np.ndarray | None:
        seen.append((index, list(answer)))
        return None

    sampler = sampler_of(SamplingParams(), mask=mask)
    logits = np.zeros((3, VOCAB_SIZE), np.float32)
    tokens = [*PROMPT, 1, 2]
    rows = [
        edits_of(sampler, PROMPT, len(PROMPT), 0),
        edits_of(sampler, tokens, len(tokens), 1),
        edits_of(sampler, tokens, len(tokens) + 1, 2),
    ]
    np.testing.assert_array_equal(edited(logits, rows, [-1, -1, 77]), logits)
    assert seen == [(0, []), (1, [1, 2]), (2, [1, 2, 77])]


def test_a_mask_and_allowed_tokens_hold_together() -> None:
    mask = np.zeros(VOCAB_SIZE, np.bool_)
    mask[[3, 4]] = True
    sampler = sampler_of(SamplingParams(allowed_token_ids=[4, 5]), mask=lambda *_: mask)
    logits = np.zeros((1, VOCAB_SIZE), np.float32)
    result = edited(logits, [edits_of(sampler, PROMPT, len(PROMPT))])
    assert np.flatnonzero(np.isfinite(result[0])).tolist() == [4]


@pytest.mark.parametrize(
    "mask", [np.ones(VOCAB_SIZE + 1, np.bool_), np.ones(200, np.int64), np.ones((2, 4), np.bool_)]
)
def test_a_mask_that_does_not_fit_is_refused(mask: np.ndarray) -> None:
    row = edits_of(sampler_of(SamplingParams(), mask=lambda *_: mask), PROMPT, len(PROMPT))
    result = apply_edits(mx.zeros((2, VOCAB_SIZE)), [(1, row)], None, masks=MASKS)
    assert list(result.failed) == [1] and "token_mask must be at most 4096" in result.failed[1]
    assert np.isneginf(np.array(result.logits[1])).all()
    assert (np.array(result.logits[0]) == 0).all()


@pytest.mark.parametrize("field", ["logit_bias", "allowed_token_ids"])
def test_tokens_that_the_model_lacks_are_refused(field: str) -> None:
    value = {VOCAB_SIZE: 1.0} if field == "logit_bias" else [3, VOCAB_SIZE]
    with pytest.raises(InvalidParameterError, match=f"{field} must be token ids below 4096"):
        sampler_of(SamplingParams(**{field: value}))


def test_long_bad_words_are_found_by_their_last_known_token() -> None:
    """Against a comparison of all words with the answer, which took longer than a step."""

    def plain(words: list[list[int]], generated: list[int], in_flight: bool) -> list[Any]:
        found = []
        for *begin, last in words:
            after = begin.pop() if in_flight else ALWAYS
            if not begin or generated[-len(begin) :] == begin:
                found.append((last, after))
        return sorted(found)

    rng = random.Random(3)
    for _ in range(2000):
        words = [rng.choices(range(3), k=rng.randrange(2, 5)) for _ in range(rng.randrange(6))]
        generated = rng.choices(range(3), k=rng.randrange(6))
        index = _LongBadWords(words)
        assert bool(index) == bool(words)
        for in_flight in (False, True):
            found = sorted(index.possible(generated, in_flight=in_flight))
            assert found == plain(words, generated, in_flight)
    index = _LongBadWords([[i, 7] for i in range(100)])
    assert {len(words) for words in index._known.values()} == {1}, "one is compared, not all"
