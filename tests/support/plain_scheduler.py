"""The two loops over all running sequences, as they are defined: one question at a time.

`Scheduler._schedule_decodes` and `Scheduler.update_from_output` see every running sequence in every
step, and are written for speed. What they must do is written here for the reader.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from mlx_paged.core import Scheduler, SchedulerOutput, Sequence, SequenceOutcome


def num_pending_tokens(seq: Sequence) -> int:
    """Tokens being sampled by steps in flight: 0 or 1."""
    return max(0, seq.num_scheduled_tokens - len(seq.tokens) + 1)


def num_schedulable_tokens(seq: Sequence) -> int:
    """Tokens the next step could compute: the rest of what is known, or the one in flight."""
    remaining = len(seq.tokens) - seq.num_scheduled_tokens
    if remaining > 0:
        return remaining
    # All that is known is in flight. One more may follow, unless that is the last anyway.
    will_have = seq.num_output_tokens + num_pending_tokens(seq)
    return 1 if will_have < seq.request.max_output_tokens else 0


def is_prefilling(seq: Sequence) -> bool:
    """Whether more than the newest token is still to be computed."""
    return len(seq.tokens) - seq.num_scheduled_tokens > 1


class PlainScheduler(Scheduler):
    def _schedule_decodes(self) -> None:
        self._prefilling = [seq for seq in self.running if is_prefilling(seq)]
        for seq in self.running:
            if not seq.is_running or is_prefilling(seq):  # (preempted for one before it)
                continue
            if num_schedulable_tokens(seq) and self._secure(seq):
                self._add(seq, 1)

    def update_from_output(
        self, output: SchedulerOutput, sampled: SequenceOf[int | None]
    ) -> list[SequenceOutcome]:
        assert self._in_flight.popleft() is output
        self._committed_step = output.step
        self.kv.on_step_evaluated(output.step)
        outcomes = self.take_outcomes()
        for scheduled, token in zip(output.sequences, sampled, strict=True):
            seq = scheduled.sequence
            if seq.is_finished:
                continue
            if scheduled.samples:
                assert token is not None
                seq.tokens.append(token)
            if seq.is_running:
                assert seq.tables is not None
                seq.tables.num_computed_tokens = scheduled.context_len
                size = self.kv.block_size
                if scheduled.context_len // size > scheduled.start // size:
                    self.kv.commit(seq.tables, seq.num_computed_tokens)
            if scheduled.samples:
                outcomes.append(self._judge(seq))
        return outcomes
