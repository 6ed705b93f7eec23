"""Threads that use one model at the same time: each gets what mlx-lm alone answers.

MLX_PAGED_THREAD_ROUNDS=100 runs more rounds than the suite does.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import product
from typing import Any

import pytest
from support.family_configs import config_of
from support.models import embedded, random_tokens, tiny_config, tiny_model
from support.parity import family_model
from support.plain import plain_caches, plain_mlx_lm

# isort: split
import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
from mlx_lm.models import cache as mlx_lm_cache

from mlx_paged import drop_in, ops
from mlx_paged.core import BlockPool, BlockTables, ForkingKVManager
from mlx_paged.drop_in.paged_store import PagedStore
from mlx_paged.drop_in.registry import stores_of

mlx_lm_generate = sys.modules["mlx_lm.generate"]
pytestmark = pytest.mark.usefixtures("paged")

ROUNDS = int(os.environ.get("MLX_PAGED_THREAD_ROUNDS", "3"))
LIMIT = 300  # seconds, for what hangs
_rng = np.random.default_rng(3)
_HEAD = random_tokens(_rng, 70)
# Some begin alike, within a block and beyond it.
PROMPTS = [_HEAD[:n] + random_tokens(_rng, 9) for n in (70, 70, 64, 40, 5, 0)]


@pytest.fixture
def model() -> nn.Module:
    return tiny_model(tiny_config("llama"))


def generated(model: nn.Module, i: int) -> Any:
    return mlx_lm.generate(model, embedded().tokenizer, PROMPTS[i], max_tokens=8)


def streamed(model: nn.Module, i: int) -> Any:
    steps = mlx_lm.stream_generate(model, embedded().tokenizer, PROMPTS[i], max_tokens=8)
    return [r.token for r in steps]


def batched(model: nn.Module, i: int) -> Any:
    prompts = [PROMPTS[i], PROMPTS[i - 1], PROMPTS[i - 2]]
    batch = mlx_lm.batch_generate(
        model, embedded().tokenizer, prompts, max_tokens=8, return_token_ids=True
    )
    return batch.token_ids


def with_own_cache(model: nn.Module, i: int) -> Any:
    """A conversation: goes on with its cache, and with a copy of it."""
    caches = mlx_lm_cache.make_prompt_cache(model)
    answers = []
    for use in (caches, caches, copy.deepcopy(caches)):
        steps = mlx_lm_generate.generate_step(
            mx.array(PROMPTS[i]), model, prompt_cache=use, max_tokens=4
        )
        answers.append([t for t, _ in steps])
    return answers


WAYS = (generated, streamed, batched, with_own_cache)


@lru_cache
def plain_answers(
    model_type: str = "llama",
    seed: int = 0,
    tasks: Sequence[tuple[Callable[..., Any], int]] = tuple(product(WAYS, range(len(PROMPTS)))),
) -> dict[Any, Any]:
    """The answers of ways to prompts without the drop-in."""
    model = tiny_model(tiny_config(model_type), seed=seed)
    with plain_mlx_lm():
        return {(way, i): way(model, i) for way, i in tasks}


def in_threads(works: Sequence[Callable[[], Any]]) -> list[Any]:
    """Starts all functions together; returns each one's result or exception."""
    begin = threading.Barrier(len(works))
    results: list[Any] = [None] * len(works)

    def run(i: int) -> None:
        try:
            begin.wait(LIMIT)
            results[i] = works[i]()
        except BaseException as error:
            results[i] = error.with_traceback(None)  # (which would keep caches)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
        assert not thread.is_alive(), "a thread hangs"
    return results


def check(*models: nn.Module) -> None:
    gc.collect()
    for model in models:
        for store in stores_of(model):
            store.check_integrity()
            assert store.stats().num_used_blocks == 0, "nobody has a cache any more"


@pytest.mark.one_in(5)
@pytest.mark.parametrize("num_threads", [2, 4])
def test_threads_share_a_model(model, num_threads) -> None:
    expected = plain_answers()
    choose = random.Random(num_threads)
    for _ in range(ROUNDS):
        tasks = [
            [(choose.choice(WAYS), choose.randrange(len(PROMPTS))) for _ in range(3)]
            for _ in range(num_threads)
        ]
        works = [lambda each=each: [way(model, i) for way, i in each] for each in tasks]
        assert in_threads(works) == [[expected[way, i] for way, i in each] for each in tasks]
        check(model)
    assert drop_in.stats(model).num_cached_tokens > 0  # they share what they have computed


