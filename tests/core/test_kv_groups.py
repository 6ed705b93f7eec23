"""Window groups and the state group of the KV store, case by case."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.id_store import IdStore

from mlx_paged.core import BlockCopy, KVManager, StateGroupSpec, StateMove, WindowGroupSpec
from mlx_paged.errors import IntegrityError, InvalidParameterError


def window(num_blocks: int, span: int) -> WindowGroupSpec:
    return WindowGroupSpec(num_blocks, span, lambda position: max(0, position - span + 1))


class Store(IdStore):
    """A manager with steps that are launched and evaluated at once, and checked books."""

    step = 0

    def admitted(self, seq_id: int, tokens: list[int], **options: object) -> int:
        num_cached = self.admit(seq_id, tokens, **options)  # type: ignore[arg-type]
        assert num_cached is not None
        self.check_integrity()
        return num_cached

    def advance(self, seq_id: int, start: int, end: int) -> StateMove | None:
        """One step of one sequence, as far as it may go."""
        reached = self.allocate_up_to(seq_id, end)
        assert start < reached <= end
        move = self.move_state(seq_id, reached)
        self.step += 1
        self.launch_step(self.step)
        self.check_integrity()
        self.on_step_evaluated(self.step)
        self.commit(seq_id, reached)
        self.check_integrity()
        return move

    def compute(self, seq_id: int, tokens: list[int]) -> tuple[int, list[StateMove | None]]:
        """Admits a sequence and computes all its tokens, step by step."""
        start = num_cached = self.admitted(seq_id, tokens)
        moves = []
        while start < len(tokens):
            end = self.allocate_up_to(seq_id, len(tokens))
            moves.append(self.advance(seq_id, start, end))
            start = end
        return num_cached, moves


# Windows.


def test_blocks_that_slid_out_are_free_and_the_table_keeps_its_length() -> None:
    kv = Store(32, 4, windows=[window(8, 6)], enable_prefix_caching=False)
    kv.admitted(1, list(range(20)))
    [group] = kv.attention[1:]
    assert kv.blocks_of(1, 1) == []  # nothing is reserved
    kv.advance(1, 0, 12)
    assert [bool(b) for b in kv.blocks_of(1, 1)] == [False, True, True]  # position 12 sees 7...
    assert group.pool.num_used == 2 and group.pool.num_free == 5
    kv.advance(1, 12, 20)
    assert [bool(b) for b in kv.blocks_of(1, 1)] == [False, False, False, True, True]
    assert kv.usage.num_used_blocks == 5
    kv.free(1)
    assert group.pool.num_free == 7


def test_a_hit_needs_the_blocks_that_the_next_row_sees_and_no_others() -> None:
    kv = Store(32, 4, windows=[window(8, 6)])
    [group] = kv.attention[1:]
    tokens = list(range(17))
    kv.compute(1, tokens)
    kv.free(1)
    path = kv.match(tokens).node
    assert path is not None and path.depth == 4
    # A row at position 16 sees 11..16: of the first two blocks nothing is needed.
    for node in path.path()[:2]:
        group.forget(node)
    assert kv.match(tokens).num_full_blocks == 4
    group.forget(path.path()[2])
    assert kv.match(tokens).num_full_blocks == 0  # three, two and one need blocks that are gone
    kv.check_integrity()
    assert kv.compute(2, tokens)[0] == 0
    assert kv.match(tokens).num_full_blocks == 4  # what was computed anew is there again


def test_a_partial_block_is_copied_in_every_group() -> None:
    kv = Store(32, 4, windows=[window(16, 6), window(16, 3)])
    kv.compute(1, list(range(10)))
    assert kv.admitted(2, [0, 1, 2, 3, 4, 5, 99]) == 6
    full, *windows = kv.launch_step(99)
    assert full == (BlockCopy(kv.blocks_of(1)[1], kv.blocks_of(2)[1]),)
    assert [len(copies) for copies in windows] == [1, 1]
    kv.check_integrity()


def test_a_tail_is_kept_and_copied_in_every_group_or_not_at_all() -> None:
    kv = Store(32, 4, windows=[window(16, 6), window(16, 3)])
    tokens = list(range(10))
    kv.compute(1, tokens)
    kv.free(1)
    kv.check_integrity()
    tail = kv.match([*tokens, 99]).partial
    assert tail is not None and all(tail.entries)
    assert kv.admitted(2, [*tokens, 99]) == 10
    assert [len(copies) for copies in kv.launch_step(98)] == [1, 1, 1]
    kv.on_step_evaluated(98)
    kv.free(2)
    kv.attention[2].forget(tail)
    kv.check_integrity()
    assert kv.match([*tokens, 99]).num_tokens(4) == 8
    assert kv.admitted(3, [*tokens, 99]) == 8


def test_a_block_that_is_being_filled_is_copied_where_its_owner_still_has_the_window() -> None:
    kv = Store(32, 4, windows=[window(16, 3)])
    kv.compute(1, list(range(11)))
    assert kv.admitted(2, [*range(10), 99]) == 10
    assert [len(copies) for copies in kv.launch_step(98)] == [1, 1]
    # A row at 8 sees 6; of this the owner of the block keeps nothing.
    assert kv.blocks_of(1, 1)[1] == 0
    assert kv.admitted(3, [*range(8), 99]) == 8
    kv.check_integrity()


def test_a_prompt_is_cut_to_the_room_there_is() -> None:
    kv = Store(64, 4, windows=[window(5, 6)])
    kv.admitted(1, list(range(40)))
    assert kv.allocate_up_to(1, 40) == 16
    kv.advance(1, 0, 16)
    assert kv.allocate_up_to(1, 40) == 24
    kv.check_integrity()


def test_the_trail_of_a_prompt_goes_before_the_ends_of_others() -> None:
    kv = Store(64, 4, windows=[window(7, 4)])
    old, long = list(range(100, 109)), list(range(24))
    kv.compute(1, old)
    kv.free(1)
    kv.admitted(2, long)
    for start in range(0, 24, 4):
        kv.advance(2, start, start + 4)
    # Nine blocks went through six; those that the old one ended with are still there.
    assert kv.match(old).num_full_blocks == 2
    assert kv.group_usage[0].num_used_blocks == 1


def test_what_was_shared_is_kept_when_it_is_passed() -> None:
    kv = Store(64, 4, windows=[window(16, 4)])
    system = list(range(8))
    kv.compute(1, [*system, *range(50, 60)])
    kv.free(1)
    kv.compute(2, [*system, *range(70, 80)])
    [group] = kv.attention[1:]
    shared = kv.match([*system, 0]).node
    assert shared is not None and shared.entries[1] in group.pool._kept


def test_a_sequence_longer_than_a_pool_without_room_for_a_view_is_refused() -> None:
    assert KVManager(100, 4, windows=[window(3, 12)]).capacity == 8
    assert KVManager(100, 4, windows=[window(5, 12)]).capacity == 99 * 4


def test_spans_are_checked() -> None:
    with pytest.raises(InvalidParameterError, match="span must be at least 1 but got 0"):
        KVManager(8, 4, windows=[window(8, 0)])


# States.


def test_a_state_moves_from_slot_to_slot() -> None:
    kv = Store(32, 4, states=StateGroupSpec(8, snapshot_interval=100))
    _, moves = kv.compute(1, list(range(6)))
    assert [m.read for m in moves if m] == [0, moves[0].write]  # type: ignore[union-attr]
    # It was cut at the last full block, whose state stays.
    assert kv.group_usage[0].num_cached_blocks == 1
    kv.free(1)
    assert kv.compute(2, [0, 1, 2, 3, 77])[1][0].read == moves[0].write  # type: ignore[union-attr]


def test_there_is_no_hit_between_snapshots() -> None:
    kv = Store(32, 4, states=StateGroupSpec(16, snapshot_interval=100))
    kv.compute(1, list(range(17)))
    kv.free(1)
    assert kv.match(list(range(17))).num_tokens(4) == 16
    assert kv.match(list(range(16))).num_tokens(4) == 0  # 15 at most, and there is none before 16
    # A sequence that leaves a known prefix where no state is stored stores one there.
    assert kv.compute(2, [*range(9), *range(50, 58)])[0] == 0
    assert kv.compute(3, [*range(8), *range(60, 63)])[0] == 8


def test_no_tail_is_kept_where_no_state_could_continue_from_it() -> None:
    kv = Store(32, 4, states=StateGroupSpec(16))
    kv.compute(1, list(range(10)))
    kv.free(1)
    assert kv.usage.num_indexed_blocks == 2
    assert kv.admitted(2, list(range(11))) == 8


def test_snapshots_while_tokens_are_generated() -> None:
    kv = Store(32, 4, states=StateGroupSpec(16, snapshot_interval=2))
    tokens = list(range(5))
    kv.compute(1, tokens)
    for token in range(50, 65):
        tokens.append(token)
        assert kv.grow(1, len(tokens))
        kv.advance(1, len(tokens) - 1, len(tokens))
    kv.free(1)
    assert kv.match([*tokens, 0]).num_tokens(4) == 16  # of 20, every 8


def test_the_newest_snapshot_of_an_answer_replaces_the_one_before() -> None:
    kv = Store(32, 4, states=StateGroupSpec(16, snapshot_interval=4, keeps_newest=True))
    tokens = list(range(5))
    kv.compute(1, tokens)
    found = []
    for token in range(50, 74):
        tokens.append(token)
        assert kv.grow(1, len(tokens))
        kv.advance(1, len(tokens) - 1, len(tokens))
        if len(tokens) % 4 == 0:
            found.append((len(tokens), kv.group_usage[0].num_indexed_blocks))
    # One snapshot is the prompt's. The one at 16 tokens is kept because of the interval.
    assert found == [(8, 2), (12, 2), (16, 2), (20, 3), (24, 3), (28, 3)]
    kv.free(1)
    assert kv.match([*tokens, 0]).num_tokens(4) == 28
    assert kv.match([*tokens[:27], 0]).num_tokens(4) == 16


def test_slots_that_only_name_states_are_free_at_once_and_never_refused() -> None:
    freed: list[int] = []
    kv = Store(64, 4, states=StateGroupSpec(3, on_free=freed.append))
    for seq_id in range(10):
        kv.admitted(seq_id, [seq_id, 1])
    assert kv.states is not None
    kv.allocate_up_to(0, 1)
    first = kv.move_state(0, 1)
    kv.launch_step(1)
    kv.allocate_up_to(0, 2)
    second = kv.move_state(0, 2)  # the step before is in flight
    assert first is not None and second is not None
    assert freed == [first.write] and second.read == first.write
    moves = [kv.move_state(seq_id, 1) for seq_id in range(1, 10)]
    for seq_id in range(10):
        kv.free(seq_id)
    assert freed[1:] == [second.write, *(move.write for move in moves if move is not None)]
    kv.check_integrity()


def test_no_snapshot_takes_what_running_sequences_need() -> None:
    kv = Store(32, 4, states=StateGroupSpec(4))
    kv.compute(1, list(range(9)))
    assert kv.group_usage[0].num_indexed_blocks == 0
    assert kv.admit(2, list(range(9))) is None  # three slots are one sequence's
    kv.check_integrity()


def test_a_state_cannot_be_forked_but_its_snapshot_can_be_read_twice() -> None:
    kv = Store(32, 4, states=StateGroupSpec(20))
    tokens = list(range(10))
    kv.compute(1, tokens)
    assert kv.admitted(2, list(tokens), fork_of=1, num_fork_tokens=9) == 8
    assert kv.admitted(3, list(tokens), fork_of=1, num_fork_tokens=9) == 8
    reads = [kv.move_state(i, 10).read for i in (2, 3)]  # type: ignore[union-attr]
    assert reads[0] == reads[1] != 0
    kv.check_integrity()


def test_who_waits_for_a_prompt_gets_a_snapshot_where_they_part() -> None:
    kv = Store(32, 4, states=StateGroupSpec(20))
    kv.admitted(1, [*range(20)])
    kv.advance(1, 0, 4)
    waiting = [*range(13), 99]
    assert kv.computing_next_block(waiting) == 1
    assert kv.allocate_up_to(1, 20) == 12
    kv.advance(1, 4, 12)
    assert kv.computing_next_block(waiting) is None
    assert kv.admitted(2, waiting) == 12


def test_reset_lets_snapshots_go() -> None:
    kv = Store(32, 4, states=StateGroupSpec(20), windows=[window(9, 5)])
    kv.compute(1, list(range(10)))
    kv.reset_prefix_cache()
    kv.check_integrity()
    assert [usage.num_indexed_blocks for usage in kv.group_usage] == [0, 0]
    kv.free(1)
    assert [usage.num_used_blocks for usage in kv.group_usage] == [0, 0]


def test_specs_are_checked() -> None:
    with pytest.raises(InvalidParameterError, match="num_slots must be at least 3"):
        StateGroupSpec(2)
    with pytest.raises(InvalidParameterError, match="snapshot_interval must be at least 1"):
        StateGroupSpec(9, snapshot_interval=0)


@pytest.mark.parametrize(
    "damage",
    [
        lambda kv, w, s: w.pool.retain(kv.blocks_of(1, 1)[-1]),
        lambda kv, w, s: kv.tables[1].attention[1].blocks.__setitem__(0, 3),
        lambda kv, w, s: kv.tables[1].attention[1].blocks.reverse(),
        lambda kv, w, s: setattr(kv.tables[1].attention[1], "first", 0),
        lambda kv, w, s: w.pool.uncache(kv.blocks_of(1, 1)[-2]),
        lambda kv, w, s: kv.tables[1].tip.entries.__setitem__(1, 0),
        lambda kv, w, s: setattr(s, "_num_sequences", 0),
        lambda kv, w, s: setattr(kv.tables[1].state, "slot", 1 + kv.tables[1].state.slot % 7),
        lambda kv, w, s: s._read.append(1),
    ],
)
def test_the_integrity_check_finds_damage(damage: Callable[..., object]) -> None:
    kv = Store(32, 4, windows=[window(9, 5)], states=StateGroupSpec(20))
    kv.compute(1, list(range(14)))
    kv.check_integrity()
    damage(kv, kv.attention[1], kv.states)
    with pytest.raises(IntegrityError):
        kv.check_integrity()


def test_a_fork_whose_windows_do_not_reach_back_is_not_cut_to_full_blocks() -> None:
    kv = Store(3, 4, windows=[window(8, 3)])
    tokens = list(range(7))
    kv.admitted(1, tokens)
    kv.advance(1, 0, 6)
    assert kv.tables[1].attention[1].first == 1  # token 6 sees 4 and 5 alone
    # Without its copy it would begin after 4 tokens, and need what block 0 had.
    assert kv.admit(2, [*tokens[:6], 9], fork_of=1, num_fork_tokens=6) is None
    kv.check_integrity()
    kv.free(1)
    assert kv.admitted(2, [*tokens[:6], 9]) is not None
