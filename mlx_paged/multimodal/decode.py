"""Decodes pictures with Pillow, clips and sounds with PyAV. Files come from strangers.

The declared size is checked before memory is allocated, and the result is checked again.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn, cast

import numpy as np

from mlx_paged.content import Kind
from mlx_paged.multimodal.items import AudioClip, Deadline, Unusable, VideoFrames
from mlx_paged.multimodal.options import IoOptions, MediaLimits

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.frame import VideoFrame
    from PIL.Image import Image

# Formats for Pillow. Others, such as EPS, run programs, or are metafiles.
_IMAGE_FORMATS = (
    "PNG", "JPEG", "MPO", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "PPM", "ICO", "HEIF",
)  # fmt: skip
# Formats for FFmpeg. Others, such as playlists, name further files and addresses.
_CONTAINERS: dict[Kind, str] = {
    "video": "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpeg,mpegts,flv,ogg,gif,asf,ivf,m4v",
    "audio": "wav,mp3,flac,ogg,mov,mp4,m4a,3gp,3g2,mj2,aac,matroska,webm,aiff,w64,amr,caf,mpegts",
}
_ORIENTATION = 0x0112  # in EXIF
#: Pixels above which a picture may be decoded at a fraction of its size.
LARGE_PICTURE = 8 << 20
#: Formats that Pillow can decode at that fraction from the start.
REDUCED = ("JPEG", "MPO")
_LOW_DETAIL = 512  # maximum pixels of each side
_MAX_PACKETS = 1 << 20
_MAX_CHANNELS = 64
# Threads of FFmpeg for a clip: decoding takes turns with the model's own threads.
_DECODE_THREADS = 2


def decode(
    kind: Kind,
    content: bytes,
    limits: MediaLimits,
    io_options: IoOptions,
    rate: int,
    deadline: Deadline,
    picture_of: Callable[[bytes], Image],
) -> Image | VideoFrames | AudioClip:
    """Decodes an item from the bytes of its file.

    Args:
        rate: Samples per second of a decoded sound.
        deadline: The time limit.
        picture_of: Decodes a picture, like `image_of`.

    Raises:
        Unusable: It is of another kind, broken, or too large, or its decoder is not installed.
        CancelledError: The request was cancelled.
    """
    if not content:
        raise Unusable("it is empty")
    if kind == "image":
        return picture_of(content)
    if kind == "video":
        return video_of(content, limits, io_options, deadline)
    return audio_of(content, limits, rate, deadline)


# Pictures.


def image_of(
    content: bytes,
    limits: MediaLimits,
    options: IoOptions,
    *,
    is_low: bool = False,
    sufficient_side: Callable[[], int | None] | None = None,
) -> Image:
    """Decodes a picture to RGB in its intended orientation; of an animation, the first frame.

    Args:
        sufficient_side: Pixels of a side above which the processor reduces pictures. A large JPEG
            is decoded at 1/2, 1/4 or 1/8 of its size if at least twice as many pixels remain, which
            takes a fraction of the time and memory.

    Raises:
        Unusable: It is not a picture, is broken, or has too many pixels.
    """
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise missing("Pillow", "pictures") from None
    try:
        with Image.open(io.BytesIO(content), formats=image_formats()) as image:
            check_size(image.width, image.height, limits)
            if is_low:  # a JPEG is decoded at a fraction of its size
                image.draft(None, (_LOW_DETAIL, _LOW_DETAIL))
            elif sufficient_side is not None and _may_be_reduced(image):
                side = sufficient_side()
                if side is not None:
                    image.draft(None, (2 * side, 2 * side))
            image.load()
            found = rgb(upright(image), options)
            return low_detail(found) if is_low else found
    except Unusable:
        raise
    except UnidentifiedImageError:
        raise Unusable(f"not a readable image ({_looks_like(content)})") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise Unusable(f"it has more than {limits.max_image_pixels} pixels") from None
    except MemoryError:
        raise Unusable("there is not enough memory for it") from None
    except Exception as error:  # plugins raise whatever they meet: struct.error, SyntaxError, ...
        raise Unusable(f"its picture is broken: {_reason(error)}") from None


def _may_be_reduced(image: Image) -> bool:
    """True for pictures that Pillow can decode at a fraction of their size, and that take long."""
    return image.format in REDUCED and image.width * image.height >= LARGE_PICTURE


@lru_cache(maxsize=1)
def image_formats() -> tuple[str, ...]:
    """The allowed formats that this build of Pillow reads; HEIF with pillow-heif only."""
    from PIL import Image

    Image.init()
    with suppress(ImportError):
        from pillow_heif import register_heif_opener

        register_heif_opener()
    return tuple(name for name in _IMAGE_FORMATS if name in Image.OPEN)


def image_types() -> list[str]:
    """The media types of `image_formats`; none without Pillow."""
    try:
        from PIL import Image
    except ImportError:
        return []
    formats = image_formats()
    found = {Image.MIME[name] for name in formats if name in Image.MIME}
    return sorted(found | ({"image/heic", "image/heif"} if "HEIF" in formats else set()))


def rgb(image: Image, options: IoOptions) -> Image:
    """Converts a picture of any mode to RGB; transparent parts show the background.

    Raises:
        Unusable: The mode has no colors.
    """
    from PIL import Image

    mode = image.mode
    if mode == "RGB" and "transparency" not in image.info:
        return image.copy()
    if mode.startswith("I") or mode == "F":
        return _from_numbers(image)
    has_alpha = mode in ("LA", "La", "PA", "RGBA", "RGBa")
    if has_alpha or "transparency" in image.info:
        if mode in ("La", "RGBa"):  # premultiplied
            image = image.convert({"La": "LA", "RGBa": "RGBA"}[mode])
        image = image.convert("RGBA")
        background = Image.new("RGBA", image.size, (*options.rgba_background_color, 255))
        return Image.alpha_composite(background, image).convert("RGB")
    try:
        return image.convert("RGB")
    except ValueError:
        raise Unusable(f"its mode {mode!r} has no colors that can be shown") from None


def _from_numbers(image: Image) -> Image:
    """Gray levels of 16 or 32 bits, or real numbers, as 8 bits."""
    from PIL import Image

    levels: np.ndarray = np.asarray(image).astype(np.float32)
    if image.mode == "F":
        np.nan_to_num(levels, copy=False, nan=0.0, posinf=255.0, neginf=0.0)
        if levels.max() <= 1:
            levels *= 255
    elif image.mode != "I" or levels.max() > 255:
        levels /= 257
    np.clip(np.rint(levels, out=levels), 0, 255, out=levels)
    return Image.fromarray(levels.astype(np.uint8)).convert("RGB")


def upright(image: Image) -> Image:
    """A picture turned as its EXIF says."""
    from PIL import ImageOps

    try:
        if image.getexif().get(_ORIENTATION, 1) == 1:
            return image  # `exif_transpose` would copy it.
        return ImageOps.exif_transpose(image)
    except Exception:  # Broken EXIF data is ignored.
        return image


def low_detail(image: Image) -> Image:
    """Reduces a picture to at most 512 x 512 pixels, and keeps its proportions."""
    if max(image.size) <= _LOW_DETAIL:
        return image
    image = image.copy()
    image.thumbnail((_LOW_DETAIL, _LOW_DETAIL))
    return image


def reduced(image: Image, side: int | None) -> Image:
    """A large picture at 1/2, 1/4 or 1/8 of its size, as a JPEG of that size would be decoded.

    Args:
        side: See `image_of`; None: it keeps its size.
    """
    if side is None or image.width * image.height < LARGE_PICTURE:
        return image
    factor = min(image.size) // (2 * side)
    return image.reduce(max(f for f in (1, 2, 4, 8) if f <= max(1, factor)))


def check_size(width: int, height: int, limits: MediaLimits) -> None:
    """Refuses a picture without pixels, with too many, or with too long a side.

    Raises:
        Unusable: It gives the reason.
    """
    problem = limits.problem_of_size(width, height)
    if problem is not None:
        raise Unusable(problem)


# Clips.


def video_of(
    content: bytes, limits: MediaLimits, options: IoOptions, deadline: Deadline
) -> VideoFrames:
    """Decodes evenly spaced frames of a clip, by `num_frames` and `fps` of the options.

    Packets are counted first, because headers may be wrong about number and duration.

    Raises:
        Unusable: It is not a clip, is broken, or too large.
        CancelledError: The request was cancelled.
    """
    with _opened(content, "video") as container:
        stream = container.streams.video[0]
        if stream.codec_context is None:
            raise Unusable("its codec is not known")
        check_size(stream.codec_context.width, stream.codec_context.height, limits)
        times = sorted(_packet_times(container, stream, limits.max_video_seconds, deadline))
    if not times:
        raise Unusable("it has no frames")
    step = _median_step(times)
    duration = times[-1] - times[0] + step
    if duration > limits.max_video_seconds:
        raise _too_long(limits.max_video_seconds)
    indices = sampled_indices(len(times), duration, options)
    with _opened(content, "video") as container:
        stream = container.streams.video[0]
        stream.thread_type = "AUTO"
        stream.codec_context.thread_count = _DECODE_THREADS
        frames, found = _frames_at(container, stream, indices, limits, deadline)
    return VideoFrames(np.stack(frames), _rate(found, step))


def sampled_indices(num_frames: int, duration: float, options: IoOptions) -> list[int]:
    """Chooses the frames of a clip by vLLM's rule."""
    count = num_frames
    if options.num_frames > 0:
        count = min(count, options.num_frames)
    if options.fps > 0:
        count = min(count, math.floor(duration * options.fps))
    count = max(1, count)
    return [int(i) for i in np.linspace(0, num_frames - 1, count)]


