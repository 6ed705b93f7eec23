"""Detection of a template's format: by the calls it renders, not by words it mentions."""

from __future__ import annotations

import json

import pytest
from support.tool_families import TOOLS, Family, families
from support.tool_families.tool_calls import CALL, template
from support.tool_reading import SmallTokenizer, Walker

from mlx_paged.parsing.answer import answer_reader
from mlx_paged.parsing.probe import ARGUMENTS, TOOL, shown
from mlx_paged.parsing.reasoning import REASONING_FORMATS
from mlx_paged.parsing.registry import detect, format_of

FAMILIES = {family.name: family for family in families()}
RENDERED = [family for family in families() if shown(family.template).calls]


def chat(calls: str, mention: str = "") -> str:
    """A template that renders calls, with text in front of them."""
    return template("<|im_start|>", calls, "<|im_end|>\n", mention)


def each(call: str) -> str:
    return "{% for c in m.tool_calls %}" + call + "{% endfor %}"


HERMES = each(f"<tool_call>\n{CALL}\n</tool_call>")
MENTION = "Do not write <tool_call></tool_call>, [TOOL_CALLS], <function= or <arg_key>."


def name_of(chat_template: str, *added: str) -> str | None:
    found = detect(chat_template, {token: i for i, token in enumerate(added)})
    return found.names[0] if found is not None and found.names else None


@pytest.mark.parametrize("family", RENDERED, ids=lambda family: family.name)
def test_each_family_is_found_without_its_tokens_too(family: Family) -> None:
    found = detect(family.template, {})
    assert found is not None
    assert family.name in found.names


@pytest.mark.parametrize(
    ("chat_template", "name"),
    [
        (chat(HERMES), "hermes"),
        (chat(HERMES, MENTION), "hermes"),
        # Not a word of it is in the source.
        (chat(each("<tool_{{ 'call>\n' }}{{ c.function | tojson }}\n</tool_{{ 'call>' }}")),
         "hermes"),
        # It renders calls of its own kind, and mentions others.
        (chat(each("<do>{{ c.function.name }}|{{ c.function.arguments | tojson }}</do>"),
              'Not <tool_call>{"name": ""}</tool_call>, [TOOL_CALLS] or <|python_tag|>.'), None),
        # A comment, and prose.
        ("{# <tool_call>{}</tool_call> [TOOL_CALLS] #}{{ messages[0].content }}", None),
        ("{{ messages[0].content }} Use <tool_call></tool_call> XML tags.", None),
        # Calls are only described.
        ("{% if tools %}{{ tools | tojson }}Write <tool_call>...</tool_call>.{% endif %}",
         "hermes"),
        ("{% set ns = ']<]minimax[>[' %}{% if tools %}Write {{ ns }}<tool_call> "
         "{{ ns }}</tool_call>{% endif %}", "minimax_m3"),
        # No template at all.
        ("", None),
        ("{% broken", None),
    ],
)  # fmt: skip
def test_detection(chat_template: str, name: str | None) -> None:
    found = name_of(chat_template)
    assert found == name


def test_a_comment_counts_where_tools_are_offered_and_its_words_are_tokens() -> None:
    template = "{# <tool_call></tool_call> #}{{ tools[0].function.name }}{{ messages[0].content }}"
    assert name_of(template) is None
    assert name_of(template, "<tool_call>", "</tool_call>") == "hermes"
    assert name_of(template.replace("tools[0].function.name", "1"), "<tool_call>") is None


def test_ids_that_have_the_name_in_them() -> None:
    call = "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ c.function.arguments }}"
    calls = f"<|tool_calls_section_begin|>{each(call + '<|tool_call_end|>')}"
    assert name_of(chat(calls + "<|tool_calls_section_end|>")) == "kimi_k2"


def test_arguments_that_must_be_an_object_or_text() -> None:
    text = each("<tool_call>\n{\"name\": \"{{ c.function.name }}\", \"arguments\": "
                "{{ c.function.arguments + '' }}}\n</tool_call>")  # fmt: skip
    values = each("<tool_call>{{ c.function.name }}{% for k, v in c.function.arguments.items() %}"
                  "<arg_key>{{ k }}</arg_key><arg_value>{{ v }}</arg_value>{% endfor %}"
                  "</tool_call>")  # fmt: skip
    assert name_of(chat(text)) == "hermes"
    assert name_of(chat(values)) == "glm47"


def test_what_a_template_shows() -> None:
    found = shown(chat(HERMES, "Offered."))
    [call] = found.calls  # (the same, however it gets the arguments)
    assert call.startswith("<tool_call>\n")
    assert "Offered." in found.text
    assert TOOL.name in found.text
    assert str(ARGUMENTS["town"]) in found.text
    refused = shown("{{ raise_exception('No.') }}")
    assert refused.calls == ()


FRAMED = [f for f in families() if format_of(f.name, {}, f.template).reads(())]


