"""Relief: what an engine does when the system is short of memory.

========  ========================================================================================
warning   Evicts cached blocks and media features that no sequence uses, and returns their memory to
          the system, along with blocks in host memory, spare memory of blocks that travel, and
          MLX's cache of freed buffers. Sequences still get the blocks they need.
critical  The same, and refuses new requests. Running ones finish; waiting ones run one at a time.
normal    Shrunk pools grow back as soon as something needs the room.
========  ========================================================================================
"""

from __future__ import annotations

import logging

import mlx.core as mx

from mlx_paged import runtime
from mlx_paged.core import Scheduler
from mlx_paged.engine.offload.offloading import Offloading
from mlx_paged.engine.pool_memory import PoolMemory
from mlx_paged.engine.pressure import QUIET_SECONDS, MemoryPressure
from mlx_paged.engine.pressure_sources import PressureLevel
from mlx_paged.errors import MemoryPressureError
from mlx_paged.formatting import format_size
from mlx_paged.model import pages

logger = logging.getLogger(__name__)


class Relief:
    """Follows the memory pressure for one engine, on the calling thread.

    Attributes:
        pressure: The level, and how much was given back.
        pools: The memory of the engine's pools.
        offloading: Blocks in host memory; None if evicted blocks are dropped.
    """

    def __init__(
        self, pressure: MemoryPressure, pools: PoolMemory, offloading: Offloading | None = None
    ) -> None:
        self.pressure = pressure
        self.pools = pools
        self.offloading = offloading
        self._level = PressureLevel.NORMAL  # as of the last log line
        self._shrinks = False  # shrink the pools once no step is in flight
        self._next_shrink = float("-inf")  # earliest time
        self._given_back = 0  # bytes, since the last log line

    @property
    def is_due(self) -> bool:
        """True if `follow` has something to do."""
        return self.pressure.is_due or self._shrinks or self.pools.is_shrunk

    @property
    def refuses_requests(self) -> bool:
        """True while new requests are refused."""
        return self.pressure.level is PressureLevel.CRITICAL

    def check_admission(self) -> None:
        """Raises `MemoryPressureError` while new requests are refused."""
        if self.refuses_requests:
            raise MemoryPressureError(QUIET_SECONDS)

    def follow(self, scheduler: Scheduler, *, in_flight: bool) -> bool:
        """Reacts to the pressure. Call it between two steps.

        Args:
            in_flight: True if a step is in flight.

        Returns:
            True if the step in flight must be read before another one is launched.
        """
        kv = scheduler.kv
        if self.pressure.poll():
            scheduler.holds_admission = self.refuses_requests
            if self.pressure.level is not PressureLevel.NORMAL:
                self._give_back(scheduler)
            elif self.offloading is not None:
                self.offloading.resume()
        if self.pools.resizes:
            wanted = self._wanted_size(scheduler)
            if wanted != self.pools.num_blocks:
                if in_flight:
                    return True
                if self.offloading is not None:
                    self.offloading.prepare_resize()
                num_bytes = self.pools.resize(kv, wanted)
                if num_bytes > 0:
                    self._count(num_bytes)
                    self._next_shrink = self.pressure.clock() + QUIET_SECONDS
            self._shrinks = False
        self._log()
        return False

    def _give_back(self, scheduler: Scheduler) -> None:
        """Evicts what no sequence uses, and returns as much of its memory as possible now."""
        kv = scheduler.kv
        features = scheduler.encoder_cache.evict_idle(kv.pool.evaluated_step)
        self._count(self.pools.drop_features(features))
        is_first = self._level is PressureLevel.NORMAL
        if self.offloading is not None:  # first, so that it does not keep what is evicted
            self._count(self.offloading.shed())
        self.pressure.num_blocks += kv.evict_idle()
        self._shrinks = self.pools.resizes
        num_cached = mx.get_cache_memory()
        runtime.make_room()
        self._count(max(0, num_cached - mx.get_cache_memory()))
        if not self.pools.resizes:
            if is_first:
                self.pools.hold_pages(True)
                pages.trim_heap()
            self._count(self.pools.discard(kv))

    def _wanted_size(self, scheduler: Scheduler) -> int:
        """Returns the size that the full group's pool should have now."""
        pools, kv, num_running = self.pools, scheduler.kv, scheduler.num_running
        lacks_room = scheduler.has_unfinished and scheduler.lacks_room
        # Keep what the next step needs, or the pools would shrink and grow forever.
        if self._shrinks and not lacks_room and self.pressure.clock() >= self._next_shrink:
            min_blocks = pools.min_blocks(kv, num_running)
            if pools.is_worthwhile(min_blocks):
                return min_blocks
        if not pools.is_shrunk or not scheduler.has_unfinished:
            return pools.num_blocks
        is_short = lacks_room or pools.is_short(kv, num_running)
        if self.pressure.level is PressureLevel.NORMAL:
            # Grow before evicting blocks that could stay.
            is_short = is_short or pools.is_full(kv, num_running)
            return pools.full if is_short else pools.num_blocks
        if self.pressure.level is PressureLevel.CRITICAL and num_running:
            # Waiting sequences keep waiting.
            is_short = pools.is_short(kv, num_running)
        return pools.grown() if is_short else pools.num_blocks

    def _count(self, num_bytes: int) -> None:
        self.pressure.num_bytes += num_bytes
        self._given_back += num_bytes

    def _log(self) -> None:
        """Logs each change of level once, after its memory has been given back."""
        level = self.pressure.level
        if level is self._level:
            return
        before, self._level = self._level, level
        gave = f"gave back {format_size(self._given_back)} of unused memory"
        if level is PressureLevel.CRITICAL:
            logger.warning(
                "the system is critically short of memory: %s; new requests are refused", gave
            )
        elif level > before:
            logger.warning("the system is short of memory: %s", gave)
        elif level is PressureLevel.WARNING:
            logger.warning("the system is less short of memory: new requests are accepted again")
        else:
            self.pools.hold_pages(False)
            logger.warning("the system has memory again: %s since it was short", gave)
            self._given_back = 0
