"""Converts Anthropic's request bodies to `Turn`."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from mlx_paged.content import Content, MediaSource, concatenated, joined
from mlx_paged.engine.grammar import StructuredOutputs
from mlx_paged.server.bodies import contradiction
from mlx_paged.server.conversation import Conversation
from mlx_paged.server.conversions import template_kwargs_of
from mlx_paged.server.errors import THREADS, bad_request, own_names, shorten
from mlx_paged.server.messages.bodies import REFUSED, Block, Blocks, CountBody, MessageBody
from mlx_paged.server.messages.tools import call_id, choice_of, tools_of
from mlx_paged.server.turn import Turn

# The first system block of Claude Code. It contains a checksum of the conversation, so prompts that
# kept it would share no prefix.
_BILLING_HEADER = "x-anthropic-billing-header:"
_BLOCKS: TypeAdapter[list[Block]] = TypeAdapter(list[Block])


def turn_of(body: CountBody) -> Turn:
    """Converts a body to a turn.

    Raises:
        ApiError: 400 for unsupported features, and for fields that contradict each other.
    """
    for name in REFUSED:
        if getattr(body, name, None) not in (None, []):
            code = THREADS if name == "thread" else "unsupported_parameter"
            raise bad_request(name, f"{name} is not supported by this server", code)
    tools = tools_of(body)
    messages = _messages(body)
    continues = messages[-1]["role"] == "assistant"
    if continues and messages[-1].get("tool_calls"):
        raise bad_request(
            "messages",
            "messages must not end with a tool_use: its tool_result must follow",
        )
    return Turn(
        Conversation(
            messages,
            tools=tools,
            add_generation_prompt=not continues,
            continue_final_message=continues,
            template_kwargs=_template_kwargs(body),
        ),
        tuple(tools),
        choice_of(body, tools),
        _structured_outputs(body),
        names=_names(body),
    )


def _template_kwargs(body: CountBody) -> dict[str, Any]:
    """Returns the chat template's variables for thinking and effort."""
    kwargs = template_kwargs_of(body.chat_template_kwargs)
    if body.thinking is not None:
        thinks = body.thinking.type != "disabled"
        kwargs = {"enable_thinking": thinks, **kwargs}
    if body.output_config is not None and body.output_config.effort is not None:
        kwargs = {"reasoning_effort": body.output_config.effort, **kwargs}
    return kwargs


def _format_field(body: CountBody) -> str:
    return "output_format" if body.output_format is not None else "output_config.format"


def _names(body: CountBody) -> dict[str, str]:
    """Maps fields of structured outputs to their names in a body, for errors."""
    field = _format_field(body)
    return {"structured_outputs": field, "structured_outputs.json": f"{field}.schema"}


def _structured_outputs(body: CountBody) -> StructuredOutputs | None:
    wanted = body.output_config.format if body.output_config is not None else None
    if body.output_format is not None:
        if wanted is not None and wanted != body.output_format:
            raise contradiction("output_format", "output_config.format")
        wanted = body.output_format
    if wanted is None:
        return None
    if wanted.schema_ is None:
        where = f"{_format_field(body)}.schema"
        raise bad_request(where, f"{where} is missing", "missing_field")
    # Anthropic's answers are always valid for the schema, so it must be enforceable.
    with own_names(_names(body)):
        return StructuredOutputs(json=wanted.schema_, strict=True)


# Messages.


def _messages(body: CountBody) -> list[dict[str, Any]]:
    """Converts messages to those of chats; joins neighbors with the same role."""
    messages: list[dict[str, Any]] = []
    if system := _system(body.system):
        messages.append({"role": "system", "content": system})
    for i, message in enumerate(body.messages):
        for plain in _plain(message, f"messages.{i}"):
            _add(messages, plain)
    if messages[-1] == {"role": "assistant", "content": ""}:
        messages.pop()  # There is nothing to continue.
    if all(message["role"] == "system" for message in messages):
        raise bad_request("messages", "messages must have at least one user message")
    return messages


def _system(given: str | Blocks | None) -> str | Content:
    """Returns the system prompt."""
    if given is None or isinstance(given, str):
        return given or ""
    texts = [_text(block, f"system.{i}") for i, block in enumerate(given)]
    return _content(text for text in texts if not text.startswith(_BILLING_HEADER))


