"""Slots for adapters: who has one, who waits for one, and which adapter is evicted."""

from __future__ import annotations

from typing import Any

import pytest
from support.fake_model import FakeEngine
from support.scheduling_helpers import OVERLAP, check_outputs, make, request

from mlx_paged.core import Request, SchedulingPolicy
from mlx_paged.core.adapters import AdapterSlots
from mlx_paged.errors import IntegrityError, InvalidParameterError

PROMPT = list(range(100, 120))


def with_adapter(name: str, adapter: str | None, num_tokens: int = 4, **more: Any) -> Request:
    salt = None if adapter is None else f"salt of {adapter}"
    return request(name, PROMPT, num_tokens, adapter=adapter, cache_salt=salt, **more)


def adapters_of(engine: FakeEngine, step: int = -1) -> dict[str, Any]:
    """The adapter that a step has in the slot of each request."""
    rows = engine.batches[step]
    batch = rows.output.batch
    return {
        row.request_id: batch.adapters.get(slot)
        for row, slot in zip(rows.sequences, batch.adapter_ids, strict=True)
    }


def test_the_least_recently_used_adapter_is_evicted() -> None:
    slots = AdapterSlots(2)
    x, y = slots.take("x"), slots.take("y")
    assert {x, y} == {1, 2} and slots.num_in_use == 2
    assert slots.can_take("x") and not slots.can_take("z")
    slots.release(y)
    slots.release(x)
    assert slots.take("y") == y  # still there
    slots.release(y)
    assert slots.take("z") == x, "x was used before y"
    assert slots.num_evictions == 1
    slots.check_integrity([x])


def test_a_slot_in_use_is_not_given_away() -> None:
    slots = AdapterSlots(1)
    number = slots.take("x")
    assert slots.take("x") == number
    slots.release(number)
    assert not slots.can_take("y"), "one of the two sequences still runs"
    slots.release(number)
    assert slots.can_take("y")
    with pytest.raises(IntegrityError):
        slots.check_integrity([number])


@OVERLAP
def test_sequences_wait_for_a_slot_and_others_pass_them(overlap: bool) -> None:
    engine = make(overlap=overlap, max_loras=1)
    scheduler = engine.scheduler
    requests = [
        with_adapter("x", "x", 6),
        with_adapter("y", "y"),
        with_adapter("base", None),
        with_adapter("x again", "x"),  # must not keep y out
    ]
    for each in requests:
        scheduler.add(each)
    engine.step()
    assert adapters_of(engine) == {"x": "x", "base": None}
    scheduler.check_integrity()
    engine.run()
    seen = [adapters_of(engine, i) for i in range(len(engine.batches))]
    for adapters in seen:
        assert len(set(adapters.values()) - {None}) <= 1
    first = {name: next(i for i, s in enumerate(seen) if name in s) for s in seen for name in s}
    assert first["base"] < first["y"] < first["x again"]
    check_outputs(engine, *requests)
    assert scheduler.adapters.num_evictions == 2


@OVERLAP
def test_decodes_of_one_adapter_are_neighbors(overlap: bool) -> None:
    engine = make(overlap=overlap, max_loras=2)
    adapters = ["x", None, "y", "x", "y", None, "x"]
    requests = [with_adapter(f"{i}", adapter, 4 + i) for i, adapter in enumerate(adapters)]
    for each in requests:
        engine.scheduler.add(each)
    engine.run()
    batches = [rows.output.batch for rows in engine.batches]
    decodes = [batch for batch in batches if min(batch.starts) >= len(PROMPT)]
    assert len(decodes) > 4
    for batch in decodes:
        slots = [slot or 3 for slot in batch.adapter_ids]
        assert slots == sorted(slots)
    check_outputs(engine, *requests)


