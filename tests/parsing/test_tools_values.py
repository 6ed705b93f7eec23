"""JSON and untyped values, read as they are written."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_paged.parsing.definitions import Tool
from mlx_paged.parsing.events import CallArguments, CallBegin, CallEnd, ContentText, Event
from mlx_paged.parsing.json_calls import JsonCalls
from mlx_paged.parsing.json_value import JsonValue
from mlx_paged.parsing.python_calls import PythonCalls, PythonString
from mlx_paged.parsing.schemas import ArgumentsWriter, Parameter, properties_of, resolved

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)


def mended(pieces: Iterable[str]) -> tuple[str, bool]:
    value = JsonValue()
    return "".join(value.take(piece)[1] for piece in pieces), value.has_ended


@settings(max_examples=100, deadline=None)
@given(JSON, st.sampled_from([None, 1]))
def test_json_passes_as_it_is(value: Any, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=False, indent=indent)
    assert mended([text]) == mended(text) == (text, value is not None and text[0] in '"{[')
    reader = JsonValue()
    assert reader.take("  " + text + ", {}")[0] == len(text) + 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": "one\ntwo\t\x00"}', {"a": "one\ntwo\t\x00"}),
        ('"C:\\dir \\d+ \\$"', "C:\\dir \\d+ \\$"),
        ('"\\u00e9\\/\\u12"', "é/\\u12"),
        ('["\\\\", "\\""]', ["\\", '"']),
    ],
)
def test_what_json_does_not_allow_in_strings_is_mended(text: str, expected: Any) -> None:
    assert json.loads(mended([text])[0]) == expected
    assert mended(text) == mended([text])


def calls_of(reader: JsonCalls, text: str) -> tuple[list[Event], int]:
    out: list[Event] = []
    at = reader.feed(text, 0, out)
    reader.finish(out)
    return out, at


def test_an_object_that_is_no_call_is_left() -> None:
    reader = JsonCalls({"now"})
    assert calls_of(reader, '[{"a": 1}, 2]') == ([], 9)
    assert reader.unread() == '[{"a": 1}'
    reader = JsonCalls({"now"}, is_bare=True)
    assert calls_of(reader, '{"city": 5}') == ([], 7)
    assert reader.unread() == '{"city"'


def test_an_array_ends_with_its_bracket() -> None:
    out, at = calls_of(JsonCalls({"f", "g"}), '[{"name": "f"}] [{"name": "g"}]')
    assert at == 15
    assert out == [CallBegin("f"), CallArguments("{}"), CallEnd()]


def test_arguments_that_are_no_object() -> None:
    for written, expected in (
        ("null", "{}"),
        ('""', "{}"),
        ('"{\\"a\\": 1}"', '{"a": 1}'),
        ("[]", "{}"),
    ):
        out, _ = calls_of(JsonCalls({"f"}), f'{{"arguments": {written}, "name": "f"}}')
        assert "".join(e.text for e in out if isinstance(e, CallArguments)) == expected
    for written in ("[1]", "5", '"words"', "{words}", "{'a': 1}", '{"a": x}', '{"a" 1}', "{5}"):
        for order in ('{{"arguments": {}, "name": "f"}}', '{{"name": "f", "arguments": {}}}'):
            reader = JsonCalls({"f"})
            out, at = calls_of(reader, order.format(written))
            assert (out, reader.has_failed) == ([], True), written
            assert reader.unread() == order.format(written)[:at]


def test_arguments_that_are_no_json_later_on_are_cut() -> None:
    """Their beginning was given out."""
    out, _ = calls_of(JsonCalls({"f"}), '{"name": "f", "arguments": {"a": 1 is one}}')
    assert out[0] == CallBegin("f")
    assert "".join(e.text for e in out if isinstance(e, CallArguments)) == '{"a": 1 is one}'
    assert out[-1] == CallEnd(is_complete=False)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": 1, }', {"a": 1}),
        ('{"a": [1, 2,], "b": 3,}', {"a": [1, 2], "b": 3}),
        ('{"a": 1,, "b": 2}', {"a": 1, "b": 2}),
        ('{"a": 1 "b": "x"\n "c": [1 2 "y"]}', {"a": 1, "b": "x", "c": [1, 2, "y"]}),
        ('{"a": 1, b: 2, \'c\' : 3}', {"a": 1, "b": 2, "c": 3}),
        ('{"a": "x", "b": True, "c": None, "d": [False]}',
         {"a": "x", "b": True, "c": None, "d": [False]}),
        ('{"a": True}', {"a": True}),
        ('{"a": 1, "b": Oslo}', {"a": 1, "b": "Oslo"}),
        ('{"a": 1, "b" 2, "c" "x", "d" {"e": 1}}', {"a": 1, "b": 2, "c": "x", "d": {"e": 1}}),
        ('{"a": [1, {"b": 2], "c": 3}', {"a": [1, {"b": 2}], "c": 3}),
        ('{"a": {"b": [1, 2}, "c": 3}', {"a": {"b": [1, 2]}, "c": 3}),
        ('{"a": {"b": 1]}, "c": 3}', {"a": {"b": 1}, "c": 3}),
        ('{"a": 1, "b": , "c"}', {"a": 1, "b": None, "c": None}),
        ('{"a": 1, "b":: 2}', {"a": 1, "b": 2}),
    ],
)  # fmt: skip
def test_json_is_mended_once_it_is_proven(text: str, expected: Any) -> None:
    """In pieces, too: what was given out cannot be taken back."""
    for pieces in ([text], text, [text[:9], text[9:]]):
        value = JsonValue()
        found = "".join(value.take(piece)[1] for piece in pieces)
        assert json.loads(found) == expected
        assert value.has_ended and not value.is_broken


def test_a_call_of_no_tool_is_text_beside_others() -> None:
    reader = JsonCalls({"f"})
    out, _ = calls_of(reader, '[{"name": "g", "arguments": {"a": 1}}, {"name": "f"}, {"name": "h"}')
    assert out == [
        ContentText('[{"name": "g", "arguments": {"a": 1}}'),
        CallBegin("f"),
        CallArguments("{}"),
        CallEnd(),
    ]
    assert reader.unread() == ', {"name": "h"}'


@settings(max_examples=200, deadline=None)
@given(st.text(st.sampled_from('{}[]",:\\ \n019.-eEtrufalsn'), max_size=14))
def test_json_is_told_from_what_is_none(text: str) -> None:
    value = JsonValue()
    _, mended = value.take(text + " ")
    try:
        json.loads(mended)
        is_json = True
    except ValueError:
        is_json = False
    if value.has_ended and not value.is_broken:
        assert is_json, mended
    if is_json and value.has_ended:
        assert not value.is_broken, mended


def written(parameters: Any, values: list[tuple[str, str]], *, by_character: bool) -> str:
    writer = ArgumentsWriter(parameters, trims_newlines=True)
    out = []
    for name, text in values:
        out.append(writer.begin(name))
        out += map(writer.add, text if by_character else [text])
        out.append(writer.end())
    return "".join([*out, writer.close()])


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": "string"}, '\n "\\\n\n', ' "\\\n'),
        ({"type": "integer"}, "123456789012345678901234567890", 123456789012345678901234567890),
        ({"type": "integer"}, "+007", 7),
        ({"type": "integer"}, "many", "many"),
        ({"type": "integer"}, "1.5", "1.5"),
        ({"type": "number"}, "1.50", 1.5),
        ({"type": "number"}, ".5", 0.5),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "yes", "yes"),
        ({"type": ["string", "null"]}, "\nnull\n", None),
        ({"type": ["string", "null"]}, "null and void", "null and void"),
        ({"type": "string", "nullable": True}, "None", None),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "42", 42),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "042", "042"),
        ({"enum": ["1", 1, 2, None]}, "1", "1"),
        ({"enum": ["1", 1, 2, None]}, "2", 2),
        ({"const": 3}, "3", 3),
        ({"type": "array"}, '["a\nb", 1]', ["a\nb", 1]),
        ({"type": "array"}, "('a', None)", ["a", None]),
        ({"type": "array"}, "[1, 2", "[1, 2"),
        ({"type": "object"}, "{'a': True}", {"a": True}),
        ({"type": "object"}, "[1]", "[1]"),
        ({"$ref": "#/$defs/n"}, "5", 5),
        ({"allOf": [{"$ref": "#/$defs/n"}]}, "5", 5),
        ({"properties": {}}, "{}", {}),
        ({}, "5", 5),
        ({}, "five", "five"),
        ({"type": "array"}, "[" * 100_000, "[" * 100_000),
    ],
)
def test_values_get_the_types_of_the_schema(schema: Any, text: str, expected: Any) -> None:
    parameters = {"properties": {"v": schema}, "$defs": {"n": {"type": "integer"}}}
    at_once = written(parameters, [("v", text)], by_character=False)
    assert json.loads(at_once) == {"v": expected}
    assert written(parameters, [("v", text)], by_character=True) == at_once


@pytest.mark.parametrize("value", ["[" * 5_000 + "]" * 5_000, "[" * 5_000, "9" * 5_000])
@pytest.mark.parametrize("name", ["s", "arguments"])
def test_values_that_python_cannot_load_are_strings(name: str, value: str) -> None:
    """Python's JSON loader limits nesting and digits; models repeat themselves without limit."""
    parameters = {"properties": {"s": {"type": "string"}}}
    writer = ArgumentsWriter(parameters)
    text = value if name == "s" else f'{{"s": {value}}}'
    pieces = [writer.begin(name, is_string=False), writer.add(text), writer.end(), writer.close()]
    assert json.loads("".join(pieces), parse_int=str)[name] == text


