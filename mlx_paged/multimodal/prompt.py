"""From a conversation with media to a prompt of the engine: its text, its tokens, its spans."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlx_paged.content import KINDS, Kind
from mlx_paged.core.media import MediaSpan
from mlx_paged.errors import InvalidMediaError, InvalidParameterError, MlxPagedError
from mlx_paged.model.media import MediaInputs, MediaPrompt, Span
from mlx_paged.multimodal.items import Content, MediaItem, MediaSource
from mlx_paged.multimodal.parts import joined

logger = logging.getLogger(__name__)

Messages = Sequence[Mapping[str, Any]]

# Text that a text-only template writes for a list of parts.
_AS_PYTHON = "{'type': '"
_NOUNS = {"image": "images", "video": "videos", "audio": "sounds"}
# Larger arrays are inputs of the encoder, and follow from the rest of a key.
_MAX_GRID = 4096


@dataclass(frozen=True, eq=False)
class PreparedMedia:
    """The media of a prompt, ready for the engine.

    Attributes:
        prompt: Result of the model's processor: tokens, encoder inputs, positions.
        spans: Positions of the items, for the scheduler and the KV store.
        parts: Path of each span's item in the request, for errors.
    """

    prompt: MediaPrompt
    spans: tuple[MediaSpan, ...]
    parts: tuple[str, ...] = ()


def media_model_of(engine: Any) -> Any | None:
    """The media processor of an engine's model; None: it reads text only."""
    return getattr(engine, "media", None)


def check_kinds(
    sources: Sequence[MediaSource], model: Any | None, reason: str | None = None
) -> None:
    """Refuses media that a model does not take.

    Args:
        model: `LoadedModel.media`; None: it reads text only.
        reason: why it does.

    Raises:
        InvalidMediaError: it names the first part that is not taken.
    """
    for source in sources:
        if model is None:
            noun = _NOUNS[source.kind]
            raise InvalidMediaError(
                source.part, f"this model takes no {noun}: {reason or 'it reads text only'}"
            )
        if source.kind not in model.kinds:
            takes = " and ".join(_NOUNS[kind] for kind in KINDS if kind in model.kinds)
            noun = _NOUNS[source.kind]
            raise InvalidMediaError(source.part, f"this model takes no {noun}, only {takes}")


# The text.


def literal(value: Any, model: Any, sources: Sequence[MediaSource]) -> Any:
    """Returns the users' text, with marks inside anything that would read as an item's place.

    Args:
        value: messages, tools, or other variables of a template.
        model: `LoadedModel.media`.
        sources: the media of the conversation.
    """
    counts = {kind: sum(source.kind == kind for source in sources) for kind in KINDS}
    return model.literal(value, counts)


def chat_tokens(
    tokenizer: Any,
    text: str,
    model: Any | None,
    *,
    is_multimodal: bool,
    add_special_tokens: bool | None = None,
) -> list[int]:
    """Returns the tokens of a conversation without media.

    Transformers' processors put the start token before a prompt that lacks it, with or without
    media; its tokenizers add nothing to a template's text. A checkpoint with a processor follows
    the first rule even if it is served for text only.

    Args:
        text: The template's text; users' texts are `literal`.
        model: `LoadedModel.media`.
        is_multimodal: True if the checkpoint has a processor.
        add_special_tokens: The request's choice; None follows the rule.
    """
    if model is not None:
        found: list[int] = model.encode(text, add_special_tokens=add_special_tokens)
        return found
    adds = add_special_tokens
    if adds is None:
        start = getattr(tokenizer, "bos_token", None)
        adds = is_multimodal and not (start and text.startswith(start))
    return list(tokenizer.encode(text, add_special_tokens=adds))


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
                yield form, ("media in results of tools are the user's",)
    else:
        yield [dict(message) for message in messages], ()
        yield [{**message, "content": _parts(message.get("content"))} for message in messages], ()


