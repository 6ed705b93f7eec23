"""Media items: what a part of a prompt names, what it is once it is decoded, and its identity."""

from __future__ import annotations

import hashlib
import threading
import time
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from mlx_paged.engine.media.options import IoOptions
from mlx_paged.model.media_kinds import Kind

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
    """An item of a prompt, decoded. Prompts share it: nobody changes it.

    Attributes:
        kind: "image", "video" or "audio".
        digest: sha256 of the source's bytes and of how they were read: equal digests, equal data.
        data: A picture is in RGB, its EXIF rotation applied.
        part: Where the prompt has it, for errors: "messages[0].content[1].image_url".
    """

    kind: Kind
    digest: bytes
    data: Image | VideoFrames | AudioClip
    part: str

    @property
    def num_bytes(self) -> int:
        """Bytes of the decoded data."""
        return num_bytes(self.data)


@dataclass(eq=False)
class MediaSource:
    """A part of a prompt that names an item.

    Attributes:
        kind: "image", "video" or "audio".
        given: A URL, bytes, a `pathlib.Path`, a picture of Pillow, an array, or what else
            `loader.load` takes.
        part: Where the prompt has it, for errors.
        io: How it is read; None: as the engine's options say.
        detail: "low" makes a picture smaller (OpenAI's word).
        item: Once it is loaded.
    """

    kind: Kind
    given: Any
    part: str
    io: IoOptions | None = None
    detail: str | None = None
    item: MediaItem | None = field(default=None, repr=False)


#: What a message consists of, where it has more than text.
Content = list["str | MediaSource"]


def num_bytes(data: Any) -> int:
    """Bytes of an item's decoded data."""
    if isinstance(data, VideoFrames):
        return int(data.frames.nbytes)
    if isinstance(data, AudioClip):
        return int(data.samples.nbytes)
    return int(data.width * data.height * 3)


def digest_of(kind: Kind, content: bytes | memoryview, how: str) -> bytes:
    """The identity of what is decoded from some bytes.

    Args:
        how: everything else that decides what the data will be.
    """
    # (The length comes first: no two pairs of text and bytes are one sequence of bytes.)
    prefix = f"{kind}|{how}"
    hashed = hashlib.sha256(f"{len(prefix)}|{prefix}|".encode())
    hashed.update(content)
    return hashed.digest()


class Unusable(Exception):
    """Something cannot be an item; its text says why, as what follows "the picture: "."""


class OutOfTime(Unusable):
    """It took longer than it may; for somebody else it might not."""


class Work:
    """How long something may take, and whether anybody still waits for it.

    Args:
        seconds: how long, from when it begins.
        cancelled: set when nobody waits any more.
        doing: for the error: "it was not fetched".
    """

    def __init__(self, seconds: float, cancelled: threading.Event, doing: str) -> None:
        self._seconds = seconds
        self._end: float | None = None
        self._cancelled = cancelled
        self._doing = doing

    def begin(self) -> None:
        """Begins, unless it has begun."""
        if self._end is None:
            self._end = time.monotonic() + self._seconds

    def check(self) -> float:
        """Seconds that are left.

        Raises:
            OutOfTime: there are none.
            CancelledError: nobody waits.
        """
        if self._cancelled.is_set():
            raise CancelledError
        self.begin()
        assert self._end is not None
        left = self._end - time.monotonic()
        if left <= 0:
            raise OutOfTime(f"{self._doing} within {self._seconds:g} s")
        return left
