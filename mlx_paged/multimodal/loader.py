"""Loads and decodes media sources on its own threads, and decodes each file once.

Agents resend old screenshots with every turn, and many requests may be about one picture. So
decoded items are cached by the digest of their bytes, and no two threads decode the same item at
the same time.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from mlx_paged.content import Kind, MediaSource
from mlx_paged.errors import InvalidMediaError
from mlx_paged.multimodal import decode
from mlx_paged.multimodal.items import (
    AudioClip,
    Deadline,
    MediaItem,
    OutOfTime,
    Unusable,
    VideoFrames,
    digest_of,
    num_bytes,
)
from mlx_paged.multimodal.options import IoOptions, MediaLimits, MediaOptions
from mlx_paged.multimodal.picture_process import PictureProcesses
from mlx_paged.multimodal.source import read_file, read_url

T = TypeVar("T")

#: Sampling rate of sounds for models that do not specify one.
DEFAULT_SAMPLING_RATE = 16_000

# Fetching threads wait for other machines, and decoding threads compute. They are separate, so that
# a slow host delays no picture whose bytes are in its prompt.
_FETCH_THREADS, _DECODE_THREADS = 64, 4
_FETCHED = ("http:", "https:")
_MAX_RATE = 1 << 20


class MediaLoader:
    """Loads the items of prompts. Any thread may call it.

    Args:
        options: Limits, and how to read items.
        sampling_rate: Samples per second of decoded sounds.
        sufficient_side: See `decode.image_of`; None keeps the size of pictures.
    """

    def __init__(
        self,
        options: MediaOptions,
        *,
        sampling_rate: int = DEFAULT_SAMPLING_RATE,
        sufficient_side: Callable[[], int | None] | None = None,
    ) -> None:
        self.options = options
        self._rate = sampling_rate
        self._sufficient_side = sufficient_side
        self._pictures = PictureProcesses()
        self._decoded = _DecodedItems(options.limits.cache_bytes)
        # Threads start with the first job.
        self._fetchers = ThreadPoolExecutor(_FETCH_THREADS, thread_name_prefix="mlx-paged-fetch")
        self._decoders = ThreadPoolExecutor(_DECODE_THREADS, thread_name_prefix="mlx-paged-media")

    @property
    def num_decoded(self) -> int:
        """Number of decoded items, without cache hits."""
        return self._decoded.num_decoded

    def close(self) -> None:
        """Ends its threads and processes."""
        for pool in (self._fetchers, self._decoders):
            pool.shutdown(wait=False, cancel_futures=True)
        self._pictures.close()

    def load(self, sources: Sequence[MediaSource]) -> list[MediaItem]:
        """Returns the items of a prompt's sources, in order, and sets each `MediaSource.item`.

        Raises:
            InvalidMediaError: An item is unusable, or there are too many of its kind.
        """
        batch = _Batch(self, sources)
        try:
            wait(batch.futures, return_when=FIRST_EXCEPTION)
            return batch.items()
        finally:
            batch.cancel()

    async def load_async(self, sources: Sequence[MediaSource]) -> list[MediaItem]:
        """Like `load`, for an event loop. Cancelling the task abandons the remaining work."""
        batch = _Batch(self, sources)
        try:
            if batch.futures:
                waiting = [asyncio.wrap_future(future) for future in batch.futures]
                try:
                    await asyncio.wait(waiting, return_when=asyncio.FIRST_EXCEPTION)
                finally:
                    for each in waiting:
                        each.cancel()
                    await asyncio.gather(*waiting, return_exceptions=True)
            return batch.items()
        finally:
            batch.cancel()

    async def run(self, function: Callable[[], T]) -> T:
        """Calls a function that takes a while on one of the decoding threads."""
        return await asyncio.get_running_loop().run_in_executor(self._decoders, function)

    # Parts.

    def fetch(self, source: MediaSource, deadline: Deadline) -> bytes:
        """Returns the bytes that a URL names."""
        limits = self.options.limits
        return read_url(
            source.given,
            max_bytes=limits.max_bytes(source.kind),
            max_redirects=limits.max_redirects,
            local_path=self.options.local_path,
            domains=self.options.domains,
            deadline=deadline,
        )

    def decode(self, source: MediaSource, content: bytes | None, deadline: Deadline) -> MediaItem:
        """Returns the item of a source; `content` are its bytes if they were fetched before."""
        limits, given, kind = self.options.limits, source.given, source.kind
        options = source.io or self.options.io
        deadline.check()
        if content is None and isinstance(given, str):
            content = self.fetch(source, deadline)
        elif content is None and isinstance(given, Path):
            content = read_file(given, limits.max_bytes(kind), deadline)
        elif isinstance(given, bytes | bytearray | memoryview):
            content = bytes(given)
            if len(content) > limits.max_bytes(kind):
                raise Unusable(f"it has more than {limits.max_bytes(kind)} bytes")
        if content is None:
            data = of_python(kind, given, limits, options, self._rate)
            if source.detail == "low" and kind == "image":
                data = decode.low_detail(data)
            digest = _digest_of_data(kind, data)
            # Equal data share one object, whose processor results are cached.
            data = self._decoded.get(digest, lambda: data, deadline)
            return MediaItem(kind, digest, data, source.part)
        digest = digest_of(kind, content, _settings(kind, options, self._rate, source.detail))

        def make() -> Any:
            picture_of = partial(
                self._pictures.image_of,
                limits=limits,
                options=options,
                deadline=deadline,
                is_low=source.detail == "low",
                sufficient_side=self._sufficient_side,
            )
            return decode.decode(kind, content, limits, options, self._rate, deadline, picture_of)

        return MediaItem(kind, digest, self._decoded.get(digest, make, deadline), source.part)

    def submit_fetch(self, function: Callable[[], bytes]) -> Future[bytes]:
        """Runs a function on a fetching thread."""
        return self._fetchers.submit(function)

    def submit_decode(self, function: Callable[[], T]) -> Future[T]:
        """Runs a function on a decoding thread."""
        return self._decoders.submit(function)


def loader_of(options: MediaOptions, processor: Any) -> MediaLoader:
    """The loader for an engine's options and its model's processor."""
    return MediaLoader(
        options,
        sampling_rate=getattr(processor, "sampling_rate", None) or DEFAULT_SAMPLING_RATE,
        sufficient_side=getattr(processor, "sufficient_side", None),
    )


class _Batch:
    """Loads the items of one prompt.

    Attributes:
        futures: The item of each source.
    """

    def __init__(self, loader: MediaLoader, sources: Sequence[MediaSource]) -> None:
        self._loader = loader
        self._sources = sources
        self._cancelled = threading.Event()
        limits = loader.options.limits
        # All items of a prompt share these, so it cannot occupy the threads for longer.
        self._fetching = Deadline(limits.fetch_timeout, self._cancelled, "it was not fetched")
        self._decoding = Deadline(limits.decode_timeout, self._cancelled, "it was not decoded")
        self._lock = threading.Lock()
        self._num_bytes = 0
        check_counts(sources, loader.options)
        self._fetched: dict[tuple[str, Kind], Future[bytes]] = {}
        self.futures = [self._start(source) for source in sources]

    def _start(self, source: MediaSource) -> Future[MediaItem]:
        if source.item is not None:
            done: Future[MediaItem] = Future()
            done.set_result(source.item)
            return done
        given = source.given
        if not isinstance(given, str | bytes | bytearray | memoryview | Path):
            # An MLX array belongs to the thread that made it.
            source.given = _as_numpy(given)
        if not isinstance(given, str) or not given[:6].lower().startswith(_FETCHED):
            return self._loader.submit_decode(partial(self._decode, source, None))
        # The limit of bytes depends on the kind.
        key = given, source.kind
        if key not in self._fetched:
            self._fetched[key] = self._loader.submit_fetch(partial(self._fetch, source))
        return _then(
            self._fetched[key],
            lambda content: self._loader.submit_decode(partial(self._decode, source, content)),
        )

    def _fetch(self, source: MediaSource) -> bytes:
        self._fetching.begin()
        return self._loader.fetch(source, self._fetching)

    def _decode(self, source: MediaSource, content: bytes | None) -> MediaItem:
        self._decoding.begin()
        item = self._loader.decode(source, content, self._decoding)
        limit = self._loader.options.limits.max_prompt_bytes
        with self._lock:
            self._num_bytes += item.num_bytes
            if self._num_bytes > limit:
                raise Unusable(f"the items of a prompt have more than {limit} bytes when decoded")
        return item

    def items(self) -> list[MediaItem]:
        """Returns the items. Either one has failed, or all are done."""
        failed = [
            (source, error)
            for source, future in zip(self._sources, self.futures)
            if future.done()
            and not future.cancelled()
            and (error := future.exception()) is not None
        ]
        for source, error in failed:
            if isinstance(error, Unusable):
                raise InvalidMediaError(source.part, f"{error}") from None
        for _, error in failed:
            raise error
        items = [future.result() for future in self.futures]
        for source, item in zip(self._sources, items):
            source.item = item
        return items

    def cancel(self) -> None:
        """Abandons the remaining work."""
        self._cancelled.set()
        futures: list[Future[Any]] = [*self._fetched.values(), *self.futures]
        for future in futures:
            future.cancel()


class _DecodedItems:
    """Decoded data by digest, evicted by least recent use."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, Any] = OrderedDict()
        self._pending: dict[bytes, Future[Any]] = {}
        self.num_bytes = 0
        self.num_decoded = 0

    def get(self, digest: bytes, make: Callable[[], Any], deadline: Deadline) -> Any:
        """Returns the data of a digest: from the cache, from another thread, or by making it."""
        while True:
            deadline.check()
            with self._lock:
                if digest in self._kept:
                    self._kept.move_to_end(digest)
                    return self._kept[digest]
                pending = self._pending.get(digest)
                if pending is None:
                    future = self._pending[digest] = Future[Any]()
                    break
            try:
                return pending.result()
            except (CancelledError, OutOfTime):
                pass  # The request that decodes it was cancelled, or its time was up.
            except Unusable as error:
                raise Unusable(f"{error}") from None
        try:
            data = make()
        except BaseException as error:
            with self._lock:
                del self._pending[digest]
            future.set_exception(error)
            raise
        with self._lock:
            del self._pending[digest]
            self.num_decoded += 1
            self._keep(digest, data)
        future.set_result(data)
        return data

    def _keep(self, digest: bytes, data: Any) -> None:
        size = num_bytes(data)
        if size > self._max_bytes:
            return
        self._kept[digest] = data
        self.num_bytes += size
        while self.num_bytes > self._max_bytes:
            _, oldest = self._kept.popitem(last=False)
            self.num_bytes -= num_bytes(oldest)


