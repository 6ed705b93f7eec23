"""KVManager: block tables, prefix sharing, copy-on-write, forks, deferred frees."""

from __future__ import annotations

import pytest
from support.id_store import IdStore

from mlx_paged.core import (
    BlockCopy,
    KVManager,
    PrefixQuery,
)
from mlx_paged.errors import IntegrityError, InvalidParameterError


class Store(IdStore):
    """A manager with steps that are launched and evaluated at once, and checked books."""

    step = 0

    def run(self) -> list[BlockCopy]:
        self.step += 1
        copies = self.launch(self.step)
        self.on_step_evaluated(self.step)
        self.check_integrity()
        return copies

    def compute(self, seq_id: int, tokens: list[int], **options: object) -> int:
        """Admits a sequence and computes all its tokens."""
        num_cached = self.admit(seq_id, tokens, **options)  # type: ignore[arg-type]
        assert num_cached is not None
        self.run()
        self.commit(seq_id, len(tokens))
        self.check_integrity()
        return num_cached


def tokens_of(text: str) -> list[int]:
    return [ord(c) for c in text]


def test_block_size_is_checked():
    with pytest.raises(InvalidParameterError, match="block_size must be at least 1 but got 0"):
        KVManager(8, 0)


def test_full_blocks_are_shared_by_reference_while_the_first_owner_runs():
    kv = Store(16, 4)
    assert kv.compute(1, tokens_of("systemprompt hello")) == 0
    assert kv.compute(2, tokens_of("systemprompt world")) == 13  # three blocks, and the blank
    a, b = kv.blocks_of(1), kv.blocks_of(2)
    assert a[:3] == b[:3] and not set(a[3:]) & set(b[3:])
    assert kv.usage.num_shared_blocks == 3
    assert kv.counters.num_cached_tokens == 13 and kv.counters.num_queried_tokens == 36


def test_room_is_foreseen_without_counting_a_cached_block_twice():
    kv = Store(7, 4)
    kv.compute(1, tokens_of("systemprompt"))
    kv.compute(2, tokens_of("zzzz"))
    # Two blocks are free. What a running sequence holds costs nothing.
    assert kv.will_have_room(tokens_of("systemprompt and you"))
    assert not kv.will_have_room(tokens_of("systemprompt and you"), headroom=1)
    assert not kv.will_have_room(tokens_of("systemprompt and all of you"))
    # Five are free or cached. To use a cached one takes it from them.
    kv.free(1)
    assert kv.will_have_room(tokens_of("systemprompt and you"))
    assert not kv.will_have_room(tokens_of("systemprompt and all of you"))


def test_the_last_token_is_never_taken_from_the_cache():
    kv = Store(16, 4)
    kv.compute(1, tokens_of("abcdefgh"))
    num_cached = kv.admit(2, tokens_of("abcdefgh"))
    assert num_cached == 7
    assert kv.blocks_of(2)[0] == kv.blocks_of(1)[0]
    assert kv.run() == [BlockCopy(kv.blocks_of(1)[1], kv.blocks_of(2)[1])]


def test_a_block_that_matches_in_part_is_copied():
    kv = Store(16, 4)
    kv.compute(1, tokens_of("the cat sat on"))
    assert kv.admit(2, tokens_of("the cat sings")) == 9
    assert kv.usage.num_shared_blocks == 3  # the source too, until the step is launched
    kv.check_integrity()
    assert kv.run() == [BlockCopy(kv.blocks_of(1)[2], kv.blocks_of(2)[2])]
    assert kv.usage.num_shared_blocks == 2
    counters = kv.counters
    assert (counters.num_block_copies, counters.num_copied_tokens) == (1, 1)


