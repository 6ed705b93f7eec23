"""Checks the invariants that hold between a scheduler's steps; tests check them after each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mlx_paged.core.adapters import AdapterSlots
from mlx_paged.core.encoder_cache import EncoderCache
from mlx_paged.core.kv.manager import KVManager
from mlx_paged.core.outputs import SchedulerOutput
from mlx_paged.core.queues import SequenceQueue, WaitingQueue
from mlx_paged.core.request import Request, Sequence
from mlx_paged.errors import IntegrityError


def check_integrity(
    requests: Mapping[str, Request],
    running: SequenceQueue,
    waiting: WaitingQueue,
    kv: KVManager,
    *,
    adapters: AdapterSlots,
    encoder_cache: EncoderCache,
    in_flight: Iterable[SchedulerOutput],
    max_num_seqs: int,
) -> None:
    """Checks queues, requests and the KV store against each other.

    Args:
        requests: The unfinished ones.
        in_flight: The steps that are not committed.

    Raises:
        IntegrityError: They contradict each other.
    """
    kv.check_integrity()
    waiting.check_integrity()
    adapters.check_integrity([s.adapter_slot for s in running if s.adapter_slot])
    pinned = [s.pinned_features for s in running if s.pinned_features is not None]
    encoder_cache.check_integrity(pinned)
    alive = [s for r in requests.values() for s in r.sequences if not s.is_finished]
    num_unfinished = [request.num_unfinished for request in requests.values()]
    if min(num_unfinished, default=1) < 1 or len(alive) != sum(num_unfinished):
        raise IntegrityError("an unfinished request miscounts its sequences")
    if len(alive) != len(running) + len(waiting):
        raise IntegrityError(
            f"{len(running)} running + {len(waiting)} waiting sequences, "
            f"but {len(alive)} are unfinished"
        )
    if len(running) > max_num_seqs:
        raise IntegrityError(f"{len(running)} sequences run")
    for seq in alive:
        if seq not in (running if seq.is_running else waiting):
            raise IntegrityError(f"{seq!r} is not in the queue of its status")
        if seq.is_running:
            num_drafts = 0  # in flight
            for output in in_flight:
                if seq in output.sequences:
                    num_drafts += output.batch.num_drafts[output.sequences.index(seq)]
            _check_running(seq, num_drafts, kv, adapters)
        elif seq.num_computed_tokens or seq.num_scheduled_tokens or seq.tables is not None:
            raise IntegrityError(f"{seq!r} waits but holds computed tokens")


def _check_running(seq: Sequence, num_drafts: int, kv: KVManager, adapters: AdapterSlots) -> None:
    end = len(seq.tokens) + max(1, num_drafts)
    if not seq.num_computed_tokens <= seq.num_scheduled_tokens <= end:
        raise IntegrityError(f"{seq!r}: computed <= scheduled <= {end} does not hold")
    if seq.tables is None:
        raise IntegrityError(f"{seq!r} runs without block tables")
    adapter = seq.request.adapter
    if adapter is not None and adapters.adapter_in(seq.adapter_slot) != adapter:
        raise IntegrityError(f"the adapter slot of {seq!r} holds another adapter")
    size, num_blocks = kv.block_size, len(seq.tables.blocks)
    if num_blocks * size < max(seq.num_scheduled_tokens, len(seq.tokens) - 1):
        raise IntegrityError(f"{seq!r} has only {num_blocks} blocks of {size}")
    # A sequence writes only to its own blocks.
    restoration = seq.tables.restoration
    start = seq.num_scheduled_tokens if restoration is None else restoration.num_tokens
    for group in kv.attention:
        blocks = seq.tables.attention[group.number].blocks
        for block in blocks[start // size :]:
            if not group.is_written_by_one(block):
                raise IntegrityError(f"{seq!r} will write to block {block}, not its own")
