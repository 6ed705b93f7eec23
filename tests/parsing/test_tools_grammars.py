"""Tests which calls grammars permit."""

from __future__ import annotations

import pytest
from support.tool_families import TOOLS, tool
from support.tool_reading import Walker

from mlx_paged.parsing.definitions import Tool
from mlx_paged.parsing.registry import format_of

CALL = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call>'
)
VALUE = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n"
    "</tool_call>"
)


@pytest.fixture(scope="module")
def walker() -> Walker:
    return Walker(("<tool_call>", "</tool_call>"))


def grammar(
    walker: Walker, name: str, *tools: Tool, required: bool = True, parallel: bool = True
) -> str:
    format = format_of(name, walker.tokenizer.added)
    return format.grammar(tools or TOOLS, required=required, parallel=parallel)


def test_json_has_the_whitespace_of_templates(walker: Walker) -> None:
    """So that the next turn, which renders the call, finds its prefix."""
    lark = grammar(walker, "hermes")
    assert walker.accepts(lark, CALL)
    for other in ('"Oslo",  ', '"Oslo",', '"Oslo",\n', '"Oslo" , '):
        assert not walker.accepts(lark, CALL.replace('"Oslo", ', other))
    for other in ("\n\n" + CALL, "\n" + CALL):  # after reasoning
        assert walker.accepts(lark, other)
    assert not walker.accepts(lark, "\n" * 3 + CALL)


def test_a_value_has_no_end_tag(walker: Walker) -> None:
    """An end tag before the next tag ends the value for a reader."""
    lark = grammar(walker, "qwen3_coder")
    assert walker.accepts(lark, VALUE)
    assert walker.accepts(lark, VALUE.replace("Oslo", "</param <parameter>"))
    assert not walker.accepts(lark, VALUE.replace("Oslo", "a</parameter>b"))


def test_values_have_the_types_of_the_schema(walker: Walker) -> None:
    lark = grammar(walker, "qwen3_coder")
    days = VALUE.replace("</parameter>\n", "</parameter>\n<parameter=days>\n{}\n</parameter>\n")
    units = days.replace("days", "units")
    assert walker.accepts(lark, days.format(3))
    assert not walker.accepts(lark, days.format("three"))
    assert walker.accepts(lark, units.format("celsius"))
    assert not walker.accepts(lark, units.format("kelvin"))
    assert not walker.accepts(lark, VALUE.replace("city", "town"))


def test_parameters_come_in_the_order_of_the_schema(walker: Walker) -> None:
    pythonic = grammar(walker, "pythonic")
    for call, is_taken in (
        ('[get_weather(city="Oslo", units="celsius")]', True),
        ('[get_weather(city="Oslo", days=3, units="celsius")]', True),
        ('[get_weather(days=3, city="Oslo")]', False),
        ("[get_weather(days=3)]", False),
        ("[get_weather()]", False),
        ("[now()]", True),
        ("[now(), now()]", True),
        ('[search.web-v2(query="x", exact=True, note=null)]', True),
        ('[search.web-v2(query="x", exact=yes)]', False),
    ):
        assert walker.accepts(pythonic, call) == is_taken, call
    assert not walker.accepts(grammar(walker, "pythonic", parallel=False), "[now(), now()]")


def test_parameters_that_the_schema_does_not_list(walker: Walker) -> None:
    closed = tool("f", {"a": {"type": "integer"}})
    more = tool("f", {"a": {"type": "integer"}}, additionalProperties={"type": "boolean"})
    free = Tool("f", parameters={"type": "object"})
    call = '[{{"name": "f", "arguments": {}}}]'
    for offered, arguments, is_taken in (
        (closed, '{"a": 1}', True),
        (closed, '{"b": 1}', False),
        (more, '{"a": 1, "b": true}', True),
        (more, '{"a": 1, "b": 1}', False),
        (free, '{"anything": [1, {}]}', True),
    ):
        lark = grammar(walker, "json", offered)
        assert walker.accepts(lark, call.format(arguments)) == is_taken, (offered, arguments)


def test_text_may_come_before_calls_but_calls_are_whole(walker: Walker) -> None:
    """With an optional call, the call is valid from its first marker on."""
    spelled = Walker(())
    for some in (walker, spelled):
        lark = grammar(some, "hermes", required=False)
        for text in ("", "No.", "1 < 2 <tool_cal", "So:\n" + CALL, CALL + "\n" + CALL + "\nDone."):
            assert some.accepts(lark, text), text
        for text in (
            "<tool_call>",
            "So: <tool_call>no</tool_call>",
            CALL[:-1],
            CALL + "<tool_call>",
        ):
            assert not some.accepts(lark, text), text
    lark = grammar(spelled, "json", required=False)
    call = '[{"name": "now", "arguments": {}}]'
    for text, is_taken in (
        ("", True),
        ("Well.\n\n```py\nx\n```", True),
        (call, True),
        ("So:\n" + call, True),
        ("See [1].", True),
        ("[1]", False),
        ("So:\n  {1}", False),
    ):
        assert spelled.accepts(lark, text) == is_taken, text


def test_names_and_strings_of_any_script(walker: Walker) -> None:
    offered = tool('größe."x"', {"größe": {"enum": ["大", "\n", '"']}}, "größe")
    for name, text in (
        (
            "hermes",
            '<tool_call>\n{"name": "größe.\\"x\\"", "arguments": {"größe": "大"}}\n</tool_call>',
        ),
        (
            "qwen3_coder",
            '<tool_call>\n<function=größe."x">\n<parameter=größe>\n大\n</parameter>\n</function>\n'
            "</tool_call>",
        ),
    ):
        assert walker.accepts(grammar(walker, name, offered), text)


def test_calls_of_olmo_are_written_as_its_template_has_them(walker: Walker) -> None:
    calls = "<function_calls>{0}now()\nnow(){0}</function_calls>"
    for newline, shown in (("", "<function_calls>now()</function_calls>"), ("\n", "")):
        format = format_of("olmo3", walker.tokenizer.added, shown)
        lark = format.grammar(TOOLS, required=True, parallel=True)
        assert walker.accepts(lark, calls.format(newline))
        assert not walker.accepts(lark, calls.format("" if newline else "\n"))


def test_calls_of_inkling_have_sorted_keys_and_may_begin_with_a_header() -> None:
    parameters = {"properties": {"b": {"type": "integer"}, "a": {"type": "integer"}}}
    one = Tool(name="f", parameters=parameters)
    walker = Walker(("<|content_invoke_tool_json|>", "<|message_model|>"))
    format = format_of("inkling", walker.tokenizer.added)
    lark = format.grammar((one,), required=True, parallel=False)
    call = 'f<|content_invoke_tool_json|>{"name":"f","args":{"a":1,"b":2}}'
    assert walker.accepts(lark, call)
    assert walker.accepts(lark, "<|message_model|>" + call)
    assert not walker.accepts(lark, call.replace('"a":1,"b":2', '"b":2,"a":1'))
