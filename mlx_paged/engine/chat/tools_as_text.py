"""Conversations with tools in the forms that chat templates take."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mlx_paged.content import joined

Messages = list[dict[str, Any]]

# Hermes's syntax.
BEGIN, END = "<tool_call>", "</tool_call>"

_BEFORE_TOOLS = """You may call functions to help with the user's request.

The functions, as JSON Schema, within <tools></tools>:
<tools>
"""
_AFTER_TOOLS = f"""
</tools>

To call one, write a JSON object with its name and arguments:
{BEGIN}
{{"name": <its name>, "arguments": <an object>}}
{END}"""


def as_text(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> Messages:
    """Returns a conversation for a template that knows no tools (``--tool-template``).

    Tools are described in the system message; calls and their results are texts, in Hermes's
    syntax.

    Args:
        tools: In OpenAI's form.
    """
    changed: Messages = []
    for message in messages:
        plain = dict(message)
        calls = plain.pop("tool_calls", None)
        plain.pop("tool_call_id", None)
        if calls:
            texts = "\n".join(map(_call_as_text, calls))
            plain["content"] = joined(plain.get("content"), texts, "\n")
        if plain["role"] == "tool":
            content = joined("<tool_response>", plain.get("content"), "\n")
            content = joined(content, "</tool_response>", "\n" if plain.get("content") else "\n\n")
            plain = {"role": "user", "content": content}
            if changed and _ends_with_result(changed[-1].get("content")):
                changed[-1]["content"] = joined(changed[-1]["content"], content, "\n")
                continue
        changed.append(plain)
    if tools:
        described = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        text = _BEFORE_TOOLS + described + _AFTER_TOOLS
        if changed and changed[0]["role"] in ("system", "developer"):
            content = joined(changed[0].get("content"), text, "\n\n")
            changed[0]["content"] = content.lstrip() if isinstance(content, str) else content
        else:
            changed.insert(0, {"role": "system", "content": text})
    return changed


def _ends_with_result(content: Any) -> bool:
    last = content[-1] if isinstance(content, list) and content else content
    return isinstance(last, str) and last.endswith("</tool_response>")


def _call_as_text(call: Mapping[str, Any]) -> str:
    function = call.get("function") or {}
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    name = json.dumps(function.get("name"), ensure_ascii=False)
    return f'{BEGIN}\n{{"name": {name}, "arguments": {arguments or "{}"}}}\n{END}'
