"""Rejected drafts and shortened sequences: rollback in every kind of group, on a simulated device.

The device stores in each slot of a block, and in each state, the tokens that led there. So a step
that reads what another sequence or a rejected draft has written is found at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.recording_tier import RecordingTier

from mlx_paged.core import (
    BlockCopy,
    BlockTables,
    ForkingKVManager,
    PrefixQuery,
    StateGroupSpec,
    WindowGroupSpec,
)

Path = tuple[int, ...]
tokens_of = st.lists(st.integers(0, 1), min_size=1, max_size=9)


class Device:
    """Pools and states of every group, and the steps that write them."""

    def __init__(self, kv: ForkingKVManager) -> None:
        self.kv = kv
        self.pools: list[dict[tuple[int, int], Path]] = [{} for _ in kv.attention]
        self.states: dict[int, Path] = {0: ()}
        self.step = 0

    def run(
        self, tables: BlockTables, start: int, tokens: list[int], *, keep: bool = False
    ) -> None:
        """Computes ``tokens[start:]``; checks all that these rows see."""
        kv, size, end = self.kv, self.kv.block_size, len(tokens)
        self.step += 1
        move = kv.move_state(tables, end, keep=keep)
        for number, copies in enumerate(kv.launch_step(self.step)):
            self.copy(number, copies)
        for group, pool in zip(kv.attention, self.pools, strict=True):
            blocks = tables.attention[group.number].blocks
            for row in range(start, end):
                pool[blocks[row // size], row % size] = tuple(tokens[: row + 1])
                for seen in range(group.first_block(row) * size, row + 1):
                    at = blocks[seen // size], seen % size
                    assert pool[at] == tuple(tokens[: seen + 1]), (row, seen)
        if move is not None:
            assert self.states[move.read] == tuple(tokens[:start])
            self.states[move.write] = tuple(tokens[:end])
        kv.on_step_evaluated(self.step)

    def copy(self, number: int, copies: Iterable[BlockCopy]) -> None:
        pool = self.pools[number]
        for src, dst in copies:
            for offset in range(self.kv.block_size):
                if (src, offset) in pool:
                    pool[dst, offset] = pool[src, offset]


def sliding(span: int, num_blocks: int) -> WindowGroupSpec:
    return WindowGroupSpec(num_blocks, span, lambda position: max(0, position - span + 1))


GROUPS: dict[str, dict[str, Any]] = {
    "full": {},
    "window": {"windows": [sliding(3, 12)]},
    "states": {"states": StateGroupSpec(9, snapshot_interval=1)},
    "all": {"windows": [sliding(4, 12)], "states": StateGroupSpec(9, snapshot_interval=2)},
}


class RollbackMachine(RuleBasedStateMachine):
    """Sequences that compute drafts and lose some of them, and that are cut at any length."""

    @initialize(
        groups=st.sampled_from(sorted(GROUPS)),
        block_size=st.sampled_from([1, 2, 4]),
        keeps=st.sampled_from([0, 1, 2]),
    )
    def begin(self, groups: str, block_size: int, keeps: int) -> None:
        # (A tier that drops everything, or keeps all or every second block.)
        self.tier = RecordingTier(lambda handed: bool(keeps) and handed.block % keeps == 0)
        self.kv = ForkingKVManager(16, block_size, tier=self.tier, **GROUPS[groups])
        self.device = Device(self.kv)
        self.sequences: list[tuple[BlockTables, list[int]]] = []

    def pick(self, choice: int) -> tuple[BlockTables, list[int]]:
        return self.sequences[choice % len(self.sequences)]

    @rule(tokens=tokens_of)
    def admit(self, tokens: list[int]) -> None:
        tables = self.kv.admit(tokens)
        if tables is not None:
            self.sequences.append((tables, tokens))
            self.compute(len(self.sequences) - 1, [], 0)  # (the copy that it begins with is made)

    @precondition(lambda self: self.sequences)
    @rule(
        choice=st.integers(0, 9),
        drafts=st.lists(st.integers(0, 1), max_size=4),
        num_accepted=st.integers(0, 4),
    )
    def compute(self, choice: int, drafts: list[int], num_accepted: int) -> None:
        """One step; where it reaches the newest token, with drafts after that."""
        tables, tokens = seq = self.pick(choice)
        start, known = tables.num_computed_tokens, len(tokens)
        for number in range(len(self.kv.attention)):  # (the end of what was forked is shared)
            copies = self.kv.make_writable(tables, start, start, number)
            if copies is None:
                self.free(choice)
                return
            self.device.copy(number, copies)
        end = self.kv.allocate_up_to(tables, known + len(drafts))
        if end <= start:
            self.free(choice)
            return
        self.device.run(tables, start, (tokens + drafts)[:end], keep=end > known)
        if end < known:
            self.kv.commit(tables, end)
        else:
            num_accepted = min(num_accepted, end - known)
            tokens += drafts[:num_accepted]
            computed = known + num_accepted
            if computed < end:
                computed = self.kv.truncate(tables, computed)
                assert computed == (known + num_accepted if self.kv.states is None else start)
            self.kv.commit(tables, computed)
            tokens.append(0)  # sampled
        assert seq in self.sequences
        self.kv.check_integrity()

    @precondition(lambda self: self.sequences)
    @rule(choice=st.integers(0, 9), tokens=tokens_of)
    def fork(self, choice: int, tokens: list[int]) -> None:
        tables, parent = self.pick(choice)
        copy = parent[: tables.num_computed_tokens] + tokens
        self.sequences.append((self.kv.fork(tables, copy), copy))
        self.kv.check_integrity()

    @rule(tokens=tokens_of)
    def attach(self, tokens: list[int]) -> None:
        """A sequence without blocks takes what is cached."""
        tables = self.kv.open(tokens)
        match = self.kv.match(PrefixQuery(tokens))
        if match.node is not None:
            self.kv.attach_prefix(tables, match)
        self.sequences.append((tables, tokens))
        self.kv.check_integrity()

    @precondition(lambda self: self.sequences)
    @rule(choice=st.integers(0, 9), num_tokens=st.integers(1, 9))
    def cut(self, choice: int, num_tokens: int) -> None:
        tables, tokens = self.pick(choice)
        num_tokens = min(num_tokens, tables.num_computed_tokens)
        if num_tokens:
            self.kv.truncate(tables, num_tokens)
            del tokens[num_tokens:]
            tokens.append(1)
            self.kv.check_integrity()

    @precondition(lambda self: self.sequences)
    @rule(choice=st.integers(0, 9))
    def free(self, choice: int) -> None:
        tables, _ = self.sequences.pop(choice % len(self.sequences))
        self.kv.free(tables)
        self.kv.check_integrity()

    def teardown(self) -> None:
        while getattr(self, "sequences", ()):
            self.free(0)
        if hasattr(self, "kv"):
            assert all(group.pool.num_used == 0 for group in self.kv.groups)
            self.kv.reset_prefix_cache()
            assert not self.tier.kept


def test_random_rollbacks() -> None:
    run_state_machine_as_test(
        RollbackMachine,
        settings=settings(
            max_examples=100,
            stateful_step_count=40,
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def started(
    num_tokens: int, **options: Any
) -> tuple[ForkingKVManager, Device, BlockTables, list[int]]:
    """A sequence of `num_tokens` computed tokens, in blocks of 4."""
    kv = ForkingKVManager(32, 4, **options)
    tokens = list(range(num_tokens))
    tables = kv.admit(tokens)
    assert tables is not None and kv.allocate_up_to(tables, num_tokens) == num_tokens
    device = Device(kv)
    device.run(tables, 0, tokens)
    kv.commit(tables, num_tokens)
    return kv, device, tables, tokens


def test_rejected_drafts_give_their_blocks_back() -> None:
    kv, device, tables, tokens = started(3)
    assert kv.allocate_up_to(tables, 9) == 9
    device.run(tables, 3, [*tokens, 90, 91, 92, 93, 94, 95], keep=True)
    tokens.append(90)
    assert kv.truncate(tables, 4) == 4
    kv.commit(tables, 4)
    assert len(tables.blocks) == 1 and kv.usage.num_used_blocks == 1
    kv.check_integrity()


def test_a_recurrent_state_goes_back_to_the_kept_slot_and_replays() -> None:
    kv, device, tables, tokens = started(3, states=StateGroupSpec(8))
    assert kv.states is not None and tables.state is not None
    before = tables.state.slot
    assert kv.allocate_up_to(tables, 6) == 6
    device.run(tables, 3, [*tokens, 90, 91, 92], keep=True)
    tokens += [90, 7]
    assert kv.truncate(tables, 4) == 3  # the accepted draft is computed again
    assert (tables.state.slot, tables.state.num_scheduled) == (before, 3)
    assert kv.allocate_up_to(tables, 5) == 5
    device.run(tables, 3, tokens)
    kv.commit(tables, 5)
    assert kv.states.pool.num_used == 1  # nothing is kept any longer
    kv.check_integrity()


def test_a_state_is_not_kept_once_its_step_is_committed_in_full() -> None:
    kv, device, tables, tokens = started(3, states=StateGroupSpec(8))
    assert kv.states is not None and kv.allocate_up_to(tables, 5) == 5
    device.run(tables, 3, [*tokens, 90, 91], keep=True)
    assert kv.states.pool.num_used == 2
    tokens += [90, 91]
    kv.commit(tables, 5)
    assert kv.states.pool.num_used == 1


@pytest.mark.parametrize(("num_tokens", "start"), [(8, 8), (7, 4), (4, 4), (3, 0)])
def test_an_indexed_block_is_not_overwritten(num_tokens: int, start: int) -> None:
    kv, device, tables, tokens = started(10)
    assert kv.truncate(tables, num_tokens) == start
    tokens[num_tokens:] = [50]
    assert kv.allocate_up_to(tables, len(tokens)) == len(tokens)
    device.run(tables, start, tokens)
    kv.commit(tables, len(tokens))
    kv.check_integrity()
    other = list(range(9))
    again = kv.admit(other)  # the old text is still cached
    assert again is not None and again.num_cached_tokens == 8
    assert kv.allocate_up_to(again, 9) == 9
    device.run(again, 8, other)


def test_a_window_that_has_slid_past_is_computed_from_the_beginning() -> None:
    kv, device, tables, tokens = started(22, windows=[sliding(4, 16)])
    assert kv.truncate(tables, 21) == 21
    assert kv.truncate(tables, 8) == 0
    assert tables.attention[1].blocks == []
    del tokens[8:]
    assert kv.allocate_up_to(tables, 8) == 8
    device.run(tables, 0, tokens)
    kv.commit(tables, 8)
    kv.check_integrity()


def test_what_is_taken_back_is_not_found_in_the_prefix_of_a_running_sequence() -> None:
    kv, _, tables, tokens = started(6)
    kv.truncate(tables, 5)
    tokens[5:] = [60, 61, 62]
    found = kv.admit([0, 1, 2, 3, 4, 5, 6])
    assert found is not None and found.num_cached_tokens <= 5


def test_a_snapshot_of_rejected_drafts_is_not_kept() -> None:
    kv, device, tables, tokens = started(3, states=StateGroupSpec(12, snapshot_interval=1))
    assert kv.allocate_up_to(tables, 8) == 8
    device.run(tables, 3, [*tokens, 90, 91, 92, 93, 94], keep=True)  # ends where one is due
    assert kv.truncate(tables, 3) == 3
    kv.commit(tables, 3)
    for token in range(3, 9):
        tokens.append(token)
        assert kv.allocate_up_to(tables, token + 1) == token + 1
        device.run(tables, token, tokens)
        kv.commit(tables, token + 1)
    other = list(range(10))
    again = kv.admit(other)
    assert again is not None and again.num_cached_tokens == 8
    assert kv.allocate_up_to(again, 10) == 10
    device.run(again, 8, other)
