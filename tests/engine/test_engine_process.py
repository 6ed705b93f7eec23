"""ProcessEngine: the same answers, errors and ends as an engine of this process."""

from __future__ import annotations

import asyncio
import importlib
import os
import pickle
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mlx_paged import errors
from mlx_paged.core import FinishReason
from mlx_paged.engine.async_engine import AsyncEngine
from mlx_paged.engine.client import EngineRequest
from mlx_paged.engine.engine_thread import EngineThread
from mlx_paged.engine.grammar import StructuredOutputs
from mlx_paged.engine.process.client import ProcessEngine
from mlx_paged.engine.process.messages import Call, Dead, Failed, Leave, Submit
from mlx_paged.engine.process.pipe import Pipe
from mlx_paged.engine.sampling_params import SamplingParams

PROMPT = list(range(20, 60))
OPTIONS: dict[str, Any] = {"block_size": 8, "num_gpu_blocks_override": 400, "max_num_seqs": 16}
LONG = SamplingParams(temperature=0, max_tokens=2000, ignore_eos=True)
TIMEOUT = 300.0
CASES = {
    "greedy": SamplingParams(temperature=0, max_tokens=12),
    "two answers with log-probabilities": SamplingParams(
        n=2, seed=3, max_tokens=12, logprobs=3, prompt_logprobs=1
    ),
    "listed log-probabilities": SamplingParams(temperature=0, logprob_token_ids=[5, 6]),
    "stop string": SamplingParams(seed=4, max_tokens=60, stop=["\n"]),
    "stop token": SamplingParams(temperature=0, max_tokens=60, stop_token_ids=list(range(2000))),
    "grammar": SamplingParams(
        temperature=0,
        max_tokens=60,
        structured_outputs=StructuredOutputs(json={"type": "array", "items": {"const": 7}}),
    ),
}


def run(test: Awaitable[Any]) -> Any:
    return asyncio.run(asyncio.wait_for(test, TIMEOUT))


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not await condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


@pytest.fixture(scope="module")
def remote() -> Iterator[ProcessEngine]:
    engine = ProcessEngine.from_model(**OPTIONS)
    yield engine
    run(engine.shutdown())
    assert engine._process.returncode == 0


@pytest.fixture(scope="module")
def local() -> Iterator[AsyncEngine]:
    engine = AsyncEngine.from_model(**OPTIONS)
    yield engine
    run(engine.shutdown())


# These run in the child, before its engine is created.


def with_unsendable_tokenizer() -> None:
    AsyncEngine.tokenizer = property(lambda _: lambda: None)  # type: ignore[method-assign, assignment]


class OnlyInTheChild:
    """Its class cannot be imported elsewhere, like that of a checkpoint's own tokenizer."""

    def __reduce__(self) -> Any:
        return importlib.import_module, ("no_such_module",)


def with_unreadable_tokenizer() -> None:
    AsyncEngine.tokenizer = property(lambda _: OnlyInTheChild())  # type: ignore[method-assign, assignment]


async def answer(engine: Any, params: SamplingParams) -> tuple[Any, list[Any]]:
    """The output of a request, and what its stream told, by answer."""
    stream = await engine.submit(EngineRequest("def is_even(n):", params))
    told: dict[int, list[Any]] = {}
    async for delta in stream:
        for update in delta.updates:
            text = [each for _, each in update.tokens()]
            seen = (
                update.token_ids,
                text,
                update.reports,
                update.finish_reason,
                update.stop_reason,
            )
            told.setdefault(delta.index, []).append(seen)
    return stream.output, sorted(told.items())


@pytest.mark.parametrize("name", CASES)
def test_answers_and_their_streams_are_those_of_an_engine_of_this_process(
    name, local, remote
) -> None:
    async def test() -> None:
        (expected, told), (output, told_here) = [
            await answer(engine, CASES[name]) for engine in (local, remote)
        ]
        assert output.outputs == expected.outputs and told_here == told
        assert output.prompt_logprobs == expected.prompt_logprobs
        assert output.prompt == expected.prompt and output.relaxed == expected.relaxed
        assert output.prompt_token_ids == expected.prompt_token_ids
        metrics = output.metrics
        times = (metrics.arrival_time, metrics.scheduled_time, metrics.first_token_time)
        assert list(times) == sorted(times) and metrics.finished_time >= metrics.first_token_time

    run(test())


