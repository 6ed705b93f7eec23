"""Speculator: decides which drafts a step verifies.

It is *active* while drafts are expected to pay off. Then a step is planned after the previous one
has been read, because drafts begin after a known token. Otherwise steps overlap as without
speculation, and the speculator only watches: it compares unverified drafts with the sampled tokens
to learn when to begin. A model's drafts cost time, so none are made just to be watched; their
estimated gain slowly returns to its initial value.

A model's drafts stay on the device: the step that verifies them is launched while the draft model
still runs, and the host reads both together. Until then, the scheduler and the batch hold zeros
instead. Now and then the host waits for the drafts, to measure their cost.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

from mlx_paged.core import Scheduler, SchedulerOutput, StepBatch
from mlx_paged.core import Sequence as CoreSequence
from mlx_paged.engine.faults import reason_of
from mlx_paged.engine.input_tokens import DraftsInFlight
from mlx_paged.engine.speculation.acceptance import Acceptance, Draft, Source, kind_of, source_of
from mlx_paged.engine.speculation.config import SpeculativeConfig
from mlx_paged.engine.speculation.costs import Costs
from mlx_paged.engine.speculation.drafter import Drafter, DraftState, StartedDrafts, Wanted
from mlx_paged.engine.speculation.ledger import Ledger
from mlx_paged.engine.speculation.predicted import PredictedAnswer
from mlx_paged.engine.stats import SpecDecodingStats

logger = logging.getLogger(__name__)

# Steps without drafts after which estimates for drafts have aged.
_STEPS_UNTIL_AGED = 256
# The expected gain at which drafts begin, and below which they end.
_BEGIN_AT, _END_AT = 1.05, 1.01
_GAIN_WEIGHT = 0.25
# Maximum rows of a step with drafts: more would delay other sequences.
_MAX_ROWS = 256
# Maximum share of the time spent on looks.
_LOOK_SHARE = 0.005
# The host waits for one in this many rounds of drafts with a price, to time it.
_MEASURED_ONCE_IN = 8
# A sequence is expected to continue for as many tokens as its answer has, and at least for these.
_MIN_FUTURE = 16


@dataclass(slots=True)
class _Proposal:
    """Drafts of a sequence.

    Attributes:
        kind: See `kind_of`.
        gains: Expected number of tokens that each draft adds.
        draft: None if the drafts have a price and are not made yet.
        seconds: Price of the tokens that the drafter lacks, per token of the rest of the answer.
    """

    wanted: Wanted
    kind: int
    gains: list[float]
    draft: Draft | None = None
    seconds: float = 0.0


class _Started(NamedTuple):
    """Drafts in flight, and their sequences."""

    drafts: StartedDrafts
    wanted: list[Wanted]


class Speculator:
    """Proposes drafts for the sequences of a scheduler.

    Args:
        drafter: Guesses the tokens. If it raises, speculation ends.
        lookup: A second drafter, without a price. Its drafts are used where they are expected to
            add more tokens. None: there is only `drafter`.
        costs: Estimates the time of steps; None verifies all drafts.
        max_rows: Drafts make no step larger than this, because products of more rows may have
            other sums.
        reads_drafts: True if the host must know all drafts of a step before its launch.
        clock: Seconds of a monotonic clock.

    Attributes:
        is_active: True if the next step may have drafts, so that it must wait for the one before.
        stats: Drafts so far.
    """

    def __init__(
        self,
        config: SpeculativeConfig,
        drafter: Drafter,
        costs: Costs | None,
        *,
        lookup: Drafter | None = None,
        max_rows: int | None = None,
        reads_drafts: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._config = config
        self._drafter = drafter
        self._lookup = lookup
        self._costs = costs if config.adaptive else None
        self._max_rows = _MAX_ROWS if max_rows is None else min(max_rows, _MAX_ROWS)
        self._reads_drafts = reads_drafts
        self._clock = clock
        self._acceptance = Acceptance()
        # Drafts whose tokens came, to be compared while the next step runs.
        self._unsettled: list[tuple[Draft, CoreSequence, DraftState]] = []
        self._started: _Started | None = None
        self._num_begun = 0  # rounds of drafts that cost time
        self._gain = 1.0  # expected tokens per second, relative to no drafts
        self._ledger = Ledger()
        self._until_look = 1  # steps
        self._num_watched = 0  # steps since the last draft
        self._committed_at: float | None = None
        self._step_seconds = 0.0  # of a step without drafts
        self._drafting = 0.0  # seconds since then that went into drafts
        self._is_broken = False
        self.is_active = self._costs is None
        self.stats = SpecDecodingStats.zero(config.max_drafts)

    def reset(self) -> None:
        """Forgets the step before, because an exception may have interrupted it."""
        self._committed_at, self._drafting = None, 0.0
        self._unsettled.clear()
        self._started = None
        for drafter in self._drafters:
            self._call(drafter.reset)

    @property
    def _drafters(self) -> tuple[Drafter, ...]:
        return (self._drafter,) if self._lookup is None else (self._lookup, self._drafter)

    def _give_up(self, error: Exception) -> None:
        """Ends speculation, because the drafter failed. Requests continue without it."""
        if not self._is_broken:
            logger.warning(
                "speculation is off from now on, because its drafter failed: %s", reason_of(error)
            )
            logger.debug("where it failed", exc_info=error)
        self._is_broken, self.is_active = True, False

    # Before a step.

    def propose(self, scheduler: Scheduler) -> None:
        """Gives drafts to the running sequences. No step is in flight."""
        self._finish_drafts()
        ready: list[CoreSequence] = []
        for seq in scheduler.running:
            num_left = len(seq.tokens) - seq.num_scheduled_tokens
            # After rejected drafts, a recurrent state recomputes the accepted ones.
            is_ready = 1 <= num_left <= 2 + self._config.max_drafts
            if is_ready and seq.num_output_tokens:
                ready.append(seq)
            elif num_left > 1 and self._costs is not None:
                self.is_active = False  # Prompts fill the step.
                self._call(self._drafter.flush)
                return
        proposals = self._proposals(ready)
        counts = self._choose(ready, proposals)
        self._make_drafts(scheduler, proposals, counts)
        for proposal, count in zip(proposals, counts):
            if count and proposal.draft is not None:
                scheduler.propose(proposal.wanted.seq, proposal.draft.tokens[:count])
        self._call(self._drafter.flush)

    def _make_drafts(
        self, scheduler: Scheduler, proposals: list[_Proposal], counts: list[int]
    ) -> None:
        """Makes the chosen drafts that have a price."""
        chosen = []
        for proposal, count in zip(proposals, counts):
            if count and proposal.draft is None:
                seq, state, room = proposal.wanted
                num_reserved = scheduler.reserve(seq, room if self._drafts_at_once else count)
                if num_reserved:
                    chosen.append((proposal, Wanted(seq, state, num_reserved)))
        if not chosen:
            return
        self._num_watched = 0
        all_wanted = [wanted for _, wanted in chosen]
        began = self._clock()
        try:
            started = self._drafter.begin(all_wanted)
        except Exception as error:
            self._give_up(error)
            return
        # A first round with a prompt takes longer than other rounds, so it is measured.
        is_usual = all(proposal.seconds == 0 for proposal, _ in chosen)
        if started.in_flight is not None and is_usual and not self._must_read():
            self._started = _Started(started, all_wanted)
            self._drafting = self._expected_seconds(all_wanted)
            indices = started.in_flight.indices
            for proposal, wanted in chosen:
                if count := len(indices.get(wanted.seq.seq_id, ())):
                    proposal.draft = Draft(len(wanted.seq.tokens), (0,) * count, proposal.kind)
            return
        drafts = self._finish(started, all_wanted)
        self._drafting = self._clock() - began
        for (proposal, _), draft in zip(chosen, drafts):
            proposal.draft = draft
        if is_usual:
            self._learn_price(all_wanted)

    def _must_read(self) -> bool:
        """True if the host waits for the drafts in flight."""
        if self._costs is None:
            return self._reads_drafts
        price = self._drafter.price
        is_measured = self._num_begun % _MEASURED_ONCE_IN == 0
        self._num_begun += 1
        return self._reads_drafts or is_measured or price is None or price.rounds is None

    def _finish(self, started: StartedDrafts, all_wanted: list[Wanted]) -> list[Draft | None]:
        """Waits for drafts. Errors end only speculation."""
        try:
            drafts = started.finish()
        except Exception as error:
            self._give_up(error)
            return [None] * len(all_wanted)
        for wanted, draft in zip(all_wanted, drafts):
            wanted.state.pending = draft
        return drafts

    def take_in_flight(self) -> DraftsInFlight | None:
        """Returns the drafts of the last planned step that the host does not know; None if there
        are none."""
        if self._started is None:
            return None
        for wanted in self._started.wanted:
            wanted.seq.draft_token_ids = ()  # of sequences that the step could not take
        return self._started.drafts.in_flight

    def _finish_drafts(self) -> None:
        """Reads drafts that were in flight."""
        if self._started is not None:
            drafts, all_wanted = self._started
            self._started = None
            self._finish(drafts, all_wanted)

    def _expected_seconds(self, drafted: list[Wanted]) -> float:
        """Returns the expected time of a round of drafts, in seconds."""
        context_len = sum(len(each.seq.tokens) for each in drafted) / len(drafted)
        counts = Counter(
            number
            for each in drafted
            for number in range(1 if self._drafts_at_once else each.max_drafts)
        )
        return sum(self._round_seconds(count, context_len) for count in counts.values())

    def _draft(self, drafter: Drafter, wanted: list[Wanted]) -> list[Draft | None]:
        """Calls `draft` of a drafter. Its errors end only speculation."""
        try:
            return drafter.draft(wanted)
        except Exception as error:
            self._give_up(error)
            return [None] * len(wanted)

    def _learn_price(self, drafted: list[Wanted]) -> None:
        """Corrects the price by the time that the last drafts took."""
        price = self._drafter.price
        if price is None or price.rounds is None:
            return
        num_rounds, num_seqs = 1, len(drafted)
        if not price.drafts_at_once:
            num_rounds = max(each.max_drafts for each in drafted)
            num_seqs = max(1, round(sum(each.max_drafts for each in drafted) / num_rounds))
        context_len = sum(len(each.seq.tokens) for each in drafted) / len(drafted)
        num_rows = num_seqs * self._rows_of_round
        price.rounds.observe(num_rows, num_seqs, context_len, self._drafting / num_rounds)

    def _proposals(self, sequences: Iterable[CoreSequence]) -> list[_Proposal]:
        """Looks for drafts, and remembers them until their tokens are known."""
        proposals, wanted = [], []
        for seq in sequences:
            state = _state_of(seq)
            if state is None:
                continue
            if state.pending is not None:
                self._unsettled.append((state.pending, seq, state))
                state.pending = None
            # The last token of an answer is never a draft.
            room = min(self._config.max_drafts, seq.max_num_tokens - len(seq.tokens) - 1)
            if room <= 0:
                continue
            each = Wanted(seq, state, room)
            # Forced tokens and the caller's prediction take precedence over the drafters.
            forced: tuple[int, ...] = seq.sampler.forced(seq.tokens)[:room]
            draft = None
            if forced:
                draft = Draft(len(seq.tokens), forced, kind_of(Source.GRAMMAR, 1))
            elif state.predicted is not None:
                draft = _predicted(each, state.predicted)
            if draft is not None:
                proposals.append(self._proposal(each, draft))
            else:
                wanted.append(each)
        if self._drafter.price is None:
            return proposals + self._found(self._drafter, wanted)
        priced = [self._priced(each) for each in wanted]
        if self._lookup is None or not wanted:
            return proposals + priced
        found = {id(each.wanted.state): each for each in self._found(self._lookup, wanted)}
        for of_model in priced:
            state = of_model.wanted.state
            looked_up = found.get(id(state))
            if looked_up is None or sum(looked_up.gains) < sum(of_model.gains):
                state.pending = None
                proposals.append(of_model)
            else:
                proposals.append(looked_up)
        return proposals

    def _found(self, drafter: Drafter, wanted: list[Wanted]) -> list[_Proposal]:
        """Returns the drafts of a drafter without a price."""
        drafts = zip(wanted, self._draft(drafter, wanted))
        return [self._proposal(each, draft) for each, draft in drafts if draft is not None]

    def _proposal(self, wanted: Wanted, draft: Draft) -> _Proposal:
        wanted.state.pending = draft
        gains = self._gains(wanted, draft.kind, len(draft.tokens))
        return _Proposal(wanted, draft.kind, gains, draft)

    def _priced(self, wanted: Wanted) -> _Proposal:
        """Returns a proposal of drafts that are not made yet."""
        price = self._drafter.price
        assert price is not None
        wanted = wanted._replace(max_drafts=min(wanted.max_drafts, self._config.max_model_drafts))
        seq, state, max_drafts = wanted
        kind = price.kind(seq)
        proposal = _Proposal(wanted, kind, self._gains(wanted, kind, max_drafts))
        if price.rounds is not None and seq.tables is not None:
            num_missing = price.num_missing(seq, state)
            if num_missing > 1 + max_drafts:
                seconds = price.rounds.seconds(num_missing, 1, len(seq.tokens))
                proposal.seconds = seconds / max(_MIN_FUTURE, seq.num_output_tokens)
        return proposal

    def _gains(self, wanted: Wanted, kind: int, num_drafts: int) -> list[float]:
        first, later = self._acceptance.chances(kind, wanted.state.counts)
        gains, chance = [], first
        for _ in range(num_drafts):
            if chance < self._config.suffix_decoding_min_token_prob and self._costs is not None:
                break
            gains.append(chance)
            chance *= later
        return gains

    def _choose(self, ready: Sequence[CoreSequence], proposals: list[_Proposal]) -> list[int]:
        """Returns how many drafts of each proposal to verify, and updates the expected gain."""
        counts = [0] * len(proposals)
        # A sequence with a recurrent state also recomputes the drafts that it accepted.
        num_rows = sum(len(seq.tokens) - seq.num_scheduled_tokens for seq in ready)
        room = max(0, self._max_rows - num_rows)
        if self._costs is None:
            by_depth = [
                (depth, i) for i, each in enumerate(proposals) for depth in range(len(each.gains))
            ]
            for _, i in sorted(by_depth)[:room]:
                counts[i] += 1
            return counts
        if not ready:
            return counts
        num_seqs = len(ready)
        context_len = sum(len(seq.tokens) for seq in ready) / num_seqs
        plain = num_seqs / self._costs.seconds(num_seqs, num_seqs, context_len)
        # Each sequence's gains decrease, so the best drafts overall are a prefix of each one's.
        ordered = sorted(
            (
                (gain, depth, i)
                for i, proposal in enumerate(proposals)
                for depth, gain in enumerate(proposal.gains)
            ),
            key=lambda each: -each[0],
        )
        num_best, best = self._fastest(ordered[:room], proposals, num_seqs, context_len, plain)
        for _, _, i in ordered[:num_best]:
            counts[i] += 1
        self._gain += _GAIN_WEIGHT * (best / plain - self._gain)
        is_worth_it = self._gain > (_END_AT if self.is_active else _BEGIN_AT)
        self.is_active = is_worth_it and self._ledger.balance > 0 and not self._is_broken
        return counts

    def _fastest(
        self,
        ordered: Sequence[tuple[float, int, int]],
        proposals: Sequence[_Proposal],
        num_seqs: int,
        context_len: float,
        plain: float,
    ) -> tuple[int, float]:
        """Finds how many leading drafts give the most tokens per second.

        Args:
            ordered: (gain, number of drafts before it in its proposal, index of the proposal) of
                each draft, the most likely first.
            plain: Tokens per second without drafts.

        Returns:
            (number of drafts, expected tokens per second with them).
        """
        assert self._costs is not None
        best, num_best, tokens = plain, 0, float(num_seqs)
        drafting = 0.0  # seconds
        forced = 0.0  # tokens that a grammar forces
        rounds: Counter[int] = Counter()  # sequences in each round of the drafter
        for count, (gain, depth, i) in enumerate(ordered, 1):
            tokens += gain
            if proposals[i].draft is None and not (depth and self._drafts_at_once):
                drafting -= self._round_seconds(rounds[depth], context_len)
                rounds[depth] += 1
                drafting += self._round_seconds(rounds[depth], context_len)
                drafting += 0.0 if depth else proposals[i].seconds
            seconds = self._costs.seconds(num_seqs + count, num_seqs, context_len)
            if source_of(proposals[i].kind) is Source.GRAMMAR:
                forced += gain
            if (seconds + drafting) * plain - num_seqs - forced > num_seqs * self._ledger.balance:
                break  # If all others were rejected, they would lose more than allowed.
            speed = tokens / (seconds + drafting)
            if speed > best:
                best, num_best = speed, count
        return num_best, best

    @property
    def _drafts_at_once(self) -> bool:
        price = self._drafter.price
        return price is not None and price.drafts_at_once

    def _round_seconds(self, num_seqs: int, context_len: float) -> float:
        """Seconds in which the drafter makes one more draft of some sequences, or all of them."""
        price = self._drafter.price
        if price is None or price.rounds is None or not num_seqs:
            return 0.0
        return price.rounds.seconds(num_seqs * self._rows_of_round, num_seqs, context_len)

    @property
    def _rows_of_round(self) -> int:
        """Rows of each sequence in a round of the drafter."""
        return 1 + self._config.max_model_drafts if self._drafts_at_once else 1

    # After a step.

    def launched(self, batch: StepBatch) -> None:
        """Observes a launched step. Learns now, while the device is busy."""
        self._call(self._drafter.launched, batch)
        for draft, seq, state in self._unsettled:
            # Only known tokens count; the rest of a draft that was cut is ignored.
            self._acceptance.settle(draft, seq.tokens, state.counts)
        self._unsettled.clear()

    def _call(self, method: Callable[..., None], *args: object) -> None:
        """Calls a method of the drafter. Its errors end only speculation."""
        if self._is_broken:
            return
        try:
            method(*args)
        except Exception as error:
            self._give_up(error)

    def observe(
        self,
        output: SchedulerOutput,
        token_ids: list[list[int]],
        hidden: mx.array | None = None,
    ) -> None:
        """Learns from a committed step.

        Args:
            token_ids: The new tokens of each sequence.
            hidden: See `StepResult`.
        """
        self._finish_drafts()
        batch = output.batch
        has_drafts = batch.has_drafts
        if has_drafts:
            self._count(output, token_ids)
        now, before = self._clock(), self._committed_at
        drafting, self._drafting = self._drafting, 0.0
        self._committed_at = now
        self._call(self._drafter.observe, output, hidden)
        if not self.is_active:
            self._call(self._drafter.flush)
        for seq, new_token_ids in zip(output.sequences, token_ids):
            if seq.is_finished and new_token_ids:
                for drafter in self._drafters:
                    self._call(drafter.finish, seq)
        if self._is_broken:
            return
        if self._costs is None:
            self.is_active = batch.num_seqs < self._max_rows
        if self._costs is None or False in batch.samples:
            return
        if before is not None and (has_drafts or batch.is_decode):
            self._learn_costs(batch, token_ids, now - before, drafting)
        if not self.is_active:
            self._watch(output.sequences)

    def _learn_costs(
        self, batch: StepBatch, token_ids: list[list[int]], seconds: float, drafting: float
    ) -> None:
        """Learns from the time of a step, and stops drafts that lose too much time.

        Args:
            drafting: Part of `seconds` that went into drafts.
        """
        costs, num_seqs = self._costs, batch.num_seqs
        assert costs is not None
        context_len = sum(batch.starts) / num_seqs
        has_prompts = batch.num_tokens > num_seqs + sum(batch.num_drafts)
        # While drafts may come, steps without drafts do not overlap, so their times do not count.
        if not has_prompts and (batch.has_drafts or not self.is_active):
            costs.observe(batch.num_tokens, num_seqs, context_len, seconds - drafting)
        plain = costs.seconds(num_seqs, num_seqs, context_len)
        self._ledger.passed(seconds / plain)
        if self.is_active and not has_prompts:
            self._ledger.saved(sum(map(len, token_ids)) / num_seqs - seconds / plain)
            if self._ledger.balance <= 0:
                self.is_active, self._gain = False, 1.0
        self._step_seconds = plain

    def _watch(self, sequences: Sequence[CoreSequence]) -> None:
        """While there are no drafts, looks at the drafts that a step would have had.

        The longer a look takes, the more steps pass before the next one.
        """
        self._num_watched += 1
        if self._num_watched % _STEPS_UNTIL_AGED == 0 and self._costs is not None:
            self._costs.age()
            if self._drafter.price is not None:
                self._acceptance.fade()
        self._until_look -= 1
        if self._until_look > 0 or not self._step_seconds:
            return
        began = self._clock()
        running = [seq for seq in sequences if seq.is_running]
        self._choose(running, self._proposals(running))
        share = (self._clock() - began) / self._step_seconds
        self._until_look = max(1, int(share / _LOOK_SHARE))

    def _count(self, output: SchedulerOutput, token_ids: list[list[int]]) -> None:
        num_drafts = drafted = 0
        positions = [0] * self._config.max_drafts
        for seq, count, new_token_ids in zip(output.sequences, output.batch.num_drafts, token_ids):
            state: DraftState | None = seq.drafts
            if state is not None and state.pending is not None:
                count = min(count, len(state.pending.tokens))  # The rest follows an end token.
            if not count or not new_token_ids:
                continue
            num_drafts += 1
            drafted += count
            own = min(count, len(new_token_ids) - 1)
            for position in range(own):
                positions[position] += 1
            request = seq.request.state
            if request is not None:
                request.output.num_accepted_drafts += own
                request.output.num_rejected_drafts += count - own
        self.stats = self.stats.plus(num_drafts, drafted, positions)


def _predicted(wanted: Wanted, predicted: PredictedAnswer) -> Draft | None:
    """Returns drafts from the caller's guess of the answer, or None."""
    tokens = wanted.seq.tokens
    match = predicted.find(tokens, wanted.max_drafts)
    drafts = () if match is None else wanted.seq.sampler.legal(tokens, match.drafts)
    if match is None or not drafts:
        return None
    return Draft(len(tokens), drafts, kind_of(Source.PREDICTION, match.length))


def _state_of(seq: CoreSequence) -> DraftState | None:
    """Returns the speculator's state of a sequence; None if it takes no drafts."""
    if seq.drafts is None:
        if seq.sampler is None or not seq.sampler.takes_drafts:
            return None
        predicted = None
        if prediction := seq.sampler.prediction:
            predicted = PredictedAnswer(prediction, seq.request.num_prompt_tokens)
        seq.drafts = DraftState(predicted)
    state: DraftState = seq.drafts
    return state