def test_parameters_that_a_part_of_the_schema_names() -> None:
    parameters = {
        "allOf": [{"properties": {"a": {"type": "integer"}}}],
        "anyOf": [{"$ref": "#/$defs/x"}, {"properties": {"b": {"type": "null"}}}],
        "$defs": {"x": {"properties": {"b": {"type": "boolean"}}}},
        "additionalProperties": {"type": "integer"},
    }
    assert set(properties_of(parameters)) == {"a", "b"}
    values = [("a", "1"), ("b", "true"), ("b", "null"), ("other", "7")]
    text = written(parameters, values, by_character=False)
    assert text == '{"a": 1, "b": true, "b": null, "other": 7}'
    assert written(None, [("x", "7")], by_character=False) == '{"x": "7"}'
    assert written({}, [], by_character=False) == "{}"


def test_references_in_a_circle_end() -> None:
    parameters = {"properties": {"v": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"$ref": "#/$defs/a"}}}
    assert Parameter.of(parameters["properties"]["v"], parameters).types >= {"string", "integer"}


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=12))
def test_python_strings(text: str) -> None:
    literal = repr(text)
    string = PythonString(literal[0])
    found = "".join(string.take(c, 0)[1] for c in literal[1:])
    assert string.take(",", 0)[1] == ""
    assert string.has_ended
    assert found == text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    whole = PythonString(literal[0])
    assert whole.take(literal[1:] + ")", 0)[1] == found


