"""Formats derived from what a chat template renders, with the listed ones disabled."""

from __future__ import annotations

import json
import logging
import random
import re
from collections.abc import Sequence
from typing import Any

import pytest
from support.derivation import FamilyProbe
from support.tool_families import TOOLS, Family, families
from support.tool_reading import SmallTokenizer, Walker, check, grouped, read, summary
from support.tool_templates import TEMPLATES, Invented

from mlx_paged.parsing import registry
from mlx_paged.parsing.call_syntax import KEY, NAME
from mlx_paged.parsing.derived import DerivedFormat, format_of_syntax
from mlx_paged.parsing.derived_syntax import derive_syntax
from mlx_paged.parsing.format import ToolFormat
from mlx_paged.templates.probe import TemplateProbe

Calls = list[tuple[str, Any]]

#: Families that derivation alone does not serve, and why.
UNSERVED = {
    "functiongemma": "objects in a notation of their own",
    "functionary_v3_2": "the prompt ends with the first marker",
    "gemma4": "objects in a notation of their own",
    "inkling": "the prompt ends with the first marker",
    "kimi_k3": "numbers and types within tags",
    "minicpm5": "strings are marked where they have markup",
    "minimax_m3": "tags of elements",
    "muse_glimmer": "tags have names in them",
    "openai": "text and calls are messages of their own",
    "plamo3": "tokens within tokens",
}

CALLS: list[Calls] = [
    [("now", {})],
    [("get_weather", {"city": "Oslo", "days": 3, "units": "celsius"})],
    [("write_file", {"path": "/tmp/ä.txt", "text": "two\nlines \"q\" 'x' {a} [b] </a>"})],
    [("get_weather", {"city": "Oslo"}), ("write_file", {"path": "ä", "text": "b"}), ("now", {})],
]

every_template = pytest.mark.parametrize("template", TEMPLATES, ids=lambda t: t.name)
in_both_ways = pytest.mark.parametrize(
    ("template", "has_tokens"),
    [
        pytest.param(t, has_tokens, id=f"{t.name}-{'tokens' if has_tokens else 'spelled'}")
        for t in TEMPLATES
        for has_tokens in ((True, False) if t.tokens else (False,))
    ],
)


def probe_of(template: Invented) -> TemplateProbe:
    return TemplateProbe(template.source, template.tokens)


def rendered(template: Invented, calls: Calls, content: str = "") -> str:
    """A turn with calls as the template renders it, without the prompt."""
    message = {
        "role": "assistant",
        "content": content,
        "tool_calls": [
            {
                "id": f"id_{i}",
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for i, (name, arguments) in enumerate(calls)
        ],
    }
    tools = [tool.for_template() for tool in TOOLS]
    text = probe_of(template).render([{"role": "user", "content": "hi"}, message], tools)
    return text.rpartition("<|im_start|>assistant\n")[2].removesuffix("<|im_end|>\n")


def calls_of(template: Invented) -> list[Calls]:
    return CALLS if template.has_parallel else CALLS[:-1]


def check_reading(
    format: ToolFormat, tokenizer: SmallTokenizer, text: str, calls: Calls, ids: Sequence[str] = ()
) -> None:
    """A text with calls has these calls, however it comes."""
    updates = tokenizer.encode(text)
    answer, _ = read(format, TOOLS, tokenizer.added, updates)
    assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == calls, text
    assert all(call.is_complete for call in answer.calls)
    assert answer.content == "Before."
    if ids:
        assert [call.id for call in answer.calls] == ids
    rng = random.Random(0)
    splits: list[set[int]] = [set(), *({i} for i in range(0, len(updates), 7))]
    splits += [{i for i in range(len(updates)) if rng.random() < 0.3} for _ in range(3)]
    for split in splits:
        other, _ = read(format, TOOLS, tokenizer.added, grouped(updates, split))
        assert summary(other) == summary(answer), (text, split)


def derived(probe: TemplateProbe, tokens: Sequence[str]) -> tuple[Walker, ToolFormat]:
    walker = Walker(tokens)
    return walker, format_of_syntax(derive_syntax(probe), walker.tokenizer.added)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(
            family,
            id=family.name,
            marks=[pytest.mark.xfail(strict=True, reason=UNSERVED[family.name])]
            if family.name in UNSERVED
            else [],
        )
        for family in families()
    ],
)
def test_families_of_the_collection(family: Family) -> None:
    check_family(family, family.tokens)
    if family.is_spelled:
        check_family(family, ())


