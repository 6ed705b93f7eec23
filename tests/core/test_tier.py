"""Evicted blocks go to a tier; what is elsewhere is not matched as if it were on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from support.recording_tier import RecordingTier

from mlx_paged.core import KVManager, PrefixQuery, StateGroupSpec, WindowGroupSpec

TEXT = list(range(8))


def window(span: int, num_blocks: int) -> WindowGroupSpec:
    return WindowGroupSpec(num_blocks, span, lambda position: max(0, position - span + 1))


def compute(kv: KVManager, tokens: Sequence[int]) -> int:
    """A sequence from its admission to its end; returns the tokens that it took from the cache."""
    tables = kv.admit(tokens)
    assert tables is not None
    cached = tables.num_cached_tokens
    step = kv.pool.launched_step
    while tables.num_computed_tokens < len(tokens):
        end = kv.allocate_up_to(tables, len(tokens))
        kv.move_state(tables, end)
        step += 1
        kv.launch_step(step)
        kv.on_step_evaluated(step)
        kv.commit(tables, end)
        kv.check_integrity()
    kv.free(tables)
    kv.check_integrity()
    return cached


def store(tier: RecordingTier, num_blocks: int = 3, **options: Any) -> KVManager:
    return KVManager(num_blocks, 4, tier=tier, **options)


def matched(kv: KVManager, tokens: Sequence[int]) -> int:
    return kv.match(PrefixQuery(tokens, limit=len(tokens))).num_tokens(4)


def test_a_tier_is_handed_the_node_the_group_and_the_block() -> None:
    tier = RecordingTier(lambda handed: False)
    kv = store(tier)
    tables = kv.admit(TEXT)
    assert tables is not None
    blocks = tables.blocks.copy()
    kv.free(tables)
    compute(kv, TEXT)
    assert not tier.handed
    compute(kv, [50] * 8)
    # The last block of a sequence is evicted first.
    assert [(handed.tokens, handed.group) for handed in tier.handed] == [
        (tuple(TEXT), 0),
        (tuple(TEXT[:4]), 0),
    ]
    assert {handed.block for handed in tier.handed} == set(blocks)
    assert matched(kv, TEXT) == 0 and kv.counters.num_evictions == 2


def test_every_group_hands_over_its_own() -> None:
    tier = RecordingTier(lambda handed: False)
    kv = store(tier, 32, windows=[window(4, 4)], states=StateGroupSpec(6, snapshot_interval=1))
    for first in range(0, 60, 10):
        compute(kv, range(first, first + 8))
    groups = {handed.group for handed in tier.handed}
    assert groups == {1, 2}  # full attention has room for all
    lengths = {len(handed.tokens) for handed in tier.handed}
    assert lengths <= {4, 8}
    assert len(kv.tree) == 12  # the nodes stay


def test_a_node_elsewhere_is_not_matched_as_on_the_device() -> None:
    tier = RecordingTier()
    kv = store(tier)
    compute(kv, TEXT)
    assert matched(kv, TEXT) == 8
    compute(kv, [50] * 4)  # takes one block
    [(key, handed)] = tier.kept.items()
    assert handed.tokens == tuple(TEXT) and matched(kv, TEXT) == 4
    node = kv.tree.match(PrefixQuery(TEXT, limit=8)).node
    assert node is not None and node.depth == 2 and node.entries == [-key]
    # As a partial block it is not copied from either.
    assert matched(kv, [*TEXT[:6], 99]) == 4
    assert compute(kv, [*TEXT[:4], 99]) == 4


def test_what_is_computed_again_is_not_needed_elsewhere() -> None:
    tier = RecordingTier()
    kv = store(tier)
    compute(kv, TEXT)
    compute(kv, [50] * 8)
    assert len(tier.kept) == 2 and len(kv.tree) == 4
    assert compute(kv, TEXT) == 0
    assert {handed.tokens[0] for handed in tier.kept.values()} == {50}
    assert matched(kv, TEXT) == 8
    kv.check_integrity()


def test_what_is_below_a_dropped_node_goes_with_it() -> None:
    tier = RecordingTier(lambda handed: len(handed.tokens) == 8)
    kv = store(tier)
    compute(kv, TEXT)
    compute(kv, [50] * 4)
    assert len(tier.kept) == 1
    compute(kv, [60] * 8)  # evicts, and the tier drops, the first block of the text
    assert [handed.tokens for handed in tier.kept.values()] == []
    kv.check_integrity()


def test_a_reset_empties_the_tier() -> None:
    tier = RecordingTier()
    kv = store(tier)
    compute(kv, TEXT)
    compute(kv, [50] * 8)
    assert kv.reset_prefix_cache() == 4
    assert not tier.kept and matched(kv, [50] * 8) == 0
    kv.check_integrity()
