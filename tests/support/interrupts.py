"""Raises exceptions at a line of the package that the test chooses, without any clock."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import mlx_paged

PACKAGE = str(Path(mlx_paged.__file__).parent)


def _is_with(frame: FrameType) -> bool:
    """True if the line is a `with` statement.

    Python delivers asynchronous exceptions only after calls and jumps, so none can occur between
    the end of the block and the release of its lock. But a trace function is called there.
    """
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    return line.lstrip().startswith("with ")


class Interrupter:
    """Raises an exception once, before a line of the package runs on the watched thread.

    Args:
        at: Number of lines to run before; None: never raise, only count.
        error: The exception.
    """

    def __init__(self, at: int | None = None, error: BaseException | None = None) -> None:
        self.at, self.error = at, error
        self.num_lines = 0
        self.where = ""

    def watch(self) -> None:
        """Watches this thread from now on, including functions that already run."""
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if frame.f_code.co_filename.startswith(PACKAGE):
                frame.f_trace = self._trace
            frame = frame.f_back
        sys.settrace(self._trace)

    @contextmanager
    def watching(self) -> Iterator[Interrupter]:
        """Watches this thread until the end of the block."""
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            yield self
        finally:
            sys.settrace(before)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line" and not _is_with(frame):
            self.num_lines += 1
            if self.num_lines == self.at:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                assert self.error is not None
                raise self.error
        return self._trace
