"""InterruptsDeferred: delays Ctrl-C until an operation is complete."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class InterruptsDeferred:
    """Context manager that defers Ctrl-C. Only the main thread receives it."""

    __slots__ = ("_came", "_handler")

    def __init__(self) -> None:
        self._handler: Any = None
        self._came: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> None:
        if threading.get_ident() == threading.main_thread().ident:
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler) and getattr(handler, "__func__", None) is not _NOTE:
                self._handler = handler
                signal.signal(signal.SIGINT, self._note)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        handler, self._handler = self._handler, None
        if handler is not None:
            signal.signal(signal.SIGINT, handler)
            if self._came is not None:
                handler(*self._came)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came = number, frame


_NOTE = InterruptsDeferred._note
