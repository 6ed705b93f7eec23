"""Markers of reasoning, derived from what a chat template renders."""

from __future__ import annotations

import pytest
from support.tool_templates import TEMPLATES, Invented

from mlx_paged.parsing.derived_reasoning import ReasoningMarkers, derive_reasoning

TURNS = (
    "{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' %}BODY{% else %}"
    "{{ m.content }}{% endif %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\nPROMPT{% endif %}"
)


def template(body: str, prompt: str = "") -> str:
    return TURNS.replace("BODY", body).replace("PROMPT", prompt)


@pytest.mark.parametrize("invented", TEMPLATES, ids=lambda t: t.name)
def test_invented_templates(invented: Invented) -> None:
    found = derive_reasoning(invented.source, invented.tokens)
    assert (found and (found.start, found.end)) == invented.markers


@pytest.mark.parametrize(
    ("source", "markers"),
    [
        # Rendered with the answer; where there is none, an empty one or nothing.
        (
            template("<mull>\n{{ m.reasoning_content }}\n</mull>\n\n{{ m.content }}"),
            ("<mull>", "</mull>"),
        ),
        (
            template("{% if m.thinking %}[MUSE]{{ m.thinking }}[/MUSE]{% endif %}{{ m.content }}"),
            ("[MUSE]", "[/MUSE]"),
        ),
        (
            template(
                "{% if m.reasoning %}Let me reason:\n{{ m.reasoning }}\nMy answer:\n{% endif %}"
                "{{ m.content }}"
            ),
            ("Let me reason:", "My answer:"),
        ),
        # Only where it is asked for, and only beside calls.
        (
            template(
                "{% if enable_thinking and m.thinking %}<|ponder|>{{ m.thinking }}<|/ponder|>"
                "{% endif %}{{ m.content }}"
            ),
            ("<|ponder|>", "<|/ponder|>"),
        ),
        (
            template(
                "{% if m.tool_calls and m.thinking %}<hm>{{ m.thinking }}</hm>{% endif %}"
                "{{ m.content }}"
            ),
            ("<hm>", "</hm>"),
        ),
        # The prompt opens it, and the history leaves it out.
        (
            template("{{ m.content.split('</muse>')[-1] }}{# thinking #}", "<muse>\n"),
            ("<muse>", "</muse>"),
        ),
        # None: the header of a turn is no marker, nor is a name of a variable alone.
        (template("{{ m.reasoning_content }}[BEGIN ANSWER]{{ m.content }}"), None),
        (template("{{ m.content }}{# thinking #}"), None),
        ("{{ raise_exception('think') }}", None),
        ("{% think", None),
    ],
)
def test_markers(source: str, markers: tuple[str, str] | None) -> None:
    expected = None if markers is None else ReasoningMarkers(*markers)
    assert derive_reasoning(source) == expected
