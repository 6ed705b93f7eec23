"""Rewrites of a conversation, for chat templates that refuse its original form."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from mlx_paged.content import MediaSource, joined, plain
from mlx_paged.engine.chat.tools_as_text import Messages, as_text
from mlx_paged.parsing.call_ids import ID_FORMS, new_call_id

ROLES = ("system", "developer", "user", "assistant", "tool")
_INSTRUCTIONS = ("system", "developer")
_REASONING = ("reasoning", "reasoning_content", "thinking")


# Spellings are equivalent; each template is tested once for the one it accepts.


@dataclass(frozen=True)
class Spelling:
    """A template's choice among equivalent spellings.

    Attributes:
        objects: True if arguments of calls are objects, False if they are JSON text.
        empty: Content of a message with calls and no text: no key, an empty text or None.
        ids: Format of call ids: a key of `ID_FORMS`.
        between: Separator between reasoning and text if the template accepts only one of them; with
            channels, the text stays visible to the user.
    """

    objects: bool = True
    empty: Literal["absent", "text", "null"] = "absent"
    ids: str = "usual"
    between: str = "\n\n"

    def new_id(self, name: str, index: int) -> str:
        """Returns an id for a call without one.

        Args:
            name: Name of the tool.
            index: Number of calls in the conversation before it.
        """
        return new_call_id(name, index, self.ids)


def spelled(messages: Messages, spelling: Spelling) -> Messages:
    """Returns a conversation in a template's spelling; texts in lists become parts."""
    return [_spelled(message, spelling) for message in messages]


def _spelled(message: dict[str, Any], spelling: Spelling) -> dict[str, Any]:
    found = dict(message)
    if isinstance(content := found.get("content"), list):
        found["content"] = [
            {"type": "text", "text": part} if isinstance(part, str) else part for part in content
        ]
    if not (calls := found.get("tool_calls")):
        return found
    if not content:
        found.pop("content", None)
        if spelling.empty != "absent":
            found["content"] = "" if spelling.empty == "text" else None
    found["tool_calls"] = [
        {**call, "function": {**call["function"], "arguments": _arguments(call, spelling.objects)}}
        for call in calls
    ]
    return found


def _arguments(call: Mapping[str, Any], objects: bool) -> Any:
    arguments = call["function"].get("arguments")
    if objects and isinstance(arguments, str):
        with suppress(ValueError, RecursionError):  # arguments of a truncated call
            return json.loads(arguments or "{}", strict=False)
    elif not objects and not isinstance(arguments, str):
        return json.dumps(arguments, ensure_ascii=False)
    return arguments


# The normal form, which conversations of all APIs get first.


def normal(messages: Sequence[Mapping[str, Any]]) -> Messages:
    """Returns a conversation with every field that templates read, and without nulls.

    Reasoning has every name that templates use. Results have the id and the name of their call and
    follow the order of the calls, because some templates show neither id nor name.
    """
    found = _paired([_with_reasoning(message) for message in messages])
    return [m for group in _groups(found) for m in _in_order(group)]


def _with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    found = {key: value for key, value in message.items() if value is not None}
    reasoning = next((found[key] for key in _REASONING if found.get(key)), None)
    for key in _REASONING:
        found.pop(key, None)
    if reasoning and found["role"] == "assistant":
        found |= dict.fromkeys(_REASONING, reasoning)
    if calls := found.pop("tool_calls", None):
        found["tool_calls"] = [{**call, "function": {**call["function"]}} for call in calls]
    else:
        found.setdefault("content", "")
    return found


def _paired(messages: Messages) -> Messages:
    """Adds missing ids and names of calls to their results."""
    names: dict[str, str] = {}
    waiting: list[str] = []  # ids of calls without a result
    for message in messages:
        if calls := message.get("tool_calls"):
            waiting = [call["id"] for call in calls if call.get("id")]
            names |= {c["id"]: c["function"]["name"] for c in calls if c.get("id")}
        elif message["role"] == "tool":
            same = [id for id in waiting if names[id] == message.get("name")] or waiting
            if message.get("tool_call_id") is None and same:
                message["tool_call_id"] = same[0]
            id = message.get("tool_call_id")
            if id in waiting:
                waiting.remove(id)
            if id in names:
                message.setdefault("name", names[id])
    return messages


def _groups(messages: Messages) -> Iterator[Messages]:
    """Each message with the results that follow it."""
    group: Messages = []
    for message in messages:
        if message["role"] == "tool" and group:
            group.append(message)
            continue
        if group:
            yield group
        group = [message]
    if group:
        yield group


def _in_order(group: Messages) -> Messages:
    order = {call.get("id"): i for i, call in enumerate(group[0].get("tool_calls", ()))}
    if not order:
        return group
    last = len(order)
    return [group[0], *sorted(group[1:], key=lambda m: order.get(m.get("tool_call_id"), last))]


