"""The definitions behind the scheduler's optimizations, one question at a time.

`Scheduler._schedule_decodes` and `Scheduler.update_from_output` see every running sequence in every
step. `WaitingQueue` avoids looking at every waiting one. This module defines their required results
in readable form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from mlx_paged.core import BlockTables, Scheduler, SchedulerOutput, Sequence
from support.step_rows import as_rows


def num_pending_tokens(seq: Sequence) -> int:
    """Number of tokens that steps in flight sample: 0 or 1."""
    return max(0, seq.num_scheduled_tokens - len(seq.tokens) + 1)


def num_schedulable_tokens(seq: Sequence) -> int:
    """Tokens that the next step could compute: the known remainder, or the one in flight."""
    remaining = len(seq.tokens) - seq.num_scheduled_tokens
    if remaining > 0:
        return remaining
    # All known tokens are in flight. One more may follow, unless that one is the last.
    will_have = seq.num_output_tokens + num_pending_tokens(seq)
    return 1 if will_have < seq.request.max_output_tokens else 0


def is_prefilling(seq: Sequence) -> bool:
    """True if more than the newest token remains to be computed, or the last token of a prompt,
    which may be a media item's."""
    num_left = len(seq.tokens) - seq.num_scheduled_tokens
    of_prompt = seq.num_scheduled_tokens < seq.request.num_prompt_tokens
    return num_left > 1 or (num_left == 1 and bool(seq.request.media) and of_prompt)


def is_restoring(seq: Sequence) -> bool:
    """True if cached tokens are on their way back to the device."""
    return seq.tables is not None and seq.tables.restoration is not None