class Counted(str):
    """A text that counts how many of its characters were looked at one by one."""

    looked = 0

    def __getitem__(self, key: Any) -> str:
        Counted.looked += 1
        return super().__getitem__(key)


@pytest.mark.parametrize("make", [JsonCalls, PythonCalls], ids=["json", "python"])
@pytest.mark.parametrize("size", [16, 200])
def test_long_arguments_are_looked_at_once(make: Any, size: int) -> None:
    """200 kB of arguments: work grows with the length, not with its square."""
    text = "x' = \\n[{(;" * 20_000
    if make is JsonCalls:
        whole = json.dumps([{"name": "f", "arguments": {"a": text, "b": [text[:99]]}}])
    else:
        whole = f"[f(a={json.dumps(text)}, b=[{json.dumps(text[:99])}])]"
    reader = make({"f"} if make is JsonCalls else (Tool("f"),))
    out: list[Event] = []
    Counted.looked = 0
    given = 0
    for at in range(0, len(whole), size):
        piece = Counted(whole[at : at + size])
        given += len(piece)
        reader.feed(piece, 0, out)
    assert reader.num_calls == 1
    assert out[-1] == CallEnd()
    assert Counted.looked < 4 * given
    arguments = "".join(event.text for event in out if isinstance(event, CallArguments))
    assert json.loads(arguments) == {"a": text, "b": [text[:99]]}


@pytest.mark.parametrize("index", ["²", "٣", "9" * 5000, "2", "-1", "01", ""])
def test_a_reference_to_no_element_of_a_list_dangles(index: str) -> None:
    root = {"anyOf": [{"type": "null"}, {"type": "string"}]}
    assert resolved({"$ref": "#/anyOf/1"}, root) == {"type": "string"}
    assert resolved({"$ref": f"#/anyOf/x/{index}"}, root) is True
    if index:
        assert resolved({"$ref": f"#/anyOf/{index}"}, root) is True
