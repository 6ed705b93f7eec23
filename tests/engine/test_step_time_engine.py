"""max_step_time_ms in an engine whose device takes a simulated time."""

from __future__ import annotations

from typing import Any

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import numpy as np
import pytest
from support.models import embedded_twin

from mlx_paged.core import StepBatch, StepResult, StepTime
from mlx_paged.engine.config import EngineConfig
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.executor import InProcessExecutor
from mlx_paged.engine.runner import LaunchedStep
from mlx_paged.engine.sampling_params import SamplingParams

OVERLAP = pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "sync"])
LIMIT = 0.05
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


class SimulatedDevice:
    """An engine's device that takes 10 ms and 0.5 ms per token, on a clock that only it moves.

    Args:
        blocked_until: Seconds before the end of a step when its launch returns.
    """

    def __init__(self, engine: Engine, blocked_until: float) -> None:
        self.now = self.idle_from = 0.0
        self.blocked_until = blocked_until
        self.ends: dict[int, float] = {}  # by step
        self.batches: list[StepBatch] = []
        self.times: list[tuple[StepBatch, StepTime]] = []
        runner = engine._runner
        self._launch, self._wait, self._read = runner.launch, runner.wait, runner.read
        runner.launch = self.launch  # type: ignore[method-assign]
        runner.wait = self.wait  # type: ignore[method-assign]
        runner.read = self.read  # type: ignore[method-assign]
        engine._executor = InProcessExecutor(
            runner, times_prompts=engine._executor._times_prompts, clock=lambda: self.now
        )
        if engine._step_time is not None:
            learn = engine._step_time.learn

            def recorded(batch: StepBatch, time: StepTime) -> None:
                self.times.append((batch, time))
                learn(batch, time)

            engine._step_time.learn = recorded  # type: ignore[method-assign]

    def launch(self, batch: StepBatch, previous: Any) -> LaunchedStep:
        launched = self._launch(batch, previous)
        self.batches.append(batch)
        self.idle_from = max(self.now, self.idle_from) + 0.01 + 0.0005 * batch.num_tokens
        self.ends[id(launched)] = self.idle_from
        # A part of the launch is blocked by the step itself.
        self.now = max(self.now, self.idle_from - self.blocked_until)
        return launched

    def wait(self, launched: LaunchedStep) -> None:
        self._wait(launched)
        self.now = max(self.now, self.ends[id(launched)])

    def read(self, launched: LaunchedStep) -> StepResult:
        self.wait(launched)
        return self._read(launched)

    def chunks(self) -> list[int]:
        return [batch.num_tokens for batch in self.batches if not batch.is_decode]


def make(
    overlap: bool, *, blocked_until: float = 10.0, **options: Any
) -> tuple[Engine, SimulatedDevice]:
    config = EngineConfig(
        kv_cache_memory=8 << 20, max_num_seqs=4, async_scheduling=overlap, **options
    )
    engine = Engine(embedded_twin(), config)
    return engine, SimulatedDevice(engine, blocked_until)


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(10, 900, length).tolist()


def answers(engine: Engine, *prompts: list[int], between: Any = None) -> list[list[int]]:
    outputs = [engine.add_request(f"{i}", tokens, GREEDY) for i, tokens in enumerate(prompts)]
    while engine.has_unfinished:
        engine.step()
        if between is not None:
            between()
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.one_in(2)
@OVERLAP
@pytest.mark.parametrize("blocked_until", [10.0, 0.0], ids=["", "launches block"])
def test_chunks_take_the_time_that_they_may(overlap: bool, blocked_until: float) -> None:
    prompts = prompt(0, 900), prompt(1, 300)
    engine, device = make(overlap, blocked_until=blocked_until, max_step_time_ms=1000 * LIMIT)
    unlimited, _ = make(overlap)
    assert answers(engine, *prompts) == answers(unlimited, *prompts)
    # Each measured time is the device's.
    assert [batch for batch, _ in device.times] == [b for b in device.batches if not b.is_decode]
    for batch, time in device.times:
        assert time.seconds == pytest.approx(0.01 + 0.0005 * batch.num_tokens)
        assert time.is_exact
    settled = device.chunks()[4:-2]
    assert len(settled) > 5 and all(70 <= n <= 82 for n in settled)


@OVERLAP
def test_a_recovered_engine_remembers(overlap: bool) -> None:
    engine, device = make(overlap, max_step_time_ms=1000 * LIMIT)
    answers(engine, prompt(0, 900))
    engine._recovery.is_whole = False
    assert engine.recover()
    device.batches.clear()
    answers(engine, prompt(2, 500))
    assert 70 <= device.chunks()[0] <= 82


@OVERLAP
def test_a_slow_caller_does_not_shrink_chunks(overlap: bool) -> None:
    engine, device = make(overlap, max_step_time_ms=1000 * LIMIT)
    answers(engine, prompt(0, 900))
    device.batches.clear()

    def pause() -> None:
        device.now += 3.0

    answers(engine, prompt(3, 900), between=pause)
    assert all(70 <= n <= 82 for n in device.chunks()[:-1])


@OVERLAP
def test_steps_in_parts_are_not_measured(overlap: bool) -> None:
    engine, device = make(overlap, max_step_time_ms=1000 * LIMIT)
    engine._executor.max_rows = 16
    answers(engine, prompt(0, 300))
    assert all(batch.num_tokens <= 16 for batch, _ in device.times)
    assert any(num_tokens == 16 for num_tokens in device.chunks())


def test_there_is_no_limit_by_default_but_on_devices_that_draw_the_screen() -> None:
    engine, device = make(True)
    assert engine.config.max_step_time_ms == 0 and not engine._executor._times_prompts
    answers(engine, prompt(0, 900))
    assert device.chunks() == [900]
    assert EngineConfig().with_step_time(draws_screen=True).max_step_time_ms == 50
    for given in (0, 20.5):
        config = EngineConfig(max_step_time_ms=given).with_step_time(draws_screen=True)
        assert config.max_step_time_ms == given
    whole = EngineConfig(enable_chunked_prefill=False).with_step_time(draws_screen=True)
    assert whole.max_step_time_ms == 0
