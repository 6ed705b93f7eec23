"""Drafts: a step verifies them, a sequence gains several tokens, and wrong ones leave no trace."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from support.fake_model import FakeEngine, next_token
from support.scheduling_helpers import OVERLAP, check_outputs, make, request

from mlx_paged.core import FinishReason, PrefixQuery, Sequence, StateGroupSpec, WindowGroupSpec
from mlx_paged.errors import IntegrityError

WINDOW = WindowGroupSpec(40, 5, lambda position: max(0, position - 4))
GROUPS = pytest.mark.parametrize(
    "groups",
    [{}, {"windows": [WINDOW]}, {"states": StateGroupSpec(60)},
     {"windows": [WINDOW], "states": StateGroupSpec(60)}],
    ids=["full", "window", "state", "all"],
)  # fmt: skip


def follows(seq: Sequence, count: int) -> list[int]:
    """The next tokens of a sequence."""
    tokens = list(seq.tokens)
    for _ in range(count):
        tokens.append(next_token(tokens, seq.index))
    return tokens[len(seq.tokens) :]


def drafter(rng: random.Random, *, right: float, most: int = 3) -> Callable[[Sequence], list[int]]:
    """Guesses that are right with a given probability each."""

    def draft(seq: Sequence) -> list[int]:
        tokens = follows(seq, rng.randint(0, most))
        return [token if rng.random() < right else (token + 1) % 61 for token in tokens]

    return draft


@OVERLAP
@GROUPS
@pytest.mark.parametrize("right", [0.0, 0.7, 1.0])
def test_answers_are_those_without_drafts(overlap: bool, groups: dict[str, Any], right: float):
    rng = random.Random(1)
    engine = make(num_blocks=60, overlap=overlap, max_num_batched_tokens=24, **groups)
    engine.drafter = drafter(rng, right=right)
    requests = [
        request(str(i), [rng.randrange(9) for _ in range(rng.randint(1, 14))], 12, n=1 + i % 2)
        for i in range(8)
    ]
    for r in requests:
        engine.scheduler.add(r)
    while engine.scheduler.has_unfinished or engine.running:
        engine.step()
        engine.scheduler.check_integrity()
    check_outputs(engine, *requests)
    drafts = [row.num_drafts for batch in engine.batches for row in batch.sequences]
    # (With overlap the newest token is in flight whenever a step is scheduled.)
    assert sum(drafts) > 20 or overlap, "some were verified"


@OVERLAP
@GROUPS
def test_pressure_preempts_sequences_with_drafts(overlap: bool, groups: dict[str, Any]) -> None:
    rng = random.Random(2)
    engine = make(num_blocks=9, overlap=overlap, max_num_batched_tokens=16, **groups)
    engine.drafter = drafter(rng, right=0.6)
    requests = [request(str(i), [i] * 4, 10) for i in range(4)]
    for r in requests:
        engine.scheduler.add(r)
    while engine.scheduler.has_unfinished or engine.running:
        engine.step()
        engine.scheduler.check_integrity()
    assert engine.scheduler.num_preemptions > 0
    check_outputs(engine, *requests)


def run_to_first_token(r: Any, **options: Any) -> tuple[FakeEngine, Sequence]:
    engine = make(num_blocks=40, **options)
    [seq] = engine.scheduler.add(r)
    engine.step()
    assert seq.num_output_tokens == 1
    return engine, seq


def test_all_drafts_of_a_step_and_one_token_more_are_gained() -> None:
    engine, seq = run_to_first_token(request("r", [1, 2, 3], 20))
    engine.drafter = lambda seq: follows(seq, 2)
    engine.step()
    [row] = engine.batches[-1].sequences
    assert (row.num_tokens, row.num_drafts, seq.num_output_tokens) == (3, 2, 4)
    assert seq.num_computed_tokens == seq.num_scheduled_tokens == len(seq.tokens) - 1


def test_wrong_drafts_are_taken_back() -> None:
    engine, seq = run_to_first_token(request("r", [1, 2, 3], 20))
    first, _ = follows(seq, 2)
    wrong = (follows(seq, 2)[1] + 1) % 61
    engine.drafter = lambda seq: [first, wrong, 5]
    engine.step()
    assert seq.num_output_tokens == 3 and wrong not in seq.tokens[-1:]
    assert seq.num_computed_tokens == seq.num_scheduled_tokens == len(seq.tokens) - 1
    assert seq.draft_token_ids == ()
    engine.scheduler.check_integrity()


def test_a_state_that_saw_a_wrong_draft_is_not_used() -> None:
    """The slot of before is kept, and what was accepted is computed again from it."""
    engine, seq = run_to_first_token(request("r", [1, 2, 3], 20), states=StateGroupSpec(20))
    before, first = seq.num_computed_tokens, follows(seq, 1)[0]
    engine.drafter = lambda seq: [first, (follows(seq, 2)[1] + 1) % 61]
    engine.step()
    assert seq.num_computed_tokens == before and len(seq.tokens) == before + 3
    engine.drafter = None
    engine.step()
    [row] = engine.batches[-1].sequences
    assert (row.start, row.num_tokens, row.samples) == (before, 3, True)
    engine.run()
    engine.scheduler.check_integrity()


@pytest.mark.parametrize("at", [1, 2, 3])
def test_nothing_after_a_stop_token_is_gained_or_kept(at: int) -> None:
    """The stop token is the first, second or third of four tokens of a step."""
    _, seq = run_to_first_token(request("r", [1, 2, 3, 4, 5], 30))
    tokens = follows(seq, 4)
    assert len(set(tokens)) == 4, "the case is of use"
    stop = frozenset({tokens[at - 1]})
    engine, seq = run_to_first_token(
        request("r", [1, 2, 3, 4, 5], 30, stop={"eos_token_ids": stop})
    )
    engine.drafter = lambda seq: follows(seq, 3)
    engine.step()
    assert engine.outputs[seq.seq_id] == list(seq.tokens[5:]) == [seq.tokens[5], *tokens[:at]]
    assert engine.reasons[seq.seq_id] is FinishReason.STOP
    kept = engine.scheduler.kv.match(PrefixQuery([*seq.tokens, *tokens[at:], 0]))
    assert kept.num_tokens(engine.scheduler.kv.block_size) <= len(seq.tokens) - 1
    assert engine.scheduler.kv.usage.num_used_blocks == 0
    engine.scheduler.check_integrity()


def test_a_limit_is_not_exceeded() -> None:
    for most in range(1, 7):
        engine, seq = run_to_first_token(request("r", [1, 2, 3], 1 + most))
        engine.drafter = lambda seq: follows(seq, 5)
        engine.run()
        assert seq.num_output_tokens == 1 + most
        assert engine.reasons[seq.seq_id] is FinishReason.LENGTH


def test_drafts_are_within_the_budget_and_every_decode_has_a_token() -> None:
    engine = make(num_blocks=60, max_num_batched_tokens=8)
    requests = [request(str(i), [i], 12) for i in range(5)]
    for r in requests:
        engine.scheduler.add(r)
    engine.step()
    engine.drafter = lambda seq: follows(seq, 3)
    engine.step()
    assert [row.num_tokens for row in engine.batches[-1].sequences] == [4, 1, 1, 1, 1]
    engine.run()
    check_outputs(engine, *requests)


def test_drafts_behind_a_token_in_flight_are_not_used() -> None:
    engine = make(num_blocks=40, overlap=True)
    [seq] = engine.scheduler.add(request("r", [1, 2, 3], 9))
    engine.drafter = lambda seq: [7, 7]
    engine.step()
    engine.step()
    assert engine.batches[-1].sequences[0].awaits_token
    assert engine.batches[-1].sequences[0].num_drafts == 0 and seq.draft_token_ids == ()


def test_an_integrity_check_finds_too_many_scheduled_tokens() -> None:
    engine, seq = run_to_first_token(request("r", [1, 2, 3], 9))
    seq.num_scheduled_tokens = len(seq.tokens) + 2
    with pytest.raises(IntegrityError, match="scheduled"):
        engine.scheduler.check_integrity()
