"""Faults in a step end the sequences they belong to; all others keep their exact tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_paged import ops
from mlx_paged.core import FinishReason, StepResult
from mlx_paged.engine.config import EngineConfig
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.loading import load
from mlx_paged.engine.runner import LaunchedStep, ModelRunner
from mlx_paged.engine.sampling_params import SamplingParams
from mlx_paged.errors import StepError
from mlx_paged.platform import is_out_of_memory

POISON = 3999  # a token that no healthy request of these tests holds or generates
OVERLAP = pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


class Raises:
    """A model that raises when it is given the poisonous token."""

    def __init__(self, model: nn.Module, error: Callable[[int], Exception | None]) -> None:
        self.model = model
        self.error = error
        self.num_rows: list[int] = []

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        self.num_rows.append(tokens.shape[0])
        logits = self.model(tokens, cache=cache)  # the pools' handles have moved on by now
        error = self.error(tokens.shape[0]) if POISON in tokens[:, 0].tolist() else None
        if error is not None:
            raise error
        return logits


class ReturnsNaN:
    """A model whose logits are NaN after the poisonous token."""

    def __init__(self, runner: ModelRunner) -> None:
        self.model, self.context = runner.model.model, runner.model._context

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        logits = self.model(tokens, cache=cache)
        poisoned = (tokens[:, 0] == POISON)[self.context.step.logit_rows]
        one_nan = mx.where(mx.arange(logits.shape[-1]) == 17, mx.nan, logits)
        return mx.where(poisoned[:, None, None], one_nan, logits)


def make_engine(**options: Any) -> Engine:
    options = {
        "kv_cache_memory": 32 << 20,
        "block_size": 8,
        "max_num_batched_tokens": 64,
        **options,
    }
    return Engine(load(dtype="float32"), EngineConfig(**{"max_num_seqs": 16, **options}))


def runner_of(engine: Engine) -> ModelRunner:
    return engine._executor._runner


def prompts(num: int = 6) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(10, 900, rng.integers(3, 40)).tolist() for _ in range(num)]


def run(engine: Engine, requests: list[list[int]], params: SamplingParams = GREEDY) -> list[Any]:
    outputs = [engine.add_request(str(i), tokens, params) for i, tokens in enumerate(requests)]
    while engine.has_unfinished:
        engine.step()
        engine.check_integrity()
    return outputs


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    answers = [o.outputs[0].token_ids for o in run(make_engine(), prompts())]
    assert all(POISON not in answer for answer in answers)
    return answers


def check(outputs: list[Any], expected: list[list[int]], bad: set[int], reason: str) -> None:
    healthy = iter(expected)
    for i, output in enumerate(outputs):
        [answer] = output.outputs
        if i in bad:
            assert answer.finish_reason is FinishReason.ERROR
            assert isinstance(answer.error, StepError) and reason in answer.error.reason
            assert answer.error.request_id == output.request_id
        else:
            assert answer.finish_reason is FinishReason.LENGTH and answer.error is None
            assert answer.token_ids == next(healthy)


def poisoned(at: int) -> list[list[int]]:
    """The healthy prompts with a bad one among them, at place `at`."""
    requests = prompts()
    requests.insert(at, [11, 12, 13, POISON])
    return requests


@OVERLAP
@pytest.mark.parametrize("at", [0, 3])
def test_an_exception_ends_the_one_request_that_causes_it(expected, overlap, at) -> None:
    copies = ops.pool_copies()
    engine = make_engine(async_scheduling=overlap)
    runner = runner_of(engine)
    runner.model.model = Raises(runner.model.model, lambda _: ValueError("injected"))
    outputs = run(engine, poisoned(at))
    check(outputs, expected, {at}, "ValueError: injected")
    usage = engine.stats().usage
    assert usage.num_used_blocks == usage.num_quarantined_blocks == 0
    assert engine.stats().pool_copies == copies


@OVERLAP
def test_a_fault_in_the_middle_of_an_answer(expected, overlap) -> None:
    """The poisonous token is one that the model itself chose, so it comes while a step overlaps."""
    engine = make_engine(async_scheduling=overlap)
    runner = runner_of(engine)
    chosen = expected[2][5]
    requests = [p for i, p in enumerate(prompts()) if i == 2 or chosen not in expected[i] + p]
    healthy = [e for i, e in enumerate(expected) if i != 2 and chosen not in e + prompts()[i]]
    real = runner.model.model

    def fails(tokens: mx.array, cache: list[Any]) -> mx.array:
        logits = real(tokens, cache=cache)
        if chosen in tokens[:, 0].tolist():
            raise ValueError("injected")
        return logits

    runner.model.model = fails
    outputs = run(engine, requests)
    bad = requests.index(prompts()[2])
    assert outputs[bad].outputs[0].token_ids == expected[2][: expected[2].index(chosen) + 1]
    check(outputs, healthy, {bad}, "ValueError: injected")


class FailsWhenRead:
    """The device finds the fault, and a step launched behind it, on its tokens, is worthless."""

    def __init__(self, runner: ModelRunner) -> None:
        self._launch, self._read = runner.launch, runner.read
        self._newest: LaunchedStep | None = None
        self._worthless: list[LaunchedStep | None] = []
        self.num_failures = 0

    def launch(self, *args: Any) -> LaunchedStep:
        self._newest = self._launch(*args)
        return self._newest

    def read(self, launched: LaunchedStep) -> StepResult:
        result = self._read(launched)
        if POISON in launched.batch.token_ids:
            self.num_failures += 1
            self._worthless.append(self._newest)
            raise RuntimeError("injected on the device")
        if any(launched is step for step in self._worthless):
            result.token_ids = [[7]] * len(result.token_ids)
        return result


@OVERLAP
def test_a_fault_that_shows_when_the_tokens_are_read(expected, overlap, monkeypatch) -> None:
    engine = make_engine(async_scheduling=overlap)
    device = FailsWhenRead(runner_of(engine))
    monkeypatch.setattr(runner_of(engine), "launch", device.launch)
    monkeypatch.setattr(runner_of(engine), "read", device.read)
    check(run(engine, poisoned(2)), expected, {2}, "injected on the device")
    assert device.num_failures > 1


class WritesOutside:
    """A model whose last layer writes outside of the pool when it is given the poisonous token."""

    def __init__(self, runner: ModelRunner) -> None:
        self.model, self.cache = runner.model.model, runner.model.attention_caches[-1]

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        logits = self.model(tokens, cache=cache)
        if POISON in tokens[:, 0].tolist():
            pools = self.cache.key_pool, self.cache.value_pool
            row = mx.zeros((1, *pools[0].shape[2:]), pools[0].dtype)
            self.cache.key_pool, self.cache.value_pool = ops.write_kv(
                *pools, row, row, mx.array([1 << 30])
            )
        return logits


@OVERLAP
def test_a_graph_that_cannot_be_evaluated_is_dropped(expected, overlap, monkeypatch) -> None:
    """If a failed step damaged the pools' handles, every later step would fail."""
    monkeypatch.setenv("MLX_PAGED_CHECK", "1")
    engine = make_engine(async_scheduling=overlap)
    runner = runner_of(engine)
    runner.model.model = WritesOutside(runner)
    check(run(engine, poisoned(2)), expected, {2}, "IndexError")


