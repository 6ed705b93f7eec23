"""`LLM` on the embedded model: mlx-lm's greedy answers however steps are cut, and clean books."""

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
from support.models import (
    dense_greedy,
    save_tiny,
    tiny_config,
)

import mlx_paged
from mlx_paged import LLM, SamplingParams
from mlx_paged.core import FinishReason
from mlx_paged.demo.prompts import CHATS
from mlx_paged.errors import (
    DuplicateRequestError,
    InvalidParameterError,
    RequestTooLargeError,
)

PROMPT = PROMPTS[2]

# --- Greedy parity --------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "no prefix cache": {"enable_prefix_caching": False},
    "no overlap": {"async_scheduling": False},
    "neither": {"enable_prefix_caching": False, "async_scheduling": False},
    "16-token steps": {"max_num_batched_tokens": 16, "max_num_seqs": 16},
    "64-token steps": {"max_num_batched_tokens": 64, "max_num_seqs": 16},
    "7-token steps": {"max_num_batched_tokens": 7, "max_num_seqs": 4, "async_scheduling": False},
    "blocks of 8": {"block_size": 8},
    "blocks of 64": {"block_size": 64, "max_num_batched_tokens": 64, "max_num_seqs": 8},
    "one at a time": {"max_num_seqs": 1, "max_num_batched_tokens": 16},
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("options", OPTIONS)
def test_greedy_tokens_are_those_of_the_dense_cache(options: str) -> None:
    llm = make(**OPTIONS[options])
    assert_dense(llm.generate(PROMPTS, GREEDY), PROMPTS, NUM_TOKENS)
    check_at_rest(llm)


@pytest.mark.parametrize("size", [1, 7, 16])
def test_batches_of_any_size(llm: LLM, size: int) -> None:
    for begin in range(0, len(PROMPTS), size):
        prompts = PROMPTS[begin : begin + size]
        assert_dense(llm.generate(prompts, GREEDY), prompts, NUM_TOKENS)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("async_scheduling", [True, False], ids=["overlap", "no overlap"])
@pytest.mark.parametrize("caching", [True, False], ids=["caching", "no caching"])
def test_a_tiny_pool_preempts_and_nobody_notices(caching: bool, async_scheduling: bool) -> None:
    llm = make(
        block_size=8,
        num_gpu_blocks_override=13,
        max_num_seqs=8,
        enable_prefix_caching=caching,
        async_scheduling=async_scheduling,
    )
    prompts = [p for p in PROMPTS if len(tokens_of(p)) < 30]
    assert len(prompts) > 8
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    outputs = llm.generate(prompts, params)
    assert llm.stats().num_preemptions > 0, "the pool is meant to be too small"
    assert_dense(outputs, prompts, 24)
    check_at_rest(llm)


def test_chats_agree_with_the_dense_cache_to_their_end(llm: LLM) -> None:
    """The real thing: chats with the model's own end token."""
    chats = [[{"role": "user", "content": content}] for content in CHATS[:6]]
    outputs = llm.chat(chats, SamplingParams(temperature=0, max_tokens=32))
    for output, prompt in zip(outputs, llm.render_chats(chats)):
        assert output.prompt is None and output.prompt_token_ids == prompt
        expected = dense_greedy(prompt, 32)
        ends = [i for i, token in enumerate(expected) if token in llm.tokenizer.eos_token_ids]
        [answer] = output.outputs
        if ends:
            assert answer.finish_reason is FinishReason.STOP and answer.stop_reason is None
            assert answer.token_ids == expected[: ends[0] + 1]
            assert answer.text == text_of(expected[: ends[0]])
        else:
            assert answer.finish_reason is FinishReason.LENGTH
            assert answer.token_ids == expected


