"""Sequences that shrink, are forked, and are written anew, in the KV manager."""

from __future__ import annotations

import random

import pytest
from test_kv_manager import Store, tokens_of

from mlx_paged.core import (
    BlockCopy,
    BlockTables,
    ForkingKVManager,
    PrefixQuery,
    WindowGroupSpec,
)


def opened(kv: Store, seq_id: int, tokens: list[int]) -> None:
    """A sequence that has computed all its tokens."""
    kv.open(seq_id, tokens)
    assert kv.make_writable(seq_id, 0, len(tokens)) == []
    kv.commit(seq_id, len(tokens))
    kv.check_integrity()


def blocks_matched(kv: Store, text: str) -> list[int]:
    match = kv.match([*tokens_of(text), 0])
    assert match.node is not None
    return [node.entries[0] for node in match.node.path()]


@pytest.mark.parametrize("start", [4, 6])
def test_what_is_indexed_is_copied_before_it_is_written(start: int) -> None:
    kv = Store(16, 4)
    tokens = tokens_of("abcdefgh")
    opened(kv, 1, tokens)
    old = kv.blocks_of(1)
    del tokens[start:]
    kv.shrink(1, start)
    kv.check_integrity()
    assert kv.usage.num_cached_blocks == (start == 4), "a block that was cut off may be evicted"
    copies = kv.make_writable(1, start, 8)
    new = kv.blocks_of(1)
    assert new[0] == old[0] and new[1] != old[1]
    assert copies == ([BlockCopy(old[1], new[1])] if start == 6 else [])
    tokens += tokens_of("wxyz")[: 8 - start]
    kv.commit(1, 8)
    kv.check_integrity()
    # Both texts are known, each by the blocks that hold it.
    assert blocks_matched(kv, "abcdefgh") == old
    assert blocks_matched(kv, "abcdwxyz" if start == 4 else "abcdefwx") == new


def test_a_text_that_is_written_over_without_being_cut_is_indexed_under_its_own_tokens() -> None:
    kv = Store(16, 4)
    tokens = tokens_of("abcdefgh")
    opened(kv, 1, tokens)
    assert kv.make_writable(1, 4, 12) == [BlockCopy(2, 3)]
    tokens[4:] = tokens_of("stuvwxyz")
    kv.commit(1, 12)
    kv.check_integrity()
    assert blocks_matched(kv, "abcdstuvwxyz") == kv.blocks_of(1)
    assert len(blocks_matched(kv, "abcdefghwxyz")) == 2


def test_a_fork_shares_every_block_until_one_of_the_two_is_written() -> None:
    kv = Store(16, 4)
    tokens = tokens_of("abcdefghij")
    opened(kv, 1, tokens)
    kv.fork(2, 1, tokens.copy())
    kv.check_integrity()
    old = kv.blocks_of(1)
    assert kv.blocks_of(2) == old and kv.usage.num_shared_blocks == 3
    # The first to write copies; what is left has one owner, who writes in place.
    copies = kv.make_writable(1, 10, 12)
    assert copies == [BlockCopy(old[2], kv.blocks_of(1)[2])]
    assert kv.make_writable(2, 10, 14) == []
    assert kv.blocks_of(2)[:3] == old
    tokens += tokens_of("kl")
    kv.tables[2].tokens += tokens_of("xy")
    kv.commit(1, 12)
    kv.commit(2, 12)
    kv.check_integrity()
    assert blocks_matched(kv, "abcdefghijkl") == kv.blocks_of(1)
    assert blocks_matched(kv, "abcdefghijxy") == kv.blocks_of(2)[:3]


def test_what_is_written_in_the_middle_is_ones_own_to_its_end() -> None:
    """Whoever references a block references those before it, so the tail is copied as well."""
    kv = Store(16, 4)
    tokens = tokens_of("abcdefghijkl")
    opened(kv, 1, tokens)
    kv.fork(2, 1, tokens.copy())
    old = kv.blocks_of(1)
    copies = kv.make_writable(2, 4, 5)
    assert [copy.src for copy in copies or ()] == old[1:]
    del kv.tables[2].tokens[4:]
    kv.check_integrity()
    kv.free(1)
    # Evicted leaf first, which fails where a child is used longer than its parent.
    kv.run()
    opened(kv, 3, tokens_of("z" * 48))
    assert kv.counters.num_evictions == 2
    kv.check_integrity()


