"""Engines measure how fast blocks come back, and compute what they compute faster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.embedded_llm import make
from support.models import embedded_twin
from support.offloading import GREEDY, answers, flush, random_prompts
from test_step_time_engine import SimulatedDevice

from mlx_paged import LLM, SamplingParams
from mlx_paged.core import Level, MissReason
from mlx_paged.core.kv import write_policy
from mlx_paged.core.kv.restore_rates import MIN_BYTES, MIN_TOKENS
from mlx_paged.engine.offload import restorer

LENGTH = 200


@pytest.fixture(autouse=True)
def short_prompts_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_policy, "LONG_TOKENS", 128)
    monkeypatch.setattr(write_policy, "MIN_TOKENS", 32)


def llm_of(folder: Path | None = None, **options: Any) -> LLM:
    options = {"block_size": 8, "num_gpu_blocks_override": 40, **options}
    return make(embedded_twin(), kv_offload_dir=folder, **options)


def learn(llm: LLM, level: Level, ratio: float) -> None:
    """Sets the time to restore a block of a level, relative to computing it."""
    offloading = llm.engine._offloading
    assert offloading is not None
    [block_bytes] = offloading._blocks.num_bytes
    offloading.rates.note_computed(1000 * MIN_TOKENS, 1000 * MIN_TOKENS / 8)
    for _ in range(8):  # each of them halves the weight of those before
        num_bytes = 16 * MIN_BYTES
        offloading.rates.note_restored(level, num_bytes, ratio * num_bytes / block_bytes)


@pytest.mark.parametrize("level", [Level.MEMORY, Level.DISK])
def test_blocks_that_are_computed_faster_stay_where_they_are(level: Level, tmp_path: Path) -> None:
    is_memory = level is Level.MEMORY
    options: dict[str, Any] = {"kv_offloading_size": 0.1} if is_memory else {"folder": tmp_path}
    llm = llm_of(**options)
    chats = random_prompts(LENGTH, LENGTH)
    expected, _ = answers(llm, chats)
    flush(llm)
    learn(llm, level, 3.0)
    assert answers(llm, chats[:1]) == (expected[:1], [96])  # which the device has
    stats = llm.stats()
    assert stats.counters.num_restored_tokens == 0 and stats.counters.num_refused_tokens == 96
    assert stats.cache_misses[MissReason.COMPUTED_FASTER] == 1
    # Nothing is kept that would not come back.
    assert stats.offloading is not None
    answers(llm, random_prompts(*[LENGTH] * 3, seed=7))
    flush(llm)
    after = llm.stats().offloading
    assert after is not None and after.num_written_bytes == stats.offloading.num_written_bytes
    assert after.num_stored_blocks <= 2 * 26  # those of the two chats, copied before
    learn(llm, level, 0.1)
    _, [cached] = answers(llm, chats[1:])
    assert cached == 192 and llm.stats().counters.num_restored_tokens > 0


def test_the_reason_is_told() -> None:
    llm = llm_of(kv_offloading_size=0.1)
    chats = random_prompts(LENGTH, LENGTH)
    answers(llm, chats)
    learn(llm, Level.MEMORY, 3.0)
    [output] = llm.generate([chats[0]], GREEDY)
    miss = output.cache_miss
    assert miss is not None and miss.reason is MissReason.COMPUTED_FASTER
    assert str(miss).startswith("computed_faster: shares the first 200 of 200 tokens")


@pytest.mark.parametrize("level", [Level.MEMORY, Level.DISK])
def test_an_idle_engine_measures_what_comes_back(
    level: Level, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look at the clock is a millisecond later."""
    is_memory = level is Level.MEMORY
    llm = llm_of(**({"kv_offloading_size": 0.1} if is_memory else {"folder": tmp_path}))
    chats = random_prompts(LENGTH, LENGTH)
    answers(llm, chats)
    flush(llm)
    offloading, now = llm.engine._offloading, [0.0]
    assert offloading is not None

    def clock() -> float:
        now[0] += 0.001
        return now[0]

    monkeypatch.setattr(restorer, "perf_counter", clock)
    found: list[tuple[Level, int, float]] = []
    offloading.rates.note_restored = lambda *note: found.append(note)  # type: ignore[method-assign]
    assert answers(llm, chats[:1])[1] == [192]
    num_blocks = llm.stats().counters.num_restored_tokens // 8
    assert {which for which, _, _ in found} == {level}
    assert sum(each[1] for each in found) == num_blocks * offloading._blocks.num_bytes[0]
    assert 0.001 * num_blocks <= sum(each[2] for each in found) <= now[0]


def test_a_busy_engine_does_not_measure_what_comes_back() -> None:
    llm = llm_of(kv_offloading_size=0.1, num_gpu_blocks_override=60)
    chats = random_prompts(*[LENGTH] * 3)
    answers(llm, chats)
    offloading = llm.engine._offloading
    assert offloading is not None
    offloading.rates.note_restored = None  # type: ignore[assignment]  # a call would fail
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    running = llm.engine.add_request("running", [9] * 10, params)
    llm.engine.step()
    llm.engine.step()
    output = llm.engine.add_request("waiting", chats[0], GREEDY)
    while not output.finished:
        llm.engine.step()
    assert not running.finished and llm.stats().counters.num_restored_tokens > 0


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "sync"])
def test_steps_with_prompts_are_measured(overlap: bool) -> None:
    """The device takes 10 ms and 0.5 ms per token."""
    llm = llm_of(
        kv_offloading_size=0.1, num_gpu_blocks_override=200, async_scheduling=overlap,
        max_num_batched_tokens=256,
    )  # fmt: skip
    engine, found = llm.engine, []
    assert engine._offloading is not None
    engine._offloading.rates.note_computed = lambda *note: found.append(note)  # type: ignore[method-assign]
    SimulatedDevice(engine, blocked_until=10.0)
    # A short prompt, and two decodes, that share steps with the long one.
    for name, prompt in zip("abc", random_prompts(20, 30, 600)):
        engine.add_request(name, prompt, GREEDY)
        engine.step()
    while engine.has_unfinished:
        engine.step()
    assert sum(num_tokens for num_tokens, _ in found) >= 500
    for num_tokens, seconds in found:
        assert num_tokens >= 128
        assert seconds == pytest.approx(0.01 + 0.0005 * num_tokens, rel=0.02)


def test_a_step_of_many_decodes_says_little_of_prompts() -> None:
    llm = llm_of(kv_offloading_size=0.1)
    offloading, found = llm.engine._offloading, []
    assert offloading is not None
    offloading.rates.note_computed = lambda *note: found.append(note)  # type: ignore[method-assign]

    class Batch:
        def __init__(self, *query_lens: int, has_drafts: bool = False) -> None:
            self.query_lens, self.num_tokens = query_lens, sum(query_lens)
            self.has_drafts = has_drafts

    for lens in ((127,), (128,), (100, 28), (128, *[1] * 8), (128, *[1] * 9), (1, 1)):
        offloading.note_step(Batch(*lens), 1.0)  # type: ignore[arg-type]
    offloading.note_step(Batch(*[4] * 64, has_drafts=True), 1.0)  # type: ignore[arg-type]
    assert found == [(128, 1.0)] * 3
