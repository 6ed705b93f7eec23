"""PrefixTree: matching, searches that go on, roots, and a naive model under random operations."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_paged.core import BlockTables, PrefixNode, PrefixQuery, PrefixTree
from mlx_paged.core.kv.tree import common_prefix_len, token_bytes
from mlx_paged.errors import IntegrityError


def key_of(text: str) -> bytes:
    """A block's tokens (one letter a token)."""
    return array("I", map(ord, text)).tobytes()


def insert(tree: PrefixTree, text: str, first_block: int, salt: str | None = None) -> BlockTables:
    """Indexes the full blocks of a text for a sequence that stays at its end."""
    tables = BlockTables([ord(c) for c in text])
    node = tree.root(salt)
    size = tree.block_size
    for i in range(len(text) // size):
        node = tree.extend(node, key_of(text[i * size : (i + 1) * size]))
        node.entries[0] = node.entries[0] or first_block + i
    tree.move_tip(tables, node)
    return tables


def evict(tree: PrefixTree, node: PrefixNode) -> None:
    node.entries[0] = 0
    tree.remove(node)


def match(
    tree: PrefixTree, text: str, salt: str | None = None
) -> tuple[list[int], int | None, int]:
    """(full blocks, block of the partial match, its matching tokens)"""
    found = tree.match(PrefixQuery([ord(c) for c in text], salt, limit=len(text)))
    blocks = [] if found.node is None else [node.entries[0] for node in found.node.path()]
    return blocks, found.partial.entries[0] if found.partial else None, found.num_partial_tokens


def test_the_longest_prefix_matches_in_full_blocks_and_one_partial():
    tree = PrefixTree(4)
    insert(tree, "the cat sat on the m", 1)
    assert match(tree, "the cat sat on the m") == ([1, 2, 3, 4, 5], None, 0)
    assert match(tree, "the cat sings") == ([1, 2], 3, 1)
    assert match(tree, "the cat") == ([1], 2, 3)
    assert match(tree, "then") == ([], 1, 3)
    assert match(tree, "a cat") == ([], None, 0)
    tree.check_integrity()


def test_the_last_token_is_left_out():
    tree = PrefixTree(4)
    insert(tree, "abcdefgh", 1)
    found = tree.match(PrefixQuery([ord(c) for c in "abcdefgh"]))
    assert (found.num_full_blocks, found.num_partial_tokens, found.num_tokens(4)) == (1, 3, 7)


def test_the_partial_match_is_the_longest_among_many_children():
    tree = PrefixTree(4)
    for i, text in enumerate(["baaa", "bbca", "bbcd", "bcaa", "bbba"]):
        insert(tree, text, 1 + i)
    assert match(tree, "bbcz") == ([], 3, 3)
    assert match(tree, "bbb") == ([], 5, 3)
    assert match(tree, "bz")[2] == 1


def test_tokens_of_more_than_a_byte_match_as_a_whole():
    tree = PrefixTree(2)
    insert(tree, "\u0161\u0162", 1)  # their first bytes are those of "ab"
    assert match(tree, "ab") == ([], None, 0)
    assert match(tree, "\u0161b") == ([], 1, 1)


def test_an_equal_block_is_indexed_once():
    tree = PrefixTree(4)
    a, b = insert(tree, "abcd", 1), insert(tree, "abcd", 7)
    assert a.tip is b.tip and len(tree) == 1


def test_salts_do_not_see_each_other_and_cost_nothing_when_gone():
    tree = PrefixTree(4)
    tables = insert(tree, "abcd", 1, salt="alice")
    node = tables.tip
    assert match(tree, "abcd") == ([], None, 0)
    assert match(tree, "abcd", salt="alice") == ([1], None, 0)
    tree.move_tip(tables, None)
    evict(tree, node)
    assert not tree._roots
    tables = insert(tree, "", 1, salt="bob")
    assert len(tree._roots) == 1
    tree.move_tip(tables, None)
    assert not tree._roots
    tree.check_integrity()


def test_a_search_goes_on_where_it_stood():
    tree = PrefixTree(2)
    query = PrefixQuery([ord(c) for c in "aabbccddx"])
    assert tree.match(query).node is None
    tables = insert(tree, "aabb", 1)
    assert tree.match(query).num_full_blocks == 2
    tree.move_tip(tables, None)
    more = insert(tree, "aabbcc", 1)
    assert tree.match(query).num_full_blocks == 3
    # Its parent is evicted: the tip moves up to what is left, and the prefix can be inserted again.
    last = more.tip
    tree.move_tip(more, None)
    evict(tree, last)
    evict(tree, last.parent)
    assert tree.match(query).num_full_blocks == 1
    insert(tree, "aabbccdd", 1)
    assert tree.match(query).num_full_blocks == 4
    tree.clear()
    assert tree.match(query).node is None


def test_a_search_survives_the_eviction_of_its_whole_tree():
    tree = PrefixTree(2)
    query = PrefixQuery([ord(c) for c in "aabbx"])
    tables = insert(tree, "aabb", 1)
    assert tree.match(query).num_full_blocks == 2
    node = tables.tip
    tree.move_tip(tables, None)
    evict(tree, node)
    evict(tree, node.parent)
    assert not tree._roots and tree.match(query).node is None
    insert(tree, "aa", 9)
    assert tree.match(query).num_full_blocks == 1


def test_a_sequence_about_to_fill_a_block_is_found_by_the_blocks_first_tokens():
    tree = PrefixTree(2)
    tables = insert(tree, "aabb", 1)
    tables.tokens = [ord(c) for c in "aabbcc"]
    assert tree.filler(tables.tip, key_of("cc")) is tables
    assert tree.filler(tables.tip, key_of("c")) is tables
    assert tree.filler(tables.tip, key_of("cd")) is None
    tables.tokens.pop()  # the block's tokens are not all known
    assert tree.filler(tables.tip, key_of("c")) is None


def test_clear_returns_every_node_and_ends_indexing():
    tree = PrefixTree(2)
    tables = insert(tree, "aabb", 1)
    insert(tree, "aacc", 3)
    assert sorted(node.entries[0] for node in tree.clear()) == [1, 2, 4]
    assert len(tree) == 0 and tables.tip is None
    tree.check_integrity()


def test_a_tail_matches_in_part_and_never_as_a_block():
    tree = PrefixTree(4)
    root = tree.root()
    for block, text in enumerate(("ab", "acd", "adef"), 1):
        tree.extend(root, key_of(text)).entries[0] = block
    tree.check_integrity()
    assert match(tree, "ab") == ([], 1, 2)  # equal, but no block that others could continue after
    assert match(tree, "abcd") == ([], 1, 2)
    assert match(tree, "acdc") == ([], 2, 3)
    assert match(tree, "adefg") == ([3], None, 0)


def test_what_covers_a_tail_and_what_a_block_covers():
    tree = PrefixTree(4)
    root = tree.root()
    assert not tree.covers(root, key_of("a"))
    for block, text in enumerate(("ab", "aa", "abca"), 1):
        child = tree.extend(root, key_of(text))
        child.entries[0] = block
    assert tree.covers(root, key_of("abc")) and tree.covers(root, key_of("ab"))
    assert not tree.covers(root, key_of("ac")) and not tree.covers(root, key_of("abcaa"))
    with pytest.raises(IntegrityError, match="begins with the key of another"):
        tree.check_integrity()
    tail = tree.tail_within(child)
    assert tail is not None and tail.entries[0] == 1
    evict(tree, tail)
    assert tree.tail_within(child) is None
    tree.check_integrity()


def child_removed(tree: PrefixTree, node: PrefixNode) -> None:
    node.parent.children.clear()


@pytest.mark.parametrize(
    "damage",
    [
        lambda tree, node: node.entries.__setitem__(0, 0),
        lambda tree, node: setattr(node, "is_indexed", False),
        lambda tree, node: setattr(node, "depth", 5),
        lambda tree, node: node.parent.sorted_keys.clear(),
        lambda tree, node: setattr(node.parent, "sorted_keys", None),
        lambda tree, node: node.fillers.append(BlockTables([])),
        child_removed,
        lambda tree, node: setattr(tree, "_num_nodes", 7),
        lambda tree, node: setattr(node.parent, "key", key_of("a")),
        lambda tree, node: tree.root("ghost"),
    ],
)
def test_the_integrity_check_finds_damage(damage):
    tree = PrefixTree(2)
    insert(tree, "aacc", 1)
    node = insert(tree, "aabb", 5).tip
    tree.check_integrity()
    damage(tree, node)
    with pytest.raises(IntegrityError):
        tree.check_integrity()


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    texts=st.lists(st.text(alphabet="ab", max_size=9), min_size=1, max_size=12),
    query=st.text(alphabet="ab", max_size=10),
)
def test_matching_agrees_with_a_search_through_all_prefixes(texts, query):
    tree = PrefixTree(2)
    prefixes = set()
    for i, text in enumerate(texts):
        insert(tree, text, 1 + 10 * i)
        prefixes |= {text[:end] for end in range(2, len(text) + 1, 2)}
    blocks, _, num_partial = match(tree, query)
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
    tree.check_integrity()


