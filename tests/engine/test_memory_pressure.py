"""Engines on a system that is short of memory: they give back what is idle, and refuse new work."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import threading
from typing import Any

from support.grouped_models import dense_answer, engine_of
from support.hash_model import follows, hash_model
from support.interrupts import Interrupter
from support.models import embedded_twin
from support.pressure import FakeSource, fake_source

# isort: split
import pytest

from mlx_paged import LLM, SamplingParams
from mlx_paged.engine import engine as engine_module
from mlx_paged.engine.async_engine import AsyncEngine
from mlx_paged.engine.config import EngineConfig
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.outputs import RequestOutput
from mlx_paged.engine.pressure_sources import PressureLevel
from mlx_paged.errors import EngineOverloadedError, InvalidParameterError, MemoryPressureError
from mlx_paged.model import pages
from mlx_paged.model.paged_model import PagedModel

NORMAL, WARNING, CRITICAL = PressureLevel
NUM_INTERRUPTS = int(os.environ.get("MLX_PAGED_INTERRUPTS", "12"))
WAYS = pytest.mark.parametrize("resizes", [False, True], ids=["discard", "resize"], indirect=True)
OPTIONS: dict[str, Any] = {
    "block_size": 8,
    "num_gpu_blocks_override": 200,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 32,
}


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> FakeSource:
    return fake_source(monkeypatch)


@pytest.fixture
def resizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether pools are resized, as on Metal, or parts of them discarded, as on Linux's CPU."""
    monkeypatch.setattr(pages, "can_discard", lambda _: not request.param)
    return bool(request.param)


def make(**options: Any) -> Engine:
    return LLM(hash_model(), **{**OPTIONS, **options}).engine


def params(max_tokens: int = 20, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **options)


def prompt_of(first: int, length: int = 60) -> list[int]:
    return [(first + 7 * i) % 61 for i in range(length)]


def add(engine: Engine, name: str, prompt: list[int], max_tokens: int = 20) -> RequestOutput:
    return engine.add_request(name, prompt, params(max_tokens))


def finish(engine: Engine, *outputs: RequestOutput) -> None:
    """Runs to the end; all answers are the model's."""
    num_steps = 0
    while engine.has_unfinished:
        engine.step()
        engine.check_integrity()
        num_steps += 1
        assert num_steps < 2000, "the requests do not come to an end"
    for output in outputs:
        [answer] = output.outputs
        assert answer.token_ids == follows(output.prompt_token_ids, len(answer.token_ids))
        assert answer.finish_reason == "length"


def size_of(engine: Engine) -> int:
    return engine.stats().usage.num_usable_blocks


@WAYS
@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
def test_idle_blocks_go_and_running_requests_do_not_notice(source, resizes, overlap) -> None:
    engine = make(async_scheduling=overlap)
    old = [add(engine, f"old {i}", prompt_of(i)) for i in range(8)]
    finish(engine, *old)
    cached = engine.stats().usage.num_cached_blocks
    new = [add(engine, f"new {i}", prompt_of(30 + i)) for i in range(3)]
    for _ in range(12):
        engine.step()
    source.level = WARNING
    for _ in range(3):
        engine.step()
        engine.check_integrity()
    stats = engine.stats()
    assert stats.pressure.level == WARNING and stats.pressure.num_blocks >= cached > 40
    assert stats.usage.num_cached_blocks == 0 < stats.usage.num_used_blocks
    assert stats.num_running == 3 and stats.num_preemptions == 0
    assert (size_of(engine) < 100) == resizes
    finish(engine, *new)
    assert engine.stats().pool_copies == stats.pool_copies


@WAYS
def test_new_requests_are_taken_while_it_is_only_a_warning(source, resizes) -> None:
    engine = make()
    source.level = WARNING
    engine.follow_pressure()
    assert (size_of(engine) < 100) == resizes
    finish(engine, *(add(engine, f"{i}", prompt_of(i), 40) for i in range(20)))
    assert engine.stats().pressure.level == WARNING


