"""Prefilling: computes prompts for decode engines, and copies their blocks while it does.

A prompt is a request for one token. Between two steps, the blocks that the last one has filled are
copied off the device; a thread of the transfer sends them::

      step 7            step 8            step 9
      [ chunk 1 ]       [ chunk 2 ]       [ chunk 3 ]
                  copy 1            copy 2            copy 3, windows, state
                  '- send -----     '- send -----     '- send -----
"""

from __future__ import annotations

import itertools
import logging
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mlx_paged.core import BlockTables, KVManager, PrefixNode, Request, Sequence
from mlx_paged.core.kv.tier import ABSENT
from mlx_paged.core.kv.tree import TOKEN_TYPE
from mlx_paged.engine.offload.buffers import Buffers
from mlx_paged.engine.offload.disk_level import CopyOut
from mlx_paged.engine.offload.names import PrefixNames
from mlx_paged.engine.roles.stats import TransferStats
from mlx_paged.engine.sampling_params import SamplingParams
from mlx_paged.errors import MlxPagedError
from mlx_paged.offload.segments import Block
from mlx_paged.transfer.server import Outgoing, PrefillServer
from mlx_paged.transfer.wire import PrefillRequest

if TYPE_CHECKING:  # It imports the statistics of offloading, and with them this.
    from mlx_paged.engine.intake import CheckedRequest, Intake

logger = logging.getLogger(__name__)

_PARAMS = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


class NewPrompt(NamedTuple):
    """A prompt that waits for the engine's thread."""

    outgoing: Outgoing
    checked: CheckedRequest


@dataclass(eq=False)
class _Job:
    """A prompt whose blocks are sent.

    Attributes:
        depth: Full blocks of the prompt, after which the decode engine continues.
        num_queued: Leading blocks of the first group that are queued, or need not be sent.
        pending: (node, group) to copy, in order.
        num_copying: Blocks that are being copied, and their bytes.
        is_computed: True once all blocks are queued.
    """

    outgoing: Outgoing
    sequence: Sequence
    depth: int
    num_queued: int
    pending: deque[tuple[PrefixNode, int]] = field(default_factory=deque)
    num_copying: int = 0
    num_copying_bytes: int = 0
    is_computed: bool = False

    @property
    def name(self) -> str:
        return self.sequence.request.request_id

    @property
    def num_held_bytes(self) -> int:
        """Bytes of its blocks that are off the device, or on their way there."""
        return self.outgoing.num_waiting_bytes + self.num_copying_bytes


