"""Keywords of objects in syntaxes that write parameters one by one: enforced, or told."""

from __future__ import annotations

from typing import Any

import pytest
from support.tool_reading import Walker, check, read

from mlx_paged.engine.grammar.schema import prepare_schema
from mlx_paged.errors import InvalidParameterError
from mlx_paged.parsing.definitions import Tool, ToolChoice
from mlx_paged.parsing.format import ToolFormat
from mlx_paged.parsing.parameters import parameter_lists, unenforced_paths
from mlx_paged.parsing.registry import format_of
from mlx_paged.parsing.schemas import ArgumentsWriter, types_of
from mlx_paged.server.conversation import Conversation
from mlx_paged.server.turn import Turn
from mlx_paged.server.turn_preparation import _constraint

FAMILIES = ["qwen3_coder", "glm45", "minimax_m2", "pythonic", "gemma4"]
BIT = {"enum": [0, 1]}
ABC = {"a": BIT, "b": BIT, "c": BIT}
NO_OTHERS = {"additionalProperties": False}

#: Whose keywords are all enforced.
ENFORCED: dict[str, dict[str, Any]] = {
    "at least one": {"properties": ABC, "minProperties": 1, **NO_OTHERS},
    "at least two": {"properties": ABC, "minProperties": 2, **NO_OTHERS},
    "at most one": {"properties": ABC, "maxProperties": 1, **NO_OTHERS},
    "just two": {"properties": ABC, "minProperties": 2, "maxProperties": 2, **NO_OTHERS},
    "one more": {"properties": ABC, "required": ["b"], "minProperties": 2, **NO_OTHERS},
    "one or the other": {
        "properties": ABC, **NO_OTHERS, "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
    },
    "closed beside": {
        "allOf": [{"properties": {"a": BIT}, **NO_OTHERS}, {"properties": {"b": BIT}}],
    },
    "others of a schema": {
        "allOf": [
            {"properties": {"a": BIT}, "additionalProperties": {"maximum": 0}},
            {"properties": {"b": BIT}, "required": ["b"]},
        ],
    },
    "names of a pattern": {
        "properties": {"x_a": BIT, "b": BIT}, "required": ["x_a"],
        "patternProperties": {"^x_": {"minimum": 1}}, **NO_OTHERS,
    },
}  # fmt: skip