def test_a_directory_can_be_given(tmp_path: Any) -> None:
    save_tiny(tmp_path, tiny_config("qwen3", vocab_size=4096))
    llm = make(tmp_path, kv_cache_memory=1 << 22)
    [output] = llm.generate("hello", SamplingParams(max_tokens=3, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 3
    check_at_rest(llm)


# --- Sharing --------------------------------------------------------------------------------------


def test_a_repeated_prompt_comes_from_the_cache(llm: LLM) -> None:
    prompt = PROMPTS[12]
    num_tokens = len(tokens_of(prompt))
    assert num_tokens > 32
    first, again = (llm.generate(prompt, GREEDY)[0] for _ in range(2))
    assert first.num_cached_tokens == 0
    # All but the last token, which is computed anew: its logits are needed.
    assert again.num_cached_tokens == num_tokens - 1
    assert again.outputs == first.outputs
    assert_dense([again], [prompt], NUM_TOKENS)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 63, 64, 65])
def test_sharing_holds_to_the_token_after_a_request_has_ended(llm: LLM, length: int) -> None:
    text = (tokens_of(PROMPTS[12]) * 2)[:length]
    once = SamplingParams(temperature=0, max_tokens=1)
    assert llm.generate(text, once)[0].num_cached_tokens == 0
    longer = text + tokens_of(PROMPTS[1])
    outputs = [llm.generate(prompt, GREEDY)[0] for prompt in (text, longer, longer)]
    assert [o.num_cached_tokens for o in outputs] == [length - 1, length, len(longer) - 1]
    answers = [output.outputs[0].token_ids for output in outputs]
    assert answers == [dense_greedy(prompt, NUM_TOKENS) for prompt in (text, longer, longer)]
    check_at_rest(llm)


@pytest.mark.parametrize("async_scheduling", [True, False], ids=["overlap", "no overlap"])
def test_a_chats_next_turn_reuses_all_that_was_computed(async_scheduling: bool) -> None:
    """Prompt and answer but for its last token, which no step has computed."""
    llm = make(async_scheduling=async_scheduling)
    sampled = SamplingParams(temperature=0.8, seed=3, max_tokens=21, ignore_eos=True)
    fresh = make(enable_prefix_caching=False)
    prompt, num_computed = tokens_of(PROMPTS[3]), 0
    for turn in range(3):
        [output], [expected] = llm.generate(prompt, sampled), fresh.generate(prompt, sampled)
        answer = output.outputs[0].token_ids
        assert answer == expected.outputs[0].token_ids
        assert output.num_cached_tokens == num_computed
        prompt = prompt + answer + tokens_of(PROMPTS[turn])
        num_computed = len(output.prompt_token_ids) + len(answer) - 1
    check_at_rest(llm)


def test_sharing_holds_to_the_token_while_a_request_runs(llm: LLM) -> None:
    text = tokens_of(PROMPTS[12])[:50]
    first = llm.engine.add_request("first", text, GREEDY)
    while not first.outputs[0].token_ids:
        llm.engine.step()
    other = text[:45] + tokens_of(PROMPTS[1])
    second = llm.engine.add_request("second", other, GREEDY)
    while llm.engine.has_unfinished:
        llm.engine.step()
        llm.engine.check_integrity()
    common = next(i for i, (a, b) in enumerate(zip(text, other)) if a != b)
    assert second.num_cached_tokens == common >= 45
    answers = [output.outputs[0].token_ids for output in (first, second)]
    assert answers == [dense_greedy(prompt, NUM_TOKENS) for prompt in (text, other)]
    check_at_rest(llm)


def test_a_preempted_request_resumes_where_it_was(llm: LLM) -> None:
    """The tokens of its last block are not computed again unless the block was reused."""
    params = SamplingParams(temperature=0.9, seed=5, max_tokens=30, ignore_eos=True)
    text = tokens_of(PROMPTS[12])[:50]
    [expected] = llm.generate(text, params)
    llm.engine.reset_prefix_cache()
    output = llm.engine.add_request("a", text, params)
    while len(output.outputs[0].token_ids) < 9:
        llm.engine.step()
    scheduler = llm.engine._scheduler
    [seq] = list(scheduler.running)
    computed = seq.num_computed_tokens
    scheduler._preempt(seq)
    while not scheduler.running:
        llm.engine.step()
    assert seq.tables.num_cached_tokens >= computed > 32 and computed % 32
    while llm.engine.has_unfinished:
        llm.engine.step()
        llm.engine.check_integrity()
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    check_at_rest(llm)