@OVERLAP
def test_a_transient_fault_costs_nobody_anything(expected, overlap, monkeypatch) -> None:
    engine = make_engine(async_scheduling=overlap)
    runner, calls = runner_of(engine), []

    def read(launched: LaunchedStep) -> dict[int, int]:
        calls.append(launched)
        if len(calls) % 3 == 0:
            raise RuntimeError("injected")
        return ModelRunner.read(launched)

    monkeypatch.setattr(runner, "read", read)
    check(run(engine, prompts()), expected, set(), "")
    assert engine.stats().num_faults > 3


@OVERLAP
def test_an_engine_that_failed_everybody_serves_the_next(expected, overlap, monkeypatch) -> None:
    engine = make_engine(async_scheduling=overlap)

    def fails(*args: Any) -> LaunchedStep:
        raise RuntimeError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(runner_of(engine), "launch", fails)
        check(run(engine, prompts()), [], set(range(6)), "RuntimeError: injected")
    check(run(engine, prompts()), expected, set(), "")
    assert engine.stats().usage.num_used_blocks == 0


@OVERLAP
def test_logits_that_are_not_numbers_end_their_row(expected, overlap) -> None:
    engine = make_engine(async_scheduling=overlap)
    runner = runner_of(engine)
    runner.model.model = ReturnsNaN(runner)
    check(run(engine, poisoned(1)), expected, {1}, "NaN")
    assert engine.stats().counters.num_resets == 1, "blocks that may hold NaNs stay cached"


