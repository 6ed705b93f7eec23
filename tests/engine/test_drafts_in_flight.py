"""Drafts that the host reads together with their verification: answers and counts do not change."""

from __future__ import annotations

import random
from array import array
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from typing import Any

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map
from support.embedded_llm import PROMPTS, check_at_rest, make, tokens_of
from support.models import embedded_twin

from mlx_paged import LLM, RequestOutput, SamplingParams
from mlx_paged.core import StepBatch
from mlx_paged.engine.input_tokens import DraftsInFlight, input_tokens
from mlx_paged.engine.speculation.costs import StepCosts
from mlx_paged.model.loader import LoadedModel

TIGHT: dict[str, Any] = {"num_gpu_blocks_override": 34, "block_size": 8}


def rough_twin() -> LoadedModel:
    """The embedded model with noise in its weights: many of its drafts are right, not all."""
    loaded = embedded_twin()
    mx.random.seed(5)
    rough = tree_map(
        lambda w: w * (1 + 0.08 * mx.random.normal(w.shape)), loaded.model.parameters()
    )
    loaded.model.update(rough)
    mx.eval(loaded.model.parameters())
    return loaded


def drafting(**options: Any) -> LLM:
    config = {"method": "draft_model", "model": rough_twin(), "num_speculative_tokens": 3}
    config["adaptive"] = False
    return make(speculative_config=config, **options)


def params_of(count: int) -> list[SamplingParams]:
    """Greedy and sampled requests. Some end early."""
    return [
        SamplingParams(
            temperature=(0.0, 1.0, 0.7)[i % 3],
            seed=i,
            max_tokens=8 + 2 * (i % 9),
            stop_token_ids=[12, 40, 77] if i % 4 == 1 else [],
            logprobs=2 if i % 5 == 0 else None,
        )
        for i in range(count)
    ]


class Run:
    """Answers all prompts with an engine, and aborts some of them on the way.

    Attributes:
        num_in_flight, num_read: Steps whose drafts the host did not know at their launch, or knew.
    """

    def __init__(self, llm: LLM, params: list[SamplingParams], *, aborts: bool = False) -> None:
        self.num_in_flight = self.num_read = 0
        engine, executor, rng = llm.engine, llm.engine._executor, random.Random(2)
        launch = executor.launch

        def counting(batch: StepBatch) -> None:
            if batch.drafts_in_flight is not None:
                self.num_in_flight += 1
            elif batch.has_drafts:
                self.num_read += 1
            launch(batch)

        executor.launch = counting  # type: ignore[method-assign]
        self.outputs = [
            engine.add_request(str(i), tokens_of(PROMPTS[i % 16]), each)
            for i, each in enumerate(params)
        ]
        left = [str(i) for i in range(2, len(params), 5)] if aborts else []
        while engine.has_unfinished:
            engine.step()
            engine.check_integrity()
            if left and rng.random() < 0.2:
                engine.abort(left.pop())
        executor.launch = launch  # type: ignore[method-assign]
        check_at_rest(llm)

    @property
    def answers(self) -> list[tuple[list[int], object]]:
        return [(list(o.outputs[0].token_ids), o.outputs[0].finish_reason) for o in self.outputs]

    @property
    def drafts(self) -> list[tuple[int, int]]:
        return [(o.num_accepted_drafts, o.num_rejected_drafts) for o in self.outputs]


def logprobs_of(output: RequestOutput) -> list[float]:
    return [each.logprob for each in output.outputs[0].logprobs or ()]


def test_answers_and_counts_are_those_of_drafts_that_are_read() -> None:
    """Sequences are preempted and aborted, and end in the middle of their drafts. The second time,
    prompts are in the prefix cache."""
    params = params_of(12)
    expected = Run(make(**TIGHT), params)
    ours, theirs = drafting(**TIGHT), drafting(**TIGHT)
    assert theirs.engine._speculator is not None
    theirs.engine._speculator._reads_drafts = True
    for aborts in (True, False):
        found, read = (Run(llm, params, aborts=aborts) for llm in (ours, theirs))
        assert found.num_in_flight > 8 and not found.num_read
        assert read.num_read == found.num_in_flight and not read.num_in_flight
        assert found.answers == read.answers and found.drafts == read.drafts
    assert ours.stats().spec_decoding == theirs.stats().spec_decoding
    assert ours.stats().num_preemptions > 0 and ours.stats().counters == theirs.stats().counters
    assert found.answers == expected.answers
    accepted, rejected = map(sum, zip(*found.drafts))
    assert accepted > 30 and rejected > 10
    assert [*map(logprobs_of, found.outputs)] == [*map(logprobs_of, read.outputs)]


