"""The executable invariants of the scheduler."""

from __future__ import annotations

from collections.abc import Mapping

from mlx_paged.core.planner import Planner
from mlx_paged.core.request import Request, Sequence
from mlx_paged.errors import IntegrityError


def check_queues(planner: Planner, requests: Mapping[str, Request]) -> None:
    """Every unfinished sequence is in the one queue its status names, and its numbers are in order.

    Raises:
        IntegrityError: With the first disagreement found.
    """
    alive = [s for request in requests.values() for s in request.sequences if not s.is_finished]
    if {s.seq_id: s for s in alive} != planner.sequences:
        raise IntegrityError("the sequences by id are not those of the unfinished requests")
    if len(alive) != len(planner.running) + len(planner.waiting):
        raise IntegrityError(
            f"{len(planner.running)} running + {len(planner.waiting)} waiting sequences, "
            f"but {len(alive)} are unfinished"
        )
    if len(planner.running) > planner.config.max_num_seqs:
        raise IntegrityError(f"{len(planner.running)} sequences run")
    for seq in alive:
        if seq not in (planner.running if seq.is_running else planner.waiting):
            raise IntegrityError(f"{seq!r} is not in the queue of its status")
        if seq.is_running:
            _check_running(planner, seq)
        elif seq.num_computed_tokens or seq.num_scheduled_tokens:
            raise IntegrityError(f"{seq!r} waits, and yet holds computed tokens")


def _check_running(planner: Planner, seq: Sequence) -> None:
    if not seq.num_computed_tokens <= seq.num_scheduled_tokens <= len(seq.tokens) + 1:
        raise IntegrityError(f"{seq!r}: computed <= scheduled <= tokens + 1 does not hold")
    size = planner.kv.block_size
    blocks = planner.kv.blocks_of(seq.seq_id)
    if len(blocks) * size < max(seq.num_scheduled_tokens, len(seq.tokens) - 1):
        raise IntegrityError(f"{seq!r} has only {len(blocks)} blocks of {size}")
    # What this sequence is going to write into is its own.
    for block in blocks[seq.num_scheduled_tokens // size :]:
        if planner.kv.pool.ref_count(block) != 1 or planner.kv.pool.is_cached(block):
            raise IntegrityError(f"{seq!r} will write to block {block}, which is not its own")
    for group in planner.kv.groups.windows:
        for block in group.blocks_of(seq.seq_id)[seq.num_scheduled_tokens // size :]:
            if group.pool.ref_count(block) != 1 or group.pool.is_cached(block):
                raise IntegrityError(f"{seq!r} will write to a window's block {block}, not its own")