# The rewrites.


@dataclass(frozen=True)
class Rewrite:
    """One way to rewrite a conversation.

    Attributes:
        cost: Distance of the result from the original meaning.
        lossy: What is lost, for the log; "" if nothing is.
        contents: "lists" converts all contents to lists, a role joins that role's lists, "" changes
            no content.
    """

    apply: Callable[[Messages], Messages]
    cost: int
    lossy: str = ""
    contents: str = ""


def rewrites(spelling: Spelling) -> list[Rewrite]:
    """Returns all rewrites, in the order in which chosen ones are applied."""
    return [
        Rewrite(lambda messages: with_ids(messages, spelling.ids), 1),
        Rewrite(_developers_as_system, 1),
        Rewrite(_one_system_message_first, 2),
        Rewrite(_later_system_as_user, 8, "later system messages are the user's"),
        Rewrite(_system_as_user, 12, "system messages are the user's"),
        Rewrite(_without_reasoning, 15, "reasoning is left out"),
        Rewrite(
            lambda messages: _text_into_reasoning(messages, spelling.between),
            4,
            "" if spelling.between.strip() else "text beside reasoning and calls is reasoning",
        ),
        Rewrite(_text_before_calls, 5, "text beside calls is a message of its own"),
        Rewrite(
            _arguments_as_objects, 8, "arguments that are not an object are put into one as text"
        ),
        Rewrite(_one_call_each, 2),
        Rewrite(lambda messages: as_text(messages, ()), 60, "calls and their results are texts"),
        Rewrite(_with_every_result, 9, "calls without a result have an empty one"),
        Rewrite(_text_into_result, 10, "text after tool results is appended to the last one"),
        Rewrite(_neighbors_joined, 4),
        Rewrite(_user_first, 9, "an empty message of the user is put first"),
        Rewrite(_as_lists, 1, contents="lists"),
        *(Rewrite(_lists_joined(role), 1, contents=role) for role in ROLES),
    ]


def with_ids(messages: Messages, form: str) -> Messages:
    """Converts the ids of calls to a template's format. Equal ids stay equal."""
    make, known, count = ID_FORMS[form], dict[str, str](), 0
    found = []
    for message in messages:
        if calls := message.get("tool_calls"):
            changed = []
            for call in calls:
                id, name = call.get("id") or f"call_{count}", call["function"]["name"]
                known[id] = make(id, name, count)
                count += 1
                changed.append({**call, "id": known[id]})
            message = {**message, "tool_calls": changed}
        elif (id := message.get("tool_call_id")) is not None:
            new = known.get(id) or make(id, message.get("name", ""), count)
            message = {**message, "tool_call_id": new}
        found.append(message)
    return found


def _developers_as_system(messages: Messages) -> Messages:
    return [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]


def _num_leading(messages: Messages) -> int:
    """Returns the number of leading instructions."""
    others = (i for i, message in enumerate(messages) if message["role"] not in _INSTRUCTIONS)
    return next(others, len(messages))


def _one_system_message_first(messages: Messages) -> Messages:
    count = _num_leading(messages)
    return [*_neighbors_joined(messages[:count]), *messages[count:]]


def _later_system_as_user(messages: Messages) -> Messages:
    count = _num_leading(messages)
    return [*messages[:count], *_system_as_user(messages[count:])]


def _system_as_user(messages: Messages) -> Messages:
    return [{**m, "role": "user"} if m["role"] == "system" else m for m in messages]


def _without_reasoning(messages: Messages) -> Messages:
    return [{k: v for k, v in m.items() if k not in _REASONING} for m in messages]


def _text_into_reasoning(messages: Messages, between: str) -> Messages:
    found = []
    for message in messages:
        content, reasoning = message.get("content"), message.get("reasoning")
        if message.get("tool_calls") and content and reasoning:
            text = joined(
                reasoning, content if isinstance(content, str) else plain(content), between
            )
            message = {**message, **dict.fromkeys(_REASONING, text)}
            del message["content"]
        found.append(message)
    return found


def _text_before_calls(messages: Messages) -> Messages:
    found = []
    for message in messages:
        if message.get("tool_calls") and message.get("content"):
            rest = ("content", *_REASONING)
            found.append({k: v for k, v in message.items() if k != "tool_calls"})
            message = {k: v for k, v in message.items() if k not in rest}
        found.append(message)
    return found


def _arguments_as_objects(messages: Messages) -> Messages:
    found = []
    for message in messages:
        if calls := message.get("tool_calls"):
            message = {**message, "tool_calls": [_with_object(call) for call in calls]}
        found.append(message)
    return found


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    arguments = _arguments(call, objects=True)
    if isinstance(arguments, dict):
        return call
    return {**call, "function": {**call["function"], "arguments": {"arguments": arguments}}}