def _after_tools(messages: Messages) -> list[Mapping[str, Any]]:
    """The media of tools' results as the user's, behind these: few templates know them there."""
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
    """Returns True if a template's text contains the users' texts and a place for each item.

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
        places = [model.placeholder(kind, i + 1) for i in range(count)]
        # Users' texts are `literal` and contain no place.
        if any(text.count(place) < places.count(place) for place in set(places)):
            return False
    return True


def rendered(
    messages: Messages,
    model: Any,
    render: Callable[[Any], str],
    variants: Callable[[Messages], Iterable[tuple[Messages, Sequence[str]]]] | None = None,
    tell: Callable[[Sequence[str]], None] = lambda lost: None,
) -> str:
    """Returns the text of a conversation in the first form that a template renders correctly.

    Args:
        messages: Users' texts in them are `literal`.
        render: The template; it raises if it does not accept a form.
        variants: The conversation with other spellings of everything but media, each with its
            losses.
        tell: Called with the losses of the text.

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
                tell([*lost, *moved])
                return text
            first = first or (text, [*lost, *moved, "texts or media of the user are left out"])
    if first is None:
        assert refusal is not None
        raise refusal
    tell(first[1])
    return first[0]  # The places of media are counted once it is tokenized.


# The tokens and the spans.


def prepare(
    model: Any,
    text: str,
    items: Sequence[MediaItem],
    where: str,
    *,
    add_special_tokens: bool | None = None,
) -> PreparedMedia:
    """Makes the prompt of a text with its items. It computes, so do not call it on an event loop.

    Args:
        model: `LoadedModel.media`.
        text: The chat template's text, with the model's placeholders.
        items: The items of each kind, in the order of its placeholders.
        where: Subject of an error that is about no single item.
        add_special_tokens: See `chat_tokens`.

    Raises:
        InvalidMediaError: The processor refuses them.
    """
    by_kind = {kind: [item for item in items if item.kind == kind] for kind in KINDS}
    try:
        prompt = _processed(model, text, items, add_special_tokens)
    except MlxPagedError:
        raise
    except Exception as error:
        part = _refused(model, items) or where
        if not isinstance(error, ValueError):  # Processors raise those on purpose.
            logger.warning("the processor failed on %s", part, exc_info=error)
        lines = f"{error}".strip().splitlines()
        reason = lines[0][:200] if lines else type(error).__name__
        message = f"the model's processor does not take it: {reason}"
        raise InvalidMediaError(part, message) from error
    _check_places(prompt, by_kind, where)
    settings = model.settings_digest
    used = {kind: iter(found) for kind, found in by_kind.items()}
    held = [[next(used[span.kind]) for _ in range(span.num_items)] for span in prompt.spans]
    spans = tuple(
        MediaSpan(
            span.offset,
            span.length,
            _key(found, settings, prompt, span, inputs),
            len(span.rows),
            bool(model.is_atomic(span.kind)),
        )
        for found, span, inputs in zip(held, prompt.spans, prompt.inputs)
    )
    parts = tuple(found[0].part for found in held)
    return PreparedMedia(prompt, spans, parts)


def _processed(
    model: Any, text: str, items: Sequence[MediaItem], special: bool | None = None
) -> MediaPrompt:
    prompt: MediaPrompt = model.process(
        text,
        images=[item.data for item in items if item.kind == "image"],
        videos=[item.data for item in items if item.kind == "video"],
        audios=[item.data for item in items if item.kind == "audio"],
        add_special_tokens=special,
    )
    return prompt


def _refused(model: Any, items: Sequence[MediaItem]) -> str | None:
    """Finds the item that a processor rejects, if it is one of them."""
    for item in items:
        try:
            _processed(model, model.placeholder(item.kind, 1), [item])
        except Exception:
            return item.part
    return None


