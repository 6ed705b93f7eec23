"""Scheduler under pressure: tiny pools, preemption, priorities, long random runs."""

from __future__ import annotations

import random
from typing import Any

import pytest
from support.fake_model import generate
from support.scheduling_helpers import OVERLAP, check_outputs, make, request, rows

from mlx_paged.core import FinishReason, PrefixQuery, SchedulingPolicy
from mlx_paged.errors import EngineOverloadedError


@pytest.mark.one_in(2)
@OVERLAP
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_three_blocks_serve_sixty_four_requests(overlap, caching, policy):
    engine = make(num_blocks=4, overlap=overlap, caching=caching, policy=policy, watermark=0.01)
    requests = [
        request(
            f"r{i}", [i % 5] * (1 + i % 8), 13 - (1 + i % 8), priority=i % 3, n=1 + (i % 16 == 0)
        )
        for i in range(64)
    ]
    for r in requests:
        engine.scheduler.add(r)
    while engine.scheduler.has_unfinished or engine.running:
        engine.step()
        engine.scheduler.check_integrity()
        assert len(engine.batches) < 5_000
    assert engine.scheduler.num_preemptions > 0
    check_outputs(engine, *requests)


def test_the_latest_arrival_is_preempted_and_its_blocks_stay_cached():
    engine = make(num_blocks=6)
    requests = [request("a", [1] * 8, 8), request("b", [2] * 8, 8)]
    for r in requests:
        engine.scheduler.add(r)
    while engine.scheduler.num_preemptions == 0:
        engine.step()
    assert not requests[1].sequences[0].is_running and requests[0].sequences[0].is_running
    assert engine.scheduler.kv.match(PrefixQuery([2] * 9)).num_full_blocks >= 1
    engine.run()
    check_outputs(engine, *requests)


def test_a_preempted_sequence_keeps_the_token_that_was_in_flight():
    engine = make(num_blocks=4, overlap=True)
    requests = [request("a", [1] * 4, 8), request("b", [2] * 4, 8)]
    for r in requests:
        engine.scheduler.add(r)
    engine.run()
    assert engine.scheduler.num_preemptions > 0
    check_outputs(engine, *requests)


def test_a_sequence_sits_out_a_step_rather_than_preempt_when_blocks_are_on_their_way():
    engine = make(num_blocks=4, overlap=True, caching=False)
    requests = [request("a", [1] * 3, 6), request("b", [2] * 4, 5), request("c", [3] * 3, 2)]
    for r in requests:
        engine.scheduler.add(r)
    engine.step()
    assert rows(engine) == [("a", 3), ("b", 4), ("c", 3)]
    engine.step()  # "b" finds no block for its fifth token: "c" is preempted, its block is awaited
    assert engine.scheduler.num_preemptions == 1
    assert rows(engine) == [("a", 1)]
    engine.run()
    assert engine.scheduler.num_preemptions <= 2
    check_outputs(engine, *requests)


def test_a_step_that_preempts_admits_nobody():
    engine = make(num_blocks=5, max_num_batched_tokens=16)
    requests = [request("a", [1] * 7, 8), request("b", [2] * 6, 8), request("c", [3], 2)]
    for r in requests[:2]:
        engine.scheduler.add(r)
    engine.step()
    engine.step()
    engine.scheduler.add(requests[2])
    while engine.scheduler.num_preemptions == 0:
        engine.step()
    assert rows(engine) == [("a", 1)]
    engine.run()
    check_outputs(engine, *requests)


def test_nobody_overtakes_a_request_that_waits_for_memory():
    engine = make(num_blocks=9)
    engine.scheduler.add(request("running", [1] * 16, 8))
    engine.step()
    engine.scheduler.add(request("big", [2] * 20, 1))
    engine.scheduler.add(request("small", [3], 1))
    engine.step()
    assert rows(engine) == [("running", 1)]
    engine.run()
    first_step = {}
    for batch in engine.batches:
        for row in batch.sequences:
            first_step.setdefault(row.request_id, batch.step)
    assert first_step["running"] < first_step["big"] <= first_step["small"]


def test_the_watermark_is_kept_free_unless_nothing_runs():
    engine = make(num_blocks=11, watermark=0.5)
    engine.scheduler.add(request("a", [1] * 28, 4))
    engine.scheduler.add(request("b", [2] * 4, 4))
    engine.step()
    assert rows(engine) == [("a", 28)]


