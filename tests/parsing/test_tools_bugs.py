"""Bugs that other servers had in reading calls and reasoning, each by its name.

Those that show only over HTTP are in `test_server_tools.py` and `test_server_reasoning.py`.
"""

from __future__ import annotations

import json

import pytest
from support.tool_families import TOOLS, Family, families
from support.tool_reading import SmallTokenizer, Walker, check, read

from mlx_paged.parsing.answer import AnswerReader, answer_parser
from mlx_paged.parsing.events import CallBegin, CallEnd, ContentText
from mlx_paged.parsing.lexer import Lexer
from mlx_paged.parsing.reasoning import REASONING_FORMATS, ReasoningTokens
from mlx_paged.parsing.registry import format_of

every_family = pytest.mark.parametrize("family", families(), ids=lambda family: family.name)
WEATHER = ("get_weather", {"city": "Oslo"})


def transcript(family: Family, *calls: tuple[str, dict[str, str]]) -> str:
    return family.lead + family.render(calls)


@every_family
def test_1_a_streamed_call_is_not_streamed_as_text(family: Family) -> None:
    """vllm-mlx #107."""
    tokenizer = SmallTokenizer(family.tokens)
    format = format_of(family.name, tokenizer.added, family.template)
    updates = tokenizer.encode(family.render([WEATHER]))
    _, events = read(format, TOOLS, tokenizer.added, updates)
    assert not [event for event in events if isinstance(event, ContentText)]


@every_family
def test_2_a_streamed_call_ends(family: Family) -> None:
    """vllm-mlx #672: a stream without a finish_reason. What it is follows from these events."""
    tokenizer = SmallTokenizer(family.tokens)
    format = format_of(family.name, tokenizer.added, family.template)
    updates = tokenizer.encode(family.render([WEATHER]))
    answer, events = read(format, TOOLS, tokenizer.added, updates)
    assert [type(e) for e in events if not hasattr(e, "text")] == [CallBegin, CallEnd]
    assert [call.is_complete for call in answer.calls] == [True]


@every_family
def test_3_max_tokens_within_a_call(family: Family) -> None:
    """mlx-lm #905: it crashed."""
    tokenizer = SmallTokenizer(family.tokens)
    format = format_of(family.name, tokenizer.added, family.template)
    updates = tokenizer.encode(family.render([("write_file", {"path": "a", "text": "b" * 20})]))
    at = next(i for i in range(len(updates)) if "".join(t for _, t in updates[:i]).endswith("bbb"))
    answer, _ = read(format, TOOLS, tokenizer.added, updates[:at])
    [call] = answer.calls
    assert call.name == "write_file"
    assert not call.is_complete
    assert json.loads(call.arguments + '"}') == {"path": "a", "text": "bbb"}


def test_4_a_call_that_the_end_of_the_answer_closes() -> None:
    """mlx-lm #1373: it was lost where the model wrote its end token in place of the tag."""
    tokenizer = SmallTokenizer(("<tool_call>", "</tool_call>"))
    text = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n'
    answer, _ = read(
        format_of("hermes", tokenizer.added), TOOLS, tokenizer.added, tokenizer.encode(text)
    )
    [call] = answer.calls
    assert (call.name, call.arguments, call.is_complete) == (
        "get_weather",
        '{"city": "Oslo"}',
        True,
    )


@every_family
def test_5_reasoning_and_calls_are_told_apart_together(family: Family) -> None:
    """vllm-mlx #253: one parser or the other."""
    tokenizer = SmallTokenizer(dict.fromkeys([*family.tokens, "<think>", "</think>"]))
    format = format_of(family.name, tokenizer.added, family.template)
    if format.reads_everything:
        pytest.skip("this format tells reasoning from text by itself: see its transcripts")
    think = REASONING_FORMATS["deepseek_r1"]
    parser = answer_parser(format, think, TOOLS, begins_inside=True)
    lexer = Lexer([*format.markers, think.start, think.end], tokenizer.added)
    reader = AnswerReader(lexer, parser, TOOLS)
    for token, text in tokenizer.encode(f"Hm.\n</think>\n\n{transcript(family, WEATHER)}"):
        list(reader.feed(token, text))
    list(reader.finish())
    assert reader.answer.reasoning == "Hm."
    assert reader.answer.content == family.lead.strip()
    assert [json.loads(call.arguments) for call in reader.answer.calls] == [WEATHER[1]]


