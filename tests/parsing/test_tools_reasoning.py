"""Reasoning, text and calls in one answer."""

from __future__ import annotations

import pytest
from support.tool_families import TOOLS
from support.tool_reading import SmallTokenizer, grouped, summary

from mlx_paged.parsing.answer import Answer, AnswerReader, answer_parser
from mlx_paged.parsing.lexer import Lexer
from mlx_paged.parsing.reasoning import REASONING_FORMATS
from mlx_paged.parsing.registry import format_of

THINK = REASONING_FORMATS["qwen3"]
CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>")


def read(
    text: str, *, inside: bool = False, tools: bool = True, tokens: tuple[str, ...] = TOKENS
) -> Answer:
    """The same whether its text comes by tokens, in groups, or at once."""
    tokenizer = SmallTokenizer(tokens)
    offered = TOOLS if tools else ()
    updates = tokenizer.encode(text)
    found = []
    for cuts in (range(len(updates)), range(0, len(updates), 3), range(0, len(updates), 7), ()):
        parser = answer_parser(
            format_of("hermes", tokenizer.added), THINK, offered, begins_inside=inside
        )
        markers = [*TOKENS[:2], *(TOKENS[2:] if tools else ())]
        reader = AnswerReader(Lexer(markers, tokenizer.added), parser, offered)
        for token, piece in grouped(updates, cuts):
            list(reader.feed(token, piece))
        list(reader.finish())
        found.append(reader.answer)
    assert all(summary(answer) == summary(found[0]) for answer in found)
    return found[0]


@pytest.mark.parametrize(
    ("text", "inside", "reasoning", "content", "calls"),
    [
        ("<think>\nHm.\n</think>\n\nSo.", False, "Hm.", "So.", []),
        ("Hm.\n</think>\n\nSo.", True, "Hm.", "So.", []),
        ("<think>\n\n</think>\n\nSo.", False, "", "So.", []),
        ("So.", False, "", "So.", []),
        ("</think>So.", False, "", "So.", []),
        ("<think>Hm.", False, "Hm.", "", []),
        (" a \n\n b ", True, "a \n\n b", "", []),
        (f"Hm.</think>\n{CALL}", True, "Hm.", "", ["now"]),
        (f"Hm.</think>\nSo.\n{CALL}", True, "Hm.", "So.", ["now"]),
        # Calls end a reasoning that the model forgot to end.
        (f"Hm.\n{CALL}\nSo.", True, "Hm.", "So.", ["now"]),
        (f"Hm.\n{CALL}</think>So.", True, "Hm.", "So.", ["now"]),
        # It ends once; what is said of it later is text.
        ("Hm.</think>Use <think> and </think>.", True, "Hm.", "Use <think> and </think>.", []),
    ],
)
def test_reasoning_text_and_calls(
    text: str, inside: bool, reasoning: str, content: str, calls: list[str]
) -> None:
    for tokens in (TOKENS, ()):
        answer = read(text, inside=inside, tokens=tokens)
        assert answer.reasoning == reasoning
        assert answer.content == content
        assert [call.name for call in answer.calls] == calls


def test_markers_of_reasoning_within_a_call_are_text() -> None:
    call = CALL.replace("{}", '{"a": "<think>x</think>"}')
    answer = read(f"Hm.</think>{call}", inside=True)
    assert answer.calls[0].arguments == '{"a": "<think>x</think>"}'
    answer = read(call)
    assert answer.calls[0].arguments == '{"a": "<think>x</think>"}'


def test_without_tools_calls_are_text() -> None:
    answer = read(f"Hm.</think>{CALL}", inside=True, tools=False)
    assert answer.reasoning == "Hm."
    assert answer.content == CALL


def test_reasoning_comes_as_it_is_written() -> None:
    tokenizer = SmallTokenizer(TOKENS)
    parser = answer_parser(None, THINK, (), begins_inside=True)
    reader = AnswerReader(Lexer(TOKENS[:2], tokenizer.added), parser, ())
    events = [
        e for t, text in tokenizer.encode("One two.</think>\n\nSo") for e in reader.feed(t, text)
    ]
    assert len(events) == len("Onetwo.") + len("So")
    assert reader.num_reasoning_tokens == len("One two.") + 1
