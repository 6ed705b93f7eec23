"""The parts of speculation: lookups, acceptance, costs, and the choice of drafts."""

from __future__ import annotations

import random
from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_paged.engine.speculation.acceptance import (
    Acceptance,
    Draft,
    Source,
    kind_of,
    new_counts,
)
from mlx_paged.engine.speculation.config import SpeculativeConfig
from mlx_paged.engine.speculation.costs import Costs, StepCosts
from mlx_paged.engine.speculation.drafter import Drafter, Wanted
from mlx_paged.engine.speculation.learned_costs import LearnedCosts
from mlx_paged.engine.speculation.lookup import SequenceIndex, SharedText, SharedTexts
from mlx_paged.engine.speculation.speculator import Speculator

# --- Lookups --------------------------------------------------------------------------------------


def naive(tokens: list[int], min_match: int, max_match: int) -> tuple[int, int] | None:
    """(length of the longest match of the end, where it ends), the latest of several."""
    best: tuple[int, int] | None = None
    last = len(tokens) - 1
    for end in range(last - 1, 0, -1):
        length = 0
        while length < min(max_match, end + 1) and tokens[end - length] == tokens[last - length]:
            length += 1
        if length >= max(2, min_match) and (best is None or length > best[0]):
            best = length, end
    return best


@pytest.mark.parametrize("seed", range(20))
def test_a_sequence_is_searched_like_by_hand(seed: int) -> None:
    rng = random.Random(seed)
    prompt = [rng.randrange(6) for _ in range(rng.randint(1, 12))]
    tokens = array("I", prompt)
    index = SequenceIndex(tokens, len(prompt))
    for _ in range(30):
        index.update()
        expected = naive(list(tokens), 2, 5)
        match = index.find(min_match=2, max_match=5, max_drafts=4)
        assert (match is None) == (expected is None), list(tokens)
        if match is not None and expected is not None:
            length, end = expected
            assert match.length == length
            text = list(tokens)
            for _ in range(4):  # A draft that reaches the end repeats what it has drafted.
                text.append(text[end + 1 + len(text) - len(tokens)])
            assert list(match.drafts) == text[len(tokens) :]
        tokens.append(rng.randrange(6))


def test_a_shared_text_has_the_latest_answers_only() -> None:
    shared = SharedText(2)
    answers = [[10 * i + j for j in range(6)] for i in range(1, 8)]
    for answer in answers:
        shared.add(answer)

    def found(answer: list[int]) -> Any:
        return shared.find(array("I", answer[:3]), min_match=2, max_match=9, max_drafts=9)

    assert found(answers[-1]).drafts == tuple(answers[-1][3:]), "nothing beyond the answer's end"
    assert found(answers[0]) is None
    assert found(answers[-2]).length == 3
    assert (
        SharedTexts(0).of(None).find(array("I", [1, 2]), min_match=2, max_match=9, max_drafts=9)
        is None
    )


def test_salts_have_texts_of_their_own() -> None:
    texts = SharedTexts(10)
    texts.of("a").add([1, 2, 3, 4])
    tokens = array("I", [1, 2])
    assert texts.of("a").find(tokens, min_match=2, max_match=9, max_drafts=9) is not None
    assert texts.of("b").find(tokens, min_match=2, max_match=9, max_drafts=9) is None
    assert texts.of(None).find(tokens, min_match=2, max_match=9, max_drafts=9) is None


# --- Acceptance and costs -------------------------------------------------------------------------


def test_acceptance_follows_what_happens() -> None:
    acceptance, own = Acceptance(), new_counts()
    kind, other = kind_of(Source.SEQUENCE, 2), kind_of(Source.SEQUENCE, 30)
    before = acceptance.chances(kind, own)
    for _ in range(60):
        acceptance.settle(Draft(2, (5, 6, 7), kind), [0, 0, 5, 6, 9, 9], own)
    after = acceptance.chances(kind, own)
    assert after.first > 0.95 > before.first and 0.4 < after.next < 0.65
    assert acceptance.chances(other, own) == acceptance.chances(other, new_counts())
    for _ in range(60):
        acceptance.settle(Draft(2, (5, 6), kind), [0, 0, 9], own)
    assert acceptance.chances(kind, own).first < 0.1
    unknown = acceptance.chances(kind, own)
    acceptance.settle(Draft(3, (5,), kind), [0, 0, 9], own)  # Nothing of it is known.
    assert acceptance.chances(kind, own) == unknown