def _packet_times(
    container: InputContainer, stream: Any, max_seconds: float, deadline: Deadline
) -> Iterator[float]:
    """Seconds of each packet of a stream."""
    base: Fraction = stream.time_base or Fraction(1, 1)
    rate = stream.average_rate or stream.guessed_rate or Fraction(25)
    first: float | None = None
    for count, packet in enumerate(container.demux(stream)):
        if count % 64 == 0:
            deadline.check()
        if count >= _MAX_PACKETS:
            raise Unusable(f"it has more than {_MAX_PACKETS} frames")
        if not packet.size:
            continue  # the end
        stamp = packet.pts if packet.pts is not None else packet.dts
        time = float(stamp * base) if stamp is not None else count / float(rate)
        first = time if first is None else first
        if abs(time - first) > max_seconds:
            raise _too_long(max_seconds)
        yield time


def _median_step(times: list[float]) -> float:
    steps = np.diff(times)
    steps = steps[steps > 0]
    return float(np.median(steps)) if steps.size else 0.0


def _rate(times: list[float], step: float) -> float:
    """Returns the frames per second of decoded frames; those of the clip if all times are equal."""
    if len(times) > 1 and times[-1] > times[0]:
        return (len(times) - 1) / (times[-1] - times[0])
    return 1 / step if step else 1.0