def test_a_fault_in_one_of_several_answers_leaves_the_others() -> None:
    params = SamplingParams(temperature=0, max_tokens=6, n=3, ignore_eos=True)
    [healthy] = run(make_engine(), [prompts()[0]], params)
    engine = make_engine()
    runner, launch = runner_of(engine), runner_of(engine).launch
    victims: set[int] = set()

    def fails(batch: Any, previous: Any) -> LaunchedStep:
        if batch.num_seqs == 3 and not victims:
            victims.add(batch.seq_ids[1])
        if victims & set(batch.seq_ids):
            raise RuntimeError("injected")
        return launch(batch, previous)

    runner.launch = fails  # type: ignore[method-assign]
    [output] = run(engine, [prompts()[0]], params)
    reasons = [answer.finish_reason for answer in output.outputs]
    assert sorted(reasons) == ["error", "length", "length"]
    for answer in output.outputs:
        if answer.finish_reason is FinishReason.LENGTH:
            assert answer.token_ids == healthy.outputs[0].token_ids


@OVERLAP
def test_a_lack_of_memory_makes_steps_smaller(expected, overlap) -> None:
    engine = make_engine(async_scheduling=overlap)
    runner, launch, sizes = runner_of(engine), runner_of(engine).launch, []

    def needs_memory(batch: Any, previous: Any) -> LaunchedStep:
        sizes.append(batch.num_tokens)
        if batch.num_tokens > 9:
            raise RuntimeError("[malloc] Unable to allocate 123456 bytes.")
        return launch(batch, previous)

    runner.launch = needs_memory  # type: ignore[method-assign]
    check(run(engine, prompts()), expected, set(), "")
    assert 1 <= engine._executor.max_rows <= 9
    assert sum(size > 9 for size in sizes) < 8, "the limit is not remembered"


def test_a_request_that_does_not_fit_even_alone_is_refused(expected) -> None:
    engine = make_engine()
    runner = runner_of(engine)
    runner.model.model = Raises(runner.model.model, lambda _: MemoryError("out of memory"))
    check(run(engine, poisoned(2)), expected, {2}, "out of memory")
    # Its first three tokens could be computed, so only the poisonous one was tried alone.
    assert 1 in runner.model.model.num_rows


def test_the_limit_grows_again(monkeypatch) -> None:
    engine = make_engine()
    launch, sizes = runner_of(engine).launch, []

    def short_once(batch: Any, previous: Any) -> LaunchedStep:
        sizes.append(batch.num_tokens)
        if len(sizes) == 1:
            raise MemoryError
        return launch(batch, previous)

    monkeypatch.setattr(runner_of(engine), "launch", short_once)
    params = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
    run(engine, [[1, 2, 3, 4]] * 2, params)
    assert sizes[0] > 2 and engine._executor.max_rows is None


def test_a_text_that_cannot_be_decoded_ends_its_request_only(expected, monkeypatch) -> None:
    engine = make_engine()
    # (The step decodes where there are stop strings; other texts are their readers' business.)
    stopping = replace(GREEDY, stop="\x01")
    outputs = [
        engine.add_request(str(i), p, stopping if i == 1 else GREEDY)
        for i, p in enumerate(prompts())
    ]

    def fails(token: int) -> str:
        raise UnicodeError("injected")

    [sequence] = engine.request_state("1").request.sequences
    monkeypatch.setattr(sequence.answer.text, "add", fails)
    while engine.has_unfinished:
        engine.step()
    check(outputs, expected[:1] + expected[2:], {1}, "UnicodeError: injected")


