"""Converts the input of a response to items, the stored form, and items to chat messages."""

from __future__ import annotations

import base64
import binascii
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from mlx_paged.content import Content, concatenated
from mlx_paged.engine.media import source_of
from mlx_paged.parsing.custom import arguments_of
from mlx_paged.server.errors import bad_request, shorten
from mlx_paged.server.responses_api.body import Input, InputItem, Parts, joined

#: An item, in the API's format.
Item = dict[str, Any]

Messages = Sequence[Mapping[str, Any]]

_INSTRUCTIONS = ("system", "developer")
_CALLS = ("function_call", "custom_tool_call")
# Types of outputs, with the prefixes of their ids.
_OUTPUTS = {"function_call_output": "fco", "custom_tool_call_output": "ctco"}
_ROLES = ("user", "assistant", "system", "developer")
# Prefix of the `encrypted_content` of this server's reasoning.
_OURS = "mlx-paged:"


def new_id(kind: str) -> str:
    """Returns a new, unguessable id."""
    return f"{kind}_{uuid.uuid4().hex}"


def items_of(given: Input | None) -> list[Item]:
    """Validates the items of `input`; returns them, each with an id.

    Raises:
        ApiError: 400 for an unknown type of item, or a missing field.
    """
    if given is None:
        return []
    if isinstance(given, str):
        return [_message("user", [{"type": "input_text", "text": given}])]
    return [_item(item, f"input[{i}]") for i, item in enumerate(given)]


def _message(role: str, content: list[Item], id: str | None = None) -> Item:
    item: Item = {
        "id": id or new_id("msg"), "type": "message", "role": role, "status": "completed",
        "content": content,
    }  # fmt: skip
    return item


def _item(given: InputItem, where: str) -> Item:
    kind = given.type
    if kind is None and given.role is not None:
        kind = "message"
    if kind == "message":
        role = _required(given, "role", where)
        if role not in _ROLES:
            raise bad_request(
                f"{where}.role", f"{where}.role must be one of {', '.join(_ROLES)} but got {role!r}"
            )
        content = _required(given, "content", where)
        return _message(role, _content(content, role, f"{where}.content"), given.id)
    if kind == "function_call":
        item: Item = {
            "id": given.id or new_id("fc"), "type": kind, "status": given.status or "completed",
            "call_id": _required(given, "call_id", where),
            "name": _required(given, "name", where),
            "arguments": _required(given, "arguments", where),
        }  # fmt: skip
        if given.namespace is not None:
            item["namespace"] = given.namespace
        return item
    if kind == "custom_tool_call":
        item = {
            "id": given.id or new_id("ctc"), "type": kind, "status": given.status or "completed",
            "call_id": _required(given, "call_id", where),
            "name": _required(given, "name", where),
            "input": _required(given, "input", where),
        }  # fmt: skip
        if given.namespace is not None:
            item["namespace"] = given.namespace
        return item
    if kind in _OUTPUTS:
        output = _required(given, "output", where)
        if not isinstance(output, str):
            output = _parts(output, "input_text", f"{where}.output")
        return {
            "id": given.id or new_id(_OUTPUTS[kind]), "type": kind,
            "status": given.status or "completed",
            "call_id": _required(given, "call_id", where), "output": output,
        }  # fmt: skip
    if kind == "reasoning":
        return _reasoning(given, where)
    if kind == "item_reference":
        return {"type": kind, "id": _required(given, "id", where)}
    if kind == "web_search_call":  # From another server, without its results.
        return {"id": given.id or new_id("ws"), "type": kind, "status": "completed"}
    raise bad_request(
        f"{where}.type",
        f"{where}.type must be 'message', 'function_call', 'function_call_output', "
        "'custom_tool_call', 'custom_tool_call_output', 'reasoning' or 'item_reference' but got "
        f"{kind!r}",
        "missing_field" if kind is None else "unsupported_parameter",
    )


def _required(given: InputItem, name: str, where: str) -> Any:
    value = getattr(given, name)
    if value is None:
        raise bad_request(f"{where}.{name}", f"{where}.{name} is missing", "missing_field")
    return value


def _content(content: str | Parts, role: str, where: str) -> list[Item]:
    kind = "output_text" if role == "assistant" else "input_text"
    if isinstance(content, str):
        return [_text_part(kind, content)]
    return _parts(content, kind, where)


def _parts(parts: Parts, kind: str, where: str) -> list[Item]:
    """Converts parts: texts get the type `kind`; images are allowed in the input."""
    found: list[Item] = []
    for i, part in enumerate(parts):
        if part.type == "input_image" and kind == "input_text":
            source_of(vars(part), f"{where}[{i}]")  # validates the part
            image: Item = {"type": "input_image", "image_url": part.image_url}
            found.append(image | {"detail": part.detail or "auto"})
            continue
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in ("input_text", "output_text", "text", "refusal") or text is None:
            there = f"{where}[{i}]"
            raise bad_request(
                there,
                f"{there} must be a part with text, or an input_image in the input, not "
                f"{shorten(part.type, 64)!r}",
                "unsupported_parameter",
            )
        found.append(_text_part(kind, text))
    return found


def _text_part(kind: str, text: str) -> Item:
    part: Item = {"type": kind, "text": text}
    if kind == "output_text":
        part |= {"annotations": [], "logprobs": []}
    return part


