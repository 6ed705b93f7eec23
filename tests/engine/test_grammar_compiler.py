"""The compiler of grammars: what they accept, what is refused and where, cache and limits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from support.models import embedded

from mlx_paged.engine.grammar import StructuredOutputs, probe
from mlx_paged.engine.grammar import compiler as compiler_module
from mlx_paged.engine.grammar.compiler import GrammarCompiler
from mlx_paged.engine.grammar.jobs import Job, Jobs, _mach_clock
from mlx_paged.engine.grammar.schema import prepare_schema
from mlx_paged.errors import GrammarsBusyError, InvalidParameterError

VOCAB_SIZE = embedded().vocab_size
EOS = embedded().tokenizer.eos_token_ids


def make(**options: Any) -> GrammarCompiler:
    model = embedded()
    return GrammarCompiler(model.tokenizer, model.vocab_size, EOS, **options)


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return make()


def accepts(compiler: GrammarCompiler, wanted: StructuredOutputs, *parts: str | int) -> bool:
    """True if an answer of these texts and tokens follows the grammar to an end."""
    matcher = compiler.compile(wanted).matcher()
    tokens: list[int] = []
    for part in parts:
        tokens += [part] if isinstance(part, int) else compiler.tokenizer.tokenize_str(part)
    taken = matcher.try_consume_tokens(tokens)
    return taken == len(tokens) and matcher.is_accepting()


OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CLOSED = {**OBJECT, "additionalProperties": False}


@pytest.mark.parametrize(
    ("fields", "valid", "invalid"),
    [
        ({"json": CLOSED}, ['{"a": 1}', '{"a":1}', '{\n    "a": 1\n}', '{"a" : 1 }'],
         ['{"b": 1}', "{}", '{"a": 1.5}', '{"a": 1, "b": 2}', "{" + 5 * " " + '"a": 1}',
          "{\n\n" + '"a": 1}', "{\n" + 41 * " " + '"a": 1}', ' {"a": 1}', '{"a": 1} ']),
        ({"json": CLOSED, "disable_any_whitespace": True}, ['{"a":1}'], ['{"a": 1}']),
        ({"json": CLOSED, "whitespace_pattern": r"[ ]{1,9}"}, ['{' + 9 * " " + '"a": 1}'],
         ['{\n"a":1}', '{' + 10 * " " + '"a": 1}']),
        ({"json": OBJECT}, ['{"a": 1, "b": []}'], []),
        ({"json": OBJECT, "disable_additional_properties": True}, ['{"a": 1}'],
         ['{"a": 1, "b": []}']),
        ({"json": True}, ["1", "[]", '"x"', "null"], ["x"]),
        ({"json_object": True}, ["{}", '{"x": [1, {"y": null}]}'], ["[]", "1"]),
        ({"json": {"type": "string", "pattern": "ab+c"}}, ['"abbc"', '"xxabcxx"'], ['"ac"']),
        ({"regex": "[0-9]{3}"}, ["123"], ["12", "1234", "abc"]),
        ({"regex": "^[0-9]{3}$"}, ["123"], ["12", "1234"]),
        ({"regex": "a/b"}, ["a/b"], ["ab"]),
        ({"choice": ["yes", "no", 'a "q"\n', "é😀"]}, ["yes", "no", 'a "q"\n', "é😀"],
         ["ye", "maybe", "é"]),
        ({"grammar": 'start: "a" /[0-9]+/ "b"'}, ["a12b"], ["ab", "a1"]),
        ({"grammar": 'root ::= "a" [0-9]+ tail\ntail ::= "b" | "c"'}, ["a12b", "a1c"], ["ab"]),
        ({"grammar": 'start: "<" %json {"type": "integer"} ">" // %json {'}, ["<12>"], ["<x>"]),
        ({"grammar": 'start: "%json {" %json true'}, ["%json {1"], ["%json {"]),
    ],
)  # fmt: skip
def test_a_grammar_accepts_what_it_says(
    compiler: GrammarCompiler, fields: Mapping[str, Any], valid: list[str], invalid: list[str]
) -> None:
    wanted = StructuredOutputs(**fields)
    assert [t for t in valid if not accepts(compiler, wanted, t)] == []
    assert [t for t in invalid if accepts(compiler, wanted, t)] == []


def tag(begin: str, schema: Any, end: str) -> dict[str, Any]:
    return {"begin": begin, "content": {"type": "json_schema", "json_schema": schema}, "end": end}


INTEGER = {"type": "integer"}
# (<|im_start|> is an added token of the embedded model that does not end its texts.)
IM_START = 1
TAGS = [tag("<f=a>", INTEGER, "</f>"), tag("<|im_start|>b", {"type": "boolean"}, "</b>")]
TRIGGERS = ["<f=", "<|im_start|>"]


def form(format: Mapping[str, Any]) -> StructuredOutputs:
    return StructuredOutputs(structural_tag={"type": "structural_tag", "format": format})


@pytest.mark.parametrize(
    "wanted",
    [
        StructuredOutputs(
            structural_tag={
                "structures": [
                    {"begin": t["begin"], "schema": t["content"]["json_schema"], "end": t["end"]}
                    for t in TAGS
                ],
                "triggers": TRIGGERS,
            }
        ),
        form({"type": "triggered_tags", "triggers": TRIGGERS, "tags": TAGS}),
    ],
    ids=["structures", "format"],
)
def test_a_structural_tag_begins_at_its_trigger(
    compiler: GrammarCompiler, wanted: StructuredOutputs
) -> None:
    def ok(*parts: str | int) -> bool:
        return accepts(compiler, wanted, *parts)

    assert ok("free text") and ok()
    assert ok("call: <f=a>12</f> and <f=a>3</f>.")
    assert ok("hi ", IM_START, "btrue</b> bye")
    assert not ok("<f=a>x</f>") and not ok("<f=b>12</f>") and not ok("<f=a>12")
    assert not ok(IM_START, "b12</b>") and not ok(IM_START, "c")


@pytest.mark.parametrize(
    ("format", "valid", "invalid"),
    [
        ({"type": "const_string", "value": "ab"}, ["ab"], ["a", "abc"]),
        ({"type": "json_schema", "json_schema": INTEGER}, ["12"], ["x"]),
        ({"type": "regex", "pattern": "a/[0-9]+"}, ["a/1"], ["a/"]),
        ({"type": "grammar", "grammar": 'root ::= "y" "z"'}, ["yz"], ["y"]),
        ({"type": "any_text"}, ["", "what ever\n"], []),
        ({"type": "sequence", "elements": [
            {"type": "const_string", "value": "A"},
            {"type": "or", "elements": [{"type": "const_string", "value": "x"},
                                        {"type": "regex", "pattern": "[0-9]"}]},
            {"type": "any_text"}]}, ["Ax", "A1 and so on"], ["A", "x"]),
        ({"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": ["</t>", "."]},
         ["<t>foo</t>", "<t>."], ["<t>foo", "<t>foo</t>x"]),
        ({"type": "triggered_tags", "triggers": ["<f"], "tags": TAGS[:1], "at_least_one": True,
          "stop_after_first": True}, ["<f=a>1</f>"], ["", "x", "<f=a>1</f>x"]),
        ({"type": "triggered_tags", "triggers": ["<f"], "tags": TAGS[:1], "at_least_one": True},
         ["<f=a>1</f>", "<f=a>1</f> x <f=a>2</f>"], ["", "x"]),
        ({"type": "triggered_tags", "triggers": ["<f"], "tags": TAGS[:1],
          "stop_after_first": True}, ["", "x", "x <f=a>1</f>"], ["<f=a>1</f>x"]),
        ({"type": "tags_with_separator", "separator": ", ", "tags": TAGS[:1]},
         ["", "<f=a>1</f>", "<f=a>1</f>, <f=a>2</f>"], ["<f=a>1</f>, "]),
        ({"type": "tags_with_separator", "separator": ", ", "tags": TAGS[:1],
          "at_least_one": True, "stop_after_first": True}, ["<f=a>1</f>"],
         ["", "<f=a>1</f>, <f=a>2</f>"]),
    ],
)  # fmt: skip
def test_formats_of_structural_tags(
    compiler: GrammarCompiler, format: Mapping[str, Any], valid: list[str], invalid: list[str]
) -> None:
    wanted = form(format)
    assert [t for t in valid if not accepts(compiler, wanted, t)] == []
    assert [t for t in invalid if accepts(compiler, wanted, t)] == []


FORMAT = "structural_tag.format"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"json": {"type": "objekt"}}, "json.type"),
        ({"json": {"properties": {"a": {"type": ["string", "foo"]}}}}, "json.properties.a.type"),
        ({"json": {"items": {"anyOf": [{"type": "null"}, {"pattern": "[a"}]}}},
         "json.items.anyOf[1].pattern"),
        ({"json": {"patternProperties": {"[a": {}}}}, "json.patternProperties"),
        ({"json": {"properties": {"b": {"$ref": "#/x/y"}}}}, "json.properties.b.$ref"),
        ({"json": {"$ref": "http://example.com/x"}}, "json.$ref"),
        ({"json": {"minimum": "x"}}, "json.minimum"),
        ({"json": {"required": "a"}}, "json.required"),
        ({"json": {"enum": "a"}}, "json.enum"),
        ({"json": {"type": "array", "minItems": 5, "maxItems": 2}}, "json.minItems"),
        ({"json": {"$ref": "#"}}, "json"),  # no value is valid
        ({"json": {"items": {"uniqueItems": True}}, "strict": True}, "json.items.uniqueItems"),
        ({"json": {"properties": {"not": {"not": {"const": 1}}}}, "strict": True},
         "json.properties.not.not"),
        ({"json": {"oneOf": [{"type": "integer"}, {"type": "number"}]}, "strict": True},
         "json.oneOf"),
        ({"json": {"format": "phone", "type": "string"}, "strict": True}, "json.format"),
        ({"json": {"pattern": "^(?!a)", "type": "string"}, "strict": True}, "json.pattern"),
        ({"json": {"dependentRequired": {"a": ["b"]}}, "strict": True}, "json.dependentRequired"),
        ({"grammar": 'start: "x" %json {"not": {"const": 1}}', "strict": True},
         "grammar.%json[0].not"),
        ({"grammar": 'start: %json {"type": 1} %json {"type": "foo"}'}, "grammar.%json[0]"),
        ({"grammar": 'start: %json {"type": '}, "grammar.%json[0]"),
        ({"grammar": 'start: "a" foo'}, "grammar"),
        ({"grammar": "start: <no_such_token>"}, "grammar"),
        ({"grammar": 'root ::= "a'}, "grammar"),
        ({"regex": "[a"}, "regex"),
        ({"regex": "(?=a)b"}, "regex"),
        ({"regex": "a[^\\s\\S]"}, "regex"),
        ({"structural_tag": {"foo": 1}}, "structural_tag"),
        ({"structural_tag": {"structures": 1, "triggers": []}}, "structural_tag.structures"),
        ({"structural_tag": {"structures": [{"begin": "x", "schema": {}, "end": ""}],
                             "triggers": ["y"]}}, "structural_tag.structures[0].begin"),
        ({"structural_tag": {"structures": [{"begin": "x", "schema": {}, "end": "", "foo": 1}],
                             "triggers": ["x"]}}, "structural_tag.structures[0].foo"),
        ({"structural_tag": {"structures": [{"begin": "x", "schema": {"type": "foo"}, "end": ""}],
                             "triggers": ["x"]}}, "structural_tag.%json[0].type"),
        ({"structural_tag": {"structures": [], "triggers": ["y"]}}, "structural_tag"),
        ({"structural_tag": {"structures": [{"begin": "x", "schema": {}, "end": ""}],
                             "triggers": [""]}}, "structural_tag.triggers[0]"),
        ({"structural_tag": {"type": "structural_tag"}}, FORMAT),
        ({"structural_tag": {"type": "structural_tag", "format": {"type": "qwen_xml_parameter"}}},
         f"{FORMAT}.type"),
        ({"structural_tag": {"type": "structural_tag", "format": {"type": "any_text", "x": 1}}},
         f"{FORMAT}.x"),
        ({"structural_tag": {"type": "structural_tag", "format": {
            "type": "sequence", "elements": [{"type": "any_text"}, {"type": "any_text"}]}}},
         f"{FORMAT}.elements[0]"),
        ({"structural_tag": {"type": "structural_tag", "format": {
            "type": "tag", "begin": "a", "content": {"type": "any_text"}, "end": 3}}},
         f"{FORMAT}.end"),
        ({"structural_tag": {"type": "structural_tag", "format": {
            "type": "triggered_tags", "triggers": ["x"], "tags": [], "at_least_one": 1}}},
         f"{FORMAT}.at_least_one"),
    ],
)  # fmt: skip
def test_errors_name_the_keyword_and_its_path(
    compiler: GrammarCompiler, fields: Mapping[str, Any], field: str
) -> None:
    with pytest.raises(InvalidParameterError) as raised:
        compiler.compile(StructuredOutputs(**fields))
    assert raised.value.field == f"structured_outputs.{field}"
    assert "\n" not in str(raised.value) and "<state>" not in str(raised.value)


# --- What cannot be enforced ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "relaxed"),
    [
        ({"items": {"uniqueItems": True}}, ["items.uniqueItems"]),
        ({"properties": {"a": {"not": {"const": 1}}, "b": {"not": {"const": 2}}}},
         ["properties.a.not", "properties.b.not"]),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, ["oneOf"]),
        ({"type": "string", "format": "phone"}, ["format"]),
        ({"type": "string", "pattern": "^(?!a)b"}, ["pattern"]),
        ({"type": "string", "pattern": "\\bword\\b"}, ["pattern"]),
        ({"patternProperties": {"^(?!a)": {}, "^b": {}}, "additionalProperties": False},
         ["patternProperties.^(?!a)", "additionalProperties"]),
        ({"if": {"const": 1}, "then": {"const": 1}}, ["if", "then"]),
        ({"propertyNames": {"pattern": "^a"}}, ["propertyNames"]),
        ({"contains": {"const": 1}, "uniqueItems": True}, ["contains", "uniqueItems"]),
        ({"anyOf": [{"$ref": "#/anyOf/²"}]}, ["anyOf"]),
        ({"anyOf": [{"$ref": "#/anyOf/" + "9" * 5000}]}, ["anyOf"]),
    ],
)  # fmt: skip
def test_what_cannot_be_enforced_is_relaxed_and_said(
    compiler: GrammarCompiler, schema: dict[str, Any], relaxed: list[str]
) -> None:
    found = compiler.compile(StructuredOutputs(json=schema)).relaxed
    assert sorted(found) == sorted(f"structured_outputs.json.{path}" for path in relaxed)
    text = f"start: %json {StructuredOutputs(json=schema).canonical_text[8:-1]}"
    assert len(compiler.compile(StructuredOutputs(grammar=text)).relaxed) == len(relaxed)


@pytest.mark.parametrize(
    "schema",
    [
        {"propertyNames": {"type": "string"}},
        {"propertyNames": {"type": "string", "description": "a name"}},
        {"title": "x", "description": "x", "$comment": "x", "examples": [{"not": 1}],
         "default": {"not": 1}, "readOnly": True, "deprecated": True, "contentEncoding": "base64"},
        {"type": "integer", "format": "int64"},
        {"uniqueItems": False, "minItems": 0, "minLength": 0, "minProperties": 0, "required": []},
        {"then": {"const": 1}, "else": {"const": 1}},
        {"if": {"const": 1}},
        {"minContains": 1, "maxContains": 2},
        {"not": False, "unevaluatedProperties": True, "unevaluatedItems": {},
         "dependentRequired": {"a": []}, "dependentSchemas": {"a": True}, "additionalItems": True},
        {"properties": {"a": {}}, "unevaluatedProperties": False},
        {"properties": {"not": {"type": "integer"}, "uniqueItems": {"type": "boolean"}}},
        {"$defs": {"unused": {"propertyNames": {}}}, "type": "integer"},
        {"const": {"not": {}, "uniqueItems": True}},
    ],
)  # fmt: skip
def test_keywords_that_say_nothing_are_no_obstacle(
    compiler: GrammarCompiler, schema: dict[str, Any]
) -> None:
    assert compiler.compile(StructuredOutputs(json=schema, strict=True)).relaxed == ()


def test_unevaluated_properties_without_applicators_are_additional_ones(
    compiler: GrammarCompiler,
) -> None:
    wanted = StructuredOutputs(json={**OBJECT, "unevaluatedProperties": False})
    assert accepts(compiler, wanted, '{"a": 1}')
    assert not accepts(compiler, wanted, '{"a": 1, "b": 2}')


def test_a_prepared_schema_can_be_embedded(compiler: GrammarCompiler) -> None:
    """As the server does it with the parameters of tools."""
    import json

    schema, relaxed = prepare_schema(
        {"type": "array", "uniqueItems": True}, strict=False, field="tools[0].parameters"
    )
    assert relaxed == ("tools[0].parameters.uniqueItems",)
    wanted = StructuredOutputs(grammar=f'start: "<" %json {json.dumps(schema)} ">"')
    assert accepts(compiler, wanted, "<[1, 1]>")
    assert not accepts(compiler, wanted, "<[" + 9 * " " + "1]>")
    with pytest.raises(InvalidParameterError) as raised:
        prepare_schema({"items": {"not": {}}}, strict=True, field="tools[0].parameters")
    assert raised.value.field == "tools[0].parameters.items.not"


# --- Cache, threads, limits -----------------------------------------------------------------------


def test_a_grammar_is_compiled_once() -> None:
    compiler = make()
    wanted = StructuredOutputs(json={"type": "object", "properties": {"a": {"type": "integer"}}})
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(compiler.compile, [wanted] * 32))
    assert compiler.num_compiled == 1 and len(set(map(id, found))) == 1
    same = StructuredOutputs(json='{"type":"object", "properties":{"a":{"type":"integer"}}}')
    assert compiler.compile(same) is found[0]


def test_the_cache_keeps_the_latest() -> None:
    compiler = make(cache_size=2)
    for text in ("a", "b", "a", "c", "a", "b"):
        compiler.compile(StructuredOutputs(regex=text))
    assert compiler.num_compiled == 4  # b was dropped for c


def test_a_failure_is_not_kept() -> None:
    compiler = make()
    for _ in range(2):
        with pytest.raises(InvalidParameterError):
            compiler.compile(StructuredOutputs(regex="[a"))
    assert compiler.num_compiled == 2 and not compiler._cache


def burn_until(finish: threading.Event) -> None:
    """Uses CPU time, the only kind of time that is limited."""
    while not finish.is_set():
        sum(range(1000))


def test_what_takes_too_long_is_refused_and_not_waited_for() -> None:
    """(LM Studio #824: a compile at 100% CPU for ever.)"""
    compiler = make(timeout=0.01)
    finish, begun = threading.Event(), threading.Event()
    compile_grammar = GrammarCompiler._compile

    def slow(self: GrammarCompiler, wanted: StructuredOutputs) -> Any:
        begun.set()
        burn_until(finish)
        return compile_grammar(self, wanted)

    async def compile_async(wanted: StructuredOutputs) -> None:
        await compiler.compile_async(wanted)

    most = compiler_module._MAX_COMPILING
    with mock.patch.object(GrammarCompiler, "_compile", slow):
        try:
            for i in range(most):
                for _ in range(2):
                    with pytest.raises(InvalidParameterError, match="compiles within") as raised:
                        compiler.compile(StructuredOutputs(regex=f"a{i}"))
                with pytest.raises(InvalidParameterError, match="compiles within"):
                    asyncio.run(compile_async(StructuredOutputs(regex=f"a{i}")))
                assert raised.value.field == "structured_outputs.regex"
            assert begun.is_set() and compiler.num_compiled == most
            # No other has its turn, which is not its own fault.
            for wanted in (StructuredOutputs(regex="b"), StructuredOutputs(regex="b")):
                with pytest.raises(GrammarsBusyError, match=f"^{most} grammars"):
                    compiler.compile(wanted)
                with pytest.raises(GrammarsBusyError):
                    asyncio.run(compile_async(wanted))
        finally:
            finish.set()
    # Grammars that were too slow are refused each time; those that waited are compiled.
    with pytest.raises(InvalidParameterError, match="compiles within"):
        compiler._cache[StructuredOutputs(regex="a0").canonical_text].future.result(300)
    compiler._timeout = 300
    compiler.compile(StructuredOutputs(regex="b"))
    assert compiler.num_compiled == most + 1


def test_a_grammar_may_wait_for_the_machine() -> None:
    """Time in which its thread does not run is not counted."""
    compiler, limit = make(timeout=5), 0.5
    release = threading.Event()
    compile_grammar = GrammarCompiler._compile
    num_looks = 0

    def late(self: GrammarCompiler, wanted: StructuredOutputs) -> Any:
        assert release.wait(300)
        return compile_grammar(self, wanted)

    def pause(*given: Any) -> float:
        nonlocal num_looks
        num_looks += 1
        if num_looks == 8:
            release.set()
        return min(0.1, Jobs._pause(compiler._jobs, *given))

    with (
        mock.patch.object(GrammarCompiler, "_compile", late),
        mock.patch.object(compiler._jobs, "_pause", pause),
    ):
        job = compiler._job_for(StructuredOutputs(regex="a"))
        refused = AssertionError("it has used no time")
        assert compiler._jobs.wait(job, limit, lambda: refused).first_mask.any()
    assert num_looks >= 8


@pytest.mark.parametrize("error", [None, TimeoutError("of the work")])
def test_a_job_that_ends_as_a_pause_times_out(error: Exception | None) -> None:
    class EndsLate(Future[int]):
        def result(self, timeout: float | None = None) -> int:
            if not self.done():
                self.set_result(1) if error is None else self.set_exception(error)
                raise TimeoutError
            return super().result(timeout)

    job = Job(int)
    job.future = EndsLate()
    refused = AssertionError("it has used no time")
    if error is None:
        assert Jobs(1).wait(job, 1.0, lambda: refused) == 1
        return
    with pytest.raises(TimeoutError, match="of the work"):
        Jobs(1).wait(job, 1.0, lambda: refused)


def test_a_job_without_a_thread_is_no_running_job(monkeypatch) -> None:
    """It would count as one forever, and those behind it would wait forever."""
    jobs, start = Jobs(1), threading.Thread.start
    waiting: list[Job[int]] = []

    def refuse(thread: threading.Thread) -> None:
        waiting.append(jobs.start(lambda: 2))
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="new thread"):
        jobs.start(lambda: 1)
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="new thread"):
        waiting[0].future.result(0)
    assert jobs.start(lambda: 3).future.result(300) == 3


