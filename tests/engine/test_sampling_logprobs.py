"""Log-probabilities: those of mlx-lm's dense path, however the steps are cut."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import numpy as np
import pytest
from support.embedded_llm import make
from support.models import embedded

from mlx_paged import LLM, RequestOutput, SamplingParams
from mlx_paged.engine.outputs import CompletionOutput, PositionReport
from mlx_paged.engine.sampling.logprobs import (
    LogprobReport,
    PositionLogprobs,
    PromptReport,
    logprobs_of,
)

PROMPTS = [
    "def fibonacci(n):\n",
    "import math\n\n\ndef area(radius):\n",
    "x",
    '"""A module that sorts words.\n\nIt reads a text and counts its words.\n"""\n' * 2,
]
TOLERANCE = 2e-3


@lru_cache(maxsize=64)
def dense_logprobs(tokens: tuple[int, ...]) -> np.ndarray:
    """``[len(tokens), vocab_size]``: of the token after each, by mlx-lm's model without a cache."""
    logits = embedded().model(mx.array([tokens]))[0].astype(mx.float32)
    return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))


def check_position(report: PositionReport, token: int, expected: np.ndarray, count: int) -> None:
    """One position against the ``[vocab_size]`` log-probabilities it should have."""
    first, *others = report
    assert first == token, "the token that is there comes first"
    assert report[token].logprob == pytest.approx(expected[token], abs=TOLERANCE)
    assert report[token].rank == pytest.approx((expected > expected[token]).sum() + 1, abs=2)
    assert len(report) in (count, count + 1) if count else not others
    values = [report[t].logprob for t in others]
    assert values == sorted(values, reverse=True)
    best = np.sort(expected)[::-1][:count]
    found = sorted((r.logprob for r in report.values()), reverse=True)[:count]
    np.testing.assert_allclose(found, best, atol=TOLERANCE)
    for other, entry in report.items():
        assert entry.decoded_token == embedded().tokenizer.decode([other])
        if other != token:
            assert entry.logprob == pytest.approx(expected[other], abs=TOLERANCE)
    ranks = {entry.rank for entry in report.values()}
    assert set(range(1, count + 1)) <= ranks | {report[token].rank}


def check_answer(output: RequestOutput, answer: CompletionOutput, count: int) -> None:
    prompt = output.prompt_token_ids
    expected = dense_logprobs((*prompt, *answer.token_ids))
    assert answer.logprobs is not None and len(answer.logprobs) == len(answer.token_ids)
    for i, (token, report) in enumerate(zip(answer.token_ids, answer.logprobs)):
        check_position(report, token, expected[len(prompt) - 1 + i], count)
    total = sum(report[t].logprob for t, report in zip(answer.token_ids, answer.logprobs))
    assert answer.cumulative_logprob == pytest.approx(total)


def check_prompt(output: RequestOutput, count: int) -> None:
    prompt, reports = output.prompt_token_ids, output.prompt_logprobs
    expected = dense_logprobs(tuple(prompt))
    assert reports is not None and len(reports) == len(prompt)
    assert reports[0] is None
    for i, report in enumerate(reports[1:], 1):
        assert report is not None
        check_position(report, prompt[i], expected[i - 1], count)


@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_of_a_greedy_answer(llm: LLM, count: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=count)
    for output in llm.generate(PROMPTS, params):
        check_answer(output, output.outputs[0], count)
        assert output.prompt_logprobs is None


def test_they_are_the_models_own_whatever_is_done_to_the_logits(llm: LLM) -> None:
    params = SamplingParams(
        temperature=1.4,
        seed=2,
        top_p=0.95,
        repetition_penalty=1.3,
        logit_bias={700: 12.0},
        max_tokens=10,
        ignore_eos=True,
        logprobs=4,
        n=2,
    )
    for output in llm.generate(PROMPTS, params):
        for answer in output.outputs:
            check_answer(output, answer, 4)


def test_only_who_asks_gets_them(llm: LLM) -> None:
    params = [
        SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=count)
        for count in (None, 3, None, 0)
    ]
    outputs = llm.generate(PROMPTS, params)
    for output, wanted in zip(outputs, params):
        [answer] = output.outputs
        if wanted.logprobs is None:
            assert answer.logprobs is None and answer.cumulative_logprob is None
        else:
            check_answer(output, answer, wanted.logprobs)


def test_an_answer_does_not_keep_the_rows_of_the_others(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=5)
    outputs = llm.generate(["def add(", "class A", "import"], params)
    for report in outputs[0].outputs[0].logprobs or ():
        assert all(array.base is None and array.size == 5 for array in report._likeliest)


def test_updates_carry_them(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=2)
    updates = list(llm.stream(PROMPTS[0], params))
    [output] = llm.generate(PROMPTS[0], params)
    assert output.outputs[0].logprobs is not None
    for update, report in zip(updates, output.outputs[0].logprobs, strict=True):
        assert update.logprobs is not None and update.logprobs.keys() == report.keys()
        for token, entry in update.logprobs.items():
            assert entry.rank == report[token].rank
            assert entry.logprob == pytest.approx(report[token].logprob, abs=TOLERANCE)


STEPS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "no overlap": {"async_scheduling": False},
    "7-token steps": {"max_num_batched_tokens": 7, "max_num_seqs": 4},
    "7-token steps, no overlap": {
        "max_num_batched_tokens": 7,
        "max_num_seqs": 4,
        "async_scheduling": False,
    },
    "a tiny pool": {"block_size": 8, "num_gpu_blocks_override": 13},
}