def test_a_high_priority_request_preempts_low_ones():
    engine = make(num_blocks=6, policy=SchedulingPolicy.PRIORITY)
    low = request("low", [1] * 12, 4, priority=5)
    engine.scheduler.add(low)
    engine.step()
    high = request("high", [2] * 12, 4, priority=0)
    engine.scheduler.add(high)
    engine.step()
    assert rows(engine)[0][0] == "high"
    assert not low.sequences[0].is_running
    engine.run()
    check_outputs(engine, low, high)


@pytest.mark.parametrize("max_num_seqs", [1, 8])
def test_priority_preempts_lower_classes_only(max_num_seqs):
    engine = make(num_blocks=6, policy="priority", max_num_seqs=max_num_seqs)
    equal = [request(name, [ord(name)] * 12, 4, priority=1) for name in "ab"]
    engine.scheduler.add(equal[0])
    engine.step()
    engine.scheduler.add(equal[1])
    engine.step()
    assert rows(engine) == [("a", 1)]
    assert engine.scheduler.num_preemptions == 0
    engine.run()
    check_outputs(engine, *equal)


def test_under_fcfs_priority_means_nothing():
    engine = make(max_num_seqs=1)
    engine.scheduler.add(request("a", [1], priority=5))
    engine.scheduler.add(request("b", [2], priority=0))
    engine.step()
    assert rows(engine) == [("a", 1)]


# --- Background requests --------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("limits", [{"num_blocks": 6}, {"max_num_seqs": 1}], ids=str)
def test_background_requests_make_way_for_others(policy, limits):
    engine = make(**limits, policy=policy)
    batch = request("batch", [1] * 12, 4, background=True, priority=-5)
    engine.scheduler.add(batch)
    engine.step()
    chat = request("chat", [2] * 12, 4, priority=5)
    engine.scheduler.add(chat)
    engine.step()
    assert rows(engine) == [("chat", 12)]
    more = [request(name, [3, i], background=i > 0) for i, name in enumerate("abc")]
    for each in more:
        engine.scheduler.add(each)
    engine.run()
    check_outputs(engine, batch, chat, *more)
    last = {row.request_id: b.step for b in engine.batches for row in b.sequences}
    assert max(last["chat"], last["a"]) < min(last["batch"], last["b"], last["c"])


def test_the_prompts_of_background_requests_get_the_tokens_that_others_leave():
    engine = make(
        num_blocks=129, max_num_batched_tokens=16, max_num_seqs=4, long_prefill_token_threshold=8
    )
    for name in "ab":  # each takes half of a step
        engine.scheduler.add(request(name, [ord(name)] * 60, background=True))
    engine.step()
    assert rows(engine) == [("a", 8), ("b", 8)]
    chat = request("chat", [7] * 24)
    engine.scheduler.add(chat)
    engine.step()
    assert rows(engine) == [("chat", 8), ("a", 2)]
    engine.run()
    assert engine.scheduler.num_preemptions == 0


def test_short_background_prompts_have_an_eighth_of_the_tokens_beside_others():
    engine = make(max_num_batched_tokens=32, max_num_seqs=16)
    engine.scheduler.add(request("chat", [7] * 3))
    engine.step()
    for i in range(2):
        engine.scheduler.add(request(f"b{i}", [i] * 3, background=True))
    engine.step()
    assert rows(engine) == [("chat", 1), ("b0", 3), ("b1", 1)]
    engine.run()


def test_background_requests_have_an_eighth_of_the_places_beside_others():
    engine = make(max_num_seqs=16)
    batch = [request(f"b{i}", [i + 1] * 3, 6, background=True) for i in range(12)]
    for each in batch:
        engine.scheduler.add(each)
    engine.step()
    assert len(rows(engine)) == 12
    chat = request("chat", [99] * 3, 4)
    engine.scheduler.add(chat)
    for _ in range(4):
        engine.step()
        assert {name for name, _ in rows(engine)} == {"chat", "b0", "b1"}
    assert chat.is_finished and engine.scheduler.num_preemptions == 0
    engine.step()
    assert len(rows(engine)) == 12
    # Waiting ones take no more places, either.
    engine.scheduler.add(request("chat 2", [98] * 3, 8))
    more = [request(f"m{i}", [i + 50] * 3, 4, background=True) for i in range(4)]
    for each in more:
        engine.scheduler.add(each)
    while engine.scheduler.request("chat 2") is not None:
        engine.step()
        assert len(rows(engine)) <= 3
    engine.run()
    check_outputs(engine, chat, *batch, *more)


