"""Speculation: an answer has the same tokens with and without drafts, whatever its parameters."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import numpy as np
import pytest
from support.embedded_llm import SHARED, check_at_rest, make, tokens_of
from support.fake_vlm import Picture, fake_vlm, prepared
from support.grouped_models import GROUPED, WINDOWED, engine_of
from support.guesses import guess
from support.mixed_requests import SCHEMA, TOOL_CALL, assert_same, requests_of
from support.models import embedded, random_tokens
from support.reference import ON_GPU
from support.thinking import thinking_model

from mlx_paged import LLM, RequestOutput, SamplingParams, ops
from mlx_paged.engine.speculation.config import SpeculativeConfig
from mlx_paged.errors import InvalidParameterError
from mlx_paged.platform import Platform

LOOKUPS: list[dict[str, Any]] = [
    {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    {"method": "suffix"},
]


def tell(drafter: Any, outputs: Sequence[RequestOutput]) -> None:
    for output in outputs:
        for answer in output.outputs:
            key = tuple(output.prompt_token_ids), answer.index
            drafter.answers[key] = answer.token_ids


@pytest.mark.one_in(255)
@pytest.mark.parametrize("seed", range(16))
def test_mixed_requests_are_the_same_with_guesses(seed: int) -> None:
    """A tight pool preempts some, several share prefixes, and some must call a tool."""
    prompts, params = requests_of(seed, 24)
    for i in range(0, 24, 8):
        params[i] = replace(
            params[i], structured_outputs=TOOL_CALL, stop_token_ids=None, max_tokens=60
        )
    options = {"num_gpu_blocks_override": 64, "block_size": 8, "max_num_batched_tokens": 64}
    plain = make(**options)
    expected = plain.generate(prompts, params)
    for right, splits in ((0.9, False), (0.5, True)):
        llm = make(**options)
        drafter = guess(llm, right, splits=splits)
        tell(drafter, expected)
        for _ in range(
            2
        ):  # The second time finds prefixes, and what was drafted must not be there.
            assert_same(llm.generate(prompts, params), expected)
        stats = llm.stats()
        assert stats.spec_decoding is not None and stats.num_preemptions > 0
        rejected = stats.spec_decoding.num_draft_tokens - stats.spec_decoding.num_accepted_tokens
        assert stats.spec_decoding.num_accepted_tokens > 150 and rejected > 20
        check_at_rest(llm)


@pytest.mark.skipif(ON_GPU, reason="float32 weights have products of other libraries on a GPU")
def test_a_repeated_prompt_has_the_same_logits_with_guesses() -> None:
    """Its last token is computed alone, and the first time it was computed with the whole prompt,
    which gives other last bits: the answer must go on with one of both in any order of steps."""
    prompt = random_tokens(np.random.default_rng(5), 128)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
    found = []
    for guesses in (False, True):
        llm = make(block_size=16)
        [first] = llm.generate([prompt], params)
        if guesses:
            tell(guess(llm, 1.0), [first])
        [again] = llm.generate([prompt], params)
        assert again.num_cached_tokens == 127
        logprobs = again.outputs[0].logprobs
        assert logprobs is not None
        found.append([{t: p.logprob for t, p in place.items()} for place in logprobs])
    assert found[0] == found[1]


def test_steps_with_drafts_stay_within_the_rows_of_one_order_of_sums(monkeypatch) -> None:
    """On a GPU, products of more rows may be a library's, which sum in another order."""
    on_gpu = replace(Platform.current(), has_cuda=True)
    assert on_gpu.max_exact_rows == ops.max_product_rows() > 0
    monkeypatch.setattr(Platform, "max_exact_rows", 6)
    llm = make(speculative_config={"method": "ngram", "prompt_lookup_min": 1, "adaptive": False})
    sizes: list[int] = []
    launch = llm.engine._executor.launch

    def recorded(batch: Any) -> Any:
        if batch.has_drafts:
            sizes.append(batch.num_tokens)
        return launch(batch)

    monkeypatch.setattr(llm.engine._executor, "launch", recorded)
    prompt = [5, 6, 7, 8] * 8
    llm.generate(
        [prompt, prompt[1:]], SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    )
    assert sizes and max(sizes) == 6


@pytest.mark.one_in(3)
@pytest.mark.parametrize("lookup", LOOKUPS, ids=lambda lookup: lookup["method"])
@pytest.mark.parametrize("adaptive", [False, True])
def test_mixed_requests_are_the_same_with_lookups(lookup: dict[str, Any], adaptive: bool) -> None:
    prompts, params = requests_of(7, 24)
    expected = make(block_size=8).generate(prompts, params)
    llm = make(block_size=8, speculative_config={**lookup, "adaptive": adaptive})
    assert_same(llm.generate(prompts, params), expected)
    found = llm.stats().spec_decoding
    assert found is not None and (adaptive or found.num_accepted_tokens > 50)
    check_at_rest(llm)


