"""Blocks of a tier come back only where that is faster than computing them."""

from __future__ import annotations

from typing import Any

import pytest
from test_tier import TEXT, NoContents, compute, restored, window

from mlx_paged.core import KVManager, Level, MemoryTier, PrefixQuery, RestoreRates, StateGroupSpec
from mlx_paged.core.kv.restore_rates import MIN_BYTES, MIN_TOKENS
from mlx_paged.core.kv.stored import StoredPrefix

BLOCK_BYTES, BLOCK_SIZE = 512, 4
FIRST_DISK_KEY = 100


def rates_of(memory: float = 0.0, disk: float = 0.0, sizes: tuple[int, ...] = ()) -> RestoreRates:
    """Rates with the time to restore a block of a level, relative to computing it; 0: unknown."""
    rates = RestoreRates(
        (BLOCK_BYTES, *sizes),
        BLOCK_SIZE,
        lambda key: Level.MEMORY if key < FIRST_DISK_KEY else Level.DISK,
    )
    rates.note_computed(MIN_TOKENS, MIN_TOKENS / BLOCK_SIZE)
    for level, ratio in ((Level.MEMORY, memory), (Level.DISK, disk)):
        if ratio:
            rates.note_restored(level, MIN_BYTES, ratio * MIN_BYTES / BLOCK_BYTES)
    return rates


def prefix(levels: str) -> StoredPrefix:
    """A prefix with a block in memory or on disk for each letter."""
    keys = [1 if level == "m" else FIRST_DISK_KEY for level in levels]
    stored = StoredPrefix([], lambda group, index: keys[index] if index < len(keys) else 0)
    stored.extend(len(keys))
    return stored


def groups_of(**options: Any) -> Any:
    return KVManager(30, BLOCK_SIZE, **options).groups


@pytest.mark.parametrize(
    ("memory", "disk", "levels", "expected"),
    [
        (0.0, 0.0, "mmdd", 4),  # nothing is known of the levels
        (0.9, 0.9, "mmdd", 4),
        (1.1, 1.1, "mmdd", 0),
        (1.1, 0.0, "mm", 0),
        (1.1, 0.0, "mmd", 3),  # a block of an unknown level counts as free
        (0.5, 2.0, "mmmd", 3),
        (0.5, 2.0, "mmmdd", 3),
        (1.2, 0.5, "mmd", 3),  # the disk makes up for the memory before it
        (1.2, 0.5, "mmmdd", 5),
        (1.2, 0.5, "mmmd", 0),
        (1.2, 0.9, "mmmd", 0),
        (0.5, 3.0, "mdm", 1),
    ],
)
def test_the_part_of_a_prefix_that_pays(
    memory: float, disk: float, levels: str, expected: int
) -> None:
    assert rates_of(memory, disk).num_worth_restoring(prefix(levels), 0, groups_of()) == expected


def test_blocks_on_the_device_are_free() -> None:
    rates = rates_of(memory=1.5)
    assert rates.num_worth_restoring(prefix("mmmm"), 0, groups_of()) == 0
    assert rates.num_worth_restoring(prefix("mmmm"), 3, groups_of()) <= 3
    # Two that the device has behind one that it lacks.
    kv = KVManager(30, BLOCK_SIZE)
    compute(kv, range(12))
    nodes = kv.tree.match(PrefixQuery(range(12), limit=12)).node.path()
    nodes[0].entries[0] = -1
    assert rates.num_worth_restoring(StoredPrefix(nodes, None), 0, kv.groups) == 3


def test_windows_and_states_count_once() -> None:
    groups = groups_of(windows=[window(4, 8)], states=StateGroupSpec(6))
    # Four blocks save 4 * 0.5; the end needs one block of the window, and one state.
    for state_blocks, expected in ((0.9, 4), (1.6, 0)):
        sizes = (BLOCK_BYTES, int(2 * state_blocks * BLOCK_BYTES))
        assert (
            rates_of(memory=0.5, sizes=sizes).num_worth_restoring(prefix("mmmm"), 0, groups)
            == expected
        )


def test_nothing_is_refused_before_enough_is_known() -> None:
    rates = RestoreRates((BLOCK_BYTES,), BLOCK_SIZE, lambda key: Level.MEMORY)
    rates.note_restored(Level.MEMORY, MIN_BYTES - 1, 1e9)
    rates.note_computed(MIN_TOKENS - 1, 1e-9)
    assert rates.num_worth_restoring(prefix("m"), 0, groups_of()) == 1 and rates.is_worthwhile(
        Level.MEMORY
    )
    rates.note_computed(1, 0.0)
    assert rates.num_worth_restoring(prefix("m"), 0, groups_of()) == 1 and rates.is_worthwhile(
        Level.MEMORY
    )
    rates.note_restored(Level.MEMORY, 0, 1.0)  # a wait
    assert rates.is_worthwhile(Level.MEMORY)
    rates.note_restored(Level.MEMORY, 1, 0.0)
    assert rates.num_worth_restoring(prefix("m"), 0, groups_of()) == 0 and not rates.is_worthwhile(
        Level.MEMORY
    )
    assert rates.is_worthwhile(Level.DISK)


def test_a_refused_level_is_tried_again() -> None:
    rates = rates_of()
    rates.note_restored(Level.MEMORY, 16 * MIN_BYTES, 1e9)
    count = 0
    while count < 100 and not rates.num_worth_restoring(prefix("m"), 0, groups_of()):
        rates.note_refusal()
        count += 1
    assert 20 < count < 40