def test_costs_are_interpolated_and_corrected() -> None:
    costs = StepCosts((1, 2, 4), (10.0, 10.0, 16.0), (10.0, 12.0, 20.0), context_len=256)
    assert costs.seconds(1, 1, 256) == 10 and costs.seconds(3, 1, 256) == 13
    assert costs.seconds(6, 1, 256) == 22, "beyond the last measurement"
    assert costs.seconds(4, 2, 256) == 18, "two sequences cost 2 more than one with two rows"
    for _ in range(100):
        costs.observe(4, 1, 256, 8.0)
        costs.observe(4, 1, 256, 80.0)  # a disturbance
    assert costs.seconds(4, 1, 256) == pytest.approx(8, rel=0.05)
    assert costs.seconds(1, 1, 256) == 10, "steps without drafts have a factor of their own"


# --- The choice of drafts -------------------------------------------------------------------------


class Always(Drafter):
    """A drafter with one kind of draft."""

    def __init__(self, length: int, match: int) -> None:
        self.length, self.match = length, match

    def draft(self, wanted: list[Wanted]) -> list[Draft | None]:
        kind = kind_of(Source.SEQUENCE, self.match)
        return [
            Draft(len(seq.tokens), (7,) * min(self.length, max_drafts), kind)
            for seq, _, max_drafts in wanted
        ]


def sequence(num_left: int = 1) -> Any:
    tokens = array("I", range(40))
    return SimpleNamespace(
        tokens=tokens,
        num_scheduled_tokens=len(tokens) - num_left,
        num_output_tokens=10,
        max_num_tokens=400,
        drafts=None,
        sampler=SimpleNamespace(takes_drafts=True, prediction=(), forced=lambda tokens: ()),
        is_running=True,
    )


def proposed(
    costs: StepCosts | None,
    sequences: list[Any],
    match: int,
    *,
    max_rows: int | None = None,
    **options: Any,
) -> Any:
    given: list[int] = []
    scheduler = SimpleNamespace(
        running=sequences, propose=lambda seq, tokens: given.append(len(tokens))
    )
    config = SpeculativeConfig(num_speculative_tokens=8, **options)
    speculator = Speculator(config, Always(8, match), costs, max_rows=max_rows)
    speculator.is_active = True
    speculator.propose(scheduler)  # type: ignore[arg-type]
    return speculator, given


FREE = StepCosts((1, 64), (1.0, 1.0), (1.0, 1.0))
DEAR = StepCosts((1, 64), (1.0, 64.0), (1.0, 64.0))


def test_free_rows_are_used_and_dear_ones_are_not() -> None:
    speculator, given = proposed(FREE, [sequence()], match=20)
    assert given == [8] and speculator.is_active
    speculator, given = proposed(DEAR, [sequence()], match=20)
    assert given == [] and not speculator.is_active
    some = StepCosts((1, 3, 5), (1.0, 1.0, 9.0), (1.0, 1.0, 1.0))
    assert proposed(some, [sequence()], match=20)[1] == [2], "as many as cost nothing"


@pytest.mark.parametrize("costs", [None, FREE], ids=["fixed", "adaptive"])
def test_no_step_is_larger_than_products_with_one_order_of_sums(costs: StepCosts | None) -> None:
    sequences = [sequence(), sequence(num_left=3), sequence()]
    assert sum(proposed(costs, sequences, 20, max_rows=15)[1]) == 10
    assert proposed(costs, sequences, 20, max_rows=5)[1] == []


