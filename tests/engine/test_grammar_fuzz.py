"""Random schemas over the whole vocabulary, followed at random to the end: nothing fails, nothing
invalid comes, and what is refused has no value or cannot be had.

MLX_PAGED_FUZZ sets how many schemas (5000: some ten minutes).
"""

from __future__ import annotations

import copy
import json
import os
import re
from collections import Counter
from collections.abc import Collection
from random import Random
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from support.grammar_walks import Formats, Walks
from support.models import embedded
from support.random_schemas import CONSTANTS, RandomSchemas

from mlx_paged.engine.grammar import StructuredOutputs
from mlx_paged.engine.grammar.compiler import CompiledGrammar, GrammarCompiler
from mlx_paged.engine.grammar.subschemas import subschemas
from mlx_paged.errors import InvalidParameterError

COUNT = int(os.environ.get("MLX_PAGED_FUZZ", "75"))
# Why a schema may be refused where it is not strict.
REFUSALS = re.compile(r"for which there is a value|integers of at most 2\*\*53")
FIELD = "structured_outputs.json"
#: Values that a schema without any must not accept.
VALUES: list[Any] = [
    *CONSTANTS, "b", "ab", "12", "Abc", "x_", "2020-01-01", "10:00:00Z", "a@b.co", "1.2.3.4", "::1",
    -20, 2, 3, 7, 10, 14, 100, 0.5, [None], ["a"], [1, 1], [[]], [{}], {"foo": 1}, {"b": 1},
    {"a": 1, "b": 1}, {"a": "a"}, {"a": None}, {"foo": {}}, {"": 1}, {"é": 1},
]  # fmt: skip


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    model = embedded()
    eos = model.tokenizer.eos_token_ids
    return GrammarCompiler(model.tokenizer, model.vocab_size, eos, timeout=300, cache_size=4)


def enforced(schema: Any, relaxed: Collection[str]) -> Any:
    """A schema without the keywords that are not enforced."""
    schema = copy.deepcopy(schema)
    for path, each in list(subschemas(schema)):
        for key in list(each):
            here = f"{FIELD}{path}.{key}"
            if key == "patternProperties" and isinstance(each[key], dict):
                for pattern in list(each[key]):
                    if f"{here}.{pattern}" in relaxed:
                        del each[key][pattern]
            if here not in relaxed or key not in each:
                continue
            value = each.pop(key)
            if key == "oneOf" and "$ref" not in each:  # (which is taken for anyOf)
                each["allOf"] = [*each.get("allOf", []), {"anyOf": value}]
            elif key == "if":
                each.pop("then", None)
                each.pop("else", None)
    return schema


def value_of(schema: Any, rng: Random) -> tuple[bool, Any]:
    """(whether some value is valid, which)."""
    validator = Draft202012Validator(schema, format_checker=Formats())
    names = [name for _, each in subschemas(schema) for name in each.get("properties", ())]
    tried = list(VALUES)
    for _ in range(30):
        some = rng.sample(names, rng.randint(0, len(names)))
        tried.append({name: rng.choice(VALUES) for name in some})
        tried.append([rng.choice(VALUES) for _ in range(rng.randint(0, 3))])
    for value in tried:
        try:
            if validator.is_valid(value):
                return True, value
        except Exception:  # (of the validator: endless references, numbers too large for it)
            return False, None
    return False, None


def followed(walks: Walks, grammar: CompiledGrammar, schema: Any, outcomes: Counter[str]) -> None:
    [text] = walks.run([grammar])
    if text is None:
        outcomes["cut"] += 1
        return
    try:
        errors = list(Draft202012Validator(schema, format_checker=Formats()).iter_errors(
            json.loads(text)
        ))  # fmt: skip
    except (RecursionError, OverflowError, re.error):
        outcomes["beyond the validator"] += 1
        return
    assert not errors, f"{text!r} is invalid for {json.dumps(schema)}: {errors[0].message}"
    outcomes["valid"] += 1


