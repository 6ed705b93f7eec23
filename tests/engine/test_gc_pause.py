"""Garbage collections come between steps, and a dropped engine's memory is given back."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from support.interrupts import Interrupter
from support.models import embedded_twin
from support.waiting import TIMEOUT

from mlx_paged import LLM, SamplingParams
from mlx_paged.engine import gc_pause
from mlx_paged.engine.async_engine import AsyncEngine
from mlx_paged.engine.config import EngineConfig
from mlx_paged.engine.engine import Engine

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)
OPTIONS = {"num_gpu_blocks_override": 64, "block_size": 8}


@contextmanager
def collecting_often(in_step: Callable[[], bool]) -> Iterator[list[bool]]:
    """Has the collector come after each new object; yields, for each time, whether in a step."""
    found: list[bool] = []

    def note(phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            found.append(in_step())

    threshold = gc.get_threshold()
    gc.callbacks.append(note)
    gc.set_threshold(1, 10_000, 10_000)
    try:
        yield found
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(note)


def test_no_collection_comes_in_a_step_of_an_llm() -> None:
    llm = LLM(embedded_twin(), **OPTIONS)
    with collecting_often(lambda: llm.engine.is_busy and in_a_step()) as found:
        llm.generate([[3, 4, 5], [6, 7]], PARAMS)
    assert found, "none came at all"
    assert not any(found)
    assert gc.isenabled()


def test_no_collection_comes_in_a_step_of_an_async_engine() -> None:
    async def run() -> list[bool]:
        async with AsyncEngine(lambda: Engine(embedded_twin(), EngineConfig(**OPTIONS))) as engine:
            with collecting_often(in_a_step) as found:
                await engine.generate([3, 4, 5], PARAMS)
            return found

    found = asyncio.run(run())
    assert found, "none came at all"
    assert not any(found)
    assert gc.isenabled()


def in_a_step() -> bool:
    """True if a frame of any thread runs `Engine.step`."""
    for frame in sys._current_frames().values():
        while frame is not None:
            if frame.f_code is Engine.step.__code__:
                return True
            frame = frame.f_back
    return False


def test_a_dropped_llm_gives_its_memory_back(real_freezing: None) -> None:
    gc.collect()
    before = mx.get_active_memory()
    llm = LLM(embedded_twin(), **OPTIONS)
    llm.generate([[3, 4, 5]], PARAMS)
    pools, engine = llm.engine.pool_bytes, weakref.ref(llm.engine)
    assert mx.get_active_memory() - before >= pools
    del llm
    gc.collect()
    assert engine() is None
    assert mx.get_active_memory() - before < pools


def test_a_failed_step_lets_collections_come_again() -> None:
    llm = LLM(embedded_twin(), **OPTIONS)

    def fail(num_tokens: int) -> None:
        raise KeyboardInterrupt

    llm.engine.on_launch = fail
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[3, 4, 5]], PARAMS)
    assert gc.isenabled()


def test_an_exception_at_any_line_leaves_collections_on() -> None:
    for at in itertools.count(1):
        interrupter = Interrupter(at, KeyboardInterrupt("injected"))
        with suppress(KeyboardInterrupt), interrupter.watching(), gc_pause.gc_paused():
            pass
        gc_pause.resume_gc()  # (as those do who call a step)
        assert gc.isenabled(), interrupter.where
        with gc_pause.gc_paused():
            assert not gc.isenabled(), interrupter.where
        assert gc.isenabled(), interrupter.where
        if not interrupter.where:
            break
    assert at > 10


def test_what_is_collected_in_the_middle_may_let_go(monkeypatch) -> None:
    """A stream that was left, in a cycle: a collection ends it, on whatever thread that comes."""

    class Left:
        def __del__(self) -> None:
            num_left.append(1)
            gc_pause.resume_gc()

    def collect() -> None:
        left: Any = Left()
        left.itself = left
        del left
        gc.collect()

    def is_enabled() -> bool:
        result = gc.isenabled()
        collect()
        return result

    def disable() -> None:
        collect()
        gc.disable()

    def hold() -> None:
        with gc_pause.gc_paused():
            found.append(gc.isenabled())
        found.append(gc.isenabled())

    num_left: list[int] = []
    found: list[bool] = []
    names = SimpleNamespace(isenabled=is_enabled, disable=disable, enable=gc.enable)
    monkeypatch.setattr(gc_pause, "gc", names)
    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    thread.join(TIMEOUT)
    assert not thread.is_alive(), "it waits for itself"
    assert found == [False, True] and len(num_left) == 2


def test_collections_stay_off_where_they_were_off() -> None:
    gc.disable()
    try:
        with gc_pause.gc_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_the_last_of_several_threads_lets_collections_come_again() -> None:
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with gc_pause.gc_paused():
            inside.set()
            leave.wait(300)

    thread = threading.Thread(target=hold)
    with gc_pause.gc_paused():
        thread.start()
        assert inside.wait(300)
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert gc.isenabled()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_of_a_step_collects() -> None:
    with gc_pause.gc_paused():
        child = os.fork()
        if child == 0:
            os._exit(0 if gc.isenabled() else 1)
        assert not gc.isenabled()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
