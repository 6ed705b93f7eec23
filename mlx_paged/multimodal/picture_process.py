"""PictureProcesses: decodes large pictures in separate processes.

Pillow's decoders of WebP and JPEG 2000 hold the interpreter's lock until they are done, so no other
thread can send a token: half a second for WebP of 64 megapixels, six seconds for JPEG 2000. Large
pictures of any format take hundreds of megabytes, whose allocation and release also hold the lock.
JPEGs are decoded here, at a fraction of their size.

A process is this module, run by the same Python without MLX. It reads jobs from its standard input
and writes an answer in JSON, then the pixels, to a pipe of its own, because any library may print
to standard output. It ends with its input, so none outlives the process that started it.
"""

from __future__ import annotations

import io
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from mlx_paged.multimodal import decode
from mlx_paged.multimodal.items import Deadline, OutOfTime, Unusable
from mlx_paged.multimodal.options import IoOptions, MediaLimits

if TYPE_CHECKING:
    from PIL.Image import Image

logger = logging.getLogger(__name__)

# WebP and JPEG 2000 hold the interpreter's lock for 8 and 90 ms a megapixel. HEIF is decoded by C++
# libraries, so a crash stays in the other process.
_LOCKING = ("WEBP", "JPEG2000", "HEIF")
_FEW_PIXELS = 1 << 18
_MAX_PROCESSES = 2
# Bytes of address space: the largest picture takes about 2 GiB, as JPEG 2000.
_MAX_MEMORY = 6 << 30
_NICENESS = 10  # the model's threads come first
_STDERR = 2  # file descriptor
_POLL_SECONDS = 0.1  # interval for noticing that a client has gone
_COMMAND = (sys.executable, "-m", "mlx_paged.multimodal.picture_process")
# It needs neither mlx-lm nor OpenBLAS.
_ENVIRONMENT = {"MLX_PAGED_DISABLE": "1", "MLX_PAGED_BLAS": "off", "OPENBLAS_NUM_THREADS": "1"}


class PictureProcesses:
    """Decodes pictures, large ones in up to two processes, which start on demand.

    Args:
        command: The command of a process.

    Attributes:
        num_started: Number of started processes.
        num_decoded: Number of pictures that they decoded.
    """

    def __init__(self, command: Sequence[str] = _COMMAND) -> None:
        self._command = command
        self._lock = threading.Lock()
        self._idle: list[_Process] = []
        self._slots = threading.Semaphore(_MAX_PROCESSES)
        self._is_closed = False
        self.num_started = self.num_decoded = 0

    def image_of(
        self,
        content: bytes,
        limits: MediaLimits,
        options: IoOptions,
        deadline: Deadline,
        *,
        is_low: bool = False,
        sufficient_side: Callable[[], int | None] | None = None,
    ) -> Image:
        """Like `decode.image_of`, in this process or another, whichever delays other requests less.

        Raises:
            Unusable: It is not a picture, is broken, has too many pixels, or ended its process.
            OutOfTime: It takes too long.
            CancelledError: The request was cancelled.
        """
        process = side = None
        if needs_process(content, limits):
            if sufficient_side is not None and not is_low:
                side = sufficient_side()
            while not self._slots.acquire(timeout=_POLL_SECONDS):
                deadline.check()
            process = self._process()
        if process is None:
            return decode.image_of(
                content, limits, options, is_low=is_low, sufficient_side=sufficient_side
            )
        try:
            image = process.image_of((content, limits, options, is_low, side), deadline)
        except (EOFError, OSError):
            process.end()
            raise Unusable(
                "its picture is broken, or too much: the process that decoded it has ended"
            ) from None
        except Unusable as error:
            if isinstance(error, OutOfTime):
                process.end()
            raise
        except BaseException:  # Its answer is still to come.
            process.end()
            raise
        finally:
            self._keep(process)
            self._slots.release()
        self.num_decoded += 1
        return image

    def _process(self) -> _Process | None:
        """Returns an idle process or a new one; None if none can be started."""
        with self._lock:
            while self._idle:
                process = self._idle.pop()
                if process.is_alive:
                    return process
                process.end()
        try:
            process = _Process(self._command)
        except OSError as error:
            self._slots.release()
            logger.warning("large pictures are decoded in this process: %s", error)
            return None
        self.num_started += 1
        return process

    def _keep(self, process: _Process) -> None:
        with self._lock:
            if not self._is_closed and process.is_alive:
                self._idle.append(process)
                return
        process.end()

    def close(self) -> None:
        """Ends the processes."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for process in idle:
            process.end()


def needs_process(content: bytes, limits: MediaLimits) -> bool:
    """True for pictures that would hold the interpreter's lock for long."""
    try:
        from PIL import Image

        with Image.open(io.BytesIO(content), formats=decode.image_formats()) as image:
            pixels, form = image.width * image.height, image.format
            decode.check_size(image.width, image.height, limits)
    except Exception:  # `decode.image_of` reports what is wrong.
        return False
    if form in _LOCKING:
        return pixels >= _FEW_PIXELS
    return pixels >= decode.LARGE_PICTURE and form not in decode.REDUCED