def check_counts(sources: Sequence[MediaSource], options: MediaOptions) -> None:
    """Refuses a prompt with more items of a kind than allowed.

    Raises:
        InvalidMediaError: It names the first excess item.
    """
    counts: dict[Kind, int] = {}
    for source in sources:
        kind = source.kind
        counts[kind] = counts.get(kind, 0) + 1
        max_items = options.max_items(kind)
        if counts[kind] > max_items:
            total = sum(each.kind == kind for each in sources)
            raise InvalidMediaError(
                source.part,
                f"a prompt may have at most {max_items} of kind {kind!r} (limit_mm_per_prompt), "
                f"and this one has {total}",
            )


def _settings(kind: Kind, options: IoOptions, rate: int, detail: str | None) -> str:
    """Returns everything besides the bytes that determines the decoded data."""
    if kind == "image":
        return f"{options.rgba_background_color} {detail == 'low'}"
    if kind == "video":
        return f"{options.num_frames} {options.fps}"
    return f"{rate}"


def _then(first: Future[bytes], submit: Callable[[bytes], Future[MediaItem]]) -> Future[MediaItem]:
    """Returns the future of a job that is submitted with the result of another one."""
    result: Future[MediaItem] = Future()

    def finish(second: Future[MediaItem]) -> None:
        if result.set_running_or_notify_cancel():
            error = CancelledError() if second.cancelled() else second.exception()
            if error is None:
                result.set_result(second.result())
            else:
                result.set_exception(error)

    def submit_second(done: Future[bytes]) -> None:
        try:
            second = submit(done.result())
        except BaseException as error:
            if result.set_running_or_notify_cancel():
                result.set_exception(error)
        else:
            second.add_done_callback(finish)

    first.add_done_callback(submit_second)
    return result


