"""The thread that makes the masks of a step."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from types import SimpleNamespace

import pytest
from support.models import StepDriver, tiny_config, tiny_model

from mlx_paged.engine.grammar.worker import MaskWorker

LIMIT = 300.0  # seconds


def threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name == "mlx-paged-masks"}


def test_jobs_are_done_in_their_order_by_one_thread() -> None:
    worker = MaskWorker[int]()
    may_begin, done = threading.Event(), []

    def work(i: int) -> int:
        assert may_begin.wait(LIMIT)
        done.append((i, threading.current_thread()))
        return i * i

    futures = [worker.start(lambda i=i: work(i)) for i in range(20)]
    assert not any(future.done() for future in futures)
    may_begin.set()
    assert [future.result(LIMIT) for future in futures] == [i * i for i in range(20)]
    assert [i for i, _ in done] == list(range(20))
    [thread] = {thread for _, thread in done}
    assert thread is not threading.current_thread()


@pytest.mark.parametrize("error", [ValueError("no such mask"), SystemExit(3), KeyboardInterrupt()])
def test_an_exception_is_that_of_its_job_alone(error: BaseException) -> None:
    def fail() -> int:
        raise error

    worker = MaskWorker[int]()
    failed, after = worker.start(fail), worker.start(lambda: 7)
    assert failed.exception(LIMIT) is error
    assert after.result(LIMIT) == 7


def test_its_thread_starts_with_the_first_job_and_ends_with_the_object() -> None:
    before = threads()
    worker = MaskWorker[int]()
    worker.wait()
    assert threads() <= before, "nothing to do, no thread"
    assert worker.start(lambda: 1).result(LIMIT) == 1
    [thread] = threads() - before
    assert thread.daemon
    del worker
    gc.collect()
    thread.join(LIMIT)
    assert not thread.is_alive()


def test_a_thread_that_waits_keeps_nothing_of_what_it_did() -> None:
    class Large:
        pass

    worker, large, freed = MaskWorker[Large](), Large(), threading.Event()
    weakref.finalize(large, freed.set)
    assert worker.start(lambda large=large: large).result(LIMIT) is large
    del large
    assert freed.wait(LIMIT)


def test_waiting_covers_what_nobody_asks_for_any_more() -> None:
    begun, waits, ended = threading.Event(), threading.Event(), []

    class Watched(MaskWorker[None]):
        def start(self, work: Callable[[], None]) -> Future[None]:
            future = super().start(work)
            if begun.is_set():  # (by `wait`)
                waits.set()
            return future

    def abandoned() -> None:
        begun.set()
        assert waits.wait(LIMIT)
        ended.append(True)
        raise ValueError("nobody hears of it")

    worker = Watched()
    worker.start(abandoned)
    assert begun.wait(LIMIT)
    worker.wait()
    found = list(ended)
    waits.set()
    assert found == [True]


@pytest.mark.parametrize("give_up", ["launch", "reset"])
def test_masks_of_a_step_given_up_are_made_before_anything_starts_over(
    give_up: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They read matchers of requests that the next step, or nobody, goes on with."""
    runner = StepDriver(tiny_model(tiny_config("llama")), "llama", block_size=8).runner
    worker, tables = runner._mask_worker, runner._tables
    may_end = threading.Event()
    events: SimpleQueue[str] = SimpleQueue()

    def masks() -> None:
        assert may_end.wait(LIMIT)
        events.put("masks are made")

    def wait() -> None:
        events.put("it waits" if runner._tables is tables else "it waits too late")
        MaskWorker.wait(worker)

    def start_over() -> None:
        if give_up == "reset":
            runner.reset()
        else:
            nothing = SimpleNamespace(num_drafts=(), adapter_ids=(), seq_ids=())
            with pytest.raises(AttributeError):  # (a step has more than that)
                runner.launch(nothing, None)
        events.put("it starts over")

    monkeypatch.setattr(worker, "wait", wait)
    worker.start(masks)
    thread = threading.Thread(target=start_over)
    thread.start()
    first = events.get(timeout=LIMIT)
    may_end.set()
    assert first == "it waits"
    assert [events.get(timeout=LIMIT) for _ in "12"] == ["masks are made", "it starts over"]
    thread.join(LIMIT)
    assert runner._tables is not tables
