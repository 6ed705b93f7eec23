"""Limits of media in prompts, checked once when the engine is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Real
from pathlib import Path
from typing import Any

from mlx_paged.content import KINDS, Kind
from mlx_paged.errors import InvalidParameterError

#: Options of `media_io_kwargs` for each kind.
_IO_FIELDS: dict[str, tuple[str, ...]] = {
    "image": ("rgba_background_color",),
    "video": ("num_frames", "fps"),
    "audio": (),
}


@dataclass(frozen=True)
class MediaLimits:
    """Limits of one item or one prompt. Larger ones are refused.

    Attributes:
        max_image_bytes: Bytes of a picture's file.
        max_image_pixels: Pixels of a picture or one video frame, as declared before decoding.
        max_image_side: Pixels of their longer side.
        max_image_aspect_ratio: Ratio of the longer side to the shorter one. If one side is tiny,
            resizing takes seconds and gigabytes for a file of a few bytes.
        max_video_bytes: Bytes of a clip's file.
        max_video_seconds: Duration of a clip.
        max_video_pixels: Pixels of all decoded frames of a clip.
        max_audio_bytes: Bytes of a sound's file.
        max_audio_seconds: Duration of a sound.
        max_prompt_bytes: Bytes of all decoded items of one prompt.
        fetch_timeout: Seconds to fetch the URLs of a prompt, including redirects.
        decode_timeout: Seconds to decode the items of a prompt.
        max_redirects: Redirects of one URL.
        cache_bytes: Bytes of decoded items kept for later prompts, evicted by least recent use.
    """

    max_image_bytes: int = 32 << 20
    max_image_pixels: int = 64 << 20
    max_image_side: int = 1 << 15
    max_image_aspect_ratio: int = 1 << 12
    max_video_bytes: int = 256 << 20
    max_video_seconds: float = 600.0
    max_video_pixels: int = 128 << 20
    max_audio_bytes: int = 64 << 20
    max_audio_seconds: float = 600.0
    max_prompt_bytes: int = 1 << 30
    fetch_timeout: float = 30.0
    decode_timeout: float = 60.0
    max_redirects: int = 5
    cache_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        for each in fields(self):
            name, value = each.name, getattr(self, each.name)
            if each.type == "float":
                if not _is_number(value) or not 0 < value < 1e6:
                    raise InvalidParameterError(
                        f"media_limits.{name}", "a number of seconds above 0", value
                    )
                continue
            minimum = 0 if name in ("max_redirects", "cache_bytes") else 1
            if type(value) is not int or value < minimum:
                expected = f"an integer of at least {minimum}"
                raise InvalidParameterError(f"media_limits.{name}", expected, value)

    @classmethod
    def of(cls, given: MediaLimits | Mapping[str, Any] | None) -> MediaLimits:
        """Returns the default limits, overridden by given values.

        Raises:
            InvalidParameterError: An unknown name, or an invalid value.
        """
        if isinstance(given, MediaLimits):
            return given
        given = _mapping("media_limits", given)
        names = [each.name for each in fields(cls)]
        for name in given:
            if name not in names:
                raise InvalidParameterError("media_limits", f"of {', '.join(names)}", name)
        return cls(**given)

    def problem_of_size(self, width: int, height: int) -> str | None:
        """Returns why a picture or frame of a size is rejected; None if it is allowed."""
        if width < 1 or height < 1:
            return f"it has no pixels ({width} x {height})"
        size = f"it has {width} x {height} pixels"
        longer, shorter = max(width, height), min(width, height)
        if width * height > self.max_image_pixels:
            return f"{size}, which is more than {self.max_image_pixels}"
        if longer > self.max_image_side:
            return f"{size}, and no side may have more than {self.max_image_side}"
        if longer > shorter * self.max_image_aspect_ratio:
            return f"{size}: one side is more than {self.max_image_aspect_ratio} times the other"
        return None

    def max_bytes(self, kind: Kind) -> int:
        """Size limit of an item's file."""
        return {
            "image": self.max_image_bytes,
            "video": self.max_video_bytes,
            "audio": self.max_audio_bytes,
        }[kind]


@dataclass(frozen=True)
class IoOptions:
    """How to read items (vLLM's `media_io_kwargs`).

    Attributes:
        rgba_background_color: Color behind transparent pixels; each component 0 to 255.
        num_frames: Maximum frames of a clip, evenly spaced; -1 means no limit.
        fps: Maximum frames per second of a clip; -1 means no limit.
    """

    rgba_background_color: tuple[int, int, int] = (255, 255, 255)
    num_frames: int = 32
    fps: float = -1

    def with_(self, given: Any, field: str = "media_io_kwargs") -> IoOptions:
        """Returns these options, overridden by those of a request or the command line.

        Args:
            given: vLLM's format: kinds, each with its options; None changes nothing.

        Raises:
            InvalidParameterError: An unknown kind or option, or an invalid value.
        """
        found: dict[str, Any] = {}
        for kind, options in _mapping(field, given).items():
            if kind not in KINDS:
                raise InvalidParameterError(field, f"of {', '.join(KINDS)}", kind)
            for name, value in _mapping(f"{field}.{kind}", options).items():
                if name not in _IO_FIELDS[kind]:
                    known = ", ".join(_IO_FIELDS[kind]) or "no options"
                    raise InvalidParameterError(f"{field}.{kind}", f"of {known}", name)
                found[name] = _CHECKS[name](f"{field}.{kind}.{name}", value)
        return replace(self, **found)

    def of_clips(
        self, given: Mapping[str, Any], names: Mapping[str, str], prefix: str = ""
    ) -> IoOptions:
        """Returns these options, overridden by a part's or a request's options for clips.

        Args:
            given: Fields of the part or the request.
            names: Names of these fields, with the option that each sets.
            prefix: Prefix of field names in errors.

        Raises:
            InvalidParameterError: An invalid value, or two that contradict each other.
        """
        found: dict[str, Any] = {}
        sources: dict[str, str] = {}  # the field that set each option
        for name, option in names.items():
            if given.get(name) is None:
                continue
            value = _CHECKS[option](f"{prefix}{name}", given[name])
            if found.setdefault(option, value) != value:
                expected = f"what {sources[option]} is, which means the same,"
                raise InvalidParameterError(f"{prefix}{name}", expected, value)
            sources[option] = name
        return replace(self, **found)