def test_unlikely_drafts_are_not_verified() -> None:
    half = StepCosts((1, 3), (1.0, 2.0), (1.0, 1.0))  # A row more costs half a step.
    assert proposed(half, [sequence()], match=1)[1] == []
    assert proposed(half, [sequence()], match=20)[1] != []
    assert proposed(None, [sequence()], match=1, adaptive=False)[1] == [8], "unless it must"


def test_nothing_is_drafted_while_prompts_fill_the_step() -> None:
    speculator, given = proposed(FREE, [sequence(), sequence(num_left=300)], match=20)
    assert given == [] and not speculator.is_active


def priced(
    rounds: StepCosts, *, num_missing: int = 1, at_once: bool = False
) -> tuple[list[Any], Any]:
    """The speculator, and the requests to a drafter with a price."""
    asked: list[Any] = []
    drafter = Always(8, 1)
    drafter.price = SimpleNamespace(
        rounds=rounds,
        drafts_at_once=at_once,
        kind=lambda seq: kind_of(Source.MODEL, 1),
        num_missing=lambda seq, state: num_missing,
    )

    def draft(wanted: list[Wanted]) -> list[Draft]:
        asked.extend(wanted)
        return [Draft(len(w.seq.tokens), (7,) * w.max_drafts, w.seq.kind) for w in wanted]

    drafter.draft = draft  # type: ignore[method-assign]
    scheduler = SimpleNamespace(
        running=[sequence(), sequence()],
        propose=lambda seq, tokens: None,
        reserve=lambda seq, count: count,
    )
    for seq in scheduler.running:
        seq.kind, seq.tables = kind_of(Source.MODEL, 1), object()
    config = SpeculativeConfig(num_speculative_tokens=8)
    speculator = Speculator(config, drafter, FREE)
    speculator.is_active = True
    speculator.propose(scheduler)  # type: ignore[arg-type]
    return asked, speculator


def test_a_drafter_with_a_price_is_asked_for_what_pays() -> None:
    """A model's drafts are chosen before they are made, by the time of its rounds."""
    asked, _ = priced(StepCosts((1, 64), (0.01, 0.01), (0.01, 0.01)))
    assert [each.max_drafts for each in asked] == [8 - 2] * 2, "until they are too unlikely"
    asked, _ = priced(StepCosts((1, 64), (0.3, 0.3), (0.3, 0.3)))
    assert [each.max_drafts for each in asked] == [2, 2], "a round must bring more than 0.3"
    asked, speculator = priced(StepCosts((1, 64), (0.8, 0.8), (0.8, 0.8)))
    assert asked == [] and not speculator.is_active
    # A block costs one round, whatever its length, and is always made as a whole.
    dear = StepCosts((1, 64), (2.0, 2.0), (2.0, 2.0))
    asked, _ = priced(dear, at_once=True)
    assert [each.max_drafts for each in asked] == []
    fair = StepCosts((1, 64), (0.8, 0.8), (0.8, 0.8))
    assert [each.max_drafts for each in priced(fair, at_once=True)[0]] == [8, 8]
    # Prompts that it lacks are a price, too.
    slow = StepCosts((1, 64), (0.01, 6.4), (0.01, 0.01))
    assert priced(slow)[0] != [] and priced(slow, num_missing=2000)[0] == []


class Clocked:
    """A speculator whose steps take the time that a test says.

    Attributes:
        now: Seconds.
    """

    def __init__(self, costs: Costs) -> None:
        self.now = 0.0
        config = SpeculativeConfig(num_speculative_tokens=8)
        self.speculator = Speculator(config, Always(8, 20), costs, clock=lambda: self.now)
        self.seq = sequence()
        self.seq.request = SimpleNamespace(state=None)
        self.seq.is_finished = False

    def step(
        self, seconds: float, gained: int, num_drafts: int, *, num_prompt_rows: int = 0
    ) -> None:
        """One step of one sequence, and of a prompt's rows."""
        self.now += seconds
        batch = SimpleNamespace(
            has_drafts=num_drafts > 0, samples=[True], is_decode=num_drafts == 0, starts=[40],
            num_seqs=1, num_tokens=1 + num_drafts + num_prompt_rows, num_drafts=[num_drafts],
        )  # fmt: skip
        output: Any = SimpleNamespace(batch=batch, sequences=[self.seq])
        self.speculator.observe(output, [[7] * gained])

    def proposed(self) -> int:
        """Number of drafts of the next step."""
        given = [0]
        scheduler: Any = SimpleNamespace(
            running=[self.seq], propose=lambda seq, tokens: given.append(len(tokens))
        )
        if self.speculator.is_active:
            self.speculator.propose(scheduler)
        return given[-1]