@pytest.mark.one_in(2)
@pytest.mark.skipif(ON_GPU, reason="a code may flip with the last bit of a GPU's sum")
@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
def test_quantized_pools(kv_cache_dtype: str) -> None:
    prompts, params = requests_of(11, 12)
    options: dict[str, Any] = {"kv_cache_dtype": kv_cache_dtype, "block_size": 8}
    options |= {"num_gpu_blocks_override": 40, "max_num_batched_tokens": 64}
    expected = make(**options).generate(prompts, params)
    llm = make(**options)
    tell(guess(llm, 0.7), expected)
    for _ in range(2):  # The second time finds prefixes.
        assert_same(llm.generate(prompts, params), expected)
    assert llm.stats().num_preemptions > 0
    check_at_rest(llm)


@pytest.mark.one_in(2)
@pytest.mark.skipif(ON_GPU, reason="heads of 16 dims have no kernel on a GPU")
@pytest.mark.parametrize("name", list(GROUPED))
def test_windows_and_recurrent_states_are_rolled_back(name: str) -> None:
    rng = np.random.default_rng(3)
    prompts = [random_tokens(rng, int(count)) for count in rng.integers(3, 50, 8)]
    params = [
        SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=24, ignore_eos=True)
        for i in range(len(prompts))
    ]
    expected = engine_of(name).generate(prompts, params)
    llm = engine_of(name, num_gpu_blocks_override=26, typical_context_len=20)
    tell(guess(llm, 0.7, splits=name in WINDOWED), expected)
    assert_same(llm.generate(prompts, params), expected)
    assert_same(llm.generate(prompts, params), expected)
    assert llm.stats().num_preemptions > 0
    stats = llm.stats().spec_decoding
    assert stats is not None and stats.num_accepted_tokens > 20
    assert stats.num_draft_tokens > stats.num_accepted_tokens
    llm.engine.check_integrity()


@pytest.mark.skipif(ON_GPU, reason="heads of 16 dims have no kernel on a GPU")
def test_thinking_budgets() -> None:
    params = [
        SamplingParams(
            temperature=1.0,
            seed=i,
            max_tokens=40,
            thinking_token_budget=budget,
            structured_outputs=grammar,
        )
        for i, budget in enumerate([0, 3, 9, 30])
        for grammar in (None, {"regex": "[a-z ]{1,20}"})
    ]
    prompts = ["x = <think>", "y = <think>\n"] * (len(params) // 2)
    options = {"num_gpu_blocks_override": 200, "reasoning_parser": "deepseek_r1"}
    expected = LLM(thinking_model(), **options).generate(prompts, params)
    llm = LLM(thinking_model(), **options)
    tell(guess(llm, 0.8), expected)
    assert_same(llm.generate(prompts, params), expected)
    stats = llm.stats().spec_decoding
    assert stats is not None and stats.num_accepted_tokens > 20


def test_pictures_in_the_prompts() -> None:
    """They come while others are answered, share pictures, and some are preempted."""
    pictures = [Picture(number, 12 + 5 * number) for number in range(3)]
    prompts = [
        prepared([5, 6, 7 + i % 2], pictures[i % 3], [8, 9], *pictures[: i % 2], [10 + i])
        for i in range(10)
    ]
    params = [
        SamplingParams(
            temperature=0.7 * (i % 3), seed=i, max_tokens=20 + i, ignore_eos=True, n=1 + i % 2
        )
        for i in range(len(prompts))
    ]

    def engine() -> LLM:
        return LLM(
            fake_vlm()[0], num_gpu_blocks_override=22, block_size=8, max_num_batched_tokens=40
        )

    def answers(llm: LLM) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        num_steps = 0
        while len(outputs) < len(prompts) or llm.engine.has_unfinished:
            if num_steps % 3 == 0 and (i := len(outputs)) < len(prompts):
                prompt = prompts[i]
                outputs.append(
                    llm.engine.add_request(str(i), prompt.token_ids, params[i], media=prompt)
                )
            llm.engine.step()
            num_steps += 1
        return outputs

    expected = answers(engine())
    llm = engine()
    tell(guess(llm, 0.8), expected)
    for _ in range(2):  # The second time finds prefixes.
        assert_same(answers(llm), expected)
    stats = llm.stats()
    assert stats.spec_decoding is not None and stats.spec_decoding.num_accepted_tokens > 100
    assert stats.num_preemptions > 0
    llm.engine.check_integrity()


def test_what_a_grammar_forces_is_drafted() -> None:
    params = SamplingParams(
        temperature=1.0, seed=3, max_tokens=80, structured_outputs={"json": SCHEMA}
    )
    expected = make().generate([SHARED], params)
    llm = make(speculative_config={"method": "suffix", "adaptive": False})
    [output] = llm.generate([SHARED], params)
    assert_same([output], expected)
    assert set(json.loads(output.outputs[0].text)) == {"name", "kind", "count"}
    assert output.num_accepted_drafts >= 4 and output.num_rejected_drafts == 0
    num_steps = llm.stats().num_steps
    assert num_steps == len(output.outputs[0].token_ids) - output.num_accepted_drafts


def test_a_token_mask_sees_no_draft() -> None:
    calls: list[list[int]] = []

    def mask(index: int, tokens: Sequence[int]) -> None:
        calls.append(list(tokens))

    llm = make(speculative_config={"method": "suffix", "adaptive": False})
    prompt = tokens_of("for i in range(9):\n" * 6)
    output = llm.engine.add_request(
        "r", prompt, SamplingParams(temperature=0, max_tokens=20), token_mask=mask
    )
    while llm.engine.has_unfinished:
        llm.engine.step()
    tokens = output.outputs[0].token_ids
    assert all(call == tokens[: len(call)] for call in calls)
    assert output.num_accepted_drafts == 0


def test_drafts_never_come_from_another_tenant() -> None:
    llm = make(speculative_config={"method": "suffix", "adaptive": False})
    prompt = tokens_of("alpha beta gamma delta epsilon zeta eta theta iota kappa")
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)

    def answer(salt: str) -> RequestOutput:
        output = llm.engine.add_request("r", prompt, params, cache_salt=salt)
        while llm.engine.has_unfinished:
            llm.engine.step()
        return output

    answer("one")
    first, again = answer("two"), answer("two")
    assert again.outputs[0].token_ids == first.outputs[0].token_ids
    assert again.num_accepted_drafts > first.num_accepted_drafts


