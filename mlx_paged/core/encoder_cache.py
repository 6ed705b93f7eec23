"""EncoderCache: tracks the media features on the device and the encoding budget of a step.

*Features* are a tower's output for a media item: the input embeddings of its rows. The cache keeps
them for other sequences with the same item, and for the next chunk of a sequence that is in the
middle of it. This is the bookkeeping; `mlx_paged.multimodal.feature_store` has the arrays::

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
        num_queries: Items that sequences needed features for.
        num_hits: Queries that found features in the cache.
        num_prefix_hits: Items that needed no features: the prefix cache held all their positions.
        num_encoded_items: Items encoded by the tower.
        num_encoded_rows: Rows of these items.
        num_evictions: Features evicted to make room.
        num_items: Items in the cache.
        num_bytes: Bytes in the cache.
        max_bytes: Peak of `num_bytes`.
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
    """Features that a step evicts and encodes.

    Attributes:
        evicted: Keys evicted before anything else runs.
        encoded: Keys encoded in this step.
    """

    evicted: tuple[bytes, ...]
    encoded: tuple[bytes, ...]


class HeldFeatures:
    """The features of one item.

    Attributes:
        key: Item key plus salt.
        num_rows, num_bytes: Size of the features.
        num_pins: Sequences in the middle of the item.
        last_step: Newest step that uses the features.
    """

    __slots__ = ("key", "last_step", "num_bytes", "num_pins", "num_rows")

    def __init__(self, key: bytes, num_rows: int, num_bytes: int, step: int) -> None:
        self.key = key
        self.num_rows = num_rows
        self.num_bytes = num_bytes
        self.num_pins = 0
        self.last_step = step


class EncoderCache:
    """Bookkeeping for the features that the device holds.

    Args:
        capacity: Bytes. A larger item is held alone.
        max_rows: Maximum rows encoded per step. A larger item is encoded alone.
        bytes_per_row: Estimate, used until `resize` reports the real size.

    Attributes:
        num_bytes: Bytes held now.
        step: Newest step that used the cache.
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
        self._evicted: list[bytes] = []  # not yet reported
        # State of the step being built.
        self._committed = 0
        self._rows_left = max_rows
        self._items_left = sys.maxsize
        self._encoded: list[bytes] = []

    def begin(self, step: int, committed: int, max_items: int | None = None) -> None:
        """Starts a step. May be called repeatedly for the same step.

        Args:
            committed: Newest step whose results have been read.
            max_items: Maximum items that the step encodes; None sets no limit beyond the rows.
        """
        self._committed = committed
        if step != self.step:
            self.step, self._rows_left, self._encoded = step, self.max_rows, []
            self._items_left = sys.maxsize if max_items is None else max_items
            self._make_room(0)

    def cancel(self, step: int) -> None:
        """Cancels the step being built; `step` is the newest launched one.

        Features released from now on then do not wait for a step that never runs.
        """
        self.step = min(self.step, step)

    def end(self) -> ScheduledMedia:
        """Ends the step being built; returns its changes to the features."""
        scheduled = ScheduledMedia(tuple(self._evicted), tuple(self._encoded))
        self._evicted = []
        return scheduled

    # Features for a chunk.

    def num_affordable(self, media: PromptMedia, items: range, *, whole: bool = False) -> int:
        """Returns the number of leading items of a chunk that are cached or that this step may
        encode.

        Args:
            items: Items of the chunk, in order.
            whole: True if the chunk cannot be split. It then ignores the budget, provided that the
                step encodes nothing yet.
        """
        rows_left, is_first = self._rows_left, not self._encoded
        items_left = self._items_left
        all_keys, new = {media.keys[i] for i in items}, 0
        keys: set[bytes] = set()  # of the preceding items
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
                    # Retry without later items: those must not keep this one out.
                    return count + self._has_room(new + size, keys, alone=alone)
                if size > self.capacity:
                    return count + 1
            keys.add(key)
            rows_left -= num_rows
            items_left -= 1
            new += size
        return len(items)

    def _has_room(self, num_bytes: int, kept: Set[bytes], *, alone: bool) -> bool:
        """True if `num_bytes` fit after evicting everything evictable except `kept`.

        Args:
            alone: Ignore the capacity if nothing else would be held.
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
                return False  # all later entries are in use too
            if key not in kept:
                missing -= features.num_bytes
        return missing <= 0

    def use(self, media: PromptMedia, items: range, pinned: HeldFeatures | None) -> None:
        """Uses features in this step; encodes the missing ones.

        Args:
            items: Items that `num_affordable` allowed.
            pinned: Features of the item that the sequence is in the middle of.
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
            if features is not pinned:
                self._stats.num_queries += 1
                self._stats.num_hits += 1
        for i in missing:
            self._add(media.keys[i], media.spans[i].num_rows)

    def _add(self, key: bytes, num_rows: int) -> None:
        self._stats.num_queries += 1
        features = self._held.get(key)
        if features is not None:  # the item occurs twice in one chunk
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
        """Evicts until `num_bytes` fit or nothing else is evictable."""
        while self.num_bytes + num_bytes > self.capacity and self._idle:
            oldest = next(iter(self._idle.values()))
            if oldest.last_step > self._committed:
                return
            self._forget(oldest)
            self._stats.num_evictions += 1

    def evict_idle(self, committed: int) -> list[bytes]:
        """Evicts all features that no sequence and no step in flight needs; returns their keys.

        The caller may drop them at once; the next step with media reports them, too.

        Args:
            committed: Newest step whose results have been read.
        """
        keys = []
        for features in list(self._idle.values()):
            if features.last_step <= committed:
                keys.append(features.key)
                self._forget(features)
        self._stats.num_evictions += len(keys)
        return keys

    def _forget(self, features: HeldFeatures) -> None:
        del self._held[features.key]
        self.num_bytes -= features.num_bytes
        if self._idle.pop(features.key, None) is not None:
            self._idle_bytes -= features.num_bytes
        self._evicted.append(features.key)

    def pin(self, key: bytes) -> HeldFeatures:
        """Pins an item of this step for a sequence that is in the middle of it."""
        features = self._held[key]
        if features.num_pins == 0:
            del self._idle[key]
            self._idle_bytes -= features.num_bytes
        features.num_pins += 1
        return features

    def unpin(self, features: HeldFeatures) -> None:
        """Releases a pin: the sequence has passed the item, or has lost its blocks."""
        features.num_pins -= 1
        if features.num_pins == 0 and self._held.get(features.key) is features:
            self._idle[features.key] = features
            self._idle_bytes += features.num_bytes
            # The entry goes to the end of the LRU order, so last_step must not be older.
            features.last_step = max(features.last_step, self.step)

    # Corrections.

    def resize(self, key: bytes, num_bytes: int) -> None:
        """Records the real size of an item's features."""
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
        """Evicts all features, pinned ones included."""
        for features in list(self._held.values()):
            self._forget(features)

    # Statistics.

    def count_prefix_hits(self, num_items: int) -> None:
        """Counts items of a sequence that came from the prefix cache."""
        self._stats.num_prefix_hits += num_items

    @property
    def stats(self) -> EncoderCacheStats:
        """A snapshot of the counters."""
        return replace(self._stats, num_items=len(self._held), num_bytes=self.num_bytes)

    def check_integrity(self, pinned: Sequence[HeldFeatures]) -> None:
        """Recounts everything; raises `IntegrityError` on a mismatch.

        Args:
            pinned: Features that sequences pin, one entry per pin.
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