@OVERLAP
def test_a_higher_priority_takes_the_slot_of_a_lower_one(overlap: bool) -> None:
    engine = make(overlap=overlap, max_loras=2, policy=SchedulingPolicy.PRIORITY)
    scheduler = engine.scheduler
    x = [with_adapter(f"x{i}", "x", 12, priority=5) for i in range(2)]
    mixed = [with_adapter("z5", "z", 12, priority=5), with_adapter("z1", "z", 12, priority=1)]
    base = with_adapter("base", None, 12, priority=9)
    for each in (*x, *mixed, base):
        scheduler.add(each)
    while scheduler.num_running < 5:  # Some wait for the prefix of others.
        engine.step()
    same = with_adapter("same", "same", 4, priority=5)
    urgent = with_adapter("urgent", "y", 4, priority=2)
    scheduler.add(same)
    scheduler.add(urgent)
    engine.run()
    seen = [adapters_of(engine, i) for i in range(len(engine.batches))]
    assert all(len(set(adapters.values()) - {None}) <= 2 for adapters in seen)
    first = {name: next(i for i, s in enumerate(seen) if name in s) for s in seen for name in s}
    last = {name: max(i for i, s in enumerate(seen) if name in s) for s in seen for name in s}
    # Both of x made room, while z had a sequence of a higher class, and nothing else was hurt.
    assert first["urgent"] < min(last["x0"], last["x1"]) and first["same"] > last["urgent"]
    assert [each.sequences[0].num_preemptions for each in (*x, *mixed, base, same, urgent)] == [
        1, 1, 0, 0, 0, 0, 0,
    ]  # fmt: skip
    check_outputs(engine, *x, *mixed, base, same, urgent)


@OVERLAP
def test_without_priorities_nothing_gives_up_its_slot(overlap: bool) -> None:
    engine = make(overlap=overlap, max_loras=1)
    x, y = with_adapter("x", "x", 12, priority=5), with_adapter("y", "y", priority=1)
    engine.scheduler.add(x)
    engine.step()
    engine.scheduler.add(y)
    engine.run()
    assert x.sequences[0].num_preemptions == 0
    check_outputs(engine, x, y)


def test_a_request_that_waits_for_a_slot_may_end() -> None:
    engine = make(max_loras=1)
    scheduler = engine.scheduler
    x, y = with_adapter("x", "x"), with_adapter("y", "y", n=2)
    scheduler.add(x)
    scheduler.add(y)
    engine.step()
    assert scheduler.num_waiting == 2 and y.sequences[0] in scheduler.waiting
    assert list(scheduler.waiting) == y.sequences
    assert scheduler.abort("y")
    assert scheduler.num_waiting == 0
    scheduler.check_integrity()
    engine.run()
    check_outputs(engine, x)


@OVERLAP
def test_a_preempted_sequence_gives_its_slot_up(overlap: bool) -> None:
    """Pool of 13 blocks: both prompts fit, and not both answers."""
    engine = make(13, overlap=overlap, max_loras=2)
    scheduler = engine.scheduler
    requests = [with_adapter("x", "x", 12), with_adapter("y", "y", 12), with_adapter("z", "z", 12)]
    for each in requests:
        scheduler.add(each)
    while scheduler.has_unfinished or engine.running:
        engine.step()
        scheduler.check_integrity()
    assert scheduler.num_preemptions > 0
    check_outputs(engine, *requests)


def test_a_restored_scheduler_gives_new_slots() -> None:
    engine = make(max_loras=1)
    x, y = with_adapter("x", "x"), with_adapter("y", "y")
    engine.scheduler.add(x)
    engine.scheduler.add(y)
    engine.step()
    fresh = make(max_loras=1)
    fresh.scheduler.restore([x, y])
    assert x.sequences[0].adapter_slot == 0 and not y.sequences[0].is_held
    fresh.scheduler.check_integrity()
    fresh.step()
    assert adapters_of(fresh) == {"x": "x"}


def test_an_adapter_without_slots_is_refused() -> None:
    engine = make()
    with pytest.raises(InvalidParameterError, match="adapter must be None where max_loras is 0"):
        engine.scheduler.add(with_adapter("x", "x"))


def test_a_slot_is_free_as_soon_as_its_last_sequence_ends() -> None:
    engine = make(max_loras=2)
    requests = [with_adapter("x", "x", 20), with_adapter("y", "y", 2), with_adapter("z", "z", 2)]
    for each in requests:
        engine.scheduler.add(each)
    engine.run()
    steps = [adapters_of(engine, i) for i in range(len(engine.batches))]
    assert {"x": "x", "z": "z"} in steps, "z runs while x does"
    assert not any({"x", "y", "z"} <= step.keys() for step in steps)
    check_outputs(engine, *requests)
