"""ProcessedItems: caches the processor's results while their items live.

Agents resend old pictures with every turn, and scaling and cropping take longer than decoding.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class ProcessedItems(Generic[T]):
    """Results by item, evicted by least recent use. Any thread may use it.

    Items are compared by identity, because they never change. The cache does not keep them alive.

    Args:
        max_bytes: Maximum bytes of all results.
        size_of: Returns the bytes of a result.
    """

    def __init__(self, max_bytes: int, size_of: Callable[[T], int]) -> None:
        self._max_bytes = max_bytes
        self._size_of = size_of
        # Reentrant: an item may be garbage-collected while this thread holds it.
        self._lock = threading.RLock()
        self._kept: OrderedDict[int, tuple[weakref.ref[Any], T]] = OrderedDict()  # by id of item
        self.num_bytes = 0
        self.num_made = 0

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, item: Any, make: Callable[[], T]) -> T:
        """Returns the result for an item, and makes it if it is missing."""
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
        except TypeError:  # Its class does not support weak references.
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
        """Forgets the result of a key; for a dead item, only if it is still that item's."""
        with self._lock:
            found = self._kept.get(key)
            if found is not None and (dead is None or found[0] is dead):
                del self._kept[key]
                self.num_bytes -= self._size_of(found[1])
