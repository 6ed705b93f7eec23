"""Tests that options of a request are checked on entry: no value ends the engine."""

from __future__ import annotations

import array
import asyncio
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from support.hash_model import follows, hash_model

# isort: split
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlx_paged import LLM
from mlx_paged.core import Request
from mlx_paged.engine import request_options
from mlx_paged.engine.async_engine import AsyncEngine
from mlx_paged.engine.config import EngineConfig
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.sampling_params import SamplingParams
from mlx_paged.errors import InvalidParameterError, MlxPagedError

NAN, INF = float("nan"), float("inf")
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPT = [1, 2, 3]
OPTIONS: dict[str, Any] = {"block_size": 8, "num_gpu_blocks_override": 200, "policy": "priority"}


class NoRepr:
    """A value that cannot even be shown."""

    def __repr__(self) -> str:
        raise ValueError("no")


HOSTILE: list[Any] = [
    *(None, True, 3, -1, 10**6, 10**400, 0.5, NAN, INF, -INF, 1j, Fraction(1, 3), "", "high"),
    *("\ud800", b"bytes", [], ["a"], [None], {}, {"a": 1}, set(), (), [[1]], object(), NoRepr()),
    *(np.float32(0.5), np.array([1.5]), np.array(3), np.array([[1, 2]]), mx.array([0.5]), len),
]

# Invalid values of each option of `Engine.add_request`.
REFUSED: dict[str, list[Any]] = {
    "request_id": [None, 3, ["a"], b"a"],
    "prompt_token_ids": [
        *(None, 3, 0.5, "text", b"bytes", bytearray(b"a"), {1: 2}, {1, 2}, iter([1]), object()),
        *([1, None], [1, 2.0], ["1"], [True], [[1]], [-1], [61], [10**30], [NoRepr()], []),
        *(np.array([1.5]), np.array([True]), np.array(3), np.array([[1, 2]]), np.array([], "i4")),
        *(np.array([-1]), np.array([61]), mx.array([0.5]), mx.array([1.0]).astype(mx.bfloat16)),
    ],
    "params": [{}, [], "greedy", 3, SamplingParams, [GREEDY]],
    "prompt": [3, b"text", ["text"]],
    "priority": ["high", None, NAN, 1.0, True, [1], 1j],
    "timeout": [NAN, -1, -0.1, "5", True, [5], 10**400, -INF, 1j],
    "cache_salt": [["a"], 3, {}, b"a", "", True],
    "token_mask": [3, "mask", [True], np.ones(61, np.bool_)],
    "sink": [3, [], object(), len],
}


def is_taken(engine: Engine, **changed: Any) -> list[int]:
    """The answer to a request with these options."""
    options = {"request_id": "r", "prompt_token_ids": PROMPT, "params": GREEDY, **changed}
    output = engine.add_request(**options)
    while engine.has_unfinished:
        engine.step()
    return output.outputs[0].token_ids


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(hash_model(), EngineConfig(**OPTIONS))


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(hash_model(), **OPTIONS)


@pytest.fixture(scope="module")
def async_engine() -> Iterator[AsyncEngine]:
    served = AsyncEngine(lambda: Engine(hash_model(), EngineConfig(**OPTIONS)))
    yield served
    asyncio.run(served.shutdown())


@pytest.mark.parametrize("field", REFUSED)
def test_an_option_is_refused_by_its_name(engine: Engine, field: str) -> None:
    for value in REFUSED[field]:
        with pytest.raises(InvalidParameterError) as caught:
            is_taken(engine, **{field: value})
        assert caught.value.field == field and str(caught.value).startswith(f"{field} must be ")
        assert len(str(caught.value)) < 600
    assert not engine.has_unfinished, "what was refused is not queued"
    assert is_taken(engine) == follows(PROMPT, 6)


@pytest.mark.parametrize("field", [f for f in REFUSED if f not in ("prompt", "sink")])
def test_an_option_is_refused_across_threads(async_engine: AsyncEngine, field: str) -> None:
    name = "prompt" if field == "prompt_token_ids" else field

    async def check() -> None:
        for value in REFUSED[field]:
            if value is None and field == "request_id":
                continue  # one is made
            if name == "prompt" and isinstance(value, str):
                continue  # a text
            with pytest.raises(InvalidParameterError, match=f"^{field}|^{name} must be "):
                await async_engine.add_request(**{"prompt": PROMPT, "params": GREEDY, name: value})
        output = await async_engine.generate(PROMPT, GREEDY)
        assert output.outputs[0].token_ids == follows(PROMPT, 6)

    asyncio.run(asyncio.wait_for(check(), 300))