# Objects that programs pass instead of files.


def _as_numpy(given: Any) -> Any:
    """Converts MLX arrays to NumPy arrays, also within lists and tuples."""
    if isinstance(given, list):
        return [_as_numpy(each) for each in given]
    if isinstance(given, tuple):
        return tuple(_as_numpy(each) for each in given)
    if type(given).__module__.partition(".")[0] != "mlx":
        return given
    import mlx.core as mx

    array = given.astype(mx.float32) if given.dtype == mx.bfloat16 else given
    return np.array(array)


def of_python(kind: Kind, given: Any, limits: MediaLimits, options: IoOptions, rate: int) -> Any:
    """Returns the decoded data of a Python object.

    Raises:
        Unusable: Its type, shape or range is not supported.
    """
    if kind == "image":
        return _picture(given, limits, options)
    if kind == "video":
        return _video(given, limits, options)
    return _audio(given, rate)


def _picture(given: Any, limits: MediaLimits, options: IoOptions) -> Any:
    if isinstance(given, np.ndarray):
        given = _from_array(given)
    if not (hasattr(given, "convert") and hasattr(given, "mode")):
        raise Unusable(
            "it must be a URL, bytes, a pathlib.Path, a picture of Pillow or an array, not "
            f"{type(given).__name__}"
        )
    if not 0 < given.width * given.height <= limits.max_image_pixels:
        raise Unusable(f"it must have from 1 to {limits.max_image_pixels} pixels")
    decode.check_size(given.width, given.height, limits)
    try:
        return decode.rgb(decode.upright(given), options)
    except Unusable:
        raise
    except Exception as error:  # a picture that is read lazily, from a file that is broken
        raise Unusable(f"its picture is broken: {error}") from None


