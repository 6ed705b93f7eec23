"""What a chat template shows of calls: it is rendered with a call, and without."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

from mlx_paged.server.tools.definitions import Tool

#: The tool that is offered and called. No template has its words.
TOOL = Tool(
    name="probe_weather",
    description="Tells the weather.",
    parameters={
        "type": "object",
        "properties": {"town": {"type": "string"}, "hours": {"type": "integer"}},
        "required": ["town"],
    },
)
ARGUMENTS: Mapping[str, Any] = {"town": "Quebrada", "hours": 31}
_TEXT = "Zyx"  # an answer without a call
# Templates differ in the ids that they take, or in what they read from them.
_IDS = ("a1b2c3d4e", f"functions.{TOOL.name}:0")
_LONGEST_END = 64  # characters of a turn's end that may belong to a call
# The beginning of a marker at a text's end, or nothing.
_CUT_MARKER = re.compile(r"(?:[<\[\]][^<>\[\]\s]{0,32})?$")
_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)


@dataclass(frozen=True)
class Shown:
    """What a template shows.

    Attributes:
        text: Its source without comments, and what it renders with tools and with a call.
        calls: Ways in which it renders a turn that calls `TOOL` with `ARGUMENTS`, from where the
            turn begins to differ from one without a call. Empty: it cannot render calls.
    """

    text: str
    calls: tuple[str, ...]


@lru_cache(maxsize=8)
def shown(chat_template: str) -> Shown:
    """Renders a template in several ways; those that it refuses are left out."""
    source = _COMMENT.sub("", chat_template)
    try:
        template = _environment().from_string(chat_template)
    except jinja2.TemplateError:
        return Shown(source, ())
    user = {"role": "user", "content": "Hello"}
    tools = [TOOL.for_template()]
    offered = _rendered(template, [user], tools=tools, add_generation_prompt=True) or ""
    calls: dict[str, None] = {}
    for with_call, without in _conversations(user):
        whole = _rendered(template, with_call, tools=tools)
        plain = _rendered(template, without, tools=tools)
        if whole is None or plain is None:
            continue
        start = _num_common(whole, plain)
        # (What both turns begin with may be the beginning of two markers.)
        start -= len(_CUT_MARKER.search(whole[:start])[0])  # type: ignore[index]
        end = min(_num_common(whole[::-1], plain[::-1]), len(whole) - start)
        call = whole[start : len(whole) - end]
        if TOOL.name in call and str(ARGUMENTS["town"]) in call:
            calls[call + whole[len(whole) - end :][:_LONGEST_END]] = None
    return Shown("\n".join([source, offered, *calls]), tuple(calls))


def _conversations(
    user: Mapping[str, Any],
) -> Iterator[tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]]:
    """Conversations whose last turn has a call, each with one whose last turn has none."""
    for arguments in (dict(ARGUMENTS), json.dumps(ARGUMENTS)):
        for call_id in _IDS:
            function = {"name": TOOL.name, "arguments": arguments}
            call = {"id": call_id, "type": "function", "function": function}
            for content in ("", None):
                turn = {"role": "assistant", "content": content, "tool_calls": [call]}
                plain = {"role": "assistant", "content": _TEXT}
                yield [user, turn], [user, plain]


def _num_common(a: str, b: str) -> int:
    """How many characters two texts have in common at their beginnings."""
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def _rendered(
    template: jinja2.Template,
    messages: Sequence[Mapping[str, Any]],
    **variables: Any,
) -> str | None:
    """A conversation; None: the template refuses it."""
    variables = {"add_generation_prompt": False, "bos_token": "", "eos_token": "", **variables}
    # (Templates are programs: they fail in their own ways.)
    with suppress(Exception):
        return template.render(messages=[dict(message) for message in messages], **variables)
    return None


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    """Jinja as transformers sets it up for chat templates."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime(2026, 1, 1).strftime(form)
    return environment


class _Generation(jinja2.ext.Extension):  # type: ignore[misc]
    """The tag around what a model generates, which training needs."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