def _content(texts: Iterable[str]) -> str | Content:
    """Joins texts to the content of a message."""
    return concatenated("", [text for text in texts if text])


def _add(messages: list[dict[str, Any]], message: dict[str, Any]) -> None:
    last = messages[-1] if messages else None
    if last is None or last["role"] != message["role"] or message["role"] == "tool":
        messages.append(message)
        return
    last["content"] = concatenated(last["content"], message["content"])
    if reasoning := message.get("reasoning"):
        last["reasoning"] = "\n".join(filter(None, (last.get("reasoning"), reasoning)))
    if calls := message.get("tool_calls"):
        last["tool_calls"] = [*last.get("tool_calls", ()), *calls]


def _plain(message: MessageBody, where: str) -> list[dict[str, Any]]:
    """Converts a message to those of chats, where each tool result is a message of its own."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    if message.role == "assistant":
        return [_answer(message.content, where)]
    found: list[dict[str, Any]] = []
    for i, block in enumerate(message.content):
        at = f"{where}.content.{i}"
        if block.type == "tool_result" and message.role == "user":
            found.append(_result(block, at))
        else:
            _add(found, {"role": message.role, "content": _content_of(block, at)})
    return found or [{"role": message.role, "content": ""}]


def _answer(blocks: Blocks, where: str) -> dict[str, Any]:
    """Converts a message of the assistant."""
    texts, reasoning, calls = [], [], []
    for i, block in enumerate(blocks):
        at = f"{where}.content.{i}"
        if block.type == "thinking":
            reasoning.append(block.thinking or "")
        elif block.type == "redacted_thinking":
            pass  # encrypted by another server
        elif block.type == "tool_use":
            calls.append(_call(block, at))
        else:
            texts.append(_text(block, at))
    plain: dict[str, Any] = {"role": "assistant", "content": _content(texts)}
    if any(reasoning):
        plain["reasoning"] = "\n".join(filter(None, reasoning))
    if calls:
        plain["tool_calls"] = calls
    return plain


def _call(block: Block, where: str) -> dict[str, Any]:
    for name in ("id", "name", "input"):
        if getattr(block, name) is None:
            raise bad_request(f"{where}.{name}", f"{where}.{name} is missing", "missing_field")
    assert block.id is not None
    arguments = json.dumps(block.input, ensure_ascii=False)
    return {
        "id": call_id(block.id), "type": "function",
        "function": {"name": block.name, "arguments": arguments},
    }  # fmt: skip


def _result(block: Block, where: str) -> dict[str, Any]:
    """Converts a tool result. Templates have no field for errors, so the text says it."""
    if block.tool_use_id is None:
        name = f"{where}.tool_use_id"
        raise bad_request(name, f"{name} is missing", "missing_field")
    content: str | Content = ""
    if isinstance(block.content, list):
        for i, part in enumerate(block.content):
            content = concatenated(content, _content_of(part, f"{where}.content.{i}"))
    else:
        content = block.content or ""
    if block.is_error:
        text = content if isinstance(content, str) else content[0]
        if not isinstance(text, str) or not text.lower().startswith("error"):
            content = joined("Error: ", content, "")
    return {"role": "tool", "tool_call_id": call_id(block.tool_use_id), "content": content}


def _content_of(block: Block, where: str) -> str | Content:
    """Converts a text, image or document block.

    Raises:
        ApiError, InvalidMediaError: 400 for other blocks and invalid images.
    """
    if block.type == "document":
        return _document(block, where)
    if block.type != "image":
        return _text(block, where)
    source = _source(block, where)
    where = f"{where}.source"
    kind = source.get("type")
    if kind == "base64":
        data, media_type = source.get("data"), source.get("media_type")
        if not isinstance(data, str) or not isinstance(media_type, str):
            raise bad_request(where, f"{where} must have media_type and data", "missing_field")
        return [MediaSource("image", f"data:{media_type};base64,{data}", where)]
    if kind == "url":
        if not isinstance(source.get("url"), str):
            raise bad_request(where, f"{where} must have a url", "missing_field")
        return [MediaSource("image", source["url"], where)]
    raise bad_request(
        f"{where}.type",
        f"{where}.type must be 'base64' or 'url' but got {shorten(repr(kind), 64)}",
        "unsupported_parameter",
    )


def _source(block: Block, where: str) -> dict[str, Any]:
    source = block.source
    if not isinstance(source, dict):
        where = f"{where}.source"
        raise bad_request(where, f"{where} must be an object", "missing_field")
    return source


def _document(block: Block, where: str) -> str | Content:
    """Returns a document between tags, as Anthropic's prompting guides recommend."""
    if (block.citations or {}).get("enabled"):
        at = f"{where}.citations"
        raise bad_request(
            at, f"{at} is not supported: answers have no citations", "unsupported_parameter"
        )
    found: str | Content = "<document>\n"
    for tag, text in (("title", block.title), ("context", block.context)):
        if text:
            found = joined(found, f"<{tag}>{text}</{tag}>\n", "")
    found = joined(found, "<document_content>\n", "")
    found = joined(found, _document_content(_source(block, where), f"{where}.source"), "")
    return joined(found, "\n</document_content>\n</document>", "")


