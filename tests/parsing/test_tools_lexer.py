"""Markers are found by their tokens, or in the text where they have none."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_paged.parsing.lexer import Lexer

CALL, END = 1000, 1001
VOCABULARY = {"<call>": CALL, "</call>": END}
SPELLED = ("<a>", "<abc>", "<ab", "!!")


def lexed(lexer: Lexer, updates: Sequence[tuple[int | None, str]]) -> list[tuple[str, bool]]:
    """The lexemes of a lexer; neighboring pieces of text are joined."""
    found: list[tuple[str, bool]] = []
    lexemes = [x for token, text in updates for x in lexer.feed(token, text)]
    for text, is_marker in [*lexemes, *lexer.finish()]:
        if found and not is_marker and not found[-1][1]:
            found[-1] = (found[-1][0] + text, False)
        else:
            found.append((text, is_marker))
    return found


def test_a_token_is_a_marker_and_its_characters_are_text() -> None:
    updates = [(7, "a "), (8, "<call"), (9, "> "), (CALL, "<call>"), (7, "x"), (END, "</call>")]
    expected = [("a <call> ", False), ("<call>", True), ("x", False), ("</call>", True)]
    assert lexed(Lexer(VOCABULARY, VOCABULARY), updates) == expected


def test_text_that_comes_late_belongs_to_its_token() -> None:
    """Stop strings and halves of characters delay text."""
    lexer = Lexer(VOCABULARY, VOCABULARY)
    assert list(lexer.feed(CALL, "")) == []
    assert list(lexer.feed(7, "é<ca")) == [("é", False)]
    assert list(lexer.feed(8, "ll>x")) == [("<call>", True), ("x", False)]


def test_tokens_that_come_at_once_are_told_from_their_characters() -> None:
    texts = {7: "say <call>", 8: " or ", CALL: "<call>", 9: "<call> <call>", END: "</call>"}
    tokens = [7, 8, CALL, 9, CALL, 8, END, 7]

    def decode(some: Sequence[int]) -> str:
        return "".join(texts[token] for token in some)

    one_by_one = lexed(Lexer(VOCABULARY, VOCABULARY), [(t, texts[t]) for t in tokens])
    at_once = [(t, "") for t in tokens[:-1]] + [(tokens[-1], decode(tokens))]
    assert lexed(Lexer(VOCABULARY, VOCABULARY, decode=decode), at_once) == one_by_one
    assert one_by_one[:3] == [("say <call> or ", False), ("<call>", True), ("<call> <call>", False)]


def test_the_token_that_ends_an_answer_may_have_no_text() -> None:
    assert lexed(Lexer(VOCABULARY, VOCABULARY), [(7, "a"), (END, "")]) == [
        ("a", False),
        ("</call>", True),
    ]


def test_special_tokens_that_mean_nothing_are_left_out() -> None:
    lexer = Lexer(VOCABULARY, VOCABULARY, {5: "<|sep|>", END: "</call>"})
    updates = [(7, "a"), (5, "<|sep|>"), (8, "<|sep|>"), (END, "</call>"), (5, "")]
    assert lexed(lexer, updates) == [("a<|sep|>", False), ("</call>", True)]
    # Not those that are a part of a marker.
    lexer = Lexer(["<D invoke>"], {"D": 5}, {5: "D"})
    assert lexed(lexer, [(7, "<"), (5, "D"), (8, " invoke>D")])[0] == ("<D invoke>", True)


def test_the_longest_marker_counts() -> None:
    updates = [(None, "<abc><ab <a>!! <abx ! <")]
    assert lexed(Lexer(SPELLED, {}), updates) == [
        ("<abc>", True),
        ("<ab", True),
        (" ", False),
        ("<a>", True),
        ("!!", True),
        (" ", False),
        ("<ab", True),
        ("x ! <", False),
    ]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["<", "a", "b", "c", ">", "!", " ", "<ab", "<abc>"]), max_size=20))
def test_spelled_markers_are_found_at_every_split(parts: list[str]) -> None:
    text = "".join(parts)
    whole = lexed(Lexer(SPELLED, {}), [(None, text)])
    assert "".join(text for text, _ in whole) == text
    rng = random.Random(text)
    for _ in range(5):
        cuts = sorted(rng.sample(range(len(text) + 1), min(4, len(text))))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
        assert lexed(Lexer(SPELLED, {}), [(None, piece) for piece in pieces]) == whole


def test_nothing_is_held_that_begins_no_marker() -> None:
    lexer = Lexer(SPELLED, {})
    assert list(lexer.feed(None, "x < y")) == [("x < y", False)]
    assert list(lexer.feed(None, "a !")) == [("a ", False)]
    assert list(lexer.feed(None, "?")) == [("!?", False)]


def test_a_marker_within_a_longer_one_that_is_not_whole_yet() -> None:
    """The longer one began before it."""
    lexer = Lexer(["Action:\n```json", "```"], {})
    found = [
        lexeme for c in "Action:\n```json {}``` Action:\n```" for lexeme in lexer.feed(None, c)
    ]
    found += lexer.finish()
    markers = [lexeme.text for lexeme in found if lexeme.is_marker]
    assert markers == ["Action:\n```json", "```", "```"]
    assert "".join(lexeme.text for lexeme in found) == "Action:\n```json {}``` Action:\n```"
