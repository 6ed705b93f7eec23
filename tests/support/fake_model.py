"""A device half made of Python lists: a "model" that sees its context only through block tables.

Every slot of the simulated pool holds the last (position, token) written to it. The next token of a
sequence is a hash of all tokens read back through its block table. So a wrong block, a missing
copy, or a stale or foreign slot either fails a check here or changes every following token.

Window groups have their own pools, whose visible positions must match the full pool; a state slot
holds all tokens that it has processed. The positions of a media item hold its content (`contents`),
and its features must be present.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from typing import NamedTuple

from mlx_paged.core import (
    FinishReason,
    KVManager,
    MediaSpan,
    Request,
    Scheduler,
)
from mlx_paged.core import Sequence as CoreSequence
from support.step_rows import Row, Rows, as_rows

VOCAB_SIZE = 61
PLACEHOLDER = 1


def next_token(tokens: Sequence[int], seed: int = 0) -> int:
    """The model: returns the token that follows `tokens`."""
    state = seed
    for token in tokens:
        state = ((state ^ (token + 1)) * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 32
    return state % VOCAB_SIZE


def content(span: MediaSpan, row: int) -> int:
    """The content of a media item's position, a function of the item's key."""
    return 1000 + int.from_bytes(sha256(span.key + row.to_bytes(4, "big")).digest()[:4], "big")


def contents(request: Request) -> list[int]:
    """A prompt as the model sees it."""
    tokens = list(request.prompt_token_ids)
    for span in request.media:
        tokens[span.offset : span.end] = [content(span, row) for row in range(span.length)]
    return tokens


def generate(
    prompt: Sequence[int], max_tokens: int, eos: frozenset[int], seed: int = 0
) -> list[int]:
    """The oracle: the answer of a request, whatever other requests share its batches."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens:
        tokens.append(next_token(tokens, seed))
        if tokens[-1] in eos:
            break
    return tokens[len(prompt) :]


STATES = -1  # index of the state slots among the groups


class Place(NamedTuple):
    """A block of a group (0: the full group, 1...: window groups), or a state slot."""

    group: int
    block: int


def tables_of(row: Row) -> list[tuple[int, tuple[int, ...], int]]:
    """(group, block table, dirty_from) for every group."""
    return [(i, table.blocks, table.dirty_from) for i, table in enumerate(row.tables)]


def copies_of(batch: Rows) -> Iterator[tuple[Place, Place]]:
    """(source, destination) of every block copy."""
    for group, copies in enumerate(batch.block_copies):
        for src, dst in copies:
            yield Place(group, src), Place(group, dst)


class Launched:
    """A step on the device; steps execute on evaluation, in launch order."""

    def __init__(self, batch: Rows) -> None:
        self.batch = batch
        # Sequences that read or write each place in this step; 0 stands for a copy.
        self.touched: dict[Place, set[int]] = {}
        for row in batch.sequences:
            for group, table, _ in tables_of(row):
                for block in table:
                    self.touched.setdefault(Place(group, block), set()).add(row.seq_id)
            if row.state is not None:
                # 0 excludes even the same sequence, because the step may have to run again.
                for slot in row.state:
                    self.touched.setdefault(Place(STATES, slot), set()).add(0)
        for source, _ in copies_of(batch):
            self.touched.setdefault(source, set()).add(0)