@pytest.mark.parametrize(
    ("prompt", "inside"),
    [
        ("<think>\n", True),
        ("<think>\n\n</think>\n\n", False),
        ("", False),
        ("</think>x<|im_start|>", False),
    ],
)
def test_6_json_does_not_land_in_the_reasoning(prompt: str, inside: bool) -> None:
    """LM Studio #1698, vLLM #19222: whether reasoning is open follows from the prompt."""

    class Spelling(SmallTokenizer):
        added_tokens_decoder = property(lambda self: {i: text for text, i in self.added.items()})
        all_special_ids = property(lambda self: self.special_token_ids)

        def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
            return [self.tokens[i].decode("latin1") for i in ids]

        decode = lambda self, ids: "".join(self.convert_ids_to_tokens(ids))  # noqa: E731

    tokenizer = Spelling(("<think>", "</think>", "<|im_start|>"))
    tokenizer.special_token_ids = [tokenizer.added["<|im_start|>"]]
    think = REASONING_FORMATS["qwen3"]
    tokens = ReasoningTokens(think, tokenizer)
    ids = [token for token, _ in tokenizer.encode(prompt)]
    is_inside = tokens.begins(ids).name == "INSIDE"
    assert is_inside == inside
    reader = AnswerReader(
        Lexer([think.start, think.end], tokenizer.added),
        answer_parser(None, think, (), begins_inside=is_inside),
        (),
    )
    for token, text in tokenizer.encode(("Hm.</think>" if inside else "") + '{"a": 1}'):
        list(reader.feed(token, text))
    list(reader.finish())
    assert reader.answer.content == '{"a": 1}'


@every_family
def test_12_no_token_that_ends_the_answer_within_json(family: Family) -> None:
    """vLLM #42403: a stop token escaped in the middle of the arguments."""
    walker = Walker(family.tokens)
    format = format_of(family.name, walker.tokenizer.added, family.template)
    lark = format.grammar(TOOLS, required=True, parallel=True)
    updates = walker.tokenizer.encode(family.render([WEATHER]))
    matcher = walker.matcher(lark)
    for token, _ in updates:
        assert matcher.validate_tokens([walker.tokenizer.eos_token_id]) == 0
        assert matcher.consume_token(token)
    assert matcher.is_accepting()


@every_family
def test_15_a_forced_call_is_no_text(family: Family) -> None:
    """oMLX #1258: a forced tool returned text."""
    walker = Walker(family.tokens)
    format = format_of(family.name, walker.tokenizer.added, family.template)
    lark = format.grammar(TOOLS[:1], required=True, parallel=False)
    assert not walker.accepts(lark, family.alone("It is warm in Oslo."))
    assert not walker.accepts(lark, "")
    assert walker.accepts(lark, family.render([WEATHER]))


@every_family
def test_15_arguments_after_a_call_without_arguments_are_not_lost(family: Family) -> None:
    """vLLM #47901."""
    tokenizer = SmallTokenizer(family.tokens)
    format = format_of(family.name, tokenizer.added, family.template)
    calls = [("now", {}), WEATHER] if family.has_parallel else [("now", {})]
    updates = tokenizer.encode(family.render(calls))
    answer, _ = read(format, TOOLS, tokenizer.added, updates)
    assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == calls
    for call in answer.calls:
        check(call.arguments, next(tool for tool in TOOLS if tool.name == call.name))