# Long searches.


def index(tree: PrefixTree, tokens: list[int], salt: str | None = None) -> PrefixNode:
    node = tree.root(salt)
    for start in range(0, len(tokens) - tree.block_size + 1, tree.block_size):
        node = tree.extend(node, token_bytes(tokens[start : start + tree.block_size]))
        node.entries[0] = node.entries[0] or len(tree)
    return node


def test_a_long_search_starts_where_an_equal_one_has_come_to(monkeypatch):
    tree = PrefixTree(4)
    tokens = list(range(400))
    index(tree, tokens)
    starts = []
    search = tree._search

    def noted(query: PrefixQuery, node: PrefixNode) -> PrefixNode:
        starts.append(node.depth)
        return search(query, node)

    monkeypatch.setattr(tree, "_search", noted)

    def depth(tokens: list[int], salt: str | None = None) -> int:
        return tree.match(PrefixQuery([*tokens, 0], salt)).num_full_blocks

    assert depth(tokens) == 100 and depth([*tokens, 1, 2]) == 100
    assert starts == [0, 100]
    # Others that have less in common, or a longer way.
    assert depth([*tokens[:200], 7, *tokens[201:]]) == 50
    assert depth([7, *tokens[1:]]) == 0 and depth(tokens[:300]) == 75
    index(tree, [*tokens, *range(600, 900)])
    assert depth([*tokens, *range(600, 900)]) == 175
    assert starts[2:] == [0, 0, 50, 100]
    # Other salts have other nodes.
    index(tree, tokens[:120], "a")
    assert depth(tokens, "a") == 30 and depth(tokens, "b") == 0
    # Blocks that left the index are not found.
    tree.clear()
    assert depth(tokens) == 0 and tree._long_searches == []


