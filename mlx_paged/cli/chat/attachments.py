"""Files attached to a message: images, videos and sounds, as content parts of OpenAI's API.

The content of a message with files is a list of parts: one per file, with the `name` of the file,
and one for the text. Parts contain the bytes of their files, so a saved chat is complete.
"""

from __future__ import annotations

import base64
import mimetypes
import re
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from mlx_paged.content import KINDS, Kind
from mlx_paged.errors import MlxPagedError

#: The content of a message: text, or parts.
Content = str | list[dict[str, Any]]

NOUNS: dict[Kind, tuple[str, str]] = {
    "image": ("image", "images"),
    "video": ("video", "videos"),
    "audio": ("sound", "sounds"),
}
# Formats of `input_audio`, by file extension.
_AUDIO_FORMATS = {
    **dict.fromkeys(("wav", "wave"), "wav"),
    **dict.fromkeys(("ogg", "oga"), "ogg"),
    **dict.fromkeys(("aif", "aiff"), "aiff"),
    **{name: name for name in ("mp3", "flac", "opus", "m4a", "aac", "webm")},
}
_URL_PARTS: dict[str, Kind] = {"image_url": "image", "video_url": "video", "audio_url": "audio"}
# Paths of parts in errors: those of this process, and those of servers.
_PART_PATH = re.compile(
    r"messages(?:\[(\d+)\]|\.(\d+))\.content(?:\[(\d+)\]|\.(\d+))(?:\.\w+)*(?=: )", re.ASCII
)


def paths_of(entered: str) -> list[Path]:
    """Returns the files that a command names: one path, or several as in a shell.

    A single path may contain spaces without quotes.

    Raises:
        MlxPagedError: A path is not a regular file.
    """
    whole = _path(entered.strip())
    if whole.is_file():
        return [whole]
    try:
        paths = [_path(text) for text in shlex.split(entered)]
    except ValueError:  # an unpaired quotation mark
        paths = [whole]
    for path in paths:
        if not path.exists():
            raise MlxPagedError(f"cannot read {path}: No such file or directory")
        if not path.is_file():  # A device may have no end.
            raise MlxPagedError(f"cannot read {path}: not a regular file")
    return paths


def _path(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError:  # an unknown user
        return Path(text)


def part_of(path: Path, kind: Kind) -> dict[str, Any]:
    """Returns the content part for a file.

    Raises:
        MlxPagedError: The file cannot be read.
    """
    try:
        data = base64.b64encode(path.read_bytes()).decode()
    except OSError as error:
        raise MlxPagedError(f"cannot read {path}: {error.strerror}") from error
    ending = path.suffix.lower().removeprefix(".")
    if kind == "audio" and ending in _AUDIO_FORMATS:
        sound = {"data": data, "format": _AUDIO_FORMATS[ending]}
        return {"type": "input_audio", "input_audio": sound, "name": path.name}
    guessed = mimetypes.guess_type(path.name)[0] or ""
    # Only a hint: the server inspects the bytes.
    declared = guessed if guessed.startswith(f"{kind}/") else "application/octet-stream"
    name = f"{kind}_url"
    return {"type": name, name: {"url": f"data:{declared};base64,{data}"}, "name": path.name}


def kind_of(part: dict[str, Any]) -> Kind:
    """Returns the kind of media in a part."""
    return "audio" if part["type"] == "input_audio" else _URL_PARTS[part["type"]]


def size_of(part: dict[str, Any]) -> int:
    """Returns the bytes of a part's file."""
    inner = part[part["type"]]
    data = inner["data"] if part["type"] == "input_audio" else inner["url"].partition(",")[2]
    return len(data) // 4 * 3 - data[-2:].count("=")


def with_files(files: Sequence[dict[str, Any]], text: str) -> Content:
    """Returns the content of a message: the files, then the text about them."""
    return [*files, {"type": "text", "text": text}] if files else text


def files_of(content: Content) -> list[dict[str, Any]]:
    """Returns the parts that are files."""
    return [] if isinstance(content, str) else [p for p in content if p["type"] != "text"]


def text_of(content: Content) -> str:
    """Returns the text of a content, followed by the names of its files."""
    if isinstance(content, str):
        return content
    names = ", ".join(part.get("name", kind_of(part)) for part in files_of(content))
    texts = [part["text"] for part in content if part["type"] == "text"]
    return "\n".join([*texts, f"({names})"] if names else texts)


def is_content(content: Any) -> bool:
    """Returns True if a saved chat may have this content. Only data: URLs are allowed."""
    return isinstance(content, str) or (
        isinstance(content, list) and bool(content) and all(map(_is_part, content))
    )


def _is_part(part: Any) -> bool:
    if not isinstance(part, dict) or not isinstance(part.get("name", ""), str):
        return False
    kind = part.get("type")
    if kind == "text":
        return part.keys() == {"type", "text"} and isinstance(part["text"], str)
    if kind not in (*_URL_PARTS, "input_audio") or not part.keys() <= {"type", kind, "name"}:
        return False
    inner = part.get(kind)
    if not isinstance(inner, dict) or not all(isinstance(value, str) for value in inner.values()):
        return False
    if kind == "input_audio":
        return inner.keys() == {"data", "format"} and not inner["data"].startswith("data:")
    return inner.keys() == {"url"} and inner["url"].startswith("data:")


def without_names(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message as the API expects it, without the names of files."""
    if not isinstance(message.get("content"), list):
        return message
    parts = [{k: v for k, v in part.items() if k != "name"} for part in message["content"]]
    return {**message, "content": parts}


def named(error: str, messages: Sequence[dict[str, Any]]) -> str:
    """Replaces paths of parts in an error by the names of their files."""

    def name(found: re.Match[str]) -> str:
        message, part = (int(number) for number in found.groups() if number is not None)
        try:
            return str(messages[message]["content"][part]["name"])
        except (LookupError, TypeError):
            return found[0]

    return _PART_PATH.sub(name, error)


def refusal(
    kind: Kind, taken: Collection[str], model: str, reason: str | None = None
) -> str | None:
    """Returns why a model does not accept a kind of media; None if it does.

    Args:
        taken: Kinds that the model accepts.
        reason: Why it accepts none, if that is known.
    """
    if kind in taken:
        return None
    nouns = " and ".join(NOUNS[k][1] for k in KINDS if k in taken)
    if nouns:
        return f"{model} takes no {NOUNS[kind][1]}, only {nouns}"
    return f"{model} takes no {NOUNS[kind][1]}: {reason or 'it reads text only'}"
