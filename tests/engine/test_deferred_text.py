"""Text that its readers make: the same text, whatever is read when and by whom."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import NaiveStreamingDetokenizer
from support.models import embedded
from support.waiting import TIMEOUT

from mlx_paged import LLM, SamplingParams
from mlx_paged.core import FinishReason
from mlx_paged.engine.async_engine import AsyncEngine
from mlx_paged.engine.detokenizer import IncrementalDetokenizer
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.outputs import DeferredText
from mlx_paged.errors import StepError

PROMPT = "def add(a, b):"
UNSEEN = "\x01never\x01"  # a stop string that no answer holds
PARTS = ["  ", "def f(x):\n    return x\n", " the", "日本語", "🙂", "👩\u200d👧", "é", "\n\n", "1 "]
texts = st.lists(st.sampled_from(PARTS), max_size=8).map(lambda parts: "x" + "".join(parts))


def naive_tokenizer() -> Any:
    """A tokenizer whose detokenizer's state depends on when its text is looked at."""
    detokenizer = NaiveStreamingDetokenizer(embedded().tokenizer._tokenizer)
    return SimpleNamespace(detokenizer=detokenizer)


TOKENIZERS = {"bpe": lambda: embedded().tokenizer, "naive": naive_tokenizer}


def encode(text: str) -> list[int]:
    return embedded().tokenizer.encode(text, add_special_tokens=False)


def deferred(tokenizer: Any, tokens: Sequence[int] = ()) -> DeferredText:
    return DeferredText("r", IncrementalDetokenizer(tokenizer), tokens, 0)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(num_gpu_blocks_override=64)


def test_a_stream_that_is_collected_while_its_text_is_read(llm, monkeypatch) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    [expected, *_] = [update.text for update in llm.stream(PROMPT, params)]
    stream = llm.stream(PROMPT, params)
    update, found = next(stream), []
    in_a_cycle: Any = SimpleNamespace(stream=stream)
    in_a_cycle.itself = in_a_cycle
    is_there = weakref.ref(stream)
    del stream, in_a_cycle
    add = IncrementalDetokenizer.add

    def collect_and_add(*arguments: Any) -> str:
        gc.collect()
        return add(*arguments)

    monkeypatch.setattr(IncrementalDetokenizer, "add", collect_and_add)
    reader = threading.Thread(target=lambda: found.append(update.text), daemon=True)
    reader.start()
    reader.join(TIMEOUT)
    assert not reader.is_alive(), "it waits for itself"
    assert found == [expected] and is_there() is None
    assert not llm.engine.has_unfinished


# --- The same text --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=texts, data=st.data())
def test_pieces_are_those_of_the_stream_in_any_order(name: str, text: str, data: Any) -> None:
    tokenizer, tokens = TOKENIZERS[name](), encode(text)
    eager = IncrementalDetokenizer(tokenizer)
    expected = [eager.add(token) for token in tokens]
    expected[-1] += eager.finish()
    lazy = deferred(tokenizer, tokens)
    lazy.end(len(tokens))
    last = len(tokens) - 1
    for i in data.draw(st.permutations(range(len(tokens)))):
        assert lazy.between(i, i + 1 if i < last else None) == expected[i]
    assert lazy.whole() == "".join(expected) == eager.text


@given(text=texts, data=st.data())
def test_what_is_read_while_it_grows(text: str, data: Any) -> None:
    """Readers look at random moments; what they got is always the beginning of the answer."""
    eager, tokens = IncrementalDetokenizer(embedded().tokenizer), encode(text)
    known: list[int] = [7, 7]  # the prompt
    lazy = DeferredText("r", IncrementalDetokenizer(embedded().tokenizer), known, 2)
    read = 0
    for count, token in enumerate(tokens, 1):
        known.append(token)
        eager.add(token)
        if data.draw(st.booleans()):
            length = len(lazy.between(0, read))
            assert lazy.between(read, count) == eager.text[length:]
            read = count
        if data.draw(st.booleans()):
            assert lazy.whole() == eager.text
    eager.finish()
    lazy.end(len(tokens))
    assert lazy.between(0, None) == lazy.whole() == eager.text


def test_the_token_that_ended_the_answer_is_no_text() -> None:
    tokens = encode("return x")
    lazy = deferred(embedded().tokenizer, [*tokens, 0])
    lazy.end(len(tokens))
    assert lazy.between(len(tokens), None) == ""
    assert lazy.whole() == "return x"


