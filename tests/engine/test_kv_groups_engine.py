"""Windowed and recurrent models through the engine: mlx-lm's dense answers, however it runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.grouped_models import GROUPED, HYBRIDS, WINDOW, WINDOWED, dense_answer, engine_of
from support.models import random_tokens

from mlx_paged import LLM, SamplingParams, ops

NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


def prompts() -> list[list[int]]:
    """Shorter and longer than a window; some begin alike."""
    rng = np.random.default_rng(0)
    found = [random_tokens(rng, count) for count in (5, 40, 100, 131, 64, 12, 8)]
    found.append(found[2][:60] + random_tokens(rng, 7))
    found.append(found[2][:60] + random_tokens(rng, 20))
    return found


RUNS: dict[str, dict[str, Any]] = {
    "plenty of room": {},
    "no overlap": {"async_scheduling": False},
    "no prefix cache": {"enable_prefix_caching": False},
    "one at a time": {"max_num_seqs": 1},
    "preempted": {"num_gpu_blocks_override": 21, "typical_context_len": 300},
    "preempted, no overlap": {
        "num_gpu_blocks_override": 21,
        "typical_context_len": 300,
        "async_scheduling": False,
    },
}


def check(llm: LLM, name: str) -> None:
    expected = [dense_answer(name, p, NUM_TOKENS) for p in prompts()]
    copies = ops.pool_copies()  # of other tests of this process
    for _ in range(2):  # the second time from the cache, where there is one
        outputs = llm.generate(prompts(), GREEDY)
        assert [o.outputs[0].token_ids for o in outputs] == expected
        llm.engine.check_integrity()
    stats = llm.stats()
    assert stats.pool_copies == copies and stats.num_faults == 0
    assert stats.usage.num_used_blocks == 0
    for usage in stats.group_usage:
        assert usage.num_used_blocks == usage.num_quarantined_blocks == 0


SOME = ["gemma3", "llama4", "qwen3_next", "recurrent_gemma"]  # of every kind of group


@pytest.mark.one_in(71)
@pytest.mark.parametrize(
    ("name", "run"),
    [
        (name, run)
        for name in GROUPED
        for run in RUNS
        if name in SOME or run in ("plenty of room", "preempted")
    ],
)
def test_tokens_are_those_of_the_dense_path(name: str, run: str) -> None:
    llm = engine_of(name, **RUNS[run])
    check(llm, name)
    if "preempted" in run:
        assert llm.stats().num_preemptions > 0


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", GROUPED)
def test_the_second_turn_of_a_chat_is_not_computed_again(name: str) -> None:
    """Cached tokens, and the same answer as without them."""
    rng = np.random.default_rng(1)
    llm = engine_of(name)
    chat = random_tokens(rng, 70)
    first = llm.generate([chat], GREEDY)[0]
    assert first.num_cached_tokens == 0
    chat = chat + first.outputs[0].token_ids + random_tokens(rng, 15)
    second = llm.generate([chat], GREEDY)[0]
    # All but what follows the last snapshot; without states, all full blocks.
    assert second.num_cached_tokens >= (64 if name in HYBRIDS else 80)
    cold = engine_of(name).generate([chat], GREEDY)[0]
    assert cold.num_cached_tokens == 0
    assert second.outputs[0].token_ids == cold.outputs[0].token_ids
    assert second.outputs[0].token_ids == dense_answer(name, chat, NUM_TOKENS)


@pytest.mark.parametrize("name", WINDOWED)
def test_a_long_context_holds_a_window_of_blocks(name: str) -> None:
    llm = engine_of(name, max_model_len=512, max_num_seqs=1)
    prompt = random_tokens(np.random.default_rng(2), 400)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    most = 0
    llm.engine.add_request("long", prompt, params)
    while llm.engine.has_unfinished:
        llm.engine.step()
        llm.engine.check_integrity()
        [usage] = llm.stats().group_usage
        most = max(most, usage.num_used_blocks)
    # Window and chunk of 24 tokens, and where they begin and end within a block of 8; one chunk
    # more while the step before is not committed.
    assert most <= -(-WINDOW // 8) + 2 * (24 // 8) + 2 < 50
    assert llm.stats().max_used_blocks == 51


@pytest.mark.parametrize("name", HYBRIDS)
def test_the_answers_of_one_request_share_its_prompt(name: str) -> None:
    llm = engine_of(name)
    prompt = random_tokens(np.random.default_rng(3), 50)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, n=3)
    output = llm.generate([prompt], params)[0]
    for completion in output.outputs:
        assert completion.token_ids == dense_answer(name, prompt, NUM_TOKENS)
    assert llm.stats().counters.num_cached_tokens == 2 * 48


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", HYBRIDS)
def test_a_system_prompt_is_shared_once_two_have_had_it(name: str) -> None:
    rng = np.random.default_rng(4)
    llm = engine_of(name)
    system = random_tokens(rng, 43)
    cached = []
    for count in (20, 30, 25):
        prompt = system + random_tokens(rng, count)
        output = llm.generate([prompt], GREEDY)[0]
        assert output.outputs[0].token_ids == dense_answer(name, prompt, NUM_TOKENS)
        cached.append(output.num_cached_tokens)
    # The second one finds what ends of chunks left, and leaves a snapshot where it departs.
    assert cached[0] == 0 and cached[2] == 40
    llm.engine.reset_prefix_cache()
    together = [system + random_tokens(rng, count) for count in (20, 30, 25)]
    outputs = llm.generate(together, GREEDY)
    assert [o.num_cached_tokens for o in outputs][1:] == [40, 40]  # they waited for the first


@pytest.mark.one_in(29)
@pytest.mark.parametrize("fault", ["now and then", "too many rows"])
@pytest.mark.parametrize("name", ["gpt-oss", "qwen3_next", "recurrent_gemma"])
def test_a_step_that_failed_is_run_again(
    name: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States are read from one slot and written to another, so parts find what the step found."""
    llm = engine_of(name)
    runner = llm.engine._runner
    read, calls = runner.read, 0

    def fail(launched: Any) -> dict[int, int]:
        nonlocal calls
        calls += 1
        tokens = read(launched)  # all has been computed and written, and yet:
        if fault == "too many rows" and launched.batch.num_tokens > 7:
            raise RuntimeError("out of memory")
        if fault == "now and then" and launched.batch.num_seqs > 1 and calls % 5 == 0:
            raise RuntimeError("the device is gone")
        return tokens

    monkeypatch.setattr(runner, "read", fail)
    expected = [dense_answer(name, p, NUM_TOKENS) for p in prompts()]
    outputs = llm.generate(prompts(), GREEDY)
    assert [o.outputs[0].token_ids for o in outputs] == expected
    assert llm.stats().num_faults > 1
    llm.engine.check_integrity()