def _frames_at(
    container: InputContainer,
    stream: Any,
    indices: list[int],
    limits: MediaLimits,
    deadline: Deadline,
) -> tuple[list[np.ndarray], list[float]]:
    """Returns the frames at some indices in display order, and their times in seconds.

    A broken clip may have fewer frames than packets, so the last ones may be missing.

    Args:
        indices: Ascending, from 0 on.
    """
    frames: list[np.ndarray] = []
    times: list[float] = []
    num_pixels = 0
    for index, frame in enumerate(_decoded(container, stream)):
        deadline.check()
        if index < indices[len(frames)]:
            continue
        frames.append(_pixels(frame, limits, len(indices), num_pixels))
        num_pixels += frame.width * frame.height
        times.append(frame.time or 0.0)
        if len(frames) == len(indices):
            break
    if not frames:
        raise Unusable("none of its frames can be decoded")
    first = frames[0].shape
    if any(frame.shape != first for frame in frames):
        raise Unusable("its frames are not all of one size")
    return frames, times


def _decoded(container: InputContainer, stream: Any) -> Iterator[VideoFrame]:
    """Yields frames up to the first broken one, which is an error only if no frame came before."""
    import av

    count = 0
    try:
        for frame in container.decode(stream):
            yield frame
            count += 1
    except (av.error.FFmpegError, EOFError):
        if not count:
            raise


def _pixels(frame: VideoFrame, limits: MediaLimits, count: int, num_pixels: int) -> np.ndarray:
    """The pixels of a frame, upright."""
    check_size(frame.width, frame.height, limits)
    total = max(count * frame.width * frame.height, num_pixels + frame.width * frame.height)
    if total > limits.max_video_pixels:
        raise Unusable(
            f"{count} frames of {frame.width} x {frame.height} pixels are more than "
            f"{limits.max_video_pixels} pixels: ask for fewer with num_frames or fps"
        )
    pixels = frame.to_ndarray(format="rgb24")
    turns = round((getattr(frame, "rotation", 0) or 0) / 90) % 4
    return np.ascontiguousarray(np.rot90(pixels, turns)) if turns else pixels


# Sounds.


