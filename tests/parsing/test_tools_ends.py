"""End tokens are no text, whichever family has them and wherever they come."""

from __future__ import annotations

import pytest
from support.tool_families import TOOLS, Family, families
from support.tool_reading import SmallTokenizer

from mlx_paged.parsing.answer import Answer, AnswerReader, answer_parser, answer_reader
from mlx_paged.parsing.lexer import Lexer
from mlx_paged.parsing.registry import format_of

FAMILIES = families()
CASES = [
    pytest.param(family, marker, id=f"{family.name} {marker}")
    for family in FAMILIES
    for marker in family.tokens
]


def answer_of(family: Family, text: str, end: str, *, shown: bool, is_end: bool = True) -> Answer:
    """Parses an answer that a token ends.

    Args:
        shown: whether the text of that token comes, as with `ignore_eos`.
        is_end: whether it is an end token of the model, or one that the request named.
    """
    tokenizer = SmallTokenizer(family.tokens)
    format = format_of(family.name, tokenizer.added, family.template)
    reader = answer_reader(format, None, family.tools, [], tokenizer.added, {}, ends=[end] * is_end)
    for token, piece in tokenizer.encode(text):
        reader.feed(token, piece)
    reader.feed(tokenizer.added[end], end if shown else "")
    list(reader.finish())
    return reader.answer


@pytest.mark.parametrize(("family", "end"), CASES)
def test_an_end_token_is_no_text(family: Family, end: str) -> None:
    for text in (family.alone("Hello."), family.alone("Hello."[:-1])):
        answer = answer_of(family, text, end, shown=False)
        assert end not in answer.content and not answer.calls
        assert answer.content.startswith("Hello")


def test_a_token_that_a_request_stops_at_is_no_text() -> None:
    [family] = [family for family in FAMILIES if family.name == "granite"]
    for end in ("<|end_of_text|>", "<|tool_call|>"):
        answer = answer_of(family, "Hello.", end, shown=False, is_end=False)
        assert answer.content == "Hello."


@pytest.mark.parametrize("shown", [False, True])
def test_granite_3_ends_its_answers_with_a_token_of_its_own(shown: bool) -> None:
    [family] = [family for family in FAMILIES if family.name == "granite"]
    end = "<|end_of_text|>"
    assert answer_of(family, "Hello.", end, shown=shown).content == "Hello."
    cut = '<|tool_call|>[{"name": "now", "arg'
    assert end not in answer_of(family, cut, end, shown=shown).content
    call = '<|tool_call|>[{"name": "now", "arguments": {}}]'
    answer = answer_of(family, call, end, shown=shown)
    assert [call.name for call in answer.calls] == ["now"] and answer.content == ""


def test_what_is_no_call_is_text_without_the_end_token() -> None:
    [family] = [family for family in FAMILIES if family.name == "llama3_json"]
    answer = answer_of(family, '{"city": "Oslo"}', "<|eom_id|>", shown=False)
    assert answer.content == '{"city": "Oslo"}'


def test_a_cut_answer_without_tools_keeps_all_its_text() -> None:
    """Nothing in it is the beginning of a call."""
    format = format_of("hermes", {})
    for tools, content in (([], "<table><tr><to"), (TOOLS, "<table><tr>")):
        parser = answer_parser(format, None, tools, begins_inside=False)
        reader = AnswerReader(Lexer(format.markers, {}), parser, tools)
        reader.feed(None, "<table><tr><to")
        list(reader.finish(is_cut=True))
        assert reader.answer.content == content
