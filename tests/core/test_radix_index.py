"""RadixIndex: matching, locks, eviction order, and a naive model under random operations."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_paged.core import RadixIndex, RadixNode
from mlx_paged.errors import IntegrityError


def insert(index: RadixIndex, text: str, first_block: int, salt: str | None = None) -> RadixNode:
    """Indexes the full blocks of a text (one letter a token); the caller holds the lock."""
    tokens = [ord(c) for c in text]
    node = index.root(salt)
    index.lock(node)
    size = index.block_size
    for i in range(len(tokens) // size):
        node = index.extend(node, tuple(tokens[i * size : (i + 1) * size]), first_block + i)
    return node


def match(
    index: RadixIndex, text: str, salt: str | None = None
) -> tuple[list[int], int | None, int]:
    """(full blocks, block of the partial match, its matching tokens)"""
    found = index.match([ord(c) for c in text], len(text), salt)
    blocks = [] if found.node is None else found.node.path_blocks()
    return blocks, found.partial.block if found.partial else None, found.num_partial_tokens


def test_the_longest_prefix_matches_in_full_blocks_and_one_partial():
    index = RadixIndex(4)
    insert(index, "the cat sat on the m", 1)
    assert match(index, "the cat sat on the m") == ([1, 2, 3, 4, 5], None, 0)
    assert match(index, "the cat sings") == ([1, 2], 3, 1)
    assert match(index, "the cat") == ([1], 2, 3)
    assert match(index, "then") == ([], 1, 3)
    assert match(index, "a cat") == ([], None, 0)
    index.check_integrity()


def test_the_limit_keeps_the_last_token_out():
    index = RadixIndex(4)
    insert(index, "abcdefgh", 1)
    found = index.match([ord(c) for c in "abcdefgh"], 7)
    assert (found.num_full_blocks, found.num_partial_tokens, found.num_tokens(4)) == (1, 3, 7)


def test_the_partial_match_is_the_longest_among_many_children():
    index = RadixIndex(4)
    for i, text in enumerate(["baaa", "bbca", "bbcd", "bcaa", "bbba"]):
        insert(index, text, 1 + i)
    assert match(index, "bbcz") == ([], 3, 3)
    assert match(index, "bbb") == ([], 5, 3)
    assert match(index, "bz")[2] == 1


def test_an_equal_block_is_indexed_once():
    index = RadixIndex(4)
    a = insert(index, "abcd", 1)
    b = insert(index, "abcd", 7)
    assert a is b and a.block == 1 and a.locks == 2 and len(index) == 1


def test_salts_do_not_see_each_other_and_cost_nothing_when_gone():
    index = RadixIndex(4)
    node = insert(index, "abcd", 1, salt="alice")
    assert match(index, "abcd") == ([], None, 0)
    assert match(index, "abcd", salt="alice") == ([1], None, 0)
    index.unlock(node)
    index.evict(node)
    assert not index._roots
    root = index.root("bob")
    index.lock(root)
    index.unlock(root)
    assert not index._roots
    index.check_integrity()


def test_eviction_takes_leaves_first_and_the_least_recently_used_among_them():
    index = RadixIndex(2)
    old, new = insert(index, "aabb", 1), insert(index, "aacc", 3)
    assert index.least_recently_used() is None
    index.unlock(new)
    index.unlock(old)  # now the more recent one
    evicted = []
    while (node := index.least_recently_used()) is not None:
        evicted.append(index.evict(node))
        index.check_integrity()
    assert evicted == [4, 2, 1]
    assert len(index) == index.num_unlocked == 0


def test_a_lock_protects_the_whole_path_and_refreshes_it():
    index = RadixIndex(2)
    a, b = insert(index, "aabb", 1), insert(index, "ccdd", 3)
    index.unlock(a)
    index.unlock(b)
    index.lock(a)
    assert index.num_unlocked == 2
    assert index.least_recently_used() is b
    index.unlock(a)
    assert index.least_recently_used() is b
    index.check_integrity()


def test_the_heap_stays_small_under_a_hot_prefix():
    index = RadixIndex(2)
    node = insert(index, "aabb", 1)
    index.unlock(node)
    for _ in range(10_000):
        index.lock(node)
        index.unlock(node)
    assert len(index._heap) < 100
    assert index.least_recently_used() is node


def test_clear_returns_every_block():
    index = RadixIndex(2)
    insert(index, "aabb", 1)
    insert(index, "aacc", 3)
    assert sorted(index.clear()) == [1, 2, 4]
    assert len(index) == 0
    index.check_integrity()


@pytest.mark.parametrize(
    "damage",
    [
        lambda index, node: setattr(node, "locks", 0),
        lambda index, node: setattr(node, "block", 1),
        lambda index, node: setattr(node, "depth", 5),
        lambda index, node: node.parent.sorted_keys.clear(),
        lambda index, node: node.parent.children.clear(),
        lambda index, node: setattr(index, "_num_nodes", 7),
        lambda index, node: index.root("ghost"),
    ],
)
def test_the_integrity_check_finds_damage(damage):
    index = RadixIndex(2)
    node = insert(index, "aabb", 1)
    index.check_integrity()
    damage(index, node)
    with pytest.raises(IntegrityError):
        index.check_integrity()


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    texts=st.lists(st.text(alphabet="ab", max_size=9), min_size=1, max_size=12),
    query=st.text(alphabet="ab", max_size=10),
)
def test_matching_agrees_with_a_search_through_all_prefixes(texts, query):
    index = RadixIndex(2)
    prefixes = set()
    for i, text in enumerate(texts):
        insert(index, text, 1 + 10 * i)
        prefixes |= {text[:end] for end in range(2, len(text) + 1, 2)}
    blocks, _, num_partial = match(index, query)
    num_full = max([0, *(len(p) for p in prefixes if query.startswith(p))])
    rest = query[num_full : num_full + 2]
    candidates = [p[num_full:] for p in prefixes if p[:num_full] == query[:num_full]]
    best = max(
        [
            0,
            *(
                n
                for n in (1, 2)
                for c in candidates
                if len(c) == 2 and len(rest) >= n and c[:n] == rest[:n]
            ),
        ]
    )
    assert (2 * len(blocks), num_partial) == (num_full, best)
    index.check_integrity()