ONE_PROMPT = (
    *(np.array(PROMPT), np.array(PROMPT, np.uint8), mx.array(PROMPT), tuple(PROMPT)),
    *(range(1, 4), array.array("I", PROMPT), [np.int64(i) for i in PROMPT], [1, np.int8(2), 3]),
)


@pytest.mark.parametrize("prompt", ONE_PROMPT, ids=lambda p: type(p).__name__)
def test_arrays_of_integers_are_token_ids(
    engine: Engine, llm: LLM, async_engine: AsyncEngine, prompt: Any
) -> None:
    assert is_taken(engine, prompt_token_ids=prompt) == follows(PROMPT, 6)
    [output] = llm.generate(prompt, GREEDY)
    assert output.outputs[0].token_ids == follows(PROMPT, 6)
    assert output.prompt_token_ids == PROMPT
    assert {type(token) for token in output.prompt_token_ids} == {int}
    several = llm.generate([prompt, [5], prompt], [GREEDY] * 3)
    answers = [output.outputs[0].token_ids for output in several]
    assert answers == [follows(p, 6) for p in (PROMPT, [5], PROMPT)]
    output = asyncio.run(async_engine.generate(prompt, GREEDY))
    assert output.outputs[0].token_ids == follows(PROMPT, 6)


def test_the_rows_of_an_array_are_prompts(llm: LLM) -> None:
    for rows in (np.array([[1, 2], [3, 4]]), mx.array([[1, 2], [3, 4]])):
        outputs = llm.generate(rows, GREEDY)
        assert [o.outputs[0].token_ids for o in outputs] == [
            follows(p, 6) for p in ([1, 2], [3, 4])
        ]


@pytest.mark.parametrize(
    ("prompts", "field"),
    [
        (None, "prompts"),
        (3, "prompts"),
        (0.5, "prompts"),
        (b"text", "prompts"),
        ({"text": "text"}, "prompts"),
        ({"prompt": "text", "prompt_token_ids": PROMPT}, "prompts"),
        ({"prompt": 5}, "prompts.prompt"),
        ({"prompt": "text", "multi_modal_data": {"smell": b"x"}}, "prompts.multi_modal_data"),
        (
            {"prompt_token_ids": PROMPT, "multi_modal_data": {"image": b"x"}},
            "prompts.prompt",
        ),
        (
            {"prompt": "text", "multi_modal_data": {"image": b"x"}},
            "prompts.multi_modal_data.image",
        ),
        ((p for p in ["text"]), "prompts"),
        ("\ud800", "prompts"),
        (np.array([0.5]), "prompts"),
        (["text", None], "prompts[1]"),
        ([PROMPT, {"prompt_token_ids": ["a"]}], "prompt_token_ids"),
        ([PROMPT, {}], "prompts[1]"),
        ([PROMPT, "lone \udfff"], "prompts[1]"),
        ([PROMPT, b"text"], "prompts[1]"),
        ([0.5], "prompts[0]"),
        ([1, 2, "a"], "prompt_token_ids"),
        ([PROMPT, [1, None]], "prompt_token_ids"),
        ([True, False], "prompt_token_ids"),
        ([[]], "prompt_token_ids"),
    ],
    ids=lambda value: ascii(value)[:30],
)
def test_prompts_are_refused_by_their_place(llm: LLM, prompts: Any, field: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        llm.generate(prompts, GREEDY)
    assert caught.value.field == field
    with pytest.raises(InvalidParameterError):
        next(llm.stream(prompts, GREEDY))
    assert not llm.engine.has_unfinished
    assert llm.generate([]) == []


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({}, "params"),
        ("greedy", "params"),
        (3, "params"),
        (SamplingParams, "params"),
        ([], "params"),
        ([GREEDY], "params"),
        ([GREEDY, None], "params[1]"),
        ([GREEDY, {}], "params[1]"),
    ],
    ids=repr,
)
def test_params_are_refused_by_their_place(llm: LLM, params: Any, field: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        llm.generate([PROMPT, PROMPT], params)
    assert caught.value.field == field
    assert not llm.engine.has_unfinished


@pytest.mark.parametrize("messages", [None, 3, "text", b"text", {"role": "user"}, [None], [["a"]]])
def test_messages_that_are_none_are_refused(messages: Any) -> None:
    with pytest.raises(InvalidParameterError, match=r"^messages must be "):
        request_options.conversations_of(messages)
    message = {"role": "user", "content": "text"}
    assert request_options.conversations_of([message]) == [[message]]
    assert request_options.conversations_of([[message], (message,)]) == [[message], [message]]
    assert request_options.conversations_of([]) == []


def test_numpys_numbers_are_taken(engine: Engine) -> None:
    tokens = is_taken(engine, priority=np.int64(2), timeout=np.float32(300), cache_salt="salt")
    assert tokens == follows(PROMPT, 6)
    request = Request("r", (1,), n=np.int64(2), priority=np.int8(1), timeout=Fraction(1, 2))
    assert [type(v) for v in (request.n, request.priority, request.timeout)] == [int, int, float]
    assert Request("r", (1,), timeout=INF).timeout == INF


VALUES = st.sampled_from(HOSTILE) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=5,
)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(sorted(REFUSED)), VALUES)
def test_no_value_of_an_option_ends_the_engine(engine: Engine, field: str, value: Any) -> None:
    try:
        engine.add_request(
            **{"request_id": "r", "prompt_token_ids": PROMPT, "params": GREEDY, field: value}
        )
    except InvalidParameterError as error:
        assert error.field == field
    while engine.has_unfinished:
        engine.step()
    assert is_taken(engine) == follows(PROMPT, 6)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(SamplingParams.__dataclass_fields__)), VALUES)
