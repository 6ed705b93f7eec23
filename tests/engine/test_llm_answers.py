"""`LLM` on the embedded model: where an answer ends, and how it is streamed."""

from __future__ import annotations

from typing import Any

import pytest
from support.embedded_llm import (
    GREEDY,
    NUM_TOKENS,
    PROMPTS,
    assert_dense,
    check_at_rest,
    make,
    text_of,
    tokens_of,
)
from support.models import dense_greedy

from mlx_paged import LLM, SamplingParams
from mlx_paged.core import FinishReason

# --- Stopping -------------------------------------------------------------------------------------

PROMPT = PROMPTS[2]


def expected_answer() -> list[int]:
    return dense_greedy(tokens_of(PROMPT), 24)


@pytest.mark.parametrize("async_scheduling", [True, False], ids=["overlap", "no overlap"])
def test_stop_strings_cut_the_text_and_end_the_sequence(async_scheduling: bool) -> None:
    llm = make(async_scheduling=async_scheduling)
    text = text_of(expected_answer())
    for begin in (0, 5, 11, 20):
        stop = text[begin : begin + 4]
        assert stop, "the answer is long enough"
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop=["~~", stop])
        [output] = llm.generate(PROMPT, params)
        [answer] = output.outputs
        assert answer.text == text.partition(stop)[0]
        assert answer.finish_reason is FinishReason.STOP
        assert answer.stop_reason == stop
        # It ended with the token that completed the stop string: no earlier prefix has it.
        assert answer.token_ids == expected_answer()[: len(answer.token_ids)]
        assert stop in text_of(answer.token_ids)
        assert stop not in text_of(answer.token_ids[:-1])
    check_at_rest(llm)


def test_a_stop_string_that_never_comes_changes_nothing(llm: LLM) -> None:
    text = text_of(expected_answer())
    almost = text[-3:] + "~~"  # begins at the very end, so that it is held back to the last
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop=almost)
    [answer] = llm.generate(PROMPT, params)[0].outputs
    assert answer.text == text
    assert answer.finish_reason is FinishReason.LENGTH and answer.stop_reason is None


def test_stop_token_ids_end_the_sequence(llm: LLM) -> None:
    tokens = expected_answer()
    stop = tokens[7]
    end = tokens.index(stop)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop_token_ids=[stop])
    [answer] = llm.generate(PROMPT, params)[0].outputs
    assert answer.token_ids == tokens[: end + 1]
    assert answer.text == text_of(tokens[:end]), "the token that ended it is not part of the text"
    assert answer.finish_reason is FinishReason.STOP and answer.stop_reason == stop


def test_the_end_token_ends_unless_it_is_ignored(llm: LLM) -> None:
    prompt = llm.render_chats([{"role": "user", "content": "Return the n-th Fibonacci number"}])[0]
    [full] = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=120))[0].outputs
    assert full.finish_reason is FinishReason.STOP and full.stop_reason is None
    assert full.token_ids[-1] in llm.tokenizer.eos_token_ids
    assert full.text == text_of(full.token_ids[:-1])
    assert "<|" not in full.text
    beyond = len(full.token_ids) + 3
    params = SamplingParams(temperature=0, max_tokens=beyond, ignore_eos=True)
    [longer] = llm.generate([prompt], params)[0].outputs
    assert longer.token_ids[: len(full.token_ids)] == full.token_ids
    assert len(longer.token_ids) == beyond
    assert longer.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("max_tokens", [1, 2, 9])
def test_max_tokens_is_exact(llm: LLM, max_tokens: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    assert_dense(llm.generate(PROMPTS[:4], params), PROMPTS[:4], max_tokens)


def test_without_max_tokens_the_context_is_the_limit() -> None:
    llm = make(max_model_len=40)
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    [output] = llm.generate(PROMPT, params)
    assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == 40
    assert output.outputs[0].finish_reason is FinishReason.LENGTH
    check_at_rest(llm)


def test_every_prompt_may_have_parameters_of_its_own(llm: LLM) -> None:
    params = [
        SamplingParams(temperature=0, max_tokens=5, ignore_eos=True),
        SamplingParams(temperature=1.0, max_tokens=9, ignore_eos=True, seed=3),
        SamplingParams(temperature=0, max_tokens=7, ignore_eos=True, n=2),
    ]
    outputs = llm.generate(PROMPTS[:3], params)
    assert [[len(o.token_ids) for o in out.outputs] for out in outputs] == [[5], [9], [7, 7]]
    assert_dense(outputs[:1], PROMPTS[:1], 5)
    expected = dense_greedy(tokens_of(PROMPTS[2]), 7)
    assert [o.token_ids for o in outputs[2].outputs] == [expected, expected]


# --- Streaming ------------------------------------------------------------------------------------


@pytest.mark.parametrize("async_scheduling", [True, False], ids=["overlap", "no overlap"])
def test_a_stream_adds_up_to_what_generate_returns(async_scheduling: bool) -> None:
    llm = make(async_scheduling=async_scheduling)
    stop = text_of(dense_greedy(tokens_of(PROMPTS[1]), NUM_TOKENS))[8:11]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, n=2, stop=stop)
    outputs = llm.generate(PROMPTS[:5], params)
    streamed: dict[tuple[str, int], list[Any]] = {}
    for update in llm.stream(PROMPTS[:5], params):
        streamed.setdefault((update.request_id, update.index), []).append(update)
    assert set(streamed) == {(str(i), k) for i in range(5) for k in range(2)}
    for (place, index), updates in streamed.items():
        answer = outputs[int(place)].outputs[index]
        assert "".join(u.text for u in updates) == answer.text
        assert [u.token_id for u in updates if u.token_id is not None] == answer.token_ids
        assert [u.finish_reason for u in updates[:-1]] == [None] * (len(updates) - 1)
        assert updates[-1].finish_reason == answer.finish_reason
        assert updates[-1].stop_reason == answer.stop_reason
    assert any(o.outputs[0].stop_reason == stop for o in outputs)
    check_at_rest(llm)


def test_a_stream_brings_its_first_token_before_the_last_is_computed(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[:3], GREEDY)
    next(stream)
    assert llm.engine.has_unfinished
    steps = llm.stats().num_steps
    for _ in stream:
        pass
    assert llm.stats().num_steps > steps


def test_leaving_a_stream_early_frees_what_it_held(llm: LLM) -> None:
    for i, update in enumerate(llm.stream(PROMPTS, GREEDY)):
        if i == 20:
            assert update.finish_reason is None
            assert llm.stats().usage.num_used_blocks > 0
            break
    check_at_rest(llm)
    assert_dense(llm.generate(PROMPTS[:2], GREEDY), PROMPTS[:2], NUM_TOKENS)


def test_a_stream_that_is_never_begun_runs_nothing(llm: LLM) -> None:
    steps = llm.stats().num_steps
    llm.stream(PROMPTS, GREEDY)
    assert llm.stats().num_steps == steps
    assert not llm.engine.has_unfinished


def test_generate_inside_a_stream_takes_nothing_from_it(llm: LLM) -> None:
    """Two calls may be interleaved: each gets its own answers, whole."""
    streamed = ""
    for i, update in enumerate(llm.stream(PROMPTS[1], GREEDY)):
        streamed += update.text
        if i == 2:
            assert_dense(llm.generate(PROMPTS[2:4], GREEDY), PROMPTS[2:4], NUM_TOKENS)
    assert streamed == text_of(dense_greedy(tokens_of(PROMPTS[1]), NUM_TOKENS))
