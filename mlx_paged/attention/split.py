"""How many tokens of context one work item should cover at most."""

from __future__ import annotations

import os

import mlx.core as mx
import numpy as np

# A CPU core is busy with one item; a longer piece would be waited for when all others are done.
LONGEST = 4096
# Threadgroups that keep a large GPU busy: four for each of 40 cores.
THREADGROUPS = 160
# A shorter piece would cost more in partials and merging than it gains: at 256 tokens and a head
# dim of 128 in 16 bits, a query head's partial is one percent of the keys and values read.
SHORTEST = 256
STEP = 64  # the largest block size
# A work item is a threadgroup for every KV head. Layers share a plan, which knows no heads; most
# models have at least these.
KV_HEADS = 4


def split_tokens(num_tokens: np.ndarray, num_kv_heads: int = KV_HEADS) -> int:
    """Most tokens of an item with which the device is busy.

    Args:
        num_tokens: of each item, were none split.
    """
    if not _on_gpu():
        return LONGEST
    even = int(num_tokens.sum()) * num_kv_heads // THREADGROUPS // STEP * STEP
    return min(max(even, SHORTEST), LONGEST)


def _on_gpu() -> bool:
    simulated = os.environ.get("MLX_PAGED_SIM") == "1"
    return simulated or mx.default_device() == mx.Device(mx.gpu)
