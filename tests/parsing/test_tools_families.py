"""Every family of tool calls: golden transcripts at every split, round trips, forced calls."""

from __future__ import annotations

import json
import os
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.tool_families import TOOLS, Family, families
from support.tool_reading import SmallTokenizer, Walker, check, grouped, pieces, read, summary

from mlx_paged.parsing import mistral
from mlx_paged.parsing.definitions import Tool
from mlx_paged.parsing.format import ToolFormat
from mlx_paged.parsing.registry import detect, format_of

FAMILIES = families()
every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
in_both_ways = pytest.mark.parametrize(
    ("family", "has_tokens"),
    [
        pytest.param(
            family, has_tokens, id=f"{family.name}-{'tokens' if has_tokens else 'spelled'}"
        )
        for family in FAMILIES
        for has_tokens in (True, False)
        if has_tokens or family.is_spelled
    ],
)


@pytest.fixture(autouse=True)
def same_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids that are made up are the same whenever an answer is read."""
    monkeypatch.setattr(mistral, "new_call_id", lambda *_: "call_1234")


#: Try every split, and more of what is random.
THOROUGH = int(os.environ.get("MLX_PAGED_TEST_TOOLS", "1"))


def every(length: int) -> range:
    """Indices of a transcript: all, or some of a long one."""
    return range(0, length, max(1, length // (25 * THOROUGH)))


def shared(a: str, b: str) -> str:
    """The beginning that two texts share."""
    return b[: next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))]


def of(family: Family, has_tokens: bool) -> tuple[SmallTokenizer, ToolFormat]:
    tokenizer = SmallTokenizer(family.tokens if has_tokens else ())
    return tokenizer, format_of(family.name, tokenizer.added, family.template)


@pytest.mark.one_in(4)
@in_both_ways
def test_golden_transcripts_at_every_split(family: Family, has_tokens: bool) -> None:
    tokenizer, format = of(family, has_tokens)
    rng = random.Random(0)
    for golden in family.goldens:
        updates = tokenizer.encode(golden.transcript)
        answer, _ = read(format, family.tools, tokenizer.added, updates)
        assert answer.content == golden.content, golden
        assert answer.reasoning == golden.reasoning, golden
        assert [call.name for call in answer.calls] == [call.name for call in golden.calls], golden
        for call, expected in zip(answer.calls, golden.calls, strict=True):
            assert call.is_complete == expected.is_complete, golden
            if expected.text is not None:
                assert call.arguments == expected.text
            else:
                assert json.loads(call.arguments) == expected.arguments
            if expected.id is not None:
                assert call.id == expected.id
        splits: list[set[int]] = [set(), *({i} for i in every(len(updates)))]
        splits += [{i for i in range(len(updates)) if rng.random() < 0.3} for _ in range(5)]
        for split in splits:
            other, _ = read(format, family.tools, tokenizer.added, grouped(updates, split))
            assert summary(other) == summary(answer), (golden, split)


@pytest.mark.one_in(14)
@in_both_ways
def test_every_cut_of_a_transcript_is_reported(family: Family, has_tokens: bool) -> None:
    """max_tokens or an end within a call: nothing raises, and what was written is a beginning."""
    tokenizer, format = of(family, has_tokens)
    for golden in family.goldens:
        updates = tokenizer.encode(golden.transcript)
        whole = read(format, family.tools, tokenizer.added, updates)[0]
        for length in every(len(updates)):
            cut = read(format, family.tools, tokenizer.added, updates[:length])[0]
            assert len(cut.calls) <= len(whole.calls) + 1
            for call, of_whole in zip(cut.calls, whole.calls, strict=False):
                assert call.name == of_whole.name
                if call.is_complete:
                    json.loads(call.arguments)
                else:
                    # (A cut end marker is a part of the value: nothing shows that it is none.)
                    longest = max(map(len, format.markers), default=1)
                    common = shared(of_whole.arguments, call.arguments)
                    assert len(common) > len(call.arguments) - longest - 10, golden


@every_family
def test_detection(family: Family) -> None:
    vocabulary = {token: i for i, token in enumerate(family.tokens)}
    found = detect(family.template, vocabulary)
    if not family.is_detected:
        assert found is None
        return
    assert found is not None
    assert family.name in found.names


@every_family
def test_long_arguments_come_in_pieces(family: Family) -> None:
    tokenizer, format = of(family, True)
    text = "".join(f"line {i}: 'quoted' \\ {{x}}\n" for i in range(40))
    if not family.can_write(text):
        text = text.replace("'", "").replace("\\", "")
    updates = tokenizer.encode(family.render([("write_file", {"path": "a", "text": text})]))
    answer, events = read(format, TOOLS, tokenizer.added, updates)
    [call] = answer.calls
    assert json.loads(call.arguments) == {"path": "a", "text": text}
    assert len(pieces(events)) > len(text) / 2


STRINGS = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=30),
    st.lists(
        st.sampled_from(
            [
                *("</parameter>", "</arg_value>", "<tool_call>", "</tool_call>", "\n", '"', "\\"),
                *("'", "{", "}", "null", "5", "日本", "a", " ", "<", "[", "]", "😀", ",", "="),
                *(")", "```", "<|", "｜"),
            ]
        ),
        max_size=6,
    ).map("".join),
)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | STRINGS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(STRINGS, inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "write_file": st.fixed_dictionaries({"path": STRINGS, "text": STRINGS}),
    "now": st.just({}),
    "search.web-v2": st.fixed_dictionaries(
        {"query": STRINGS},
        optional={
            "limit": st.none() | st.integers(-(10**30), 10**30),
            "tags": st.lists(STRINGS, max_size=3),
            "filter": st.dictionaries(STRINGS, JSON, max_size=3),
            "exact": st.booleans(),
            "score": st.floats(allow_nan=False, allow_infinity=False),
        },
    ),
}
CALLS = st.lists(
    st.sampled_from(sorted(ARGUMENTS)).flatmap(
        lambda name: st.tuples(st.just(name), ARGUMENTS[name])
    ),
    min_size=1,
    max_size=3,
)


def strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [*(s for v in value.values() for s in strings(v)), *value]
    return [s for item in value for s in strings(item)] if isinstance(value, list) else []


@pytest.mark.one_in(10)
@in_both_ways
@settings(
    max_examples=15 * THOROUGH,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
@given(data=st.data())
def test_round_trips(family: Family, has_tokens: bool, data: st.DataObject) -> None:
    tokenizer, format = of(family, has_tokens)
    calls = data.draw(CALLS)
    texts = [text for _, arguments in calls for text in strings(arguments)]
    if not all(family.can_write(text) for text in texts):
        return
    if has_tokens and any(token in text for token in family.tokens for text in texts):
        return  # a template would make tokens of them
    updates = tokenizer.encode(family.before(family.lead) + family.render(calls))
    cuts = (
        {i for i in range(len(updates)) if data.draw(st.booleans())} if len(updates) < 40 else set()
    )
    for some in (updates, grouped(updates, cuts)):
        answer, _ = read(format, TOOLS, tokenizer.added, some)
        assert answer.content == "Before."
        assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == calls
        assert all(call.is_complete for call in answer.calls)


FORCED = (
    *TOOLS,
    Tool(
        name="plan",
        parameters={
            "type": "object",
            "properties": {
                "mode": {"enum": ["fast", "slow", 3, None]},
                "code": {"type": "string", "minLength": 2, "maxLength": 5},
                "place": {"$ref": "#/$defs/place"},
                "kind": {"const": "a"},
                "id": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
                "any": {},
            },
            "required": ["mode", "place", "id"],
            "additionalProperties": False,
            "$defs": {
                "place": {
                    "type": "object",
                    "properties": {"x": {"type": "number"}, "in": {"$ref": "#/$defs/place"}},
                    "required": ["x"],
                    "additionalProperties": False,
                }
            },
        },
    ),
    Tool(name="ping", parameters={"type": "object"}),
)


@pytest.mark.one_in(25)
@in_both_ways
@pytest.mark.parametrize("required", [True, False], ids=["required", "auto"])
def test_forced_calls_are_valid(family: Family, has_tokens: bool, required: bool) -> None:
    tokens = family.tokens if has_tokens else ()
    walker = Walker(tokens)
    format = format_of(family.name, walker.tokenizer.added, family.template)
    tools = {tool.name: tool for tool in FORCED}
    num_calls = num_ended = 0
    endings = [space + marker for marker in format.markers for space in ("", "\n")]
    for parallel in (True, False):
        lark = format.grammar(FORCED, required=required, parallel=parallel)
        for seed in range(9 * THOROUGH):
            begins = not required and seed % 3  # (a walk does not come upon a marker by itself)
            begin = family.begin or format.begins_call[0]
            prefix = family.before("Well. ") + begin if begins else ""
            ids = walker.walk(lark, seed, prefix, endings)
            if ids is None:
                continue
            num_ended += 1
            written = b"".join(walker.tokenizer.tokens[i] for i in ids).decode(errors="replace")
            answer, _ = read(format, FORCED, walker.tokenizer.added, walker.tokenizer.updates(ids))
            assert all(call.is_complete for call in answer.calls), written
            for call in answer.calls:
                check(call.arguments, tools[call.name])
            if required:
                assert answer.calls, written
                assert not answer.content.strip(), written
            if not parallel:
                assert len(answer.calls) <= 1, written
            num_calls += len(answer.calls)
    assert num_ended > 6
    assert num_calls > 6


@pytest.mark.one_in(2)
@in_both_ways
def test_what_a_template_renders_is_what_is_forced(family: Family, has_tokens: bool) -> None:
    """The grammar forces calls as those of history are rendered, so models find their habits."""
    walker = Walker(family.tokens if has_tokens else ())
    format = format_of(family.name, walker.tokenizer.added, family.template)
    lark = format.grammar(TOOLS, required=True, parallel=True)
    calls: list[list[tuple[str, Any]]] = [
        [("now", {})],
        [("get_weather", {"city": "Oslo", "days": 3, "units": "celsius"})],
        [("now", {}), ("write_file", {"path": "/tmp/ä.txt", "text": "two\nlines"})],
    ]
    for of_answer in calls if family.has_parallel else calls[:2]:
        assert walker.accepts(lark, family.render(of_answer)), family.render(of_answer)
    assert not walker.accepts(lark, family.render([("get_weather", {"days": 3})]))
    assert not walker.accepts(lark, family.render([("unknown", {})]))
    once = format.grammar(TOOLS, required=True, parallel=False)
    assert not walker.accepts(once, family.render(calls[2]))
    auto = format.grammar(TOOLS, required=False, parallel=True)
    assert walker.accepts(auto, family.alone("Nothing to do."))
    assert walker.accepts(auto, family.before("It is:\n") + family.render(calls[1]))


def test_text_of_a_parameter_that_may_be_more_than_a_string() -> None:
    """A value that would be read as another type is not forced as a string."""
    schema = {"anyOf": [{"type": "integer", "minimum": 10}, {"type": "string"}]}
    one = Tool(name="f", parameters={"properties": {"x": schema}, "required": ["x"]})
    walker = Walker(())
    lark = format_of("glm47", {}, "").grammar((one,), required=True, parallel=False)
    call = "<tool_call>f<arg_key>x</arg_key><arg_value>{}</arg_value></tool_call>"
    assert walker.accepts(lark, call.format("ten"))
    assert walker.accepts(lark, call.format("10"))
    assert not walker.accepts(lark, call.format("5"))