def _reasoning(given: InputItem, where: str) -> Item:
    content = given.content or []
    if isinstance(content, str):
        there = f"{where}.content"
        raise bad_request(there, f"{there} must be a list of parts but got a string")
    item: Item = {"id": given.id or new_id("rs"), "type": "reasoning", "summary": []}
    for name, kind, parts in (
        ("summary", "summary_text", given.summary or []),
        ("content", "reasoning_text", content),
    ):
        for i, part in enumerate(parts):
            if part.type not in (kind, "text") or part.text is None:
                there = f"{where}.{name}[{i}]"
                raise bad_request(there, f"{there} must be a {kind} part but got {part.type!r}")
        if parts:
            item[name] = [{"type": kind, "text": part.text} for part in parts]
    if given.encrypted_content is not None:
        item["encrypted_content"] = given.encrypted_content
    return item


def encrypted(text: str) -> str:
    """Returns reasoning as `encrypted_content`, for clients that keep nothing else.

    It is encoded, not encrypted: the client may see the text anyway.
    """
    return _OURS + base64.b64encode(text.encode()).decode()


def reasoning_text(item: Item) -> str:
    """Returns the text of a reasoning item; "" if another server encrypted it."""
    for name in ("content", "summary"):
        if item.get(name):
            return "\n".join(part["text"] for part in item[name])
    found = item.get("encrypted_content") or ""
    if not found.startswith(_OURS):
        return ""
    try:
        return base64.b64decode(found.removeprefix(_OURS), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""


def messages_of(items: Sequence[Item], num_before: int = 0) -> list[dict[str, Any]]:
    """Converts items to the messages of a chat.

    Reasoning, text and calls of one answer become one message.

    Args:
        num_before: Number of leading items that come from earlier responses.

    Raises:
        ApiError: 400 for the output of a call that is missing.
    """
    messages: list[dict[str, Any]] = []
    answer: dict[str, Any] | None = None  # message of the assistant that may continue
    names: dict[str, str] = {}  # names of functions, by call id
    for i, item in enumerate(items):
        kind = item["type"]
        where = f"input[{i - num_before}]" if i >= num_before else "previous_response_id"
        if kind == "message" and item["role"] != "assistant":
            content = _content_of(item["content"], f"{where}.content")
            messages.append({"role": item["role"], "content": content})
            answer = None
        elif kind in _OUTPUTS:
            call_id = item["call_id"]
            if call_id not in names:
                raise bad_request(
                    "input",
                    f"input has a {kind} without its {kind.removesuffix('_output')} before it: "
                    f"call_id {shorten(call_id, 64)!r}",
                )
            output = item["output"]
            content = output if isinstance(output, str) else _content_of(output, f"{where}.output")
            messages.append(
                {"role": "tool", "tool_call_id": call_id, "name": names[call_id],
                 "content": content}
            )  # fmt: skip
            answer = None
        elif kind in ("message", "reasoning", *_CALLS):
            if answer is None or _begins_another(kind, answer):
                answer = {"role": "assistant", "content": None}
                messages.append(answer)
            if kind == "message":
                answer["content"] = _content_of(item["content"], f"{where}.content")
            elif kind == "reasoning":
                if text := reasoning_text(item):
                    answer["reasoning"] = text
            else:
                name = names[item["call_id"]] = joined(item.get("namespace"), item["name"])
                is_custom = kind == "custom_tool_call"
                arguments = arguments_of(item["input"]) if is_custom else item["arguments"]
                call = {
                    "id": item["call_id"],
                    "type": "function",
                    "function": {"name": name, "arguments": arguments or "{}"},
                }
                answer.setdefault("tool_calls", []).append(call)
    # An answer with unreadable reasoning alone is empty.
    return [
        m for m in messages if m["role"] != "assistant" or len(m) > 2 or m["content"] is not None
    ]


def _begins_another(kind: str, answer: dict[str, Any]) -> bool:
    """Returns True if an item of the assistant belongs to its next answer, not to this one."""
    if kind in _CALLS:
        return False
    if kind == "message":
        return answer["content"] is not None or "tool_calls" in answer
    return answer["content"] is not None or "tool_calls" in answer or "reasoning" in answer


def _content_of(parts: Sequence[Item], where: str) -> str | Content:
    """Converts parts to the content of a message; adjacent texts are joined."""
    return concatenated(
        "",
        [
            source_of(part, f"{where}[{i}]") if part["type"] == "input_image" else part["text"]
            for i, part in enumerate(parts)
        ],
    )


def without_oldest(messages: Messages, count: int) -> list[Mapping[str, Any]]:
    """Returns a conversation without its oldest turns; instructions stay.

    A turn is a message together with the outputs of its calls.

    Args:
        count: Number of turns to drop; fewer than `num_turns`.
    """
    first = _turn_starts(messages)[count]
    return [m for i, m in enumerate(messages) if i >= first or m["role"] in _INSTRUCTIONS]


def num_turns(messages: Messages) -> int:
    """Returns the number of turns in a conversation."""
    return len(_turn_starts(messages))


def _turn_starts(messages: Messages) -> list[int]:
    """Returns the index of the first message of each turn."""
    return [i for i, m in enumerate(messages) if m["role"] not in (*_INSTRUCTIONS, "tool")]
