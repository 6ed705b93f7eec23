"""The two loops over all running sequences, as they are defined: one question at a time.

`Planner._add_decodes` and `Scheduler.commit` see every running sequence in every step, and are
written for speed. What they must come to is written here for the reader.
"""

from __future__ import annotations

from collections.abc import Mapping

from mlx_paged.core import Batch, KVManager, Scheduler, SchedulerConfig, Sequence, SequenceOutcome
from mlx_paged.core.planner import Planner


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


class PlainPlanner(Planner):
    def _add_decodes(self) -> None:
        self._prefilling = [seq for seq in self.running if seq.is_prefilling]
        for seq in self.running:
            if not seq.is_running or seq.is_prefilling:  # (preempted for one before it)
                continue
            if num_schedulable_tokens(seq) and self._secure(seq):
                self._add_row(seq, 1)


class PlainScheduler(Scheduler):
    def __init__(self, config: SchedulerConfig, kv: KVManager, **options: object) -> None:
        super().__init__(config, kv, **options)  # type: ignore[arg-type]
        self._planner = PlainPlanner(config, kv)

    def commit(self, batch: Batch, sampled: Mapping[int, int]) -> list[SequenceOutcome]:
        launched = self._in_flight.popleft()
        assert launched.batch is batch
        self._planner.committed_step = batch.step
        self.kv.on_step_evaluated(batch.step)
        outcomes = self.take_outcomes()
        for row, seq in launched.rows():
            if seq.is_finished:
                continue
            if row.samples:
                seq.tokens.append(sampled[seq.seq_id])
            if seq.is_running:
                seq.num_computed_tokens = row.context_len
                size = self.kv.block_size
                if row.context_len // size > row.start // size:
                    self.kv.commit(seq.seq_id, seq.num_computed_tokens)
            if row.samples:
                outcomes.append(self._judge(seq))
        return outcomes