@example("structured_outputs", {"a": 1})
@example("stop", [np.zeros(2)])
def test_no_value_of_a_parameter_ends_the_engine(engine: Engine, field: str, value: Any) -> None:
    fields = {"temperature": 0.7, "max_tokens": 3, "ignore_eos": True, "seed": 1, field: value}
    try:
        params = SamplingParams(**fields)
    except InvalidParameterError as error:
        named = error.field.partition(".")[0]  # (of a mapping, the entry is named too)
        assert named == field or {field, named} == {"min_tokens", "max_tokens"}
        return
    if params.n > 100:
        return  # (it would be served, but takes long)
    try:
        output = engine.add_request("r", PROMPT, params)
    except MlxPagedError:
        return  # a token that this model lacks, or more than fits
    for _ in range(20):
        engine.step()
    assert all(answer.error is None for answer in output.outputs)
    engine.abort("r")
    assert is_taken(engine) == follows(PROMPT, 6)


class Raises:
    """A sink that raises with the given update of its answer."""

    def __init__(self, at: int, error: BaseException) -> None:
        self.at = at
        self.error = error
        self.taken: list[Any] = []

    def put(self, update: Any) -> None:
        self.taken.append(update)
        if len(self.taken) == self.at:
            raise self.error


@pytest.mark.parametrize("stop", [None, "never said"])
@pytest.mark.parametrize("at", [1, 3, 6])
@pytest.mark.parametrize("error", [ValueError("full"), SystemExit(3)])
def test_a_sink_that_raises_ends_its_answer(
    engine: Engine, error: BaseException, at: int, stop: str | None
) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, stop=stop)
    sink = Raises(at, error)
    bad = engine.add_request("bad", PROMPT, params, sink=sink)
    good = engine.add_request("good", [4, 5], params)
    while engine.has_unfinished:
        engine.step()
        engine.check_integrity()
    assert good.outputs[0].token_ids == follows([4, 5], 6)
    assert bad.outputs[0].token_ids == follows(PROMPT, 6)[:at]
    # It is told why its answer ended, which may be for the second time.
    assert len(sink.taken) == at + 1
    assert sink.taken[-1].finish_reason == bad.outputs[0].finish_reason
    if at < 6:
        assert bad.outputs[0].finish_reason == "error"
        assert f"its sink raised {type(error).__name__}" in str(bad.outputs[0].error)
    else:
        assert bad.outputs[0].finish_reason == "length", "it was finished already"


def test_an_interrupt_in_a_sink_is_the_users(engine: Engine) -> None:
    engine.add_request("bad", PROMPT, GREEDY, sink=Raises(1, KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        while engine.has_unfinished:
            engine.step()
    engine.abort("bad")


def test_token_ids_become_what_the_prefix_tree_compares() -> None:
    ids = [3, 0, 60]
    for sample in (ids, tuple(ids), np.array(ids), [np.int64(3), 0, np.uint8(60)], mx.array(ids)):
        found, packed = request_options.token_ids_of("tokens", sample, 61)
        assert found == ids and {type(i) for i in found} == {int}
        assert packed.typecode == "I" and packed.tolist() == ids
    request = Request("r", packed)
    assert request.prompt_token_ids is packed and request.num_prompt_tokens == 3
    with pytest.raises(InvalidParameterError, match=r"tokens must be integers in \[0, 60\)"):
        request_options.token_ids_of("tokens", ids, 60)
