"""Store and scheduler while memory is given back: no block that anything needs is touched."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from support.fake_model import FakeEngine, generate
from support.scheduling_helpers import OVERLAP, check_outputs, make, request

from mlx_paged.core import SchedulingPolicy, StateGroupSpec, WindowGroupSpec

WINDOW = WindowGroupSpec(24, 5, lambda position: max(0, position - 4))
GROUPS: dict[str, dict[str, Any]] = {
    "full": {},
    "window": {"windows": [WINDOW]},
    "states": {"states": StateGroupSpec(40)},
    "both": {"windows": [WINDOW], "states": StateGroupSpec(40)},
}


def discard(engine: FakeEngine) -> int:
    """Evicts what is idle and wipes everything free, also with a step in flight."""
    kv, device = engine.scheduler.kv, engine.device
    num_blocks = kv.evict_idle()
    for group in kv.attention:
        for block in group.pool.free_since(-1):
            size = kv.block_size
            device.slots[group.number][block * size : (block + 1) * size] = [None] * size
    if kv.states is not None:
        for slot in kv.states.pool.free_since(-1):
            device.states[slot] = None
    return num_blocks


def resize(engine: FakeEngine, sizes: Sequence[int]) -> None:
    """Changes the pools' sizes. No step may be in flight."""
    kv, device = engine.scheduler.kv, engine.device
    for group, num_blocks in zip(kv.attention, sizes):
        slots, size = device.slots[group.number], kv.block_size
        if num_blocks > group.pool.num_blocks:
            group.pool.grow(num_blocks)
        elif num_blocks < group.pool.num_blocks:
            moved = dict(kv.compact(num_blocks, group.number))
            for src, dst in moved.items():
                slots[dst * size : (dst + 1) * size] = slots[src * size : (src + 1) * size]
            for (seq_id, number), known in device.tables.items():
                if number == group.number:
                    device.tables[seq_id, number] = [moved.get(block, block) for block in known]
            for seq in engine.scheduler.running:
                table = seq.tables.attention[group.number]
                changed = [i for i, block in enumerate(table.blocks) if block in moved.values()]
                assert table.dirty_from <= min(changed, default=len(table.blocks))
        del slots[num_blocks * size :]
        slots += [None] * (num_blocks * size - len(slots))
    engine.scheduler.check_integrity()


def settle(engine: FakeEngine) -> None:
    """Reads the step in flight without launching another one."""
    schedule = engine.scheduler.schedule
    engine.scheduler.schedule = lambda: None  # type: ignore[method-assign]
    if engine.running is not None:
        engine.step()
    engine.scheduler.schedule = schedule  # type: ignore[method-assign]
    assert engine.running is None


@pytest.mark.one_in(2)
@OVERLAP
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_random_requests_lose_no_token(groups, overlap) -> None:
    rng = random.Random(len(groups) + overlap)
    engine = make(60, overlap=overlap, max_num_batched_tokens=32, **groups)
    scheduler, kv = engine.scheduler, engine.scheduler.kv
    full = [group.pool.num_blocks for group in kv.attention]
    limit = scheduler.max_total_tokens
    stems = [[rng.randrange(50) for _ in range(20)] for _ in range(4)]
    requests, num_evicted, num_shrunk = [], 0, 0
    for i in range(120):
        prompt = [*stems[i % 4][: rng.randrange(21)], rng.randrange(50)]
        requests.append(request(f"r{i}", prompt, rng.randrange(1, 16), n=rng.choice([1, 1, 3])))
        scheduler.add(requests[-1])
        for _ in range(rng.randrange(5)):
            engine.step()
            if rng.random() < 0.3:
                num_evicted += discard(engine)
                scheduler.check_integrity()
            if rng.random() < 0.2 or scheduler.lacks_room:
                settle(engine)
                least = [2 + group.pool.num_used for group in kv.attention]
                sizes = [rng.randint(a, b) for a, b in zip(least, full)]
                resize(engine, full if scheduler.lacks_room else sizes)
                num_shrunk += sizes < full
    settle(engine)
    resize(engine, full)
    engine.run()
    check_outputs(engine, *requests)
    assert num_evicted > 20 and num_shrunk > 20
    assert scheduler.max_total_tokens == limit


@OVERLAP
def test_idle_blocks_are_evicted_and_those_in_use_are_not(overlap) -> None:
    engine = make(60, overlap=overlap)
    old, new = request("old", [1] * 40, 1), request("new", [2] * 20, 20)
    engine.scheduler.add(old)
    engine.run()
    engine.scheduler.add(new)
    for _ in range(5):
        engine.step()
    used = engine.scheduler.kv.usage.num_used_blocks
    assert discard(engine) == 10
    usage = engine.scheduler.kv.usage
    assert (usage.num_used_blocks, usage.num_cached_blocks) == (used, 0)
    engine.run()
    check_outputs(engine, old, new)


def test_free_blocks_are_told_by_their_last_use() -> None:
    engine = make(20, caching=False)
    pool = engine.scheduler.kv.pool
    assert len(pool.free_since(-1)) == 19 and pool.free_since(0) == []
    engine.scheduler.add(request("a", [1] * 8, 1))
    engine.run()
    step = pool.launched_step
    assert len(pool.free_since(0)) == 2 and pool.free_since(step) == []
    engine.scheduler.add(request("b", [1] * 4, 1))
    engine.run()
    assert len(pool.free_since(step)) == 1


def test_the_longest_request_is_that_of_the_configured_pool() -> None:
    engine = make(60)
    limit = engine.scheduler.max_total_tokens
    resize(engine, [4])
    assert engine.scheduler.max_total_tokens == limit == 59 * 4 + 1
    long = request("long", [1] * 100, 100)
    engine.scheduler.add(long)
    assert engine.scheduler.schedule() is None and engine.scheduler.lacks_room
    resize(engine, [60])
    engine.run()
    assert not engine.scheduler.lacks_room
    check_outputs(engine, long)


@pytest.mark.parametrize("policy", list(SchedulingPolicy))
def test_waiting_sequences_are_held_and_run_one_at_a_time(policy) -> None:
    engine = make(60, policy=policy)
    scheduler = engine.scheduler
    running = [request(f"running {i}", [i] * 10, 8, priority=5) for i in range(2)]
    for r in running:
        scheduler.add(r)
    engine.step()
    scheduler.holds_admission = True
    waiting = [request(f"waiting {i}", [7 + i] * 10, 6) for i in range(3)]
    for r in waiting:
        scheduler.add(r)
    most = 0
    while not all(r.is_finished for r in running):
        engine.step()
        assert scheduler.num_waiting == 3 and not scheduler.num_preemptions
    while scheduler.has_unfinished:
        engine.step()
        most = max(most, scheduler.num_running)
    assert most == 1
    check_outputs(engine, *running, *waiting)
    assert generate([7] * 10, 6, frozenset()) == engine.outputs[waiting[0].sequences[0].seq_id]


def test_a_copy_that_is_due_moves_along() -> None:
    engine = make(40)
    kv = engine.scheduler.kv
    held = [kv.admit([20 + i] * 4) for i in range(10)]
    engine.scheduler.add(request("source", [1] * 6, 1))
    engine.run()
    tables = kv.admit([1] * 6 + [2])  # copies the head of a cached block
    assert tables is not None and None not in held
    for each in held:
        kv.free(each)
    before = tables.attention[0].copy_source, tables.blocks[1]
    moved = dict(kv.compact(6))
    kv.check_integrity()
    assert set(before) <= set(moved), "both had to move"
    [(src, dst)] = kv.launch_step(100)[0]
    assert (src, dst) == tuple(moved[block] for block in before)
