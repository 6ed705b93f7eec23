"""BlockPool: states of a block, reference counts, deferred release."""

from __future__ import annotations

import pytest

from mlx_paged.core import NULL_BLOCK, BlockPool, PrefixNode
from mlx_paged.errors import IntegrityError, InvalidParameterError

NODE = PrefixNode(None, b"", 1)


def test_every_block_but_the_null_block_is_handed_out_once():
    pool = BlockPool(5)
    blocks = [pool.allocate() for _ in range(4)]
    assert sorted(blocks) == [1, 2, 3, 4] and NULL_BLOCK not in blocks
    assert pool.num_free == 0 and pool.num_used == 4
    pool.check_integrity()


def test_a_pool_without_a_usable_block_is_refused():
    with pytest.raises(InvalidParameterError, match=r"num_blocks must be at least 2 .* but got 1"):
        BlockPool(1)


def test_a_block_is_free_when_its_last_reference_goes():
    pool = BlockPool(3)
    block = pool.allocate()
    pool.retain(block)
    assert (pool.ref_count(block), pool.num_shared) == (2, 1)
    pool.release(block)
    assert (pool.num_free, pool.num_shared) == (1, 0)
    pool.release(block)
    assert pool.num_free == 2
    pool.check_integrity()


def test_a_cached_block_outlives_its_sequences_and_can_be_used_again():
    pool = BlockPool(3)
    block = pool.allocate()
    pool.cache(block, NODE)
    pool.release(block)
    assert (pool.num_cached, pool.num_free, pool.num_used) == (1, 1, 0)
    pool.retain(block)
    assert (pool.num_cached, pool.num_used) == (0, 1)
    pool.release(block)
    pool.uncache(block)
    assert (pool.num_cached, pool.num_free) == (0, 2)
    pool.check_integrity()


def test_a_block_uncached_while_used_is_freed_by_its_sequence():
    pool = BlockPool(3)
    block = pool.allocate()
    pool.cache(block, NODE)
    pool.uncache(block)
    assert pool.num_used == 1
    pool.release(block)
    assert pool.num_free == 2
    pool.check_integrity()


def test_a_block_freed_in_flight_waits_for_the_newest_launched_step():
    pool = BlockPool(3)
    block = pool.allocate()
    pool.on_step_launched(1)
    pool.on_step_launched(2)
    pool.release(block)
    assert (pool.num_quarantined, pool.num_free) == (1, 1)
    pool.check_integrity()
    pool.on_step_evaluated(1)
    assert pool.num_quarantined == 1
    pool.on_step_evaluated(2)
    assert (pool.num_quarantined, pool.num_free) == (0, 2)
    pool.check_integrity()


def test_what_dates_a_block_is_its_release_not_its_eviction():
    pool = BlockPool(3)
    block = pool.allocate()
    pool.cache(block, NODE)
    pool.release(block)  # before any step
    pool.on_step_launched(1)
    assert pool.next_to_evict() is NODE
    pool.uncache(block)
    assert pool.num_free == 2


def test_steps_are_launched_and_evaluated_in_order():
    pool = BlockPool(3)
    pool.on_step_launched(1)
    with pytest.raises(AssertionError):
        pool.on_step_launched(1)
    with pytest.raises(AssertionError):
        pool.on_step_evaluated(2)
    pool.on_step_evaluated(1)
    with pytest.raises(AssertionError):
        pool.on_step_evaluated(1)


@pytest.mark.parametrize(
    "misuse",
    [
        lambda pool: pool.release(2),
        lambda pool: pool.retain(2),
        lambda pool: pool.cache(2, NODE),
        lambda pool: pool.uncache(1),
    ],
)
def test_misuse_is_caught_at_once(misuse):
    pool = BlockPool(3)
    assert pool.allocate() == 1
    with pytest.raises(AssertionError):
        misuse(pool)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda pool: pool._free.append(1), "exactly one of the states"),
        (lambda pool: pool._free.pop(), "exactly one of the states"),
        (lambda pool: pool._free.append(0), "block 0"),
        (lambda pool: pool._kept.setdefault(1), "eviction knows others"),
        (lambda pool: setattr(pool, "_num_indexed", 1), "counted as indexed"),
        (lambda pool: setattr(pool, "_num_shared", 1), "counted as shared"),
        (lambda pool: pool._quarantine.setdefault(7, []), "not in flight"),
    ],
)
def test_the_integrity_check_finds_damage(damage, message):
    pool = BlockPool(4)
    assert pool.allocate() == 1
    pool.check_integrity()
    damage(pool)
    with pytest.raises(IntegrityError, match=message):
        pool.check_integrity()


def test_a_pool_grows_while_its_blocks_are_in_use() -> None:
    pool = BlockPool(4)
    held = [pool.allocate() for _ in range(3)]
    pool.cache(held[0], NODE)
    pool.release(held[0])
    pool.grow(6)
    pool.check_integrity()
    assert (pool.num_blocks, pool.num_free, pool.num_used, pool.num_cached) == (6, 2, 2, 1)
    assert {pool.allocate(), pool.allocate()} == {4, 5}
    pool.check_integrity()


def test_what_a_sequence_passed_is_evicted_before_what_it_ended_with_and_the_oldest_first() -> None:
    pool = BlockPool(6)
    nodes = [PrefixNode(None, bytes([i]), 1) for i in range(4)]
    blocks = [pool.allocate() for _ in nodes]
    for block, node in zip(blocks, nodes, strict=True):
        pool.cache(block, node)
    pool.release(blocks[0])
    pool.release(blocks[1])
    pool.release(blocks[2], passed=True)
    pool.release(blocks[3])
    pool.retain(blocks[0])  # used again: it is the youngest afterwards
    pool.release(blocks[0])
    order = []
    while (node := pool.next_to_evict()) is not None:
        order.append(nodes.index(node))
        pool.uncache(blocks[order[-1]])
        pool.check_integrity()
    assert order == [2, 1, 3, 0]


def test_a_cached_block_that_a_step_in_flight_may_read_is_not_evicted() -> None:
    pool = BlockPool(3)
    block = pool.allocate()
    pool.cache(block, NODE)
    pool.on_step_launched(1)
    pool.release(block)
    assert pool.next_to_evict() is None
    pool.on_step_evaluated(1)
    assert pool.next_to_evict() is NODE


def test_num_freed_tells_whether_there_may_be_more_room() -> None:
    pool = BlockPool(4)
    blocks = [pool.allocate() for _ in range(3)]
    pool.cache(blocks[0], NODE)
    before = pool.num_freed
    pool.retain(blocks[0])
    pool.release(blocks[0])
    assert pool.num_freed == before
    pool.release(blocks[0])
    assert pool.num_freed == before + 1  # cached: it can be evicted
    pool.uncache(blocks[0])
    assert pool.num_freed == before + 1  # it is: that makes no more room
    pool.on_step_launched(1)
    pool.release(blocks[1])
    assert pool.num_freed == before + 1  # a step in flight may read it
    pool.on_step_evaluated(1)
    assert pool.num_freed == before + 2
    pool.cache(blocks[2], NODE)
    pool.on_step_launched(2)
    pool.release(blocks[2])
    assert pool.num_freed == before + 2 and pool.next_to_evict() is None
    pool.on_step_evaluated(2)
    assert pool.num_freed == before + 3 and pool.next_to_evict() is NODE