def test_a_match_is_adopted_by_reference_and_its_last_block_copied_when_written() -> None:
    kv = Store(16, 4)
    opened(kv, 1, tokens_of("abcdefghijkl"))
    opened(kv, 2, tokens_of("zz"))
    match = kv.match(tokens_of("abcdefxy"))
    assert match.num_tokens(4) == 6
    kv.attach_prefix(2, match)
    kv.tables[2].tokens[:] = tokens_of("abcdef")
    kv.check_integrity()
    assert kv.blocks_of(2) == kv.blocks_of(1)[:2]
    assert kv.make_writable(2, 6, 8) == [BlockCopy(kv.blocks_of(1)[1], kv.blocks_of(2)[1])]
    kv.tables[2].tokens += tokens_of("xy")
    kv.commit(2, 8)
    kv.check_integrity()
    assert blocks_matched(kv, "abcdefxy") == kv.blocks_of(2)
    kv.free(1)
    kv.free(2)
    kv.check_integrity()
    assert kv.usage.num_used_blocks == 0 and kv.usage.num_cached_blocks == 4


def test_the_tail_of_a_sequence_that_was_cut_or_forked_is_what_it_still_holds() -> None:
    kv = Store(16, 4)
    tokens = tokens_of("abcdefghij")
    opened(kv, 1, tokens)
    kv.fork(2, 1, tokens.copy())
    del tokens[6:]
    kv.shrink(1, 6)
    kv.free(1)
    kv.check_integrity()
    assert kv.usage.num_indexed_blocks == 2, "of the first, all is in the blocks of the second"
    kv.free(2)
    kv.check_integrity()
    assert kv.match(tokens_of("abcdefghij.")).num_tokens(4) == 10
    # The other way round, the same block is indexed with more of its tokens.
    kv.reset_prefix_cache()
    tokens = tokens_of("abcdefghij")
    opened(kv, 1, tokens)
    kv.fork(2, 1, tokens[:9])
    kv.shrink(2, 9)
    kv.free(2)
    kv.check_integrity()
    assert kv.match(tokens_of("abcdefghij.")).num_tokens(4) == 9
    kv.free(1)
    kv.check_integrity()
    assert kv.match(tokens_of("abcdefghij.")).num_tokens(4) == 10
    # Taken by reference, continued by copy; the tail goes when what came of it is full.
    opened(kv, 3, tokens_of("z"))
    kv.attach_prefix(3, kv.match(tokens_of("abcdefghij.")))
    kv.tables[3].tokens[:] = tokens_of("abcdefghij")
    old = kv.blocks_of(3)[2]
    assert kv.make_writable(3, 10, 13) == [BlockCopy(old, kv.blocks_of(3)[2])]
    kv.tables[3].tokens += tokens_of("klm")
    kv.commit(3, 13)
    kv.free(3)
    kv.check_integrity()
    assert kv.match(tokens_of("abcdefghijklm.")).num_tokens(4) == 13
    assert kv.usage.num_cached_blocks == kv.usage.num_indexed_blocks == 4


def test_without_room_nothing_changes_until_the_pool_has_grown() -> None:
    kv = Store(4, 4)
    opened(kv, 1, tokens_of("abcdefgh"))
    kv.fork(2, 1, tokens_of("abcdefgh"))
    before = kv.usage
    assert kv.make_writable(2, 4, 12) is None
    assert kv.usage == before
    kv.pool.grow(5)
    assert kv.make_writable(2, 4, 12) == [BlockCopy(kv.blocks_of(1)[1], kv.blocks_of(2)[1])]
    del kv.tables[2].tokens[4:]
    kv.check_integrity()


