"""Waiting without sleeping: until an array is there, and only where nobody else wants the core."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx
import pytest
from support.models import embedded_twin
from support.platforms import CUDA, platform_with

from mlx_paged import LLM, SamplingParams, cgroups, runtime
from mlx_paged.engine import active_wait
from mlx_paged.engine.active_wait import ActiveWait, usable_cpus

needs_linux = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="only Linux lets a thread choose its core"
)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The results of the waits of an `ActiveWait` as on a GPU; popped from the end."""
    results: list[bool] = []
    monkeypatch.setattr(active_wait, "usable_cpus", lambda: 8.0)
    monkeypatch.setattr(runtime, "wait_actively", lambda array, seconds: results.pop())
    return results


def work() -> mx.array:
    """Something that takes a while, and has not begun."""
    a = mx.ones((1000, 1000))
    for _ in range(40):
        a = a @ a
    return a


def test_what_has_not_begun_is_not_waited_for() -> None:
    assert runtime.wait_actively(work(), 1e6)


def test_what_is_there_is_not_waited_for() -> None:
    array = mx.ones((3,))
    mx.eval(array)
    assert isinstance(runtime.wait_actively(array, 1e6), bool)


def test_it_ends_when_the_array_is_there() -> None:
    """(Or where another process wants the core.)"""
    array = work()
    mx.async_eval(array)
    while not runtime.wait_actively(array, 1e6):
        pass
    assert mx.isnan(array).any() or mx.isinf(array).any()  # (what these powers come to)


def test_it_ends_when_time_is_over() -> None:
    array = work()
    mx.async_eval(array)
    runtime.wait_actively(array, 1e-6)
    mx.eval(array)


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf"), 1e7])
def test_another_time_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="seconds must be 0 to 1e6 but got"):
        runtime.wait_actively(mx.ones(1), seconds)


def test_other_threads_run_meanwhile() -> None:
    array, others = work(), []
    started = threading.Event()

    def run() -> None:
        started.set()
        for i in range(1000):
            others.append(i)

    thread = threading.Thread(target=run)
    mx.async_eval(array)
    thread.start()
    started.wait()
    while not runtime.wait_actively(array, 1e6):
        pass
    thread.join()
    assert len(others) == 1000


@contextmanager
def neighbour() -> Iterator[None]:
    """This thread on one core, with a process that never sleeps."""
    before = os.sched_getaffinity(0)
    core = min(before)
    code = (
        f"import os, sys\nos.sched_setaffinity(0, {{{core}}})\n"
        "print(flush=True)\nwhile os.getppid() == int(sys.argv[1]): pass"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(os.getpid())], stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        os.sched_setaffinity(0, {core})
        yield
    finally:
        os.sched_setaffinity(0, before)
        process.kill()
        process.communicate()


@needs_linux
def test_a_neighbour_on_the_core_is_noticed() -> None:
    mx.eval(work())  # (MLX's threads are there, and not on this core alone)
    with neighbour():
        for _ in range(1000):
            array = work()
            mx.async_eval(array)
            if not runtime.wait_actively(array, 1e6):
                break
            mx.eval(array)
        else:
            pytest.fail("1000 waits on a core with another process, and none lost it")
    mx.eval(array)


def test_after_a_lost_core_it_sleeps_for_a_while(waits: list[bool]) -> None:
    wait, array = ActiveWait(), mx.zeros(1)
    waits += [True, False]
    wait(array)
    for _ in range(64):
        wait(array)
    assert waits == [True], "64 waits are left to others"
    wait(array)
    assert waits == []


def test_it_sleeps_twice_as_long_where_the_core_is_lost_again(waits: list[bool]) -> None:
    wait, array = ActiveWait(), mx.zeros(1)
    for num_asleep in (64, 128, 256, 512, 1024, 2048, 4096, 4096):
        waits.append(False)
        for _ in range(1 + num_asleep):
            wait(array)  # (one too many would find the list empty)
    waits += [False, True]
    wait(array)
    wait(array)
    for _ in range(64):
        wait(array)
    assert waits == [], "a good wait in between, and it begins anew"


def test_nobody_waits_actively_on_one_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(active_wait, "usable_cpus", lambda: 1.5)
    assert ActiveWait.on(platform_with(**CUDA)) is None


def test_only_cuda_has_active_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(active_wait, "usable_cpus", lambda: 2.0)
    assert ActiveWait.on(platform_with(has_cuda=False)) is None
    assert isinstance(ActiveWait.on(platform_with(**CUDA)), ActiveWait)


@needs_linux
def test_usable_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    for limit, expected in ((None, 3), (1.5, 1.5), (8.0, 3)):
        limits = cgroups.Limits(cpus=limit)
        monkeypatch.setattr(cgroups, "current", lambda limits=limits: limits)
        assert usable_cpus() == expected


def test_an_engine_waits_for_each_step(waits, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, ...]] = []

    def wait(array: mx.array, seconds: float) -> bool:
        calls.append(array.shape)
        return True

    monkeypatch.setattr(runtime, "wait_actively", wait)
    llm = LLM(embedded_twin(), num_gpu_blocks_override=64)
    llm.engine._executor._wait_actively = ActiveWait()
    llm.generate([[1, 2, 3]] * 2, SamplingParams(max_tokens=5, temperature=0, ignore_eos=True))
    assert calls == [(2,)] * 5
