"""Streaming text: exactly the text of the tokens, whole characters, and stop strings unseen."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from support.models import embedded

from mlx_paged.engine.detokenizer import IncrementalDetokenizer
from mlx_paged.parsing.special_tokens import special_token_ids

REPLACEMENT = "\ufffd"  # what an incomplete character decodes to

# Pieces of code, and everything that takes more than one byte or more than one code point.
ASCII = [
    "def f(x):\n    return x\n",
    "  ",
    "\n\n",
    "\t",
    "</s>",
    "'",
    "1234567",
    " the",
    "END",
    "EN",
]
OTHERS = ["é", "naïve", "日本語", "🙂", "👩\u200d👧", "🇩🇪", "ñ", "e\u0301", "\U0010ffff"]
fragments = st.sampled_from([*ASCII, *OTHERS])
characters = st.text(
    st.characters(codec="utf-8", exclude_characters="\x00" + REPLACEMENT), max_size=12
)
# Begins with a letter: what happens to leading spaces has tests of its own below.
texts = st.lists(fragments | characters, max_size=12).map(lambda parts: "x" + "".join(parts))


def encode(text: str) -> list[int]:
    ids = embedded().tokenizer.encode(text, add_special_tokens=False)
    assert embedded().tokenizer.decode(ids) == text
    return ids


def stream(
    tokens: Sequence[int], stop: Sequence[str] = ()
) -> tuple[list[str], IncrementalDetokenizer]:
    """One delta for each token and one for the end."""
    stream = IncrementalDetokenizer(embedded().tokenizer, stop)
    deltas = [stream.add(token) for token in tokens]
    deltas.append(stream.finish())
    assert "".join(deltas) == stream.text
    return deltas, stream


# --- The text of the tokens -----------------------------------------------------------------------


@given(texts)
@example("x" + "🙂" * 20)
@example("x \ud7ff\ue000")
@example("x ")
def test_deltas_add_up_to_the_text(text: str) -> None:
    deltas, _ = stream(encode(text))
    assert "".join(deltas) == text


@given(texts)
def test_no_character_is_ever_split(text: str) -> None:
    deltas, _ = stream(encode(text))
    assert not any(REPLACEMENT in delta for delta in deltas)


@given(texts)
def test_text_is_not_held_back_without_need(text: str) -> None:
    """Without stop strings, all whole characters are out, single spaces included."""
    tokens = encode(text)
    decoder = IncrementalDetokenizer(embedded().tokenizer)
    for i, token in enumerate(tokens):
        decoder.add(token)
        assert decoder.text == embedded().tokenizer.decode(tokens[: i + 1]).rstrip(REPLACEMENT)


@given(st.lists(st.integers(3, 4095), max_size=30))
def test_any_tokens_read_as_the_tokenizer_reads_them(tokens: list[int]) -> None:
    tokenizer = embedded().tokenizer
    tokens = encode("x") + tokens
    expected = tokenizer.decode(tokens)
    assume("\x00" not in expected)
    deltas, _ = stream(tokens)
    assert "".join(deltas) == expected


@pytest.mark.parametrize("text", [" a", "    return x", "  ", " ", "  b", "\n  c", "\t d"])
def test_leading_spaces_are_text(text: str) -> None:
    """A completion goes on where its prompt ended: its indentation is part of the answer."""
    deltas, _ = stream(encode(text))
    assert "".join(deltas) == text


def test_each_single_space_is_out_at_once() -> None:
    """A line of indented JSON may have dozens of them."""
    [space] = encode("x ")[1:]
    deltas, _ = stream([*encode("x"), *[space] * 40])
    assert deltas == ["x", *[" "] * 40, ""]


def test_a_nul_character_is_text() -> None:
    deltas, _ = stream(encode("x\x00y"))
    assert "".join(deltas) == "x\x00y"


def test_a_character_that_never_completes_is_flushed_at_the_end() -> None:
    tokens = encode("x🙂")
    assert embedded().tokenizer.decode(tokens[:-1]) != "x🙂", "it takes several tokens"
    deltas, _ = stream(tokens[:-1])
    assert REPLACEMENT not in "".join(deltas[:-1])
    assert deltas[-1].startswith(REPLACEMENT)
    assert "".join(deltas) == embedded().tokenizer.decode(tokens[:-1])


def test_streams_share_nothing_but_the_token_map() -> None:
    one, two = (IncrementalDetokenizer(embedded().tokenizer) for _ in range(2))
    first, second = encode("xé🙂z"), encode("y日本")
    for i in range(max(len(first), len(second))):
        for decoder, tokens in ((one, first), (two, second)):
            if i < len(tokens):
                decoder.add(tokens[i])
    one.finish()
    two.finish()
    assert (one.text, two.text) == ("xé🙂z", "y日本")


def test_an_empty_stream_is_empty() -> None:
    assert stream([])[0] == [""]
    assert stream([], ["stop"])[0] == [""]


# --- Stop strings ---------------------------------------------------------------------------------


@st.composite
def texts_with_stops(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A text, and stop strings that are often parts of it, or almost."""
    text = draw(texts)
    stops = []
    for _ in range(draw(st.integers(1, 4))):
        begin = draw(st.integers(0, len(text) - 1))
        piece = text[begin : begin + draw(st.integers(1, 9))]
        stops.append(piece + draw(st.sampled_from(["", "", "~", "\n"])))
    return text, stops


