"""Text without markers passes by the lexer and the parsers: it is most of what there is."""

from __future__ import annotations

from unittest import mock

import pytest
from support.tool_families import TOOLS, Family, families
from support.tool_reading import SmallTokenizer, summary

from mlx_paged.parsing.answer import Answer, AnswerReader, answer_parser
from mlx_paged.parsing.events import Event
from mlx_paged.parsing.format import ToolFormat
from mlx_paged.parsing.lexer import Lexer
from mlx_paged.parsing.reasoning import REASONING_FORMATS
from mlx_paged.parsing.registry import format_of

TEXT = "A fox, a dog and 3 < 4 cats.\nThey met; then, \n\n they left [all] of it {here}.  \nEnd."


def read(
    format: ToolFormat, tokenizer: SmallTokenizer, text: str, *, has_reasoning: bool
) -> tuple[Answer, list[Event], int]:
    """The answer, its events, and how many updates were fed to the lexer."""
    reasoning = REASONING_FORMATS["qwen3"] if has_reasoning else None
    markers = [*format.markers, *(["<think>", "</think>"] if has_reasoning else [])]
    parser = answer_parser(format, reasoning, TOOLS, begins_inside=False)
    lexer = Lexer(dict.fromkeys(markers), tokenizer.added)
    reader = AnswerReader(lexer, parser, TOOLS)
    events: list[Event] = []
    with mock.patch.object(lexer, "feed", side_effect=lexer.feed) as fed:
        for token, piece in tokenizer.encode(text):
            events += reader.feed(token, piece)
    events += reader.finish()
    return reader.answer, events, fed.call_count


def told(answer: Answer) -> object:
    """All but ids, which may be made up."""
    found = summary(answer)
    return found["reasoning"], found["content"], [call[:3] for call in found["calls"]]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("has_tokens", [True, False], ids=["tokens", "spelled"])
@pytest.mark.parametrize("family", families(), ids=lambda family: family.name)
def test_it_is_read_the_same(family: Family, has_tokens: bool) -> None:
    has_reasoning = has_tokens
    tokenizer = SmallTokenizer((*family.tokens, "<think>", "</think>") if has_tokens else ())
    format = format_of(family.name, tokenizer.added)
    call = family.render([("now", {})])
    for text in (TEXT, f"{family.before(TEXT)}{call}", f"{call}\n{TEXT}", call[:-3]):
        if has_reasoning:
            text = f"<think>Well. {TEXT}</think>\n\n{text}"
        answer, events, num_fed = read(format, tokenizer, text, has_reasoning=has_reasoning)
        with mock.patch.object(Lexer, "passes", return_value=False):
            whole, all_events, _ = read(format, tokenizer, text, has_reasoning=has_reasoning)
        assert told(answer) == told(whole)
        assert [type(event) for event in events] == [type(event) for event in all_events]
    if not has_reasoning and not format.reads_everything:
        _, _, num_fed = read(format, tokenizer, "x " + "a" * 200, has_reasoning=False)
        assert num_fed < 8
