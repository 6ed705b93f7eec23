"""Reads the parts of messages and prompts that name media, as OpenAI, vLLM and Hugging Face write
them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlx_paged.content import KINDS, OBJECT_PARTS, URL_PARTS, Kind, MediaSource
from mlx_paged.errors import InvalidMediaError, InvalidParameterError
from mlx_paged.multimodal.options import IoOptions

# Fields of `multi_modal_data`.
_DATA_FIELDS: dict[str, Kind] = {kind: kind for kind in KINDS}
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


def data_sources(given: Any, field: str) -> list[MediaSource]:
    """The items of `multi_modal_data`: each kind with one item, or a list of them.

    Raises:
        InvalidParameterError: It is no such mapping.
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
