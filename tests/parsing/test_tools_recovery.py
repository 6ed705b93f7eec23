"""Answers that are not quite in the model's format: what is recovered, and what is text."""

from __future__ import annotations

import json

import pytest
from support.tool_families import TOOLS, families, tool
from support.tool_reading import SmallTokenizer, Walker, grouped, read, reader

from mlx_paged.parsing.answer import Answer, AnswerReader, answer_parser
from mlx_paged.parsing.lexer import Lexer
from mlx_paged.parsing.reasoning import REASONING_FORMATS
from mlx_paged.parsing.registry import format_of

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
    [(called, arguments)] = calls_of(answer)
    assert called == "get_weather"
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
    lark = format.grammar(TOOLS, required=True, parallel=True)
    few, many = ([("now", {})] * count for count in (2, 40))
    if not walker.accepts(lark, family.render(few)):
        pytest.skip("one call at a time, or the answer begins in the prompt")
    assert not walker.accepts(lark, family.render(many))


OSLO = ("get_weather", {"city": "Oslo"})
D = "｜DSML｜"


def with_parameter(name: str, value: str, is_string: str = "false") -> str:
    """A call of DeepSeek V3.2 with one parameter."""
    return (
        f'<{D}function_calls>\n<{D}invoke name="get_weather">\n<{D}parameter name="{name}" '
        f'string="{is_string}">{value}</{D}parameter>\n</{D}invoke>\n</{D}function_calls>'
    )


@pytest.mark.parametrize(
    ("name", "text", "content"),
    [
        # gpt-oss: headers without their last marker, and text behind the arguments.
        ("openai", '<|channel|>final {"answer": "hi"}<|return|>', '{"answer": "hi"}'),
        ("openai", "<|channel|>final Hello there.<|return|>", "Hello there."),
        (
            "openai",
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>final"
            "<|message|>It is 42.<|return|>",
            "I look.\nIt is 42.",
        ),
        (
            "openai",
            '<|channel|>commentary to=functions.get_weather <|constrain|>json{"city": "Oslo"}'
            "<|call|>",
            "",
        ),
        (
            "openai",
            '<|channel|>commentary to=functions.get_weather<|message|>{"city": "Oslo"} And so on.',
            "And so on.",
        ),
        # Mistral: the marker twice, in the old form and in the new one; no [ARGS].
        ("mistral", '[TOOL_CALLS][TOOL_CALLS][{"name": "get_weather", "arguments": '
         '{"city": "Oslo"}}]', ""),
        ("mistral", '[TOOL_CALLS] [TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}', ""),
        ("mistral", '[TOOL_CALLS]get_weather[CALL_ID]a1B2c3D4e{"city": "Oslo"}', ""),
        ("mistral", '[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}[TOOL_CALLS]', ""),
        # Gemma: without `call`, strings without quotes, quotes twice, text between.
        ("gemma4", '<|tool_call>:get_weather{city:<|"|>Oslo<|"|>}<tool_call|>', ""),
        ("gemma4", "<|tool_call>get_weather{city:Oslo}<tool_call|>", ""),
        ("gemma4", '<|tool_call>call:get_weather{city:<|"|><|"|>Oslo<|"|>}<tool_call|>', ""),
        ("gemma4", '<|tool_call>call:get_weather{city:<|"|>Oslo<|"|> of course}<tool_call|>',
         "of course"),
        ("functiongemma", "<start_function_call>get_weather{city:Oslo}<end_function_call>", ""),
        ("functiongemma", "<start_function_call>call:get_weather{city:<escape>Oslo<escape>}"
         "<end_function_call>", ""),
        ("gemma4", '<|tool_call>call:get_weather{city:"Oslo"}<tool_call|>', ""),
        # All arguments in one parameter.
        ("deepseek_v32", with_parameter("arguments", '{"city": "Oslo"}'), ""),
        ("deepseek_v32", with_parameter("input", '{"city": "Oslo"}', "true"), ""),
        ("deepseek_v4", with_parameter("arguments", '{"city": "Oslo"}'), ""),
        ("qwen3_coder", "<tool_call>\n<function=get_weather>\n<parameter=arguments>\n"
         '{"city": "Oslo"}\n</parameter>\n</function>\n</tool_call>', ""),
        # Ids without a name: the arguments fit one tool.
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>0<|tool_call_argument_begin|>"
         '{"city": "Oslo"}<|tool_call_end|><|tool_calls_section_end|>', ""),
        ("kimi_k2", "<|tool_call_begin|>functions.3<|tool_call_argument_begin|>"
         '{"city": "Oslo"}<|tool_call_end|>', ""),
        # The marker of the second call is missing.
        ("deepseek_v31", "<｜tool▁calls▁begin｜>get_weather<｜tool▁sep｜>"
         '{"city": "Oslo"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>', ""),
        # The role's name before the answer.
        ("hunyuan_a13b", "<answer>\n助手\N{FULLWIDTH COLON}"
         '<tool_calls>[{"name": "get_weather", "arguments": '
         '{"city": "Oslo"}}]</tool_calls>\n</answer>', ""),
        # Words between parameters.
        ("glm45", "<tool_call>get_weather\n Here: <arg_key>city</arg_key>\n<arg_value>Oslo"
         "</arg_value>\n</tool_call>", "Here:"),
        ("glm45", "<tool_call>get_weather\n Here: <arg_key>city</arg_key>\n<arg_value>Oslo"
         "</arg_value>\n</tool_call>Bye.", "Here:\nBye."),
    ],
)  # fmt: skip
def test_what_is_recovered(name: str, text: str, content: str) -> None:
    answer = answer_of(name, text)
    has_call = "get_weather" in text or "Oslo" in text
    assert calls_of(answer) == ([OSLO] if has_call else [])
    assert answer.content == content


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_value_whose_string_never_ends_does_not_hide_later_calls(is_cut: bool) -> None:
    """An array of a parameter with a quote too many, in tags."""
    text = (
        "<tool_call>search.web-v2<arg_key>query</arg_key><arg_value>q</arg_value>"
        '<arg_key>tags</arg_key><arg_value>["a""]</arg_value></tool_call>'
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call>"
    )
    tokenizer = SmallTokenizer(())
    answer_reader = reader(format_of("glm47", {}), TOOLS, {})
    for token, piece in tokenizer.encode(text):
        answer_reader.feed(token, piece)
    list(answer_reader.finish(is_cut=is_cut))
    calls = answer_reader.answer.calls
    assert [call.name for call in calls] == ["search.web-v2", "get_weather"]
    assert json.loads(calls[0].arguments) == {"query": "q", "tags": '["a""]'}
    # (What cut the answer may have cut the string.)
    assert [call.is_complete for call in calls] == [not is_cut] * 2


