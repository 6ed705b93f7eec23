"""Evicted blocks go to a tier; what is elsewhere is not matched as if it were on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from support.fake_model import FakeEngine, generate
from support.fake_tier import FakeTier
from support.recording_tier import RecordingTier

from mlx_paged.core import (
    KVManager,
    MemoryTier,
    PrefixQuery,
    Request,
    Scheduler,
    SchedulerConfig,
    StateGroupSpec,
    StopPolicy,
    WindowGroupSpec,
)

TEXT = list(range(8))


def window(span: int, num_blocks: int) -> WindowGroupSpec:
    return WindowGroupSpec(num_blocks, span, lambda position: max(0, position - span + 1))


def compute(kv: KVManager, tokens: Sequence[int], *, read_cache: bool = True) -> int:
    """A sequence from its admission to its end; returns the tokens that it took from the cache."""
    tables = kv.admit(tokens, read_cache=read_cache)
    assert tables is not None and tables.restoration is None
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
    assert compute(kv, TEXT, read_cache=False) == 0
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


# --- Host memory ----------------------------------------------------------------------------------


class NoContents:
    """Contents without bytes.

    Attributes:
        keys: What is kept.
    """

    def __init__(self) -> None:
        self.keys: set[int] = set()

    def save(self, key: int, group: int, block: int) -> bool:
        self.keys.add(key)
        return True

    def discard(self, key: int) -> None:
        self.keys.remove(key)


def in_memory(room: int, num_blocks: int = 3, **options: Any) -> tuple[KVManager, NoContents]:
    """A store with `num_blocks - 1` blocks of 4 tokens, and host memory for `room` more."""
    contents = NoContents()
    num_groups = 1 + len(options.get("windows", ())) + (options.get("states") is not None)
    tier = MemoryTier(contents, [512] * num_groups, room * 512, 4)
    return KVManager(num_blocks, 4, tier=tier, **options), contents


def restored(kv: KVManager, tokens: Sequence[int]) -> int:
    """Admits a sequence, brings back what it waits for, and ends it; returns its cached tokens."""
    tables = kv.admit([*tokens, 99])
    assert tables is not None
    if tables.restoration is not None:
        kv.check_integrity()
        tables.restoration.num_done = len(tables.restoration.reads)
        kv.finish_restoration(tables.restoration)
    kv.check_integrity()
    assert tables.num_computed_tokens == tables.num_cached_tokens
    kv.free(tables)
    kv.check_integrity()
    return tables.num_cached_tokens


def test_a_prefix_comes_back_from_memory() -> None:
    kv, contents = in_memory(8, 4)
    compute(kv, TEXT)
    compute(kv, [50] * 12)  # takes every block
    assert matched(kv, TEXT) == 0 and len(contents.keys) == 2
    assert restored(kv, TEXT) == 8
    assert matched(kv, TEXT) == 8
    assert kv.counters.num_restored_tokens == kv.counters.num_cached_tokens == 8
    # It is on the device again, so memory has the other prefix only.
    assert len(contents.keys) == 3


def test_only_what_the_device_lacks_comes_back() -> None:
    kv, contents = in_memory(8, 4)
    compute(kv, TEXT)
    compute(kv, [50] * 8)  # takes the free block, and the text's last
    tables = kv.admit([*TEXT, 99])
    assert tables is not None and tables.restoration is not None
    assert tables.num_computed_tokens == 4 and tables.num_cached_tokens == 8
    [read] = tables.restoration.reads
    assert read.block == tables.blocks[1] and read.key in contents.keys


def test_what_was_evicted_first_is_dropped_first() -> None:
    kv, contents = in_memory(2)
    compute(kv, TEXT)
    compute(kv, [50] * 8)  # 2 blocks of the text are stored: no more room
    compute(kv, [60] * 4)  # one block of fifties, in place of the text's last
    assert len(contents.keys) == 2
    assert restored(kv, TEXT[:4]) == 4


def test_what_is_being_restored_is_not_dropped() -> None:
    kv, contents = in_memory(2)
    compute(kv, TEXT)
    compute(kv, [50] * 8)
    before = set(contents.keys)
    tables = kv.admit([*TEXT[:4], 99])  # takes both blocks: there is no room to store the fifties
    assert tables is not None and tables.restoration is not None
    assert {read.key for read in tables.restoration.reads} < before
    assert contents.keys >= {read.key for read in tables.restoration.reads}
    kv.check_integrity()
    kv.free(tables)
    kv.check_integrity()


def test_a_sequence_that_ends_while_it_waits_leaves_everything_as_it_was() -> None:
    kv, _ = in_memory(8, 4)
    compute(kv, TEXT)
    compute(kv, [50] * 12)
    tables = kv.admit([*TEXT, 99])
    assert tables is not None and tables.restoration is not None
    kv.free(tables)
    kv.check_integrity()
    assert not kv.restorations and restored(kv, TEXT) == 8


def test_a_reset_during_a_restoration() -> None:
    kv, contents = in_memory(8, 4)
    compute(kv, TEXT)
    compute(kv, [50] * 12)
    tables = kv.admit([*TEXT, 99])
    assert tables is not None and tables.restoration is not None
    kv.reset_prefix_cache()
    kv.check_integrity()
    # Its content is not forgotten as long as it is needed.
    assert contents.keys == {read.key for read in tables.restoration.reads}
    tables.restoration.num_done = 2
    kv.finish_restoration(tables.restoration)
    assert not contents.keys and tables.num_computed_tokens == 8
    kv.free(tables)
    kv.check_integrity()
    assert len(kv.tree) == 0


def test_all_groups_come_back_or_none() -> None:
    options = {"windows": [window(4, 8)], "states": StateGroupSpec(6)}
    for number, expected in ((None, 8), (0, 0), (1, 0), (2, 0)):
        kv, _ = in_memory(100, 4, **options)
        compute(kv, [*TEXT, 9])  # with a snapshot after the text
        kv.evict_idle()
        node = kv.tree.match(PrefixQuery(TEXT, limit=8)).node
        assert node is not None and node.depth == 2 and max(node.entries) < 0
        assert isinstance(kv.tier, MemoryTier)
        if number is not None:
            kv.tier.drop(-node.entries[number])
            kv.on_lost(node, number)
        assert restored(kv, TEXT) == expected


def test_less_memory_drops_the_oldest() -> None:
    kv, contents = in_memory(8, 4)
    compute(kv, TEXT)
    compute(kv, [50] * 12)
    assert isinstance(kv.tier, MemoryTier)
    assert kv.tier.limit(512) == 512 and len(contents.keys) == 1
    kv.check_integrity()
    assert restored(kv, TEXT) == 4
    kv.tier.limit(0)
    assert kv.tier.num_bytes == 0 and not contents.keys
    kv.check_integrity()


def test_less_memory_keeps_what_is_being_restored() -> None:
    kv, contents = in_memory(8, 4)
    compute(kv, TEXT)
    compute(kv, [50] * 12)
    tables = kv.admit([*TEXT, 99])
    assert tables is not None and tables.restoration is not None
    memory_of(kv).limit(0)
    kv.check_integrity()
    assert len(contents.keys) == 2
    tables.restoration.num_done = 2
    kv.finish_restoration(tables.restoration)
    kv.check_integrity()
    assert not contents.keys and matched(kv, TEXT) == 8


def test_room_for_a_window_may_cost_the_node_itself() -> None:
    """Full memory: what is dropped for a window's block is the node's own full attention."""
    kv, contents = in_memory(1, 8, windows=[window(4, 8)])
    compute(kv, TEXT[:4])
    kv.attention[0].evict_idle()
    node = kv.tree.match(PrefixQuery(TEXT, limit=4)).node
    assert node is not None and node.entries[0] < 0 < node.entries[1]
    kv.attention[1].evict_idle()
    kv.check_integrity()
    assert not node.is_indexed and not contents.keys and len(kv.tree) == 0


# --- Copies ahead of evictions --------------------------------------------------------------------


def memory_of(kv: KVManager) -> MemoryTier:
    assert isinstance(kv.tier, MemoryTier)
    return kv.tier


def test_an_eviction_copies_nothing_that_was_copied_ahead() -> None:
    kv, contents = in_memory(16, 4)
    compute(kv, TEXT)
    memory = memory_of(kv)
    assert memory.has_pending and memory.copy_ahead(512) == 512
    assert memory.copy_ahead(512) == 512 and not memory.has_pending
    assert len(contents.keys) == 2 and memory.is_empty  # the device still has all of it
    copied = set(contents.keys)
    memory.allowance = 0
    compute(kv, [50] * 12)
    assert contents.keys == copied and memory.num_stored == 2 and not memory.num_skipped
    assert restored(kv, TEXT) == 8


def test_a_step_copies_no_more_than_it_may() -> None:
    kv, contents = in_memory(16, 4)
    compute(kv, TEXT)
    memory_of(kv).allowance = 512
    compute(kv, [50] * 12)
    # The end was copied and its beginning was not, so neither can come back.
    assert not contents.keys and memory_of(kv).num_skipped == 1
    assert restored(kv, TEXT) == 0


def test_a_prefix_is_copied_from_its_beginning() -> None:
    kv, contents = in_memory(16, 4)
    compute(kv, TEXT)
    memory = memory_of(kv)
    memory.copy_ahead(1)
    memory.allowance = 0
    compute(kv, [50] * 12)
    assert len(contents.keys) == 1 and restored(kv, TEXT) == 4


def test_copies_ahead_leave_room_for_evicted_blocks() -> None:
    kv, contents = in_memory(8, 6)
    compute(kv, range(20))
    memory = memory_of(kv)
    while memory.has_pending:
        memory.copy_ahead(1)
    assert len(contents.keys) == 2  # a quarter
    compute(kv, [50] * 20)
    # As a block is evicted, its copy no longer counts, and the next one may be copied.
    assert memory.num_stored == 5 and memory.has_pending
    assert restored(kv, range(16)) == 16


def test_a_copy_of_a_block_that_is_replaced_is_dropped() -> None:
    """Equal tokens, and perhaps other last bits."""
    kv, contents = in_memory(16, 8)
    compute(kv, TEXT)
    memory_of(kv).copy_ahead(1024)
    assert len(contents.keys) == 2
    compute(kv, TEXT, read_cache=False)
    assert not contents.keys
    kv.reset_prefix_cache()
    kv.check_integrity()


def test_less_memory_drops_copies_ahead_first() -> None:
    kv, contents = in_memory(16, 5)
    compute(kv, [50] * 4)
    compute(kv, TEXT)
    compute(kv, [60] * 8)  # the fifties are stored
    memory = memory_of(kv)
    memory.copy_ahead(2048)
    assert len(contents.keys) == 5
    memory.limit(3 * 512)
    assert len(contents.keys) == 1 and not memory.is_empty and not memory.has_pending
    kv.check_integrity()
    memory.limit(16 * 512)
    assert restored(kv, [50] * 4) == 4


def test_a_window_is_copied_before_the_blocks_of_full_attention() -> None:
    kv, _ = in_memory(16, 4, windows=[window(4, 8)])
    compute(kv, TEXT)
    memory = memory_of(kv)
    memory.copy_ahead(1)
    node = kv.tree.match(PrefixQuery(TEXT, limit=4)).node  # where an equal prompt continues
    assert node is not None and memory.copy_of(node, 1) and not memory.copy_of(node, 0)


# --- Content that is lost -------------------------------------------------------------------------


def test_a_sequence_whose_content_is_lost_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_paged.core.kv.write_policy.MIN_TOKENS", 4)
    kv = KVManager(8, 4, tier=FakeTier(0, 1, 4, has_disk=True))
    tier = kv.tier
    assert isinstance(tier, FakeTier)
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=64), kv)
    engine = FakeEngine(scheduler)
    tier.device = engine.device
    prompt = [i % 50 for i in range(22)]
    stop = StopPolicy(max_tokens=2)
    for name in ("first", "again"):  # kept on disk once it is seen twice
        scheduler.add(Request(name, prompt, stop))
        engine.run()
    kv.evict_idle()
    request = Request("lost", prompt, stop)
    [seq] = scheduler.add(request)
    engine.step()
    assert len(kv.restorations) == 1 and seq.num_cached_tokens == 20
    tier.restore(2)
    tier.lose(4)
    tier.restore(100)
    scheduler.check_integrity()
    engine.step()  # it waits again, for what is left
    tier.restore(100)
    engine.run()
    scheduler.check_integrity()
    assert list(seq.tokens[22:]) == generate(prompt, 2, frozenset())
    assert seq.num_preemptions == 0 and seq.num_cached_tokens == 16
