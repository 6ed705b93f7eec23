"""All-reduces over GPU memory that the ranks of one machine share.

A decode step has two all-reduces per layer, and NCCL takes several times as long as a kernel that
reads the memory of all GPUs (`csrc/peer_sum.h`). Either all ranks connect or none does: each tells
the others whether it has a buffer and could map theirs. Sums that do not fit stay with MLX.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import mlx.core as mx
import numpy as np

from mlx_paged.extension import ext
from mlx_paged.platform import Platform

logger = logging.getLogger(__name__)

#: Environment variable: 0 leaves all all-reduces to MLX.
PEER_SUMS = "MLX_PAGED_PEER_SUMS"
_SIZES = (2, 4, 8)  # group sizes with a kernel
_TOKENS_PER_CHUNK = 4  # int32 tokens in 16 bytes, the unit of sums in shared memory
_HANDLE_BYTES = 64
_MACHINE_BYTES = 16


class PeerMemory(Protocol):
    """Allocates GPU memory that processes share. Methods raise `RuntimeError` on failure."""

    def make(self) -> tuple[int, bytes]:
        """Allocates a buffer; returns its address and the handle for other processes."""

    def open(self, handle: bytes) -> int:
        """Maps another process's buffer; returns its address here."""


class CudaMemory:
    """Memory that CUDA shares between processes."""

    def make(self) -> tuple[int, bytes]:
        """See `PeerMemory`."""
        buffer = ext.make_peer_buffer()
        return buffer, ext.peer_buffer_handle(buffer)

    def open(self, handle: bytes) -> int:
        """See `PeerMemory`."""
        return int(ext.open_peer_buffer(handle))


#: All-gather of bytes: takes this rank's, returns every rank's. All have the same length.
Exchange = Callable[[bytes], list[bytes]]


def connect_peers(group: mx.distributed.Group) -> None:
    """Lets all-reduces of a group use memory that its GPUs share, if they can.

    Every rank must call it. It replaces `mx.distributed.all_sum`, the name that model code calls,
    with `summed`.
    """
    if not Platform.current().has_cuda or group.size() not in _SIZES:
        return

    def exchange(own: bytes) -> list[bytes]:
        shown = np.zeros((group.size(), len(own)), dtype=np.int32)
        shown[group.rank()] = np.frombuffer(own, dtype=np.uint8)
        shown = np.array(mx.distributed.all_sum(mx.array(shown), group=group))
        return [row.astype(np.uint8).tobytes() for row in shown]

    reason = share_memory(CudaMemory(), group, exchange)
    if reason is None:
        mx.distributed.all_sum = summed
    else:
        logger.warning("rank %d uses NCCL for all sums: %s", group.rank(), reason)


def share_memory(memory: PeerMemory, group: mx.distributed.Group, exchange: Exchange) -> str | None:
    """Lets `summed` use memory that a group's GPUs share, after a trial; else returns the reason.

    Every rank must call it; it returns None on all ranks or on none.
    """
    buffers = mapped_buffers(memory, group.rank(), exchange)
    if isinstance(buffers, str):
        return buffers
    ext.use_peer_memory(group, buffers)
    # On some machines without NVLink, a GPU can map memory whose writes it never sees.
    if all(is_right[0] for is_right in exchange(bytes([ext.try_peer_memory(group)]))):
        return None
    ext.forget_peer_memory(group)
    return "the GPUs do not see each other's writes"


def mapped_buffers(memory: PeerMemory, rank: int, exchange: Exchange) -> list[int] | str:
    """Returns the address of every rank's buffer in this process, or the reason why some rank
    cannot map them. Every rank must call it; either all return addresses or none does."""
    reason, own, handle = "", 0, bytes(_HANDLE_BYTES)
    if os.environ.get(PEER_SUMS) == "0":
        reason = f"{PEER_SUMS} is 0"
    else:
        try:
            own, handle = memory.make()
        except RuntimeError as error:
            reason = str(error)
    shown = exchange(bytes([not reason]) + _machine() + handle)
    missing = [number for number, each in enumerate(shown) if not each[0]]
    if missing:
        return reason or f"ranks {missing} have no memory to share"
    if len({each[1 : 1 + _MACHINE_BYTES] for each in shown}) > 1:
        return "the ranks are on several machines"
    buffers = []
    for number, each in enumerate(shown):
        try:
            handle = each[1 + _MACHINE_BYTES :]
            buffers.append(own if number == rank else memory.open(handle))
        except RuntimeError as error:
            reason = reason or f"rank {number}: {error}"
    missing = [number for number, each in enumerate(exchange(bytes([not reason]))) if not each[0]]
    return buffers if not missing else reason or f"ranks {missing} cannot map the others' memory"


_all_sum_of_mlx = mx.distributed.all_sum


def summed(
    x: mx.array,
    *,
    group: mx.distributed.Group | None = None,
    stream: mx.Stream | mx.ThreadLocalStream | mx.Device | mx.DeviceType | None = None,
) -> mx.array:
    """Replaces `mx.distributed.all_sum`: uses shared memory if the group has it and `x` fits."""
    if group is None:
        return _all_sum_of_mlx(x, stream=stream)
    result: mx.array = ext.all_sum(x, group=group, stream=stream)
    return result


def shared_tokens(tokens: mx.array, group: mx.distributed.Group) -> mx.array:
    """Broadcasts rank 0's tokens ``[n]`` int32; the other ranks must pass zeros."""
    count = tokens.shape[0]
    if missing := -count % _TOKENS_PER_CHUNK:  # Shared memory needs whole chunks.
        tokens = mx.pad(tokens, (0, missing))
    return mx.distributed.all_sum(tokens, group=group)[:count]


def _machine() -> bytes:
    """Returns an id that differs between machines, and between boots of one."""
    try:
        name = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        name = socket.gethostname()
    return hashlib.sha256(name.encode()).digest()[:_MACHINE_BYTES]
