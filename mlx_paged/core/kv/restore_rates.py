"""RestoreRates: decides which stored blocks are restored faster than they are computed.

On a large GPU behind a slow bus, a long prefix may be computed faster than it is restored. The
rates of restoring (bytes per second) and computing (prompt tokens per second) are measured while
the engine works. Until both are known, everything is restored::

      blocks      [ device ][ memory ][ memory ][ disk ][ disk ]
      computed              1.2 ms    1.2 ms    1.2 ms  1.2 ms
      restored              1.0 ms    1.0 ms    1.6 ms  1.6 ms
                                                |
                                                computed from here on

A refused level is not measured. Each refusal lowers the weight of its past measurements, so it is
tried again after a few dozen refusals. The same holds for a prefill engine, but that may take a few
times as long, because this engine's sequences continue to run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum

from mlx_paged.core.kv.groups import KVCacheGroup
from mlx_paged.core.kv.stored import StoredPrefix
from mlx_paged.core.kv.tier import ABSENT

#: Bytes of a level, and tokens of prompts, that must have been measured before a block is refused.
MIN_BYTES = 64 << 20
MIN_TOKENS = 2048
# Maximum bytes and tokens whose measurements are remembered.
_MAX_BYTES = 1 << 30
_MAX_TOKENS = 1 << 16
# Factor on the weight of a level's past measurements at a refusal.
_FADING = 0.9
# A prefill engine may take this many times as long for a prompt as this engine.
_MAX_SLOWDOWN = 4


class Level(StrEnum):
    """A place of stored blocks."""

    MEMORY = "memory"
    DISK = "disk"
    REMOTE = "remote"  # computed by another engine


class Rate:
    """Seconds per unit, from the latest measurements.

    Args:
        min_amount: Units that must have been measured before the rate counts as known.
        max_amount: Units whose measurements are remembered.
    """

    def __init__(self, min_amount: int, max_amount: int) -> None:
        self._min_amount = min_amount
        self._max_amount = max_amount
        self._amount = self._seconds = 0.0

    def add(self, amount: int, seconds: float) -> None:
        """Adds a measurement. Its amount may be 0: time that passed before any unit was done."""
        self._amount += amount
        self._seconds += seconds
        if self._amount > self._max_amount:
            self.fade(self._max_amount / self._amount)

    def fade(self, weight: float) -> None:
        """Multiplies the weight of past measurements."""
        self._amount *= weight
        self._seconds *= weight

    @property
    def seconds(self) -> float | None:
        """Seconds per unit; None if too little is known."""
        return self._seconds / self._amount if self._amount >= self._min_amount else None


class RestoreRates:
    """The rates of one engine.

    Args:
        block_bytes: Bytes of a block of each KV cache group.
        block_size: Tokens of a block.
        level_of: Returns the level of a tier's key.
    """

    def __init__(
        self, block_bytes: Sequence[int], block_size: int, level_of: Callable[[int], Level]
    ) -> None:
        self._block_bytes = tuple(block_bytes)
        self._block_size = block_size
        self._level_of = level_of
        self._computed = Rate(MIN_TOKENS, _MAX_TOKENS)
        self._restored = {level: Rate(MIN_BYTES, _MAX_BYTES) for level in Level}
        self._remote = Rate(MIN_TOKENS, _MAX_TOKENS)  # from a prompt's arrival to its last block

    def note_computed(self, num_tokens: int, seconds: float) -> None:
        """Learns from a step that computed mainly prompt tokens."""
        self._computed.add(num_tokens, seconds)

    def note_restored(self, level: Level, num_bytes: int, seconds: float) -> None:
        """Learns from blocks that were restored while nothing else ran."""
        self._restored[level].add(num_bytes, seconds)

    def note_remote(self, num_tokens: int, seconds: float) -> None:
        """Learns from a prompt that another engine has computed, its waits included."""
        self._remote.add(num_tokens, seconds)

    def is_remote_worthwhile(self) -> bool:
        """True unless a prefill engine takes too long for a new prompt. Each refusal counts, so
        call it once per prompt."""
        computed, remote = self._computed.seconds, self._remote.seconds
        if computed is None or remote is None or remote <= _MAX_SLOWDOWN * computed:
            return True
        self._remote.fade(_FADING)
        return False

    def note_refusal(self) -> None:
        """Learns that blocks were computed because of `num_worth_restoring`."""
        for rate in self._restored.values():
            rate.fade(_FADING)

    def num_worth_restoring(
        self, stored: StoredPrefix, first: int, groups: Sequence[KVCacheGroup]
    ) -> int:
        """Returns how many leading blocks of a prefix a new sequence should not compute.

        Args:
            stored: The prefix. Every group can continue from its end.
            first: Leading blocks that need no restoration.

        Returns:
            `stored.num_blocks` to restore all of them; `first` or less to restore none. A number in
            between is the best end by full attention alone. Other groups may be unable to continue
            there, so shorten the prefix and ask again.
        """
        computed, depth = self._computed.seconds, stored.num_blocks
        if computed is None:
            return depth
        # Seconds that are saved by restoring blocks up to some end.
        saved = max_saved = 0.0
        best = first
        for index in range(first, depth):
            saved += computed * self._block_size - self._seconds(stored, 0, index)
            if saved > max_saved:
                best, max_saved = index + 1, saved
        if best < depth:
            return best
        # Windows and states, which are needed only at the end.
        for group in groups[1:]:
            saved -= sum(self._seconds(stored, group.number, i) for i in group.view(depth))
        return depth if saved > 0 else first

    def is_worthwhile(self, level: Level) -> bool:
        """True unless blocks of full attention are computed faster than a level restores them."""
        computed, restored = self._computed.seconds, self._restored[level].seconds
        if computed is None or restored is None:
            return True
        return restored * self._block_bytes[0] < computed * self._block_size

    def bytes_within(self, seconds: float) -> float:
        """Returns the bytes that come back from host memory in a given time; infinite if it is
        unknown."""
        restored = self._restored[Level.MEMORY].seconds
        return seconds / restored if restored else float("inf")

    def _seconds(self, stored: StoredPrefix, group: int, index: int) -> float:
        """Seconds until a block is on the device; 0 if it is, or if the rate is unknown."""
        entry = stored.entry(group, index)
        if entry >= ABSENT:
            return 0.0
        restored = self._restored[self._level_of(-entry)].seconds
        return 0.0 if restored is None else restored * self._block_bytes[group]