@pytest.mark.parametrize("family", FRAMED, ids=lambda family: family.name)
def test_markers_around_text_are_left_out_without_tools(family: Family) -> None:
    tokenizer = SmallTokenizer(family.tokens)
    format = format_of(family.name, tokenizer.added, family.template)
    read = 0
    for golden in family.goldens:
        if golden.calls:
            continue
        reader = answer_reader(format, None, (), [], tokenizer.added, {})
        for token, text in tokenizer.encode(golden.transcript):
            list(reader.feed(token, text))
        list(reader.finish())
        assert (reader.answer.content, reader.answer.reasoning) == (
            golden.content, golden.reasoning,
        )  # fmt: skip
        read += 1
    assert read


@pytest.mark.parametrize("name", ["solar_open", "inkling", "muse_glimmer"])
def test_formats_that_read_everything_have_a_reasoning_format(name: str) -> None:
    """The engine asks it where a grammar begins, and how a budget ends."""
    family, reasoning = FAMILIES[name], REASONING_FORMATS[name]
    tokenizer = SmallTokenizer(family.tokens)
    format = format_of(name, tokenizer.added, family.template)
    text = f"{reasoning.start}Hm.{reasoning.forced_end}Yes."
    reader = answer_reader(format, None, TOOLS, [], tokenizer.added, {})
    for token, piece in tokenizer.encode(text):
        list(reader.feed(token, piece))
    list(reader.finish())
    assert (reader.answer.reasoning, reader.answer.content) == ("Hm.", "Yes.")
    assert reader.num_reasoning_tokens == len("Hm.") + 1  # the end marker


@pytest.mark.parametrize(
    ("call_id", "name"),
    [
        ("functions.get_weather:0", "get_weather"),
        ("functions_get_weather_0", "get_weather"),
        ("functions_get_weather:12", "get_weather"),
        ("functions.get_weather_3", "get_weather"),
        ("get_weather_0", "get_weather"),
        ("get_weather", "get_weather"),
        ("functions.search.web-v2:1", "search.web-v2"),
        ("functions_step_2_1", "step_2"),  # a name that ends as ids do
        ("step_2", "step_2"),
    ],
)
def test_names_in_ids_of_kimi(call_id: str, name: str) -> None:
    tools = (*TOOLS, type(TOOLS[0])(name="step_2"))
    family = FAMILIES["kimi_k2"]
    text = family.render([("now", {})]).replace("functions.now:0", call_id)
    tokenizer = SmallTokenizer(family.tokens)
    reader = answer_reader(
        format_of("kimi_k2", tokenizer.added), None, tools, [], tokenizer.added, {}
    )
    for token, piece in tokenizer.encode(text):
        list(reader.feed(token, piece))
    list(reader.finish())
    [call] = reader.answer.calls
    assert call.name == name


@pytest.mark.parametrize("value", ["[" * 5_000 + "]" * 5_000, "9" * 5_000])
def test_arguments_of_kimi_without_a_name_that_python_cannot_load(value: str) -> None:
    """Python's JSON loader limits nesting and digits, so their tool is unknown."""
    family = FAMILIES["kimi_k2"]
    tokenizer = SmallTokenizer(family.tokens)
    format = format_of("kimi_k2", tokenizer.added)
    text = family.render([("now", {})]).replace("functions.now:0", "0")
    text = text.replace("{}", f'{{"city": {value}}}')
    reader = answer_reader(format, None, TOOLS, [], tokenizer.added, {})
    for token, piece in tokenizer.encode(text):
        list(reader.feed(token, piece))
    list(reader.finish())
    assert not reader.answer.calls and value in reader.answer.content


def test_an_id_of_kimi_that_names_no_tool_is_text() -> None:
    family = FAMILIES["kimi_k2"]
    text = family.render([("now", {})]).replace("functions.now:0", "functions.other:4")
    tokenizer = SmallTokenizer(family.tokens)
    reader = answer_reader(
        format_of("kimi_k2", tokenizer.added), None, TOOLS, [], tokenizer.added, {}
    )
    for token, piece in tokenizer.encode(text):
        list(reader.feed(token, piece))
    list(reader.finish())
    assert not reader.answer.calls and "functions.other:4" in reader.answer.content


@pytest.mark.parametrize(
    ("before", "text"), [("\n", "Oslo"), ("", "\nOslo\n")], ids=["lines", "verbatim"]
)
def test_the_template_says_whose_the_newlines_around_a_value_are(before: str, text: str) -> None:
    value = f"<parameter={{{{ k }}}}>{before}{{{{ v }}}}{before}</parameter>\n"
    calls = each(
        "<seed:tool_call>\n<function={{ c.function.name }}>\n"
        f"{{% for k, v in c.function.arguments.items() %}}{value}{{% endfor %}}"
        "</function>\n</seed:tool_call>"
    )
    format = detect(chat(calls), {})
    assert format is not None
    assert format.names == ("seed_oss",)
    written = (
        "<seed:tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n"
        "</function>\n</seed:tool_call>"
    )
    reader = answer_reader(format, None, TOOLS, [], {}, {})
    list(reader.feed(None, written))
    list(reader.finish())
    [call] = reader.answer.calls
    assert json.loads(call.arguments) == {"city": text}
    walker = Walker(())
    lark = format.grammar(TOOLS, required=True, parallel=False)
    tight = written.replace("\nOslo\n", "Oslo")
    assert walker.accepts(lark, tight) == (before == "")
    assert walker.accepts(lark, written)
