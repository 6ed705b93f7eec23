"""Renders conversations with media by a chat template, in the form that the template accepts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from mlx_paged.content import Content, Kind, MediaSource, joined

Messages = Sequence[Mapping[str, Any]]

# Text that a text-only template writes for a list of parts.
_AS_PYTHON = "{'type': '"


def forms_of(messages: Messages, model: Any) -> Iterator[list[dict[str, Any]]]:
    """Yields a conversation in the forms that templates may accept, first those with media.

    Some templates need a list of parts in every message, some only in messages with media, and some
    accept only texts, which must contain the placeholders.
    """
    return (form for form, _ in _forms_and_notes(messages, model))


def _forms_and_notes(
    messages: Messages, model: Any
) -> Iterator[tuple[list[dict[str, Any]], tuple[str, ...]]]:
    """Yields the forms, each with its losses."""
    has_media = any(isinstance(message.get("content"), list) for message in messages)
    if has_media:
        yield [{**message, "content": _parts(message.get("content"))} for message in messages], ()
        yield (
            [
                {**message, "content": _parts(message["content"])}
                if isinstance(message.get("content"), list)
                else dict(message)
                for message in messages
            ],
            (),
        )
        yield _with_placeholders(messages, model), ()
        if any(m["role"] == "tool" and isinstance(m.get("content"), list) for m in messages):
            for form in forms_of(_after_tools(messages), model):
                yield form, ("media in tool results are moved to a user message",)
    else:
        yield [dict(message) for message in messages], ()
        yield [{**message, "content": _parts(message.get("content"))} for message in messages], ()


def _after_tools(messages: Messages) -> list[Mapping[str, Any]]:
    """Moves media from tool results to a user message after them: few templates accept media in
    tool results."""
    found: list[Mapping[str, Any]] = []
    media: Content = []
    for message in messages:
        content = message.get("content")
        if media and message["role"] != "tool":
            moved: Mapping[str, Any] = {"role": "user", "content": media}
            if message["role"] == "user":
                moved = {**message, "content": joined(media, content, "\n")}
            found.append(moved)
            media = []
            if message["role"] == "user":
                continue
        if message["role"] == "tool" and isinstance(content, list):
            media += [part for part in content if isinstance(part, MediaSource)]
            texts = [part for part in content if isinstance(part, str)]
            message = {**message, "content": "\n".join(texts)}
        found.append(message)
    if media:
        found.append({"role": "user", "content": media})
    return found


def _parts(content: str | Content | None) -> list[dict[str, Any]] | None:
    if content is None:
        return None
    return [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": part.kind}
        for part in ([content] if isinstance(content, str) else content)
    ]


def _with_placeholders(messages: Messages, model: Any) -> list[dict[str, Any]]:
    counts: dict[Kind, int] = {}
    found = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            texts = []
            for part in content:
                if isinstance(part, MediaSource):
                    counts[part.kind] = counts.get(part.kind, 0) + 1
                    texts.append(model.placeholder(part.kind, counts[part.kind]))
                else:
                    texts.append(part)
            content = "\n".join(texts)
        found.append({**message, "content": content})
    return found


def is_complete(text: str, messages: Messages, model: Any) -> bool:
    """True if a template's text contains the users' texts and a placeholder for each item.

    Templates silently ignore contents in unknown forms; few raise.
    """
    counts: dict[Kind, int] = {}
    texts: list[str] = []
    for message in messages:
        content = message.get("content") or ""
        for part in [content] if isinstance(content, str) else content:
            if isinstance(part, MediaSource):
                counts[part.kind] = counts.get(part.kind, 0) + 1
                continue
            texts.append(part)
            if message.get("role") == "user" and part.strip() not in text:
                return False
    if _AS_PYTHON in text and not any(_AS_PYTHON in each for each in texts):
        return False
    for kind, count in counts.items():
        placeholders = [model.placeholder(kind, i + 1) for i in range(count)]
        # Users' texts are `literal`, so they contain none.
        if any(text.count(each) < placeholders.count(each) for each in set(placeholders)):
            return False
    return True


def rendered(
    messages: Messages,
    model: Any,
    render: Callable[[Any], str],
    variants: Callable[[Messages], Iterable[tuple[Messages, Sequence[str]]]] | None = None,
    log_losses: Callable[[Sequence[str]], None] = lambda lost: None,
) -> str:
    """Returns the text of a conversation in the first form that a template renders correctly.

    Args:
        messages: Users' texts in them are `literal`.
        render: The template; it raises if it does not accept a form.
        variants: The conversation with other spellings of everything but media, each with its
            losses.
        log_losses: Called with the losses of the returned text.

    Raises:
        Exception: The error of the first form, if the template accepts none.
    """
    first: tuple[str, Sequence[str]] | None = None
    refusal: Exception | None = None
    for variant, lost in variants(messages) if variants is not None else [(messages, ())]:
        for form, moved in _forms_and_notes(variant, model):
            try:
                text = render(form)
            except Exception as error:  # Templates may raise anything.
                refusal = refusal or error
                continue
            if is_complete(text, messages, model):
                log_losses([*lost, *moved])
                return text
            first = first or (text, [*lost, *moved, "texts or media of the user are left out"])
    if first is None:
        assert refusal is not None
        raise refusal
    log_losses(first[1])
    return first[0]  # `prompt.prepare` counts the placeholders.