@pytest.mark.parametrize("steps", STEPS)
def test_of_prompts_in_chunks(steps: str) -> None:
    llm = make(**STEPS[steps])
    params = SamplingParams(
        temperature=0, max_tokens=20, ignore_eos=True, prompt_logprobs=3, logprobs=1
    )
    outputs = llm.generate(PROMPTS, params)
    for output in outputs:
        check_prompt(output, 3)
        check_answer(output, output.outputs[0], 1)
    if steps == "a tiny pool":
        assert llm.stats().num_preemptions > 0


def test_of_a_prompt_that_is_cached(llm: LLM) -> None:
    """It is computed anew, for logits are not cached; and cached again for the next."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    llm.generate(PROMPTS[3], SamplingParams(max_tokens=1))
    [output] = llm.generate(PROMPTS[3], params)
    assert output.num_cached_tokens == 0
    check_prompt(output, 0)
    [after] = llm.generate(PROMPTS[3], SamplingParams(max_tokens=1))
    assert after.num_cached_tokens == len(after.prompt_token_ids) - 1


def test_of_a_prompt_with_several_answers(llm: LLM) -> None:
    params = SamplingParams(
        n=3, seed=1, max_tokens=4, ignore_eos=True, prompt_logprobs=2, logprobs=2
    )
    [output] = llm.generate(PROMPTS[1], params)
    check_prompt(output, 2)
    for answer in output.outputs:
        check_answer(output, answer, 2)


def test_of_a_prompt_of_one_token(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=2)
    [output] = llm.generate([[7]], params)
    assert output.prompt_logprobs == [None]


def test_a_request_that_takes_an_aborted_ones_id(llm: LLM) -> None:
    """The step in flight of an aborted request does not report into the new one."""
    engine = llm.engine
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, prompt_logprobs=1)
    engine.add_request("x", embedded().tokenizer.encode(PROMPTS[0]), params)
    engine.step()
    assert engine.abort("x")
    output = engine.add_request("x", embedded().tokenizer.encode(PROMPTS[1]), params)
    while engine.has_unfinished:
        engine.step()
    check_prompt(output, 1)


def pairs(position: PositionLogprobs) -> list[tuple[int, float]]:
    assert position.likeliest is not None
    return list(zip(*(array.tolist() for array in position.likeliest)))


def test_ties_are_listed_by_id_and_share_a_rank() -> None:
    logits = mx.zeros((2, 50))
    tops = [pairs(p) for p in logprobs_of(logits, mx.array([3, 4]), likeliest=True).read()]
    assert tops[0] == sorted(tops[0]) and tops[0] == tops[1]
    assert [p.rank for p in logprobs_of(logits, mx.array([3, 4]), likeliest=False).read()] == [1, 1]


def test_a_row_does_not_depend_on_its_batch(rng: np.random.Generator) -> None:
    logits = mx.array(np.round(rng.normal(size=(40, 300)), 1))
    tokens = mx.array(rng.integers(0, 300, 40).astype(np.int32))
    together = logprobs_of(logits, tokens, likeliest=True).read()
    for i in range(40):
        [alone] = logprobs_of(logits[i : i + 1], tokens[i : i + 1], likeliest=True).read()
        assert alone[:3] == together[i][:3] and pairs(alone) == pairs(together[i])


def test_a_small_vocabulary() -> None:
    [position] = logprobs_of(mx.array([[0.0, 1.0, 2.0]]), mx.array([0]), likeliest=True).read()
    assert [token for token, _ in pairs(position)] == [2, 1, 0] and position.rank == 3


def test_a_prompt_computed_anew_is_reported_once() -> None:
    """As after a preemption half-way: chunks come again, and cut otherwise."""
    prompt = list(range(10, 20))
    report = PromptReport(prompt, 0, LogprobReport(embedded().tokenizer))
    for start, end in ((0, 4), (0, 3), (0, 7), (4, 9), (7, 10), (10, 11)):
        targets = report.targets(start, end)
        if targets is not None:
            assert list(targets.token_ids) == prompt[start + 1 : end + 1]
            found = [PositionLogprobs(token, -1.0, 1, None) for token in targets.token_ids]
            report.record(start, found)
    assert [next(iter(p)) for p in report.positions if p is not None] == prompt[1:]
    assert report.targets(0, 10) is None, "nothing is left to report"


def test_listed_tokens_are_reported_in_place_of_the_likeliest(llm) -> None:
    lists = [[5, 900, 17], None, [3], [900, 5]]
    params = [
        SamplingParams(
            temperature=0, max_tokens=3, ignore_eos=True, logprob_token_ids=listed, logprobs=2
        )
        for listed in lists
    ]
    for output, listed in zip(llm.generate(PROMPTS, params), lists, strict=True):
        [answer] = output.outputs
        if listed is None:
            check_answer(output, answer, 2)
            continue
        prompt = output.prompt_token_ids
        expected = dense_logprobs((*prompt, *answer.token_ids))[len(prompt) - 1 :]
        assert answer.logprobs is not None and len(answer.logprobs) == 3
        for token, report, row in zip(answer.token_ids, answer.logprobs, expected):
            assert list(report) == list(dict.fromkeys([token, *listed])) and report.listed == listed
            for each, entry in report.items():
                assert entry.logprob == pytest.approx(row[each], abs=TOLERANCE)
                assert entry.rank == pytest.approx((row > row[each]).sum() + 1, abs=3)
