"""kept_environment: puts environment variables back after code that reads or sets them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator


@contextlib.contextmanager
def kept_environment(names: Iterable[str]) -> Iterator[None]:
    """Gives these variables the values of the beginning at the end, whatever changes them."""
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