def _from_array(array: np.ndarray) -> Any:
    """Makes a picture of [height, width], with channels as the last or the first dimension."""
    try:
        from PIL import Image
    except ImportError:
        raise decode.missing("Pillow", "pictures") from None

    if array.ndim == 3 and array.shape[2] not in (1, 3, 4) and array.shape[0] in (1, 3, 4):
        array = array.transpose(1, 2, 0)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if not array.size or (array.ndim != 2 and (array.ndim != 3 or array.shape[2] not in (3, 4))):
        raise Unusable(
            "an array must be of shape [height, width], [height, width, channels] or [channels, "
            f"height, width] with 1, 3 or 4 channels, not {list(array.shape)}"
        )
    return Image.fromarray(np.ascontiguousarray(_bytes_of(array)))


def _bytes_of(array: np.ndarray) -> np.ndarray:
    """Converts colors to uint8. Real numbers are in [0, 1], and integers in [0, 255]."""
    if array.dtype == np.uint8:
        return array
    if array.dtype.kind == "f":
        # NaN is in no range.
        if not ((array >= 0) & (array <= 1)).all():
            raise Unusable("an array of real numbers must be in [0, 1]")
        return np.rint(array * 255).astype(np.uint8)
    if array.dtype.kind == "b":
        return array.astype(np.uint8) * 255
    if array.dtype.kind in "iu":
        if array.min() < 0 or array.max() > 255:
            raise Unusable("an array of integers must be in [0, 255]")
        return array.astype(np.uint8)
    raise Unusable(f"an array must hold numbers, not {array.dtype}")


def _video(given: Any, limits: MediaLimits, options: IoOptions) -> VideoFrames:
    """Makes a clip from frames: an array or a list of pictures, or a pair of these and a mapping
    with their `fps`. All frames are used."""
    if isinstance(given, VideoFrames):
        given = given.frames, {"fps": given.fps}
    fps: Any = 1.0
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], dict):
        given, about = given
        fps = about.get("fps", 1.0)
        if not isinstance(fps, int | float) or isinstance(fps, bool) or not 0 < fps < 1e6:
            raise Unusable("the fps of its frames must be a number above 0")
    if isinstance(given, np.ndarray) and given.ndim == 4:
        given = list(given)
    if not isinstance(given, list | tuple) or not given:
        raise Unusable(
            "it must be a URL, bytes, a pathlib.Path, an array [frames, height, width, channels] "
            f"or a list of pictures, not {type(given).__name__}"
        )
    frames = [np.asarray(_picture(each, limits, options)) for each in given]
    if any(frame.shape != frames[0].shape for frame in frames):
        raise Unusable("its frames are not all of one size")
    return VideoFrames(np.stack(frames), float(fps))


def _audio(given: Any, rate: int) -> AudioClip:
    """Makes a sound from samples at the model's rate, or from a pair of samples and their rate."""
    given_rate: Any = rate
    if isinstance(given, AudioClip):
        given = given.samples, given.rate
    if isinstance(given, tuple) and len(given) == 2:
        given, given_rate = given
        if not isinstance(given_rate, int | float) or not 1 <= given_rate < _MAX_RATE:
            raise Unusable("its rate must be a number of samples a second, at least 1")
    if isinstance(given, list):
        given = np.asarray(given)
    if not isinstance(given, np.ndarray) or given.ndim not in (1, 2) or not given.size:
        raise Unusable(
            "it must be a URL, bytes, a pathlib.Path, an array of samples, or a pair of these and "
            f"their rate, not {type(given).__name__}"
        )
    if given.ndim == 2:  # several channels, in either dimension
        given = given.mean(axis=0 if given.shape[0] < given.shape[1] else 1)
    if given.dtype.kind not in "fiu":
        raise Unusable(f"samples must be numbers, not {given.dtype}")
    samples = given.astype(np.float32)
    if given.dtype.kind in "iu":
        samples = samples / np.float32(np.iinfo(given.dtype).max)
    if not np.isfinite(samples).all():
        raise Unusable("samples must be finite")
    samples = decode.resampled(np.clip(samples, -1, 1), int(given_rate), rate)
    return AudioClip(np.ascontiguousarray(samples), rate)


def _digest_of_data(kind: Kind, data: Any) -> bytes:
    if isinstance(data, VideoFrames):
        return digest_of(kind, data.frames.tobytes(), f"{data.frames.shape} {data.fps}")
    if isinstance(data, AudioClip):
        return digest_of(kind, data.samples.tobytes(), f"samples {data.rate}")
    return digest_of(kind, data.tobytes(), f"rgb {data.size}")
