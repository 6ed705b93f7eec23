"""Custom tools: grammars as regular expressions, inputs read out of arguments, every family."""

from __future__ import annotations

import json
import random
import re

import pytest
from support.tool_families import families
from support.tool_reading import Walker, read

from mlx_paged.errors import InvalidParameterError
from mlx_paged.parsing.custom import InputReader, arguments_of, custom_tool, with_pattern
from mlx_paged.parsing.definitions import InputGrammar, Tool
from mlx_paged.parsing.registry import format_of
from mlx_paged.parsing.regular import MAX_SIZE, NotRegular, regular_expression
from mlx_paged.server.turn_preparation import _prepared

FIELD = "tools[0].format.definition"
# As Codex has it for its patches, but for what repeats.
PATCH = """
start: begin_patch hunk+ end_patch   // a comment
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: "*** Delete File: " filename LF
    | "*** Add File: " filename LF add_line+   # another
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

%import common.LF
"""


@pytest.mark.parametrize(
    ("grammar", "accepted", "refused"),
    [
        (
            PATCH,
            ["*** Begin Patch\n*** Add File: a\n+x\n+\n*** Delete File: b\n*** End Patch"],
            ["*** Begin Patch\n*** End Patch", "*** Begin Patch\n*** Add File: a\n*** End Patch"],
        ),
        ('start: "a"i ("b" | [X])~2..3\nX.2: "0".."9"+', ["Abb", "a12b", "ab"], ["bbb", "1"]),
        (
            "start: expr\n?expr: term (\"+\" term)* -> add\nterm: INT\n%ignore WS\n"
            "%import common (INT, WS)",
            ["1", " 1 +\n2 "], ["1 2", "+", ""],
        ),
        ('start: list\nlist: list "," item | item\nitem: /[a-c]/', ["a", "a,b,c"], ["a,", ",a"]),
        ('start: /x/s rest\nrest: ";" rest |', ["x", "x;;"], ["", ";"]),
        (r'start: "\"" /[^"\\\n]/* "\"" /a\/b/', ['"x"a/b'], ['"x', '"x"']),
    ],
)  # fmt: skip
def test_grammars_as_expressions(grammar, accepted, refused) -> None:
    matches = re.compile(regular_expression(grammar)).fullmatch
    assert all(map(matches, accepted)) and not any(map(matches, refused))


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ('start: "(" start ")" | "x"', "'start' contains itself"),
        ('start: a\na: b "x"\nb: a', "'a' contains itself"),
        ("start: start start", "'start'"),
        ('start: "x" start', "'start' has no end"),
        ("start: nothing", "there is no 'nothing'"),
        ('a: "x"', "there is no rule 'start'"),
        ('start: "x"\nstart: "y"', "line 2: there are two definitions of 'start'"),
        ('start: "x', "line 1: '\"x' is not supported"),
        ('start: %json {"a": 1}', "is not supported"),
        ('start: ("x"', "line 1: expected ')', not the end"),
        ('start: "b".."a"', "a range"),
        (r'start: "\ud83d"', "is not a valid string"),
        ("%import python.X", "no 'python' to import from"),
        ("%declare X", "line 1: %declare is not supported"),
        ("start: a a\n" + "".join(f"{c}: {d} {d}\n" for c, d in zip("abcdefghijklmnopqr",
         "bcdefghijklmnopqrs")) + 's: "x"', f"more than {MAX_SIZE} characters"),
        ("start: " + "(" * 5000 + '"x"' + ")" * 5000, "recursion"),
    ],
    ids=range(16),
)  # fmt: skip
def test_other_grammars_are_refused_for_a_reason(grammar, reason) -> None:
    with pytest.raises(InvalidParameterError) as error:
        with_pattern(custom_tool("t", None, FIELD, InputGrammar("lark", grammar)))
    assert error.value.field == FIELD and reason in error.value.expected
    if reason != "recursion":
        with pytest.raises(NotRegular):
            regular_expression(grammar)


def test_an_input_is_the_same_however_its_arguments_are_cut() -> None:
    rng = random.Random(0)
    for text in ("", "a", 'x = "1"\n\\ \t', "é 😀 \ud800x", "\x00\x7f"):
        for arguments in (
            arguments_of(text), json.dumps({"input": text}), json.dumps({"input": text}, indent=1),
            '{ "input" :' + json.dumps(text).replace("/", "\\/") + "}",
        ):  # fmt: skip
            for _ in range(20):
                reader, found, at = InputReader(), "", 0
                while at < len(arguments):
                    size = rng.choice((1, 2, 7, 50))
                    found += reader.feed(arguments[at : at + size])
                    at += size
                assert found + reader.finish() == text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"patch": "a\\nb"}', "a\nb"), ('"a\\nb"', "a\nb"), ("{}", ""), ("", ""),
        ('{"code": "a", "input": "b"}', "b"), ('{"a": "b", "c": "d"}', '{"a": "b", "c": "d"}'),
        ('{"input": {"a": 1}}', '{"input": {"a": 1}}'), ("print(1)", "print(1)"), ("[1]", "[1]"),
        ('{"input": "cut \\u00', "cut "), ('{"input": "a"} more', "a"),
    ],
)  # fmt: skip
def test_arguments_that_are_not_the_functions_are_no_loss(arguments, text) -> None:
    reader = InputReader()
    assert reader.feed(arguments) + reader.finish() == text


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("hermes", '<tool_call>{"name": "patch", "arguments": {"input": "%s"}}</tool_call>', "%s"),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"%s\\"}"}</tool_call>',
         '{"a": "%s"}'),
        ("hermes", '<tool_call>{"id": "%s", "name": "f", "arguments": {}}</tool_call>', "{}"),
        ("pythonic", "[f(a=['%s'])]", '{"a": ["%s"]}'),
    ],
)  # fmt: skip
def test_lone_surrogates_in_calls_are_replaced(name: str, text: str, expected: str) -> None:
    """UTF-8 cannot encode them, so no answer could be sent."""
    f = Tool("f", parameters={"type": "object", "properties": {"a": {"type": "array"}}})
    tools = (custom_tool("patch", None, FIELD), f)
    for written, meant in (("x\\ud83dy\\udc00", "x\ufffdy\ufffd"), ("\\ud83d\\ude00", "😀")):
        answer, _ = read(format_of(name, {}), tools, {}, [(0, text % written)])
        [call] = answer.calls
        assert call.arguments == (expected % meant if "%s" in expected else expected)
        assert call.arguments.encode() and call.id.encode()


@pytest.mark.parametrize("family", families(), ids=lambda family: family.name)
def test_every_family_is_held_to_a_grammar(family) -> None:
    """And its calls are read back, whatever its syntax does to quotes and newlines."""
    walker = Walker(family.tokens)
    format = format_of(family.name, walker.tokenizer.added, family.template)
    offered = custom_tool("patch", "Edits files.", FIELD, InputGrammar("lark", PATCH))
    tool = _prepared(offered, format, prune=False).tool
    lark = format.grammar([tool], required=True, parallel=False)
    for text, is_valid in (
        ('*** Begin Patch\n*** Add File: é\n+x = "1"\n+\\\n*** End Patch\n', True),
        ("*** Begin Patch\n*** Add File: a\n-x\n*** End Patch", False),
    ):
        call = family.render([("patch", {"input": text})])
        assert walker.accepts(lark, call) == is_valid, call
        answer, _ = read(format, [offered], walker.tokenizer.added, walker.tokenizer.encode(call))
        assert [(c.arguments, c.is_custom) for c in answer.calls] == [(text, True)]
