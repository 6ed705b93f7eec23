"""Random operations on store and scheduler against naive models; all books checked each time.

`MLX_PAGED_STATE_OPS` sets the number of operations of each machine (default: 1,500, the
same every time; a larger number explores at random).
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.fake_model import PLACEHOLDER, FakeEngine, contents, generate
from support.fake_tier import BLOCK_BYTES, FakeTier
from support.id_store import IdStore
from support.naive_groups import NaiveWindow
from support.naive_store import NaiveStore
from support.plain_scheduler import PlainScheduler
from support.step_rows import Rows

from mlx_paged.core import (
    FinishReason,
    KVManager,
    MediaSpan,
    Request,
    Scheduler,
    SchedulerConfig,
    StateGroupSpec,
    StopPolicy,
    WindowGroupSpec,
)
from mlx_paged.core.admission import MAX_PARKED_TOKENS, PARKING_COST
from mlx_paged.core.media import MediaIds
from mlx_paged.errors import EngineOverloadedError, InvalidParameterError

NUM_OPS = int(os.environ.get("MLX_PAGED_STATE_OPS", "1500"))
OPS_PER_RUN = 50
RUNS_PER_ROUND = 1000  # hypothesis remembers every run of a round
NUM_RUNS = max(1, NUM_OPS // OPS_PER_RUN)
ROUNDS = [min(RUNS_PER_ROUND, NUM_RUNS - i) for i in range(0, NUM_RUNS, RUNS_PER_ROUND)]
SETTINGS = settings(
    stateful_step_count=OPS_PER_RUN,
    derandomize="MLX_PAGED_STATE_OPS" not in os.environ,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)

# Few distinct tokens and a few stems, so that prefixes are shared, fully and in part.
STEMS = [(), (0, 1, 0, 1, 0, 1), (0, 1, 0, 1, 1, 1, 0, 0, 1, 0), (2, 2, 2, 2, 2, 2, 2, 2)]
prompts = st.tuples(
    st.sampled_from(STEMS),
    st.integers(0, 10),
    st.lists(st.integers(0, 2), min_size=1, max_size=4),
).map(lambda parts: [*parts[0][: parts[1]], *parts[2]])
salts = st.sampled_from([None, None, None, "a"])

# Pictures: two of equal size of each kind, so that one may be taken for another. (length, rows,
# whether it is atomic)
SIZES = [(1, 1, False), (3, 2, False), (6, 6, False), (2, 2, True), (5, 4, True)]
PICTURES = [
    MediaSpan(0, length, sha256(bytes([which, number])).digest(), num_rows, is_atomic)
    for number, (length, num_rows, is_atomic) in enumerate(SIZES)
    for which in range(2)
]
# (tokens in front of it, the picture)
pictures = st.lists(
    st.tuples(st.sampled_from([0, 0, 1, 3, 6]), st.sampled_from(PICTURES)), max_size=3
)


def with_pictures(
    prompt: list[int], chosen: list[tuple[int, MediaSpan]], limit: int
) -> tuple[list[int], list[MediaSpan]]:
    """A prompt of at most `limit` tokens with as many of the pictures as it has room for."""
    tokens: list[int] = []
    spans: list[MediaSpan] = []
    rest = prompt[:limit]
    for num_before, picture in chosen:
        before = rest[:num_before]
        if len(tokens) + len(before) + picture.length > limit:
            break
        rest = rest[num_before:]
        tokens += before
        spans.append(replace(picture, offset=len(tokens)))
        tokens += [PLACEHOLDER] * picture.length
    return (tokens + rest)[:limit], spans


def sliding(window: int) -> Callable[[int], int]:
    return lambda position: max(0, position - window + 1)


def chunked(chunk: int) -> Callable[[int], int]:
    return lambda position: position - position % chunk


REACHES = {"w1": (1, sliding(1)), "w3": (3, sliding(3)), "w8": (8, sliding(8))}
REACHES |= {"c2": (2, chunked(2)), "c6": (6, chunked(6))}
WINDOWS = [("w1",), ("w3",), ("w8",), ("c2",), ("c6",), ("w3", "c6")]
GROUPS = ["w3", "w8", "c2", "c6", "states", "w1 w8", "w3 states", "c6 w3 states", "states"]


def group_options(groups: str | None, block_size: int, room: int) -> dict[str, Any]:
    """Window groups and states, with little more room than one sequence needs at least."""
    names = groups.split() if groups else []
    windows = []
    for name in names:
        if name != "states":
            span, first_visible = REACHES[name]
            num_needed = (span + block_size - 2) // block_size + 1
            windows.append(WindowGroupSpec(1 + num_needed + room, span, first_visible))
    states = StateGroupSpec(3 + room, snapshot_interval=2) if "states" in names else None
    return {"windows": windows, "states": states}


class StoreMachine(RuleBasedStateMachine):
    """KVManager against `NaiveStore`, which knows prefixes as tuples and blocks as counts.

    Window groups go along; `NaiveWindow` predicts each of their blocks.
    """

    @initialize(
        num_usable=st.sampled_from([2, 3, 6, 12, 24]),
        block_size=st.sampled_from([1, 2, 4]),
        reaches=st.sampled_from([(), (), *WINDOWS]),
        room=st.integers(0, 8),
    )
    def begin(self, num_usable: int, block_size: int, reaches: tuple[str, ...], room: int) -> None:
        options = group_options(" ".join(reaches), block_size, room)
        self.kv = IdStore(num_usable + 1, block_size, **options)
        windows = [
            NaiveWindow(spec.num_blocks - 1, spec.span, spec.first_visible, block_size)
            for spec in options["windows"]
        ]
        self.naive = NaiveStore(num_usable, block_size, windows)
        self.tokens: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.next_id = 0
        self.step = 0
        self.evaluated = 0

    def pick(self, choice: int) -> int:
        return list(self.tokens)[choice % len(self.tokens)]

    @rule(prompt=prompts, salt=salts, headroom=st.integers(0, 1))
    def admit(self, prompt: list[int], salt: str | None, headroom: int) -> None:
        self._admit(prompt, salt, headroom=headroom)

    @precondition(lambda self: self.tokens)
    @rule(choice=st.integers(0, 20), tail=st.lists(st.integers(0, 2), min_size=1, max_size=3))
    def fork(self, choice: int, tail: list[int]) -> None:
        source = self.pick(choice)
        shared = self.computed[source]
        prompt = self.tokens[source][:shared] + tail
        self._admit(prompt, self.naive.tables[source].salt, fork_of=source, shared=shared)

    def _admit(
        self,
        prompt: list[int],
        salt: str | None,
        *,
        headroom: int = 0,
        fork_of: int | None = None,
        shared: int = 0,
    ) -> None:
        self.next_id += 1
        num_cached = self.kv.admit(
            self.next_id,
            prompt,
            salt=salt,
            headroom=headroom,
            fork_of=fork_of,
            num_fork_tokens=shared,
        )
        expected = self.naive.admit(self.next_id, prompt, salt, headroom, fork_of, shared)
        assert num_cached == expected
        if num_cached is not None:
            self.tokens[self.next_id] = prompt
            self.computed[self.next_id] = num_cached
        self.check()

    @precondition(lambda self: self.tokens)
    @rule(choice=st.integers(0, 20), count=st.sampled_from([1, 3, 99]), ends=st.booleans())
    def compute(self, choice: int, count: int, ends: bool) -> None:
        if self.naive.copies:
            self.launch()
        seq_id = self.pick(choice)
        computed = min(len(self.tokens[seq_id]), self.computed[seq_id] + count)
        reached = self.kv.allocate_up_to(seq_id, computed)
        assert reached == self.naive.allocate_up_to(seq_id, computed)
        computed = max(reached, self.computed[seq_id])
        self.computed[seq_id] = computed
        self.kv.commit(seq_id, computed)
        self.naive.commit(seq_id, computed)
        self.check()
        if ends:
            self.free(seq_id)

    @precondition(lambda self: self.tokens)
    @rule(choice=st.integers(0, 20), new=st.lists(st.integers(0, 2), min_size=1, max_size=5))
    def grow(self, choice: int, new: list[int]) -> None:
        seq_id = self.pick(choice)
        length = len(self.tokens[seq_id]) + len(new)
        grown = self.kv.grow(seq_id, length)
        assert grown == self.naive.grow(seq_id, length)
        if grown:
            self.tokens[seq_id] += new
        self.check()

    @precondition(lambda self: self.tokens)
    @rule(choice=st.integers(0, 20), count=st.integers(1, 9))
    def truncate(self, choice: int, count: int) -> None:
        seq_id = self.pick(choice)
        tokens = self.tokens[seq_id]
        length = max(1, len(tokens) - count)
        # (Not what is still to come: no table needs to cover that.)
        length = min(length, max(1, self.computed[seq_id]))
        start = self.kv.truncate(seq_id, length)
        assert start == self.naive.truncate(seq_id, length)
        del tokens[length:]
        self.computed[seq_id] = min(self.computed[seq_id], start)
        self.check()

    @precondition(lambda self: self.tokens)
    @rule(choice=st.integers(0, 20))
    def abort(self, choice: int) -> None:
        self.free(self.pick(choice))

    def free(self, seq_id: int) -> None:
        del self.tokens[seq_id], self.computed[seq_id]
        self.kv.free(seq_id)
        self.naive.free(seq_id)
        self.check()

    @rule()
    def launch(self) -> None:
        if self.step - self.evaluated == 2:
            self.evaluate()
        self.step += 1
        copies = self.kv.launch_step(self.step)
        num_copies = self.naive.launch(self.step)
        assert list(map(len, copies)) == [num_copies] * (1 + len(self.naive.windows))
        self.check()

    @precondition(lambda self: self.step > self.evaluated)
    @rule()
    def evaluate(self) -> None:
        self.evaluated += 1
        self.kv.on_step_evaluated(self.evaluated)
        self.naive.evaluate(self.evaluated)
        self.check()

    @precondition(lambda self: not self.naive.copies)
    @rule(sure=st.integers(0, 5))
    def reset(self, sure: int) -> None:
        if sure == 0:
            assert self.kv.reset_prefix_cache() == len(self.naive.nodes)
            self.naive.reset()
            self.check()

    @rule(prompt=prompts, salt=salts)
    def match(self, prompt: list[int], salt: str | None) -> None:
        found = self.kv.match(prompt, salt)
        assert found.num_tokens(self.kv.block_size) == self.naive.match(prompt, salt).num_tokens

    def check(self) -> None:
        self.kv.check_integrity()
        usage = self.kv.usage
        naive = self.naive
        assert usage.num_free_blocks == naive.num_free
        assert usage.num_cached_blocks == naive.num_cached
        assert usage.num_indexed_blocks == len(naive.nodes)
        assert usage.num_quarantined_blocks == naive.num_quarantined
        for counted, window in zip(self.kv.group_usage, naive.windows, strict=True):
            assert counted.num_free_blocks == window.num_free
            assert counted.num_cached_blocks == window.num_cached
            assert counted.num_indexed_blocks == len(window.held)
            assert counted.num_quarantined_blocks == len(window.quarantine)


def told(step: Rows) -> list[Any]:
    """A step, with its sequences by id."""
    slots = [] if step.output is None else step.output.batch.adapter_ids.tolist()
    return [step.step, step.block_copies, step.media, slots, *(row[1:] for row in step.sequences)]


class SchedulerMachine(RuleBasedStateMachine):
    """Scheduler and fake device against the oracle: every request gets its tokens.

    A second scheduler, whose hot loops and waiting queue are the plain ones, must build the same
    batches all along.
    """

    EOS = frozenset({3, 4})

    @initialize(
        num_usable=st.sampled_from([3, 4, 6, 12, 30]),
        block_size=st.sampled_from([1, 2, 4]),
        max_num_seqs=st.sampled_from([1, 3, 8]),
        budget=st.sampled_from([8, 12, 40]),
        threshold=st.sampled_from([None, 0, 3]),
        policy=st.sampled_from(["fcfs", "priority"]),
        caching=st.sampled_from([True, True, False]),
        overlap=st.booleans(),
        groups=st.sampled_from([None, None, *GROUPS]),
        room=st.integers(0, 12),
        parked=st.sampled_from([1, 3 * PARKING_COST, MAX_PARKED_TOKENS]),
        encoder_rows=st.sampled_from([None, 1, 4, 7]),
        encoder_bytes=st.sampled_from([1, 6, 9, 1000]),
        media_ids=st.sampled_from([(1000, 1 << 31), (1, 1 << 31), (1000, 40), (2, 20)]),
        tier=st.sampled_from([0, 0, 1, 5, 12, 60]),
        disk=st.booleans(),
        speed=st.sampled_from([1, 2, 100]),
        max_loras=st.sampled_from([1, 1, 2, 3]),
    )
    def begin(
        self,
        num_usable: int,
        block_size: int,
        max_num_seqs: int,
        budget: int,
        threshold: int | None,
        policy: str,
        caching: bool,
        overlap: bool,
        groups: str | None,
        room: int,
        parked: int,
        encoder_rows: int | None,
        encoder_bytes: int,
        media_ids: tuple[int, int],
        tier: int,
        disk: bool,
        speed: int,
        max_loras: int,
    ) -> None:
        self.speed = speed
        options = group_options(groups, block_size, room)
        num_groups = 1 + len(options["windows"]) + (options["states"] is not None)
        has_tier = caching and (tier > 0 or disk)
        self.tiers = [
            FakeTier(tier, num_groups, block_size, has_disk=disk) for _ in range(2 * has_tier)
        ]
        tiers = iter(self.tiers)
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            long_prefill_token_threshold=threshold,
            policy=policy,  # type: ignore[arg-type]
            watermark=0.1,
            max_num_encoder_tokens=encoder_rows,
            encoder_cache_bytes=encoder_bytes,
            encoder_bytes_per_row=1,
            max_loras=max_loras,
        )
        self.now = 0.0
        self.scheduler, self.plain = (
            make(
                config,
                KVManager(
                    num_usable + 1,
                    block_size,
                    enable_prefix_caching=caching,
                    tier=next(tiers, None),
                    **options,
                ),
                clock=lambda: self.now,
            )
            for make in (Scheduler, PlainScheduler)
        )
        for scheduler in (self.scheduler, self.plain):
            scheduler.kv.media_ids = MediaIds(*media_ids)
        self.scheduler.max_parked_tokens = self.plain.max_parked_tokens = parked
        self.engine = FakeEngine(self.scheduler, overlap=overlap)
        self.plain_engine = FakeEngine(self.plain, overlap=overlap)
        self.engines = (self.engine, self.plain_engine)
        for each, engine in zip(self.tiers, self.engines, strict=False):
            each.device = engine.device
        self.num_compared = 0
        self.requests: list[Request] = []

    @rule(
        prompt=prompts,
        max_tokens=st.integers(1, 12),
        n=st.sampled_from([1, 1, 1, 2, 3, 7]),
        priority=st.integers(0, 2),
        background=st.sampled_from([False, False, True]),
        salt=salts,
        timeout=st.sampled_from([None, None, None, 3.0]),
        reads_cache=st.sampled_from([True, True, True, False]),
        chosen=st.one_of(st.just([]), pictures),
        adapter=st.sampled_from([None, None, None, "x", "y", "z"]),
    )
    def add(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        n: int,
        priority: int,
        background: bool,
        salt: str | None,
        timeout: float | None,
        reads_cache: bool,
        chosen: list[tuple[int, MediaSpan]],
        adapter: str | None,
    ) -> None:
        limit = self.scheduler.max_total_tokens
        prompt, media = with_pictures(list(prompt), chosen, limit - 1)
        stop = StopPolicy(min(max_tokens, limit - len(prompt)), eos_token_ids=self.EOS)
        request = Request(
            f"r{len(self.requests)}",
            prompt,
            stop,
            n=n,
            priority=priority,
            background=background,
            timeout=timeout,
            cache_salt=salt if adapter is None else f"{adapter} {salt}",
            read_prefix_cache=reads_cache,
            media=media,
            adapter=adapter,
        )
        try:
            self.plain.add(copy.deepcopy(request))
        except (InvalidParameterError, EngineOverloadedError) as error:
            assert media  # (no step is so large, or no ids are left)
            with pytest.raises(type(error)):
                self.scheduler.add(request)
            return
        self.scheduler.add(request)
        self.requests.append(request)
        self.scheduler.check_integrity()

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.step_once()
            self.scheduler.check_integrity()

    def step_once(self) -> None:
        for tier in self.tiers:
            tier.restore(self.speed)
        self.engine.step()
        self.plain_engine.step()
        self.compare()

    def compare(self) -> None:
        """Both schedulers have built the same batches, and reported the same."""
        ours, plain = self.engine, self.plain_engine
        new = [list(map(told, e.batches[self.num_compared :])) for e in (ours, plain)]
        assert new[0] == new[1]
        self.num_compared = len(ours.batches)
        assert ours.outputs == plain.outputs and ours.reasons == plain.reasons

    @precondition(lambda self: self.requests)
    @rule(choice=st.integers(0, 50), which=st.sampled_from([None, 0, 1]))
    def end(self, choice: int, which: int | None) -> None:
        request = self.requests[choice % len(self.requests)]
        index = None if which is None else which % request.n
        self.scheduler.finish(request.request_id, FinishReason.ABORT, index=index)
        self.plain.finish(request.request_id, FinishReason.ABORT, index=index)
        self.scheduler.check_integrity()

    @rule()
    def time_passes(self) -> None:
        self.now += 1.0

    @rule(choice=st.integers(0, 1000), most=st.sampled_from([0, 1, 3, 1000]))
    def tiers_change(self, choice: int, most: int) -> None:
        """A block on disk is lost, and host memory gets another size."""
        for tier in self.tiers:
            tier.lose(choice)
            tier.memory.limit(max(most * BLOCK_BYTES, tier.memory.num_bytes * (choice % 2)))
        self.scheduler.check_integrity()

    @rule(count=st.integers(1, 20), allowance=st.sampled_from([None, None, 0, 1, 3]))
    def tiers_copy(self, count: int, allowance: int | None) -> None:
        """Blocks are copied ahead of their eviction; the next evictions copy few or many."""
        for tier in self.tiers:
            tier.memory.copy_ahead(count * BLOCK_BYTES)
            tier.memory.allowance = None if allowance is None else allowance * BLOCK_BYTES
        self.scheduler.check_integrity()

    @rule(memory=st.sampled_from([0.1, 0.9, 3.0]), disk=st.sampled_from([0.1, 0.9, 3.0]))
    def tiers_are_slow(self, memory: float, disk: float) -> None:
        """Restoring a block takes less or more time than computing it, from now on."""
        for tier in self.tiers:
            tier.learn(memory, disk)

    @rule(sure=st.integers(0, 5))
    def reset_cache(self, sure: int) -> None:
        if sure == 0:
            self.scheduler.reset_prefix_cache()
            self.plain.reset_prefix_cache()
            self.scheduler.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(10_000):
            if not any(e.scheduler.has_unfinished or e.running for e in self.engines):
                break
            self.step_once()
        else:
            raise AssertionError("the requests do not come to an end")
        self.scheduler.check_integrity()
        for request in self.requests:
            for seq in request.sequences:
                expected = generate(
                    contents(request), request.max_output_tokens, self.EOS, seq.index
                )
                got = self.engine.outputs.get(seq.seq_id, [])
                generated = list(seq.tokens[request.num_prompt_tokens :])
                assert got == generated == expected[: len(got)]
                if seq.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                    assert got == expected
        usage = self.scheduler.kv.usage
        assert usage.num_used_blocks == usage.num_quarantined_blocks == 0
        for group in self.scheduler.kv.groups:
            assert group.pool.num_used == group.pool.num_quarantined == 0


@pytest.mark.parametrize("machine", [StoreMachine, SchedulerMachine])
def test_random_operations(
    machine: type[RuleBasedStateMachine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlx_paged.core.kv.tree.LONG_SEARCH", 2)  # prompts are short here
    monkeypatch.setattr("mlx_paged.core.kv.write_policy.LONG_TOKENS", 8)
    monkeypatch.setattr("mlx_paged.core.kv.write_policy.MIN_TOKENS", 2)
    for num_runs in ROUNDS:
        run_state_machine_as_test(machine, settings=settings(SETTINGS, max_examples=num_runs))
