"""Steps that give a sequence several tokens: nothing after the one that ends it is seen anywhere.

A scripted executor stands for a model with a drafter: it returns up to three tokens of each
sequence's script in a step. Every answer must be the one that it gives token by token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import numpy as np
import pytest
from support.models import embedded_twin

from mlx_paged import SamplingParams
from mlx_paged.core import FinishReason, PrefixQuery, StepBatch, StepResult
from mlx_paged.engine.config import EngineConfig
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.outputs import SequenceUpdate
from mlx_paged.engine.request_stream import Channel, SequenceDelta
from mlx_paged.engine.sampling.logprobs import PositionLogprobs

PROMPT = "def f(x):\n"
SCRIPT = "    return x + 1\n\n\ndef g(y):\n    return f(y) * 2\n"
NUM_DRAFTS = 2


class ScriptedExecutor:
    """Returns the tokens of scripts: one, and one more for each draft."""

    num_faults = 0

    def __init__(self, engine: Engine, scripts: dict[int, list[int]], num_prompt: int) -> None:
        self.engine = engine
        self.scripts = scripts  # by seq_id
        self.num_prompt = num_prompt
        self.num_drafts = NUM_DRAFTS
        self.batch: StepBatch | None = None
        self.most = 0  # tokens of a sequence in a step

    def propose(self) -> None:
        """Drafts for all running sequences. (Any: the script says what is right.)"""
        for seq in self.engine._scheduler.running:
            self.engine._scheduler.propose(seq, [7] * self.num_drafts)

    def launch(self, batch: StepBatch) -> None:
        assert self.batch is None
        self.batch = batch

    def read(self) -> StepResult:
        batch, self.batch = self.batch, None
        assert batch is not None
        result = StepResult()
        for place, seq_id in enumerate(batch.seq_ids):
            gained: list[int] = []
            if batch.samples[place]:
                known = batch.starts[place] + batch.query_lens[place] - batch.num_drafts[place]
                begin = known - self.num_prompt
                gained = self.scripts[seq_id][begin : begin + 1 + batch.num_drafts[place]]
                self.most = max(self.most, len(gained))
            result.token_ids.append(gained)
            if any(row == place for row, _ in batch.sampling.logprobs if batch.sampling):
                likeliest = np.arange(20, dtype=np.int32), -np.arange(20, dtype=np.float32)
                found = [PositionLogprobs(t, -0.5 - t / 1000, 2, likeliest) for t in gained]
                result.logprobs.append((place, found))
        return result

    def reset(self) -> None:
        self.batch = None


def scripted(params: SamplingParams, num_drafts: int) -> tuple[Engine, Any, list[SequenceUpdate]]:
    engine = Engine(
        embedded_twin(),
        EngineConfig(num_gpu_blocks_override=64, block_size=8, async_scheduling=False),
    )
    prompt = list(engine.tokenizer.encode(PROMPT))
    script = list(engine.tokenizer.encode(SCRIPT, add_special_tokens=False)) * 3
    executor = ScriptedExecutor(engine, dict.fromkeys(range(1, 4), script), len(prompt))
    executor.num_drafts = num_drafts
    engine._executor = executor
    output = engine.add_request("r", prompt, params)
    updates: list[SequenceUpdate] = []
    while engine.has_unfinished:
        executor.propose()
        updates += engine.step()
        engine.check_integrity()
    assert executor.most == 1 + num_drafts, "the case is of use"
    return engine, output, updates


def script_of() -> list[int]:
    tokenizer = embedded_twin().tokenizer
    return list(tokenizer.encode(SCRIPT, add_special_tokens=False)) * 3


def stop_token() -> int:
    """A token in the middle of the second step, and not before."""
    script = script_of()
    return next(t for i, t in enumerate(script) if i % 3 == 2 and i > 4 and t not in script[:i])


CASES: dict[str, dict[str, Any]] = {
    "stop token": {"stop_token_ids": [stop_token()]},
    "stop token, shown": {"stop_token_ids": [stop_token()], "include_stop_str_in_output": True},
    "stop string": {"stop": ["\ndef g"]},
    "stop string, shown": {"stop": ["f(y"], "include_stop_str_in_output": True},
    "stop string and logprobs": {"stop": [" + 1"], "logprobs": 2},
    "5 tokens": {"max_tokens": 5},
    "6 tokens": {"max_tokens": 6},
    "7 tokens and logprobs": {"max_tokens": 7, "logprobs": 1},
    "stop string never said": {"stop": ["never"], "max_tokens": 12},
    "grammar": {"structured_outputs": {"regex": r"    return x \+ 1\n\n\ndef g"}},
    "grammar and stop string": {
        "structured_outputs": {"regex": r"    return x \+ 1\n\n\ndef g.*"}, "stop": ["(y)"],
    },
    "three answers": {"n": 3, "max_tokens": 8},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_an_answer_is_that_of_single_tokens(name: str) -> None:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 30, **CASES[name]})
    _, single, _ = scripted(params, 0)
    engine, several, updates = scripted(params, NUM_DRAFTS)
    for wanted, got in zip(single.outputs, several.outputs, strict=True):
        assert got.error is wanted.error is None
        assert (got.token_ids, got.text) == (wanted.token_ids, wanted.text)
        assert (got.finish_reason, got.stop_reason) == (wanted.finish_reason, wanted.stop_reason)
        assert got.cumulative_logprob == pytest.approx(wanted.cumulative_logprob)
        assert repr(got.logprobs) == repr(wanted.logprobs)
    # The updates add up to the answer, and to no more.
    for answer in several.outputs:
        mine = [u for u in updates if u.index == answer.index]
        assert [t for u in mine for t in u.token_ids] == answer.token_ids
        assert "".join(u.text for u in mine) == answer.text
        parts = [part for u in mine for part in u.tokens()]
        assert [token for token, _ in parts if token is not None] == answer.token_ids
        assert "".join(text for _, text in parts) == answer.text
        assert [u.finish_reason for u in mine][:-1] == [None] * (len(mine) - 1)
        assert len(mine) < len(answer.token_ids), "steps of several tokens"
    check_kept(engine, several)


def check_kept(engine: Engine, output: Any) -> None:
    """The KV store has nothing of the script after the answers."""
    script, kv = script_of(), engine._scheduler.kv
    whole = [*output.prompt_token_ids, *script, 0]
    longest = max(len(answer.token_ids) for answer in output.outputs)
    found = kv.match(PrefixQuery(whole)).num_tokens(kv.block_size)
    assert found <= len(output.prompt_token_ids) + longest - 1
    assert found >= (len(output.prompt_token_ids) + longest - 1) // 8 * 8, "the rest is there"
    assert kv.usage.num_used_blocks == 0


def test_the_cases_end_in_the_middle_of_a_step() -> None:
    """Otherwise nothing would be cut."""
    cut = 0
    for fields in CASES.values():
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": 30, **fields})
        _, output, updates = scripted(params, NUM_DRAFTS)
        last = [u for u in updates if u.finish_reason is not None][-1]
        cut += len(last.token_ids) < 1 + NUM_DRAFTS
        assert output.outputs[0].finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
    assert cut >= 6


def test_a_token_that_cannot_be_decoded_ends_the_answer(monkeypatch: Any) -> None:
    from mlx_paged.engine.detokenizer import IncrementalDetokenizer

    add, bad = IncrementalDetokenizer.add, script_of()[5]

    def fails(self: IncrementalDetokenizer, token: int) -> str:
        if token == bad:
            raise UnicodeError("injected")
        return add(self, token)

    monkeypatch.setattr(IncrementalDetokenizer, "add", fails)
    params = SamplingParams(temperature=0.0, max_tokens=30, stop=["never"])
    engine, output, _ = scripted(params, NUM_DRAFTS)
    [answer] = output.outputs
    assert answer.finish_reason is FinishReason.ERROR
    assert "UnicodeError: injected" in answer.error.reason
    assert bad not in answer.token_ids
    assert engine._scheduler.kv.usage.num_used_blocks == 0


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    yield made
    made.close()


def test_a_stream_counts_every_token(loop: asyncio.AbstractEventLoop) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=1)
    _, output, updates = scripted(params, NUM_DRAFTS)
    channel = Channel(loop, 1, [])
    for update in updates:
        channel.put(update)

    async def read() -> list[SequenceDelta]:
        found = []
        while (delta := await channel.get()) is not None:
            found.append(delta)
        return found

    deltas = loop.run_until_complete(read())
    [answer] = output.outputs
    assert [t for delta in deltas for t in delta.token_ids] == answer.token_ids
    assert sum(len(delta.logprobs or ()) for delta in deltas) == len(answer.token_ids) == 8
    assert "".join(delta.text for delta in deltas) == answer.text