def test_the_source_of_a_copy_outlives_its_owner_until_the_copy_is_done():
    kv = Store(4, 4)
    kv.compute(1, tokens_of("abcdefgh"))
    assert kv.admit(2, tokens_of("abcx")) == 3
    source = kv.blocks_of(1)[0]
    kv.free(1)
    kv.check_integrity()
    assert kv.admit(3, tokens_of("zzzzzzzz")) is None  # the source is no block to evict
    (copy,) = kv.launch(2)
    assert copy.src == source
    # The copy is in flight: the source is evictable by its books, but not settled.
    assert kv.admit(3, tokens_of("zzzzzzzz")) is None
    assert kv.will_have_room(tokens_of("zzzzzzzz"))
    kv.on_step_evaluated(2)
    assert kv.admit(3, tokens_of("zzzzzzzz")) == 0
    kv.check_integrity()


def test_a_pool_filled_to_the_brim_does_without_the_copy():
    kv = Store(4, 4)
    kv.compute(1, tokens_of("aaaabbbbcccc"))
    kv.free(1)
    # Three blocks are needed and there are three: the source of the copy must give way.
    assert kv.admit(2, tokens_of("aaaabbbbccxx")) == 8
    assert kv.run() == []


def test_freed_blocks_stay_in_the_index_and_are_evicted_least_recently_used_first():
    kv = Store(7, 4)
    kv.compute(1, tokens_of("aaaabbbb"))
    kv.compute(2, tokens_of("ccccdddd"))
    kv.free(1)
    kv.free(2)
    assert (kv.usage.num_cached_blocks, kv.usage.num_free_blocks) == (4, 2)
    kv.compute(3, tokens_of("eeeeffffgggg"))
    assert kv.counters.num_evictions == 1
    assert kv.match(tokens_of("aaaabbbbx")).num_full_blocks == 1  # its leaf went
    assert kv.match(tokens_of("ccccddddx")).num_full_blocks == 2


def test_what_a_step_in_flight_may_read_is_not_evicted_in_vain():
    kv = Store(5, 4)
    kv.compute(1, tokens_of("aaaabbbb"))
    kv.launch_step(2)
    kv.free(1)
    assert (kv.usage.num_cached_blocks, kv.usage.num_free_blocks) == (2, 2)
    assert kv.admit(2, tokens_of("ccccddddeeee")) is None
    assert kv.usage.num_cached_blocks == 2
    kv.on_step_evaluated(2)
    assert kv.admit(2, tokens_of("ccccddddeeee")) == 0
    assert kv.usage.num_cached_blocks == 1
    kv.check_integrity()