def test_random_schemas(compiler: GrammarCompiler) -> None:
    outcomes: Counter[str] = Counter()
    for seed in range(-(-COUNT // 50)):
        schemas, walks, rng = RandomSchemas(seed), Walks(compiler, seed), Random(seed)
        for _ in range(min(50, COUNT - 50 * seed)):
            schema = schemas.schema()
            if schema is False:
                continue
            try:
                grammar = compiler.compile(StructuredOutputs(json=schema))
            except InvalidParameterError as refusal:
                assert REFUSALS.search(str(refusal)), (json.dumps(schema), str(refusal))
                if "2**53" not in str(refusal) and "\\u0001" not in json.dumps(schema):
                    has_value, value = value_of(schema, rng)
                    assert not has_value, (json.dumps(schema), value, str(refusal))
                outcomes["refused"] += 1
                continue
            outcomes["relaxed" if grammar.relaxed else "enforced as a whole"] += 1
            wanted = enforced(schema, grammar.relaxed) if grammar.relaxed else schema
            for _ in range(2):
                followed(walks, grammar, wanted, outcomes)
            try:
                assert not compiler.compile(StructuredOutputs(json=schema, strict=True)).relaxed
            except InvalidParameterError as refusal:
                assert grammar.relaxed and "that can be enforced" in str(refusal), str(refusal)
                outcomes["refused where strict"] += 1
        print(f"seeds up to {seed}: {dict(outcomes)}", flush=True)
    assert outcomes["valid"] > COUNT and outcomes["cut"] < COUNT / 5


def random_regex(rng: Random, depth: int = 3) -> str:
    if depth == 0:
        return rng.choice(("a", "b", "[a-c]", "[^x]", "[0-9]", ".", "é", r"\.", "(?:)"))
    part = lambda: random_regex(rng, depth - 1)  # noqa: E731
    kind = rng.randrange(6)
    if kind == 0:
        return f"({part()}|{part()})"
    if kind == 1:
        return f"({part()}){rng.choice(('*', '+', '?', '{2}', '{1,3}', '{0,2}', '{2,}'))}"
    return part() + (part() if kind < 5 else "")


def random_lark(rng: Random) -> str:
    rules = [f"r{i}" for i in range(rng.choice((1, 2, 3)))]
    items = [*rules, '"a"', '"bc"', f"/{random_regex(rng, 2).replace('/', '')}/", "T", "%json {}"]
    lines = ["start: " + " ".join(rng.choices(items, k=2)), "T: /[x-z]/ & ~/y/"]
    for rule in rules:
        bodies = [" ".join(rng.choices(items, k=rng.choice((1, 2)))) for _ in range(2)]
        lines.append(f"{rule}: {' | '.join([*bodies, chr(34) + 'e' + chr(34)])}")
    return "\n".join(lines)


def test_random_regular_expressions_grammars_and_choices(compiler: GrammarCompiler) -> None:
    outcomes: Counter[str] = Counter()
    rng, walks = Random(0), Walks(compiler, 0)
    for i in range(COUNT):
        regex = random_regex(rng)
        texts = ["".join(rng.choices('ab"\\\n é😀<|', k=rng.randint(1, 6))) for _ in range(3)]
        for fields in ({"regex": regex}, {"grammar": random_lark(rng)}, {"choice": texts}):
            try:
                grammar = compiler.compile(StructuredOutputs(**fields))
            except InvalidParameterError as refusal:
                assert refusal.field == f"structured_outputs.{next(iter(fields))}"
                outcomes[f"{refusal.field} refused"] += 1
                continue
            try:
                [text] = walks.run([grammar])
            except UnicodeDecodeError:  # (bytes that are no text, of a class as [^x])
                outcomes["no text"] += 1
                continue
            if text is not None and "choice" in fields:
                assert text in texts
            if text is not None and "regex" in fields:
                assert re.fullmatch(regex, text), (regex, text)
            outcomes["cut" if text is None else "ended"] += 1
        if i % 50 == 49:
            print(f"{i + 1}: {dict(outcomes)}", flush=True)
    assert outcomes["ended"] > COUNT