def test_a_request_with_edits_makes_its_company_wait_for_drafts() -> None:
    params = params_of(4)
    params[3] = SamplingParams(temperature=0.8, seed=3, max_tokens=9, repetition_penalty=1.3)
    found = Run(drafting(), params)
    assert found.num_read > 0 and found.num_in_flight > 0
    assert found.answers == Run(make(), params).answers


def test_the_thread_that_reads_drafts_need_not_have_launched_them() -> None:
    params = params_of(4)
    llm, expected = drafting(), Run(make(), params)
    engine, step = llm.engine, llm.engine.step
    with ThreadPoolExecutor(1) as other:
        turns = cycle([step, lambda: other.submit(step).result()])
        engine.step = lambda: next(turns)()  # type: ignore[method-assign]
        found = Run(llm, params)
    assert found.num_in_flight > 4 and found.answers == expected.answers


class Broken:
    """Tokens that no device could compute."""

    def __array__(self, *args: Any, **options: Any) -> np.ndarray:
        raise RuntimeError("the draft model failed")

    def __getitem__(self, index: Any) -> mx.array:
        raise RuntimeError("the draft model failed")


@pytest.mark.parametrize("breaks", [False, True], ids=["step", "drafts"])
def test_a_failed_step_runs_in_parts_with_its_drafts(breaks: bool) -> None:
    """If the drafts failed, it verifies wrong ones."""
    params = params_of(4)
    llm = drafting()
    runner, num_failed = llm.engine._runner, 0
    launch = runner.launch

    def failing(batch: StepBatch, *args: Any) -> Any:
        nonlocal num_failed
        if batch.drafts_in_flight is not None and num_failed < 3:
            num_failed += 1
            if not breaks:
                raise RuntimeError("the device is busy")
            batch.drafts_in_flight = DraftsInFlight(Broken(), batch.drafts_in_flight.indices)  # type: ignore[arg-type]
        return launch(batch, *args)

    runner.launch = failing  # type: ignore[method-assign]
    found = Run(llm, params)
    assert num_failed == 3 and found.answers == Run(make(), params).answers
    assert sum(accepted for accepted, _ in found.drafts) > 8


def test_some_drafts_are_waited_for_to_learn_their_cost() -> None:
    llm = drafting()
    speculator = llm.engine._speculator
    assert speculator is not None
    fast = StepCosts((1, 64), (1.0, 1.0), (1.0, 1.0))
    speculator._costs, speculator._drafter.rounds = fast, StepCosts((1,), (0.1,), (0.1,))  # type: ignore[attr-defined]
    speculator._ledger.saved(1e6)
    found = Run(llm, [SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)])
    assert found.num_in_flight > 3 * found.num_read > 0


def test_rows_take_their_drafts_from_the_device() -> None:
    """A step may verify fewer drafts than were made, and has rows without any."""
    drafts = DraftsInFlight(mx.array([50, 51, 52, 53, 54], dtype=mx.int32), {7: [0, 2, 4], 9: [1]})
    batch = StepBatch(
        seq_ids=[7, 8, 9, 6],
        token_ids=array("I", [1, 0, 0, 2, 30, 3, 0, 4, 5]),
        query_lens=array("q", [3, 2, 2, 2]),
        samples=[True] * 4,
        input_from=array("i", [-1] * 4),
        num_drafts=array("i", [2, 1, 1, 0]),
        drafts_in_flight=drafts,
    )
    expected = [1, 50, 52, 2, 30, 3, 51, 4, 5]
    tokens = input_tokens(batch, np.array([0, 3, 5, 7]), None, num_padding=2)
    assert tokens.tolist() == [*expected, 0, 0]
    assert batch.drafts() == [(0, 0), (30,), (0,), ()]
    drafts.fill(batch)
    assert batch.token_ids.tolist() == expected and batch.drafts_in_flight is None
    assert batch.drafts() == [(50, 52), (30,), (51,), ()]