def check_family(family: Family, tokens: Sequence[str]) -> None:
    walker, format = derived(FamilyProbe(family), tokens)
    required = format.grammar(TOOLS, required=True, parallel=True)
    auto = format.grammar(TOOLS, required=False, parallel=True)
    once = format.grammar(TOOLS, required=True, parallel=False)
    for calls in CALLS if family.has_parallel else CALLS[:-1]:
        text = family.render(calls)
        check_reading(format, walker.tokenizer, family.before(family.lead) + text, calls)
        assert walker.accepts(required, text), text
        assert walker.accepts(auto, family.before("It is:\n") + text), text
        assert walker.accepts(once, text) == (len(calls) == 1)
    assert walker.accepts(auto, family.alone("Nothing to do."))
    assert not walker.accepts(required, family.render([("get_weather", {"days": 3})]))
    assert not walker.accepts(required, family.render([("unknown", {})]))


@pytest.mark.one_in(4)
@in_both_ways
def test_invented_templates(template: Invented, has_tokens: bool) -> None:
    walker, format = derived(probe_of(template), template.tokens if has_tokens else ())
    required = format.grammar(TOOLS, required=True, parallel=True)
    auto = format.grammar(TOOLS, required=False, parallel=True)
    once = format.grammar(TOOLS, required=True, parallel=False)
    for calls in calls_of(template):
        ids = [f"id_{i}" for i in range(len(calls))] if template.has_ids else []
        text = rendered(template, calls, "Before.\n")
        check_reading(format, walker.tokenizer, text, calls, ids)
        assert walker.accepts(auto, text), text
        text = rendered(template, calls)
        assert walker.accepts(required, text), text
        assert walker.accepts(once, text) == (len(calls) == 1)
    assert not walker.accepts(required, rendered(template, [("get_weather", {"days": 3})]))
    assert not walker.accepts(required, rendered(template, [("unknown", {})]))
    assert walker.accepts(auto, "Nothing to do.")


@every_template
def test_the_kind_of_a_syntax(template: Invented) -> None:
    assert derive_syntax(probe_of(template)).kind == template.kind


@pytest.mark.one_in(2)
@in_both_ways
def test_forced_calls_are_valid(template: Invented, has_tokens: bool) -> None:
    walker, format = derived(probe_of(template), template.tokens if has_tokens else ())
    tools = {tool.name: tool for tool in TOOLS}
    lark = format.grammar(TOOLS, required=True, parallel=True)
    endings = [*format.markers]
    assert isinstance(format, DerivedFormat)
    if (parts := format.syntax.parameters) is not None:
        texts = [parts.value_end + text for text in ("", parts.between + parts.key, parts.tail)]
        pairs = [(tool.name, key) for tool in TOOLS for key in tool.parameters["properties"]]
        endings += [
            text.replace(NAME, name).replace(KEY, key) for name, key in pairs for text in texts
        ]
    num_calls = 0
    for seed in range(9):
        ids = walker.walk(lark, seed, "", endings)
        if ids is None:
            continue
        written = b"".join(walker.tokenizer.tokens[i] for i in ids).decode(errors="replace")
        answer, _ = read(format, TOOLS, walker.tokenizer.added, walker.tokenizer.updates(ids))
        assert not answer.content.strip(), written
        for call in answer.calls:
            assert call.is_complete, written
            check(call.arguments, tools[call.name])
        num_calls += len(answer.calls)
    assert num_calls


def places(template: Invented, text: str) -> list[int]:
    """Returns the places at which a text may be damaged.

    A call that has begun cannot be taken back, and the readers of objects, tags and functions skip
    what has no meaning within one.
    """
    if template.kind == "named":
        return [*range(len(text))]
    inside: set[int] = set()
    for name, first, last in (
        ("write_file", "wa", "wc"),
        ("write_file", "wd", "wf"),
        ("get_weather", "wg", "wg"),
    ):
        if last in text:
            begin, end = text.index(first), text.index(last) + len(last)
            at = text.rfind(name, 0, begin) + len(name)
            if at < len(name):  # the name follows the arguments
                at, end = begin - 30, text.index(name, end) + len(name)
            inside |= set(range(at, end + 12))
    return [at for at in range(len(text)) if at not in inside]