class PlainQueue:
    """The definition of `WaitingQueue`: asks every question of every sequence."""

    def __init__(self, is_long: Callable[[int], bool]) -> None:
        self._is_long = is_long
        self._sequences: list[Sequence] = []
        self._waits: dict[Sequence, tuple[BlockTables, int]] = {}
        self._held: set[Sequence] = set()

    def __len__(self) -> int:
        return len(self._sequences)

    size = property(__len__)

    @property
    def num_background(self) -> int:
        return sum(seq.request.background for seq in self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(sorted(self._sequences, key=lambda seq: seq.order))

    def _is_ready(self, seq: Sequence) -> bool:
        if seq in self._held:
            return False
        if seq not in self._waits:
            return True
        tables, num_tokens = self._waits[seq]
        return tables.owner.tables is not tables or tables.num_computed_tokens >= num_tokens

    def first(self, *, with_long: bool = True) -> Sequence | None:
        for seq in self:
            if self._is_ready(seq) and (with_long or not self._is_long(len(seq.tokens))):
                return seq
        return None

    def ready_short(self) -> Iterator[Sequence]:
        return (s for s in self if self._is_ready(s) and not self._is_long(len(s.tokens)))

    def add(self, seq: Sequence) -> None:
        self._sequences.append(seq)

    def remove(self, seq: Sequence) -> None:
        self._sequences.remove(seq)
        self._waits.pop(seq, None)
        self._held.discard(seq)

    @property
    def first_held(self) -> Sequence | None:
        return min(self._held, key=lambda seq: seq.order, default=None)

    def hold(self, seq: Sequence) -> None:
        self._held.add(seq)

    def release_held(self) -> None:
        self._held.clear()

    def park(self, seq: Sequence, tables: BlockTables, num_tokens: int) -> None:
        self._waits[seq] = (tables, num_tokens)

    def wake(self) -> None:
        """Keeps no record of ready sequences."""

    def wake_from(self, tables: BlockTables) -> None:
        """No record either: the tables' owner knows that they are released."""

    def wake_all(self) -> None:
        self._waits.clear()


class PlainScheduler(Scheduler):
    waiting_queue = PlainQueue  # type: ignore[assignment]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._found = self._sharing.awaited
        self._sharing.awaited = self._awaited  # type: ignore[method-assign]

    def _awaited(self, seq: Sequence) -> tuple[BlockTables, int] | None:
        """Compares what `PrefixSharing.awaited` found with a look at every running sequence."""
        awaited = self._found(seq)
        if awaited is not None:
            tables, num_tokens = awaited
            assert tables.owner.is_running and tables.num_computed_tokens < num_tokens
            assert tables.owner.order[0] <= seq.order[0]
            num_prompt_tokens = seq.request.num_prompt_tokens
            # A sibling whose windows have slid past the prompt is awaited like any other sequence.
            forks = self.kv.prefixes.keeps_last_token_forkable(
                num_prompt_tokens
            ) and self.kv.prefixes.can_fork(tables, num_prompt_tokens - 1)
            if forks and tables.owner.request is seq.request:
                assert num_tokens == num_prompt_tokens
            else:
                assert num_tokens == self._part(seq, tables)
        elif seq.request.n == 1 and seq.request.read_prefix_cache:
            assert not any(self._computes_next_block(r, seq) for r in self.running)
        return awaited

    def _part(self, seq: Sequence, tables: BlockTables) -> int:
        """The end of the last block that two sequences share, or of the next one."""
        assert tables.tip is not None
        size, known = self.kv.block_size, seq.tree_tokens[:-1]
        num_blocks = tables.tip.depth + 1
        while (
            len(known) >= (num_blocks + 1) * size
            and known[: (num_blocks + 1) * size] == tables.tokens[: (num_blocks + 1) * size]
        ):
            num_blocks += 1
        return num_blocks * size

    def _computes_next_block(self, running: Sequence, seq: Sequence) -> bool:
        """True if `seq` should wait for `running`; only if all layers have full attention."""
        if len(self.kv.groups) > 1 or running.order[0] > seq.order[0]:
            return False
        assert running.tables is not None
        tip, size = running.tables.tip, self.kv.block_size
        match = self.kv.prefixes._continuable(self._sharing.query(seq))
        if tip is None or tip is not match.node:
            return False
        start, end = tip.depth * size, (tip.depth + 1) * size
        wanted = seq.tree_tokens[start : min(end, len(seq.tokens) - 1)]
        return (
            len(running.tokens) >= end
            and running.tree_tokens[start : start + len(wanted)] == wanted
            and len(wanted) > match.num_partial_tokens
            and len(wanted) * 2 >= size
        )

    def _in_turn_as_defined(self) -> list[Sequence]:
        """All running sequences; background requests get few places while there are others."""
        others = [seq for seq in self.running if not seq.request.background]
        background = [seq for seq in self.running if seq.request.background]
        if any(not request.background for request in self.requests()):
            background = background[: max(1, self.config.max_num_seqs // 8)]
        return others + background

    def _schedule_decodes(self) -> None:
        in_turn = self._in_turn_as_defined()
        step = self._building
        step.prefilling = [seq for seq in in_turn if is_prefilling(seq) and not is_restoring(seq)]
        for seq in in_turn:
            if not seq.is_running or is_prefilling(seq):  # preempted for an earlier one
                continue
            if is_restoring(seq):
                continue
            if num_schedulable_tokens(seq) and self._secure(seq):
                step.add(seq, 1)
        step.num_decodes = len(step.sequences)

    def update_from_output(self, output: SchedulerOutput, token_ids: list[list[int]]) -> None:
        assert self._in_flight.popleft() is output
        self._committed_step = output.batch.step
        self.kv.on_step_evaluated(output.batch.step)
        for scheduled, gained in zip(as_rows(output).sequences, token_ids, strict=True):
            seq = scheduled.sequence
            if seq.is_finished:
                gained.clear()
                continue
            if scheduled.samples:
                seq.tokens.extend(gained)
            if seq.is_running:
                assert seq.tables is not None
                seq.tables.num_computed_tokens = scheduled.context_len
                size = self.kv.block_size
                if scheduled.context_len // size > scheduled.start // size:
                    self.kv.commit(seq.tables, seq.num_computed_tokens)
            if scheduled.samples:
                [token] = gained
                self._end(seq, self._reason_to_stop(seq, token), gained)