def test_a_second_request_is_told_what_the_cache_had(remote) -> None:
    async def test() -> None:
        params = SamplingParams(temperature=0, max_tokens=2)
        for num_cached in (0, 39):
            stream = await remote.submit(EngineRequest(PROMPT, params))
            assert (await stream.result()).num_cached_tokens == num_cached
        assert await remote.reset_prefix_cache() > 0

    run(test())


def test_errors_are_the_same(remote) -> None:
    async def test() -> None:
        await remote.ready()
        with pytest.raises(errors.InvalidParameterError, match="prompt_token_ids") as wrong:
            await remote.submit(EngineRequest([1, 99999]))
        assert wrong.value.field == "prompt_token_ids" and wrong.value.actual == 99999
        with pytest.raises(errors.RequestTooLargeError) as large:
            await remote.submit(EngineRequest(PROMPT, SamplingParams(max_tokens=9999)))
        assert large.value.limited_by == "kv_cache" and large.value.num_prompt_tokens == 40
        with pytest.raises(errors.InvalidParameterError, match="token_mask must be None"):
            await remote.submit(EngineRequest(PROMPT, token_mask=lambda _: [1]))
        with pytest.raises(
            errors.InvalidParameterError, match="can be sent to the engine's process"
        ):
            await remote.submit(EngineRequest([1, lambda: 0]))  # type: ignore[list-item]
        async with await remote.submit(EngineRequest(PROMPT, LONG, request_id="one")):
            with pytest.raises(errors.DuplicateRequestError):
                await remote.submit(EngineRequest(PROMPT, LONG, request_id="one"))

    run(test())


def test_readers_that_leave_and_aborts_end_requests(remote) -> None:
    async def none_runs() -> bool:
        stats = await remote.stats()
        return not (stats.num_running or stats.num_waiting)

    async def test() -> None:
        await remote.ready()
        stream = await remote.submit(EngineRequest(PROMPT, LONG))
        await anext(stream)
        stream.close()
        await until(none_runs)
        waiting = asyncio.create_task(remote.submit(EngineRequest(PROMPT, LONG)))
        await asyncio.sleep(0)  # It has been sent.
        waiting.cancel()
        await until(none_runs)
        stream = await remote.submit(EngineRequest(PROMPT, LONG, request_id="one"))
        await anext(stream)
        assert await remote.abort("one") and not await remote.abort("two")
        [output] = (await stream.result()).outputs
        assert output.finish_reason is FinishReason.ABORT and output.token_ids
        assert not remote._answers and not remote._requests

    run(test())


def test_steps_are_observed(remote) -> None:
    counts: list[int] = []

    async def test() -> None:
        await remote.ready()
        await remote.reset_prefix_cache()
        remote.observe_steps(counts.append)
        stream = await remote.submit(
            EngineRequest(PROMPT, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
        )
        await stream.result()

    run(test())
    assert sum(counts) in (len(PROMPT) + 3, len(PROMPT) + 4)  # A step may be launched too many.


def test_the_end_of_the_process_ends_streams_and_calls() -> None:
    async def test() -> None:
        engine = ProcessEngine.from_model(**OPTIONS)
        stream = await engine.submit(EngineRequest(PROMPT, LONG))
        await anext(stream)
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(errors.EngineDeadError, match="SIGKILL"):
            await stream.result()
        assert not engine.is_alive
        for call in (engine.stats(), engine.submit(EngineRequest(PROMPT))):
            with pytest.raises(errors.EngineDeadError, match="SIGKILL"):
                await call
        await engine.shutdown()

    run(test())


def fork_and_die(forked: Path) -> None:
    if (pid := os.fork()) == 0:
        time.sleep(600)
    forked.write_text(str(pid))
    os._exit(3)


def test_the_end_of_a_process_whose_fork_lives_on(tmp_path) -> None:
    """The forked one keeps the socket open."""
    forked = tmp_path / "forked"

    async def test() -> None:
        engine = ProcessEngine.from_model(prepare=partial(fork_and_die, forked), **OPTIONS)
        try:
            with pytest.raises(errors.EngineDeadError, match="exit status 3"):
                await engine.ready()
            await engine.shutdown()
        finally:
            os.kill(int(forked.read_text()), signal.SIGKILL)

    run(test())


def test_shutdown_finishes_requests_and_a_wrong_model_is_named(tmp_path) -> None:
    async def test() -> None:
        engine, broken = (
            ProcessEngine.from_model(**OPTIONS),
            ProcessEngine.from_model(str(tmp_path)),
        )
        with pytest.raises(errors.ModelLoadError, match="cannot load model"):
            await broken.ready()
        stream = await engine.submit(
            EngineRequest(PROMPT, SamplingParams(max_tokens=300, ignore_eos=True))
        )
        ending = asyncio.create_task(engine.shutdown(TIMEOUT))
        [output] = (await stream.result()).outputs
        assert output.finish_reason is FinishReason.LENGTH and len(output.token_ids) == 300
        await ending
        await broken.shutdown()
        with pytest.raises(errors.EngineDeadError):
            await engine.submit(EngineRequest(PROMPT))

    run(test())
    with pytest.raises(errors.InvalidParameterError, match="block_size"):
        ProcessEngine.from_model(block_size=0)


def with_failure_before_anything_else() -> None:
    start = EngineThread.start

    def start_and_wait(thread: EngineThread) -> None:
        start(thread)
        thread.join()

    EngineThread.start = start_and_wait  # type: ignore[method-assign]


def test_an_engine_that_fails_while_it_is_constructed_is_reported(tmp_path) -> None:
    async def test() -> None:
        engine = ProcessEngine.from_model(
            str(tmp_path), prepare=with_failure_before_anything_else, **OPTIONS
        )
        with pytest.raises(errors.ModelLoadError, match="cannot load model"):
            await engine.ready()
        await engine.shutdown()

    run(test())


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [(with_unsendable_tokenizer, "pickle"), (with_unreadable_tokenizer, "no_such_module")],
)
def test_a_model_whose_parts_cannot_be_sent_is_refused(prepare, reason) -> None:
    async def test() -> None:
        engine = ProcessEngine.from_model(prepare=prepare, **OPTIONS)
        with pytest.raises(
            errors.InvalidParameterError, match="frontend_multiprocessing must be off"
        ) as refused:
            await engine.ready()
        assert reason in str(refused.value)
        await engine.shutdown()
        assert engine._process.poll() is not None

    run(test())


