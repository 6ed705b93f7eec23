"""The families of tool calls: for each a module with its golden transcripts and a renderer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from mlx_paged.parsing.definitions import Tool

Arguments = Mapping[str, Any]


@dataclass(frozen=True)
class Call:
    """A call of a golden transcript.

    Attributes:
        arguments: As a value. None: it is cut, and `text` is what there is of its text.
    """

    name: str
    arguments: Any = None
    id: str | None = None
    is_complete: bool = True
    text: str | None = None


@dataclass(frozen=True)
class Golden:
    """A transcript, and what is in it."""

    transcript: str
    content: str = ""
    calls: tuple[Call, ...] = ()
    reasoning: str = ""


@dataclass(frozen=True)
class Family:
    """A family of tool parsers, for the tests.

    Attributes:
        name: vLLM's name of its parser.
        tokens: Added tokens of its models.
        template: A part of a chat template, written by us, that shows the format.
        goldens: Transcripts.
        render: Calls in the family's syntax, as its chat templates render those of history.
        tools: Of the goldens.
        can_write: Whether a string can be written in the syntax at all, without its tokens.
        before, alone: How text is written before a call, and where there is none.
        has_parallel: Whether an answer may have more than one call.
        lead: Text before calls.
        begin: With what a call begins; None: with the first marker.
        is_detected: Whether the template shows the format.
        is_spelled: Whether models without the tokens spell the markers.
    """

    name: str
    tokens: tuple[str, ...]
    template: str
    goldens: tuple[Golden, ...]
    render: Callable[[Sequence[tuple[str, Arguments]]], str]
    tools: tuple[Tool, ...] = field(default_factory=lambda: TOOLS)
    can_write: Callable[[str], bool] = lambda text: True
    before: Callable[[str], str] = lambda text: text
    alone: Callable[[str], str] = lambda text: text
    has_parallel: bool = True
    lead: str = "Before. "
    begin: str | None = None
    is_detected: bool = True
    is_spelled: bool = True


def tool(name: str, properties: Mapping[str, Any], *required: str, **more: Any) -> Tool:
    """A tool with parameters."""
    parameters = {"type": "object", "properties": properties, "required": list(required), **more}
    return Tool(name=name, parameters=parameters)


TOOLS = (
    tool(
        "get_weather",
        {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "units": {"type": "string", "enum": ["celsius", "fahrenheit"]},
        },
        "city",
    ),
    tool("write_file", {"path": {"type": "string"}, "text": {"type": "string"}}, "path", "text"),
    tool("now", {}),
    tool(
        "search.web-v2",
        {
            "query": {"$ref": "#/$defs/query"},
            "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "tags": {"type": "array", "items": {"type": "string"}},
            "filter": {"type": "object"},
            "exact": {"type": "boolean"},
            "score": {"type": "number"},
            "note": {"type": ["string", "null"]},
        },
        "query",
        **{"$defs": {"query": {"type": "string"}}},
    ),
)


def as_json(value: Any) -> str:
    """JSON as chat templates write it."""
    return json.dumps(value, ensure_ascii=False)


def families() -> list[Family]:
    """All families, by their modules."""
    names = sorted(module.name for module in iter_modules(__path__))
    return [family for name in names for family in import_module(f"{__name__}.{name}").FAMILIES]
