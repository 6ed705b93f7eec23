"""Conversations with tools in the forms that chat templates take."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.meta

from mlx_paged.engine.media.parts import joined
from mlx_paged.server.tools.definitions import Tool

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


@lru_cache(maxsize=8)
def knows_tools(chat_template: str) -> bool:
    """Whether a template does anything with tools."""
    try:
        parsed = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(chat_template)
    except jinja2.TemplateError:  # with tags of its own, such as those for generation masks
        return "tools" in chat_template
    return "tools" in jinja2.meta.find_undeclared_variables(parsed)


def forms_of(messages: Sequence[Mapping[str, Any]]) -> Iterator[Messages]:
    """A conversation in the forms that templates may take, the most faithful first.

    Templates differ in whether the arguments of a call are an object or its text, and in whether
    they take "developer", or a system message anywhere but at the beginning.
    """
    plain = [_with_reasoning(message) for message in messages]
    has_calls = any(message.get("tool_calls") for message in plain)
    for objects in (True, False) if has_calls else (True,):
        form = [_with_arguments(message, objects) for message in plain]
        yield form
        roles = [message["role"] for message in form]
        if "developer" in roles:
            form = [{**m, "role": "system"} if m["role"] == "developer" else m for m in form]
            yield form
        if "system" in [message["role"] for message in form[1:]]:
            yield _with_one_system_message(form)


def _with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose reasoning has every name that templates use for it."""
    plain = dict(message)
    reasoning = plain.pop("reasoning", None) or plain.get("reasoning_content")
    plain.pop("reasoning_content", None)
    if reasoning and plain["role"] == "assistant":
        plain |= {
            "reasoning_content": reasoning, "reasoning": reasoning, "thinking": reasoning,
        }  # fmt: skip
    return plain


def _with_arguments(message: dict[str, Any], objects: bool) -> dict[str, Any]:
    """A message whose calls have their arguments as an object, or as its text."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    changed = []
    for call in calls:
        function = dict(call.get("function") or {})
        arguments = function.get("arguments")
        if objects and isinstance(arguments, str):
            with suppress(ValueError):  # (of a call that was cut)
                function["arguments"] = json.loads(arguments or "{}", strict=False)
        elif not objects and not isinstance(arguments, str):
            function["arguments"] = json.dumps(arguments, ensure_ascii=False)
        changed.append({**call, "function": function})
    return {**message, "tool_calls": changed}


def _with_one_system_message(messages: Messages) -> Messages:
    """Later system messages as the user's, in their places; neighbours of one role joined."""
    changed: Messages = []
    for at, message in enumerate(messages):
        if at and message["role"] == "system":
            message = {**message, "role": "user"}
        last = changed[-1] if changed else None
        if last and last["role"] == message["role"] and message["role"] in ("user", "system"):
            content = joined(last.get("content"), message.get("content"), "\n\n")
            changed[-1] = {**last, "content": content}
        else:
            changed.append(message)
    return changed


def as_text(messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]) -> Messages:
    """A conversation for a template that knows no tools (``--tool-template``).

    Tools are described in the system message; calls and their results are texts, in Hermes's
    syntax.
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
        described = "\n".join(json.dumps(tool.for_template(), ensure_ascii=False) for tool in tools)
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