def test_an_option_that_cannot_be_sent_leaves_no_process(monkeypatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def noted(*given: Any, **options: Any) -> Any:
        started.append(popen(*given, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", noted)
    with pytest.raises((AttributeError, pickle.PicklingError)):
        ProcessEngine.from_model(make_on_kernel=lambda: nullcontext(), **OPTIONS)
    [process] = started
    assert process.poll() is not None


def test_a_canceled_request_expects_no_reply(remote, monkeypatch) -> None:
    async def test() -> None:
        await remote.ready()
        sent: list[Any] = []
        monkeypatch.setattr(remote._pipe, "send", sent.append)  # So no reply can come first.
        task = asyncio.create_task(remote.submit(EngineRequest(PROMPT)))
        while not sent:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [type(message) for message in sent] == [Submit, Leave]
        assert not (remote._replies or remote._requests or remote._answers)

    run(test())


def test_a_late_failure_of_a_dead_engine_changes_nothing(remote) -> None:
    """It may die while it sends its parts, which then fails, too."""
    engine = object.__new__(ProcessEngine)
    vars(engine).update(_ready=Future(), _lock=threading.Lock(), _sleepers=[])
    vars(engine).update(_replies={}, _requests={}, _dead=None)
    engine._handle(Dead("out of memory"))
    engine._handle(Failed(ValueError("late")))
    with pytest.raises(errors.EngineDeadError, match="out of memory"):
        engine._ready.result(0)


@pytest.mark.parametrize(
    "error",
    [
        errors.InvalidParameterError("a", "b", 3),
        errors.RequestTooLargeError(
            "1", num_prompt_tokens=2, max_tokens=3, limit=4, limited_by="kv_cache"
        ),
        errors.MemoryPressureError(2.5),
        errors.ConstraintError("1", "field", "why"),
        errors.UnsupportedModelError("x", "why", ("y",)),
    ],
)
def test_errors_survive_pickling(error) -> None:
    copied = pickle.loads(pickle.dumps(error))
    assert type(copied) is type(error) and str(copied) == str(error)
    assert vars(copied) == vars(error) and copied.args == error.args


def test_a_pipe_whose_reader_is_slow_never_blocks_its_writer() -> None:
    ours, theirs = map(Pipe, socket.socketpair())
    messages = [Call(i, "x" * 100_000, ()) for i in range(40)]
    for message in messages:
        ours.send(message)  # Nothing is read yet, and no socket holds as much.
    assert [theirs.receive() for _ in messages] == messages
    with closing(ours):
        ours.flush(TIMEOUT)
    with pytest.raises(EOFError):
        theirs.receive()
    theirs.close()
