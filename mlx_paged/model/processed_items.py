"""Cache of processed items, kept while the items live: an agent sends its old pictures again
with every turn, and to scale and cut one takes longer than to decode it."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class ProcessedItems(Generic[T]):
    """Results by item, the least recently used first to go. Any thread may use it.

    An item is told by what it is, not by what it holds: nobody changes one. It is not kept alive.

    Args:
        max_bytes: of all results.
        size_of: bytes of a result.
    """

    def __init__(self, max_bytes: int, size_of: Callable[[T], int]) -> None:
        self._max_bytes = max_bytes
        self._size_of = size_of
        # (Reentrant: an item may be garbage-collected while this thread holds it.)
        self._lock = threading.RLock()
        self._kept: OrderedDict[int, tuple[weakref.ref[Any], T]] = OrderedDict()  # by id of item
        self.num_bytes = 0
        self.num_made = 0

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, item: Any, make: Callable[[], T]) -> T:
        """The result for an item, made where it is not kept."""
        key = id(item)
        with self._lock:
            found = self._kept.get(key)
            if found is not None and found[0]() is item:
                self._kept.move_to_end(key)
                return found[1]
        result = make()
        self.num_made += 1
        try:
            reference = weakref.ref(item, lambda dead: self._drop(key, dead))
        except TypeError:  # (of a class that nothing can refer to weakly)
            return result
        with self._lock:
            self._drop(key, None)
            size = self._size_of(result)
            if size <= self._max_bytes:
                self._kept[key] = reference, result
                self.num_bytes += size
            while self.num_bytes > self._max_bytes:
                self._drop(next(iter(self._kept)), None)
        return result

    def _drop(self, key: int, dead: weakref.ref[Any] | None) -> None:
        """Forgets what is kept under a key; for a dead item only what was its own."""
        with self._lock:
            found = self._kept.get(key)
            if found is not None and (dead is None or found[0] is dead):
                del self._kept[key]
                self.num_bytes -= self._size_of(found[1])
