"""Lets the ranks of one machine add up in memory that their GPUs share.

A decode step has two sums per layer, and NCCL's take several times as long as a kernel that reads
the memory of all GPUs (`csrc/peer_sum.h`). All ranks connect, or none: each tells the others
whether it has a buffer, and whether it could map theirs. Sums that do not fit stay with MLX.
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

#: Environment variable: 0 leaves all sums to MLX.
PEER_SUMS = "MLX_PAGED_PEER_SUMS"
_SIZES = (2, 4, 8)  # of groups that kernels serve
_TOKENS_OF_CHUNK = 4  # in the unit of sums in shared memory, 16 bytes
_HANDLE_BYTES = 64
_MACHINE_BYTES = 16


class PeerMemory(Protocol):
    """Memory of this process's GPU, and of other processes'. All raise `RuntimeError`."""

    def make(self) -> tuple[int, bytes]:
        """Makes a buffer; returns its address, and what another process needs to map it."""

    def open(self, handle: bytes) -> int:
        """Maps the buffer of another process; returns its address."""


class CudaMemory:
    """Memory that CUDA shares between processes."""

    def make(self) -> tuple[int, bytes]:
        """See `PeerMemory`."""
        buffer = ext.make_peer_buffer()
        return buffer, ext.peer_buffer_handle(buffer)

    def open(self, handle: bytes) -> int:
        """See `PeerMemory`."""
        return int(ext.open_peer_buffer(handle))


#: Returns the bytes of every rank, given this rank's. Each rank gives as many.
Exchange = Callable[[bytes], list[bytes]]


def connect_peers(group: mx.distributed.Group) -> None:
    """Lets the sums of a group use memory that its GPUs share, if they can.

    Every rank must call it. From then on, `mx.distributed.all_sum` is `summed`, as model code calls
    it by that name.
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
        logger.warning("rank %d adds up over NCCL alone: %s", group.rank(), reason)


def share_memory(memory: PeerMemory, group: mx.distributed.Group, exchange: Exchange) -> str | None:
    """Lets `summed` use memory that a group's GPUs share, after a trial; or returns why it cannot.

    Every rank must call it, and it returns None on all ranks or on none.
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
    """Returns the address of every rank's buffer in this process, or the reason why a rank cannot
    map them all. Every rank must call it, and all return addresses or none does."""
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
    """`mx.distributed.all_sum`, in shared memory where the group has some and `x` fits."""
    if group is None:
        return _all_sum_of_mlx(x, stream=stream)
    result: mx.array = ext.all_sum(x, group=group, stream=stream)
    return result


def shared_tokens(tokens: mx.array, group: mx.distributed.Group) -> mx.array:
    """Rank 0's tokens ``[n]`` int32 on every rank, if the others give zeros."""
    count = tokens.shape[0]
    if missing := -count % _TOKENS_OF_CHUNK:  # Otherwise MLX would add them.
        tokens = mx.pad(tokens, (0, missing))
    return mx.distributed.all_sum(tokens, group=group)[:count]


def _machine() -> bytes:
    """Bytes that differ between machines, and between starts of one."""
    try:
        name = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        name = socket.gethostname()
    return hashlib.sha256(name.encode()).digest()[:_MACHINE_BYTES]
