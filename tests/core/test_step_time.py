"""StepTimeLimit on simulated devices: steps settle at the limit; prompts always make progress."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.scheduling_helpers import OVERLAP, Clock, request

from mlx_paged.core import (
    KVManager,
    MediaSpan,
    Request,
    ScheduledMedia,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
    StepBatch,
    StepTime,
    StepTimeLimit,
)
from mlx_paged.core.step_time import MIN_PROMPT_TOKENS

LIMIT = 0.05
SETTLED = 12  # steps with prompts


class Device(NamedTuple):
    """Seconds of a step: ``base + token * tokens + pair * tokens * context + decode * decodes``."""

    base: float
    token: float
    pair: float = 0.0
    decode: float = 0.0
    noise: float = 0.0  # relative

    def seconds(self, batch: StepBatch, rng: random.Random) -> float:
        total = self.base
        for start, length in zip(batch.starts, batch.query_lens):
            if length == 1:
                total += self.decode
            else:
                total += length * (self.token + self.pair * (start + length / 2))
        return total * (1 + self.noise * rng.uniform(-1, 1))


DEVICES = {
    "fast": Device(0.003, 5e-5),
    "attention": Device(0.005, 1e-4, pair=5e-9, decode=1e-4),
    "mostly base": Device(0.044, 1.5e-5, pair=1e-9),
    "noise": Device(0.005, 1e-4, pair=2e-9, decode=2e-4, noise=0.04),
    "slow": Device(0.01, 8e-4, pair=1e-8, decode=1e-3),
}


@dataclass
class Run:
    """A scheduler on a simulated device."""

    device: Device
    overlap: bool = False
    limit: StepTimeLimit = field(default_factory=lambda: StepTimeLimit(LIMIT))
    options: dict[str, Any] = field(default_factory=dict)
    slowdown: Callable[[int], float] = lambda step: 1.0

    def __post_init__(self) -> None:
        config = SchedulerConfig(**{"max_num_seqs": 16, "watermark": 0.0, **self.options})
        self.scheduler = Scheduler(config, KVManager(3000, 32), step_time=self.limit)
        self.rng = random.Random(0)
        self.running: SchedulerOutput | None = None
        self.batches: list[StepBatch] = []
        self.seconds: list[float] = []

    def add(self, *requests: Request) -> None:
        for each in requests:
            self.scheduler.add(each)

    def step(self) -> None:
        output = self.scheduler.schedule()
        assert output or self.running, "livelock"
        if self.overlap:
            output, self.running = self.running, output
        if output is None:
            return
        seconds = self.device.seconds(output.batch, self.rng) * self.slowdown(len(self.batches))
        self.batches.append(output.batch)
        self.seconds.append(seconds)
        self.limit.learn(output.batch, StepTime(seconds, is_exact=True))
        self.scheduler.update_from_output(output, [[7] if s else [] for s in output.batch.samples])

    def run(self, *requests: Request) -> None:
        self.add(*requests)
        while self.scheduler.has_unfinished or self.running:
            self.step()
        self.scheduler.check_integrity()

    def steps_with_prompts(self) -> list[tuple[int, float]]:
        """(prompt tokens, seconds) of each."""
        return [
            (tokens, seconds)
            for batch, seconds in zip(self.batches, self.seconds)
            if (tokens := num_prompt_tokens(batch))
        ]


def num_prompt_tokens(batch: StepBatch) -> int:
    return sum(length for length in batch.query_lens if length > 1)


def prompt(name: str, length: int, max_tokens: int = 1, **options: Any) -> Request:
    rng = random.Random(name)
    return request(name, rng.choices(range(10, 1000), k=length), max_tokens, **options)


def batch_of(num_tokens: int, start: int = 0, num_decodes: int = 0) -> StepBatch:
    return StepBatch(
        seq_ids=list(range(num_decodes + 1)),
        starts=array("q", [100] * num_decodes + [start]),
        query_lens=array("q", [1] * num_decodes + [num_tokens]),
    )


def taught(times: Iterable[tuple[int, float]], limit: float = LIMIT) -> StepTimeLimit:
    """A limit that has measured steps of (tokens, seconds)."""
    found = StepTimeLimit(limit)
    for num_tokens, seconds in times:
        found.learn(batch_of(num_tokens), StepTime(seconds, is_exact=True))
    return found


def allowed(limit: StepTimeLimit, start: int = 0, num_decodes: int = 0) -> int:
    return limit.budget(num_decodes).num_tokens(start)


#: Steps of 5 ms + 0.1 ms per token.
STEPS = [(n, 0.005 + 1e-4 * n) for n in (64, 64, 256, 400, 430, 440)]


@OVERLAP
@pytest.mark.parametrize("name", DEVICES)
def test_steps_settle_at_the_limit(name: str, overlap: bool) -> None:
    run = Run(DEVICES[name], overlap)
    run.run(*(prompt(f"{i}", 5000 + 3000 * (i == 2), 30) for i in range(5)))
    steps = run.steps_with_prompts()[SETTLED:]
    assert max(seconds for _, seconds in steps) <= 1.1 * LIMIT
    # Most of the time is used, too.
    assert sorted(seconds for _, seconds in steps)[len(steps) // 4] >= 0.8 * LIMIT


def test_a_long_cached_context_is_taken_into_account_at_once() -> None:
    """The next turn of a long chat begins where attention costs most."""
    run = Run(Device(0.005, 1e-4, pair=1e-8))
    first = prompt("chat", 16000, 1)
    run.run(first, *(prompt(f"{i}", 700) for i in range(3)))
    run.batches.clear(), run.seconds.clear()
    run.run(request("turn", [*first.prompt_token_ids, *prompt("more", 900).prompt_token_ids], 1))
    steps = run.steps_with_prompts()
    assert run.batches[0].starts[0] > 15000
    assert max(seconds for _, seconds in steps) <= 1.1 * LIMIT
    assert steps[0][1] >= 0.8 * LIMIT


def test_the_floor_applies_where_no_chunk_is_short_enough() -> None:
    run = Run(Device(0.2, 1e-3))
    run.run(prompt("a", 1000, 5))
    assert [n for n, _ in run.steps_with_prompts()[2:-1]] == [MIN_PROMPT_TOKENS] * 27


def test_short_prompts_share_the_floor() -> None:
    run = Run(Device(0.2, 1e-3))
    run.run(prompt("a", 500))
    run.batches.clear(), run.seconds.clear()
    run.add(*(prompt(f"{i}", 8, 5) for i in range(8)))
    run.step()
    assert (run.scheduler.num_running, run.scheduler.num_waiting) == (4, 4)
    run.run()
    assert [n for n, _ in run.steps_with_prompts()] == [MIN_PROMPT_TOKENS] * 2


def test_decodes_are_never_delayed() -> None:
    run = Run(Device(0.005, 1e-4, decode=0.02))
    run.add(*(prompt(f"{i}", 40, 60) for i in range(4)))
    while run.scheduler.num_waiting or not (run.batches and run.batches[-1].is_decode):
        run.step()
    run.run(prompt("late", 600))
    mixed = [b for b in run.batches if num_prompt_tokens(b) and b.num_seqs > 4]
    assert all(batch.query_lens[:4].tolist() == [1] * 4 for batch in mixed)
    # The first one shows what decodes beside a prompt take.
    assert {num_prompt_tokens(batch) for batch in mixed[1:-1]} == {MIN_PROMPT_TOKENS}


def test_long_prompts_leave_short_ones_half_of_the_limited_step() -> None:
    run = Run(Device(0.0, 1e-4), options={"long_prefill_token_threshold": 450})
    run.run(prompt("first", 5000))
    run.add(prompt("long", 9000))
    run.step()
    run.add(prompt("short", 400))
    run.step()
    assert run.batches[-1].query_lens.tolist() == pytest.approx([250, 250], abs=2)
    run.run()


costs = st.sampled_from([0.0, 1e-9, 1e-5, 1e-3, 1.0, 1e6])


@given(
    st.builds(Device, costs, costs, costs, costs, st.sampled_from([0.0, 0.9])),
    st.lists(st.integers(2, 400), min_size=1, max_size=6),
    st.booleans(),
    st.lists(st.sampled_from([1.0, 1.0, 1e-3, 5.0, 1e9, float("inf"), float("nan")]), min_size=1),
)
def test_prompts_make_progress_on_any_device(device, lengths, overlap, slowdowns) -> None:
    run = Run(device, overlap, slowdown=lambda step: slowdowns[step % len(slowdowns)])
    run.run(*(prompt(f"{i}", n, 1 + i) for i, n in enumerate(lengths)))
    # Each step with prompts has the floor, except where a prompt's end or one token is left over.
    most = sum(lengths) // MIN_PROMPT_TOKENS + 2 * len(lengths) + 1
    assert len(run.steps_with_prompts()) <= most


def test_the_first_step_compiles_and_teaches_nothing() -> None:
    assert taught([(64, 30.0)])._costs == taught([])._costs
    assert 430 <= allowed(taught([(64, 30.0), *STEPS[1:]])) <= 450


def test_chunks_grow_from_a_small_first_one() -> None:
    assert [allowed(taught(STEPS[:n])) for n in range(3)] == [64, 64, 256]


def test_a_new_prompt_starts_at_most_twice_as_large_as_the_last_chunk() -> None:
    """Noise may make attention look too costly, so that a start without context looks too cheap."""
    run = Run(Device(0.001, 2e-5, pair=1e-7))
    run.run(prompt("long", 6000))
    run.batches.clear()
    run.run(prompt("next", 6000))
    chunks = [num_prompt_tokens(batch) for batch in run.batches]
    assert chunks[0] <= 200 and max(chunks) > 500


def test_a_single_outlier_is_rejected() -> None:
    before = allowed(taught(STEPS))
    assert 440 <= before <= 455
    assert allowed(taught([*STEPS, (440, 3600.0)])) == before
    assert allowed(taught([*STEPS, (440, 3600.0), STEPS[-1], (440, 3600.0)])) == pytest.approx(
        before, abs=2
    )


def test_two_slow_steps_in_a_row_are_the_truth() -> None:
    slow = [(440, 0.5), (440, 0.5)]
    assert allowed(taught([*STEPS, *slow])) <= 64


def test_a_step_beyond_the_limit_shrinks_the_next_one_at_once() -> None:
    assert allowed(taught([*STEPS, (440, 0.1)])) <= 250


@pytest.mark.parametrize("overlap", [False, True])
def test_a_device_that_slows_down_and_recovers(overlap: bool) -> None:
    run = Run(Device(0.005, 1e-4), overlap, slowdown=lambda step: 3.0 if 30 <= step < 70 else 1.0)
    run.run(prompt("a", 50000))
    steps = run.steps_with_prompts()
    over = [i for i, (_, seconds) in enumerate(steps) if seconds > 1.1 * LIMIT]
    assert over and set(over) <= set(range(30, 33))
    assert steps[69][1] > 0.8 * LIMIT and steps[110][1] > 0.8 * LIMIT


def test_times_of_late_reads_only_lower_the_estimates() -> None:
    """A slow reader of a stream is not a slow device."""
    limit, before = taught(STEPS), allowed(taught(STEPS))
    for _ in range(20):
        limit.learn(batch_of(440), StepTime(0.15, is_exact=False))
    assert allowed(limit) == before
    for _ in range(20):
        limit.learn(batch_of(440), StepTime(0.02, is_exact=False))
    assert allowed(limit) > 1.5 * before
    first = StepTimeLimit(LIMIT)
    for _ in range(3):
        first.learn(batch_of(64), StepTime(9.0, is_exact=False))
    assert allowed(first) == 64


def test_steps_without_prompts_and_with_encoders_teach_nothing() -> None:
    limit, before = taught(STEPS), allowed(taught(STEPS))
    decodes = batch_of(1, num_decodes=3)
    encodes = batch_of(440)
    encodes.media = ScheduledMedia((), (b"picture",))
    decode_step = batch_of(1, num_decodes=3)
    decode_step.is_decode = True
    for batch in (decodes, encodes, decode_step):
        for _ in range(3):
            limit.learn(batch, StepTime(0.15, is_exact=True))
    assert allowed(limit) == before
    seen = batch_of(440)
    seen.media = ScheduledMedia((), ())  # (encoded before)
    limit.learn(seen, StepTime(0.15, is_exact=True))
    assert allowed(limit) < before


@OVERLAP
def test_an_atomic_item_above_the_limit_runs_whole(overlap: bool) -> None:
    run = Run(Device(0.2, 1e-3), overlap)
    run.run(prompt("text", 300))
    run.batches.clear()
    offset, length = 40, 500
    media = [MediaSpan(offset, length, bytes(32), length, is_atomic=True)]
    run.run(
        prompt("before", 70),
        prompt("picture", offset + length + 20, 5, media=media),
        prompt("after", 70),
    )
    chunks = [(s, n) for b in run.batches for s, n in zip(b.starts, b.query_lens)]
    assert (offset, length) in chunks or (offset, length + 20) in chunks
    assert all(n <= MIN_PROMPT_TOKENS for _, n in chunks if n < length)


def test_wrong_limits_are_refused() -> None:
    for seconds in (0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="seconds must be positive and finite but got"):
            StepTimeLimit(seconds)
    config = SchedulerConfig(max_model_len=100, enable_chunked_prefill=False)
    with pytest.raises(AssertionError):
        Scheduler(config, KVManager(9, 32), clock=Clock(), step_time=StepTimeLimit(LIMIT))