def _check_places(
    prompt: MediaPrompt, by_kind: Mapping[Kind, Sequence[MediaItem]], where: str
) -> None:
    """Checks the number of placeholders: a program may write too many, a template too few."""
    for kind, items in by_kind.items():
        places = sum(span.num_items for span in prompt.spans if span.kind == kind)
        if places != len(items):
            raise InvalidMediaError(
                where,
                f"the prompt has places for {places} {_NOUNS[kind]} and there are {len(items)}",
            )


def _key(
    items: Sequence[MediaItem],
    settings: bytes,
    prompt: MediaPrompt,
    span: Span,
    inputs: MediaInputs,
) -> bytes:
    """Returns the identity of a span's content: source, processor settings, grid and tokens."""
    hashed = hashlib.sha256(b"mlx-paged media")
    tokens = np.asarray(prompt.token_ids[span.offset : span.offset + span.length], np.int64)
    rows = np.asarray(span.rows, np.int64) - span.offset
    parts = [*(item.digest for item in items), settings, tokens.tobytes(), rows.tobytes()]
    for name, array in sorted(inputs.arrays.items()):
        parts.append(f"{name} {getattr(array, 'shape', None)}".encode())
        if isinstance(array, np.ndarray) and array.size <= _MAX_GRID and array.dtype.kind in "iub":
            parts.append(np.ascontiguousarray(array).tobytes())
    for part in parts:
        hashed.update(len(part).to_bytes(8, "little"))
        hashed.update(part)
    return hashed.digest()


# Prompts of `LLM.generate`.

_PROMPT_FIELDS = ("prompt", "prompt_token_ids", "multi_modal_data")
_DATA_FIELDS: dict[str, Kind] = {kind: kind for kind in KINDS}


def data_sources(given: Any, field: str) -> list[MediaSource]:
    """The items of `multi_modal_data`: each kind with one item, or a list of them.

    Raises:
        InvalidParameterError: it is no such mapping.
    """
    if given is None:
        return []
    if not isinstance(given, Mapping):
        raise InvalidParameterError(field, "a mapping of image, video or audio", given)
    found = []
    for name, value in given.items():
        if name not in _DATA_FIELDS:
            raise InvalidParameterError(field, f"of {', '.join(_DATA_FIELDS)}", name)
        kind = _DATA_FIELDS[name]
        if value is None:
            continue
        items = value if isinstance(value, list) and not _is_one(kind, value) else [value]
        for i, item in enumerate(items):
            part = f"{field}.{name}[{i}]" if len(items) > 1 else f"{field}.{name}"
            found.append(MediaSource(kind, item, part))
    return found


def _is_one(kind: Kind, value: list[Any]) -> bool:
    """True if a list is one item: frames of a clip, or samples of a sound."""
    if kind == "video":  # pictures, or arrays of one picture each
        return bool(value) and all(
            hasattr(each, "convert") or getattr(each, "ndim", 0) in (2, 3) for each in value
        )
    return kind == "audio" and bool(value) and isinstance(value[0], int | float)


def split_prompt(given: Mapping[str, Any], field: str) -> tuple[Any, list[MediaSource]]:
    """vLLM's form of a prompt: its text or its token ids, and its media.

    Raises:
        InvalidParameterError: an entry that is none, both of them, or tokens with media.
    """
    for name in given:
        if name not in _PROMPT_FIELDS:
            raise InvalidParameterError(field, f"of {', '.join(_PROMPT_FIELDS)}", name)
    text, ids = given.get("prompt"), given.get("prompt_token_ids")
    if (text is None) == (ids is None):
        expected = "a mapping with either prompt or prompt_token_ids"
        raise InvalidParameterError(field, expected, sorted(given))
    sources = data_sources(given.get("multi_modal_data"), f"{field}.multi_modal_data")
    if sources and not isinstance(text, str):
        expected = "a text where there is multi_modal_data"
        raise InvalidParameterError(f"{field}.prompt", expected, text if ids is None else ids)
    return (text if ids is None else ids), sources