class FakeDevice:
    """Runs batches on simulated pools and checks the scheduler's guarantees."""

    def __init__(self, kv: KVManager, seeds: dict[int, int] | None = None) -> None:
        self.kv = kv
        self.block_size = kv.block_size
        pools = [group.pool for group in kv.attention]
        self.slots: list[list[tuple[int, int] | None]] = [
            [None] * (pool.num_blocks * kv.block_size) for pool in pools
        ]
        states = kv.states
        num_slots = 1 if states is None else states.pool.num_blocks
        self.states: list[tuple[int, ...] | None] = [(), *[None] * (num_slots - 1)]
        self.seeds = {} if seeds is None else seeds  # by seq_id
        self.in_flight: list[Launched] = []
        self.tables: dict[tuple[int, int], list[int]] = {}  # updated through dirty_from
        self.last: dict[int, int] = {}  # tokens of the last evaluated step, by seq_id
        self.sampled: list[int] = []  # the same tokens in step order
        self.num_tokens_computed = 0
        self.features: set[bytes] = set()
        self.encoded: list[bytes] = []  # keys of all items ever encoded

    def launch(self, batch: Rows) -> Launched:
        launched = Launched(batch)
        self._check_media(batch)
        self._check_adapters(batch)
        self._check_batch(batch)
        self._check_nothing_in_flight_is_overwritten(launched)
        for row in batch.sequences:
            self._update_tables(row)
        self.in_flight.append(launched)
        return launched

    def evaluate(self, launched: Launched) -> list[list[int]]:
        """Returns the tokens that each sequence gains."""
        assert self.in_flight.pop(0) is launched
        size = self.block_size
        for (group, src), (_, dst) in copies_of(launched.batch):
            pool = self.slots[group]
            pool[dst * size : (dst + 1) * size] = pool[src * size : (src + 1) * size]
        for row in launched.batch.sequences:
            tokens = (self.last[row.seq_id],) if row.awaits_token else row.token_ids
            for position, token in enumerate(self._seen(row, tokens), row.start):
                for group, table, _ in tables_of(row):
                    self.slots[group][self._slot(table, position)] = (position, token)
            if row.state is not None:
                before = self.states[row.state.read]
                self.states[row.state.write] = (*(before or ()), *self._seen(row, tokens))
        for row in launched.batch.sequences:
            self._check_context(row)
        self.num_tokens_computed += launched.batch.num_tokens
        rows = launched.batch.sequences
        gained = [self._sample(row) if row.samples else [] for row in rows]
        self._check_inputs_in_flight(launched)
        # A sequence samples once more for each draft. The next step needs none of those tokens.
        self.sampled = [
            token for row, t in zip(rows, gained) if t for token in t[-1:] * (1 + row.num_drafts)
        ]
        self.last = {row.seq_id: t[-1] for row, t in zip(rows, gained, strict=True) if t}
        return gained

    def _check_inputs_in_flight(self, launched: Launched) -> None:
        """Checks that `input_from` selects the right token of the previous step."""
        for row in launched.batch.sequences:
            if row.awaits_token:
                assert self.sampled[row.input_from] == self.last[row.seq_id]

    @staticmethod
    def _seen(row: Row, tokens: Sequence[int]) -> list[int]:
        """The tokens of a row as the model sees them."""
        seen = list(tokens)
        for i in row.media_items:
            span = row.sequence.request.media[i]
            for position in range(max(span.offset, row.start), min(span.end, row.context_len)):
                seen[position - row.start] = content(span, position - span.offset)
        return seen

    def _check_media(self, batch: Rows) -> None:
        """Checks that needed features are present, and that atomic items are not split."""
        media = batch.media
        used = {key for launched in self.in_flight for key in _keys_of(launched.batch)}
        if media is not None:
            assert not set(media.evicted) & used, "features in use by a step in flight are dropped"
            self.features -= set(media.evicted)
            assert not set(media.encoded) & self.features, "encoded, although it is held"
            assert set(media.encoded) <= _keys_of(batch), "encoded, but not needed by the step"
            self.features |= set(media.encoded)
            self.encoded += media.encoded
        assert _keys_of(batch) <= self.features, "features are missing"
        for row in batch.sequences:
            prompt_media = row.sequence.request.prompt_media
            for start, end in () if prompt_media is None else prompt_media.atomic:
                assert not start < row.start < end and not start < row.context_len < end, (
                    f"an atomic item is cut by {row}"
                )

    @staticmethod
    def _check_adapters(batch: Rows) -> None:
        """Checks that each row names the slot of its own adapter."""
        if batch.output is None:
            return
        step = batch.output.batch
        for row, slot in zip(batch.sequences, step.adapter_ids, strict=True):
            assert step.adapters.get(slot) == row.sequence.request.adapter
            assert slot == row.sequence.adapter_slot
        assert set(step.adapters) == set(step.adapter_ids) - {0}

    def _context(self, row: Row) -> list[int]:
        return [self._read(row, 0, row.block_table, i) for i in range(row.context_len)]

    def _read(self, row: Row, group: int, table: tuple[int, ...], position: int) -> int:
        held = self.slots[group][self._slot(table, position)]
        assert held is not None, f"{row} reads position {position}, never written in {group}"
        assert held[0] == position, f"{row} reads position {position} of {group}, finds {held}"
        return held[1]

    def _check_context(self, row: Row) -> None:
        """Checks that windows and states match the full group."""
        if len(self.kv.groups) == 1:
            return
        context = self._context(row)
        for group, table, _ in tables_of(row)[1:]:
            begin = self.kv.attention[group]._first_visible(row.start)
            for position in range(begin, row.context_len):
                assert self._read(row, group, table, position) == context[position]
        if row.state is not None:
            assert self.states[row.state.write] == tuple(context)

    def _sample(self, row: Row) -> list[int]:
        """The next token, after the accepted draft tokens."""
        context, gained = self._context(row), []
        for position in range(row.context_len - row.num_drafts, row.context_len + 1):
            gained.append(next_token(context[:position], self.seeds.get(row.seq_id, 0)))
            if position < row.context_len and context[position] != gained[-1]:
                break
        return gained

    def _slot(self, table: tuple[int, ...], position: int) -> int:
        block = table[position // self.block_size]
        assert block != 0, f"position {position} is used, but its block slid out of {table}"
        return block * self.block_size + position % self.block_size

    def _blocks_written(self, row: Row) -> set[Place]:
        first = row.start // self.block_size
        last = (row.context_len - 1) // self.block_size
        return {
            Place(group, block)
            for group, table, _ in tables_of(row)
            for block in table[first : last + 1]
        }

    def _check_batch(self, batch: Rows) -> None:
        assert batch.sequences, "a step without rows"
        copies = list(copies_of(batch))
        sources, targets = {src for src, _ in copies}, [dst for _, dst in copies]
        assert len(targets) == len(set(targets)) and not sources & set(targets)
        writers: dict[Place, int] = {}
        for row in batch.sequences:
            assert row.num_tokens >= 1
            assert len(row.tables) == len(self.kv.attention)
            for group, table, _ in tables_of(row):
                used = [block for block in table if block or group == 0]
                assert 0 not in used and len(set(used)) == len(used)
                assert len(table) * self.block_size >= row.context_len
            for place in self._blocks_written(row):
                # A fork copies the block that its sibling continues to fill.
                assert place not in sources or place.block in self.tables[row.seq_id, place.group]
                assert place not in writers, f"two rows of a step write to {place}"
                writers[place] = row.seq_id
        assert len({row.seq_id for row in batch.sequences}) == len(batch.sequences)
        for row in batch.sequences:
            for group, table, _ in tables_of(row):
                for block in table:
                    writer = writers.get(Place(group, block), row.seq_id)
                    assert writer == row.seq_id, f"block {block} of {group} is foreign"
        self._check_states(batch)

    def _check_states(self, batch: Rows) -> None:
        moves = [row.state for row in batch.sequences]
        if self.kv.states is None:
            assert moves == [None] * len(moves)
            return
        writes = [move.write for move in moves if move is not None]
        assert len(writes) == len(set(writes)) == len(moves) and 0 not in writes
        assert not set(writes) & {move.read for move in moves if move is not None}

    def _update_tables(self, row: Row) -> None:
        for group, given, dirty_from in tables_of(row):
            table = self.tables.get((row.seq_id, group), [])
            assert dirty_from <= len(table)
            table = table[:dirty_from] + list(given[dirty_from:])
            assert len(table) == len(given) and all(
                known == block or (block == 0 and group > 0)
                for known, block in zip(table, given, strict=True)
            ), "dirty_from hides a change"
            self.tables[row.seq_id, group] = table

    def _check_nothing_in_flight_is_overwritten(self, launched: Launched) -> None:
        writes = {target: 0 for _, target in copies_of(launched.batch)}
        for row in launched.batch.sequences:
            writes.update(dict.fromkeys(self._blocks_written(row), row.seq_id))
            if row.state is not None:
                writes[Place(STATES, row.state.write)] = row.seq_id
        for earlier in self.in_flight:
            for place, writer in writes.items():
                users = earlier.touched.get(place, set()) - {writer}
                if 0 in users and place.block in self.tables.get((writer, place.group), ()):
                    users.remove(0)  # a fork copied the block that its sibling continues to fill
                assert not users, (
                    f"step {launched.batch.step} writes to {place}, which step "
                    f"{earlier.batch.step} in flight reads for sequences {users}"
                )


def _keys_of(batch: Rows) -> set[bytes]:
    """Items that the rows of a step need."""
    return {
        row.sequence.request.prompt_media.keys[i]
        for row in batch.sequences
        for i in row.media_items
        if row.sequence.request.prompt_media is not None
    }


class FakeEngine:
    """The engine's loop for a scheduler and a fake device, in half steps."""

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        overlap: bool = False,
        drafter: Callable[[CoreSequence], list[int]] | None = None,
    ) -> None:
        self.drafter = drafter
        self.scheduler = scheduler
        self.device = FakeDevice(scheduler.kv)
        self.overlap = overlap
        self.running: Launched | None = None
        self.outputs: dict[int, list[int]] = {}  # by seq_id
        self.reasons: dict[int, FinishReason] = {}
        self.batches: list[Rows] = []

    def step(self) -> None:
        if self.drafter is not None:
            for seq in self.scheduler.running:
                self.scheduler.propose(seq, self.drafter(seq))
        output = self.scheduler.schedule()
        pauses = any(seq.request.boundaries for seq in self.scheduler.running)
        waits = bool(self.scheduler.kv.restorations)
        unfinished = self.scheduler.has_unfinished
        assert output or self.running or pauses or waits or not unfinished, "livelock"
        launched = None
        if output is not None:
            batch = as_rows(output)
            self._check_budgets(batch)
            assert len(batch.sequences) <= self.scheduler.config.max_num_seqs
            self.batches.append(batch)
            for row in batch.sequences:
                self.device.seeds[row.seq_id] = row.sequence.index
            launched = self.device.launch(batch)
        if not self.overlap and launched is not None:
            self.running, launched = launched, None
        if self.running is not None:
            done, self.running = self.running, None
            output = done.batch.output
            assert output is not None
            gained = self.device.evaluate(done)
            self.scheduler.update_from_output(output, gained)
            for seq, token_ids in zip(output.sequences, gained, strict=True):
                if token_ids:
                    self.outputs.setdefault(seq.seq_id, []).extend(token_ids)
                    self._note_end(seq)
        self.running = launched
        for seq in self.scheduler.take_expired():
            self._note_end(seq)

    def _check_budgets(self, batch: Rows) -> None:
        config = self.scheduler.config
        chunks = [row for row in batch.sequences if row.num_tokens > 1]
        if batch.num_tokens > config.max_num_batched_tokens:
            # One atomic item may exceed the budget that decodes leave.
            [row] = chunks
            ends = [span.end for span in row.sequence.request.media if span.is_atomic]
            assert row.context_len in ends and row.num_tokens <= config.max_num_batched_tokens
        encoded = () if batch.media is None else batch.media.encoded
        rows = {
            key: span.num_rows
            for row in batch.sequences
            if row.sequence.request.prompt_media is not None
            for key, span in zip(row.sequence.request.prompt_media.keys, row.sequence.request.media)
        }
        limit = config.max_num_encoder_tokens or config.max_num_batched_tokens
        if config.enable_chunked_prefill:
            assert len(encoded) <= 1 or sum(rows[key] for key in encoded) <= limit

    def run(self, max_steps: int = 100_000) -> None:
        while self.scheduler.has_unfinished or self.running:
            self.step()
            max_steps -= 1
            assert max_steps > 0, "the requests do not come to an end"

    def _note_end(self, seq: CoreSequence) -> None:
        if seq.finish_reason is not None:
            assert seq.seq_id not in self.reasons, "a sequence ended twice"
            self.reasons[seq.seq_id] = seq.finish_reason