def test_a_drafter_that_fails_at_the_end_of_an_answer_ends_only_speculation(monkeypatch) -> None:
    prompts, params = requests_of(21, 10)
    expected = make().generate(prompts, params)
    llm = make()
    drafter = guess(llm, 0.8)
    tell(drafter, expected)
    num_calls = 0

    def failing(*_: Any) -> None:
        nonlocal num_calls
        num_calls += 1
        raise RuntimeError("no memory for the answer")

    monkeypatch.setattr(drafter, "finish", failing)
    outputs = llm.generate(prompts, params)
    assert [[a.token_ids for a in o.outputs] for o in outputs] == [
        [a.token_ids for a in o.outputs] for o in expected
    ]
    speculator = llm.engine._speculator
    assert speculator is not None and not speculator.is_active
    assert num_calls == 1 and llm.stats().num_recoveries == 0


def test_an_exception_in_the_middle_changes_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, params = requests_of(21, 10)
    expected = make().generate(prompts, params)
    llm = make()
    drafter = guess(llm, 0.8)
    tell(drafter, expected)
    draft, left = drafter.draft, iter([3, 9, 20, 40])
    fail_at, calls = next(left), 0

    def failing(*args: Any) -> Any:
        nonlocal calls, fail_at
        calls += 1
        if calls == fail_at:
            fail_at = next(left, -1)
            raise KeyboardInterrupt
        return draft(*args)

    monkeypatch.setattr(drafter, "draft", failing)
    outputs = [
        llm.engine.add_request(str(i), tokens_of(p), s)
        for i, (p, s) in enumerate(zip(prompts, params))
    ]
    num_interrupts = 0
    while llm.engine.has_unfinished:
        try:
            llm.engine.step()
        except KeyboardInterrupt:
            num_interrupts += 1
    assert num_interrupts >= 3
    assert [[a.token_ids for a in o.outputs] for o in outputs] == [
        [a.token_ids for a in o.outputs] for o in expected
    ]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"method": "medusa"}, "speculative_config.method"),
        ({"method": 3}, "speculative_config.method"),
        ({"model": ""}, "speculative_config.model"),
        ({"metod": "ngram"}, "speculative_config.metod"),
        ({"num_speculative_tokens": 0}, "speculative_config.num_speculative_tokens"),
        ({"num_speculative_tokens": True}, "speculative_config.num_speculative_tokens"),
        ({"method": "suffix", "prompt_lookup_max": 3}, "speculative_config.prompt_lookup_max"),
        (
            {"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 3},
            "speculative_config.prompt_lookup_min",
        ),
        ({"suffix_decoding_min_token_prob": 2}, "speculative_config.suffix_decoding_min_token"),
        ({"adaptive": "yes"}, "speculative_config.adaptive"),
        ("[1]", "speculative_config"),
        ("{", "speculative_config"),
    ],
)
def test_wrong_options_are_refused_by_name(options: Any, field: str) -> None:
    with pytest.raises(InvalidParameterError, match=field):
        make(speculative_config=options)


def test_options_are_those_of_vllm() -> None:
    ngram = SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_max=4)
    assert (ngram.prompt_lookup_min, ngram.prompt_lookup_max, ngram.max_drafts) == (4, 4, 3)
    assert SpeculativeConfig().method == "suffix"
    assert SpeculativeConfig(prompt_lookup_min=2).method == "ngram"
    with pytest.raises(InvalidParameterError, match="pooling"):
        make(embedded(), runner="pooling", speculative_config={"method": "suffix"})
