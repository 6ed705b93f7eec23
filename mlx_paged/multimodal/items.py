"""Media items: the sources in prompts, the decoded data, and their identity."""

from __future__ import annotations

import hashlib
import threading
import time
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mlx_paged.content import Kind

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, eq=False)
class VideoFrames:
    """Frames of a clip, as `MediaModel.process` takes them.

    Attributes:
        frames: ``[num_frames, height, width, 3]`` uint8, RGB.
        fps: Frames of these a second of the clip.
    """

    frames: np.ndarray
    fps: float = 1.0


@dataclass(frozen=True, eq=False)
class AudioClip:
    """A sound, as `MediaModel.process` takes it.

    Attributes:
        samples: ``[num_samples]`` float32, one channel, in [-1, 1].
        rate: Samples a second.
    """

    samples: np.ndarray
    rate: int


@dataclass(frozen=True, eq=False)
class MediaItem:
    """A decoded item of a prompt. Shared between prompts, so it must not change.

    Attributes:
        kind: "image", "video" or "audio".
        digest: sha256 of the source's bytes and the decoding options: equal digests, equal data.
        data: The decoded data. A picture is in RGB, with its EXIF rotation applied.
        part: Its path in the request, for errors: "messages[0].content[1].image_url".
    """

    kind: Kind
    digest: bytes
    data: Image | VideoFrames | AudioClip
    part: str

    @property
    def num_bytes(self) -> int:
        """Bytes of the decoded data."""
        return num_bytes(self.data)


def num_bytes(data: Any) -> int:
    """Bytes of an item's decoded data."""
    if isinstance(data, VideoFrames):
        return int(data.frames.nbytes)
    if isinstance(data, AudioClip):
        return int(data.samples.nbytes)
    return int(data.width * data.height * 3)


def digest_of(kind: Kind, content: bytes | memoryview, settings: str) -> bytes:
    """Returns the identity (sha256) of the data decoded from some bytes.

    Args:
        settings: Everything else that determines the decoded data.
    """
    # The length comes first, so that no two pairs of text and bytes make the same sequence.
    prefix = f"{kind}|{settings}"
    hashed = hashlib.sha256(f"{len(prefix)}|{prefix}|".encode())
    hashed.update(content)
    return hashed.digest()


class Unusable(Exception):
    """An item is unusable. The message, such as "it is empty", follows the item's path."""


class OutOfTime(Unusable):
    """It took too long; another request may succeed."""


class Deadline:
    """A time limit for work on a request, and the flag that cancels the work.

    Args:
        seconds: Time limit, from `begin` or the first `check`.
        cancelled: Set when the request is cancelled.
        doing: For errors, such as "it was not fetched".
    """

    def __init__(self, seconds: float, cancelled: threading.Event, doing: str) -> None:
        self._seconds = seconds
        self._end: float | None = None
        self._cancelled = cancelled
        self._doing = doing

    def begin(self) -> None:
        """Starts the time, unless it has started."""
        if self._end is None:
            self._end = time.monotonic() + self._seconds

    def check(self) -> float:
        """Returns the remaining seconds, more than 0.

        Raises:
            OutOfTime: None remain.
            CancelledError: The request was cancelled.
        """
        if self._cancelled.is_set():
            raise CancelledError
        self.begin()
        assert self._end is not None
        left = self._end - time.monotonic()
        if left <= 0:
            raise OutOfTime(f"{self._doing} within {self._seconds:g} s")
        return left