class _Process:
    def __init__(self, command: Sequence[str]) -> None:
        reading, writing = os.pipe()
        self._answers = Connection(reading, writable=False)
        try:
            self._popen = subprocess.Popen(
                [*command, str(writing)],
                stdin=subprocess.PIPE,
                stdout=_STDERR,
                env={
                    **os.environ,
                    **_ENVIRONMENT,
                    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                },
                pass_fds=(writing,),
            )
        finally:
            os.close(writing)
        assert self._popen.stdin is not None
        self._jobs = Connection(os.dup(self._popen.stdin.fileno()), readable=False)
        self._popen.stdin.close()
        #: Ends it; at the latest when this process exits.
        self.end = weakref.finalize(self, _end, self._popen, self._jobs, self._answers)

    @property
    def is_alive(self) -> bool:
        return self._popen.poll() is None

    def image_of(self, job: tuple[Any, ...], deadline: Deadline) -> Image:
        from PIL import Image

        self._jobs.send_bytes(pickle.dumps(job))
        while not self._answers.poll(min(_POLL_SECONDS, deadline.check())):
            pass
        size, reason = json.loads(self._answers.recv_bytes())
        if reason is not None:
            raise Unusable(reason)
        return Image.frombuffer("RGB", tuple(size), self._answers.recv_bytes(), "raw", "RGB", 0, 1)


def _end(process: subprocess.Popen[bytes], *pipes: Connection) -> None:
    for pipe in pipes:
        with suppress(OSError):
            pipe.close()
    process.kill()
    process.wait()


def _limit_memory() -> None:
    with suppress(ImportError, OSError, ValueError):
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = _MAX_MEMORY if hard == resource.RLIM_INFINITY else min(hard, _MAX_MEMORY)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def main() -> None:
    """Decodes jobs from standard input until it ends."""
    jobs = Connection(os.dup(0), writable=False)
    answers = Connection(int(sys.argv[1]), readable=False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent process.
    _limit_memory()
    with suppress(OSError, AttributeError):  # Windows has none.
        os.nice(_NICENESS)
    while True:
        try:
            content, limits, options, is_low, side = pickle.loads(jobs.recv_bytes())
        except EOFError:
            return
        try:
            image = decode.image_of(content, limits, options, is_low=is_low)
            image = decode.reduced(image, side)
        except Unusable as error:
            answers.send_bytes(json.dumps([None, f"{error}"]).encode())
            continue
        pixels = image.tobytes()
        answers.send_bytes(json.dumps([image.size, None]).encode())
        answers.send_bytes(pixels)


if __name__ == "__main__":
    with suppress(BrokenPipeError):  # The parent has gone.
        main()