def _color(field: str, value: Any) -> tuple[int, int, int]:
    is_color = isinstance(value, Sequence) and len(value) == 3
    if not is_color or not all(type(part) is int and 0 <= part <= 255 for part in value):
        raise InvalidParameterError(field, "three integers from 0 to 255", value)
    return value[0], value[1], value[2]


def _num_frames(field: str, value: Any) -> int:
    if type(value) is not int or (value < 1 and value != -1):
        raise InvalidParameterError(field, "-1 or an integer of at least 1", value)
    return value


def _fps(field: str, value: Any) -> float:
    if not _is_number(value) or not (value == -1 or 0 < value <= 1000):
        raise InvalidParameterError(field, "-1 or a number above 0 and up to 1000", value)
    return float(value)


_CHECKS: dict[str, Any] = {
    "rgba_background_color": _color,
    "num_frames": _num_frames,
    "fps": _fps,
}


@dataclass(frozen=True)
class MediaOptions:
    """All media options of an engine.

    Attributes:
        limit_per_prompt: Maximum items of each kind in one prompt.
        local_path: Folder whose files prompts may name by URL; None allows no files.
        domains: Hosts to fetch items from, whatever their addresses; None: any host with a public
            address.
        limits: Limits of items.
        io: How to read items.
        processor_kwargs: Options for the model's processor.
    """

    limit_per_prompt: Mapping[str, int] = field(default_factory=dict)
    local_path: Path | None = None
    domains: tuple[str, ...] | None = None
    limits: MediaLimits = field(default_factory=MediaLimits)
    io: IoOptions = field(default_factory=IoOptions)
    processor_kwargs: Mapping[str, Any] = field(default_factory=dict)

    #: vLLM's default.
    DEFAULT_LIMIT = 999

    @classmethod
    def of(
        cls,
        *,
        limit_mm_per_prompt: Any = None,
        allowed_local_media_path: Any = None,
        allowed_media_domains: Any = None,
        media_io_kwargs: Any = None,
        mm_processor_kwargs: Any = None,
        media_limits: Any = None,
    ) -> MediaOptions:
        """Returns the options from their names in `EngineConfig`.

        Raises:
            InvalidParameterError: An invalid option.
        """
        return cls(
            _counts(limit_mm_per_prompt),
            _folder(allowed_local_media_path),
            _domains(allowed_media_domains),
            MediaLimits.of(media_limits),
            IoOptions().with_(media_io_kwargs),
            dict(_mapping("mm_processor_kwargs", mm_processor_kwargs)),
        )

    def max_items(self, kind: Kind) -> int:
        """Returns the maximum items of a kind in a prompt."""
        return self.limit_per_prompt.get(kind, self.DEFAULT_LIMIT)


def _counts(given: Any) -> dict[str, int]:
    found: dict[str, int] = {}
    for kind, count in _mapping("limit_mm_per_prompt", given).items():
        if kind not in KINDS:
            raise InvalidParameterError("limit_mm_per_prompt", f"of {', '.join(KINDS)}", kind)
        if isinstance(count, Mapping) and set(count) == {"count"}:  # vLLM's longer form
            count = count["count"]
        if type(count) is not int or count < 0:
            raise InvalidParameterError(
                f"limit_mm_per_prompt.{kind}", "an integer of at least 0", count
            )
        found[kind] = count
    return found


def _folder(given: Any) -> Path | None:
    if given is None or given == "":
        return None
    if not isinstance(given, str | Path):
        raise InvalidParameterError("allowed_local_media_path", "None or a folder", given)
    try:
        path = Path(given).resolve(strict=True)
    except (OSError, ValueError) as error:
        expected = "None or an existing folder"
        raise InvalidParameterError("allowed_local_media_path", expected, str(given)) from error
    if not path.is_dir():
        raise InvalidParameterError("allowed_local_media_path", "None or a folder", str(given))
    return path


def _domains(given: Any) -> tuple[str, ...] | None:
    if given is None:
        return None
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise InvalidParameterError("allowed_media_domains", "None or a list of hosts", given)
    for host in given:
        if not isinstance(host, str) or not host or set(host) & set("/@ \\?#*"):
            raise InvalidParameterError(
                "allowed_media_domains", "hosts, such as 'example.com' or '127.0.0.1'", host
            )
    return tuple(host.lower().strip("[]").rstrip(".") for host in given) or None


def _mapping(field: str, given: Any) -> Mapping[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise InvalidParameterError(field, "None or a mapping", given)
    return given


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and value == value
