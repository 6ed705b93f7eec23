"""Answers that are not quite in the model's format: what is recovered, and what is text."""

from __future__ import annotations

import json

import pytest
from support.tool_families import TOOLS, families
from support.tool_reading import SmallTokenizer, Walker, grouped, read

from mlx_paged.server.tools.answer import Answer
from mlx_paged.server.tools.registry import format_of

FAMILIES = {family.name: family for family in families()}
every_family = pytest.mark.parametrize("family", families(), ids=lambda family: family.name)


def answer_of(name: str, text: str) -> Answer:
    """Reads a text, one character at a time and in two pieces: the same comes of both."""
    family = FAMILIES[name]
    tokenizer = SmallTokenizer(family.tokens)
    format = format_of(name, tokenizer.added, family.template)
    updates = tokenizer.encode(text)
    answer, _ = read(format, TOOLS, tokenizer.added, updates)
    half, _ = read(format, TOOLS, tokenizer.added, grouped(updates, {len(updates) // 2}))
    assert half.content == answer.content
    return answer


def calls_of(answer: Answer) -> list[tuple[str, object]]:
    assert all(call.is_complete for call in answer.calls)
    return [(call.name, json.loads(call.arguments)) for call in answer.calls]


OPEN_PARAMETERS = {
    "qwen3_coder": (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
    ),
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Oslo\n'
        '<parameter name="days">3</parameter>\n</invoke>\n</minimax:tool_call>'
    ),
    "glm": (
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
    ),
}


@pytest.mark.parametrize("name", [n for n in OPEN_PARAMETERS if n in FAMILIES])
def test_a_parameter_without_its_end_tag_ends_where_the_next_begins(name: str) -> None:
    answer = answer_of(name, OPEN_PARAMETERS[name])
    [(tool, arguments)] = calls_of(answer)
    assert tool == "get_weather"
    assert {k: str(v).strip() for k, v in arguments.items()} == {"city": "Oslo", "days": "3"}  # type: ignore[attr-defined]
    assert not answer.content


@every_family
def test_a_call_of_a_tool_that_was_not_offered_is_text(family) -> None:
    text = family.lead + family.render([("erase_disk", {"path": "/"})])
    answer = answer_of(family.name, text)
    assert not answer.calls
    assert "erase_disk" in answer.content


def test_arguments_that_are_no_json_are_text() -> None:
    text = '<tool_call>\n{"name": "get_weather", "arguments": {city is Oslo}}\n</tool_call>'
    answer = answer_of("hermes", text)
    assert not answer.calls and "city is Oslo" in answer.content


def test_a_doubled_marker_is_not_shown() -> None:
    call = '{"name": "get_weather", "arguments": {"city": "Oslo"}}'
    answer = answer_of("hermes", f"<tool_call>\n<tool_call>\n{call}\n</tool_call>")
    assert calls_of(answer) == [("get_weather", {"city": "Oslo"})]
    assert not answer.content


@every_family
def test_forced_calls_are_bounded(family) -> None:
    """A model that would call for ever must come to an end."""
    walker = Walker(family.tokens)
    format = format_of(family.name, walker.tokenizer.added, family.template)
    lark = format.forced(TOOLS, required=True, parallel=True)
    few, many = ([("now", {})] * count for count in (2, 40))
    if not walker.accepts(lark, family.render(few)):
        pytest.skip("one call at a time, or the answer begins in the prompt")
    assert not walker.accepts(lark, family.render(many))