def test_many_threads_read_at_once() -> None:
    tokens = encode("def f(x):\n    return '日本語 🙂'\n" * 20)
    eager = IncrementalDetokenizer(embedded().tokenizer)
    expected = [eager.add(token) for token in tokens]
    lazy = deferred(embedded().tokenizer, tokens)
    wrong: list[int] = []

    def read(first: int) -> None:
        for i in [*range(first, len(tokens)), *range(first)]:
            if lazy.between(i, i + 1) != expected[i]:
                wrong.append(i)

    readers = [threading.Thread(target=read, args=(i * len(tokens) // 8,)) for i in range(8)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert not wrong


# --- In the engine --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 60, "ignore_eos": True},
        {"max_tokens": 60, "temperature": 2.0, "seed": 5, "n": 3},  # characters cut short
        {"max_tokens": 60, "stop_token_ids": list(range(256, 700))},
        {
            "max_tokens": 60,
            "stop_token_ids": [*range(256, 700)],
            "include_stop_str_in_output": True,
        },
    ],
    ids=["greedy", "sampled", "stop tokens", "included"],
)
def test_updates_are_the_same_with_and_without_stop_strings(llm: LLM, options: Any) -> None:
    """A stop string that never comes makes the step decode; nothing else changes."""
    seen = []
    for stop in (UNSEEN, None):
        params = SamplingParams(**{"temperature": 0, **options}, stop=stop)
        updates = list(llm.stream(PROMPT, params))
        [output] = llm.generate(PROMPT, params)
        for answer in output.outputs:
            mine = [u for u in updates if u.index == answer.index]
            assert "".join(u.text for u in mine) == answer.text
        # (In which step each answer begins depends on what is cached.)
        updates.sort(key=lambda update: update.index)
        seen.append(
            (
                [(u.index, u.token_id, u.text, u.finish_reason, u.stop_reason) for u in updates],
                output.outputs,
            )
        )
    assert seen[0] == seen[1]


def test_no_token_is_decoded_in_a_step(llm: LLM, monkeypatch) -> None:
    engine = Engine(embedded(), llm.engine.config)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    output = engine.add_request("r", encode(PROMPT), params)
    added: list[int] = []
    add = IncrementalDetokenizer.add
    monkeypatch.setattr(IncrementalDetokenizer, "add", lambda s, t: (added.append(t), add(s, t))[1])
    updates = []
    while engine.has_unfinished:
        updates += engine.step()
    assert not added
    text = output.outputs[0].text
    assert added == output.outputs[0].token_ids
    assert text == "".join(u.text for u in updates) and len(added) == 20


def test_an_outputs_text_is_plain_in_the_end(llm: LLM) -> None:
    [output] = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=5))
    assert type(vars(output.outputs[0])["_text"]) is str
    assert f"text={output.outputs[0].text!r}" in repr(output)


# --- What cannot be decoded -----------------------------------------------------------------------


@pytest.fixture
def undecodable(monkeypatch) -> int:
    """A token that the tokenizer cannot decode."""
    [bad] = encode("7")

    def add(self: IncrementalDetokenizer, token: int) -> str:
        if token == bad:
            raise UnicodeError("injected")
        return real(self, token)

    real = IncrementalDetokenizer.add
    monkeypatch.setattr(IncrementalDetokenizer, "add", add)
    return bad


def test_a_text_that_cannot_be_decoded_is_its_own_answers_error(llm: LLM, undecodable: int) -> None:
    good = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    bad = SamplingParams(temperature=0, max_tokens=6, allowed_token_ids=[undecodable])
    failed, fine = (o.outputs[0] for o in llm.generate([PROMPT] * 2, [bad, good]))
    assert failed.finish_reason is FinishReason.ERROR and failed.text == ""
    assert isinstance(failed.error, StepError) and "UnicodeError: injected" in str(failed.error)
    assert fine.finish_reason is FinishReason.LENGTH and fine.error is None and fine.text
    with pytest.raises(StepError, match="UnicodeError: injected"):
        for update in llm.stream(PROMPT, bad):
            _ = update.text


def test_a_reader_of_such_a_text_is_told(undecodable: int) -> None:
    async def run() -> None:
        async with AsyncEngine.from_model(num_gpu_blocks_override=64) as engine:
            params = SamplingParams(max_tokens=500, allowed_token_ids=[undecodable])
            stream = await engine.add_request(PROMPT, params)
            with pytest.raises(StepError, match="UnicodeError: injected"):
                async with stream:
                    async for delta in stream:
                        _ = delta.text
            while (await engine.stats()).num_running:  # who left has ended the request
                await asyncio.sleep(0.01)
            short = SamplingParams(max_tokens=3, allowed_token_ids=[undecodable])
            answer = (await engine.generate(PROMPT, short)).outputs[0]
            assert answer.finish_reason is FinishReason.ERROR and answer.token_ids
            good = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
            assert (await engine.generate(PROMPT, good)).outputs[0].text

    asyncio.run(run())
