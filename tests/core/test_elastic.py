"""ElasticKVManager: pools that grow and shrink, and steps that are evaluated at some time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mlx_paged.core import BlockCopy, BlockTables, ElasticKVManager, PrefixQuery, WindowGroupSpec
from mlx_paged.errors import IntegrityError

SIZE = 64  # of a block: 16 hold what every group has room for
LEAST = 17


class Pools:
    """Notes what the device is asked for."""

    def __init__(self) -> None:
        self.num_waits = 0
        self.sizes: list[tuple[int, int]] = []
        self.copies: list[BlockCopy] = []
        self.dropped: list[int] = []

    def wait(self) -> None:
        self.num_waits += 1

    def resize(self, number: int, num_blocks: int, copies: Sequence[BlockCopy]) -> None:
        self.sizes.append((number, num_blocks))
        self.copies += copies

    def drop_state(self, slot: int) -> None:
        self.dropped.append(slot)


def written(kv: ElasticKVManager, num_blocks: int, first: int = 0) -> BlockTables:
    """A sequence of its own tokens, computed and indexed."""
    tokens = list(range(first, first + num_blocks * SIZE))
    tables = kv.open(tokens)
    for number in range(len(kv.attention)):
        assert kv.make_writable(tables, 0, len(tokens), number) == []
    kv.commit(tables, len(tokens))
    kv.check_integrity()
    return tables


def test_a_pool_grows_to_its_limit_before_it_evicts_and_past_it_for_live_sequences() -> None:
    pools = Pools()
    kv = ElasticKVManager(pools, SIZE)
    kv.set_limits(40, 1)
    assert kv.pool.num_blocks == LEAST and kv.capacity > 1 << 40
    kv.free(written(kv, 16))
    kv.free(written(kv, 16, 10_000))  # doubles, and keeps the first one
    assert pools.sizes == [(0, 34)] and kv.usage.num_cached_blocks == 32
    kv.free(written(kv, 16, 20_000))  # up to the limit: the oldest are evicted
    assert pools.sizes == [(0, 34), (0, 40)]
    assert kv.counters.num_evictions == 9
    live = [written(kv, 16, 30_000 + 10_000 * i) for i in range(6)]
    assert kv.pool.num_blocks > 96 and kv.usage.num_used_blocks == 96
    kv.give_back()
    assert kv.usage.num_used_blocks == 96
    for tables in live:
        kv.free(tables)
    kv.give_back()
    assert kv.pool.num_blocks == 40 == pools.sizes[-1][1]
    kv.clear()
    assert kv.pool.num_blocks == LEAST and kv.usage.num_indexed_blocks == 0
    kv.check_integrity()


def test_a_released_block_is_handed_out_again_only_after_waiting() -> None:
    pools = Pools()
    kv = ElasticKVManager(pools, SIZE)
    kv.set_limits(LEAST, 1)
    tables = written(kv, 16)
    kv.reset_prefix_cache()
    waits = pools.num_waits
    kv.free(tables)
    kv.launch_step(1)  # a scheduler's step changes nothing
    kv.on_step_evaluated(1)
    assert kv.usage.num_quarantined_blocks == 16 and pools.num_waits == waits
    written(kv, 16, 10_000)
    assert pools.num_waits == waits + 1 and pools.sizes == []


def test_blocks_move_when_a_pool_shrinks() -> None:
    pools = Pools()
    kv = ElasticKVManager(pools, SIZE)
    gone = written(kv, 50)
    live = written(kv, 2, 10_000)
    before = list(live.blocks)
    kv.free(gone)
    kv.set_limits(2, 1)
    assert kv.pool.num_blocks == LEAST and max(live.blocks) < LEAST
    assert pools.copies == [BlockCopy(a, b) for a, b in zip(before, live.blocks) if a != b]
    assert kv.num_compactions == 1
    kv.check_integrity()


def test_a_scheduler_finds_room_for_any_prompt() -> None:
    kv = ElasticKVManager(Pools(), SIZE, windows=[WindowGroupSpec(0, 9, lambda p: max(0, p - 8))])
    tokens = list(range(SIZE * 100))
    tables = kv.admit(tokens)
    assert tables is not None and kv.allocate_up_to(tables, len(tokens)) == len(tokens)
    assert kv.grow(tables, 3 * len(tokens))
    kv.check_integrity()


def test_snapshots_are_limited_and_their_states_dropped() -> None:
    pools = Pools()
    kv = ElasticKVManager(pools, SIZE, has_states=True)
    assert kv.states is not None
    kv.set_limits(1000, 3)
    for first in range(0, 50_000, 10_000):
        tokens = list(range(first, first + SIZE + 1))
        tables = kv.admit(tokens)
        assert tables is not None
        for end in (SIZE, SIZE + 1):
            assert kv.allocate_up_to(tables, end) == end
            kv.move_state(tables, end)
            kv.commit(tables, end)
        kv.free(tables)
        kv.check_integrity()
    kv.give_back()
    assert kv.states.pool.num_cached == 3
    assert kv.match(PrefixQuery(list(range(40_000, 40_000 + SIZE + 1)))).num_full_blocks == 1
    assert kv.match(PrefixQuery(list(range(SIZE + 1)))).num_full_blocks == 0
    live = {slot for slot in range(1, kv.states.pool.num_blocks) if kv.states.pool.node_of(slot)}
    assert len(live) == 3 and not live & set(pools.dropped[-2:])


def test_a_plan_that_was_interrupted_leaves_nothing_behind() -> None:
    kv = ElasticKVManager(Pools(), SIZE)
    kv.free(written(kv, 2))
    kv.check_recovery(())
    tables = kv.admit([*range(SIZE + 9), 0])
    assert tables is not None and tables.num_cached_tokens == SIZE + 9  # a copy is due
    with pytest.raises(IntegrityError, match="planned but not run"):
        kv.check_recovery(())
    kv.synchronize()
    kv.recount([tables])
    kv.check_recovery(())
    assert kv.usage.num_used_blocks == 0 and kv.launch_step(1) == ((),)