@OVERLAP
@pytest.mark.parametrize(
    "bad_mask", [lambda: 1 / 0, lambda: np.ones(5000, np.bool_)], ids=["raises", "wrong size"]
)
def test_a_token_mask_that_fails_ends_its_request_only(expected, overlap, bad_mask) -> None:
    copies = ops.pool_copies()
    engine = make_engine(async_scheduling=overlap)

    def mask(index: int, answer: Any) -> Any:
        return bad_mask() if len(answer) == 3 else None

    outputs = [
        engine.add_request(str(i), p, GREEDY, token_mask=mask if i == 2 else None)
        for i, p in enumerate(prompts())
    ]
    while engine.has_unfinished:
        engine.step()
        engine.check_integrity()
    assert outputs[2].outputs[0].token_ids == expected[2][:3]
    check(outputs, expected[:2] + expected[3:], {2}, "")
    reason = outputs[2].outputs[0].error.reason
    assert "ZeroDivisionError" in reason or "token_mask must be" in reason
    assert engine.stats().pool_copies == copies


@pytest.mark.one_in(7)
@OVERLAP
@pytest.mark.parametrize("fault", ["exception", "lack of memory"])
def test_logprobs_of_steps_that_were_run_in_parts(expected, overlap, fault) -> None:
    params = replace(GREEDY, logprobs=2, prompt_logprobs=1)
    want = run(make_engine(async_scheduling=overlap), prompts(), params)
    engine = make_engine(async_scheduling=overlap)
    runner, launch = runner_of(engine), runner_of(engine).launch

    def fails(batch: Any, *more: Any) -> LaunchedStep:
        if fault == "lack of memory" and batch.num_tokens > 9:
            raise MemoryError
        if fault == "exception" and batch.num_seqs > 2:
            raise RuntimeError("injected")
        return launch(batch, *more)

    runner.launch = fails  # type: ignore[method-assign]
    outputs = run(engine, prompts(), params)
    check(outputs, expected, set(), "")
    assert engine.stats().num_faults
    for output, wanted in zip(outputs, want):
        answer, other = output.outputs[0], wanted.outputs[0]
        assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
        assert answer.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-3)
        assert_same_reports(answer.logprobs, other.logprobs)
        assert output.prompt_logprobs[0] is None
        assert_same_reports(output.prompt_logprobs[1:], wanted.prompt_logprobs[1:])


def assert_same_reports(reports: list[Any], wanted: list[Any]) -> None:
    assert [next(iter(r)) for r in reports] == [next(iter(w)) for w in wanted]
    for report, want in zip(reports, wanted):
        for token in report.keys() & want.keys():
            assert report[token].logprob == pytest.approx(want[token].logprob, abs=1e-3)


@OVERLAP
@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
def test_a_text_of_a_logprob_that_fails_ends_its_request_only(expected, overlap, field) -> None:
    engine = make_engine(async_scheduling=overlap)
    outputs = [
        engine.add_request(str(i), p, replace(GREEDY, **{field: 0}) if i == 1 else GREEDY)
        for i, p in enumerate(prompts())
    ]

    def fails(token: int) -> str:
        raise UnicodeError("injected")

    engine._output_processor._report._text = fails  # type: ignore[assignment]
    while engine.has_unfinished:
        engine.step()
        engine.check_integrity()
    check(outputs, expected[:1] + expected[2:], {1}, "UnicodeError: injected")


def test_copies_are_not_made_again_over_what_was_written(expected) -> None:
    """Prompts that share part of a block are copied from it; every step fails once, at any size."""
    shared = prompts()[0][:5]
    requests = [shared + [100 + i, 7, 8] * 4 for i in range(5)]
    want = []
    for request in requests:
        [output] = run(make_engine(enable_prefix_caching=False), [request])
        want.append(output.outputs[0].token_ids)
    engine = make_engine()
    run(engine, [[*shared, 99, 98, 97, 96]])
    runner, launch, failed = runner_of(engine), runner_of(engine).launch, []

    def fails(batch: Any, previous: Any) -> LaunchedStep:
        launched = launch(batch, previous)
        if batch.num_tokens > 2 and batch not in failed:
            failed.append(batch)
            runner.abandon(launched)
            raise MemoryError
        return launched

    runner.launch = fails  # type: ignore[method-assign]
    outputs = run(engine, requests)
    assert failed
    check(outputs, want, set(), "")


def test_what_counts_as_a_lack_of_memory() -> None:
    assert is_out_of_memory(RuntimeError("[malloc] Unable to allocate 8 bytes."))
    assert is_out_of_memory(
        RuntimeError("[METAL] Command buffer execution failed: Insufficient Memory (00000008)")
    )
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(ValueError("shapes (1,2) and (3,4) cannot be broadcast"))
