"""Sampling end to end on the embedded model: every parameter does what it says, in any company."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_logits_processors
from support.embedded_llm import make, text_of, tokens_of
from support.models import dense_greedy, embedded
from support.plain import plain_caches

from mlx_paged import LLM, SamplingParams
from mlx_paged.core import FinishReason
from mlx_paged.engine.detokenizer import IncrementalDetokenizer

PROMPT = "import math\n\n\ndef area(radius):\n"
PROMPTS = [
    "def fibonacci(n):\n",
    PROMPT,
    "for i in range(10):\n    print(",
    "def add(a, b):\n    return a",
    "try:\n    value = int(text)\nexcept",
    "class Node:\n    def __init__(self, value):\n",
    "x = [",
    "while True:\n",
]


def answers(llm: LLM, prompts: Any, params: Any) -> list[list[int]]:
    return [a.token_ids for output in llm.generate(prompts, params) for a in output.outputs]


def greedy(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 16, "ignore_eos": True, **fields})


# --- The same tokens in any company ---------------------------------------------------------------

NUM_TOKENS = 20
# Everything at once, and everything off: each row its own.
SETTINGS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.2, "top_p": 0.95, "logit_bias": {700: 8.0, 701: 8.0}},
    {"presence_penalty": 0.8, "frequency_penalty": 0.4, "top_k": 40},
    {},
    {"repetition_penalty": 1.1, "frequency_penalty": 0.3, "min_p": 0.02, "temperature": 1.3},
    {"top_k": 30, "top_p": 0.9, "logit_bias": {290: 1.5}, "bad_words": ["return", "if n"]},
    # Says one token again and again, until its count outweighs the bias: to miss the newest shows.
    {"temperature": 0, "logit_bias": {700: 30.0}, "frequency_penalty": 2.0},
    {"min_tokens": 10, "ignore_eos": False, "frequency_penalty": 1.0, "logprobs": 2},
    {"temperature": 1.6, "top_p": 0.8, "repetition_penalty": 1.05, "logprobs": 0},
]
PARAMS = [
    SamplingParams(**{"temperature": 1.0, "max_tokens": NUM_TOKENS, "ignore_eos": True,
                      "seed": 40 + i, **fields})
    for i, fields in enumerate(SETTINGS)
]  # fmt: skip
_expected: list[list[int]] = []


def expected() -> list[list[int]]:
    """Each request alone, without overlap and without a prefix cache."""
    if not _expected:
        llm = make(async_scheduling=False, enable_prefix_caching=False)
        for prompt, params in zip(PROMPTS, PARAMS):
            _expected.extend(answers(llm, prompt, params))
    return _expected


STEPS: dict[str, dict[str, Any]] = {
    "overlap": {},
    "no overlap": {"async_scheduling": False},
    "16-token steps": {"max_num_batched_tokens": 16, "max_num_seqs": 16},
    "7-token steps, no overlap": {
        "max_num_batched_tokens": 7,
        "max_num_seqs": 4,
        "async_scheduling": False,
    },
    "a tiny pool": {"block_size": 8, "num_gpu_blocks_override": 11},
    "a tiny pool, no overlap": {
        "block_size": 8,
        "num_gpu_blocks_override": 11,
        "async_scheduling": False,
    },
}


@pytest.mark.parametrize("steps", STEPS)
def test_seeded_answers_with_penalties_are_the_same_however_steps_are_cut(steps: str) -> None:
    llm = make(**STEPS[steps])
    assert answers(llm, PROMPTS, PARAMS) == expected()
    if "tiny" in steps:
        assert llm.stats().num_preemptions > 0, "the pool is meant to be too small"
    llm.engine.check_integrity()


def test_seeded_answers_are_the_same_in_a_batch_of_64(llm: LLM) -> None:
    others = [SamplingParams(temperature=1.2, max_tokens=12, top_p=0.9, presence_penalty=0.3)] * 28
    prompts = (PROMPTS * 4)[:28]
    crowd = answers(llm, [*prompts, *PROMPTS, *prompts], [*others, *PARAMS, *others])
    assert len(crowd) == 64
    assert crowd[28:36] == expected()


def test_several_answers_are_several_seeds(llm: LLM) -> None:
    """The i-th of n answers is what seed + i gives alone: each has counts of its own."""
    fields: dict[str, Any] = {"max_tokens": 16, "ignore_eos": True, "frequency_penalty": 0.7}
    together = answers(llm, PROMPT, SamplingParams(n=3, seed=5, **fields))
    alone = [answers(llm, PROMPT, SamplingParams(seed=5 + i, **fields))[0] for i in range(3)]
    assert together == alone
    assert len({tuple(tokens) for tokens in together}) == 3


# --- What each parameter does ---------------------------------------------------------------------


@pytest.mark.parametrize("async_scheduling", [True, False], ids=["overlap", "no overlap"])
def test_greedy_penalties_are_mlx_lms(async_scheduling: bool) -> None:
    """The repetition penalty over all tokens is the one that both define alike."""
    llm = make(async_scheduling=async_scheduling)
    processors = make_logits_processors(repetition_penalty=1.4, repetition_context_size=4096)
    for prompt in PROMPTS[:3]:
        steps = generate_step(
            mx.array(tokens_of(prompt)),
            embedded().model,
            max_tokens=16,
            sampler=lambda x: mx.argmax(x, axis=-1),
            logits_processors=processors,
            prompt_cache=plain_caches(embedded().model),
        )
        dense = [int(token) for token, _ in steps]
        assert dense != dense_greedy(tokens_of(prompt), 16), "the penalty changes something"
        assert answers(llm, prompt, greedy(repetition_penalty=1.4)) == [dense]


def test_frequency_penalty_counts_the_answers_tokens(llm: LLM) -> None:
    """Biased to say one token for ever, a row stops when its count outweighs the bias."""
    assert expected()[5][3:5] == [700, 700] and set(expected()[5]) > {700}
    token = 700
    bias = {token: 60.0}
    params = greedy(logit_bias=bias, frequency_penalty=2.0, max_tokens=40)
    [said] = answers(llm, PROMPT, params)
    run = next(i for i, t in enumerate([*said, None]) if t != token)
    assert 5 < run < 40
    [forever] = answers(llm, PROMPT, greedy(logit_bias=bias))
    assert forever == [token] * 16


def test_logit_bias_of_minus_100_keeps_a_token_away(llm: LLM) -> None:
    usual = dense_greedy(tokens_of(PROMPT), 16)
    bias = {usual[2]: -100}
    [biased] = answers(llm, PROMPT, greedy(logit_bias=bias))
    assert biased[:2] == usual[:2] and biased[2] != usual[2] and usual[2] not in biased


def test_bad_words_do_not_come(llm: LLM) -> None:
    usual = dense_greedy(tokens_of(PROMPT), 24)
    assert " isinstance" in text_of(usual)
    params = greedy(bad_words=["isinstance"], max_tokens=24)
    [output] = llm.generate(PROMPT, params)
    assert output.outputs[0].token_ids != usual
    assert "isinstance" not in output.outputs[0].text
    # Two consecutive tokens of the usual answer.
    pair = embedded().tokenizer.decode(usual[5:8])
    word = tokens_of(pair.lstrip())
    [avoiding] = answers(llm, PROMPT, greedy(bad_words=[pair], max_tokens=24))
    assert avoiding != usual
    assert all(avoiding[i : i + len(word)] != word for i in range(24))


def test_min_tokens_keeps_ends_away(llm: LLM) -> None:
    [prompt] = llm.render_chats([{"role": "user", "content": "Return the n-th Fibonacci number"}])
    [usual] = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=120))[0].outputs
    assert usual.finish_reason is FinishReason.STOP
    least = len(usual.token_ids) + 5
    params = SamplingParams(temperature=0, max_tokens=200, min_tokens=least)
    [longer] = llm.generate([prompt], params)[0].outputs
    assert longer.token_ids[: len(usual.token_ids) - 1] == usual.token_ids[:-1]
    assert len(longer.token_ids) > least
    assert not set(longer.token_ids[:least]) & set(llm.tokenizer.eos_token_ids)
    # A stop token likewise: the first that may be one is token number min_tokens + 1.
    stop = usual.token_ids[4]
    for minimum in (0, 4, 5, 12):
        params = SamplingParams(
            temperature=0, max_tokens=60, min_tokens=minimum, stop_token_ids=[stop]
        )
        [answer] = llm.generate([prompt], params)[0].outputs
        assert stop not in answer.token_ids[:minimum]
        if minimum <= 4:
            assert answer.token_ids == usual.token_ids[:5] and answer.stop_reason == stop


def test_allowed_token_ids_are_all_that_comes(llm: LLM) -> None:
    allowed = [5, 290, 700]
    params = SamplingParams(
        temperature=2.0, seed=1, max_tokens=30, allowed_token_ids=allowed, ignore_eos=True
    )
    [tokens] = answers(llm, PROMPT, params)
    assert set(tokens) == set(allowed)


@pytest.mark.parametrize("async_scheduling", [True, False], ids=["overlap", "no overlap"])
def test_a_token_mask_follows_the_answer(async_scheduling: bool) -> None:
    """A grammar that lets token 10 + (the last token's double, modulo 7) or its neighbour come."""
    llm = make(async_scheduling=async_scheduling)
    engine = llm.engine

    def following(answer: Sequence[int]) -> list[int]:
        start = 10 + 2 * (answer[-1] if answer else 1) % 7
        return [start, start + 1]

    def mask(index: int, answer: Sequence[int]) -> np.ndarray:
        allowed = np.zeros(4096, np.bool_)
        allowed[following(answer)] = True
        return np.packbits(allowed, bitorder="little").view(np.uint32)

    params = SamplingParams(n=2, seed=3, temperature=2.0, max_tokens=12, ignore_eos=True)
    output = engine.add_request("masked", tokens_of(PROMPT), params, token_mask=mask)
    free = engine.add_request("free", tokens_of(PROMPT), greedy())
    while engine.has_unfinished:
        engine.step()
    for answer in output.outputs:
        assert len(answer.token_ids) == 12
        for i, token in enumerate(answer.token_ids):
            assert token in following(answer.token_ids[:i])
    assert len({tuple(a.token_ids) for a in output.outputs}) == 2
    assert free.outputs[0].token_ids == dense_greedy(tokens_of(PROMPT), 16)


# --- Stop strings ---------------------------------------------------------------------------------


def test_a_stop_string_may_be_included(llm: LLM) -> None:
    usual = text_of(dense_greedy(tokens_of(PROMPT), 24))
    stop = usual[6:12]  # spans tokens
    for include in (False, True):
        params = greedy(stop=stop, include_stop_str_in_output=include, max_tokens=24)
        [answer] = llm.generate(PROMPT, params)[0].outputs
        streamed = "".join(u.text for u in llm.stream(PROMPT, params))
        assert answer.stop_reason == stop and answer.finish_reason is FinishReason.STOP
        head = usual.partition(stop)[0]
        assert answer.text == streamed == (head + stop if include else head)


def test_a_stop_tokens_text_may_be_included_but_not_the_end_tokens(llm: LLM) -> None:
    usual = dense_greedy(tokens_of(PROMPT), 24)
    stop = usual[5]
    head = usual[: usual.index(stop)]
    for include in (False, True):
        params = greedy(stop_token_ids=[stop], include_stop_str_in_output=include)
        [answer] = llm.generate(PROMPT, params)[0].outputs
        assert answer.stop_reason == stop
        assert answer.text == text_of([*head, stop] if include else head)
    [prompt] = llm.render_chats([{"role": "user", "content": "Return the n-th Fibonacci number"}])
    params = SamplingParams(temperature=0, max_tokens=120, include_stop_str_in_output=True)
    [answer] = llm.generate([prompt], params)[0].outputs
    assert answer.finish_reason is FinishReason.STOP and "<|" not in answer.text


def test_stop_strings_before_min_tokens_do_not_count(llm: LLM) -> None:
    usual = dense_greedy(tokens_of(PROMPT), 24)
    stop = text_of(usual[:4])[-3:]
    complete = next(i for i in range(1, 25) if stop in text_of(usual[:i]))
    for minimum in (0, complete - 1, complete, 20):
        params = greedy(stop=stop, min_tokens=minimum, max_tokens=24)
        [answer] = llm.generate(PROMPT, params)[0].outputs
        if minimum < complete:
            assert answer.token_ids == usual[:complete]
        else:
            assert len(answer.token_ids) > complete
            assert answer.text.startswith(text_of(usual[:complete]))


def stream_text(pieces: str, stops: list[str], **options: Any) -> tuple[str, str | None]:
    """Text of a stream of one token for each character."""
    stream = IncrementalDetokenizer(embedded().tokenizer, stops, **options)
    shown = ""
    for token in [t for c in pieces for t in tokens_of(c)]:
        shown += stream.add(token)
    return shown + stream.finish(), stream.matched_stop


@pytest.mark.parametrize(
    ("text", "stops", "minimum", "expected"),
    [
        ("abcabc", ["abc"], 0, ("", "abc")),
        ("abcabc", ["abc"], 2, ("", "abc")),  # the token that completes it is past the minimum
        ("abcabc", ["abc"], 3, ("abc", "abc")),
        ("abcabc", ["bca"], 3, ("a", "bca")),  # begins before, ends after
        ("ababa", ["aba"], 3, ("ab", "aba")),  # and overlaps one that did not count
        ("abcZ", ["abc", "abcabc"], 3, ("abcZ", None)),  # held back for the longer, did not count
        ("abcabc", ["abc"], 6, ("abcabc", None)),
    ],
)
def test_which_stop_strings_count(text: str, stops: list[str], minimum: int, expected: Any) -> None:
    assert all(len(tokens_of(c)) == 1 for c in text)
    assert stream_text(text, stops, min_tokens=minimum) == expected
    cut, stop = expected
    included = stream_text(text, stops, min_tokens=minimum, include_stop=True)
    assert included == (cut + (stop or ""), stop)
