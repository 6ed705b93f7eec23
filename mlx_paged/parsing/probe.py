"""Probe for detection: renders a chat template with a call, and without."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from mlx_paged.parsing.definitions import Tool
from mlx_paged.templates.probe import Message, Refused, TemplateProbe, user_turn

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
# Templates accept different ids, or read different information from them.
_IDS = ("a1b2c3d4e", f"functions.{TOOL.name}:0")
_MAX_END_LENGTH = 64  # maximum characters of a turn's end that may belong to a call
_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)


@dataclass(frozen=True)
class Shown:
    """Texts rendered by a template.

    Attributes:
        text: Its source without comments, and its renderings with tools and with a call.
        calls: Renderings of a turn that calls `TOOL` with `ARGUMENTS`, from the first difference to
            a turn without a call. Empty if it cannot render calls.
    """

    text: str
    calls: tuple[str, ...]


@lru_cache(maxsize=8)
def shown(chat_template: str) -> Shown:
    """Renders a template in several ways; skips those that it refuses."""
    probe = TemplateProbe(chat_template)
    source = _COMMENT.sub("", chat_template)
    tools = [TOOL.for_template()]

    def rendered(messages: list[Message], *, is_prompt: bool = False) -> str:
        try:
            return probe.render(messages, tools, add_generation_prompt=is_prompt)
        except Refused:
            return ""

    plain = rendered([user_turn(), {"role": "assistant", "content": _TEXT}])
    calls: dict[str, None] = {}
    for turn in _turns():
        whole = rendered([user_turn(), turn])
        start = len(probe.common_prefix(whole, plain))
        end = min(len(probe.common_suffix(whole, plain)), len(whole) - start)
        call = whole[start : len(whole) - end]
        if TOOL.name in call and str(ARGUMENTS["town"]) in call:
            calls[call + whole[len(whole) - end :][:_MAX_END_LENGTH]] = None
    offered = rendered([user_turn()], is_prompt=True)
    return Shown("\n".join([source, offered, *calls]), tuple(calls))


def _turns() -> Iterator[Message]:
    """Turns with a call, in the forms that templates take."""
    for arguments in (dict(ARGUMENTS), json.dumps(ARGUMENTS)):
        for call_id in _IDS:
            function = {"name": TOOL.name, "arguments": arguments}
            call = {"id": call_id, "type": "function", "function": function}
            for content in ("", None):
                yield {"role": "assistant", "content": content, "tool_calls": [call]}