@WAYS
def test_critical_refuses_new_work_and_finishes_what_runs(source, resizes) -> None:
    engine = make()
    running = [add(engine, f"running {i}", prompt_of(i), 30) for i in range(3)]
    for _ in range(8):
        engine.step()
    waiting = add(engine, "waiting", prompt_of(50))
    source.level = CRITICAL
    engine.step()
    with pytest.raises(MemoryPressureError, match="critically short of memory") as refused:
        add(engine, "refused", prompt_of(1))
    assert isinstance(refused.value, EngineOverloadedError) and refused.value.retry_after >= 0
    assert engine.request_state("refused") is None
    while not all(output.finished for output in running):
        engine.step()
        assert engine.stats().num_waiting == 1, "a waiting request begins only when nothing runs"
    finish(engine, *running, waiting)
    source.level = NORMAL
    with pytest.raises(MemoryPressureError):
        engine.follow_pressure()
        source.level = CRITICAL
        add(engine, "refused", prompt_of(1))
    source.level = NORMAL
    engine.follow_pressure()
    assert engine.stats().pressure.level == WARNING
    finish(engine, add(engine, "again", prompt_of(1)))
    engine.follow_pressure()
    assert engine.stats().pressure.level == NORMAL


@WAYS
def test_the_largest_request_fits_at_every_level(source, resizes) -> None:
    """While the pools are small, they grow for it; its limit is that of the configuration."""
    engine = make()
    limit = engine.max_request_len
    outputs = []
    for level in (WARNING, NORMAL):
        source.level = level
        engine.follow_pressure()
        assert engine.max_request_len == engine.info.max_request_len == limit == 199 * 8 + 1
        outputs.append(add(engine, level.name, prompt_of(3, limit - 5), 5))
        source.level = CRITICAL
        finish(engine, *outputs)
        source.level = NORMAL
        for _ in range(3):
            engine.follow_pressure()
    assert not resizes or size_of(engine) < 199, "nothing needs the room now"
    many = [add(engine, f"{i}", prompt_of(i, 150), 30) for i in range(9)]
    finish(engine, *many)
    assert size_of(engine) == 199


@WAYS
def test_one_line_for_each_change_of_level(source, resizes, caplog) -> None:
    engine = make()
    finish(engine, add(engine, "a", prompt_of(1, 300)))
    with caplog.at_level(logging.WARNING, "mlx_paged.engine.relief"):
        for level in (WARNING, WARNING, CRITICAL, CRITICAL, NORMAL, NORMAL, NORMAL):
            source.level = level
            engine.follow_pressure()
    lines = [record.message for record in caplog.records]
    assert [line.partition(":")[0] for line in lines] == [
        "the system is short of memory",
        "the system is critically short of memory",
        "the system is less short of memory",
        "the system has memory again",
    ]
    assert "gave back" in lines[0] and "iB" in lines[0] and "refused" in lines[1]


def test_a_source_that_fails_later_ends_the_refusals(source) -> None:
    engine = make()
    source.level = CRITICAL
    engine.follow_pressure()
    source.error = OSError("gone")
    finish(engine, add(engine, "a", prompt_of(1)))
    assert engine.pressure_interval is None and engine.stats().pressure.level == NORMAL


def test_off_reads_no_source(source) -> None:
    engine = make(memory_pressure="off")
    source.level = CRITICAL
    finish(engine, add(engine, "a", prompt_of(1)))
    assert source.num_reads == 0 and engine.pressure_interval is None
    with pytest.raises(InvalidParameterError, match="memory_pressure must be 'auto' or 'off'"):
        EngineConfig(memory_pressure="on")


@WAYS
def test_an_idle_engine_reacts(source, resizes, monkeypatch) -> None:
    monkeypatch.setattr(engine_module, "POLL_SECONDS", 0.01)

    async def test() -> None:
        engine = AsyncEngine(lambda: Engine(hash_model(), EngineConfig(**OPTIONS)))
        async with engine:
            await engine.generate(prompt_of(1, 200), params())
            gone = threading.Event()
            evict = engine.engine._relief._give_back

            def noting(scheduler: Any) -> None:
                evict(scheduler)
                gone.set()

            monkeypatch.setattr(engine.engine._relief, "_give_back", noting)
            source.level = CRITICAL
            await asyncio.get_running_loop().run_in_executor(None, gone.wait, 60)
            assert gone.is_set()
            usage = (await engine.stats()).usage
            assert usage.num_cached_blocks == 0
            with pytest.raises(MemoryPressureError):
                await engine.generate(prompt_of(1, 200), params())
            source.level = NORMAL
            while (await engine.stats()).pressure.level:
                await asyncio.sleep(0.01)
            answer = await engine.generate(prompt_of(1, 200), params())
            assert answer.outputs[0].token_ids == follows(prompt_of(1, 200), 20)

    asyncio.run(test())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("model", [hash_model, embedded_twin], ids=["hash", "embedded"])
