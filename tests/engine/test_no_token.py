"""A row with no permitted token ends with a reason, and a combination that leaves none is refused.

Token 0 would come otherwise, silently.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from support.models import embedded

# isort: split
import mlx.core as mx
import numpy as np
import pytest

from mlx_paged.core import FinishReason
from mlx_paged.engine import faults
from mlx_paged.engine.async_engine import AsyncEngine
from mlx_paged.engine.config import EngineConfig
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.loading import load
from mlx_paged.engine.sampling_params import SamplingParams
from mlx_paged.errors import InvalidParameterError
from mlx_paged.model.graph_runner import GraphRunner

VOCAB_SIZE = 4096
PROMPT = list(range(20, 40))
OTHER = list(range(300, 330))
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
WAYS = {
    "greedy": GREEDY,
    "drawn": replace(GREEDY, temperature=1.0, seed=3),
    "top_k": replace(GREEDY, temperature=1.0, seed=3, top_k=20),
    "top_p": replace(GREEDY, temperature=1.0, seed=3, top_p=0.9),
    "top_k, top_p, min_p": replace(
        GREEDY, temperature=0.7, seed=3, top_k=50, top_p=0.9, min_p=0.01
    ),
    "logprobs": replace(GREEDY, logprobs=2, prompt_logprobs=1),
    "penalties": replace(GREEDY, repetition_penalty=1.2, frequency_penalty=0.5),
    "stop strings": replace(GREEDY, stop="never said"),
}
OPTIONS: dict[str, Any] = {"kv_cache_memory": 32 << 20, "block_size": 8, "max_num_seqs": 16}


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "overlap"])
def engine(request: pytest.FixtureRequest) -> Engine:
    config = EngineConfig(**OPTIONS, async_scheduling=request.param)
    return Engine(load(dtype="float32"), config)


def run(engine: Engine, *requests: tuple[list[int], SamplingParams, Any]) -> list[Any]:
    outputs = [
        engine.add_request(str(i), prompt, params, token_mask=mask)
        for i, (prompt, params, mask) in enumerate(requests)
    ]
    while engine.has_unfinished:
        engine.step()
        engine.check_integrity()
    return [output.outputs[0] for output in outputs]


def assert_ended(answer: Any, token_ids: Sequence[int], reason: str) -> None:
    assert answer.finish_reason is FinishReason.ERROR
    assert answer.token_ids == list(token_ids)
    assert answer.error is not None and reason in answer.error.reason


def nothing_after(num_tokens: int, packed: bool = False) -> Callable[..., Any]:
    """A mask that permits all tokens, and none once the answer has this many."""

    def mask(index: int, answer: Sequence[int]) -> Any:
        if packed:
            return np.full(VOCAB_SIZE // 32, -(len(answer) < num_tokens), np.int32)
        return np.full(VOCAB_SIZE, len(answer) < num_tokens)

    return mask


@pytest.mark.one_in(4)
@pytest.mark.parametrize("way", WAYS)
def test_a_mask_that_permits_nothing(engine: Engine, way: str) -> None:
    params = WAYS[way]
    [whole, other] = run(engine, (PROMPT, params, None), (OTHER, GREEDY, None))
    resets = engine.stats().counters.num_resets
    for packed in (False, True):
        mask = nothing_after(3, packed)
        answer, beside = run(engine, (PROMPT, params, mask), (OTHER, GREEDY, None))
        assert_ended(answer, whole.token_ids[:3], faults.NO_PERMITTED_TOKEN)
        assert beside.token_ids == other.token_ids and beside.error is None
    [answer] = run(engine, (PROMPT, params, nothing_after(0)))
    assert_ended(answer, [], faults.NO_PERMITTED_TOKEN)
    assert engine.stats().counters.num_resets == resets, "a caller's mask clears no cache"


@pytest.mark.parametrize("way", ["greedy", "drawn", "top_k"])
def test_one_permitted_token_is_the_one_that_comes(engine: Engine, way: str) -> None:
    def only(index: int, answer: Sequence[int]) -> Any:
        mask = np.zeros(VOCAB_SIZE, np.bool_)
        mask[4000 + len(answer)] = True
        return mask

    [answer] = run(engine, (PROMPT, WAYS[way], only))
    assert answer.token_ids == list(range(4000, 4008)) and answer.error is None


def test_words_of_several_tokens_may_leave_nothing(engine: Engine) -> None:
    """The parameters cannot show this: the only permitted token is banned after itself."""
    tokenizer = embedded().tokenizer
    token, text = next(
        (token, text)
        for token in range(300, 4000)
        if (text := tokenizer.decode([token])).isalpha()
        and tokenizer.encode(2 * text, add_special_tokens=False) == [token, token]
    )
    params = replace(GREEDY, allowed_token_ids=[token], bad_words=[2 * text])
    [answer] = run(engine, (PROMPT, params, None))
    assert_ended(answer, [token], faults.NO_PERMITTED_TOKEN)
    assert "bad_words" in answer.error.reason


def spelled_by_one_token() -> tuple[int, str]:
    tokenizer = embedded().tokenizer
    return next(
        (token, text)
        for token in range(300, 4000)
        if (text := tokenizer.decode([token])).isalpha()
        and tokenizer.encode(text, add_special_tokens=False) == [token]
    )


def test_a_combination_that_leaves_no_token_is_refused(engine: Engine) -> None:
    token, text = spelled_by_one_token()
    [end, *_] = embedded().tokenizer.eos_token_ids
    refused: list[tuple[dict[str, Any], str]] = [
        ({"allowed_token_ids": [token], "bad_words": [text]}, "allowed_token_ids"),
        ({"allowed_token_ids": [token, token], "bad_words": ["x", text]}, "allowed_token_ids"),
        ({"allowed_token_ids": [end], "min_tokens": 1}, "allowed_token_ids"),
        (
            {"allowed_token_ids": [7, 9], "stop_token_ids": [9, 7, 99999], "min_tokens": 2},
            "allowed_token_ids",
        ),
        (
            {"allowed_token_ids": [end, token], "bad_words": [text], "min_tokens": 2},
            "allowed_token_ids",
        ),
        ({"stop_token_ids": range(VOCAB_SIZE), "min_tokens": 1}, "min_tokens"),
    ]
    for fields, name in refused:
        with pytest.raises(InvalidParameterError) as caught:
            engine.add_request("r", PROMPT, replace(GREEDY, **fields))
        assert caught.value.field == name
    assert not engine.has_unfinished
    # Those that leave one are not.
    kept: list[dict[str, Any]] = [
        {"allowed_token_ids": [token, 7], "bad_words": [text]},
        {"allowed_token_ids": [end]},
        {"allowed_token_ids": [end, 7], "min_tokens": 1},
        {"stop_token_ids": range(VOCAB_SIZE)},
        {"stop_token_ids": {*range(VOCAB_SIZE)} - {7}, "min_tokens": 1, "max_tokens": 1},
    ]
    for fields in kept:
        [answer] = run(engine, (PROMPT, replace(GREEDY, ignore_eos=False, **fields), None))
        assert answer.error is None and answer.token_ids


class Answers:
    """A model whose logits are these after one of its tokens."""

    def __init__(self, engine: Engine, after: int, value: float, at: int | None) -> None:
        self.paged = engine._executor._runner.model
        self.model, self.context = self.paged.model, self.paged._context
        self.after, self.value, self.at = after, value, at

    def __enter__(self) -> Answers:
        self.paged.model, self.paged._graph_runner = self, GraphRunner(self.paged._run)
        return self

    def __exit__(self, *_: object) -> None:
        self.paged.model, self.paged._graph_runner = self.model, GraphRunner(self.paged._run)

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        logits = self.model(tokens, cache=cache)
        chosen = (tokens[:, 0] == self.after)[self.context.step.logit_rows][:, None, None]
        if self.at is not None:
            chosen = chosen & (mx.arange(logits.shape[-1]) == self.at)
        return mx.where(chosen, self.value, logits)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("way", ["greedy", "drawn", "top_k", "top_p", "logprobs", "penalties"])
@pytest.mark.parametrize(
    ("value", "at", "reason"),
    [
        (float("nan"), None, faults.NOT_A_NUMBER),
        (float("nan"), 4095, faults.NOT_A_NUMBER),
        (float("inf"), None, faults.INFINITE),
        (float("inf"), 5, faults.INFINITE),
        (float("-inf"), None, faults.INFINITE),
    ],
)
def test_logits_that_are_not_finite(
    engine: Engine, way: str, value: float, at: int | None, reason: str
) -> None:
    [other] = run(engine, (OTHER, GREEDY, None))
    resets = engine.stats().counters.num_resets
    with Answers(engine, PROMPT[-1], value, at):
        answer, beside = run(engine, (PROMPT, WAYS[way], None), (OTHER, GREEDY, None))
    assert_ended(answer, [], reason)
    assert beside.token_ids == other.token_ids and beside.error is None
    assert engine.stats().counters.num_resets == resets + 1, "its keys may be just as wrong"


@pytest.mark.parametrize(
    ("value", "at", "reason"),
    [
        (float("nan"), None, faults.NOT_A_NUMBER),
        (float("nan"), 4095, faults.NOT_A_NUMBER),
        (float("inf"), 5, faults.INFINITE),
    ],
)
def test_a_mask_hides_nothing_that_is_not_finite(
    engine: Engine, value: float, at: int | None, reason: str
) -> None:
    params = replace(GREEDY, allowed_token_ids=[100, 101])
    with Answers(engine, PROMPT[-1], value, at):
        [answer] = run(engine, (PROMPT, params, None))
    assert_ended(answer, [], reason)


def test_one_logit_of_minus_infinity_is_a_token_that_never_comes(engine: Engine) -> None:
    """As models with a padded vocabulary have them."""
    with Answers(engine, PROMPT[-1], float("-inf"), 5):
        [answer] = run(engine, (PROMPT, GREEDY, None))
    assert answer.error is None and len(answer.token_ids) == 8


def test_penalties_that_overflow(engine: Engine) -> None:
    params = replace(GREEDY, repetition_penalty=2e-38, logit_bias={PROMPT[0]: 100.0})
    resets = engine.stats().counters.num_resets
    [answer] = run(engine, (PROMPT, params, None))
    assert_ended(answer, [], faults.OVERFLOW)
    assert engine.stats().counters.num_resets == resets


def raises(error: BaseException, after: int = 2) -> Callable[..., Any]:
    def mask(index: int, answer: Sequence[int]) -> None:
        if len(answer) == after:
            raise error

    return mask


class Odd(BaseException):
    """No `Exception`."""


ERRORS = [
    ValueError("injected"),
    SystemExit("injected"),
    Odd("injected"),
    asyncio.CancelledError("injected"),
    GeneratorExit("injected"),
    MemoryError("injected"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_mask_that_raises_ends_its_answer(engine: Engine, error: BaseException) -> None:
    [whole, other] = run(engine, (PROMPT, GREEDY, None), (OTHER, GREEDY, None))
    before = engine.stats()
    answer, beside = run(engine, (PROMPT, GREEDY, raises(error)), (OTHER, GREEDY, None))
    assert_ended(answer, whole.token_ids[:2], f"{type(error).__name__}: injected")
    assert beside.token_ids == other.token_ids
    after = engine.stats()
    assert after.num_faults == before.num_faults, "nobody's step is run again for it"
    assert engine._executor.max_rows is None, "it says nothing of the device's memory"
    assert after.counters.num_resets == before.counters.num_resets


def test_a_mask_that_interrupts_on_the_engines_thread_ends_its_answer() -> None:
    """Ctrl-C reaches the main thread only: this one is a caller's."""

    async def check() -> None:
        async with AsyncEngine.from_model(**OPTIONS) as served:
            mask = raises(KeyboardInterrupt("injected"))
            bad, good = await asyncio.gather(
                served.generate(PROMPT, GREEDY, token_mask=mask), served.generate(OTHER, GREEDY)
            )
            assert "KeyboardInterrupt: injected" in bad.outputs[0].error.reason
            assert len(bad.outputs[0].token_ids) == 2
            assert len(good.outputs[0].token_ids) == 8
            assert served.is_alive

    asyncio.run(asyncio.wait_for(check(), 300))


def test_an_interrupt_in_a_mask_is_the_users() -> None:
    engine = Engine(load(dtype="float32"), EngineConfig(**OPTIONS))
    engine.add_request("r", PROMPT, GREEDY, token_mask=raises(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        while engine.has_unfinished:
            engine.step()