def prepared(format: ToolFormat, schema: dict[str, Any]) -> Tool:
    """As a turn does it."""
    counts = format.counts(schema)
    schema = {"type": "object", **{k: v for k, v in schema.items() if k not in counts}}
    found = prepare_schema(schema, strict=True, field="tools")
    assert isinstance(found.schema, dict)
    return Tool("f", parameters={**found.schema, **counts})


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder"])
def test_properties_that_are_not_listed_are_not_written(name: str) -> None:
    """Schemas of most clients do not say that there are no others."""
    walker = Walker(("<tool_call>", "</tool_call>"))
    parameters = {"properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
    tool = Tool("f", parameters={"type": "object", **parameters})
    wanted = Turn(Conversation(()), (tool,), ToolChoice("required"))
    format = format_of(name, walker.tokenizer.added)
    constraint, relaxed, _ = _constraint(wanted, (tool,), format, [("tools", None)])
    assert constraint is not None and not relaxed
    calls = {
        "hermes": '<tool_call>\n{"name": "f", "arguments": {"city": "Oslo"%s}}\n</tool_call>',
        "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=city>\nOslo\n</parameter>%s\n"
        "</function>\n</tool_call>",
    }
    more = {"hermes": ', "Richard": 1', "qwen3_coder": "\n<parameter=x>\n1\n</parameter>"}
    assert walker.accepts(constraint.grammar, calls[name] % "")
    assert not walker.accepts(constraint.grammar, calls[name] % more[name])


@pytest.fixture(scope="module")
def walkers() -> dict[str, tuple[Walker, ToolFormat]]:
    made = {}
    for name in FAMILIES:
        walker = Walker(format_of(name, {}).markers)
        made[name] = walker, format_of(name, walker.tokenizer.added)
    return made


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("schema", ENFORCED.values(), ids=ENFORCED)
def test_objects_are_valid(walkers, name: str, schema: dict[str, Any]) -> None:
    walker, format = walkers[name]
    tool = prepared(format, schema)
    original = Tool("f", parameters={"type": "object", **schema})
    told = list(format.unenforced(original))
    if name == "gemma4" and told:  # (it writes values by itself, and joins no schemas of one)
        assert [path for path, _ in told] in ([".properties.x_a"], [".properties.b"])
        return
    assert not told
    lark = format.grammar([tool], required=True, parallel=False)
    found = set()
    for seed in range(12):
        ids = walker.walk(lark, seed, markers=format.markers)
        if ids is None:
            continue
        answer, _ = read(format, [tool], walker.tokenizer.added, walker.tokenizer.updates(ids))
        [call] = answer.calls
        check(call.arguments, original)
        found.add(call.arguments)
    assert found


@pytest.mark.parametrize(
    ("schema", "paths"),
    [
        ({"minProperties": 1}, [".minProperties"]),
        ({"properties": ABC, "minProperties": 4}, [".minProperties"]),
        ({"properties": {f"p{i}": BIT for i in range(40)}, "minProperties": 3}, [".minProperties"]),
        ({"properties": {"a": {"pattern": r"(a)\1"}}}, [".properties.a.pattern"]),
        ({"properties": {"a": {"anyOf": [{"pattern": "x^"}, BIT]}}},
         [".properties.a.anyOf[0].pattern"]),
        ({"properties": {"a": {"$ref": "#/$defs/t"}}, "$defs": {"t": {"pattern": "x$y"}}},
         [".$defs.t.pattern"]),
        ({"enum": [{"a": 1}]}, [".enum"]),
        ({"properties": ABC, "patternProperties": {r"\p{L}": BIT}}, [r".patternProperties.\p{L}"]),
        ({"properties": {"a": {"properties": {"b": {"pattern": "^x$"}}, "minProperties": 1}}}, []),
    ],
)  # fmt: skip
def test_what_cannot_be_enforced_is_told_and_where_strict_refused(schema, paths) -> None:
    tool = Tool("f", parameters={"type": "object", **schema}, field="tools[0].parameters")
    found = list(format_of("qwen3_coder", {}).unenforced(tool))
    assert [path for path, _ in found] == paths
    told = unenforced_paths(found, tool.field, strict=False)
    assert told == tuple(f"tools[0].parameters{path}" for path in paths)
    if paths:
        with pytest.raises(InvalidParameterError, match="that can be enforced") as refused:
            unenforced_paths(found, tool.field, strict=True)
        assert refused.value.field == told[0]
    # Without strict there is a grammar all the same.
    format_of("qwen3_coder", {}).grammar([tool], required=True, parallel=False)


def test_a_syntax_with_objects_within_values_tells_what_is_in_them() -> None:
    schema = {"properties": {
        "a": {"type": "object", "additionalProperties": BIT, "minProperties": 1},
        "b": {"type": "array", "prefixItems": [BIT], "items": {"pattern": "x^"}},
    }}  # fmt: skip
    tool = Tool("f", parameters=schema)
    assert [path for path, _ in format_of("gemma4", {}).unenforced(tool)] == [
        ".properties.a.minProperties",
        ".properties.b.prefixItems",
        ".properties.b.items.pattern",
    ]


def test_an_object_that_cannot_be_is_refused() -> None:
    for schema in (
        {"properties": ABC, "required": ["a", "b"], "maxProperties": 1},
        {"allOf": [{"required": ["a"]}, {"properties": {"b": BIT}, **NO_OTHERS}]},
    ):
        with pytest.raises(InvalidParameterError, match="for which there is a value"):
            parameter_lists(schema)


def _wide(keyword: str) -> dict[str, Any]:
    """Ten references at each of ten levels: ten to the tenth parts."""
    definitions: dict[str, Any] = {"d0": {"type": "string"}}
    for i in range(1, 10):
        definitions[f"d{i}"] = {keyword: [{"$ref": f"#/$defs/d{i - 1}"}] * 10}
    return {"$defs": definitions}


@pytest.mark.parametrize("keyword", ["anyOf", "allOf"])
def test_references_to_references_do_not_take_for_ever(keyword: str) -> None:
    wide = _wide(keyword)
    root = {**wide, "type": "object", "$ref": "#/$defs/d9"}
    value = {**wide, "type": "object", "properties": {"a": {"$ref": "#/$defs/d9"}}}
    format = format_of("qwen3_coder", {})
    for schema in (root, value):
        with pytest.raises(InvalidParameterError, match="fewer alternatives"):
            list(format.unenforced(Tool("f", parameters=schema)))
            format.grammar([Tool("f", parameters=schema)], required=True, parallel=False)
        # Answers are read on the server's loop, whether or not their calls were forced.
        writer = ArgumentsWriter(schema)
        assert writer.begin("a") + writer.add("text") + writer.end() + writer.close()
        types_of(schema, schema)
