"""Grammars that an answer could begin and not end: none is compiled."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from support.models import embedded

from mlx_paged.engine.grammar import StructuredOutputs
from mlx_paged.engine.grammar.compiler import GrammarCompiler
from mlx_paged.errors import InvalidParameterError

INTEGER = {"type": "integer"}


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    model = embedded()
    eos = model.tokenizer.eos_token_ids
    return GrammarCompiler(model.tokenizer, model.vocab_size, eos, timeout=300)


def closed(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False, **more}


def compiled(compiler: GrammarCompiler, schema: Any, **options: Any) -> Any:
    return compiler.compile(StructuredOutputs(json=schema, disable_any_whitespace=True, **options))


def accepts(compiler: GrammarCompiler, schema: Any, text: str) -> bool:
    matcher = compiled(compiler, schema).matcher()
    tokens = compiler.tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and bool(matcher.is_accepting())


def follows(compiler: GrammarCompiler, schema: Any, text: str) -> str:
    """The characters that may follow the beginning of an answer; "" where it may only end."""
    matcher = compiled(compiler, schema).matcher()
    assert matcher.consume_tokens(compiler.tokenizer.tokenize_bytes(text.encode())), text
    mask = matcher.compute_bitmask()
    assert not matcher.is_error(), matcher.get_error()
    tokens = [t for t in range(8 * len(mask)) if mask[t >> 3] >> (t & 7) & 1]
    texts = {
        compiler.tokenizer.decode_str([t])[:1] for t in tokens if t not in compiler.eos_token_ids
    }
    return "".join(sorted(texts))


SCORE = closed({"score": INTEGER}, required=["score"])


@pytest.mark.parametrize(
    ("schema", "begun", "valid"),
    [
        ({**SCORE, "patternProperties": {"^score$": INTEGER}}, '{"score":1', '{"score":1}'),
        ({**SCORE, "patternProperties": {"^(score|a)$": INTEGER}}, "", '{"score":1,"a":2}'),
        (closed({"a": INTEGER, "b": INTEGER}, patternProperties={"^[ab]$": {"minimum": 5}}),
         '{"a":7,"b":8', '{"a":7}'),
        ({"allOf": [closed({"a": INTEGER}, patternProperties={"^b$": INTEGER}),
                    {"properties": {"b": {"maximum": 3}}}]}, "", '{"a":1,"b":2}'),
        ({**SCORE, "patternProperties": {"[^\\s\\S]": INTEGER}}, '{"score":1', '{"score":1}'),
        ({"type": "object", "patternProperties": {"": False}}, "{", "{}"),
        ({"type": "object", "properties": {"a": INTEGER}, "patternProperties": {"^[^a]": False,
          "^a[\\s\\S]": False, "^$": False}}, '{"a":1', '{"a":1}'),
        ({"type": "object", "allOf": [{"properties": {"a": {"const": "\x01"}, "b": INTEGER}}]},
         "", '{"b":1}'),
        ({"type": "object", "allOf": [{"properties": {"a": {"enum": ["\x01", "x"]}}}]},
         '{"a":"', '{"a":"x"}'),
        ({"type": "object", "allOf": [{"properties": {"a": {"type": ["string", "null"],
          "pattern": "^\\x01+$"}}}]}, '{"a":n', '{"a":null}'),
    ],
)  # fmt: skip
def test_nothing_can_be_begun_that_cannot_end(
    compiler: GrammarCompiler, schema: dict[str, Any], begun: str, valid: str
) -> None:
    Draft202012Validator(schema).validate(json.loads(valid))
    assert accepts(compiler, schema, valid)
    if begun.endswith("1") or begun == "{" or begun.endswith("8"):
        assert "," not in follows(compiler, schema, begun) and '"' not in follows(
            compiler, schema, begun
        )
    elif begun:
        follows(compiler, schema, begun)


def test_a_pattern_of_listed_names_still_says_what_they_are(compiler: GrammarCompiler) -> None:
    schema = closed({"a": INTEGER}, patternProperties={"^a$": {"minimum": 5}, "^b": INTEGER})
    assert accepts(compiler, schema, '{"a":5,"b1":0}')
    assert not accepts(compiler, schema, '{"a":4}')


NODE = closed({"next": {"$ref": "#/$defs/node"}}, required=["next"])


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {"$ref": "#/$defs/node", "$defs": {"node": NODE}},
        {"type": "array", "minItems": 1, "items": {"$ref": "#"}},
        {"anyOf": [{"$ref": "#"}, closed({}, required=["a"])]},
        {"allOf": [{"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#"}}}]},
        closed({"a": {"$ref": "#/$defs/no"}}, required=["a"],
               **{"$defs": {"no": {"type": "integer", "minimum": 2, "maximum": 1}}}),
        {"type": "object", "allOf": [{"properties": {"a": {"const": "\x01"}}, "required": ["a"]}]},
    ],
)  # fmt: skip
def test_a_schema_of_endless_values_or_none_is_refused(
    compiler: GrammarCompiler, schema: dict[str, Any]
) -> None:
    for strict in (False, True):
        with pytest.raises(InvalidParameterError, match="for which there is a value"):
            compiled(compiler, schema, strict=strict)


@pytest.mark.parametrize(
    ("schema", "valid"),
    [
        ({"anyOf": [{"$ref": "#/$defs/node"}, INTEGER], "$defs": {"node": NODE}}, "1"),
        ({"anyOf": [{"$ref": "#/$defs/no"}, INTEGER],
          "$defs": {"no": {"type": "integer", "minimum": 2, "maximum": 1}}}, "1"),
        (closed({"a": {"$ref": "#/$defs/no"}, "b": INTEGER},
                **{"$defs": {"no": {"enum": ["x"], "type": "integer"}}}), '{"b":1}'),
        ({"type": "array", "items": {"$ref": "#"}}, "[[],[[]]]"),
        ({"$ref": "#/$defs/n", "$defs": {"n": {"type": ["object", "null"], "required": ["n"],
          "properties": {"n": {"$ref": "#/$defs/n"}}}}}, '{"n":{"n":null}}'),
    ],
)  # fmt: skip
def test_parts_that_have_no_value_leave_the_others(
    compiler: GrammarCompiler, schema: dict[str, Any], valid: str
) -> None:
    assert compiled(compiler, schema, strict=True).relaxed == ()
    assert accepts(compiler, schema, valid)


@pytest.mark.parametrize(
    ("schema", "relaxed"),
    [
        ({"type": "object", "properties": {"a": {"$ref": "#", "minProperties": 1}}},
         ["properties.a.minProperties"]),
        ({"patternProperties": {"^a": INTEGER, "b$": {"type": "string"}}, "type": "object"},
         ["patternProperties.b$"]),
        (closed({}, patternProperties={"^a": INTEGER, "b$": {"type": "string"}}),
         ["patternProperties.b$", "additionalProperties"]),
        ({"type": "object", "patternProperties": {"^a": INTEGER, "b$": {}},
          "unevaluatedProperties": False}, ["patternProperties.b$", "unevaluatedProperties"]),
        ({"type": "string", "pattern": "a^"}, ["pattern"]),
        ({"type": "string", "pattern": "^(a)\\1$"}, ["pattern"]),
        ({"type": "integer", "minimum": 1e20}, ["minimum"]),
    ],
)  # fmt: skip
def test_what_llguidance_does_not_have_is_relaxed(
    compiler: GrammarCompiler, schema: dict[str, Any], relaxed: list[str]
) -> None:
    paths = [f"structured_outputs.json.{path}" for path in relaxed]
    assert list(compiled(compiler, schema).relaxed) == paths
    with pytest.raises(InvalidParameterError, match="that can be enforced"):
        compiled(compiler, schema, strict=True)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"type": "string", "required": True}}},
        {"type": "string", "$defs": {"x": {"required": "a", "properties": 5, "type": 3}}},
    ],
)
def test_a_keyword_of_another_form_where_it_means_nothing(
    compiler: GrammarCompiler, schema: dict[str, Any]
) -> None:
    compiled(compiler, schema)


@pytest.mark.parametrize("pattern", ["a{", "[a", "(", "^(a"])
def test_a_pattern_that_is_none_is_refused(compiler: GrammarCompiler, pattern: str) -> None:
    if pattern != "a{":  # (which is one in ECMA 262)
        with pytest.raises(InvalidParameterError, match="a valid JSON schema"):
            compiled(compiler, {"type": "string", "pattern": pattern})
    else:
        compiled(compiler, {"type": "string", "pattern": pattern})


@pytest.mark.parametrize(
    ("bounds", "valid", "invalid"),
    [
        ({"exclusiveMinimum": 1, "exclusiveMaximum": 1.5}, ["1.25", "1.01"], ["1", "1.0", "1.5"]),
        ({"exclusiveMinimum": 0, "maximum": 0.5}, ["0.5", "0.01"], ["0", "0.0", "0.51"]),
        ({"minimum": -2.5, "exclusiveMaximum": -2}, ["-2.5", "-2.25"], ["-2", "-2.0"]),
        ({"exclusiveMinimum": -3, "maximum": -2.5}, ["-2.5", "-2.75"], ["-3", "-3.0"]),
        ({"minimum": 1.5, "exclusiveMaximum": 2}, ["1.5", "1.75"], ["2", "2.0"]),
    ],
)
def test_an_excluded_whole_number_is_no_answer(
    compiler: GrammarCompiler, bounds: dict[str, Any], valid: list[str], invalid: list[str]
) -> None:
    schema = {"type": "number", **bounds}
    assert [text for text in valid if not accepts(compiler, schema, text)] == []
    assert [text for text in invalid if accepts(compiler, schema, text)] == []


# --- Limits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("keyword", ["items", "allOf", "properties"])
@pytest.mark.parametrize("levels", [200, 600])
def test_a_schema_of_too_many_levels_is_refused(
    compiler: GrammarCompiler, keyword: str, levels: int
) -> None:
    schema: dict[str, Any] = INTEGER
    for _ in range(levels):
        schema = {
            keyword: {"items": schema, "allOf": [schema], "properties": {"a": schema}}[keyword]
        }
    with pytest.raises(InvalidParameterError, match=r"fewer levels|JSON"):
        compiled(compiler, schema)


def test_hundreds_of_optional_properties(compiler: GrammarCompiler) -> None:
    schema = closed({f"p{i}": {"type": "boolean"} for i in range(900)})
    assert accepts(compiler, schema, '{"p3":true,"p899":false}')


def test_a_large_enum(compiler: GrammarCompiler) -> None:
    texts = [f"{'y' * 30_000}{i}" for i in range(4)]
    assert accepts(compiler, {"enum": texts}, f'"{texts[2]}"')


@pytest.mark.parametrize(
    "fields",
    [
        {"regex": "(([a-z]{1,1000}){1,1000}){1,1000}"},
        {"json": {"type": "string", "pattern": "^(.{1,300},?){1,300}$"}},
        {"grammar": 'start: "x" T\nT: /(([a-z]{1,1000}){1,1000}){1,1000}/'},
        {"grammar": "start: " + '("a"|"b")? ' * 3000},
        {"grammar": "start: a\na: " + '"c"* ' * 3000},
        {"grammar": 'start: "x" ' + '("a"|"b")? ' * 3000},
    ],
)
def test_what_exceeds_the_limits_of_a_step_is_refused_first(
    compiler: GrammarCompiler, fields: dict[str, Any]
) -> None:
    with pytest.raises(InvalidParameterError, match="within the limits of this server") as raised:
        compiler.compile(StructuredOutputs(**fields))
    assert raised.value.field == f"structured_outputs.{next(iter(fields))}"


@pytest.mark.parametrize(
    "grammar", ['start: "a" B\nB: /x/ & /y/', 'start: "a"+ (B | "c" B)\nB: /x/ & /y/']
)
def test_a_grammar_that_ends_nowhere_is_refused(compiler: GrammarCompiler, grammar: str) -> None:
    with pytest.raises(InvalidParameterError, match="can follow to its end"):
        compiler.compile(StructuredOutputs(grammar=grammar))