def test_two_models_in_two_threads(model) -> None:
    other = tiny_model(tiny_config("qwen3"), seed=1)
    tasks = tuple((WAYS[i % len(WAYS)], i % len(PROMPTS)) for i in range(ROUNDS))
    expected = plain_answers(), plain_answers("qwen3", seed=1, tasks=tasks)
    for way, prompt in tasks:
        works = [partial(way, m, prompt) for m in (model, other)]
        assert in_threads(works) == [answers[way, prompt] for answers in expected]
    check(model, other)


def test_threads_share_a_model_with_recurrent_state() -> None:
    model = family_model(config_of("nemotron_h"))
    single = [way for way in WAYS if way is not batched]  # (mlx-lm's batches of it are wrong)
    with plain_mlx_lm():
        expected = {(way, i): way(model, i) for way in single for i in (0, 1, 4)}
    for n in range(max(1, ROUNDS // 3)):
        tasks = [(single[(n + t) % len(single)], (0, 1, 4)[t % 3]) for t in range(4)]
        works = [partial(way, model, i) for way, i in tasks]
        assert in_threads(works) == [expected[task] for task in tasks]
        check(model)


def test_threads_that_meet_a_model_for_the_first_time_make_one_store(model, monkeypatch) -> None:
    made = []
    real = PagedStore.__init__

    def counted(self: Any, *args: Any, **kwargs: Any) -> None:
        made.append(self)
        real(self, *args, **kwargs)

    monkeypatch.setattr(PagedStore, "__init__", counted)
    expected = plain_answers()
    results = in_threads([lambda: streamed(model, 0)] * 4)
    assert results == [expected[streamed, 0]] * 4
    assert len(made) == 1


def test_dense_calls_of_another_thread_are_dense_while_a_step_is_built(model, monkeypatch) -> None:
    """Also those of training, of quantized caches, and of a store's own model."""
    text = PROMPTS[0]
    expected = np.array(model(mx.array([text]), cache=plain_caches(model)))
    expected_tokens = plain_answers()[streamed, 1]
    real, seen = ops.paged_attention, []

    def beside_a_dense_call(*args: Any, **kwargs: Any) -> mx.array:
        if not seen:
            seen.append(None)
            call = lambda: np.array(model(mx.array([text]), cache=plain_caches(model)))  # noqa: E731
            seen[:] = in_threads([call])
        return real(*args, **kwargs)

    monkeypatch.setattr(ops, "paged_attention", beside_a_dense_call)
    assert streamed(model, 1) == expected_tokens
    np.testing.assert_allclose(seen[0], expected, rtol=1e-5, atol=1e-5)


def test_lazy_calls_of_a_program_that_is_alone_are_run_by_whoever_comes_next(
    model, monkeypatch
) -> None:
    """mlx-lm's own tests call models of gigabytes and never ask for the result."""
    text = PROMPTS[0]
    expected = np.array(model(mx.array([text]), cache=plain_caches(model)))
    caches = mlx_lm_cache.make_prompt_cache(model)
    [store] = stores_of(model)
    scheduled = []
    real = PagedStore._schedule
    monkeypatch.setattr(
        PagedStore, "_schedule", lambda *args: (scheduled.append(None), real(*args))[1]
    )
    with monkeypatch.context() as patch:
        patch.setattr(threading, "active_count", lambda: 1)
        model(mx.array([text[:40]]), cache=caches)
        logits = model(mx.array([text[40:]]), cache=caches)
        assert not scheduled
        mx.eval(logits)
    assert in_threads([lambda: streamed(model, 1)]) == [plain_answers()[streamed, 1]]
    assert scheduled
    more = np.array(model(mx.array([text[:3]]), cache=caches))
    with monkeypatch.context() as patch:
        patch.setattr(threading, "active_count", lambda: 1)
        unasked = mlx_lm_cache.make_prompt_cache(model)
        model(mx.array([text[40:]]), cache=unasked)
    assert in_threads([lambda: streamed(model, 0)]) == [plain_answers()[streamed, 0]]
    with pytest.raises(RuntimeError, match="never computed"):
        model(mx.array([text[:3]]), cache=unasked)
    np.testing.assert_allclose(np.array(logits), expected[:, 40:], rtol=1e-4, atol=1e-4)
    dense = np.array(model(mx.array([[*text, *text[:3]]]), cache=plain_caches(model)))
    np.testing.assert_allclose(more, dense[:, -3:], rtol=1e-4, atol=1e-4)
    store.check_integrity()


# --- Threads that end in the middle ---------------------------------------------------------------


class Ended(BaseException):
    """Not an `Exception`, as `KeyboardInterrupt`."""


def raise_ended(*args: Any) -> Any:
    raise Ended


@pytest.mark.parametrize("where", ["progress", "sampler", "processor"])
def test_a_callback_that_raises_ends_its_own_thread_only(model, where) -> None:
    expected = plain_answers()

    options: dict[str, Any] = {
        "progress": {"prompt_progress_callback": raise_ended},
        "sampler": {"sampler": raise_ended},
        "processor": {"logits_processors": [raise_ended]},
    }[where]

    def ends() -> Any:
        return list(mlx_lm_generate.generate_step(mx.array(PROMPTS[1]), model, **options))

    for i in range(ROUNDS):
        ended, answer = in_threads([ends, lambda i=i: batched(model, i % len(PROMPTS))])
        assert isinstance(ended, Ended)
        assert answer == expected[batched, i % len(PROMPTS)]
    del ended
    check(model)


def test_a_generator_that_another_thread_drops(model, monkeypatch) -> None:
    # MLX's streams are left where they were entered: with plain mlx-lm, too, this gives an error
    # that nobody can catch.
    errors = []
    monkeypatch.setattr(sys, "unraisablehook", lambda error: errors.append(str(error.exc_value)))
    expected = plain_answers()
    left: list[Iterator[Any]] = []

    def begins() -> None:
        steps = mlx_lm_generate.generate_step(mx.array(PROMPTS[0]), model, max_tokens=8)
        next(steps)
        left.append(steps)

    assert in_threads([begins, begins]) == [None, None]
    left.clear()
    assert all("StreamContext" in error for error in errors)
    assert in_threads([lambda: streamed(model, 0)]) == [expected[streamed, 0]]
    check(model)


def test_a_thread_is_ended_at_any_moment(model) -> None:
    """An exception that another thread sets comes between any two bytecodes."""
    expected = plain_answers()
    choose = random.Random(1)
    num_ended = 0
    for _ in range(2 * ROUNDS):
        counted, last = 0, choose.randrange(20_000)

        def victim(last: int = last) -> Any:
            def trace(frame: Any, event: str, argument: Any) -> Any:
                nonlocal counted
                counted += 1
                if counted == last:
                    ident = ctypes.c_ulong(threading.get_ident())
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(Ended))
                return trace

            sys.settrace(trace)
            try:
                return batched(model, 0)
            finally:
                sys.settrace(None)

        ended, answer = in_threads([victim, lambda: batched(model, 1)])
        num_ended += isinstance(ended, Ended)
        del ended
        assert answer == expected[batched, 1]
        assert streamed(model, 0) == expected[streamed, 0]
        for store in stores_of(model):
            store.check_integrity()
    assert num_ended


def test_what_is_cut_off_in_the_middle_of_the_kv_manager_is_counted_anew(
    model, monkeypatch
) -> None:
    expected = plain_answers()
    assert streamed(model, 1) == expected[streamed, 1]
    real, calls = BlockTables.append, []

    def append(self: Any, number: int, block: int) -> None:
        calls.append(block)
        if len(calls) == 2:
            raise Ended  # the block has been handed out, and no table names it
        real(self, number, block)

    monkeypatch.setattr(BlockTables, "append", append)
    with pytest.raises(Ended):
        mlx_lm_generate.generate_step(mx.array(PROMPTS[5] * 9), model).__next__()
    [store] = stores_of(model)
    assert store.kv.counters.num_resets == 1
    store.synchronize()
    with monkeypatch.context() as patch, pytest.raises(Ended):
        patch.setattr(BlockPool, "on_step_launched", raise_ended)
        store.synchronize()
    store.synchronize()
    for i in range(len(PROMPTS)):
        assert streamed(model, i) == expected[streamed, i]
    check(model)


def test_ctrl_c_waits_until_the_store_is_whole(model, monkeypatch) -> None:
    expected = plain_answers()
    assert streamed(model, 1) == expected[streamed, 1]
    real = ForkingKVManager.make_writable
    whole = []

    def make_writable(self: Any, *args: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        whole.append(real(self, *args))  # the signal has come by now
        return whole[-1]

    with monkeypatch.context() as patch:
        patch.setattr(ForkingKVManager, "make_writable", make_writable)
        with pytest.raises(KeyboardInterrupt):
            streamed(model, 0)
    assert whole
    [store] = stores_of(model)
    assert not store.is_interrupted
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert streamed(model, 0) == expected[streamed, 0]
    check(model)