def test_without_prefix_caching_what_is_opened_is_not_indexed() -> None:
    kv = Store(16, 4, enable_prefix_caching=False)
    opened(kv, 1, tokens_of("abcdefgh"))
    kv.fork(2, 1, tokens_of("abcdefgh"))
    kv.free(1)
    kv.free(2)
    assert kv.usage.num_free_blocks == 15


@pytest.mark.parametrize("seed", range(20))
def test_random_lives(seed: int) -> None:
    """Against the text that each block should hold: written through tables, copied by copies."""
    rng = random.Random(seed)
    kv = Store(12, 4)
    contents: dict[int, list[int]] = {}
    lives: dict[int, list[int]] = {}  # text of each sequence, all of it computed
    kv.step = 1
    kv.launch(1)
    for number in range(300):
        action = rng.choice(
            ["open", "fork", "shrink", "free", "attach_prefix", *["write"] * 4, "synchronize"]
        )
        if not lives or (action == "open" and len(lives) < 6):
            lives[number] = []
            kv.open(number, [])
        name = rng.choice(list(lives))
        text, tables = lives[name], kv.tables[name]
        if action == "fork" and len(lives) < 6:
            lives[number] = text.copy()
            kv.fork(number, name, text.copy())
        elif action == "shrink":
            del text[rng.randrange(len(text) + 1) :], tables.tokens[len(text) :]
            kv.shrink(name, len(text))
        elif action == "free":
            del lives[name]
            kv.free(name)
        elif action == "attach_prefix":
            wanted = [*text, *(rng.randrange(2) for _ in range(9))]
            match = kv.match(wanted)
            if (num_tokens := match.num_tokens(4)) > len(text):
                kv.attach_prefix(name, match)
                text[:] = tables.tokens[:] = wanted[:num_tokens]
        elif action == "write":
            start = rng.randrange(len(text) + 1)
            new = [rng.randrange(2) for _ in range(rng.randrange(1, 9))]
            copies = kv.make_writable(name, start, start + len(new))
            if copies is None:
                continue
            for copy in copies:
                contents[copy.dst] = contents[copy.src].copy()
            text[start:] = tables.tokens[start:] = new
            for position in range(start, len(text)):
                block = contents.setdefault(tables.blocks[position // 4], [-1] * 4)
                block[position % 4] = text[position]
            kv.shrink(name, len(text))
            kv.commit(name, rng.choice([start, len(text)]))
        elif action == "synchronize":
            kv.on_step_evaluated(kv.step)
            kv.step += 1
            kv.launch(kv.step)
        kv.check_integrity()
        for name, text in lives.items():
            held = [token for block in kv.blocks_of(name) for token in contents[block]]
            assert held[: len(text)] == text


@pytest.mark.parametrize("seed", range(20))
def test_random_lives_with_windows(seed: int) -> None:
    """The same where some layers see 6 tokens: of those, what they see must be there."""
    rng = random.Random(seed)

    def first_visible(position: int) -> int:
        return max(0, position - 5)

    kv = ForkingKVManager(40, 4, windows=[WindowGroupSpec(24, 6, first_visible)])
    contents: tuple[dict[int, list[int]], ...] = ({}, {})
    lives: list[tuple[BlockTables, list[int]]] = []  # with the text, all of it computed
    step = 1
    kv.launch_step(step)
    for _ in range(300):
        actions = [
            "open",
            "fork",
            "shrink",
            "free",
            "attach_prefix",
            "synchronize",
            "compact",
            *["write"] * 5,
        ]
        action = rng.choice(actions)
        if not lives or (action == "open" and len(lives) < 4):
            lives.append((kv.open([]), []))
        tables, text = lives[i := rng.randrange(len(lives))]
        window = tables.attention[1]
        if action == "fork" and len(lives) < 4:
            lives.append((kv.fork(tables, text.copy()), text.copy()))
        elif action == "shrink":
            end = rng.randrange(len(text) + 1)
            if end == 0 or window.first * 4 <= first_visible(end):
                del text[end:], tables.tokens[end:]  # type: ignore[attr-defined]
                kv.shrink(tables, end)
        elif action == "free":
            kv.free(lives.pop(i)[0])
        elif action == "attach_prefix":
            wanted = [*text, *(rng.randrange(2) for _ in range(9))]
            match = kv.match(PrefixQuery(wanted))
            if (num_tokens := match.num_tokens(4)) > len(text):
                kv.attach_prefix(tables, match)
                text[:] = tables.tokens[:] = wanted[:num_tokens]  # type: ignore[index]
        elif action == "write":
            start = len(text)
            if rng.random() < 0.3 and window.first * 4 <= first_visible(max(0, len(text) - 3)):
                start = max(0, len(text) - 3)
            new = [rng.randrange(2) for _ in range(rng.randrange(1, 9))]
            end = start + len(new)
            needed = [kv.attention[number].num_to_write(tables, start, end) for number in (0, 1)]
            if any(n > kv.attention[k].pool.num_available for k, n in enumerate(needed)):
                continue
            owned = True
            for number, content in enumerate(contents):
                before = set(tables.attention[number].live)
                copies = kv.make_writable(tables, start, end, number)
                owned = owned and copies is not None
                if copies is not None:
                    fresh = set(tables.attention[number].live) - before
                    assert len(fresh) == needed[number]
                for copy in copies or ():
                    content[copy.dst] = content[copy.src].copy()
            if not owned:  # (a step in flight may read what would be evicted)
                kv.shrink(tables, start)
                del text[start:], tables.tokens[start:]  # type: ignore[attr-defined]
                continue
            text[start:] = tables.tokens[start:] = new  # type: ignore[index]
            kv.shrink(tables, end)
            for number, content in enumerate(contents):
                blocks = tables.attention[number].blocks
                for position in range(start, end):
                    content.setdefault(blocks[position // 4], [-1] * 4)[position % 4] = text[
                        position
                    ]
            if rng.random() < 0.5:
                kv.commit(tables, rng.choice([start, end]))
            else:
                kv.slide(tables, rng.choice([start, end]))
        elif action in ("synchronize", "compact"):
            kv.on_step_evaluated(step)
            if action == "compact":
                number = rng.randrange(2)
                pool = kv.attention[number].pool
                size = rng.randrange(max(2, pool.num_used + 1), pool.num_blocks + 1)
                for copy in kv.compact(size, number):
                    contents[number][copy.dst] = contents[number][copy.src].copy()
                pool.grow((40, 24)[number])
            step += 1
            kv.launch_step(step)
        kv.check_integrity()
        for tables, text in lives:
            for number, content in enumerate(contents):
                first = first_visible(len(text)) if number else 0
                blocks = tables.attention[number].blocks
                held = [content[blocks[p // 4]][p % 4] for p in range(first, len(text))]
                assert held == text[first:], number


def test_a_window_written_again_before_what_it_holds_takes_blocks_without_copies() -> None:
    kv = ForkingKVManager(
        12, 4, windows=[WindowGroupSpec(12, 6, lambda position: max(0, position - 5))]
    )
    kv.launch_step(1)
    tables = kv.open([])
    assert kv.attention[1].num_to_write(tables, 10, 17) == 3
    assert (
        kv.make_writable(tables, 10, 17, 1) == []
    )  # nothing in front of a text that came from outside
    assert [bool(block) for block in tables.attention[1].blocks] == [False] * 2 + [True] * 3
    assert kv.attention[1].num_to_write(tables, 5, 18) == 1
    assert kv.make_writable(tables, 5, 18, 1) == []
    assert [bool(block) for block in tables.attention[1].blocks] == [False] + [True] * 4
    assert kv.make_writable(tables, 5, 18) == []  # of full attention it needs all
    assert all(tables.blocks) and len(tables.blocks) == 5
    kv.check_integrity()
    kv.shrink(tables, 0)
    assert tables.attention[1].first == 0 == kv.attention[1].pool.num_used
    kv.check_integrity()