class Prefilling:
    """Implements `transfer.server.Prefiller` for an engine.

    Args:
        identity: Digest of the model and its cache.
        server: Takes the prompts.
        block_bytes: Bytes of a block of each group.
        copy_out: Copies a block from the device or from host memory.

    Attributes:
        stats: What was sent so far.
        max_tokens: Maximum tokens of a prompt.
        wakes: Called, on any thread, when the engine has something to do.
    """

    def __init__(
        self,
        identity: bytes,
        server: PrefillServer,
        block_bytes: list[int],
        block_size: int,
        copy_out: CopyOut,
        buffers: Buffers,
    ) -> None:
        self.server = server
        self.stats = TransferStats()
        self.max_tokens = 0
        self.wakes: Callable[[], object] = lambda: None
        self._identity = identity
        self._block_bytes = block_bytes
        self._block_size = block_size
        self._copy_out = copy_out
        self._buffers = buffers
        self._intake: Intake | None = None
        self._ids = map("prefill-{}".format, itertools.count())
        self._new: deque[NewPrompt] = deque()
        self._jobs: dict[str, _Job] = {}
        self._kv: KVManager | None = None
        self._names: PrefixNames | None = None

    def attach(self, kv: KVManager, names: PrefixNames) -> None:
        """Connects it to the newest KV manager; the previous one was discarded."""
        self.end_all("the engine was repaired after an error")
        self._kv, self._names = kv, names

    def start(self, intake: Intake, max_tokens: int) -> None:
        """Begins to take prompts of up to `max_tokens` tokens."""
        self._intake, self.max_tokens = intake, max_tokens
        self.server.start(self)

    # On the thread of a connection.

    def refusal(self, request: PrefillRequest) -> str | None:
        if request.identity != self._identity:
            return "it has another model, another format of the cache, or another version"
        if request.num_tokens % self._block_size != 1 or request.num_tokens == 1:
            return f"full blocks of {self._block_size} tokens and one token are expected"
        if request.first_block > request.num_tokens // self._block_size:
            return "the first block is after the end"
        return None

    def begin(self, outgoing: Outgoing) -> None:
        assert self._intake is not None
        given = outgoing.request
        try:
            checked = self._intake.check(
                next(self._ids),
                array(TOKEN_TYPE, given.tokens),
                _PARAMS,
                priority=given.priority,
                background=given.background,
            )
        except MlxPagedError as error:
            outgoing.end(str(error))
            return
        # The salt has the format of the cache in it already.
        self._new.append(NewPrompt(outgoing, replace(checked, cache_salt=given.salt)))
        self.wake()

    def wake(self) -> None:
        self.wakes()

    # On the engine's thread.

    @property
    def has_new(self) -> bool:
        """True if prompts wait to be added, or a connection has ended."""
        return bool(self._new) or any(job.outgoing.is_gone for job in self._jobs.values())

    def take_new(self) -> NewPrompt | None:
        """Takes the next prompt that waits to be added to the engine."""
        return self._new.popleft() if self._new else None

    def add(self, outgoing: Outgoing, request: Request) -> None:
        """Begins to send the blocks of a request that was added to the engine."""
        depth, first = outgoing.request.num_tokens // self._block_size, outgoing.request.first_block
        [sequence] = request.sequences
        self._jobs[request.request_id] = _Job(outgoing, sequence, depth, first)
        self.stats.num_prompts += 1

    def take_gone(self) -> list[str]:
        """Takes the requests whose decode engines are gone."""
        gone = [name for name, job in self._jobs.items() if job.outgoing.is_gone]
        for name in gone:
            self._end(self._jobs[name], "the decode engine is gone")
        return gone

    def settle(self, tables: BlockTables, depth: int) -> None:
        """See `Tier.settle`."""
        request = getattr(tables.owner, "request", None)
        job = None if request is None else self._jobs.get(request.request_id)
        if job is None or job.is_computed or tables.tip is None or depth < job.depth:
            return
        assert self._kv is not None and self._names is not None
        self._names.name(tables.tip)
        self._queue(job, tables.tip)
        nodes = tables.tip.ancestor(job.depth).path()
        for group in self._kv.groups[1:]:
            job.pending.extend((nodes[i], group.number) for i in group.view(job.depth))
        job.is_computed = True

    def _queue(self, job: _Job, tip: PrefixNode) -> None:
        """Queues the blocks of the first group that were filled since the last time."""
        assert self._names is not None
        end = min(tip.depth, job.depth)
        if end <= job.num_queued:
            return
        self._names.name(tip)
        new, node = [], tip.ancestor(end)
        while node.depth > job.num_queued:
            new.append((node, 0))
            assert node.parent is not None
            node = node.parent
        job.pending.extend(reversed(new))
        job.num_queued = end

    def advance(self, most: int) -> int:
        """Copies up to `most` bytes of blocks, if there is room for them; returns how many."""
        num_bytes, share = 0, self._share
        for job in list(self._jobs.values()):
            sequence = job.sequence
            if sequence.tables is not None and sequence.tables.tip is not None:
                self._queue(job, sequence.tables.tip)
            while job.pending and num_bytes < most and self._can_copy(job, share):
                num_bytes += self._copy(job)
            if sequence.is_finished and not job.is_computed:
                self._end(job, f"the prompt was ended: {sequence.finish_reason}")
            elif job.is_computed and not job.pending and not job.num_copying:
                self._end(job, None)
        return num_bytes

    @property
    def _share(self) -> int:
        """Bytes that one of the prompts may have off the device."""
        return self.server.share_of(max(1, len(self._jobs)))

    def _can_copy(self, job: _Job, share: int) -> bool:
        _, group = job.pending[0]
        size = job.num_copying_bytes + self._block_bytes[group]
        return not job.num_held_bytes or job.outgoing.has_room(size, share)

    def _copy(self, job: _Job) -> int:
        node, group = job.pending.popleft()
        size, digest = self._block_bytes[group], node.digest
        stats, slot = self.stats, job.outgoing.take_slot(size)
        if slot is None:
            data = self._buffers.take(size)
            give: Callable[[], None] = partial(self._buffers.give, data)
        else:
            data, give = np.frombuffer(slot.data, dtype=np.uint8), slot.free
        assert digest is not None

        def copied() -> None:
            if self._jobs.get(job.name) is job:
                job.num_copying -= 1
                job.num_copying_bytes -= size
            stats.add(1, size, 0 if slot is None else size)
            job.outgoing.add(Block(digest, group, data.data, give), slot)

        job.num_copying += 1
        job.num_copying_bytes += size
        if node.entries[group] == ABSENT or not self._copy_out(node, group, data, copied):
            give()
            self._end(job, "a block was evicted before it was sent")
            job.pending.clear()
        return size

    def _end(self, job: _Job, failure: str | None) -> None:
        if self._jobs.pop(job.name, None) is not None:
            self.stats.num_failed_prompts += failure is not None
            job.outgoing.end(failure)

    @property
    def can_copy(self) -> bool:
        """True if `advance` has something to do in an engine without work."""
        share = self._share
        return any(
            # Copies must be collected.
            job.num_copying or not job.pending or self._can_copy(job, share)
            for job in self._jobs.values()
            if job.is_computed
        )

    def end_all(self, reason: str) -> None:
        """Ends the transfers of all prompts."""
        for job in list(self._jobs.values()):
            self._end(job, reason)