def _one_call_each(messages: Messages) -> Messages:
    """Moves each call to a message of its own, followed by its results."""
    found: Messages = []
    for first, *results in _groups(messages):
        calls = first.get("tool_calls", ())
        if len(calls) < 2:
            found += [first, *results]
            continue
        ids = [call.get("id") for call in calls]
        for i, call in enumerate(calls):
            said = first if i == 0 else {"role": first["role"]}
            found.append({**said, "tool_calls": [call]})
            found += [result for result in results if result.get("tool_call_id") == ids[i]]
        found += [result for result in results if result.get("tool_call_id") not in ids]
    return found


def _with_every_result(messages: Messages) -> Messages:
    """Adds a result to each call without one, except for calls that end the conversation."""
    found: Messages = []
    groups = list(_groups(messages))
    for i, group in enumerate(groups):
        found += group
        if i == len(groups) - 1:
            break
        answered = {message.get("tool_call_id") for message in group[1:]}
        for call in group[0].get("tool_calls", ()):
            if call.get("id") not in answered:
                name, id = call["function"]["name"], call.get("id")
                found.append({"role": "tool", "tool_call_id": id, "name": name, "content": ""})
    return found


def _text_into_result(messages: Messages) -> Messages:
    found: Messages = []
    for message in messages:
        if message["role"] == "user" and found and found[-1]["role"] == "tool":
            content = joined(found[-1].get("content"), message.get("content"), "\n\n")
            found[-1] = {**found[-1], "content": content}
        else:
            found.append(message)
    return found


def _neighbors_joined(messages: Messages) -> Messages:
    found: Messages = []
    for message in messages:
        last = found[-1] if found else None
        if last is None or not _can_join(last, message):
            found.append(message)
            continue
        both = {**last, **message}
        both["content"] = joined(last.get("content"), message.get("content"), "\n\n")
        reasoning = [m["reasoning"] for m in (last, message) if m.get("reasoning")]
        if reasoning:
            both |= dict.fromkeys(_REASONING, "\n\n".join(reasoning))
        if calls := [*last.get("tool_calls", ()), *message.get("tool_calls", ())]:
            both["tool_calls"] = calls
        found[-1] = both
    return found


def _can_join(first: dict[str, Any], second: dict[str, Any]) -> bool:
    if first["role"] != second["role"] or first["role"] == "tool":
        return False
    # Calls follow the text of their message, so text after them would move.
    return not (first.get("tool_calls") and second.get("content"))


def _user_first(messages: Messages) -> Messages:
    count = _num_leading(messages)
    if count < len(messages) and messages[count]["role"] == "user":
        return messages
    return [*messages[:count], {"role": "user", "content": ""}, *messages[count:]]


def _as_lists(messages: Messages) -> Messages:
    return [
        {**m, "content": [m["content"]]} if isinstance(m.get("content"), str) else m
        for m in messages
    ]


def _lists_joined(role: str) -> Callable[[Messages], Messages]:
    def join(messages: Messages) -> Messages:
        return [
            {**m, "content": plain(m["content"])}
            if m["role"] == role and _is_list_of_texts(m.get("content"))
            else m
            for m in messages
        ]

    return join


def _is_list_of_texts(content: Any) -> bool:
    return isinstance(content, list) and not any(isinstance(p, MediaSource) for p in content)


# Tools.


def forms_of_tools(tools: Sequence[Mapping[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yields tools unchanged, then with more and more of the fields that templates read without
    checking that they exist."""
    yield [dict(tool) for tool in tools]
    yield [_filled(tool, _with_keys) for tool in tools]
    yield [_filled(tool, _with_properties) for tool in tools]


def _filled(
    tool: Mapping[str, Any], fill: Callable[[Mapping[str, Any]], dict[str, Any]]
) -> dict[str, Any]:
    function = dict(tool["function"])
    function.setdefault("description", "")
    function["parameters"] = fill(function.get("parameters") or {})
    return {**tool, "function": function}


def _with_keys(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {}, "required": [], **schema}


def _with_properties(schema: Mapping[str, Any]) -> dict[str, Any]:
    filled = _with_keys(schema)
    filled["properties"] = {
        name: {"type": _type_of(inner), "description": "", **inner}
        if isinstance(inner, Mapping)
        else {"type": "string", "description": ""}
        for name, inner in filled["properties"].items()
    }
    return filled


def _type_of(schema: Mapping[str, Any]) -> str:
    """Returns the type of a schema without one, from its first alternative or first value."""
    for key in ("anyOf", "oneOf", "allOf"):
        for inner in schema.get(key) or ():
            if isinstance(inner, Mapping) and isinstance(inner.get("type"), str):
                return str(inner["type"])
    if "properties" in schema:
        return "object"
    return "array" if "items" in schema else "string"
