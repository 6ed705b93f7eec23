"""AsyncEngine: streams at the reader's pace, cancellation, overload, death and shutdown."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import numpy as np
import pytest

from mlx_paged.core import FinishReason
from mlx_paged.engine import engine_thread
from mlx_paged.engine.async_engine import AsyncEngine, RequestStream
from mlx_paged.engine.config import EngineConfig
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.loading import load
from mlx_paged.engine.outputs import SequenceUpdate
from mlx_paged.engine.request_stream import Channel
from mlx_paged.engine.sampling import sequence_sampler
from mlx_paged.engine.sampling_params import SamplingParams
from mlx_paged.errors import (
    DuplicateRequestError,
    EngineDeadError,
    EngineOverloadedError,
    InvalidParameterError,
    ModelLoadError,
    RequestTooLargeError,
)

PROMPT = list(range(20, 60))
OPTIONS: dict[str, Any] = {"block_size": 8, "num_gpu_blocks_override": 400, "max_num_seqs": 16}
TIMEOUT = 300.0


def params(max_tokens: int = 8, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **options)


def run(test: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(test, TIMEOUT))


def started(**options: Any) -> AsyncEngine:
    return AsyncEngine.from_model(**{**OPTIONS, **options})


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncEngine]:
    """One engine for many event loops, one after the other."""
    engine = started()
    yield engine
    run(engine.shutdown())


@pytest.fixture(scope="module")
def expected() -> list[int]:
    """The synchronous engine's answer to `PROMPT`, 200 tokens long."""
    engine = Engine(load(), EngineConfig(**OPTIONS))
    output = engine.add_request("0", PROMPT, params(200))
    while engine.has_unfinished:
        engine.step()
    return output.outputs[0].token_ids