def test_prompts_that_part_inside_of_a_block_share_up_to_there(llm: LLM) -> None:
    [_] = llm.generate(PROMPTS[4], GREEDY)
    one, two = tokens_of(PROMPTS[4]), tokens_of(PROMPTS[5])
    common = next(i for i, (a, b) in enumerate(zip(one, two)) if a != b)
    assert common % 32, "or no block needs to be copied"
    before = llm.stats().counters
    [output] = llm.generate(PROMPTS[5], GREEDY)
    after = llm.stats().counters
    assert output.num_cached_tokens == common
    assert after.num_copied_tokens - before.num_copied_tokens == common % 32
    assert_dense([output], [PROMPTS[5]], NUM_TOKENS)


def test_concurrent_prompts_share_blocks_while_they_run(llm: LLM) -> None:
    prompt = PROMPTS[12]
    outputs = llm.generate([prompt + f"# {i}\n" for i in range(8)], GREEDY)
    shared = len(tokens_of(prompt)) // 32 * 32
    assert sum(output.num_cached_tokens >= shared for output in outputs) >= 7
    assert llm.stats().max_shared_blocks >= shared // 32
    assert_dense(outputs, [prompt + f"# {i}\n" for i in range(8)], NUM_TOKENS)


def test_without_prefix_caching_nothing_is_kept() -> None:
    llm = make(enable_prefix_caching=False)
    for _ in range(2):
        [output] = llm.generate(PROMPTS[12], GREEDY)
        assert output.num_cached_tokens == 0
    assert llm.stats().usage.num_cached_blocks == 0
    check_at_rest(llm)


def test_forgetting_prefixes_frees_their_blocks(llm: LLM) -> None:
    llm.generate(PROMPTS[12], GREEDY)
    assert llm.stats().usage.num_cached_blocks > 0
    assert llm.engine.reset_prefix_cache() > 0
    assert llm.stats().usage.num_cached_blocks == 0
    [output] = llm.generate(PROMPTS[12], GREEDY)
    assert output.num_cached_tokens == 0


# --- Sampling -------------------------------------------------------------------------------------


def test_a_seeded_answer_does_not_depend_on_its_company(llm: LLM) -> None:
    params = SamplingParams(temperature=0.9, max_tokens=10, seed=7, n=2, ignore_eos=True)
    [alone] = llm.generate(PROMPT, params)
    answers = [o.token_ids for o in alone.outputs]
    assert answers[0] != answers[1], "two answers of one request are two draws"
    others = [SamplingParams(temperature=1.5, max_tokens=10)] * len(PROMPTS)
    llm.engine.reset_prefix_cache()
    crowd = llm.generate([*PROMPTS, PROMPT], [*others, params])[-1]
    assert [o.token_ids for o in crowd.outputs] == answers
    assert [o.text for o in crowd.outputs] == [o.text for o in alone.outputs]
    cut = make(max_num_batched_tokens=7, max_num_seqs=3, async_scheduling=False, block_size=8)
    [again] = cut.generate(PROMPT, params)
    assert [o.token_ids for o in again.outputs] == answers


def test_preemption_does_not_change_a_seeded_answer(llm: LLM) -> None:
    params = [
        SamplingParams(temperature=1.0, max_tokens=24, seed=i, ignore_eos=True) for i in range(8)
    ]
    prompts = [p for p in PROMPTS if len(tokens_of(p)) < 30][:8]
    expected = [o.outputs[0].token_ids for o in llm.generate(prompts, params)]
    tiny = make(block_size=8, num_gpu_blocks_override=13)
    assert [o.outputs[0].token_ids for o in tiny.generate(prompts, params)] == expected
    assert tiny.stats().num_preemptions > 0
    check_at_rest(tiny)