def test_many_new_grammars_at_once() -> None:
    """They wait for each other; none is refused."""
    compiler = make(timeout=300)
    wanted = [StructuredOutputs(regex=f"a{{{i}}}b") for i in range(1, 65)]

    async def all_of_them() -> list[Any]:
        return await asyncio.gather(*map(compiler.compile_async, wanted))

    found = asyncio.run(all_of_them())
    assert compiler.num_compiled == 64
    assert [compiler.compile(w) for w in wanted] == found and compiler.num_compiled == 64


def test_masks_have_the_models_words(compiler: GrammarCompiler) -> None:
    first = compiler.compile(StructuredOutputs(choice=["yes", "no"])).first_mask
    assert first.dtype == np.int32 and first.shape == (-(-VOCAB_SIZE // 32),)
    bits = np.unpackbits(first.view(np.uint8), bitorder="little")
    decode = embedded().tokenizer.decode
    assert all(any(t.startswith(decode([i])) for t in ("yes", "no")) for i in np.flatnonzero(bits))


def test_a_tokenizer_without_a_fast_form_is_refused() -> None:
    class Slow:
        added_tokens_decoder = None

    compiler = GrammarCompiler(Slow(), 100, [0])
    with pytest.raises(InvalidParameterError, match="structured_outputs"):
        compiler.compile(StructuredOutputs(regex="a"))


def test_a_tokenizer_with_tiktoken_inside() -> None:
    """(Kimi's have no fast form.)"""
    ranks = {bytes([i]): i for i in range(256)} | {b"ab": 256}
    special = {"<|end|>": 257, "<|think|>": 258}
    encoding = SimpleNamespace(_mergeable_ranks=ranks, _special_tokens=special, _pat_str=r"\S+|\s+")

    class Tokenizer:  # (which can be referred to weakly)
        model = encoding

    tokenizer = Tokenizer()
    tokenizer.added_tokens_decoder = {257: "<|end|>", 258: "<|think|>"}  # type: ignore[attr-defined]
    compiler = GrammarCompiler(tokenizer, 200, [257])
    assert compiler.num_words == 9
    assert accepts(compiler, StructuredOutputs(regex="a[b]+c"), "abbc")
    assert accepts(compiler, StructuredOutputs(grammar='start: <|think|> "ab"'), 258, "ab")
    matcher = compiler.compile(StructuredOutputs(regex="a*")).matcher()
    assert matcher.consume_token(257) and matcher.is_stopped()


def test_a_vocabulary_smaller_than_the_tokenizers(compiler: GrammarCompiler) -> None:
    model = embedded()
    small = GrammarCompiler(model.tokenizer, 100, EOS)
    assert small.num_words == compiler.num_words
    assert accepts(small, StructuredOutputs(regex="ab"), "ab")


@pytest.mark.parametrize(
    "grammar",
    [
        "start: /a+/ /a+/",
        'start: /((a)?)+/ "a"',
        'start: /a+/ /a+/ %json {"type": "integer"}',
        '%llguidance {"allow_initial_skip": false}\nstart: /a+/ /a+/',
    ],
)
def test_a_grammar_without_an_end_is_followed_for_ever_and_not_compiled_for_ever(
    compiler: GrammarCompiler, grammar: str
) -> None:
    """(Its first or second mask never came.)"""
    compiled = compiler.compile(StructuredOutputs(grammar=grammar))
    matcher, mask = compiled.matcher(), compiled.first_mask.copy()
    decode = embedded().tokenizer.decode
    for _ in range(8):
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        token = next(int(each) for each in allowed if decode([each]).strip("a") == "")
        assert matcher.consume_token(token)
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        assert mask.any() and not matcher.is_error()


def test_the_clock_of_a_thread_on_macos() -> None:
    """(`thread_info` in place of the system's.)"""
    asked: list[Any] = []

    def thread_info(port: Any, flavor: Any, values: Any, count: Any) -> int:
        asked.append((port.value, flavor.value, len(values)))
        values[:4] = [3, 250_000, 1, 500_000]  # user and system time: seconds, microseconds
        return 0 if len(asked) < 3 else 4

    port_of = mock.Mock(return_value=77)
    library = SimpleNamespace(pthread_mach_thread_np=port_of, thread_info=thread_info)
    clock = _mach_clock(library, 5)
    assert clock() == 4.75 and asked == [(77, 3, 10)] * 2
    port_of.assert_called_once_with(5)
    with pytest.raises(OSError, match="ended"):
        clock()


class GrowingClock:
    """Has more time pass, by `step` seconds, before each reading than before the last one."""

    def __init__(self, step: float) -> None:
        self._step = step
        self._now = 0.0
        self.restart()

    def restart(self) -> None:
        """Begins with short times again."""
        self._readings = 0

    def thread_time(self) -> float:
        self._readings += 1
        self._now += self._step * self._readings
        return self._now


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "e" r1\nr0: r0 r0 | /[x-z]/ | "e"\nr1: r1 r0 | /([a-c]b|.)/ r1 | "e"',
        'start: r0 r0\nr0: "a" | "a" "a" | /(é)?./ r0 | "e"',
    ],
)
@pytest.mark.parametrize("slower", [1, 1.5, 4])
def test_a_grammar_that_grows_with_every_token_is_refused(
    grammar: str, slower: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """(All answers exceeded a mask's limit after some 55 or 80 tokens. `slower`: the machine.)"""
    clock = GrowingClock(slower * 0.0003)
    run = probe.Prober.run
    monkeypatch.setattr(probe, "time", clock)
    monkeypatch.setattr(probe.Prober, "run", lambda *given: clock.restart() or run(*given))
    with pytest.raises(InvalidParameterError, match="within the limits of this server"):
        make().compile(StructuredOutputs(grammar=grammar))


@pytest.mark.parametrize("between", [0, 2])
def test_growing_masks_are_told_from_noise(between: int) -> None:
    """(`between`: masks within a character, which take no time, after each one that does.)"""
    noise = np.random.default_rng(0).uniform(1, 2, 100)

    def is_growing(seconds: Any) -> bool:
        times = np.zeros((100, 1 + between))
        times[:, 0] = seconds * noise
        return probe._is_growing(times.ravel().tolist())

    assert is_growing(0.001 * np.arange(1, 101)) and is_growing(0.02 + 0.001 * np.arange(100))
    assert is_growing(np.where(np.arange(100) % 20 == 9, 1, 0.001 * np.arange(1, 101)))
    assert not is_growing(np.full(100, 0.03))
    assert not is_growing(0.002 * np.minimum(np.arange(1, 101), 10))  # only at first
    assert not is_growing(1e-6 * np.arange(1, 101))  # too fast to matter
