"""A device half of Python lists: a "model" that sees its context through block tables only.

Every slot of the simulated pool holds the (position, token) that was last written there. The next
token of a sequence is a hash of all tokens read back through its block table, so a wrong block, a
missed copy, a stale or foreign slot either breaks a check here or changes every token that follows.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlx_paged.scheduling import Batch, FinishReason, Scheduler, SequenceOutcome
from mlx_paged.scheduling.batch import ScheduledSequence

VOCAB_SIZE = 61


def next_token(tokens: Sequence[int], seed: int = 0) -> int:
    """The model: what follows `tokens`."""
    state = seed
    for token in tokens:
        state = ((state ^ (token + 1)) * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 32
    return state % VOCAB_SIZE


def generate(
    prompt: Sequence[int], max_tokens: int, eos: frozenset[int], seed: int = 0
) -> list[int]:
    """The oracle: what a request must get, whoever shares its batches."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens:
        tokens.append(next_token(tokens, seed))
        if tokens[-1] in eos:
            break
    return tokens[len(prompt) :]


class Launched:
    """A step on the device: executed, in the order of launch, when it is evaluated."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.tokens: dict[int, int] | None = None  # by seq_id, once evaluated
        # Block -> sequences that read or write it in this step (0: a copy).
        self.touched: dict[int, set[int]] = {}
        for row in batch.sequences:
            for block in row.block_table:
                self.touched.setdefault(block, set()).add(row.seq_id)
        for copy in batch.block_copies:
            self.touched.setdefault(copy.src, set()).add(0)


class FakeDevice:
    """Runs batches over a simulated pool and checks what the scheduler promises about them."""

    def __init__(
        self, num_blocks: int, block_size: int, seeds: dict[int, int] | None = None
    ) -> None:
        self.block_size = block_size
        self.slots: list[tuple[int, int] | None] = [None] * (num_blocks * block_size)
        self.seeds = {} if seeds is None else seeds  # by seq_id
        self.in_flight: list[Launched] = []
        self.tables: dict[int, list[int]] = {}  # kept up to date through dirty_from
        self.last: dict[int, int] = {}  # newest sampled tokens
        self.num_tokens_computed = 0

    def launch(self, batch: Batch) -> Launched:
        launched = Launched(batch)
        self._check_batch(batch)
        self._check_nothing_in_flight_is_overwritten(launched)
        for row in batch.sequences:
            self._update_table(row)
        self.in_flight.append(launched)
        return launched

    def evaluate(self, launched: Launched) -> dict[int, int]:
        assert self.in_flight.pop(0) is launched
        size = self.block_size
        for src, dst in launched.batch.block_copies:
            self.slots[dst * size : (dst + 1) * size] = self.slots[src * size : (src + 1) * size]
        for row in launched.batch.sequences:
            tokens = (self.last[row.seq_id],) if row.awaits_token else row.token_ids
            for position, token in enumerate(tokens, row.start):
                self.slots[self._slot(row, position)] = (position, token)
        self.num_tokens_computed += launched.batch.num_tokens
        self.last = {r.seq_id: self._sample(r) for r in launched.batch.sequences if r.samples}
        launched.tokens = self.last
        return self.last

    def drop_in_flight(self) -> None:
        """A failure: steps in flight never run, and what they would have written is garbage."""
        for launched in self.in_flight:
            for row in launched.batch.sequences:
                for position in range(row.start, row.context_len):
                    self.slots[self._slot(row, position)] = None
        self.in_flight.clear()

    def _sample(self, row: ScheduledSequence) -> int:
        context = []
        for position in range(row.context_len):
            held = self.slots[self._slot(row, position)]
            assert held is not None, f"{row} reads position {position}, which was never written"
            assert held[0] == position, f"{row} reads position {position} and finds {held}"
            context.append(held[1])
        return next_token(context, self.seeds.get(row.seq_id, 0))

    def _slot(self, row: ScheduledSequence, position: int) -> int:
        return (
            row.block_table[position // self.block_size] * self.block_size
            + position % self.block_size
        )

    def _blocks_written(self, row: ScheduledSequence) -> set[int]:
        first = row.start // self.block_size
        last = (row.context_len - 1) // self.block_size
        return set(row.block_table[first : last + 1])

    def _check_batch(self, batch: Batch) -> None:
        assert batch.sequences, "a step without rows"
        sources = {copy.src for copy in batch.block_copies}
        targets = [copy.dst for copy in batch.block_copies]
        assert len(targets) == len(set(targets)) and not sources & set(targets)
        writers: dict[int, int] = {}
        for row in batch.sequences:
            assert row.num_tokens >= 1
            assert 0 not in row.block_table and len(set(row.block_table)) == len(row.block_table)
            assert len(row.block_table) * self.block_size >= row.context_len
            for block in self._blocks_written(row):
                # (a fork copies the block that its sibling goes on filling)
                assert block not in sources or block in self.tables[row.seq_id]
                assert block not in writers, f"two rows of a step write to block {block}"
                writers[block] = row.seq_id
        assert len({row.seq_id for row in batch.sequences}) == len(batch.sequences)
        for row in batch.sequences:
            for block in row.block_table:
                assert writers.get(block, row.seq_id) == row.seq_id, f"block {block} is foreign"

    def _update_table(self, row: ScheduledSequence) -> None:
        table = self.tables.get(row.seq_id, [])
        assert row.dirty_from <= len(table)
        table = table[: row.dirty_from] + list(row.block_table[row.dirty_from :])
        assert table == list(row.block_table), "dirty_from hides a change"
        self.tables[row.seq_id] = table

    def _check_nothing_in_flight_is_overwritten(self, launched: Launched) -> None:
        writes = {copy.dst: 0 for copy in launched.batch.block_copies}
        for row in launched.batch.sequences:
            writes.update(dict.fromkeys(self._blocks_written(row), row.seq_id))
        for earlier in self.in_flight:
            for block, writer in writes.items():
                users = earlier.touched.get(block, set()) - {writer}
                if 0 in users and block in self.tables.get(writer, ()):
                    users.remove(0)  # a fork copied the block that its sibling goes on filling
                assert not users, (
                    f"step {launched.batch.step} writes to block {block}, which step "
                    f"{earlier.batch.step} in flight reads for sequences {users}"
                )


class FakeEngine:
    """The engine's loop over a scheduler and a fake device, one half step at a time."""

    def __init__(self, scheduler: Scheduler, *, overlap: bool = False) -> None:
        self.scheduler = scheduler
        self.device = FakeDevice(scheduler.kv.pool.num_blocks, scheduler.kv.block_size)
        self.overlap = overlap
        self.running: Launched | None = None
        self.outputs: dict[int, list[int]] = {}  # by seq_id
        self.reasons: dict[int, FinishReason] = {}
        self.batches: list[Batch] = []

    def step(self) -> None:
        batch = self.scheduler.schedule()
        assert batch or self.running or not self.scheduler.has_unfinished, "livelock"
        launched = None
        if batch is not None:
            self.batches.append(batch)
            for row in batch.sequences:
                seq = self.scheduler.sequence(row.seq_id)
                assert seq is not None
                self.device.seeds[row.seq_id] = seq.index
            launched = self.device.launch(batch)
        if not self.overlap and launched is not None:
            self.running, launched = launched, None
        if self.running is not None:
            done, self.running = self.running, None
            self._take(self.scheduler.commit(done.batch, self.device.evaluate(done)))
        self.running = launched
        self._take(self.scheduler.take_outcomes())

    def run(self, max_steps: int = 100_000) -> None:
        while self.scheduler.has_unfinished or self.running:
            self.step()
            max_steps -= 1
            assert max_steps > 0, "the requests do not come to an end"

    def fail(self) -> None:
        """The step in flight fails on the device."""
        self.device.drop_in_flight()
        self.running = None
        self.scheduler.requeue_in_flight()

    def _take(self, outcomes: list[SequenceOutcome]) -> None:
        for outcome in outcomes:
            if outcome.token_id is not None:
                self.outputs.setdefault(outcome.seq_id, []).append(outcome.token_id)
            if outcome.finish_reason is not None:
                assert outcome.seq_id not in self.reasons, "a sequence ended twice"
                self.reasons[outcome.seq_id] = outcome.finish_reason
