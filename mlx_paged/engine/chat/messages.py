"""Validates messages that a Python program passes, for `LLM.chat` and the terminal chat."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mlx_paged.content import OBJECT_PARTS, URL_PARTS, Content, is_media
from mlx_paged.engine.chat.tools_as_text import Messages
from mlx_paged.engine.media import IoOptions, source_of
from mlx_paged.errors import InvalidParameterError

_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
_TEXTS = ("name", "tool_call_id", "reasoning", "reasoning_content", "thinking")


def messages_of(chat: Sequence[Mapping[str, Any]], field: str, io: IoOptions) -> Messages:
    """Returns the messages of a conversation in the form of `ChatRenderer.render`.

    Args:
        chat: OpenAI's messages; calls and results may have the legacy form of functions.
        field: Name of the conversation in errors.
        io: How to read media if their parts do not say.

    Raises:
        InvalidMediaError, InvalidParameterError: An invalid message, part or call.
    """
    return [_message(message, i, f"{field}[{i}]", io) for i, message in enumerate(chat)]


def _message(given: Mapping[str, Any], index: int, where: str, io: IoOptions) -> dict[str, Any]:
    found = dict(given)
    _require(isinstance(given.get("role"), str), f"{where}.role", "a text", given.get("role"))
    for name in _TEXTS:
        value = given.get(name)
        _require(value is None or isinstance(value, str), f"{where}.{name}", "a text", value)
    if "content" in given:
        found["content"] = _content_of(given["content"], f"{where}.content", io)
    if given["role"] == "function":  # the legacy form of a result
        found["role"] = "tool"
    calls = given.get("tool_calls")
    is_list = isinstance(calls, Sequence) and not isinstance(calls, str)
    _require(calls is None or is_list, f"{where}.tool_calls", "a list of calls", calls)
    made = [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls or ())]
    legacy = found.pop("function_call", None)
    if legacy is not None:
        made.append(_call({"function": legacy}, where, "function_call"))
    for i, call in enumerate(made):
        call["id"] = call.get("id") or f"call_{index}_{i}"
    if made:
        found["tool_calls"] = made
    return found


def _content_of(given: Any, where: str, io: IoOptions) -> str | Content | None:
    """Returns the content of an `LLM.chat` message: a text, or a list of texts and media.

    Args:
        given: A text, parts, or None.
        where: Path of the content, for errors.

    Raises:
        InvalidMediaError, InvalidParameterError: An invalid part.
    """
    if given is None or isinstance(given, str):
        return given
    if not isinstance(given, Sequence):
        raise InvalidParameterError(where, "a text or parts", given)
    found: Content = []
    for i, part in enumerate(given):
        at = f"{where}[{i}]"
        if isinstance(part, str):
            found.append(part)
        elif not isinstance(part, Mapping):
            raise InvalidParameterError(at, "a part with a type", part)
        elif is_media(part):
            found.append(source_of(part, at, io, objects=True))
        else:
            found.append(_text_of(part, at))
    return found or ""


def _text_of(part: Mapping[str, Any], where: str) -> str:
    kind = part.get("type", "text")
    text = part.get("refusal" if kind == "refusal" else "text")
    if kind not in _TEXT_PARTS or not isinstance(text, str):
        known = ("text", *URL_PARTS, *OBJECT_PARTS)
        raise InvalidParameterError(where, f"a part of type {', '.join(known)}", part)
    return text


def _call(given: Any, where: str, name: str = "function") -> dict[str, Any]:
    """Returns a call of an earlier answer, its arguments as JSON text."""
    _require(isinstance(given, Mapping), where, "a call with a function", given)
    id, function = given.get("id"), given.get("function")
    _require(id is None or isinstance(id, str), f"{where}.id", "a text", id)
    where = f"{where}.{name}"
    _require(isinstance(function, Mapping), where, "a mapping of name and arguments", function)
    _require(isinstance(function.get("name"), str), f"{where}.name", "a text", function.get("name"))
    arguments = function.get("arguments")
    if isinstance(arguments, Mapping):
        arguments = json.dumps(arguments, ensure_ascii=False)
    is_text = arguments is None or isinstance(arguments, str)
    _require(is_text, f"{where}.arguments", "JSON text or a mapping", arguments)
    made = {**given, "type": "function"}
    made["function"] = {**function, "arguments": arguments or "{}"}
    return made


def _require(ok: bool, field: str, expected: str, actual: object) -> None:
    if not ok:
        raise InvalidParameterError(field, expected, actual)