def test_drafts_that_turn_out_slower_end_for_a_while() -> None:
    """Whatever costs and acceptance promise, what counts is the time that passes."""
    run = Clocked(FREE)
    run.speculator.is_active = True
    for _ in range(60):
        run.step(2.0, 3, 8)  # three tokens in the time of two steps
        assert run.speculator.is_active
    for _ in range(60):
        run.step(3.5, 3, 8)
    assert not run.speculator.is_active
    looks = [run.step(1.0, 1, 0) or run.speculator.is_active for _ in range(600)]
    assert not any(looks[:80]) and any(looks), "it tries again later"


@pytest.mark.parametrize("costs", [FREE, LearnedCosts()], ids=["measured", "learned"])
def test_the_loss_is_bounded_if_all_expectations_are_wrong(costs: Costs) -> None:
    """All matches are long, and all drafts are rejected, at the price of a step each."""
    run = Clocked(costs)
    # Rejected drafts are not held against their kind.
    run.speculator._acceptance.settle = lambda *_: None  # type: ignore[method-assign]
    num_steps, num_verified = 4000, 0
    for _ in range(num_steps):
        count = run.proposed()
        num_verified += count
        run.step(1.0 + count, 1, count)
    assert num_verified > 10, "it tries"
    assert run.now < 1.01 * num_steps + 1 + 8


def test_drafts_that_cost_little_need_not_wait_until_a_loss_is_made_up() -> None:
    run = Clocked(StepCosts((1, 2, 64), (1.0, 1.02, 64.0), (1.0, 1.0, 1.0)))
    run.speculator.is_active = True
    run.step(1.0, 1, 0)
    run.step(3.0, 1, 8)
    assert not run.speculator.is_active, "two steps are lost"
    begin = run.now
    while not run.speculator.is_active and run.now < begin + 300:
        run.step(1.0, 1, 0)
    assert 90 < run.now - begin < 150, "until then, one percent of them has made up for it"
    assert run.proposed() == 1, "which loses next to nothing"


def test_costs_are_learned_from_steps_alone() -> None:
    """Likely drafts come first; when they turn out cheap, others follow, and then longer ones."""
    costs = LearnedCosts()
    for _ in range(30):
        costs.observe(1, 1, 100, 0.010)
    assert costs.seconds(3, 1, 100) == pytest.approx(0.010 * (1 + 2 * 0.6))
    for _ in range(30):
        costs.observe(3, 1, 100, 0.011)
        costs.observe(9, 1, 100, 0.030)
    assert costs.seconds(3, 1, 100) == pytest.approx(0.011, rel=0.02)
    assert costs.seconds(9, 1, 100) == pytest.approx(0.030, rel=0.02)
    assert costs.seconds(17, 1, 100) == pytest.approx(0.050, rel=0.05), "as the nearest"
    for _ in range(60):
        costs.observe(1, 1, 2000, 0.020)  # Contexts have grown.
    assert costs.seconds(9, 1, 2000) == pytest.approx(0.060, rel=0.05)
    for _ in range(8):
        costs.age()
    assert costs.seconds(2, 1, 2000) == pytest.approx(0.020 * 1.6, rel=0.02)


