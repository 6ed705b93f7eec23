"""Sequences that wait for a running one: who waits, how long, and what that costs a step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from support.fake_model import FakeEngine
from support.scheduling_helpers import OVERLAP, Clock, check_outputs, make, request, rows

from mlx_paged.core import (
    FinishReason,
    KVManager,
    Request,
    Scheduler,
    SchedulerConfig,
    Sequence,
    StateGroupSpec,
    WindowGroupSpec,
)
from mlx_paged.core.admission import MAX_PARKED_TOKENS, PARKING_COST
from mlx_paged.core.queues import Deadlines
from mlx_paged.errors import IntegrityError

STEM = list(range(100, 400))


def window(span: int) -> WindowGroupSpec:
    return WindowGroupSpec(1000, span, lambda position: max(0, position - span + 1))


def engine_with(
    *,
    overlap: bool = False,
    caching: bool = True,
    windows: Iterable[WindowGroupSpec] = (),
    states: StateGroupSpec | None = None,
    block_size: int = 4,
    **config: Any,
) -> FakeEngine:
    config = {"max_num_seqs": 16, "max_num_batched_tokens": 64, "watermark": 0.0, **config}
    kv = KVManager(
        2000, block_size, enable_prefix_caching=caching, windows=list(windows), states=states
    )
    return FakeEngine(Scheduler(SchedulerConfig(**config), kv, clock=Clock()), overlap=overlap)


class Looks:
    """The sequences that a scheduler looks at, and those that it makes ready, call by call."""

    def __init__(self, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[Sequence] = []
        self.woken: list[Sequence] = []
        look, make_ready = scheduler._sharing.awaited, scheduler.waiting._make_ready

        def looked(seq: Sequence) -> Any:
            self.seen.append(seq)
            return look(seq)

        def made_ready(woken: list[Sequence]) -> None:
            self.woken += woken
            make_ready(woken)

        monkeypatch.setattr(scheduler._sharing, "awaited", looked)
        monkeypatch.setattr(scheduler.waiting, "_make_ready", made_ready)

    def take(self) -> tuple[int, int]:
        taken = len(self.seen), len(self.woken)
        self.seen.clear()
        self.woken.clear()
        return taken


def test_a_step_looks_at_few_of_those_that_wait_for_a_prompt(monkeypatch):
    """However many they are: few while they arrive, none after that, and none twice."""
    engine = engine_with(long_prefill_token_threshold=8)
    scheduler = engine.scheduler
    scheduler.add(request("owner", STEM, 2))
    engine.step()
    looks = Looks(scheduler, monkeypatch)
    num_waiting = 500
    for i in range(num_waiting):
        scheduler.add(request(f"r{i}", [*STEM, 1000 + i, 1], 2, timeout=1e6))
    owner = scheduler.request("owner").sequences[0]
    # (their tokens, and the cost of each; the last one may go beyond it)
    most = MAX_PARKED_TOKENS // (PARKING_COST + len(STEM) + 2) + 1
    counts = []
    while owner.num_output_tokens == 0:
        engine.step()
        counts.append(looks.take())
    assert max(seen for seen, _ in counts) <= most < 100
    busy = [seen for seen, _ in counts if seen]
    assert sum(busy) == num_waiting and len(busy) < len(counts) - 10
    assert counts[len(busy) : -1] == [(0, 0)] * (len(counts) - 1 - len(busy))
    scheduler.check_integrity()
    engine.step()
    assert looks.take()[1] == num_waiting  # all of them are ready when the prompt is there
    engine.run()
    assert engine.device.num_tokens_computed == len(STEM) + 1 + num_waiting * 3


def test_each_waits_just_as_long_as_it_shares_the_prompt(monkeypatch):
    engine = engine_with(long_prefill_token_threshold=20, max_num_batched_tokens=100)
    scheduler = engine.scheduler
    scheduler.add(request("owner", STEM, 2))
    engine.step()
    shared = {"a": 8, "b": 40, "c": 100, "d": 104, "e": 296}
    for name, length in shared.items():
        scheduler.add(request(name, [*STEM[:length], *range(900 + length, 920 + length)], 30))
    first_step: dict[str, int] = {}
    for step in range(1, 16):
        engine.step()
        for name, _ in rows(engine):
            first_step.setdefault(name, step)
    # Step k computes tokens up to 20 + 20k: the next one can use them.
    assert first_step == {"owner": 1, "a": 1, "b": 2, "c": 5, "d": 6, "e": 15}
    for name, length in shared.items():
        assert scheduler.request(name).sequences[0].num_cached_tokens == length
    engine.run()


def _abort(engine: FakeEngine) -> None:
    assert engine.scheduler.abort("owner")


def _time_out(engine: FakeEngine) -> None:
    engine.scheduler._clock.now = 10.0


def _reset(engine: FakeEngine) -> None:
    engine.scheduler.reset_prefix_cache()


@OVERLAP
@pytest.mark.parametrize("event", [_abort, _time_out, _reset])
def test_a_wait_ends_with_who_is_waited_for(event, overlap):
    engine = engine_with(
        overlap=overlap, long_prefill_token_threshold=16, max_num_batched_tokens=32
    )
    scheduler = engine.scheduler
    scheduler.add(request("owner", STEM, 2, timeout=10.0))
    waiting = [request(f"r{i}", [*STEM, i], 2) for i in range(3)]
    for r in waiting:
        scheduler.add(r)
    for _ in range(4):
        engine.step()
    assert {name for name, _ in rows(engine)} == {"owner"}
    assert all(r.sequences[0].waits_for is not None for r in waiting)
    event(engine)
    scheduler.check_integrity()
    for _ in range(2):
        engine.step()
    assert "r0" in {name for name, _ in rows(engine)}
    engine.run()
    check_outputs(engine, *waiting)
    if event is not _reset:  # the others waited for the heir then
        assert [r.sequences[0].num_cached_tokens for r in waiting[1:]] == [len(STEM)] * 2


def test_a_preempted_owner_lets_others_go():
    engine = engine_with(
        policy="priority", long_prefill_token_threshold=16, max_num_batched_tokens=32
    )
    engine.scheduler.kv = KVManager(95, 4)  # the owner, and not much more
    engine = FakeEngine(Scheduler(engine.scheduler.config, engine.scheduler.kv))
    scheduler = engine.scheduler
    owner, waiting = (request(name, [*STEM, i], 2, priority=1) for i, name in enumerate("ow"))
    scheduler.add(owner)
    scheduler.add(waiting)
    engine.step()
    assert waiting.sequences[0].waits_for is not None
    urgent = request("u", list(range(500, 700)), 2, priority=0)
    scheduler.add(urgent)
    engine.step()
    assert not owner.sequences[0].is_running and waiting.sequences[0].waits_for is None
    scheduler.check_integrity()
    engine.run()
    check_outputs(engine, owner, waiting, urgent)


def test_parked_ones_can_be_aborted_and_time_out(monkeypatch):
    engine = engine_with(long_prefill_token_threshold=16, max_num_batched_tokens=32)
    scheduler = engine.scheduler
    scheduler.add(request("owner", STEM, 2))
    engine.step()
    waiting = [request(f"r{i}", [*STEM, i], 2, timeout=5.0 if i % 3 else None) for i in range(30)]
    for r in waiting:
        scheduler.add(r)
    engine.step()
    assert all(r.sequences[0].waits_for for r in waiting) and scheduler.num_waiting == 30
    for i in range(0, 30, 5):
        assert scheduler.abort(f"r{i}")
        scheduler.check_integrity()
    assert scheduler.num_waiting == 24
    looks = Looks(scheduler, monkeypatch)
    scheduler._clock.now = 5.0
    engine.step()
    assert scheduler.num_waiting == 8 and looks.take() == (0, 0)
    engine.run()
    check_outputs(engine, *(r for i, r in enumerate(waiting) if i % 3 == 0 and i % 5))


def test_a_burst_of_long_prompts_does_not_hide_a_short_one():
    engine = engine_with(long_prefill_token_threshold=16, max_num_batched_tokens=64)
    scheduler = engine.scheduler
    scheduler.add(request("owner", STEM, 2))
    for i in range(300):
        scheduler.add(request(f"r{i}", [*STEM, i], 2))
    scheduler.add(request("short", [1, 2, 3], 2))
    engine.step()
    assert rows(engine) == [("owner", 16), ("short", 3)]
    assert scheduler.waiting.first().request.request_id != "r0"  # (parked, unlike the last ones)
    scheduler.check_integrity()


def test_a_burst_of_short_prompts_is_looked_at_step_by_step():
    engine = engine_with(overlap=True, long_prefill_token_threshold=0, max_num_batched_tokens=900)
    scheduler = engine.scheduler
    scheduler.max_parked_tokens = 10 * PARKING_COST
    requests = [request(f"r{i}", [*STEM, i], 2) for i in range(100)]
    for r in requests:
        scheduler.add(r)
    for step in (1, 2):  # (before the first one is committed)
        engine.step()
        parked = [r for r in requests if r.sequences[0].waits_for is not None]
        assert parked == requests[1 : 1 + 10 * step]
        scheduler.check_integrity()
    engine.run()
    check_outputs(engine, *requests)


# The answers of one request.


def steps_of(engine: FakeEngine, *requests: Request) -> int:
    for r in requests:
        engine.scheduler.add(r)
    while engine.scheduler.has_unfinished or engine.running:
        engine.step()
    check_outputs(engine, *requests)
    return len(engine.batches)


KINDS = {
    "full": {},
    "no cache": {"caching": False},
    "window": {"windows": [window(9)]},
    # It slides a block on with the last token of the prompt.
    "window at its edge": {"windows": [window(13)]},
    "window, no cache": {"windows": [window(9)], "caching": False},
    "states": {"states": StateGroupSpec(400)},
    "states, no cache": {"states": StateGroupSpec(400), "caching": False},
}


@pytest.mark.one_in(3)
@OVERLAP
@pytest.mark.parametrize("max_tokens", [1, 8])
@pytest.mark.parametrize("reads_cache", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_n_answers_take_as_many_steps_as_n_requests(overlap, kind, reads_cache, max_tokens):
    def new_engine() -> FakeEngine:
        return engine_with(
            overlap=overlap, max_num_seqs=64, max_num_batched_tokens=2000, **KINDS[kind]
        )

    n, prompt = 24, STEM[:50]
    options = {"read_prefix_cache": reads_cache}
    separate = steps_of(
        new_engine(), *(request(str(i), prompt, max_tokens, **options) for i in range(n))
    )
    together = steps_of(new_engine(), request("a", prompt, max_tokens, n=n, **options))
    assert together <= separate + 2 + overlap  # one computes the prompt first
    assert separate <= max_tokens + 4 + 2 * overlap


@OVERLAP
@pytest.mark.parametrize("kind", ["full", "no cache", "window"])
def test_n_answers_compute_the_prompt_once(overlap, kind):
    engine = engine_with(overlap=overlap, max_num_batched_tokens=64, **KINDS[kind])
    r = request("a", STEM[:100], 5, n=20)
    steps_of(engine, r)
    assert engine.device.num_tokens_computed == 100 + 19 + 20 * 4
    assert [s.num_cached_tokens for s in r.sequences] == [0, *[99] * 19]


def test_the_last_tokens_of_a_prompt_do_not_hold_up_answers_with_states():
    """They start from the last snapshot, each on its own: there is nothing to wait for."""
    engine = engine_with(
        states=StateGroupSpec(400), block_size=16, max_num_seqs=20, max_num_batched_tokens=600
    )
    r = request("a", STEM[:100], 5, n=20)
    steps_of(engine, r)
    assert [s.num_cached_tokens for s in r.sequences] == [0, *[96] * 19]
    assert engine.device.num_tokens_computed == 100 + 19 * 4 + 20 * 4


def test_another_answer_is_forked_when_the_first_has_ended():
    engine = engine_with(caching=False, max_num_seqs=4)
    r = request("a", STEM[:100], 6, n=9)
    engine.scheduler.add(r)
    for _ in range(6):
        engine.step()
    engine.scheduler.finish("a", FinishReason.ABORT, index=0)
    engine.run()
    # Only the first has computed the prompt, though it has no blocks when the last ones come.
    assert [s.num_cached_tokens for s in r.sequences] == [0, *[99] * 8]


def test_the_answers_of_a_request_do_not_look_for_each_other(monkeypatch):
    """All siblings are searched for one to fork only when the last known one is lost."""
    engine = engine_with(max_num_seqs=50, max_num_batched_tokens=2000)
    asked = 0
    may_be_forked = engine.scheduler._sharing._may_be_forked

    def counted(seq: Sequence) -> bool:
        nonlocal asked
        asked += 1
        return may_be_forked(seq)

    monkeypatch.setattr(engine.scheduler._sharing, "_may_be_forked", counted)
    n = 600
    steps_of(engine, request("a", STEM[:50], 4, n=n))
    assert asked < n * n / 10


# Queues.


def test_deadlines_come_in_order_and_forget_what_has_ended():
    deadlines = Deadlines()
    requests = [request(str(i), [1]) for i in range(1000)]
    for i, r in enumerate(requests):
        r.arrival, r.deadline = i, float(i * 7 % 1000)
        deadlines.add(r)
    assert len(deadlines) == 1000 and deadlines.pop_due(-1.0) == []
    due = deadlines.pop_due(20.0)
    assert due == [r for r in requests if r.deadline <= 20.0]
    assert len(deadlines) == 979 == len(deadlines.heap)
    for r in requests[:900]:
        deadlines.discard(r)
    assert len(deadlines) <= 100 and len(deadlines.heap) < 300  # not kept until they would be due
    late = deadlines.pop_due(1e9)
    assert late == [r for r in requests[900:] if r.deadline > 20.0]
    assert len(deadlines) == 0 and deadlines.heap == []


def test_a_deadline_looks_at_no_request_that_is_not_due():
    class Watched(Request):
        looked = 0

        def __hash__(self) -> int:
            Watched.looked += 1
            return id(self)

    deadlines = Deadlines()
    for i in range(1000):
        r = Watched(str(i), [1])
        r.arrival, r.deadline = i, float(i)
        deadlines.add(r)
    for now in range(10):
        Watched.looked = 0
        assert [r.request_id for r in deadlines.pop_due(now)] == [str(now)]
        assert Watched.looked < 5


def damaged(damage: Any) -> None:
    engine = make(max_num_batched_tokens=16, long_prefill_token_threshold=8, num_blocks=200)
    scheduler = engine.scheduler
    for i in range(4):
        scheduler.add(request(f"r{i}", [*STEM[: 60 - 20 * (i == 3)], i], 2))
    scheduler.add(request("short", [1], 2))
    engine.step()
    scheduler.add(request("late", [2], 2))
    scheduler.check_integrity()
    damage(scheduler)
    scheduler.check_integrity()


def _parked(scheduler: Scheduler) -> Any:
    (parked,) = scheduler.waiting._parked.values()
    return parked


def _lose_size(scheduler: Scheduler) -> None:
    scheduler.waiting.size += 1


def _lose_target(scheduler: Scheduler) -> None:
    _parked(scheduler).targets.pop()


def _wrong_target(scheduler: Scheduler) -> None:
    scheduler.request("r1").sequences[0].waits_for = None


def _owner_gone(scheduler: Scheduler) -> None:
    seq = scheduler.request("r0").sequences[0]
    (tables,) = scheduler.waiting._parked
    tables.owner = scheduler.request("short").sequences[0]
    assert seq.tables is tables


def _wrong_part(scheduler: Scheduler) -> None:
    seq = scheduler.waiting._short.items.pop()
    scheduler.waiting._long.items.append(seq)


def _miscounted(scheduler: Scheduler) -> None:
    scheduler.request("r1").num_unfinished = 2


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_lose_size, "counted as waiting"),
        (_lose_target, "would never wake up"),
        (_wrong_target, "waits for something else"),
        (_owner_gone, "has given up"),
        (_wrong_part, "part of the waiting queue"),
        (_miscounted, "miscounts"),
    ],
)
def test_damage_to_the_queues_is_found(damage, message):
    with pytest.raises(IntegrityError, match=message):
        damaged(damage)
