"""Offloading: connects an engine's KV store to host memory and disk, and moves bytes between steps.

Blocks are copied a few at a time, so that running sequences do not stall. They leave the device
ahead of their eviction, once their sequence is done with them, and come back for a prompt that was
admitted with its own blocks and waits::

      step 7                   step 8                   step 9
      [decodes]                [decodes]                [decodes + the rest of the prompt]
               copy 32 MiB              copy 20 MiB

Blocks worth keeping on disk are copied in the same way; a thread writes them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from weakref import finalize

from mlx_paged.core import KVManager, MemoryTier, PrefixNode, Request, RestoreRates, StepBatch
from mlx_paged.engine.offload.buffers import MAX_SPARE_BYTES, ROLE_SPARE_BYTES, Buffers
from mlx_paged.engine.offload.disk_level import DiskLevel
from mlx_paged.engine.offload.host_memory import HostMemory
from mlx_paged.engine.offload.levels import Levels, level_of
from mlx_paged.engine.offload.names import PrefixNames
from mlx_paged.engine.offload.restorer import Restorer
from mlx_paged.engine.offload.stats import OffloadStats
from mlx_paged.engine.roles.decode import RemoteLevel
from mlx_paged.engine.roles.prefill import Prefilling
from mlx_paged.engine.roles.stats import TransferStats
from mlx_paged.model.block_bytes import BlockBytes, Bytes
from mlx_paged.offload.store import BlockStore
from mlx_paged.transfer.receiver import Receiver
from mlx_paged.transfer.server import PrefillServer

# Maximum bytes to restore between two steps while other sequences run, and maximum seconds.
_STEP_BYTES, _STEP_SECONDS = 32 << 20, 0.002
# The same if nothing runs. An abort waits this long.
_IDLE_BYTES, _IDLE_SECONDS = 512 << 20, 0.25
# Maximum bytes to copy off the device between two steps, or per second of the last step if that is
# more: a long prompt fills many blocks in one step.
_COPY_STEP_BYTES = 8 << 20
_COPY_BYTES_PER_SECOND = 512 << 20
# The same for other engines, which wait for them: as much as `StagedBlockBytes` reads at once.
_SEND_STEP_BYTES = 240 << 20
# The same for an idle engine.
_COPY_IDLE_BYTES = 64 << 20
# Maximum bytes of evicted blocks that one step copies while other sequences run.
_EVICT_STEP_BYTES = 16 << 20
# Maximum seconds that an idle call waits for the disk.
_DRAIN_SECONDS = 30.0
# A step measures the speed of prompts if it has at least this many prompt tokens, and at most one
# decode for this many of them.
_MIN_PROMPT_TOKENS, _TOKENS_PER_DECODE = 128, 16


class Offloading:
    """The host memory and the disk of one engine.

    Args:
        capacity: Maximum bytes of host memory; 0 disables it.
        store: The blocks on disk; None without a disk.
        identity: Digest of the model and its cache, for the disk and for other engines.
        receiver: Client of the prefill engine, on a decode engine.
        min_prefill_tokens: Prompts with fewer uncached tokens are computed locally.
        server: Receives prompts, on a prefill engine.

    Attributes:
        prefilling: Computes prompts for other engines; None without that role.
        rates: Speeds of restoring blocks and of computing prompts. It outlives KV managers.
    """

    def __init__(
        self,
        blocks: BlockBytes,
        capacity: int,
        block_size: int,
        store: BlockStore | None = None,
        identity: bytes = b"",
        *,
        receiver: Receiver | None = None,
        min_prefill_tokens: int = 0,
        server: PrefillServer | None = None,
    ) -> None:
        self._blocks = blocks
        self._capacity = capacity
        self._block_size = block_size
        self._store = store
        self._identity = identity
        self._past = OffloadStats()
        self.rates = RestoreRates(blocks.num_bytes, block_size, level_of)
        has_role = receiver is not None or server is not None
        self._buffers = Buffers(ROLE_SPARE_BYTES if has_role else MAX_SPARE_BYTES)
        self._restorer = Restorer(blocks, store, self._buffers, self.rates)
        self._memory = HostMemory(blocks, capacity)
        self._levels: Levels | None = None
        self._advanced_at = 0.0
        self._receiver = receiver
        self._min_prefill_tokens = min_prefill_tokens
        self._received = TransferStats()
        self.prefilling: Prefilling | None = None
        if server is not None:
            self.prefilling = Prefilling(
                identity, server, blocks.num_bytes, block_size, self._copy_out, self._buffers
            )
            finalize(self, server.close)
        if receiver is not None:
            finalize(self, receiver.close)
        if store is not None:
            # Also runs at interpreter exit, where it writes the copied blocks.
            finalize(self, store.close)

    def new_tier(self) -> Levels:
        """Makes a tier for a new KV manager; the previous one was discarded."""
        if self._levels is not None:
            self._past = self.stats
            self._blocks.abandon()
            self._restorer.release_used()
            if self._store is not None:
                self._store.unpin_all()
            if self._levels.remote is not None:
                self._levels.remote.close()
        self._memory = HostMemory(self._blocks, self._capacity)
        sizes, size = self._blocks.num_bytes, self._block_size
        memory = MemoryTier(self._memory, sizes, self._capacity, size)
        self._levels = Levels(memory, self._store, self.rates)
        return self._levels

    def attach(self, kv: KVManager) -> None:
        """Connects the disk and other engines to the KV manager that has the newest tier."""
        assert self._levels is not None and kv.tier is self._levels
        names = PrefixNames(self._identity, self._block_size, kv)
        if self.prefilling is not None:
            self.prefilling.attach(kv, names)
            self._levels.prefilling = self.prefilling
        if self._receiver is not None:
            self._levels.remote = RemoteLevel(
                self._identity,
                kv,
                names,
                self._blocks.num_bytes,
                self._min_prefill_tokens,
                self._receiver,
                self._buffers,
                self._restorer.arrived.set,
                self._received,
                self.rates,
            )
        if self._store is not None:
            self._levels.disk = DiskLevel(
                self._store,
                names,
                self._blocks.num_bytes,
                self._block_size,
                kv,
                self._copy_out,
                self._buffers,
            )

    def _copy_out(
        self, node: PrefixNode, group: int, out: Bytes, on_read: Callable[[], None]
    ) -> bool:
        """Copies a block from host memory or from the device, see `CopyOut`."""
        assert self._levels is not None
        entry = node.entries[group]
        key = self._levels.memory.copy_of(node, group) if entry > 0 else -entry
        if key and self._memory.has(key):
            out[:] = self._memory[key]
            on_read()
        elif entry > 0:
            self._blocks.read(group, entry, out, on_read)
        else:
            return False
        return True

    @property
    def has_other_formats(self) -> bool:
        """True if the disk has blocks of this model only in other cache formats."""
        return self._store is not None and self._store.has_other_formats

    @property
    def _disk(self) -> DiskLevel | None:
        return None if self._levels is None else self._levels.disk

    @property
    def _remote(self) -> RemoteLevel | None:
        return None if self._levels is None else self._levels.remote

    def on_added(self, request: Request) -> None:
        """Observes each new request. Its prompt may be sent to the prefill engine."""
        if self._remote is not None:
            self._remote.begin(request)

    def advance(self, kv: KVManager, *, is_idle: bool) -> None:
        """Moves a bounded number of bytes. Call it between two steps.

        Args:
            is_idle: True if no sequence runs meanwhile.
        """
        assert self._levels is not None
        now, before = time.perf_counter(), self._advanced_at
        self._advanced_at = now
        self._levels.memory.allowance = None if is_idle else _EVICT_STEP_BYTES
        self._blocks.collect(None if is_idle else kv.pool.evaluated_step)
        max_copied = max(_COPY_STEP_BYTES, int((now - before) * _COPY_BYTES_PER_SECOND))
        if self._remote is not None:
            self._remote.tidy()
        if self.prefilling is not None:
            max_copied -= self.prefilling.advance(_SEND_STEP_BYTES)
        if kv.restorations:
            if is_idle:
                max_bytes, seconds = _IDLE_BYTES, _IDLE_SECONDS
            else:
                # A device with its own memory accepts the bytes immediately and moves them later.
                max_bytes = int(min(_STEP_BYTES, self.rates.bytes_within(_STEP_SECONDS)))
                seconds = _STEP_SECONDS
            self._restorer.advance(
                kv, self._memory, self._remote, max(1, max_bytes), seconds, is_idle=is_idle
            )
        elif self._levels.has_pending and max_copied > 0:
            self._levels.copy_ahead(max_copied)

    def note_step(self, batch: StepBatch, seconds: float) -> None:
        """Learns the speed of prompts from a step.

        Args:
            seconds: See `StepResult`.
        """
        if batch.has_drafts:
            return
        num_tokens = sum(length for length in batch.query_lens if length > 1)
        num_decodes = batch.num_tokens - num_tokens
        if num_tokens >= max(_MIN_PROMPT_TOKENS, _TOKENS_PER_DECODE * num_decodes):
            self.rates.note_computed(num_tokens, seconds)

    def begin_reads(self, step: int) -> None:
        """Begins to copy evicted blocks. Call it before launching `step`, which may reuse them."""
        self._blocks.begin_reads(step)

    def prepare_resize(self) -> None:
        """Finishes all copies off the device, and starts none until the next `advance`, because
        the pools are about to be replaced."""
        assert self._levels is not None
        self._blocks.collect()
        self._levels.memory.allowance = 0

    @property
    def has_idle_work(self) -> bool:
        """True if `advance_idle` has something to do."""
        if self.prefilling is not None and self.prefilling.can_copy:
            return True
        if self._remote is not None and not self._remote.is_tidy:
            return True
        return self._levels is not None and self._levels.has_pending

    def advance_idle(self) -> None:
        """Copies blocks off the device, in an idle engine."""
        if self._levels is not None:
            max_bytes = _COPY_IDLE_BYTES
            if self._remote is not None:
                self._remote.tidy()
            if self.prefilling is not None:
                max_bytes -= self.prefilling.advance(max_bytes)
            self._levels.copy_ahead(max(0, max_bytes))
            self._blocks.collect()

    def drain(self) -> None:
        """Copies all pending blocks. May block until the disk has caught up."""
        if self._levels is None:
            return
        while self._levels.memory.has_pending:
            self._levels.memory.copy_ahead(_COPY_IDLE_BYTES)
            self._blocks.collect()
        if self._disk is not None:
            self._disk.drain(_DRAIN_SECONDS, self._blocks.collect)

    def flush(self) -> bool:
        """Waits until everything is on disk; returns False if that takes too long."""
        self.drain()
        return self._store is None or self._store.flush()

    def distrust(self) -> None:
        """Deletes the files that this process wrote, because a step computed a NaN. Stops sending
        prompts in progress to other engines."""
        if self.prefilling is not None:
            self.prefilling.end_all("a step computed a NaN")
        if self._disk is not None:
            self._disk.distrust()

    def shed(self) -> int:
        """Gives all unused memory back; returns the bytes. Until `resume`, evicted blocks are not
        stored in memory."""
        num_bytes = self._buffers.give_back()
        if self.prefilling is not None:
            num_bytes += self.prefilling.server.give_back()
        if self._levels is not None and self._levels.memory.capacity:
            self._levels.memory.limit(0)
            num_bytes += self._memory.give_back()
        return num_bytes

    def resume(self) -> None:
        """Stores blocks in memory again."""
        if self._levels is not None:
            self._levels.memory.limit(self._capacity)

    @property
    def stats(self) -> OffloadStats:
        """The statistics at this moment."""
        assert self._levels is not None, "an engine makes its KV store before anything else"
        tier, past, store = self._levels.memory, self._past, self._store
        return OffloadStats(
            memory_bytes=tier.num_bytes,
            memory_capacity=tier.capacity,
            num_stored_blocks=past.num_stored_blocks + tier.num_stored,
            num_lost_blocks=past.num_lost_blocks + tier.num_lost,
            num_skipped_blocks=past.num_skipped_blocks + tier.num_skipped,
            disk_bytes=0 if store is None else store.num_bytes,
            num_written_bytes=0 if store is None else store.num_written_bytes,
            num_read_bytes=0 if store is None else store.num_read_bytes,
            num_damaged_blocks=0 if store is None else store.num_damaged,
            disk_warnings={} if store is None else dict(store.warnings.counts),
            transfers=self._transfers,
        )

    @property
    def _transfers(self) -> TransferStats | None:
        """A snapshot of what was sent or received."""
        if self.prefilling is not None:
            return replace(self.prefilling.stats)
        return None if self._receiver is None else replace(self._received)