def _document_content(source: Mapping[str, Any], where: str) -> str | Content:
    """Returns the content of a document.

    Raises:
        ApiError: 400 for an unsupported source. PDFs were converted to text before (documents.py).
    """
    kind, media_type = source.get("type"), source.get("media_type")
    if kind == "content":
        return _parts(source.get("content"), f"{where}.content")
    if kind in ("file", "url"):
        what = "there are no stored files" if kind == "file" else "documents are not fetched"
        raise bad_request(
            f"{where}.type",
            f"{where}.type {kind!r} is not supported: {what}; send its bytes in base64",
            "unsupported_parameter",
        )
    if kind not in ("text", "base64"):
        raise bad_request(
            f"{where}.type",
            f"{where}.type must be 'text', 'content' or 'base64' but got {shorten(repr(kind), 64)}",
            "unsupported_parameter",
        )
    if media_type != "text/plain":
        raise bad_request(
            f"{where}.media_type",
            f"{where}.media_type must be 'text/plain' but got {shorten(repr(media_type), 64)}: "
            "this server reads text, and PDFs in base64",
            "unsupported_parameter",
        )
    data = source.get("data")
    if not isinstance(data, str):
        raise bad_request(f"{where}.data", f"{where}.data must be a string", "missing_field")
    if kind == "text":
        return data
    try:
        return base64.b64decode(data, validate=True).decode()
    except ValueError:  # including UnicodeDecodeError and binascii.Error
        at = f"{where}.data"
        raise bad_request(at, f"{at} must be text in UTF-8, in base64") from None


def _parts(content: Any, where: str) -> str | Content:
    """Converts a document's content: a string, or text and image blocks."""
    if isinstance(content, str):
        return content
    try:
        blocks = _BLOCKS.validate_python(content)
    except ValidationError:
        raise bad_request(where, f"{where} must be a string or a list of blocks") from None
    found: str | Content = ""
    for i, block in enumerate(blocks):
        if block.type not in ("text", "image"):
            at = f"{where}.{i}.type"
            raise bad_request(
                at, f"{at} must be 'text' or 'image' but got {shorten(block.type, 64)!r}"
            )
        found = joined(found, _content_of(block, f"{where}.{i}"), "\n")
    return found


def _text(block: Block, where: str) -> str:
    """Returns the text of a block.

    Raises:
        ApiError: 400 for blocks that are not text, including those of Anthropic's server tools.
    """
    if block.type == "text":
        if block.text is None:
            raise bad_request(f"{where}.text", f"{where}.text is missing", "missing_field")
        return block.text
    if block.type == "search_result":
        parts = block.content if isinstance(block.content, list) else []
        texts = [_text(part, f"{where}.content.{i}") for i, part in enumerate(parts)]
        return "\n".join([f"{block.title or ''} ({block.source})", *texts])
    if block.type == "tool_reference":
        return f"The tool {block.tool_name} is available."
    raise bad_request(
        where,
        f"{where} must be a text block here (user messages and tool results may also have images "
        f"and documents) but got {shorten(block.type, 64)!r}",
        "unsupported_parameter",
    )
