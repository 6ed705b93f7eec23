"""Engines that several threads use, that a child process inherits, and that run at the exit."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

from support.hash_model import hash_model
from support.kept_modules import KEEPS_MODULES
from support.models import embedded_twin

# isort: split
import pytest

from mlx_paged import LLM, SamplingParams
from mlx_paged.core import FinishReason
from mlx_paged.engine.async_engine import AsyncEngine
from mlx_paged.engine.config import EngineConfig
from mlx_paged.engine.engine import Engine
from mlx_paged.model.observe import _Calls

TIMEOUT = 300.0
NUM_ROUNDS = int(os.environ.get("MLX_PAGED_THREAD_ROUNDS", "3"))
OPTIONS: dict[str, Any] = {"block_size": 8, "num_gpu_blocks_override": 60, "max_num_seqs": 8}
PROMPTS = [list(range(5, 5 + n)) for n in (3, 17, 30, 1)]
FORK = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


def params(max_tokens: int = 8) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def in_threads(*functions: Callable[[], Any]) -> list[Any]:
    """Runs functions at the same time; returns their results, or raises their exception."""
    results: list[Any] = [None] * len(functions)

    def run(i: int) -> None:
        try:
            results[i] = functions[i]()
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
        assert not thread.is_alive(), "a call hangs"
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


# --- Threads --------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
@pytest.mark.parametrize("num_threads", [2, 4])
@pytest.mark.parametrize("model", [hash_model, embedded_twin], ids=["hash", "embedded"])
def test_several_threads_call_one_llm(model, num_threads, overlap) -> None:
    llm = LLM(model(), async_scheduling=overlap, **OPTIONS)
    expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params())]

    def generate() -> list[list[int]]:
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params())]

    def stream() -> list[list[int]]:
        tokens: list[list[int]] = [[] for _ in PROMPTS]
        for update in llm.stream(PROMPTS, params()):
            tokens[int(update.request_id)].append(update.token_id)
        return tokens

    for _ in range(NUM_ROUNDS):
        for found in in_threads(*[generate, stream] * (num_threads // 2)):
            assert found == expected
    llm.engine.check_integrity()
    assert not llm.engine.has_unfinished and llm.stats().num_faults == 0
    assert llm.stats().usage.num_used_blocks == 0


def test_a_model_is_observed_while_another_thread_runs_one() -> None:
    """Observing wraps the classes of its modules, which all models of the family share."""
    llm, model = LLM(embedded_twin(), **OPTIONS), embedded_twin().model
    [expected] = llm.generate(PROMPTS[:1], params())
    calls = _Calls(model)
    with calls.recorded():
        [[found]] = in_threads(lambda: llm.generate(PROMPTS[:1], params()))
        assert not calls._projections and not calls._stack
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids


def test_engines_are_made_in_several_threads_at_once() -> None:
    in_threads(*(lambda: LLM(embedded_twin(), **OPTIONS) for _ in range(4)))


def test_a_thread_that_stops_reading_delays_no_other() -> None:
    llm = LLM(hash_model(), **OPTIONS)
    [expected] = llm.generate(PROMPTS[1], params())
    left = llm.stream(PROMPTS[2], params(20))
    in_threads(lambda: next(left))  # it launched a step, and ended
    [[found]] = in_threads(lambda: llm.generate(PROMPTS[1], params()))
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids
    assert len(list(left)) == 19
    assert llm.stats().num_faults == 0


def test_a_generate_inside_a_stream() -> None:
    llm = LLM(hash_model(), **OPTIONS)
    expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params())]
    outer: list[int] = []
    for update in llm.stream(PROMPTS[1], params()):
        outer.append(update.token_id)
        inner = llm.generate(PROMPTS, params())
        assert [output.outputs[0].token_ids for output in inner] == expected
    assert outer == expected[1]


def test_an_engine_that_several_threads_step() -> None:
    engine = Engine(hash_model(), EngineConfig(**OPTIONS))

    def ask(name: str) -> list[int]:
        output = engine.add_request(name, PROMPTS[2], params())
        while not output.finished:
            engine.step()
        return output.outputs[0].token_ids

    expected = ask("0")
    for found in in_threads(*(lambda i=i: ask(f"thread {i}") for i in range(4))):
        assert found == expected


# --- Two readers ----------------------------------------------------------------------------------


def test_two_readers_of_one_stream() -> None:
    async def test() -> None:
        async with AsyncEngine(lambda: Engine(hash_model(), EngineConfig(**OPTIONS))) as engine:
            release = threading.Event()
            stream = await engine.add_request(PROMPTS[1], params(50))
            await anext(stream)
            engine._thread.submit(lambda _: release.wait(TIMEOUT))
            while stream._channel._pending:
                await anext(stream)
            first = asyncio.ensure_future(stream.result())
            while not stream._is_read:
                await asyncio.sleep(0)
            for read in (stream.__anext__, stream.result):
                with pytest.raises(RuntimeError, match="is being read by another task"):
                    await read()
            other = await asyncio.to_thread(lambda: asyncio.run(_error_of(stream)))
            release.set()
            assert isinstance(other, RuntimeError)
            output = await first
            assert len(output.outputs[0].token_ids) == 50, "the second reader ended the stream"
            with pytest.raises(StopAsyncIteration):
                await anext(stream)

            stream = await engine.add_request(PROMPTS[1], params(50))
            error = await asyncio.to_thread(lambda: asyncio.run(_error_of(stream)))
            assert isinstance(error, RuntimeError) and "another event loop" in str(error)
            assert (await stream.result()).outputs[0].finish_reason is FinishReason.LENGTH

    asyncio.run(asyncio.wait_for(test(), TIMEOUT))


async def _error_of(stream: Any) -> BaseException | None:
    try:
        await anext(stream)
    except Exception as error:
        return error
    return None


def test_two_threads_read_one_stream_of_llm() -> None:
    llm = LLM(hash_model(), **OPTIONS)
    stream = llm.stream(PROMPTS[1], params())
    first = next(stream)
    reached, release = threading.Event(), threading.Event()

    def wait(num_tokens: int) -> None:
        reached.set()
        release.wait(TIMEOUT)

    llm.engine.on_launch = wait

    def read() -> list[Any]:
        return list(stream)

    def read_too() -> None:
        reached.wait(TIMEOUT)
        try:
            with pytest.raises(ValueError, match="already executing"):
                next(stream)
        finally:
            release.set()

    rest, _ = in_threads(read, read_too)
    assert len([first, *rest]) == 8


# --- Processes ------------------------------------------------------------------------------------

FORKED = """
import asyncio, os, sys, warnings
warnings.simplefilter("ignore")
from mlx_paged import LLM, SamplingParams
from mlx_paged.engine.async_engine import AsyncEngine
from mlx_paged.errors import ForkedProcessError

