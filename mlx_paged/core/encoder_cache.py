"""EncoderCache: which items' features the device holds, and what a step may still encode.

*Features* are what a tower makes of a media item: the input embeddings of its rows. They are kept
for other sequences with the same item, and for the next chunk of a sequence that is in the middle
of it. This is the book of them; the arrays are in `mlx_paged.engine.media.encoder_cache`::

      not held --- a chunk needs it, the step may encode it ---> held, in use by a step in flight
         ^                                                         |              ^
         |                                                         |  committed   |  needed again
         +---- evicted (least recently used first) --- idle <------+--------------+
                                                        pinned while a sequence is in the middle
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from typing import NamedTuple

from mlx_paged.core.media import PromptMedia
from mlx_paged.errors import IntegrityError


@dataclass
class EncoderCacheStats:
    """Counters since the cache was made, and its current contents.

    Attributes:
        num_queries: Items that sequences needed features of.
        num_hits: Those of them whose features were there.
        num_prefix_hits: Items that needed none, as all their positions came from the prefix cache.
        num_encoded_items: Items given to the tower.
        num_encoded_rows: Their rows.
        num_evictions: Features given up to make room.
        num_items: Items whose features are held.
        num_bytes: Bytes of these.
        max_bytes: Most that were held at once.
    """

    num_queries: int = 0
    num_hits: int = 0
    num_prefix_hits: int = 0
    num_encoded_items: int = 0
    num_encoded_rows: int = 0
    num_evictions: int = 0
    num_items: int = 0
    num_bytes: int = 0
    max_bytes: int = 0


class ScheduledMedia(NamedTuple):
    """A step's changes to the features, besides using them.

    Attributes:
        evicted: Keys of those that are given up, before anything else.
        encoded: Keys of those that are made in this step.
    """

    evicted: tuple[bytes, ...]
    encoded: tuple[bytes, ...]


class HeldFeatures:
    """The features of one item.

    Attributes:
        key: Of the item and the salt.
        num_rows, num_bytes: Their size.
        num_pins: Sequences that are in the middle of the item.
        last_step: Newest step that uses them.
    """

    __slots__ = ("key", "last_step", "num_bytes", "num_pins", "num_rows")

    def __init__(self, key: bytes, num_rows: int, num_bytes: int, step: int) -> None:
        self.key = key
        self.num_rows = num_rows
        self.num_bytes = num_bytes
        self.num_pins = 0
        self.last_step = step


class EncoderCache:
    """The book of the features that the device holds.

    Args:
        capacity: bytes. An item that is larger is held alone.
        max_rows: most rows that a step encodes. An item that has more is encoded alone.
        bytes_per_row: an estimate, until `resize` says what it is.

    Attributes:
        num_bytes: Held now.
        step: Newest step that used it.
    """

    def __init__(self, capacity: int, max_rows: int, bytes_per_row: int = 1) -> None:
        self.capacity = capacity
        self.max_rows = max_rows
        self.num_bytes = 0
        self.step = 0
        self._bytes_per_row = bytes_per_row
        self._held: dict[bytes, HeldFeatures] = {}
        self._idle: OrderedDict[bytes, HeldFeatures] = OrderedDict()  # without pins, oldest first
        self._idle_bytes = 0
        self._stats = EncoderCacheStats()
        self._evicted: list[bytes] = []  # not yet told
        # State of the step being built.
        self._committed = 0
        self._rows_left = max_rows
        self._items_left = sys.maxsize
        self._encoded: list[bytes] = []

    def begin(self, step: int, committed: int, max_items: int | None = None) -> None:
        """A step is being built; called as often as it needs features.

        Args:
            committed: the newest step whose results have been read.
            max_items: most that the step encodes; None: as many as have rows enough.
        """
        self._committed = committed
        if step != self.step:
            self.step, self._rows_left, self._encoded = step, self.max_rows, []
            self._items_left = sys.maxsize if max_items is None else max_items
            self._make_room(0)

    def end(self) -> ScheduledMedia:
        """The step is built."""
        scheduled = ScheduledMedia(tuple(self._evicted), tuple(self._encoded))
        self._evicted = []
        return scheduled

    # Needs of a chunk.

    def num_affordable(self, media: PromptMedia, items: range, *, whole: bool = False) -> int:
        """Leading items of a chunk whose features are there, or that this step may encode.

        Args:
            items: of the chunk, in order.
            whole: the chunk cannot be cut. Where the step encodes nothing yet, its budget does not
                count.
        """
        rows_left, is_first = self._rows_left, not self._encoded
        items_left = self._items_left
        all_keys, new = {media.keys[i] for i in items}, 0
        keys: set[bytes] = set()  # of the items before
        for count, i in enumerate(items):
            key = media.keys[i]
            if key in self._held or key in keys:
                keys.add(key)
                continue
            num_rows = media.spans[i].num_rows
            size = num_rows * self._bytes_per_row
            if not (whole and is_first):
                if items_left == 0 or (num_rows > rows_left and rows_left < self.max_rows):
                    return count
                alone = new == 0 and size > self.capacity
                if not self._has_room(new + size, all_keys, alone=alone):
                    # (What comes later in the chunk must not keep this item out.)
                    return count + self._has_room(new + size, keys, alone=alone)
                if size > self.capacity:
                    return count + 1
            keys.add(key)
            rows_left -= num_rows
            items_left -= 1
            new += size
        return len(items)

    def _has_room(self, num_bytes: int, kept: Set[bytes], *, alone: bool) -> bool:
        """True if this number of bytes fits once everything evictable but `kept` is gone.

        Args:
            alone: they may be any number where nothing else is held.
        """
        missing = self.num_bytes + num_bytes - self.capacity
        if missing <= 0:
            return True
        if alone:
            missing = self.num_bytes
        if missing > self._idle_bytes:
            return False
        for key, features in self._idle.items():
            if missing <= 0:
                break
            if features.last_step > self._committed:
                return False  # (and so are all behind it)
            if key not in kept:
                missing -= features.num_bytes
        return missing <= 0

    def use(self, media: PromptMedia, items: range, begun: HeldFeatures | None) -> None:
        """The step uses features; those that are not there it encodes.

        Args:
            items: `num_affordable` said that they may be used.
            begun: of the item that the sequence is in the middle of.
        """
        missing = []
        for i in items:
            key = media.keys[i]
            features = self._held.get(key)
            if features is None:
                missing.append(i)
                continue
            features.last_step = self.step
            if key in self._idle:
                self._idle.move_to_end(key)
            if features is not begun:
                self._stats.num_queries += 1
                self._stats.num_hits += 1
        for i in missing:
            self._add(media.keys[i], media.spans[i].num_rows)

    def _add(self, key: bytes, num_rows: int) -> None:
        self._stats.num_queries += 1
        features = self._held.get(key)
        if features is not None:  # (twice in one chunk)
            self._stats.num_hits += 1
            return
        size = num_rows * self._bytes_per_row
        self._make_room(size)
        self._held[key] = self._idle[key] = HeldFeatures(key, num_rows, size, self.step)
        self.num_bytes += size
        self._idle_bytes += size
        self._rows_left -= num_rows
        self._items_left -= 1
        self._encoded.append(key)
        self._stats.num_encoded_items += 1
        self._stats.num_encoded_rows += num_rows
        self._stats.max_bytes = max(self._stats.max_bytes, self.num_bytes)

    def _make_room(self, num_bytes: int) -> None:
        """Evicts until so many bytes fit, or nothing more may be evicted."""
        while self.num_bytes + num_bytes > self.capacity and self._idle:
            oldest = next(iter(self._idle.values()))
            if oldest.last_step > self._committed:
                return
            self._forget(oldest)
            self._stats.num_evictions += 1

    def _forget(self, features: HeldFeatures) -> None:
        del self._held[features.key]
        self.num_bytes -= features.num_bytes
        if self._idle.pop(features.key, None) is not None:
            self._idle_bytes -= features.num_bytes
        self._evicted.append(features.key)

    def pin(self, key: bytes) -> HeldFeatures:
        """A sequence is in the middle of an item that the step uses."""
        features = self._held[key]
        if features.num_pins == 0:
            del self._idle[key]
            self._idle_bytes -= features.num_bytes
        features.num_pins += 1
        return features

    def unpin(self, features: HeldFeatures) -> None:
        """It has passed the item, or has lost its blocks."""
        features.num_pins -= 1
        if features.num_pins == 0 and self._held.get(features.key) is features:
            self._idle[features.key] = features
            self._idle_bytes += features.num_bytes
            # (The order is that of the last use: where it ends before that, behind all others.)
            features.last_step = max(features.last_step, self.step)

    # Corrections.

    def resize(self, key: bytes, num_bytes: int) -> None:
        """Records the memory of an item's features, now that they exist."""
        features = self._held.get(key)
        if features is None:
            return
        more = num_bytes - features.num_bytes
        features.num_bytes = num_bytes
        self.num_bytes += more
        self._idle_bytes += more if key in self._idle else 0
        self._bytes_per_row = max(self._bytes_per_row, -(-num_bytes // features.num_rows))
        self._make_room(0)
        self._stats.max_bytes = max(self._stats.max_bytes, self.num_bytes)

    def clear(self) -> None:
        """Forgets all features, those that sequences are in the middle of included."""
        for features in list(self._held.values()):
            self._forget(features)

    # Numbers.

    def count_prefix_hits(self, num_items: int) -> None:
        """So many items of a sequence came from the prefix cache."""
        self._stats.num_prefix_hits += num_items

    @property
    def stats(self) -> EncoderCacheStats:
        """A copy of the counters so far."""
        return replace(self._stats, num_items=len(self._held), num_bytes=self.num_bytes)

    def check_integrity(self, pinned: Sequence[HeldFeatures]) -> None:
        """Recounts; raises `IntegrityError` with what disagrees.

        Args:
            pinned: what sequences are in the middle of.
        """
        total = sum(features.num_bytes for features in self._held.values())
        idle = sum(features.num_bytes for features in self._idle.values())
        if (total, idle) != (self.num_bytes, self._idle_bytes):
            counted = f"{self.num_bytes} bytes, {self._idle_bytes} of them idle"
            raise IntegrityError(f"{counted}, are counted, but there are {total} and {idle}")
        oldest = next(iter(self._idle.values()), None)
        may_evict = oldest is not None and oldest.last_step <= self._committed
        if total > self.capacity and len(self._held) > 1 and may_evict:
            raise IntegrityError(f"{total} bytes of features are held, of {self.capacity}")
        for key, features in self._held.items():
            num_pins = sum(other is features for other in pinned)
            if features.num_pins != num_pins or (key in self._idle) != (num_pins == 0):
                raise IntegrityError(f"features have {features.num_pins} pins, not {num_pins}")