@given(texts_with_stops())
def test_one_stop_string_cuts_exactly(case: tuple[str, list[str]]) -> None:
    text, (stop, *_) = case
    deltas, decoder = stream(encode(text), [stop])
    head, found, _ = text.partition(stop)
    assert "".join(deltas) == head
    assert decoder.matched_stop == (stop if found else None)


@given(texts_with_stops())
def test_of_several_stop_strings_the_first_complete_one_cuts(
    case: tuple[str, list[str]],
) -> None:
    text, stops = case
    tokens = encode(text)
    decoder = IncrementalDetokenizer(embedded().tokenizer, stops)
    emitted = ""
    for token in tokens:
        emitted += decoder.add(token)
        if decoder.matched_stop is not None:
            break
    emitted += decoder.finish()
    assert not any(stop in emitted for stop in stops)
    if decoder.matched_stop is None:
        assert emitted == text
        return
    assert decoder.matched_stop in stops
    assert text.startswith(emitted + decoder.matched_stop)
    # Nothing that was complete by then began earlier.
    known = embedded().tokenizer.decode(tokens[: tokens.index(token) + 1]).rstrip(REPLACEMENT)
    found = [at for stop in stops if (at := known.find(stop)) >= 0]
    assert not found or len(emitted) <= min(found)


@given(texts_with_stops())
def test_what_was_shown_is_never_taken_back(case: tuple[str, list[str]]) -> None:
    """At any moment, what is out could still be followed by any stop string, whole."""
    text, stops = case
    decoder = IncrementalDetokenizer(embedded().tokenizer, stops)
    for token in encode(text):
        decoder.add(token)
        if decoder.matched_stop is not None:
            break
        shown = decoder.text
        rest = text[len(shown) :]
        assert text.startswith(shown)
        # A stop string that the text completes later has not begun inside of what was shown.
        for stop in stops:
            for inside in range(1, min(len(stop), len(shown) + 1)):
                begins = shown.endswith(stop[:inside]) and rest.startswith(stop[inside:])
                assert not begins, f"{stop!r} was shown in part"


@pytest.mark.parametrize(
    ("text", "stops", "head", "matched"),
    [
        ("xabcdef", ["cd"], "xab", "cd"),
        ("xab\n\ndef", ["\n\ndef"], "xab", "\n\ndef"),
        ("x one two three", [" three", " two"], "x one", " two"),
        ("x aab", ["aab"], "x ", "aab"),  # a false start inside of the match
        ("x ababac", ["abac"], "x ab", "abac"),
        ("x🙂🙂z", ["🙂z"], "x🙂", "🙂z"),  # ends inside of what several tokens spell
        ("xEND", ["xEND"], "", "xEND"),
        ("x rest", ["x"], "", "x"),
        ("x no match, almos", ["almost"], "x no match, almos", None),
        ("x same", ["same", "same"], "x ", "same"),
    ],
)
def test_examples(text: str, stops: list[str], head: str, matched: str | None) -> None:
    deltas, decoder = stream(encode(text), stops)
    assert "".join(deltas) == head
    assert decoder.matched_stop == matched


def test_the_earliest_of_the_matches_of_one_token_wins() -> None:
    """If one token completes several stop strings, the text is cut at the first of them."""
    tokenizer = embedded().tokenizer
    [token] = [t for t in encode("x\n    return") if tokenizer.decode([t]).strip() == "return"]
    for stops in (["urn", "et"], ["et", "urn"]):
        decoder = IncrementalDetokenizer(tokenizer, stops)
        decoder.add(encode("x")[0])
        decoder.add(token)
        assert decoder.text.endswith("r") and decoder.matched_stop == "et"


def test_held_text_comes_out_at_the_end() -> None:
    deltas, decoder = stream(encode("x = 1\nfoo"), ["\nfoo()"])
    assert "\n" not in "".join(deltas[:-1])
    assert deltas[-1].endswith("\nfoo")
    assert decoder.text == "x = 1\nfoo"
    assert decoder.matched_stop is None


def test_nothing_comes_after_a_stop_string() -> None:
    decoder = IncrementalDetokenizer(embedded().tokenizer, ["b"])
    for token in encode("xab"):
        decoder.add(token)
    assert [decoder.add(token) for token in encode("more b text")] == [""] * len(
        encode("more b text")
    )
    assert decoder.finish() == ""
    assert decoder.finish() == ""
    assert decoder.text == "xa"


def test_special_tokens_are_text_only_if_asked_for() -> None:
    tokenizer = embedded().tokenizer
    special = special_token_ids(tokenizer)
    [start] = tokenizer.encode("<|im_start|>")
    assert {start, *tokenizer.eos_token_ids} <= special
    tokens = [*tokenizer.encode("a ="), start, *tokenizer.encode(" b")]
    for skip, text in ((special, "a = b"), ((), "a =<|im_start|> b")):
        stream = IncrementalDetokenizer(tokenizer, skip=skip)
        assert "".join(map(stream.add, tokens)) + stream.finish() == text