def test_without_a_seed_answers_differ(llm: LLM) -> None:
    params = SamplingParams(temperature=1.5, max_tokens=40, ignore_eos=True)
    answers = {tuple(llm.generate(PROMPT, params)[0].outputs[0].token_ids) for _ in range(3)}
    assert len(answers) == 3


# --- Errors ---------------------------------------------------------------------------------------

BAD_PROMPTS: dict[str, tuple[Any, type[Exception], str]] = {
    "empty text": ([""], InvalidParameterError, "prompt_token_ids must be at least one token"),
    "no tokens": ([[]], InvalidParameterError, "prompt_token_ids must be at least one token"),
    "too large a token": (
        [[1, 4096]],
        InvalidParameterError,
        r"integers in \[0, 4096\) but got 4096",
    ),
    "a negative token": ([[5, -1]], InvalidParameterError, "prompt_token_ids .* -1"),
    "a fraction": ([[5, 1.5]], InvalidParameterError, "prompt_token_ids .* 1.5"),
    "too long": ([[5] * 4090], RequestTooLargeError, "4090 prompt .*4096 tokens"),
}


@pytest.mark.parametrize("case", BAD_PROMPTS)
def test_a_bad_prompt_is_refused_and_the_engine_goes_on(llm: LLM, case: str) -> None:
    prompts, error, message = BAD_PROMPTS[case]
    with pytest.raises(error, match=message):
        llm.generate(prompts, GREEDY)
    # One of many: none is run.
    steps = llm.stats().num_steps
    with pytest.raises(error, match=message):
        llm.generate([PROMPTS[0], *prompts, PROMPTS[1]], GREEDY)
    with pytest.raises(error, match=message):
        next(llm.stream(prompts, GREEDY))
    assert llm.stats().num_steps == steps
    check_at_rest(llm)
    assert_dense(llm.generate(PROMPTS[:1], GREEDY), PROMPTS[:1], NUM_TOKENS)


def test_a_prompt_that_no_pool_could_hold_is_refused() -> None:
    llm = make(block_size=8, num_gpu_blocks_override=4)
    with pytest.raises(RequestTooLargeError) as caught:
        llm.generate([[5] * 20], GREEDY)
    assert caught.value.limited_by == "kv_cache"
    # A request that just fits is served, to the last slot.
    prompt = tokens_of(PROMPT)[:13]
    [output] = llm.generate([prompt], GREEDY)
    assert output.outputs[0].token_ids == dense_greedy(prompt, NUM_TOKENS)
    check_at_rest(llm)


def test_a_refused_prompt_leaves_an_open_stream_alone(llm: LLM) -> None:
    streamed = ""
    for i, update in enumerate(llm.stream(PROMPTS[1], GREEDY)):
        streamed += update.text
        if i == 2:
            with pytest.raises(InvalidParameterError):
                llm.generate([""], GREEDY)
    assert streamed == text_of(dense_greedy(tokens_of(PROMPTS[1]), NUM_TOKENS))


def test_parameters_are_one_for_all_or_one_for_each(llm: LLM) -> None:
    with pytest.raises(InvalidParameterError, match=r"params must be .*3 prompts but got 2"):
        llm.generate(PROMPTS[:3], [GREEDY, GREEDY])


def test_callers_may_change_their_lists_while_a_request_runs(llm: LLM) -> None:
    """Those they gave, and those they were given."""
    prompt = tokens_of(PROMPT)
    params = SamplingParams(
        temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, frequency_penalty=2
    )
    [expected] = llm.generate([prompt], params)
    assert expected.prompt_token_ids == prompt == tokens_of(PROMPT)

    given = list(prompt)
    output = llm.engine.add_request("mine", given, params)
    given.clear()
    assert output.prompt_token_ids == prompt
    output.prompt_token_ids[:] = [7]
    while not output.finished:
        llm.engine.step()
    assert output.outputs == expected.outputs

    given, tokens = list(prompt), []
    for update in llm.stream([given], params):
        given[:] = [7]
        tokens.append(update.token_id)
    assert tokens == expected.outputs[0].token_ids


