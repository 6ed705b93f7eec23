"""Counts the code that a reader of the program's path passes: files, file changes, and calls."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx_paged

ROOT = f"{Path(mlx_paged.__file__).parent}/"


@dataclass
class Passage:
    """Calls of the package's functions, excluding comprehensions.

    Attributes:
        is_counting: True while calls are counted.
        num_calls: Number of calls.
        num_changes: Calls of a function in another file than the same thread's previous call.
        files: Relative paths of all files with a called function.
    """

    is_counting: bool = True
    num_calls: int = 0
    num_changes: int = 0
    files: set[str] = field(default_factory=set)
    _last: dict[int, str] = field(default_factory=dict)  # previous file, by thread

    def note(self, frame: Any, event: str, _: object) -> None:
        """Receives events from `sys.setprofile`."""
        code = frame.f_code
        if event != "call" or not self.is_counting or code.co_name.startswith("<"):
            return
        path = code.co_filename
        if not path.startswith(ROOT):
            return
        thread = threading.get_ident()
        self.num_calls += 1
        if self._last.get(thread) != path:
            self.num_changes += 1
            self._last[thread] = path
            self.files.add(path.removeprefix(ROOT))


@contextmanager
def passage(*, of_new_threads: bool = False) -> Iterator[Passage]:
    """Counts the calls of this thread, and of threads that start within the block."""
    found = Passage()
    if of_new_threads:
        threading.setprofile(found.note)
    sys.setprofile(found.note)
    try:
        yield found
    finally:
        found.is_counting = False  # threads that outlive the block keep their profiler
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