async def until(condition: Callable[[], Coroutine[Any, Any, bool]]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not await condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def idle(engine: AsyncEngine) -> bool:
    stats = await engine.stats()
    return not (stats.num_running or stats.num_waiting or stats.usage.num_used_blocks)


async def settled(engine: AsyncEngine) -> bool:
    """Idle, and no step is in flight either."""
    return await idle(engine) and not engine.engine.has_unfinished


def test_deltas_add_up_to_the_answer(engine, expected) -> None:
    async def test() -> None:
        stream = await engine.add_request(PROMPT, params(20))
        deltas = [delta async for delta in stream]
        assert [t for d in deltas for t in d.token_ids] == expected[:20]
        [answer] = stream.output.outputs
        assert "".join(d.text for d in deltas) == answer.text
        assert [d.finish_reason for d in deltas][-1] is FinishReason.LENGTH
        assert all(d.finish_reason is None for d in deltas[:-1])
        assert {d.request_id for d in deltas} == {stream.request_id}

    run(test())


def test_many_at_once_with_several_answers_each(engine, expected) -> None:
    async def test() -> None:
        outputs = await asyncio.gather(
            *[engine.generate(PROMPT, params(6 + i, n=1 + i % 3)) for i in range(24)]
        )
        for i, output in enumerate(outputs):
            assert len(output.outputs) == 1 + i % 3
            assert all(o.token_ids == expected[: 6 + i] for o in output.outputs)

    run(test())


def test_deltas_carry_logprobs_where_asked_for(engine, expected) -> None:
    async def test() -> None:
        stream = await engine.add_request(PROMPT, params(8, logprobs=1, prompt_logprobs=0))
        deltas = [delta async for delta in stream]
        [answer] = stream.output.outputs
        assert [r for d in deltas for r in d.logprobs] == answer.logprobs
        assert [next(iter(report)) for report in answer.logprobs] == expected[:8]
        assert len(stream.output.prompt_logprobs) == len(PROMPT)
        stream = await engine.add_request(PROMPT, params(2))
        assert {d.logprobs async for d in stream} == {None}

    run(test())


def test_a_token_mask_and_one_that_fails(engine, expected) -> None:
    async def test() -> None:
        def only_even(index: int, answer: Any) -> Any:
            return np.arange(4096) % 2 == 0

        def fails(index: int, answer: Any) -> Any:
            raise ValueError("injected")

        even, failed, free = await asyncio.gather(
            engine.generate(PROMPT, params(), token_mask=only_even),
            engine.generate(PROMPT, params(), token_mask=fails),
            engine.generate(PROMPT, params()),
        )
        assert all(token % 2 == 0 for token in even.outputs[0].token_ids)
        assert failed.outputs[0].finish_reason is FinishReason.ERROR
        assert "injected" in failed.outputs[0].error.reason
        assert free.outputs[0].token_ids == expected[:8]

    run(test())


def test_a_text_is_tokenized(engine) -> None:
    output = run(engine.generate("def add(a, b):", params()))
    assert output.prompt == "def add(a, b):" and len(output.outputs[0].token_ids) == 8


def test_a_slow_reader_gets_everything_in_few_pieces_and_stalls_nobody(engine, expected) -> None:
    async def test() -> None:
        slow = await engine.add_request(PROMPT, params(200))
        first = await anext(slow)
        fast = await asyncio.gather(*[engine.generate(PROMPT, params(30)) for _ in range(4)])
        assert all(output.outputs[0].token_ids == expected[:30] for output in fast)
        await until(lambda: idle(engine))  # the batch has long gone on without the reader
        rest = [delta async for delta in slow]
        assert len(rest) == 1, "what a reader missed comes in one piece"
        assert first.token_ids + rest[0].token_ids == expected
        assert first.text + rest[0].text == slow.output.outputs[0].text

    run(test())


def test_a_blocked_event_loop_stalls_nobody(engine, expected) -> None:
    async def test() -> None:
        stream = await engine.add_request(PROMPT, params(60))
        await anext(stream)
        steps = engine._thread.engine._num_steps
        deadline = time.monotonic() + TIMEOUT
        while engine._thread.engine._num_steps - steps <= 10:  # without giving the loop a turn
            assert time.monotonic() < deadline, "the engine stopped with the loop"
            time.sleep(0.01)
        await stream.result()
        assert stream.output.outputs[0].token_ids == expected[:60]

    run(test())


def test_bad_words_are_tokenized_off_the_engines_thread(engine, monkeypatch) -> None:
    threads: list[str] = []
    spellings = sequence_sampler._spellings

    def noted(text: str, tokenizer: Any) -> Any:
        threads.append(threading.current_thread().name)
        return spellings(text, tokenizer)

    monkeypatch.setattr(sequence_sampler, "_spellings", noted)

    async def test() -> None:
        await engine.generate(PROMPT, params(3, bad_words=["return", "if n"]))

    run(test())
    assert len(threads) == 2 and "mlx-paged-engine" not in threads


def test_many_calls_leave_time_for_steps(engine, monkeypatch) -> None:
    """Else the device would wait until all requests of a burst have been added."""
    monkeypatch.setattr(engine_thread, "_MAX_CALL_SECONDS", 0.0)

    async def test() -> None:
        stream = await engine.add_request(PROMPT, params(300))
        await anext(stream)
        all_submitted = threading.Event()
        engine._thread.submit(lambda _: all_submitted.wait(TIMEOUT))
        calls = [engine._thread.submit(lambda e: e.stats().num_steps) for _ in range(5)]
        all_submitted.set()
        steps = [await asyncio.wrap_future(call) for call in calls]
        assert steps == sorted(set(steps)), "a step for each call"
        await stream.aclose()

    run(test())


def test_a_lagging_reader_is_woken_once() -> None:
    async def test() -> None:
        sleepers: list[Channel] = []
        channel = Channel(asyncio.get_running_loop(), 1, sleepers)
        reader = asyncio.ensure_future(channel.get())
        await asyncio.sleep(0)
        for token in range(5):
            channel.put(SequenceUpdate("r", 0, [token], ["x"]))
            assert sleepers == [channel]
        channel.wake()
        assert (await reader).token_ids == [0, 1, 2, 3, 4]

    run(test())


def test_a_channel_loses_nothing_between_threads() -> None:
    """Two threads, no pauses: every update arrives once, in order, and the reader never hangs."""

    async def test() -> None:
        loop = asyncio.get_running_loop()
        sleepers: list[Channel] = []
        channel = Channel(loop, 2, sleepers)

        def write() -> None:
            for token in range(20_000):
                reason = FinishReason.LENGTH if token >= 19_998 else None
                channel.put(SequenceUpdate("r", token % 2, [token], [""], reason))
                while sleepers:
                    loop.call_soon_threadsafe(sleepers.pop().wake)

        writer = threading.Thread(target=write)
        writer.start()
        got: dict[int, list[int]] = {0: [], 1: []}
        while (delta := await channel.get()) is not None:
            got[delta.index] += delta.token_ids
        writer.join()
        assert got == {0: list(range(0, 20_000, 2)), 1: list(range(1, 20_000, 2))}

    run(test())


def test_cancelling_the_reader_ends_the_request_and_keeps_its_prefix(engine) -> None:
    async def test() -> None:
        await engine.reset_prefix_cache()
        stream = await engine.add_request(PROMPT, params(300))

        begun = asyncio.Event()

        async def read() -> None:
            async for _ in stream:
                begun.set()

        reader = asyncio.create_task(read())
        await begun.wait()  # the prompt is computed
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        steps = (await engine.stats()).num_steps
        await until(lambda: idle(engine))
        stats = await engine.stats()
        assert stats.num_steps <= steps + 1, "not within a step"
        assert stats.usage.num_cached_blocks >= len(PROMPT) // 8
        again = await engine.generate(PROMPT, params(2))
        assert again.num_cached_tokens == len(PROMPT) - 1

    run(test())


@pytest.mark.parametrize("how", ["close", "context", "drop", "break"])
def test_leaving_a_stream_early_ends_the_request(engine, how) -> None:
    async def test() -> None:
        stream: RequestStream | None = await engine.add_request(PROMPT, params(300))
        if how == "close":
            await anext(stream)
            await stream.aclose()
        elif how == "context":
            async with stream:
                await anext(stream)
        elif how == "break":
            async for _ in stream:
                break
        stream = None
        gc.collect()
        before = (await engine.stats()).num_steps
        await until(lambda: idle(engine))
        assert (await engine.stats()).num_steps <= before + 2

    run(test())


def test_cancelling_while_the_request_is_being_added(engine) -> None:
    async def test() -> None:
        release = threading.Event()
        blocked = engine._thread.submit(lambda _: release.wait())
        tasks = [asyncio.create_task(engine.generate(PROMPT, params(300))) for _ in range(3)]
        await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        release.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert blocked.result()
        await until(lambda: settled(engine))
        assert not engine._thread._sleepers

    run(test())


def test_abort(engine) -> None:
    async def test() -> None:
        stream = await engine.add_request(PROMPT, params(300, n=2), request_id="mine")
        await anext(stream)
        assert await engine.abort("mine") and not await engine.abort("mine")
        output = await stream.result()
        assert [o.finish_reason for o in output.outputs] == ["abort", "abort"]
        unread = await engine.add_request(PROMPT, params(300), request_id="mine")
        assert await engine.abort("mine")
        again = await engine.add_request(PROMPT, params(20), request_id="mine")
        unread.close()  # an old stream does not end a new request of its name
        assert (await again.result()).outputs[0].finish_reason == "length"

    run(test())


def test_a_timeout_ends_the_request(engine) -> None:
    output = run(engine.generate(PROMPT, params(400), timeout=0.1))
    assert output.outputs[0].finish_reason is FinishReason.TIMEOUT


def test_what_is_refused_is_refused_at_once(engine) -> None:
    async def test() -> None:
        with pytest.raises(InvalidParameterError):
            await engine.add_request([], params())
        with pytest.raises(InvalidParameterError):
            await engine.add_request([10**6], params())
        with pytest.raises(RequestTooLargeError):
            await engine.add_request(PROMPT, params(10**6))
        stream = await engine.add_request(PROMPT, params(100), request_id="twice")
        with pytest.raises(DuplicateRequestError):
            await engine.add_request(PROMPT, params(), request_id="twice")
        await stream.result()

    run(test())


def test_readers_on_several_loops_and_threads(engine, expected) -> None:
    answers: list[list[int]] = []

    def other() -> None:
        output = run(engine.generate(PROMPT, params(25)))
        answers.append(output.outputs[0].token_ids)

    threads = [threading.Thread(target=other) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    assert answers == [expected[:25]] * 4


def test_a_loop_that_was_closed_ends_its_requests(engine) -> None:
    streams = []

    async def leave() -> None:
        streams.append(await engine.add_request(PROMPT, params(300)))
        reader = asyncio.ensure_future(anext(streams[0]))
        await reader

    loop = asyncio.new_event_loop()
    loop.run_until_complete(leave())
    # A reader that sleeps for ever: its loop never runs again.
    sleeper = loop.create_task(streams[0]._channel.get())
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    run(until(lambda: idle(engine)))
    del sleeper


def test_overload() -> None:
    async def test() -> None:
        engine = started(max_num_seqs=1, max_num_waiting=2)
        first = await engine.add_request(PROMPT, params(200))
        await anext(first)
        waiting = [await engine.add_request(PROMPT, params(2)) for _ in range(2)]
        with pytest.raises(EngineOverloadedError) as refused:
            await engine.add_request(PROMPT, params(2))
        assert refused.value.max_num_waiting == 2
        first.close()
        for stream in waiting:
            await stream.result()
        # Nor do more than that many wait for a step to end.
        release = threading.Event()
        engine._thread.submit(lambda _: release.wait())
        tasks = [asyncio.create_task(engine.generate(PROMPT, params(1))) for _ in range(6)]
        await asyncio.sleep(0.05)
        release.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert sum(isinstance(r, EngineOverloadedError) for r in results) >= 4
        await engine.shutdown()

    run(test())


def test_a_dead_engine_says_so_to_all() -> None:
    async def test() -> None:
        engine = started()
        await engine.ready()
        streams = [await engine.add_request(PROMPT, params(300)) for _ in range(3)]

        def broken() -> None:
            raise ZeroDivisionError("injected")

        engine._thread.submit(lambda e: setattr(e, "step", broken))
        for stream in streams:
            with pytest.raises(EngineDeadError, match="ZeroDivisionError: injected"):
                await stream.result()
        for call in (engine.stats, engine.reset_prefix_cache, lambda: engine.generate(PROMPT)):
            with pytest.raises(EngineDeadError, match="injected"):
                await call()
        assert not engine.is_alive
        await engine.shutdown()

    run(test())


def test_calls_that_wait_when_the_engine_dies_are_answered() -> None:
    async def test() -> None:
        engine = started()
        await engine.ready()
        reached, release = threading.Event(), threading.Event()

        def broken() -> None:
            reached.set()
            release.wait()
            raise SystemExit("injected")

        engine._thread.submit(lambda e: setattr(e, "step", broken))
        engine._thread.submit(lambda _: setattr(engine._thread, "_num_failures", 2))
        stream = await engine.add_request(PROMPT, params(300))
        reached.wait()
        calls: list[asyncio.Task[Any]] = [asyncio.create_task(engine.stats()) for _ in range(3)]
        while len(engine._thread._calls) < len(calls):
            await asyncio.sleep(0)
        release.set()
        for call in [*calls, asyncio.create_task(stream.result())]:
            with pytest.raises(EngineDeadError, match="injected"):
                await call
        await engine.shutdown()

    run(test())


def test_a_model_that_does_not_load() -> None:
    async def test() -> None:
        engine = AsyncEngine.from_model("/nowhere/at/all")
        with pytest.raises(ModelLoadError):
            await engine.ready()
        with pytest.raises(EngineDeadError, match="nowhere"):
            await engine.add_request(PROMPT)

    run(test())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failure_is_told_even_if_its_news_cannot_be() -> None:
    def broken(_: AsyncEngine) -> None:
        raise ValueError("no news")

    def fail() -> Engine:
        raise ModelLoadError("/model", "it is not there")

    async def test() -> None:
        engine = AsyncEngine(fail, broken)
        with pytest.raises(ModelLoadError, match="it is not there"):
            await engine.ready()
        await engine.shutdown()

    run(test())


def test_shutdown_drains(expected) -> None:
    async def test() -> None:
        engine = started()
        stream = await engine.add_request(PROMPT, params(40))
        stopping = asyncio.create_task(engine.shutdown(drain_timeout=TIMEOUT))
        await asyncio.sleep(0)
        with pytest.raises(EngineDeadError, match="shut down"):
            await engine.add_request(PROMPT, params())
        assert (await stream.result()).outputs[0].token_ids == expected[:40]
        await stopping

    run(test())


def test_shutdown_aborts_after_the_timeout() -> None:
    async def test() -> None:
        engine = started()
        stream = await engine.add_request(PROMPT, params(1500))
        await anext(stream)
        await engine.shutdown(drain_timeout=0.2)
        assert (await stream.result()).outputs[0].finish_reason is FinishReason.ABORT
        await engine.shutdown()  # twice does no harm

    run(test())


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
def test_shutdown_waits_for_the_system_thread() -> None:
    """It still destroys MLX's thread-local objects when Python's thread has ended."""
    engine = started()

    async def answer() -> None:
        await engine.ready()
        await engine.generate(PROMPT, params(2))

    run(answer())
    task = Path(f"/proc/self/task/{engine._thread._thread.native_id}")
    assert task.exists()
    engine._thread.stop(0.0)
    engine._thread.join()
    assert not task.exists()
    run(engine.shutdown())


@pytest.mark.usefixtures("real_freezing")
def test_an_engine_that_was_shut_down_gives_its_memory_back() -> None:
    """Its thread froze it for the collector; it is full of cycles."""

    async def test() -> weakref.ref[Engine]:
        engine = started()
        await engine.generate(PROMPT, params(4))
        await engine.shutdown()
        return weakref.ref(engine._thread.engine)

    dropped: list[weakref.ref[Engine]] = []
    run(keep(test(), dropped))
    gc.collect()
    assert dropped[0]() is None


async def keep(coroutine: Any, results: list[Any]) -> None:
    results.append(await coroutine)