def test_measured_costs_hold_until_steps_of_their_size_tell_more() -> None:
    costs = LearnedCosts(StepCosts((1, 2, 4, 8), (1.0, 1.1, 1.3, 1.7), (1.0, 1.5, 2.5, 4.5)))
    costs.observe(1, 1, 100, 0.020)  # A machine that is busier now.
    assert costs.seconds(4, 1, 100) == pytest.approx(0.026)
    assert costs.seconds(8, 1, 100) == pytest.approx(0.034)
    for _ in range(30):
        costs.observe(4, 1, 100, 0.040)
    assert costs.seconds(4, 1, 100) == pytest.approx(0.040, rel=0.02)
    assert costs.seconds(8, 1, 100) == pytest.approx(0.034), "another size"
    for _ in range(12):
        costs.age()
    assert costs.seconds(4, 1, 100) == pytest.approx(0.026, rel=0.03)


def test_steps_of_other_numbers_of_sequences_are_expected_to_be_rather_short() -> None:
    """Otherwise drafts would seem to pay while sequences end, and no other step would tell."""
    costs = LearnedCosts()
    costs.observe(8, 8, 100, 0.032)
    assert costs.seconds(4, 4, 100) == pytest.approx(0.016)
    assert costs.seconds(16, 16, 100) == pytest.approx(0.032)
    costs.observe(4, 4, 100, 0.020)
    assert costs.seconds(6, 6, 100) == pytest.approx(0.026)


def test_the_first_step_of_a_size_compiles_and_is_not_counted() -> None:
    costs = LearnedCosts()
    costs.observe(1, 1, 100, 1.0)
    costs.observe(2, 1, 100, 50.0)
    assert costs.seconds(2, 1, 100) == pytest.approx(1.6)


def test_steps_with_drafts_and_prompts_teach_no_costs() -> None:
    costs = LearnedCosts()
    run = Clocked(costs)
    for _ in range(3):
        run.step(1.0, 1, 0)
    run.speculator.is_active = True
    before = costs.seconds(33, 1, 40)
    for _ in range(3):
        run.step(40.0, 2, 2, num_prompt_rows=30)
    assert costs.seconds(33, 1, 40) == before
    for _ in range(3):
        run.step(4.0, 2, 32)
    assert costs.seconds(33, 1, 40) < before


def test_the_time_of_compiling_a_size_counts_before_its_first_step() -> None:
    measured = StepCosts((1, 2, 4), (1.0, 1.1, 1.3), (1.0, 1.1, 1.3), compiling=0.8)
    costs = LearnedCosts(measured)
    costs.observe(1, 1, 100, 2.0)  # A machine that is busier now.
    assert costs.seconds(4, 1, 100) == pytest.approx(2.6), "compiled at start"
    assert costs.seconds(3, 1, 100) == pytest.approx(2.4 + 2 * 0.8 / 8)
    costs.observe(3, 1, 100, 4.0)
    assert costs.seconds(3, 1, 100) == pytest.approx(2.4)


def test_long_looks_become_rare() -> None:
    """They may take half a percent of the time, whatever the number of sequences."""
    run = Clocked(LearnedCosts())
    looks = 0

    def draft(wanted: list[Wanted]) -> list[Draft | None]:
        nonlocal looks
        looks += 1
        run.now += 0.5  # half a step
        return [None] * len(wanted)

    run.speculator._drafter.draft = draft  # type: ignore[method-assign]
    for _ in range(2000):
        run.step(1.0, 1, 0)
    assert 10 <= looks <= 22


def test_old_experience_with_a_model_is_forgotten() -> None:
    """Otherwise, one bad answer could end its drafts for good."""
    acceptance, kind = Acceptance(), kind_of(Source.MODEL, 1)
    before = acceptance.chances(kind, new_counts())
    for _ in range(100):
        acceptance.settle(Draft(0, (1,), kind), [2], new_counts())
    assert acceptance.chances(kind, new_counts()).first < 0.1
    for _ in range(12):
        acceptance.fade()
    assert acceptance.chances(kind, new_counts()) == pytest.approx(before, abs=0.02)


def test_a_callers_token_mask_gets_no_drafts() -> None:
    masked = sequence()
    masked.sampler.takes_drafts = False
    assert proposed(FREE, [masked], match=20)[1] == []
