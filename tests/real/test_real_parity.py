"""A real checkpoint gives mlx-lm's tokens and probabilities, in any batch and from the cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mlx_lm.generate import generate_step
from support.plain import plain_caches
from support.real_model import CONVERSATIONS, dense_logits, log_softmax, texts

# isort: split
import mlx.core as mx

from mlx_paged import LLM, RequestOutput, SamplingParams
from mlx_paged.engine.config import DEFAULT_STEP_TOKENS

GREEDY = SamplingParams(temperature=0, max_tokens=24)
NUM_TOKENS = 160  # of each text


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def answers(llm: LLM) -> list[RequestOutput]:
    """The greedy answers of eight chats in one batch."""
    llm.engine.reset_prefix_cache()
    return llm.chat(CONVERSATIONS, GREEDY)


def test_it_answers(answers: list[RequestOutput]) -> None:
    assert answers[0].outputs[0].text == "The capital of France is Paris."
    assert "William Shakespeare" in answers[2].outputs[0].text


def test_every_token_is_mlx_lms(answers: list[RequestOutput], dense: Any) -> None:
    # Greedy answers are equal if each token is the likeliest after mlx-lm has read those before.
    for answer in answers[1::4]:
        prompt, tokens = answer.prompt_token_ids, list(answer.outputs[0].token_ids)
        logits = dense_logits(dense, [*prompt, *tokens[:-1]], len(prompt) - 1)
        assert tokens == logits.argmax(axis=-1).tolist(), answer.outputs[0].text


@pytest.mark.long
def test_mlx_lms_own_loop_gives_the_same_answer(
    answers: list[RequestOutput], dense: Any, llm: LLM
) -> None:
    prompt = mx.array(answers[0].prompt_token_ids)
    caches = plain_caches(dense)
    steps = generate_step(prompt, dense, max_tokens=24, prompt_cache=caches)
    found = []
    for token, _ in steps:
        found.append(int(token))
        if token in llm.tokenizer.eos_token_ids:
            break
    assert list(answers[0].outputs[0].token_ids) == found


@pytest.mark.long
def test_a_chat_alone_has_the_tokens_that_it_has_in_a_batch(
    answers: list[RequestOutput], llm: LLM
) -> None:
    for conversation, expected in list(zip(CONVERSATIONS, tokens_of(answers)))[::2]:
        llm.engine.reset_prefix_cache()
        assert tokens_of(llm.chat([conversation], GREEDY)) == [expected]


@pytest.mark.long
def test_seeded_answers_do_not_depend_on_the_batch(llm: LLM) -> None:
    params = [SamplingParams(temperature=0.9, seed=seed, max_tokens=16) for seed in range(4)]
    together = tokens_of(llm.chat(CONVERSATIONS[4:], params))
    alone = [tokens_of(llm.chat([c], p))[0] for c, p in zip(CONVERSATIONS[4:], params)]
    assert together == alone
    assert len({tuple(tokens) for tokens in together}) == 4


@pytest.mark.long
def test_cached_prefixes_change_no_token(answers: list[RequestOutput], llm: LLM) -> None:
    llm.engine.reset_prefix_cache()
    llm.chat([CONVERSATIONS[0]], GREEDY)
    again = llm.chat(CONVERSATIONS, GREEDY)
    assert tokens_of(again) == tokens_of(answers)
    prompts = [output.prompt_token_ids for output in again]
    shared = next(i for i, (a, b) in enumerate(zip(prompts[0], prompts[1])) if a != b)
    assert again[0].num_cached_tokens == len(prompts[0]) - 1, "all but the last, which is computed"
    assert again[1].num_cached_tokens == shared


def test_a_second_turn_reads_the_first_from_the_cache(llm: LLM, dense: Any) -> None:
    llm.engine.reset_prefix_cache()
    first = [CONVERSATIONS[0][0], {"role": "user", "content": "My name is Ada. Say hello to me."}]
    [answer] = llm.chat([first], GREEDY)
    second = [
        *first,
        {"role": "assistant", "content": answer.outputs[0].text},
        {"role": "user", "content": "What is my name?"},
    ]
    [reply] = llm.chat([second], GREEDY)
    assert reply.num_cached_tokens >= len(answer.prompt_token_ids)
    prompt, tokens = reply.prompt_token_ids, list(reply.outputs[0].token_ids)
    logits = dense_logits(dense, [*prompt, *tokens[:-1]], len(prompt) - 1)
    assert tokens == logits.argmax(axis=-1).tolist()


@pytest.mark.long
def test_log_probabilities_are_mlx_lms(llm: LLM, dense: Any) -> None:
    for text in texts(llm.tokenizer):
        tokens = text[:NUM_TOKENS]
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        [output] = llm.generate([tokens], params)
        assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
        found = [report.logprob for report in output.prompt_logprobs[1:] if report]
        expected = log_softmax(dense_logits(dense, tokens))
        expected = expected[np.arange(len(tokens) - 1), tokens[1:]]
        assert np.abs(np.array(found) - expected).max() < 1e-3


@pytest.mark.long
def test_a_long_context_is_read_to_its_beginning(llm: LLM) -> None:
    filler = "The grass is green. The sky is blue. The sun is yellow. Here we go. " * 150
    prompt = f"The pass key is 71432. Remember it.\n{filler}\nWhat is the pass key? The pass key is"
    [output] = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=6))
    assert len(output.prompt_token_ids) > DEFAULT_STEP_TOKENS, "it takes several steps"
    assert output.outputs[0].text.startswith(" 71432")