def test_generated_tokens_are_reused_in_the_next_turn():
    kv = Store(16, 4)
    tokens = tokens_of("question")
    kv.compute(1, tokens)
    for i, c in enumerate("answer42"):
        tokens.append(ord(c))
        assert kv.grow(1, 9 + i)
        kv.run()
        kv.commit(1, 9 + i)
    kv.free(1)
    kv.check_integrity()
    assert kv.compute(2, tokens_of("questionanswer42 and now")) == 16
    kv.free(2)
    assert kv.compute(3, tokens_of("questionanswer42 and now then")) == 24
    kv.free(3)
    assert kv.compute(4, tokens_of("questionanswer42 and now then?")) == 29


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 8, 9, 31])
def test_what_a_sequence_has_computed_is_reused_to_the_token_after_its_end(length):
    kv = Store(32, 4)
    tokens = list(range(100, 100 + length))
    kv.compute(1, tokens)
    kv.free(1)
    kv.check_integrity()
    assert kv.usage.num_cached_blocks == kv.usage.num_indexed_blocks == -(-length // 4)
    # The last token is always computed.
    assert kv.match(tokens).num_tokens(4) == length - 1
    assert kv.compute(2, [*tokens, 7, 8, 9]) == length
    kv.free(2)
    kv.check_integrity()
    # The second sequence shares the first one's blocks: nothing is kept twice.
    assert kv.usage.num_cached_blocks == kv.usage.num_indexed_blocks == -(-(length + 3) // 4)


def test_a_block_that_is_being_filled_is_copied_from_while_its_owner_runs():
    kv = Store(16, 4)
    tokens = tokens_of("the cat")
    kv.admit(1, tokens)
    kv.run()
    kv.commit(1, 6)
    assert kv.admit(2, tokens_of("the cat sat")) == 6  # "t" is not computed yet
    assert kv.admit(3, tokens_of("the cow")) == 5
    a, b, c = map(kv.blocks_of, (1, 2, 3))
    assert kv.run() == [BlockCopy(a[1], b[1]), BlockCopy(a[1], c[1])]
    # Not from one whose own copy may be yet to come; nor before anything is computed.
    assert kv.admit(4, tokens_of("the cat sa")) == 6
    copies = kv.run()
    assert [copy.src for copy in copies] == [a[1]]
    assert kv.admit(5, tokens_of("a dog")) == kv.admit(6, tokens_of("a dog")) == 0
    kv.run()


def test_the_owner_of_a_block_that_is_to_be_copied_may_end_first():
    kv = Store(16, 4)
    kv.compute(1, tokens_of("the cat"))
    assert kv.admit(2, tokens_of("the cat sat")) == 7
    source = kv.blocks_of(1)[1]
    kv.free(1)
    kv.check_integrity()
    assert kv.usage.num_indexed_blocks == 2
    assert kv.run() == [BlockCopy(source, kv.blocks_of(2)[1])]


@pytest.mark.parametrize("longer", ["abcdefg", "abcdefgh", "abcdefghijkl"])
def test_a_tail_goes_when_a_longer_block_begins_with_it(longer):
    kv = Store(16, 4)
    for number, text in enumerate(("abcdef", "abcdxy", longer)):
        kv.compute(number, tokens_of(text))
        kv.free(number)
        kv.check_integrity()
    assert kv.usage.num_indexed_blocks == kv.usage.num_cached_blocks == len(longer + "xy.") // 4 + 1
    assert kv.match(tokens_of(longer)).num_tokens(4) == len(longer) - 1
    assert kv.match(tokens_of("abcdxyz")).num_tokens(4) == 6
    # One that is part of what is there adds nothing.
    before = kv.usage
    assert kv.compute(9, tokens_of("abcde")) == 4
    kv.free(9)
    kv.check_integrity()
    assert kv.usage == before


def test_a_tail_that_goes_before_its_copy_is_made_is_still_copied():
    kv = Store(16, 4)
    kv.compute(1, tokens_of("abcdef"))
    kv.compute(2, tokens_of("abcdefgh"))
    kv.free(1)
    assert kv.usage.num_indexed_blocks == 2  # ...defgh has it
    kv = Store(16, 4)
    kv.compute(2, tokens_of("abcd"), read_cache=False)
    kv.tables[2].tokens += tokens_of("efg")
    kv.grow(2, 7)
    kv.compute(1, tokens_of("abcdef"), read_cache=False)
    kv.free(1)
    tail = kv.match(tokens_of("abcdefz")).partial
    assert kv.admit(3, tokens_of("abcdefz")) == 6
    kv.commit(2, 7)
    kv.free(2)
    assert not tail.is_indexed and kv.match(tokens_of("abcdefgz")).num_tokens(4) == 7
    kv.check_integrity()
    [copy] = kv.run()
    assert copy.dst == kv.blocks_of(3)[1]


def test_tails_are_evicted_like_other_blocks_the_oldest_first():
    kv = Store(7, 4)
    for number, text in enumerate(("aaaaa", "bbbbb", "ccccc")):
        kv.compute(number, tokens_of(text))
        kv.free(number)
    assert (kv.usage.num_cached_blocks, kv.usage.num_free_blocks) == (6, 0)
    kv.compute(4, tokens_of("d"))
    kv.check_integrity()
    assert kv.match(tokens_of("aaaaa.")).num_tokens(4) == 4  # its leaf went
    assert kv.match(tokens_of("bbbbb.")).num_tokens(4) == 5
    assert kv.counters.num_evictions == 1


def test_nothing_that_is_not_committed_is_kept():
    kv = Store(16, 4)
    kv.compute(1, tokens_of("abcdef"))
    kv.free(1)
    # The copy of "ef" is planned; the sequence ends before a step of it is committed.
    assert kv.admit(2, tokens_of("abcdef and")) == 6
    kv.free(2)
    kv.check_integrity()
    assert kv.run() == []
    # A step that was launched and never committed.
    kv.admit(3, tokens_of("xyz"))
    kv.run()
    kv.free(3)
    assert kv.match(tokens_of("xyz.")).num_tokens(4) == 0
    assert kv.match(tokens_of("abcdef.")).num_tokens(4) == 6


def test_nothing_is_shared_of_a_sequence_whose_own_copy_may_be_yet_to_come():
    kv = Store(16, 4)
    kv.compute(1, tokens_of("abcdef"))
    assert kv.admit(2, tokens_of("abcdefgh")) == 6
    kv.free(1)
    tail = kv.match(tokens_of("abcdef.")).partial
    assert tail is not None
    kv._remove_node(tail)
    assert kv.admit(3, tokens_of("abcdefxy")) == 4
    kv.free(2)
    kv.check_integrity()
    assert kv.match(tokens_of("abcdef.")).num_tokens(4) == 4


def test_an_equal_block_computed_meanwhile_replaces_ones_own():
    kv = Store(16, 4)
    a, b = tokens_of("abcdefghi"), tokens_of("abcdefghj")
    assert kv.admit(1, a) == kv.admit(2, b) == 0
    kv.run()
    assert kv.block_table(2)[1] == 0
    assert kv.block_table(2)[1] == 3  # nothing is new since
    kv.commit(1, 9)
    kv.commit(2, 9)
    kv.check_integrity()
    assert kv.blocks_of(1)[:2] == kv.blocks_of(2)[:2]
    table, dirty_from = kv.block_table(2)
    assert list(table) == kv.blocks_of(2) and dirty_from == 0
    assert kv.counters.num_deduplicated_blocks == 2
    assert kv.usage.num_used_blocks == 4


def test_an_equal_block_that_nothing_uses_gives_way():
    """A sequence goes on with what it computed, which may have other last bits."""
    kv = Store(16, 4)
    prompt = tokens_of("abcdefgh")
    kv.compute(1, prompt)
    indexed = kv.blocks_of(1)
    kv.free(1)
    assert kv.admit(2, [*prompt]) == 7  # the last token is computed again
    kv.run()
    own = kv.blocks_of(2)
    assert own[0] == indexed[0] and own[1] != indexed[1]
    kv.commit(2, 8)
    kv.check_integrity()
    assert kv.blocks_of(2) == own
    assert kv.counters.num_deduplicated_blocks == 1
    assert kv.usage.num_used_blocks + kv.usage.num_cached_blocks == 2


def test_salts_separate():
    kv = Store(16, 4)
    kv.compute(1, tokens_of("secretprompt"), salt="alice")
    assert kv.compute(2, tokens_of("secretprompt"), salt="bob") == 0
    assert kv.compute(3, tokens_of("secretprompt")) == 0
    assert kv.compute(4, tokens_of("secretprompt"), salt="alice") == 11


def test_without_prefix_caching_nothing_is_indexed():
    kv = Store(16, 4, enable_prefix_caching=False)
    kv.compute(1, tokens_of("systemprompt"))
    assert kv.compute(2, tokens_of("systemprompt")) == 0
    kv.free(1)
    kv.free(2)
    usage = kv.usage
    assert (usage.num_free_blocks, usage.num_indexed_blocks) == (15, 0)


def test_a_request_that_reads_no_cache_still_feeds_it():
    kv = Store(16, 4)
    kv.compute(1, tokens_of("systemprompt"))
    assert kv.compute(2, tokens_of("systemprompt"), read_cache=False) == 0
    assert kv.blocks_of(1) == kv.blocks_of(2)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("length", [4, 5, 6, 8, 9])
def test_a_fork_shares_full_blocks_and_copies_the_partial_one(caching, length):
    kv = Store(32, 4, enable_prefix_caching=caching)
    tokens = list(range(length))
    kv.compute(1, tokens)
    assert kv.admit(2, list(tokens), fork_of=1, num_fork_tokens=length - 1) == length - 1
    full, partial = divmod(length - 1, 4)
    assert kv.blocks_of(1)[:full] == kv.blocks_of(2)[:full]
    copies = kv.run()
    assert copies == ([BlockCopy(kv.blocks_of(1)[full], kv.blocks_of(2)[full])] if partial else [])
    kv.commit(2, length)
    kv.free(1)
    kv.check_integrity()
    kv.free(2)
    kv.check_integrity()


def test_who_needs_the_block_that_is_being_computed_learns_of_it():
    kv = Store(32, 4)
    kv.admit(1, tokens_of("systemprompt hello"))
    kv.run()
    assert kv.computing_next_block(tokens_of("systemprompt world")) == 1
    assert kv.computing_next_block(tokens_of("sys")) == 1  # 2 of 4 tokens: worth a copy
    assert kv.computing_next_block(tokens_of("sy")) is None
    assert kv.computing_next_block(tokens_of("other prompt")) is None
    assert kv.computing_next_block(tokens_of("systemprompt world"), "salt") is None
    kv.commit(1, 8)
    assert kv.match(tokens_of("systemprompt world")).num_full_blocks == 2
    assert kv.computing_next_block(tokens_of("systemprompt world")) == 1
    kv.commit(1, 18)
    # " hel" and " wor": the next blocks differ; and "lo" is not a block whose tokens are all known.
    assert kv.computing_next_block(tokens_of("systemprompt world")) is None
    assert kv.computing_next_block(tokens_of("systemprompt hello, you")) is None
    kv.free(1)
    assert kv.computing_next_block(tokens_of("anything else")) is None


def test_who_needs_what_is_being_computed_learns_how_far_that_goes():
    kv = Store(32, 4)
    prompt = tokens_of("systemprompt hello, y")  # (a last block of one token)
    kv.admit(1, prompt)
    kv.run()

    def part_after(text: str) -> int:
        query = PrefixQuery(tokens_of(text))
        running = kv.kv.prefixes.computing_next_block(tokens_of(text), query)
        assert running is kv.tables[1]
        return kv.kv.prefixes.part_after(running, query)

    assert part_after("systemprompt world") == 12
    assert part_after("systemprompt hello, you") == part_after("systemprompt hello, y") == 20
    assert part_after("systempr") == 4
    kv.commit(1, 4)
    assert part_after("systemprompt world") == 12
    assert part_after("systempr") == 8  # it ends within the next block
    prompt += tokens_of("ou there")  # what is generated counts too
    assert part_after("systemprompt hello, you there") == 28


def test_admission_leaves_the_headroom_it_was_told():
    kv = Store(6, 4)
    assert kv.admit(1, [1] * 12, headroom=3) is None
    assert kv.usage.num_free_blocks == 5
    assert kv.admit(1, [1] * 12, headroom=2) == 0


def test_a_failed_admission_changes_nothing_but_recency():
    kv = Store(5, 4)
    kv.compute(1, tokens_of("aaaabbbb"))
    before = kv.usage
    assert kv.admit(2, tokens_of("aaaacccceeeeffff")) is None
    kv.check_integrity()
    assert kv.usage == before and not kv.run()


def test_growth_fails_without_room_and_says_whether_waiting_helps():
    kv = Store(3, 4)
    kv.compute(1, [1, 2, 3, 4])
    kv.compute(2, [5, 6, 7])
    assert kv.grow(2, 4)
    assert not kv.grow(1, 5) and not kv.can_grow_later(1, 5)
    kv.launch_step(3)
    kv.free(2)
    assert not kv.grow(1, 5) and kv.can_grow_later(1, 5)
    kv.on_step_evaluated(3)
    assert kv.grow(1, 5)
    kv.check_integrity()


def test_reset_forgets_everything_and_running_sequences_go_on():
    kv = Store(16, 4)
    running = tokens_of("abcdefgh")
    kv.compute(1, running)
    kv.compute(2, tokens_of("zzzzyyyy"))
    kv.free(2)
    assert kv.reset_prefix_cache() == 4
    kv.check_integrity()
    assert kv.match([*running, 0]).num_full_blocks == 0
    running += tokens_of("ijkl")
    assert kv.grow(1, 12)
    kv.run()
    kv.commit(1, 12)
    kv.check_integrity()
    assert kv.usage.num_indexed_blocks == 0
    kv.free(1)
    assert kv.usage.num_free_blocks == 15
    assert kv.counters.num_resets == 1


def test_a_fork_after_a_reset_is_not_indexed_either():
    kv = Store(16, 4)
    tokens = tokens_of("abcdefghi")
    kv.compute(1, tokens)
    kv.reset_prefix_cache()
    assert kv.admit(2, list(tokens), fork_of=1, num_fork_tokens=8) == 8
    kv.run()
    kv.commit(2, 9)
    kv.check_integrity()
    kv.free(1)
    kv.free(2)
    assert kv.usage.num_free_blocks == 15


# --- The books ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage",
    [
        lambda kv: kv.pool.retain(kv.blocks_of(1)[2]),
        lambda kv: kv.tables[1].tokens.insert(0, 9),
        lambda kv: kv.tables[1].blocks.reverse(),
        lambda kv: kv.pool.release(kv.blocks_of(1)[0]),
        lambda kv: kv.tables[1].tip.fillers.clear(),
        lambda kv: kv.tables[1].tip.fillers.append(kv.tables[1]),
        lambda kv: kv.kv._sequences.clear(),
    ],
)
def test_the_integrity_check_finds_damage(damage):
    kv = Store(16, 4)
    kv.compute(1, tokens_of("abcdefghi"))
    damage(kv)
    with pytest.raises(IntegrityError):
        kv.check_integrity()


def test_blocks_are_given_back_last_first_so_that_eviction_meets_leaves():
    kv = Store(5, 4)
    kv.compute(1, tokens_of("aaaabbbbcccc"))
    kv.free(1)
    for left in (2, 1, 0):
        node = kv.pool.next_to_evict()
        assert node is not None and node.depth == left + 1 and not node.children
        kv.kv._remove_node(node)
        kv.check_integrity()


def test_a_search_is_asked_again_after_eviction_and_indexing():
    kv = Store(8, 4)
    query = PrefixQuery(tokens_of("aaaabbbbcccc."))
    assert kv.kv.match(query).num_full_blocks == 0
    kv.compute(1, tokens_of("aaaabbbbcccc"))
    assert kv.kv.match(query).num_full_blocks == 3
    kv.free(1)
    kv.compute(2, tokens_of("zzzzyyyyxxxxwwwwvvvv"))  # takes two of the cached ones
    assert kv.kv.match(query).num_full_blocks == 2
    kv.free(2)
    kv.compute(3, tokens_of("aaaabbbbcccc"))
    assert kv.kv.match(query).num_full_blocks == 3


def test_a_copy_that_its_sequence_does_not_live_to_see_is_not_made():
    kv = Store(16, 4)
    kv.compute(1, tokens_of("the cat sat on"))
    assert kv.admit(2, tokens_of("the cat sings")) == 9
    kv.free(2)
    kv.check_integrity()
    assert kv.run() == []
