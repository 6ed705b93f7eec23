"""Contents of messages: texts, and the media between them, not loaded yet.

Code for text passes these on or refuses them; `mlx_paged.multimodal` loads them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mlx_paged.errors import InvalidMediaError

#: The media that prompts may have.
Kind = Literal["image", "video", "audio"]
KINDS: tuple[Kind, ...] = ("image", "video", "audio")
#: Plural nouns, for errors.
NOUNS: dict[Kind, str] = {"image": "images", "video": "videos", "audio": "sounds"}

#: Types of parts with media that APIs over HTTP take.
URL_PARTS: dict[str, Kind] = {
    "image_url": "image",
    "input_image": "image",
    "video_url": "video",
    "audio_url": "audio",
    "input_audio": "audio",
}
#: Types of parts with a URL, or with a Python object if a program gives them.
OBJECT_PARTS: dict[str, Kind] = {
    "image": "image",
    "image_pil": "image",
    "video": "video",
    "audio": "audio",
}


@dataclass(eq=False)
class MediaSource:
    """A part of a prompt that names an item.

    Attributes:
        kind: "image", "video" or "audio".
        given: A URL, bytes, a `pathlib.Path`, a Pillow image, an array, or anything else that
            `multimodal.loader` takes.
        part: Its path in the request, for errors.
        io: How to read it (`multimodal.options.IoOptions`); None uses the engine's options.
        detail: "low" reduces a picture (OpenAI's option).
        item: The item (`multimodal.items.MediaItem`), once it is loaded.
    """

    kind: Kind
    given: Any
    part: str
    io: Any | None = None
    detail: str | None = None
    item: Any | None = field(default=None, repr=False)


#: The content of a message with media.
Content = list["str | MediaSource"]


def is_media(part: Mapping[str, Any]) -> bool:
    """True if a part of an API's message names an item."""
    kind = part.get("type")
    return isinstance(kind, str) and (kind in URL_PARTS or kind in OBJECT_PARTS)


def sources_of(messages: Sequence[Mapping[str, Any]]) -> list[MediaSource]:
    """Returns the media of a conversation, in their order."""
    return [
        part
        for message in messages
        if isinstance(message.get("content"), list)
        for part in message["content"]
        if isinstance(part, MediaSource)
    ]


def check_kinds(
    sources: Sequence[MediaSource], kinds: Collection[Kind] | None, reason: str | None = None
) -> None:
    """Refuses media that a model does not take.

    Args:
        kinds: Kinds that it takes; None: it reads text only.
        reason: The reason why it reads text only.

    Raises:
        InvalidMediaError: It names the first part that is not taken.
    """
    for source in sources:
        noun = NOUNS[source.kind]
        if kinds is None:
            raise InvalidMediaError(
                source.part, f"this model takes no {noun}: {reason or 'it reads text only'}"
            )
        if source.kind not in kinds:
            takes = " and ".join(NOUNS[kind] for kind in KINDS if kind in kinds)
            raise InvalidMediaError(source.part, f"this model takes no {noun}, only {takes}")


def plain(content: Content) -> str | Content:
    """Joins a content without media to one text."""
    texts = [part for part in content if isinstance(part, str)]
    return "\n".join(texts) if len(texts) == len(content) else content


def joined(
    first: str | Content | None, second: str | Content | None, separator: str
) -> str | Content:
    """Two contents as one; texts that meet have a separator between them."""
    if not first or not second:
        return first or second or ""
    if isinstance(first, str) and isinstance(second, str):
        return first + separator + second
    left = [first] if isinstance(first, str) else list(first)
    right = [second] if isinstance(second, str) else list(second)
    if isinstance(left[-1], str) and isinstance(right[0], str):
        return [*left[:-1], left[-1] + separator + right[0], *right[1:]]
    return [*left, *right]


def concatenated(first: str | Content | None, second: str | Content | None) -> str | Content:
    """Joins two contents with all their parts. Plain texts stay a text."""
    parts: Content = []
    for content in (first, second):
        parts += [content] if isinstance(content, str) and content else content or []
    return parts[0] if len(parts) == 1 and isinstance(parts[0], str) else parts or ""


def num_characters(content: str | Content | None) -> int:
    """Characters of the texts of a content."""
    if content is None or isinstance(content, str):
        return len(content or "")
    return sum(len(part) for part in content if isinstance(part, str))