def test_background_requests_do_not_fill_the_waiting_queue():
    engine = make(max_num_waiting=2, max_num_seqs=1)
    for i in range(2):
        engine.scheduler.add(request(f"batch {i}", [1, i], background=True))
    with pytest.raises(EngineOverloadedError):
        engine.scheduler.add(request("batch 2", [1, 2], background=True))
    for i in range(2):
        engine.scheduler.add(request(f"chat {i}", [2, i]))
    with pytest.raises(EngineOverloadedError):
        engine.scheduler.add(request("chat 2", [2, 2]))
    engine.run()


@pytest.mark.one_in(2)
@OVERLAP
@pytest.mark.parametrize("num_blocks", [8, 24, 200])
def test_a_long_run_of_random_arrivals_loses_no_token(overlap, num_blocks):
    rng = random.Random(num_blocks)
    engine = make(num_blocks, overlap=overlap, max_num_batched_tokens=32, watermark=0.05)
    stems = [[rng.randrange(50) for _ in range(20)] for _ in range(4)]
    eos = frozenset({7})
    requests = []
    for i in range(300):
        prompt = stems[i % 4][: rng.randrange(21)] + [
            rng.randrange(50) for _ in range(rng.randrange(1, 5))
        ]
        limit = engine.scheduler.max_total_tokens
        prompt = prompt[: limit - 1]
        max_tokens = min(rng.randrange(1, 16), limit - len(prompt))
        r = request(
            f"r{i}", prompt, max_tokens, stop={"eos_token_ids": eos}, n=rng.choice([1, 1, 1, 3])
        )
        engine.scheduler.add(r)
        requests.append(r)
        for _ in range(rng.randrange(4)):
            engine.step()
        if i % 10 == 0:
            engine.scheduler.abort(rng.choice(requests).request_id)
            engine.scheduler.check_integrity()
    engine.run()
    engine.scheduler.check_integrity()
    for r in requests:
        for seq in r.sequences:
            got = list(seq.tokens[r.num_prompt_tokens :])
            expected = generate(r.prompt_token_ids, r.max_output_tokens, eos, seq.index)
            whole = seq.finish_reason is not FinishReason.ABORT
            assert got == (expected if whole else expected[: len(got)])
    usage = engine.scheduler.kv.usage
    assert usage.num_used_blocks == usage.num_quarantined_blocks == 0


def test_a_blocked_head_of_queue_is_tried_again_only_after_something_was_freed() -> None:
    """However long its prompt, and however much of it is cached: a step asks one search again."""
    engine = make(num_blocks=40, max_num_batched_tokens=256)
    scheduler = engine.scheduler
    scheduler.add(request("first", list(range(100)), 1))
    engine.run()  # leaves 25 cached blocks
    running = request("running", [200] * 40, 30)
    scheduler.add(running)
    engine.step()
    waiting = request("waiting", [*range(100), *range(300, 345)])
    scheduler.add(waiting)
    tried = 0
    admit = scheduler.kv.admit

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal tried
        tried += options["owner"] is waiting.sequences[0]
        return admit(*args, **options)

    scheduler.kv.admit = counted  # type: ignore[method-assign]
    for _ in range(20):
        engine.step()
    assert tried == 1 and scheduler.num_waiting == 1
    scheduler.kv.match(waiting.sequences[0].query)  # asked as often as you like
    engine.run()
    assert tried >= 2
    assert waiting.sequences[0].num_cached_tokens > 64  # (the running one evicted a few blocks)
    check_outputs(engine, running, waiting)


def test_a_blocked_head_is_tried_again_when_more_of_its_prompt_is_cached() -> None:
    engine = make(num_blocks=20, max_num_batched_tokens=256)
    scheduler = engine.scheduler
    running = request("running", list(range(40)), 20)
    scheduler.add(running)
    engine.step()
    # Generated tokens become part of a preempted prompt, so it needs fewer blocks.
    answer = generate(list(range(40)), 20, frozenset())
    waiting = request("waiting", [*range(40), *answer[:16], 1, 2, 3, 4, *range(300, 314)], 2)
    scheduler.add(waiting)
    steps_waited = 0
    while scheduler.num_waiting:
        engine.step()
        steps_waited += 1
    assert running.sequences[0].is_running or steps_waited > 3
    engine.run()
    check_outputs(engine, running, waiting)