@WAYS
def test_an_interrupt_at_any_line_of_it_loses_no_request(source, resizes, model) -> None:
    engine = LLM(model(), **OPTIONS).engine
    prompts = [prompt_of(i, 40) for i in range(4)]

    def run(level: PressureLevel, at: int | None = None) -> tuple[Interrupter, list[Any]]:
        """Answers, with the pressure that begins in the middle, and an interrupt."""
        source.level = NORMAL
        for _ in range(3):
            engine.follow_pressure()
        outputs = [add(engine, f"{i}", prompt, 12) for i, prompt in enumerate(prompts)]
        for _ in range(6):
            engine.step()
        source.level = level
        interrupter = Interrupter(at, KeyboardInterrupt())
        with interrupter.watching():
            try:
                engine.follow_pressure()
            except KeyboardInterrupt:
                assert at is not None
        while engine.has_unfinished:
            engine.step()
        engine.check_integrity()
        return interrupter, [output.outputs[0].token_ids for output in outputs]

    _, expected = run(NORMAL)
    counter, answers = run(CRITICAL)
    assert answers == expected
    count = NUM_INTERRUPTS if model is hash_model else max(4, NUM_INTERRUPTS // 6)
    for at in random.Random(resizes).choices(range(1, counter.num_lines + 1), k=count):
        interrupter, answers = run(CRITICAL, at)
        assert answers == expected, interrupter.where


@pytest.mark.parametrize("resizes", [True], indirect=True)
def test_pools_of_which_only_some_were_resized_are_made_anew(source, resizes, monkeypatch) -> None:
    engine = engine_of("gemma3").engine
    output = add(engine, "a", prompt_of(1), 10)
    for _ in range(5):
        engine.step()
    before, resize = size_of(engine), PagedModel.resize

    def interrupted(self: PagedModel, *args: Any) -> None:
        resize(self, *args)
        raise KeyboardInterrupt

    monkeypatch.setattr(PagedModel, "resize", interrupted)
    source.level = WARNING
    with pytest.raises(KeyboardInterrupt):
        while engine.has_unfinished:
            engine.step()
    monkeypatch.undo()
    assert engine.needs_recovery and engine.recover()
    assert size_of(engine) == before
    found = {len(cache.key_pool) for cache in engine._runner.model.attention_caches}
    assert found == {group.pool.num_blocks for group in engine._kv.attention}
    while engine.has_unfinished:
        engine.step()
        engine.check_integrity()
    assert output.outputs[0].token_ids == dense_answer("gemma3", output.prompt_token_ids, 10)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["gemma3", "qwen3_next"])
@WAYS
def test_windows_and_states_survive_it(source, resizes, name) -> None:
    """Models that read their caches, with pressure that comes and goes in the middle."""
    engine = engine_of(name).engine
    rng = random.Random(resizes)
    prompts = [prompt_of(i, rng.randrange(20, 90)) for i in range(6)]
    outputs, sizes = [], set()
    for i, prompt in enumerate([*prompts, *prompts[:3]]):
        outputs.append(add(engine, f"{i}", prompt, 10))
        source.level = WARNING if i % 3 else NORMAL
        for _ in range(5):
            engine.step()
            sizes.add(size_of(engine))
    while engine.has_unfinished:
        source.level = rng.choice(list(PressureLevel))
        engine.step()
        engine.check_integrity()
    assert (len(sizes) > 1) == resizes
    for output in outputs:
        expected = dense_answer(name, output.prompt_token_ids, 10)
        assert output.outputs[0].token_ids == expected