def test_another_engine_may_take_a_few_times_as_long() -> None:
    rates = rates_of()  # a token takes some time here
    computed = rates._computed.seconds
    assert computed is not None and rates.is_remote_worthwhile()
    rates.note_remote(MIN_TOKENS - 1, 1e9)
    assert rates.is_remote_worthwhile()  # too little is known
    rates = rates_of()
    rates.note_remote(1 << 16, 3 * (1 << 16) * computed)
    assert rates.is_remote_worthwhile()
    rates.note_remote(1 << 15, 9 * (1 << 15) * computed)
    refused = [not rates.is_remote_worthwhile() for _ in range(100)]
    assert refused[0] and 20 < refused.index(False) < 40  # tried again


def test_old_measurements_are_forgotten() -> None:
    rates = rates_of(memory=100.0)
    for _ in range(200):
        rates.note_restored(Level.MEMORY, MIN_BYTES, 0.5 * MIN_BYTES / BLOCK_BYTES)
    assert rates.num_worth_restoring(prefix("m"), 0, groups_of()) == 1
    for _ in range(200):
        rates.note_computed(MIN_TOKENS, 0.1 * MIN_TOKENS / BLOCK_SIZE)
    assert rates.num_worth_restoring(prefix("m"), 0, groups_of()) == 0


def test_the_bytes_of_a_step_are_those_that_memory_restores_in_its_time() -> None:
    assert rates_of().bytes_within(1.0) == rates_of(disk=0.1).bytes_within(1.0) == float("inf")
    assert rates_of(memory=2.0).bytes_within(1.0) == pytest.approx(BLOCK_BYTES / 2.0)


# --- A store that asks ----------------------------------------------------------------------------


class RatedTier(MemoryTier):
    """Host memory without bytes, and rates.

    Attributes:
        num_refusals: Calls of `on_refused`.
    """

    def __init__(self, rates: RestoreRates, num_groups: int) -> None:
        super().__init__(NoContents(), [BLOCK_BYTES] * num_groups, 100 * BLOCK_BYTES, BLOCK_SIZE)
        self.rates = rates
        self.num_refusals = 0

    def num_worth_restoring(self, stored: StoredPrefix, first: int) -> int:
        assert isinstance(self._owner, KVManager)
        return self.rates.num_worth_restoring(stored, first, self._owner.groups)

    def on_refused(self) -> None:
        self.num_refusals += 1


def rated(rates: RestoreRates, **options: Any) -> tuple[KVManager, RatedTier]:
    num_groups = 1 + len(options.get("windows", ())) + (options.get("states") is not None)
    tier = RatedTier(rates, num_groups)
    return KVManager(20, BLOCK_SIZE, tier=tier, **options), tier


def test_a_refused_prefix_is_computed() -> None:
    kv, tier = rated(rates_of(memory=2.0))
    compute(kv, TEXT)
    kv.evict_idle()
    tables = kv.admit([*TEXT, 99])
    assert tables is not None and tables.restoration is None
    assert (tables.num_cached_tokens, tables.num_refused_tokens) == (0, 8)
    assert kv.counters.num_refused_tokens == 8 and tier.num_refusals == 1
    kv.free(tables)
    kv.check_integrity()
    tier.rates = rates_of(memory=0.5)
    assert restored(kv, TEXT) == 8 and kv.counters.num_refused_tokens == 8


def test_an_admission_without_room_refuses_nothing() -> None:
    kv, tier = rated(rates_of(memory=2.0))
    compute(kv, TEXT)
    kv.evict_idle()
    others = kv.admit(range(100, 100 + 18 * BLOCK_SIZE))
    assert others is not None and kv.admit([*TEXT, 99]) is None
    assert tier.num_refusals == kv.counters.num_refused_tokens == 0


def test_what_the_device_has_is_taken_even_if_the_rest_is_refused() -> None:
    kv, tier = rated(rates_of(memory=2.0))
    compute(kv, range(12))
    leaf = kv.tree.match(PrefixQuery(range(12), limit=12)).node
    assert leaf is not None
    others = kv.admit(range(100, 100 + 17 * BLOCK_SIZE))  # evicts the last block
    assert others is not None and leaf.entries[0] < 0
    kv.free(others)
    tables = kv.admit([*range(12), 99])
    assert tables is not None and tables.restoration is None
    assert (tables.num_cached_tokens, tables.num_refused_tokens) == (8, 4)
    assert tier.num_refusals == 1


def test_a_hybrid_continues_from_a_snapshot_or_not_at_all() -> None:
    """By full attention alone, other ends would be better, but there is no state."""
    kv, tier = rated(rates_of(), states=StateGroupSpec(8, snapshot_interval=2))
    compute(kv, range(9))
    compute(kv, range(17))
    kv.evict_idle()
    leaf = kv.tree.match(PrefixQuery(range(16), limit=16)).node
    assert leaf is not None
    keys = [[-entry for entry in node.entries] for node in leaf.path()]
    assert [state > 0 for _, state in keys] == [False, True, False, True]
    for slow, expected in ((keys[3][0], 8), (keys[1][0], 0), (keys[3][1], 0), (-1, 16)):
        tier.rates = rates_of(memory=0.1, disk=9.0, sizes=(BLOCK_BYTES,))
        tier.rates._level_of = lambda key, slow=slow: Level.DISK if key == slow else Level.MEMORY
        tables = kv.admit([*range(16), 99])
        assert tables is not None
        assert (tables.num_cached_tokens, tables.num_refused_tokens) == (expected, 16 - expected)
        reads = [] if tables.restoration is None else tables.restoration.reads
        assert sum(read.group == 1 for read in reads) == (expected > 0)
        kv.free(tables)
        kv.check_integrity()
