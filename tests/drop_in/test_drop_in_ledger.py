"""The drop-in's ledger: what one sequence writes, no other and no later one reads in its place."""

from __future__ import annotations

import pytest

from mlx_paged.drop_in.ledger import Lease, Ledger

SIZE = 4


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(16, SIZE, settle=lambda: None, grow=lambda num_blocks: None, max_cached_blocks=16)


def filled(ledger: Ledger, tokens: list[int]) -> Lease:
    lease = ledger.lease()
    assert ledger.reserve(lease, 0, len(tokens)) == []
    ledger.publish(lease, tokens, len(tokens))
    ledger.check_integrity()
    return lease


def blocks_matched(ledger: Ledger, tokens: list[int]) -> list[int]:
    node = ledger.match(tokens, len(tokens)).node
    return [] if node is None else node.path_blocks()


@pytest.mark.parametrize("start", [4, 6])
def test_what_is_indexed_is_copied_before_it_is_written(ledger: Ledger, start: int) -> None:
    first, second = list(range(8)), [*range(start), *range(50, 58 - start)]
    lease = filled(ledger, first)
    old = list(lease.table.blocks)
    ledger.truncate(lease, start)
    assert ledger.index.num_unlocked == (start == 4), "a block that was cut off is free to go"
    copies = ledger.reserve(lease, start, 8)
    new = lease.table.blocks
    assert new[0] == old[0] and new[1] != old[1]
    assert [tuple(copy) for copy in copies] == ([(old[1], new[1])] if start == 6 else [])
    ledger.publish(lease, second, 8)
    # Both texts are known, each by the blocks that hold it.
    assert blocks_matched(ledger, first) == old
    assert blocks_matched(ledger, second) == new
    ledger.check_integrity()


def test_a_text_that_goes_on_after_it_was_cut_is_indexed_under_its_own_tokens(
    ledger: Ledger,
) -> None:
    lease = filled(ledger, list(range(8)))
    second = [*range(4), *range(50, 58)]
    ledger.reserve(lease, 4, 12)  # as mlx-lm does it: written over, not cut first
    ledger.publish(lease, second, 12)
    assert blocks_matched(ledger, second) == lease.table.blocks
    assert len(blocks_matched(ledger, [*range(8), *range(54, 58)])) == 2
    ledger.check_integrity()