params = SamplingParams(temperature=0, max_tokens=2000, ignore_eos=True)
options = dict(num_gpu_blocks_override=200)
llm = LLM(**options)
iterator = llm.stream("def f", params)
next(iterator)
streams = []

async def begin():
    engine = AsyncEngine.from_model(**options)
    streams.append(await engine.add_request("def f", params))
    return engine

engine = asyncio.run(begin())

def child():
    calls = [
        lambda: llm.generate("x", params), lambda: llm.stats(), lambda: next(iterator),
        lambda: llm.engine.step(), lambda: llm.engine.abort("0"), lambda: llm.engine.recover(),
        LLM, AsyncEngine.from_model, lambda: asyncio.run(engine.stats()),
        lambda: asyncio.run(engine.generate("x", params)), lambda: asyncio.run(engine.shutdown()),
    ]
    for i, call in enumerate(calls):
        try:
            call()
        except ForkedProcessError as error:
            assert str(os.getppid()) in str(error) and "spawn" in str(error)
        else:
            sys.exit(f"call {i} came back")
    streams.clear()  # it ends the request, if it can

pid = os.fork()
if pid == 0:
    child()
    sys.exit(3)
code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
assert code == 3, code
assert len(list(zip(range(5), iterator))) == 5  # the parent goes on
asyncio.run(engine.shutdown())
sys.exit(4)
"""

AT_EXIT = """
import asyncio, sys, threading
from mlx_paged import LLM, SamplingParams
from mlx_paged.engine.async_engine import AsyncEngine

params = SamplingParams(temperature=0, max_tokens=4000, ignore_eos=True)
options = dict(num_gpu_blocks_override=4096)
all_begun = threading.Barrier(5)

def llm():
    stream = LLM(**options).stream(["def f"] * 8, params)
    next(stream)
    all_begun.wait()
    for _ in stream:
        pass

def async_engine():
    async def read():
        engine = AsyncEngine.from_model(**options)
        stream = await engine.add_request("def f", params)
        await anext(stream)
        all_begun.wait()
        async for _ in stream:
            pass
    asyncio.run(read())

for target in (llm, llm, llm, async_engine):
    threading.Thread(target=target, daemon=True).start()
all_begun.wait()
sys.exit(7)
"""


ENDS_DURING_EXIT = """
import atexit, sys, threading
exit_begins, has_answered = threading.Event(), threading.Event()
atexit.register(exit_begins.set)  # registered first, so it runs last
from mlx_paged import LLM, SamplingParams

def run():
    LLM(num_gpu_blocks_override=64).generate("def f", SamplingParams(max_tokens=4))
    has_answered.set()
    exit_begins.wait()

threading.Thread(target=run, daemon=True).start()
has_answered.wait()
sys.exit(7)
"""


def run_script(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=TIMEOUT
    )


@FORK
def test_a_forked_child_is_told_instead_of_hanging() -> None:
    done = run_script(KEEPS_MODULES + FORKED)  # both processes leave `iterator` open
    assert done.returncode == 4, done.stderr
    assert "Exception ignored" not in done.stderr


def test_the_interpreter_exits_while_daemon_threads_generate() -> None:
    done = run_script(AT_EXIT)
    assert done.returncode == 7, done.stderr
    assert "Traceback" not in done.stderr and "terminate" not in done.stderr


def test_a_thread_that_has_used_an_engine_may_end_during_the_exit() -> None:
    done = run_script(ENDS_DURING_EXIT)
    assert done.returncode == 7, done.stderr
    assert not done.stderr
