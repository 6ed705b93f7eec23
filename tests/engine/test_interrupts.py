"""An exception out of any line leaves an engine that goes on: right tokens, whole books.

The exceptions come at lines of the package, chosen by a seed. ``MLX_PAGED_INTERRUPTS=300`` has each
test raise that many; the suite runs a part.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections.abc import Callable
from typing import Any

from support.hash_model import hash_model
from support.interrupts import Interrupter
from support.models import embedded_twin

# isort: split
import pytest

from mlx_paged import LLM, SamplingParams
from mlx_paged.core import FinishReason
from mlx_paged.engine.async_engine import AsyncEngine
from mlx_paged.engine.config import EngineConfig
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.intake import CheckedRequest
from mlx_paged.engine.outputs import RequestOutput
from mlx_paged.errors import InvalidParameterError, StepError

TIMEOUT = 300.0
NUM_INTERRUPTS = int(os.environ.get("MLX_PAGED_INTERRUPTS", "12"))
OVERLAP = pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
OPTIONS: dict[str, Any] = {
    "block_size": 8,
    "num_gpu_blocks_override": 14,  # too few for all: some are preempted
    "max_num_seqs": 6,
    "max_num_batched_tokens": 24,
}
ERRORS = (KeyboardInterrupt, SystemExit, MemoryError, RuntimeError)

_shared = list(range(5, 25))
PROMPTS = [[1], [*_shared, 7], [*_shared[:11], 9, 3], [2, 3, 5, 7, 11, 13], [*_shared, 7, 8]]


def _params(**options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 9, "ignore_eos": True, **options})


PARAMS = [
    _params(logprobs=1),
    _params(temperature=1.0, seed=5, frequency_penalty=0.5, repetition_penalty=1.3),
    _params(n=2, temperature=0.7, seed=1),
    _params(stop=["\x00 never"], min_tokens=2),
    _params(prompt_logprobs=1),
]


def answers(outputs: list[RequestOutput]) -> list[Any]:
    return [
        (answer.token_ids, answer.text, answer.finish_reason)
        for output in outputs
        for answer in output.outputs
    ]


def check_at_rest(engine: Engine) -> None:
    engine.check_integrity()
    assert not engine.has_unfinished and not engine.request_states()
    usage = engine.stats().usage
    assert usage.num_used_blocks == usage.num_quarantined_blocks == 0


def check_some(outputs: list[RequestOutput], expected: list[Any]) -> int:
    """All answers are right but for one at most, which ended with an error; 1: there is one."""
    found = answers(outputs)
    failed = [i for i, answer in enumerate(found) if answer[2] is FinishReason.ERROR]
    assert len(failed) <= 1
    for i, (answer, want) in enumerate(zip(found, expected, strict=True)):
        if i in failed:
            assert answer[0] == want[0][: len(answer[0])]
        else:
            assert answer == want
    return len(failed)


def make_llm(model: Any, overlap: bool) -> LLM:
    options = OPTIONS if model is hash_model else {**OPTIONS, "num_gpu_blocks_override": 20}
    return LLM(model(), async_scheduling=overlap, **options)


def moments(num_lines: int, count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(1, num_lines + 1), k=count)


# --- LLM ------------------------------------------------------------------------------------------


@pytest.mark.one_in(6)
@OVERLAP
@pytest.mark.parametrize("model", [hash_model, embedded_twin], ids=["hash", "embedded"])
@pytest.mark.parametrize("streams", [False, True], ids=["generate", "stream"])
def test_an_interrupted_call_of_llm(overlap, model, streams) -> None:
    llm = make_llm(model, overlap)

    def call() -> list[RequestOutput] | None:
        if not streams:
            return llm.generate(PROMPTS, PARAMS)
        for _ in llm.stream(PROMPTS, PARAMS):
            pass
        return None

    expected = answers(llm.generate(PROMPTS, PARAMS))
    llm.engine.reset_prefix_cache()
    with Interrupter().watching() as counter:
        call()
    count = NUM_INTERRUPTS if model is hash_model else max(4, NUM_INTERRUPTS // 6)
    for i, at in enumerate(moments(counter.num_lines, count, seed=overlap)):
        error = ERRORS[i % 4 if i % 8 > 3 else 0]("injected")
        interrupter = Interrupter(at, error)
        try:
            with interrupter.watching():
                call()
        except BaseException as raised:
            assert raised is error or raised.__cause__ is error, interrupter.where
        check_at_rest(llm.engine)
        if i % 3 == 0:
            llm.engine.reset_prefix_cache()
        assert answers(llm.generate(PROMPTS, PARAMS)) == expected, interrupter.where
        check_at_rest(llm.engine)


def test_an_interrupted_call_leaves_no_orphans_while_prompts_are_added() -> None:
    llm = make_llm(hash_model, True)
    add, added = llm.engine.add, []

    def interrupted(checked: CheckedRequest) -> RequestOutput:
        added.append(add(checked))
        if len(added) == 3:
            raise KeyboardInterrupt  # it is in, and its caller does not know
        return added[-1]

    llm.engine.add = interrupted  # type: ignore[method-assign]
    for call in (llm.generate, lambda *args: list(llm.stream(*args))):
        added.clear()
        with pytest.raises(KeyboardInterrupt):
            call(PROMPTS, PARAMS)
        assert [o.outputs[0].finish_reason for o in added] == [FinishReason.ABORT] * 3
        check_at_rest(llm.engine)


def test_a_second_interrupt_while_the_first_one_is_cleaned_up() -> None:
    llm = make_llm(hash_model, True)
    expected = answers(llm.generate(PROMPTS, PARAMS))
    step, abort = llm.engine.step, llm.engine.abort

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    llm.engine.step = llm.engine.abort = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, PARAMS)
    llm.engine.step, llm.engine.abort = step, abort  # type: ignore[method-assign]
    assert llm.engine.request_states()
    outputs = llm.generate(PROMPTS[:1], PARAMS[:1])
    assert answers(outputs) == expected[:1]
    check_at_rest(llm.engine)


@OVERLAP
def test_a_stream_goes_on_when_a_call_within_it_is_interrupted(overlap) -> None:
    llm = make_llm(hash_model, overlap)
    [expected] = answers(llm.generate([PROMPTS[1]], PARAMS[0]))
    with Interrupter().watching() as counter:
        llm.generate(PROMPTS[2:], PARAMS[2:])
    num_failed = 0
    for at in moments(counter.num_lines, NUM_INTERRUPTS // 3, seed=7):
        tokens: list[int] = []
        for update in llm.stream([PROMPTS[1]], PARAMS[0]):
            assert update.request_id == "0"
            if update.token_id is not None:
                tokens.append(update.token_id)
            if len(tokens) == 3:
                try:
                    with Interrupter(at, KeyboardInterrupt()).watching():
                        llm.generate(PROMPTS[2:], PARAMS[2:])
                except KeyboardInterrupt:
                    pass
        if update.finish_reason is FinishReason.ERROR:
            num_failed += 1  # it was its answer that was being changed
            assert isinstance(update.error, StepError) and "broken off" in update.error.reason
        else:
            assert tokens == expected[0]
        check_at_rest(llm.engine)
    assert num_failed <= NUM_INTERRUPTS // 6


def test_text_that_is_being_decoded_when_an_interrupt_comes() -> None:
    llm = make_llm(embedded_twin, True)
    [(tokens, text, _)] = answers(llm.generate("def fibonacci(n):\n", _params()))

    def deferred() -> Any:
        engine = llm.engine
        output = engine.add_request("a", llm.tokenizer.encode("def fibonacci(n):\n"), _params())
        while engine.has_unfinished:
            engine.step()
        return output.outputs[0]

    answer = deferred()
    with Interrupter().watching() as decoding:
        assert answer.token_ids == tokens and answer.text == text
    for at in moments(decoding.num_lines, NUM_INTERRUPTS // 2, seed=1):
        answer = deferred()
        with pytest.raises(KeyboardInterrupt), Interrupter(at, KeyboardInterrupt()).watching():
            answer.text  # noqa: B018
        assert answer.text == text


# --- Engine ---------------------------------------------------------------------------------------


def add_all(engine: Engine) -> list[RequestOutput]:
    return [
        engine.add_request(str(i), prompt, params)
        for i, (prompt, params) in enumerate(zip(PROMPTS, PARAMS))
    ]


def finish(engine: Engine) -> None:
    while engine.has_unfinished:
        engine.step()
        engine.check_integrity()


@OVERLAP
def test_requests_go_on_after_an_interrupted_step(overlap) -> None:
    engine = make_llm(hash_model, overlap).engine
    outputs = add_all(engine)
    finish(engine)
    expected = answers(outputs)
    add_all(engine)
    with Interrupter().watching() as counter:
        finish(engine)
    num_failed = 0
    for i, at in enumerate(moments(counter.num_lines, NUM_INTERRUPTS, seed=3 + overlap)):
        error = ERRORS[i % 4]("injected")
        interrupter = Interrupter(at, error)
        outputs = add_all(engine)
        try:
            with interrupter.watching():
                finish(engine)
        except BaseException as raised:
            assert raised is error, interrupter.where
            assert engine.has_unfinished or all(o.finished for o in outputs)
        finish(engine)
        num_failed += check_some(outputs, expected)
        check_at_rest(engine)
    assert num_failed < NUM_INTERRUPTS // 2
    assert engine.stats().num_recoveries > 0


@OVERLAP
def test_an_engine_can_be_asked_and_repaired(overlap) -> None:
    engine = make_llm(hash_model, overlap).engine
    assert not engine.needs_recovery and not engine.recover()
    outputs = add_all(engine)
    engine.step()
    admitted = engine.stats().counters.num_admissions
    assert admitted > 0

    def raises(num_tokens: int) -> None:
        raise KeyboardInterrupt

    engine.on_launch = raises
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert engine.needs_recovery and engine.has_unfinished
    assert engine.recover()
    assert not engine.needs_recovery and not engine.recover()
    assert engine.stats().counters.num_admissions >= admitted, "counters went backwards"
    assert engine.stats().num_running == 0 and engine.stats().num_waiting == 6
    engine.check_integrity()
    engine.on_launch = None
    finish(engine)
    assert all(answer.finish_reason == "length" for o in outputs for answer in o.outputs)


def test_a_refused_request_repairs_nothing() -> None:
    engine = make_llm(hash_model, True).engine
    add_all(engine)
    engine.step()
    with pytest.raises(InvalidParameterError):
        engine.add_request("x", [], _params())
    with pytest.raises(ValueError, match="already in use"):
        engine.add_request("0", [1], _params())
    with pytest.raises(ValueError, match="tokens"):
        engine.add_request("x", [1], _params(max_tokens=10**6))
    assert not engine.needs_recovery and engine.stats().num_recoveries == 0
    finish(engine)


@OVERLAP
def test_a_callback_that_raises_every_time_ends_the_requests(overlap) -> None:
    """Instead of having them tried again for ever."""
    engine = make_llm(hash_model, overlap).engine
    outputs = add_all(engine)

    def raises(num_tokens: int) -> None:
        raise ZeroDivisionError("injected")

    engine.on_launch = raises
    num_errors = 0
    while engine.has_unfinished:
        try:
            engine.step()
        except ZeroDivisionError:
            num_errors += 1
    assert 2 <= num_errors <= 2 * sum(len(output.outputs) for output in outputs)
    for output in outputs:
        for answer in output.outputs:
            assert answer.finish_reason is FinishReason.ERROR
            assert answer.error.reason == "ZeroDivisionError: injected"
    engine.on_launch = None
    check_at_rest(engine)
    outputs = add_all(engine)
    finish(engine)
    assert all(answer.finish_reason == "length" for o in outputs for answer in o.outputs)


@OVERLAP
def test_a_sink_that_raises_ends_its_answer_only(overlap) -> None:
    engine = make_llm(hash_model, overlap).engine
    outputs = add_all(engine)
    finish(engine)
    expected = answers(outputs)

    class Bad:
        def put(self, update: Any) -> None:
            raise SystemExit("injected")

    outputs = [
        engine.add_request(str(i), prompt, params, sink=Bad() if i == 3 else None)
        for i, (prompt, params) in enumerate(zip(PROMPTS, PARAMS))
    ]
    finish(engine)
    assert check_some(outputs, expected) == 1
    assert outputs[3].outputs[0].finish_reason is FinishReason.ERROR


def test_a_call_from_within_a_step_is_refused_but_for_leaving() -> None:
    engine = make_llm(hash_model, True).engine
    outputs = add_all(engine)
    errors: list[str] = []

    def meddle(num_tokens: int) -> None:
        calls: list[Callable[[], Any]] = [
            engine.step,
            engine.recover,
            engine.reset_prefix_cache,
            lambda: engine.add_request("x", [1], _params()),
        ]
        for call in calls:
            try:
                call()
            except RuntimeError as error:
                errors.append(str(error))
        engine.stats()
        engine.synchronize()
        assert engine.abort("1") == (len(errors) == 4)

    engine.on_launch = meddle
    engine.step()
    assert len(errors) == 4 and all("within its own step" in error for error in errors)
    engine.step()
    assert outputs[1].outputs[0].finish_reason is FinishReason.ABORT
    engine.on_launch = None
    finish(engine)
    assert [o.outputs[0].finish_reason for o in outputs].count(FinishReason.LENGTH) == 4


# --- AsyncEngine ----------------------------------------------------------------------------------


@pytest.mark.one_in(2)
@OVERLAP
def test_an_interrupted_async_engine(overlap) -> None:
    async def ask(engine: AsyncEngine) -> list[RequestOutput]:
        streams = [await engine.add_request(p, s) for p, s in zip(PROMPTS, PARAMS)]
        outputs = await asyncio.gather(*(stream.result() for stream in streams))
        await engine.stats()
        return outputs

    async def watched(engine: AsyncEngine, interrupter: Interrupter) -> list[RequestOutput]:
        await engine._call(lambda _: interrupter.watch())
        outputs = await ask(engine)
        await engine._call(lambda _: sys.settrace(None))
        return outputs

    async def test() -> None:
        config = EngineConfig(async_scheduling=overlap, **OPTIONS)
        async with AsyncEngine(lambda: Engine(hash_model(), config)) as engine:
            expected = answers(await ask(engine))
            await watched(engine, counter := Interrupter())
            num_failed = 0
            for i, at in enumerate(moments(counter.num_lines, NUM_INTERRUPTS, seed=5 + overlap)):
                interrupter = Interrupter(at, ERRORS[i % 2]("injected"))
                num_failed += check_some(await watched(engine, interrupter), expected)
                await engine._call(check_at_rest)
                assert engine.is_alive
                assert answers(await ask(engine)) == expected, interrupter.where
            assert num_failed < NUM_INTERRUPTS // 2
            assert (await engine.stats()).num_recoveries > 0

    asyncio.run(asyncio.wait_for(test(), TIMEOUT if NUM_INTERRUPTS < 100 else 3600))
