"""Speculator: decides which drafts a step verifies.

It is *active* while drafts are expected to pay. Then a step is planned after the one before it has
been read, because drafts begin after a known token. Otherwise steps overlap as without speculation,
and the speculator only watches: it compares drafts that were never verified with the tokens that
came, so that it knows when to begin.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from mlx_paged.core import Scheduler, SchedulerOutput
from mlx_paged.core import Sequence as CoreSequence
from mlx_paged.engine.speculation.acceptance import Acceptance, Draft
from mlx_paged.engine.speculation.config import SpeculativeConfig
from mlx_paged.engine.speculation.costs import StepCosts
from mlx_paged.engine.speculation.drafter import Drafter, DraftState
from mlx_paged.engine.stats import SpecDecodingStats

# Steps between two looks at the sequences while inactive.
_WATCH_EVERY = 8
# The expected gain at which drafts begin, and below which they end.
_BEGIN_AT, _END_AT = 1.05, 1.01
_GAIN_WEIGHT = 0.25
# Rows of a step, at most: beyond, they would hold up the others.
_MAX_ROWS = 256


class _Proposal(NamedTuple):
    """Drafts of a sequence, with the expected number of tokens that each one adds."""

    sequence: CoreSequence
    draft: Draft
    gains: list[float]


class Speculator:
    """Proposes drafts for the sequences of a scheduler.

    Args:
        drafter: Guesses the tokens.
        costs: How long steps take; None verifies all drafts.
        clock: Seconds of a monotonic clock.

    Attributes:
        is_active: True if the next step may have drafts, so that it must wait for the one before.
        stats: Drafts so far.
    """

    def __init__(
        self,
        config: SpeculativeConfig,
        drafter: Drafter,
        costs: StepCosts | None,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._config = config
        self._drafter = drafter
        self._costs = costs if config.adaptive else None
        self._clock = clock
        self._acceptance = Acceptance()
        self._gain = 1.0  # expected tokens per second, relative to no drafts
        self._num_watched = 0  # steps since the last look
        self._committed_at: float | None = None
        self.is_active = self._costs is None
        self.stats = SpecDecodingStats.zero(config.max_drafts)

    def reset(self) -> None:
        """Forgets the step before, because an exception may have interrupted it."""
        self._committed_at = None

    # Before a step.

    def propose(self, scheduler: Scheduler) -> None:
        """Gives drafts to the running sequences. No step is in flight."""
        ready: list[CoreSequence] = []
        for seq in scheduler.running:
            num_left = len(seq.tokens) - seq.num_scheduled_tokens
            # A recurrent state that rejected drafts computes the accepted ones again.
            is_ready = 1 <= num_left <= 2 + self._config.max_drafts
            if is_ready and seq.num_output_tokens:
                ready.append(seq)
            elif num_left > 1 and self._costs is not None:
                self.is_active = False  # Prompts fill the step.
                return
        proposals = self._proposals(ready)
        counts = self._choose(ready, proposals)
        for proposal, count in zip(proposals, counts):
            if count:
                scheduler.propose(proposal.sequence, proposal.draft.tokens[:count])

    def _proposals(self, sequences: Iterable[CoreSequence]) -> list[_Proposal]:
        """Looks up drafts, and remembers them until their tokens are known."""
        proposals = []
        for seq in sequences:
            state = _state_of(seq)
            if state is None:
                continue
            self._settle(seq, state)
            # The last token of an answer is never a draft.
            room = min(self._config.max_drafts, seq.max_num_tokens - len(seq.tokens) - 1)
            draft = self._drafter.draft(seq, state, room) if room > 0 else None
            if draft is None:
                continue
            state.pending = draft
            first, later = self._acceptance.chances(draft.kind, state.counts)
            gains, chance = [], first
            for _ in draft.tokens:
                if chance < self._config.suffix_decoding_min_token_prob and self._costs is not None:
                    break
                gains.append(chance)
                chance *= later
            proposals.append(_Proposal(seq, draft, gains))
        return proposals

    def _choose(self, ready: Sequence[CoreSequence], proposals: list[_Proposal]) -> list[int]:
        """Returns how many drafts of each proposal pay, and updates the expected gain."""
        if self._costs is None:
            return [len(proposal.draft.tokens) for proposal in proposals]
        counts = [0] * len(proposals)
        if not ready:
            return counts
        num_seqs = len(ready)
        context_len = sum(len(seq.tokens) for seq in ready) / num_seqs
        plain = num_seqs / self._costs.seconds(num_seqs, num_seqs, context_len)
        # Each sequence's gains fall, so the best drafts of all are a prefix of each one's.
        ordered = sorted(
            ((gain, i) for i, proposal in enumerate(proposals) for gain in proposal.gains),
            key=lambda each: -each[0],
        )
        best, num_best, tokens = plain, 0, float(num_seqs)
        for count, (gain, _) in enumerate(ordered[: _MAX_ROWS - num_seqs], 1):
            tokens += gain
            speed = tokens / self._costs.seconds(num_seqs + count, num_seqs, context_len)
            if speed > best:
                best, num_best = speed, count
        for _, i in ordered[:num_best]:
            counts[i] += 1
        self._gain += _GAIN_WEIGHT * (best / plain - self._gain)
        self.is_active = self._gain > (_END_AT if self.is_active else _BEGIN_AT)
        return counts

    # After a step.

    def observe(self, output: SchedulerOutput, token_ids: list[list[int]]) -> None:
        """Learns from a step that was committed.

        Args:
            token_ids: The tokens that each sequence gained.
        """
        batch = output.batch
        has_drafts = batch.has_drafts
        if has_drafts:
            self._count(output, token_ids)
        now, before = self._clock(), self._committed_at
        self._committed_at = now
        for seq, gained in zip(output.sequences, token_ids):
            if seq.is_finished and gained:
                self._drafter.finish(seq)
        if self._costs is None or False in batch.samples:
            return
        is_plain = has_drafts or batch.is_decode
        if before is not None and is_plain:
            context_len = sum(batch.starts) / batch.num_seqs
            self._costs.observe(batch.num_tokens, batch.num_seqs, context_len, now - before)
        if not self.is_active:
            self._watch(output.sequences)

    def _watch(self, sequences: Sequence[CoreSequence]) -> None:
        """Looks at the drafts that a step would have had, while there are none."""
        self._num_watched += 1
        if self._num_watched < _WATCH_EVERY:
            return
        self._num_watched = 0
        running = [seq for seq in sequences if seq.is_running]
        self._choose(running, self._proposals(running))

    def _settle(self, seq: CoreSequence, state: DraftState) -> None:
        draft = state.pending
        if draft is None:
            return
        # Only known tokens count; the rest of a draft that was cut is ignored.
        self._acceptance.settle(draft, seq.tokens, state.counts)
        state.pending = None

    def _count(self, output: SchedulerOutput, token_ids: list[list[int]]) -> None:
        num_drafts = drafted = 0
        positions = [0] * self._config.max_drafts
        for seq, count, gained in zip(output.sequences, output.batch.num_drafts, token_ids):
            if not count or not gained:
                continue
            num_drafts += 1
            drafted += count
            own = min(count, len(gained) - 1)
            for place in range(own):
                positions[place] += 1
            state = seq.request.state
            if state is not None:
                state.output.num_accepted_drafts += own
                state.output.num_rejected_drafts += count - own
        self.stats = self.stats.plus(num_drafts, drafted, positions)


def _state_of(seq: CoreSequence) -> DraftState | None:
    """Returns the speculator's state of a sequence; None if it takes no drafts."""
    if seq.drafts is None:
        if seq.sampler is None or not seq.sampler.takes_drafts:
            return None
        seq.drafts = DraftState()
    state: DraftState = seq.drafts
    return state