def test_a_long_search_does_not_trust_a_node_that_was_evicted():
    tree = PrefixTree(4)
    tokens = list(range(80))
    leaf = index(tree, tokens)
    assert tree.match(PrefixQuery([*tokens, 0])).node is leaf
    leaf.entries[0] = 0
    tree.remove(leaf)
    assert tree.match(PrefixQuery([*tokens, 0])).num_full_blocks == 19


def test_only_a_few_long_searches_are_kept():
    tree = PrefixTree(1)
    for i in range(20):
        index(tree, [i, *range(30)])
        tree.match(PrefixQuery([i, *range(40)]))
        tree.match(PrefixQuery([i, *range(40)]))
    assert len(tree._long_searches) == 8
    assert {query.tokens[:4] for query in tree._long_searches} == {
        token_bytes([i]) for i in range(12, 20)
    }


def test_common_prefixes_of_any_length():
    for length in (0, 1, 2, 2047, 2048, 2049, 4096, 5000):
        tokens = list(range(length))
        a = token_bytes([*tokens, 1, 5, 5])
        for b in ([*tokens], [*tokens, 2], [*tokens, 2, 5, 5, 5], [*tokens, 1]):
            expected = length + (b[length:] == [1])
            for start in {0, length // 2, length}:
                assert common_prefix_len(a, token_bytes(b), start) == expected
                assert common_prefix_len(token_bytes(b), a, start) == expected
