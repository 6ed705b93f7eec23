"""The questions about tools: their schemas, and the calls that count as valid and right."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from mlx_paged.evals.tool_calls import Question, evaluate, is_right, is_valid, schema_of, tool_of

FUNCTION = {
    "name": "math.area",
    "description": "An area.",
    "parameters": {
        "type": "dict",
        "properties": {
            "base": {"type": "integer", "description": "The base."},
            "height": {"type": "float", "optional": True},
            "corners": {"type": "array", "items": {"type": "tuple", "items": {"type": "float"}}},
            "unit": {"type": "any"},
            "style": {"type": "dict", "properties": {"type": {"type": "string"}}},
        },
        "required": ["base"],
    },
}
ANSWER = [{"math_area": {"base": [10], "height": [5, 5.0], "unit": ["Square Meters", ""]}}]


def call(**arguments: Any) -> tuple[str, str]:
    return "math_area", json.dumps(arguments)


def test_a_description_becomes_a_schema() -> None:
    schema = schema_of(FUNCTION["parameters"])  # type: ignore[arg-type]
    Draft202012Validator.check_schema(schema)
    assert schema["type"] == "object" and schema["required"] == ["base"]
    properties = schema["properties"]
    assert properties["height"] == {"type": "number"}
    assert properties["corners"]["items"] == {"type": "array", "items": {"type": "number"}}
    assert properties["unit"] == {}
    assert properties["style"]["properties"] == {"type": {"type": "string"}}, "a property's name"


@pytest.mark.parametrize(
    ("name", "arguments", "valid"),
    [
        ("math_area", '{"base": 1}', True),
        ("math_area", '{"base": 1, "height": 2.5, "unit": null}', True),
        ("math_area", '{"base": "1"}', False),
        ("math_area", '{"height": 2.5}', False),
        ("math_area", '{"base": 1', False),
        ("math.area", '{"base": 1}', False),
    ],
)
def test_valid_calls(name: str, arguments: str, valid: bool) -> None:
    assert is_valid([tool_of(FUNCTION)], name, arguments) is valid


@pytest.mark.parametrize(
    ("calls", "right"),
    [
        ([call(base=10, height=5)], True),
        ([call(base=10, height=5.0, unit="square meters")], True),
        ([call(base=10)], False),
        ([call(base=11, height=5)], False),
        ([call(base=10, height=5, style={})], False),
        ([call(base=10, height=5)] * 2, False),
        ([], False),
    ],
)
def test_right_calls(calls: list[tuple[str, str]], right: bool) -> None:
    assert is_right(ANSWER, calls) is right


def test_several_calls_may_come_in_any_order() -> None:
    answers = [{"f": {"x": [1]}}, {"f": {"x": [2]}}]
    assert is_right(answers, [("f", '{"x": 2}'), ("f", '{"x": 1}')])
    assert not is_right(answers, [("f", '{"x": 2}'), ("f", '{"x": 2}')])


def test_shares_are_of_all_questions() -> None:
    def reply(*calls: tuple[str, str]) -> dict[str, Any]:
        made = [{"function": {"name": name, "arguments": text}} for name, text in calls]
        return {"choices": [{"message": {"tool_calls": made or None}}]}

    replies = [
        reply(call(base=10, height=5)),
        reply(call(base=3)),
        reply(call(base="x")),
        reply(),
    ]

    class Scripted:
        def ask(self, path: str, bodies: list[Any], on_reply: object) -> list[Any]:
            assert path == "/v1/chat/completions"
            assert [body["tool_choice"] for body in bodies] == ["required"] * 4
            return replies

    question = Question([{"role": "user", "content": "?"}], [tool_of(FUNCTION)], ANSWER)
    found = evaluate(Scripted(), [question] * 4, "required")  # type: ignore[arg-type]
    assert found == {"called": 0.75, "valid": 0.5, "right": 0.25}