def test_kimi_k3_opens_its_answer_within_the_reasoning() -> None:
    """The reasoning lacks its end."""
    reasoning = REASONING_FORMATS["kimi_k3"]
    tokenizer = SmallTokenizer(FAMILIES["kimi_k3"].tokens)
    format = format_of("kimi_k3", tokenizer.added)
    parser = answer_parser(format, reasoning, TOOLS, begins_inside=True)
    lexer = Lexer((*format.markers, reasoning.start, reasoning.end), tokenizer.added)
    found = AnswerReader(lexer, parser, TOOLS)
    for token, piece in tokenizer.encode("Hm.<|open|>response<|sep|>Yes.<|close|>response<|sep|>"):
        found.feed(token, piece)
    list(found.finish())
    assert (found.answer.reasoning, found.answer.content) == ("Hm.", "Yes.")


ODD = tool("f", {"user id": {"type": "string"}, "a=b": {"type": "integer"}, "user": {}})


@pytest.mark.parametrize("name", ["pythonic", "lfm2", "olmo3"])
def test_parameters_whose_names_python_has_not(name: str) -> None:
    arguments = {"user id": "x", "a=b": 3, "user": "y"}
    family = FAMILIES[name]
    walker = Walker(family.tokens)
    format = format_of(name, walker.tokenizer.added, family.template)
    text = family.render([("f", arguments)])
    answer, _ = read(format, (ODD,), walker.tokenizer.added, walker.tokenizer.encode(text))
    assert calls_of(answer) == [("f", arguments)]
    assert walker.accepts(format.grammar((ODD,), required=True, parallel=False), text)