@pytest.mark.one_in(7)
@every_template
def test_damaged_answers_lose_nothing(template: Invented) -> None:
    """Every word of an answer is in its text, or in a call."""
    walker, format = derived(probe_of(template), template.tokens)
    tokenizer = walker.tokenizer
    rng = random.Random(template.name)
    calls: list[Calls] = [
        [("write_file", {"path": "wa", "text": "wb wc"})],
        [("write_file", {"path": "wd", "text": "we wf"}), ("get_weather", {"city": "wg"})],
    ]
    for _ in range(60):
        text = rendered(template, calls[rng.random() < 0.5 and template.has_parallel], "wx wy\n")
        text += " wz"
        chosen = rng.choices(places(template, text), k=rng.randint(1, 3))
        for at in sorted(chosen, reverse=True):
            length = rng.choice([1, 1, 3])
            damage = rng.choice(["cut", "drop", "double", "insert"])
            if damage == "cut":
                text = text[: at + 1]
            elif damage == "drop":
                text = text[:at] + text[at + length :]
            elif damage == "double":
                text = text[: at + length] + text[at:]
            else:
                text = text[:at] + rng.choice([" wq ", "\n", '"', "{", "}", "</", ">"]) + text[at:]
        updates = tokenizer.encode(text)
        answer, _ = read(format, TOOLS, tokenizer.added, updates)
        found = answer.content + "".join(f" {c.name} {c.id} {c.arguments} " for c in answer.calls)
        for word in re.findall(r"(?<!\w)w[a-z](?!\w)", text):
            assert word in found, (text, answer.content, summary(answer)["calls"])
        split = {i for i in range(len(updates)) if rng.random() < 0.2}
        other, _ = read(format, TOOLS, tokenizer.added, grouped(updates, split))
        assert summary(other) == summary(answer), text


@pytest.mark.parametrize("name", ["identified", "special_tokens", "identified_parameters"])
def test_a_section_without_a_call_is_text(name: str) -> None:
    [template] = [t for t in TEMPLATES if t.name == name]
    walker, format = derived(probe_of(template), template.tokens)
    assert isinstance(format, DerivedFormat)
    syntax = format.syntax
    text = f"A {syntax.section_start.strip()} {syntax.section_end.strip()} B"
    answer, _ = read(format, TOOLS, walker.tokenizer.added, walker.tokenizer.encode(text))
    assert (answer.content, answer.calls) == (text, [])


@pytest.mark.parametrize("name", ["elements", "identified_parameters", "attributes"])
def test_a_value_may_have_its_own_end(name: str) -> None:
    """It ends only where another parameter, or the call's end, follows."""
    [template] = [t for t in TEMPLATES if t.name == name]
    walker, format = derived(probe_of(template), ())
    calls = [("write_file", {"path": "a</path>b<|/value|>c</arg>", "text": "d</text> e"})]
    text = rendered(template, calls, "Before.\n")
    check_reading(format, walker.tokenizer, text, calls)


def test_listed_formats_come_first(caplog: pytest.LogCaptureFixture) -> None:
    [attributes] = [t for t in TEMPLATES if t.name == "attributes"]
    with caplog.at_level(logging.INFO):
        found = registry.detect(attributes.source, {})
    assert isinstance(found, DerivedFormat)
    assert '<call function="{name}"><arg name="{key}">{value}</arg></call>' in caplog.text
    hermes = (
        "{% for tool in tools %}{{ tool }}{% endfor %}"
        '<tool_call>{"name": "{{ call.name }}"}</tool_call>'
    )
    found = registry.detect(hermes, {})
    assert found is not None
    assert found.names == ("hermes",)


@pytest.mark.parametrize(
    ("calls", "reason"),
    [
        ("", "it renders no calls"),
        ("{{ calls[0].function.name }}", "without their arguments"),
        ("{{ calls[0].function.arguments | tojson }}", "it renders no calls"),
        ("{{ raise_exception('no calls here') }}", "no calls here"),
        ("<c>{{ calls[0].function.arguments | tojson }} {{ calls[0].function.name }}", "after"),
        ("{{ calls[0].function.name }} {{ calls[0].function.arguments | tojson }}", "from text"),
    ],
)
def test_why_nothing_is_derived(calls: str, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    template = Invented("none", calls, "json").source
    assert registry.detect(template, {}) is None
    assert reason in caplog.text


def test_templates_without_tools_are_not_tried(caplog: pytest.LogCaptureFixture) -> None:
    assert (
        registry.detect("{% for message in messages %}{{ message.content }}{% endfor %}", {})
        is None
    )
    assert not caplog.text