def test_an_id_in_use_is_refused(llm: LLM) -> None:
    llm.engine.add_request("mine", [5, 6], GREEDY)
    with pytest.raises(DuplicateRequestError, match="mine"):
        llm.engine.add_request("mine", [7], GREEDY)
    assert llm.engine.abort("mine")
    assert not llm.engine.abort("mine")


def test_no_prompts_have_no_answers(llm: LLM) -> None:
    assert llm.generate([], GREEDY) == []
    assert list(llm.stream([], GREEDY)) == []


@pytest.mark.parametrize("async_scheduling", [True, False], ids=["overlap", "no overlap"])
def test_a_step_that_fails_once_is_run_again(
    async_scheduling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make(async_scheduling=async_scheduling)
    launch = llm.engine._runner.launch
    calls = 0

    def fail_once(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise MemoryError("no memory for this step")
        return launch(*args)

    monkeypatch.setattr(llm.engine._runner, "launch", fail_once)
    assert_dense(llm.generate(PROMPTS[:3], GREEDY), PROMPTS[:3], NUM_TOKENS)
    check_at_rest(llm)
    assert llm.stats().num_faults == 1
    assert_dense(llm.generate(PROMPTS[:3], GREEDY), PROMPTS[:3], NUM_TOKENS)


# --- Aborting -------------------------------------------------------------------------------------


def test_an_aborted_request_says_so_and_its_work_stays_cached(llm: LLM) -> None:
    prompt = tokens_of(PROMPTS[12])
    output = llm.engine.add_request("a", prompt, GREEDY)
    other = llm.engine.add_request("b", tokens_of(PROMPTS[1]), GREEDY)
    for _ in range(4):
        llm.engine.step()
    assert llm.engine.abort("a")
    assert output.outputs[0].finish_reason is FinishReason.ABORT
    length = len(output.outputs[0].token_ids)
    while llm.engine.has_unfinished:
        assert all(update.request_id == "b" for update in llm.engine.step())
    assert len(output.outputs[0].token_ids) == length
    assert other.outputs[0].token_ids == dense_greedy(tokens_of(PROMPTS[1]), NUM_TOKENS)
    [again] = llm.generate(PROMPTS[12], GREEDY)
    assert again.num_cached_tokens >= len(prompt) // 32 * 32


@pytest.mark.parametrize("async_scheduling", [True, False], ids=["overlap", "no overlap"])
def test_books_agree_after_every_step(async_scheduling: bool) -> None:
    llm = make(
        block_size=8,
        num_gpu_blocks_override=20,
        max_num_seqs=6,
        max_num_batched_tokens=24,
        async_scheduling=async_scheduling,
    )
    prompts = [p for p in PROMPTS if len(tokens_of(p)) < 40]
    outputs = [llm.engine.add_request(str(i), tokens_of(p), GREEDY) for i, p in enumerate(prompts)]
    steps = 0
    while llm.engine.has_unfinished:
        llm.engine.step()
        llm.engine.check_integrity()
        steps += 1
        if steps == 9:
            llm.engine.abort("3")
        assert steps < 500
    for i, (prompt, output) in enumerate(zip(prompts, outputs)):
        if i != 3:
            assert output.outputs[0].token_ids == dense_greedy(tokens_of(prompt), NUM_TOKENS)
    check_at_rest(llm)


def test_moments_of_a_request_are_in_order(llm: LLM) -> None:
    [output] = llm.generate(PROMPT, GREEDY)
    metrics = output.metrics
    assert metrics.first_token_time is not None and metrics.finished_time is not None
    assert metrics.arrival_time <= metrics.first_token_time <= metrics.finished_time
    assert metrics.time_to_first_token == metrics.first_token_time - metrics.arrival_time


def test_the_package_offers_what_a_script_needs() -> None:
    assert {"LLM", "SamplingParams", "RequestOutput", "load"} <= set(dir(mlx_paged))
