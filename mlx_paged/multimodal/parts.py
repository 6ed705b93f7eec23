"""The parts of messages that name media, as OpenAI, vLLM and Hugging Face write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlx_paged.content import Kind
from mlx_paged.errors import InvalidMediaError, InvalidParameterError
from mlx_paged.multimodal.items import Content, MediaSource
from mlx_paged.multimodal.options import IoOptions

#: Parts that APIs over HTTP take.
URL_PARTS: dict[str, Kind] = {
    "image_url": "image",
    "input_image": "image",
    "video_url": "video",
    "audio_url": "audio",
    "input_audio": "audio",
}
#: Parts with a URL, or with a Python object if a program gives them.
OBJECT_PARTS: dict[str, Kind] = {
    "image": "image",
    "image_pil": "image",
    "video": "video",
    "audio": "audio",
}
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
_MAX_UUID = 512
# Fields of a clip, vLLM's and Qwen's, with the option that each sets.
_CLIP_FIELDS = {
    "fps": "fps",
    "num_frames": "num_frames",
    "max_frames": "num_frames",
    "nframes": "num_frames",
}
#: Qwen's other fields of a part, for scaling and cropping; all items are treated the same here.
_UNSUPPORTED = (
    "min_pixels", "max_pixels", "total_pixels", "resized_height", "resized_width", "min_frames",
    "video_start", "video_end", "sample_fps",
)  # fmt: skip
_DETAILS = (None, "auto", "low", "high", "original")
#: Format names that `input_audio` accepts; the bytes determine the actual format.
_AUDIO_FORMATS = ("wav", "mp3", "flac", "ogg", "opus", "m4a", "mp4", "aac", "webm", "aiff")


def is_media(part: Mapping[str, Any]) -> bool:
    """True if a part names an item."""
    kind = part.get("type")
    return isinstance(kind, str) and (kind in URL_PARTS or kind in OBJECT_PARTS)


def source_of(
    part: Mapping[str, Any], where: str, io: IoOptions | None = None, *, objects: bool = False
) -> MediaSource:
    """Returns the source that a part names.

    Args:
        part: A part for which `is_media` is true.
        where: Path of the part, for errors.
        io: How to read items if the part does not say; None uses the engine's options.
        objects: True accepts Python objects, which programs may give and requests may not.

    Raises:
        InvalidMediaError: A required field is missing or has another form.
        InvalidParameterError: An invalid option.
    """
    name: str = part["type"]
    _check_uuid(part, name, where)
    for unsupported in _UNSUPPORTED:
        if part.get(unsupported) is not None:
            raise InvalidMediaError(
                f"{where}.{unsupported}",
                "it is not supported: mm_processor_kwargs of the server set how items are scaled, "
                "and fps and num_frames which frames are taken",
            )
    if name in OBJECT_PARTS and objects:
        kind = OBJECT_PARTS[name]
        found = next((f for f in (name, "url", "path") if part.get(f) is not None), None)
        if found is None:
            raise InvalidMediaError(f"{where}.{name}", "it is missing")
        return MediaSource(kind, part[found], f"{where}.{found}", _io(kind, part, {}, where, io))
    kind = URL_PARTS.get(name) or OBJECT_PARTS[name]
    if name == "input_audio":
        return MediaSource(kind, _input_audio(part.get(name), f"{where}.{name}"), f"{where}.{name}")
    if part.get("file_id") is not None:
        raise InvalidMediaError(
            f"{where}.file_id", "files are not stored by this server: give the image's URL"
        )
    field = "image_url" if name == "input_image" else name
    if name in OBJECT_PARTS and part.get(name) is None and part.get("url") is not None:
        field = "url"
    path = f"{where}.{field}"
    given = part.get(field)
    if given is None:
        raise InvalidMediaError(path, "it is missing")
    inner = given if isinstance(given, Mapping) else {}
    url = inner.get("url") if isinstance(given, Mapping) else given
    if not isinstance(url, str):
        raise InvalidMediaError(path, "it must be a URL, or an object with one as url")
    detail = inner.get("detail", part.get("detail"))
    if detail not in _DETAILS:
        raise InvalidMediaError(path, "its detail must be 'auto', 'low', 'high' or 'original'")
    return MediaSource(kind, url, path, _io(kind, part, inner, where, io), detail)


def _check_uuid(part: Mapping[str, Any], name: str, where: str) -> None:
    """vLLM's name for an item that was sent before.

    It is not used for lookups: two clients may give one name to different items, and one of them
    would get an answer about the other's. An item is identified by its bytes.
    """
    uuid = part.get("uuid")
    if uuid is None:
        return
    if not isinstance(uuid, str) or len(uuid) > _MAX_UUID:
        raise InvalidMediaError(
            f"{where}.uuid", f"it must be a text of at most {_MAX_UUID} characters"
        )
    fields = (name, "url", "path") if name in OBJECT_PARTS else (name, "image_url", "file_id")
    if all(part.get(field) is None for field in fields):
        raise InvalidMediaError(
            f"{where}.uuid",
            f"items are not kept by their uuid: send the content ({name}) again, which is not "
            "computed again while it is in the caches",
        )


def _io(
    kind: Kind, part: Mapping[str, Any], inner: Mapping[str, Any], where: str, io: IoOptions | None
) -> IoOptions | None:
    """Returns the options of a clip, from the part or next to its URL."""
    if kind != "video" or io is None:
        return io
    return io.of_clips({**part, **inner}, _CLIP_FIELDS, f"{where}.")


def _input_audio(given: Any, where: str) -> str:
    """The sound of an `input_audio` part, as a URL."""
    data = given.get("data") if isinstance(given, Mapping) else None
    if not isinstance(data, str) or not isinstance(given, Mapping):
        raise InvalidMediaError(where, "it must have data, in base64, and format")
    name = given.get("format")
    if name not in _AUDIO_FORMATS:
        raise InvalidMediaError(where, f"its format must be one of {', '.join(_AUDIO_FORMATS)}")
    return data if data.startswith("data:") else f"data:audio/{name};base64,{data}"


def content_of(given: Any, where: str, io: IoOptions) -> str | Content | None:
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
            found.append(_text(part, at))
    return found or ""


def _text(part: Mapping[str, Any], where: str) -> str:
    kind = part.get("type", "text")
    text = part.get("refusal" if kind == "refusal" else "text")
    if kind not in _TEXT_PARTS or not isinstance(text, str):
        known = ("text", *URL_PARTS, *OBJECT_PARTS)
        raise InvalidParameterError(where, f"a part of type {', '.join(known)}", part)
    return text


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


def sources_of(messages: Sequence[Mapping[str, Any]]) -> list[MediaSource]:
    """The media of a conversation, in their order."""
    return [
        part
        for message in messages
        if isinstance(message.get("content"), list)
        for part in message["content"]
        if isinstance(part, MediaSource)
    ]
