"""RemoteLevel: the blocks of prompts that a prefill engine computes for this one.

A long prompt is sent to the prefill engine when it arrives. It is admitted with its own blocks,
and waits in a restoration while they are filled, as for a disk::

      prefill engine    [ chunk ][ chunk ][ chunk ]
                           \\         \\        \\          records over a socket
      this engine           [ blocks ][ blocks ][ blocks ][ the last tokens ][ answer ...
      other sequences   [ decode ][ decode ][ decode ][ decode ][ decode ]

If anything fails, the prompt is computed here.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mlx_paged.core import KVManager, PrefixQuery, Request, RestoreRates
from mlx_paged.core.kv.stored import LookUp
from mlx_paged.core.kv.tree import TOKEN_BYTES
from mlx_paged.engine.offload.buffers import Buffers
from mlx_paged.engine.offload.names import PrefixNames
from mlx_paged.engine.roles.stats import TransferStats
from mlx_paged.offload.store import FIRST_KEY as FIRST_DISK_KEY
from mlx_paged.transfer.receiver import Arrived, Incoming, Receiver
from mlx_paged.transfer.wire import PrefillRequest

logger = logging.getLogger(__name__)

#: Keys are numbered from here, so that they differ from those of the other levels.
FIRST_KEY = FIRST_DISK_KEY << 8
# Keys of one prompt.
_KEY_BITS = 32


class _Place(NamedTuple):
    """The block that a key refers to."""

    number: int  # of the transfer
    group: int
    block: int  # its number in the prompt


@dataclass(eq=False)
class _Transfer:
    """A prompt whose blocks are on their way.

    Attributes:
        names: Digests of its full blocks before the last token.
        views: Indices of the blocks of each group that are sent.
        num_pins: Blocks that a restoration waits for.
        is_used: True once a block was taken, which no other restoration can have.
        has_failed: True once it is known that some block will not arrive.
    """

    number: int
    request: Request
    names: list[bytes]
    views: list[range]
    incoming: Incoming
    num_pins: int = 0
    is_used: bool = False
    has_failed: bool = False


class RemoteLevel:
    """Requests prompts from the prefill engine, and restores the blocks that have arrived.

    Args:
        identity: Digest of the model and its cache.
        kv: The KV manager whose prompts these are.
        block_bytes: Bytes of a block of each group.
        min_tokens: Prompts with fewer tokens to compute are not sent.
        on_change: Called when blocks have arrived, on any thread.
        stats: Counts transfers; it outlives the KV manager.
        rates: Decides whether the other engine is fast enough.
    """

    def __init__(
        self,
        identity: bytes,
        kv: KVManager,
        names: PrefixNames,
        block_bytes: list[int],
        min_tokens: int,
        receiver: Receiver,
        buffers: Buffers,
        on_change: Callable[[], None],
        stats: TransferStats,
        rates: RestoreRates,
    ) -> None:
        self._identity = identity
        self._kv = kv
        self._names = names
        self._block_bytes = block_bytes
        self._min_tokens = min_tokens
        self._receiver = receiver
        self._buffers = buffers
        self._on_change = on_change
        self._stats = stats
        self._rates = rates
        self._next_number = 0
        self._transfers: dict[int, _Transfer] = {}
        self._by_name: dict[bytes, _Transfer] = {}  # by the digest of the last block
        self._named: Counter[bytes] = Counter()  # digests of all blocks on their way

    # Beginning.

    def begin(self, request: Request) -> None:
        """Sends a new request's prompt to the prefill engine, if that is worth it."""
        query = request.sequences[0].query
        if query is None or not self._may_be_sent(request):
            return
        size = self._kv.block_size
        names, first_block = self._needed(query)
        if len(names) * size + 1 - first_block * size < self._min_tokens:
            return
        if self._receiver.is_paused:
            request.transfer_failure = "the prefill engine failed a moment ago"
        elif not self._rates.is_remote_worthwhile():
            request.transfer_failure = "the prefill engine is too slow at the moment"
        else:
            self._start(request, query, names, first_block)

    def _needed(self, query: PrefixQuery) -> tuple[list[bytes], int]:
        """Returns the digests of a prompt's blocks, and how many of these need not be sent."""
        size = self._kv.block_size
        depth = query.num_tokens // size
        num_tokens = self._kv.prefixes.source(query, True, None, 0).num_tokens(size)
        names: list[bytes] = []
        if query.num_tokens + 1 - num_tokens < self._min_tokens:
            return names, 0
        while len(names) < depth:
            name = self._names.of_query(query, len(names))
            assert name is not None, "a prompt without media has names"
            names.append(name)
        first_block = self._kv.match(query).num_full_blocks
        if self._kv.states is None:
            # Another prompt with the same beginning waits for these, and this one for that.
            while first_block < depth and self._named[names[first_block]]:
                first_block += 1
        return names, first_block

    def _may_be_sent(self, request: Request) -> bool:
        """True if the other engine can compute the prompt: it only gets tokens."""
        is_text = request.prompt_media is None and request.adapter is None
        return is_text and request.read_prefix_cache and not request.boundaries

    def _start(
        self, request: Request, query: PrefixQuery, names: list[bytes], first_block: int
    ) -> None:
        depth = len(names)
        # An engine computes at least one token after the blocks. Nothing depends on that one.
        end = depth * self._kv.block_size * TOKEN_BYTES
        tokens = query.tokens[:end] + bytes(TOKEN_BYTES)
        asked = PrefillRequest(
            self._identity, tokens, query.salt, first_block, request.priority, request.background
        )
        incoming = Incoming(
            asked,
            {name: number for number, name in enumerate(names)},
            self._block_bytes,
            lambda size: self._buffers.take(size).data,
            lambda data: self._buffers.give(np.frombuffer(data, dtype=np.uint8)),
            self._on_change,
        )
        views = [group.view(depth) for group in self._kv.groups]
        views[0] = range(first_block, depth)
        number = self._next_number
        self._next_number += 1
        transfer = _Transfer(number, request, names, views, incoming)
        self._transfers[number] = self._by_name[names[-1]] = transfer
        self._named.update(names[first_block:])
        self._stats.num_prompts += 1
        self._receiver.start(incoming)

    # The tier's part; see `core.kv.tier.Tier`.

    @property
    def is_empty(self) -> bool:
        return not self._transfers

    def look_up(self, query: PrefixQuery) -> LookUp | None:
        depth = query.num_tokens // self._kv.block_size
        name = self._names.of_query(query, depth - 1) if depth and self._transfers else None
        transfer = None if name is None else self._by_name.get(name)
        if transfer is None or transfer.is_used or transfer.incoming.failure is not None:
            return None
        views, first = transfer.views, FIRST_KEY + (transfer.number << _KEY_BITS)

        def key(group: int, index: int) -> int:
            return first + group * depth + index if index in views[group] else 0

        return key

    def _place(self, key: int) -> _Place:
        number, rest = divmod(key - FIRST_KEY, 1 << _KEY_BITS)
        transfer = self._transfers.get(number)
        depth = 1 if transfer is None else len(transfer.names)
        return _Place(number, *divmod(rest, depth))

    def pin(self, key: int) -> None:
        self._transfers[self._place(key).number].num_pins += 1

    def unpin(self, key: int) -> None:
        self._transfers[self._place(key).number].num_pins -= 1

    # Restoring.

    def take(self, key: int) -> Arrived | None:
        """Returns the content of a pinned key; None if it has not arrived."""
        number, group, block = self._place(key)
        transfer = self._transfers[number]
        found = transfer.incoming.take(group, block)
        if found is None:
            # Transfers of sequences that wait for this one may hold all other threads.
            self._receiver.urge(transfer.incoming)
            return None
        transfer.is_used = True
        return found

    def has_failed(self, key: int) -> bool:
        """True if the content of a pinned key will not arrive."""
        transfer = self._transfers[self._place(key).number]
        if transfer.incoming.is_over:
            transfer.is_used = True
            self._note_failure(transfer)
        return transfer.has_failed

    def tidy(self) -> None:
        """Ends the transfers that failed, and those that no sequence waits for."""
        for transfer in list(self._transfers.values()):
            if transfer.num_pins:
                continue
            if transfer.incoming.failure is not None:
                self._note_failure(transfer)
            waits = any(s.tables is None and not s.is_finished for s in transfer.request.sequences)
            # An urged one whose sequence has lost its blocks would keep its thread from others.
            is_useless = transfer.is_used or transfer.incoming.is_urged or not waits
            if transfer.has_failed or is_useless:
                self._end(transfer)

    @property
    def is_tidy(self) -> bool:
        """False if `tidy` would end a transfer of a request that has ended."""
        return all(t.request.num_unfinished for t in self._transfers.values())

    def _note_failure(self, transfer: _Transfer) -> None:
        if transfer.has_failed:
            return
        transfer.has_failed = True
        reason = transfer.incoming.failure or "the prefill engine did not send all blocks"
        request = transfer.request
        request.transfer_failure = reason
        self._stats.num_failed_prompts += 1
        logger.warning("[decode] prompt of %s is computed here: %s", request.request_id, reason)

    def _end(self, transfer: _Transfer) -> None:
        del self._transfers[transfer.number]
        if self._by_name.get(transfer.names[-1]) is transfer:
            del self._by_name[transfer.names[-1]]
        self._named -= Counter(transfer.names[transfer.views[0].start :])
        incoming = transfer.incoming
        self._stats.add(incoming.num_blocks, incoming.num_bytes, incoming.num_shared_bytes)
        if incoming.seconds is not None:
            # A prompt that was given up would have taken longer.
            num_tokens = len(transfer.views[0]) * self._kv.block_size
            self._rates.note_remote(num_tokens, incoming.seconds)
        incoming.cancel()

    def close(self) -> None:
        """Ends all transfers, because the KV manager was discarded."""
        for transfer in list(self._transfers.values()):
            self._end(transfer)