def audio_of(content: bytes, limits: MediaLimits, rate: int, deadline: Deadline) -> AudioClip:
    """Decodes a sound to one channel with the model's sampling rate.

    Raises:
        Unusable: It is not a sound, is broken, or too long.
        CancelledError: The request was cancelled.
    """
    try:
        import av
    except ImportError:
        raise missing("av", "clips and sounds") from None
    max_samples = int(limits.max_audio_seconds * rate)
    chunks: list[np.ndarray] = []
    size = 0
    with _opened(content, "audio") as container:
        stream = container.streams.audio[0]
        if stream.codec_context is None:
            raise Unusable("its codec is not known")
        if stream.codec_context.channels > _MAX_CHANNELS:
            raise Unusable(f"it has more than {_MAX_CHANNELS} channels")
        resampler = av.AudioResampler(format="flt", layout="mono", rate=rate)
        try:
            for frame in container.decode(stream):
                deadline.check()
                for part in resampler.resample(frame):
                    chunks.append(part.to_ndarray().reshape(-1))
                    size += chunks[-1].size
                if size > max_samples:
                    raise _too_long(limits.max_audio_seconds)
        except (av.error.FFmpegError, EOFError):
            if not size:
                raise
        with suppress(av.error.FFmpegError):
            for part in resampler.resample(None):
                chunks.append(part.to_ndarray().reshape(-1))
    samples = np.concatenate(chunks) if chunks else np.empty(0, np.float32)
    if not samples.size:
        raise Unusable("it has no sound")
    if samples.size > max_samples:
        raise _too_long(limits.max_audio_seconds)
    samples = np.nan_to_num(samples.astype(np.float32), nan=0.0, posinf=1.0, neginf=-1.0)
    return AudioClip(np.clip(samples, -1, 1), rate)


def resampled(samples: np.ndarray, given_rate: int, rate: int) -> np.ndarray:
    """Samples of one channel at another rate."""
    if given_rate == rate:
        return samples
    try:
        import av
    except ImportError:
        raise missing("av", "sounds of other rates than the model's") from None
    frame = av.AudioFrame.from_ndarray(samples.reshape(1, -1), format="flt", layout="mono")
    frame.sample_rate = given_rate
    resampler = av.AudioResampler(format="flt", layout="mono", rate=rate)
    parts = [*resampler.resample(frame), *resampler.resample(None)]
    return np.concatenate([part.to_ndarray().reshape(-1) for part in parts])


# Both.


@contextmanager
def _opened(content: bytes, kind: Kind) -> Iterator[InputContainer]:
    """Opens an FFmpeg container with a stream of a kind. It reads nothing but these bytes."""
    try:
        import av
    except ImportError:
        raise missing("av", "clips and sounds") from None
    what = {"video": "clip", "audio": "sound"}[kind]
    options = {"format_whitelist": _CONTAINERS[kind], "protocol_whitelist": "none"}
    try:
        with av.open(
            io.BytesIO(content), container_options=options, io_open=_no_further_file
        ) as container:
            if not getattr(container.streams, kind):
                raise Unusable(f"it has no {kind}")
            yield cast("InputContainer", container)
    except av.error.FFmpegError as error:
        # FFmpeg's messages about unknown and disallowed formats are not helpful.
        is_usual = isinstance(error, av.error.InvalidDataError | av.error.ArgumentError)
        reason = "" if is_usual else f": {_reason(error)}"
        looks = _looks_like(content)
        raise Unusable(f"not a readable {what} ({looks}){reason}") from None
    except MemoryError:
        raise Unusable("there is not enough memory for it") from None
    except (Unusable, CancelledError):
        raise
    except Exception as error:  # PyAV's own checks and casts raise many types.
        raise Unusable(f"its {what} is broken: {_reason(error)}") from None


def _no_further_file(*_: object, **__: object) -> NoReturn:
    raise PermissionError("a clip may not name other files")


def _too_long(seconds: float) -> Unusable:
    return Unusable(f"it is longer than {seconds:g} s")


def missing(package: str, what: str) -> Unusable:
    return Unusable(f"{what} need the package {package}: pip install 'mlx-paged[vision]'")


_SIGNATURES = (
    (b"<?xml", "XML or SVG"), (b"<svg", "SVG"), (b"<!doctype", "HTML"), (b"<html", "HTML"),
    (b"%pdf", "PDF"), (b"pk\x03\x04", "ZIP"), (b"\x89png", "PNG"), (b"\xff\xd8\xff", "JPEG"),
    (b"gif8", "GIF"), (b"riff", "RIFF"), (b"%!ps", "PostScript"), (b"#extm3u", "a playlist"),
    (b"\x1aE\xdf\xa3".lower(), "Matroska"), (b"{", "JSON"),
)  # fmt: skip


def _looks_like(content: bytes) -> str:
    """Describes the apparent format of bytes, for an error."""
    head = content[:64].lstrip().lower()
    for signature, name in _SIGNATURES:
        if head.startswith(signature):
            return f"it looks like {name}"
    if content[4:8] == b"ftyp":
        return f"it looks like {content[8:12].decode('latin-1').strip()!r}, a kind of MP4 or HEIF"
    return f"{len(content)} bytes of an unknown kind"


def _reason(error: BaseException) -> str:
    """A short reason of a library, without anything of this machine."""
    text = getattr(error, "strerror", None) or f"{error}"
    first = text.strip().splitlines()[0] if text.strip() else type(error).__name__
    return first[:120]
