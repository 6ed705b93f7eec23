"""How many tokens of context one work item should cover at most.

A row's result is summed in the order of its pieces, so they follow from the row alone: from its
context and from how many rows share its pass over it. Whatever else is in the batch, its bits are
the same.
"""

from __future__ import annotations

import os

import mlx.core as mx
import numpy as np

# On a CPU, a core is busy with one item, and a longer one would be waited for when all others are
# done. On a GPU this bounds the pieces of a prefill chunk.
LONGEST = 4096
# Decodes and drafts on a GPU. 8192 tokens are 22 pieces: 176 threadgroups at 8 KV heads, where
# four for each of 40 cores are 160. A query head's partial, written once and read once, is half a
# percent of its piece's keys and values at a head dim of 128 in 16 bits.
SHORTEST = 384
# More pieces of a long context fill no GPU better, and merging them takes time.
MOST_PIECES = 48
MOST_DRAFT_ROWS = 8  # as in csrc/launch_attention.cpp
# A short prefill chunk behind a long cached prefix has few items, and each would have to go through
# all of the prefix. 16 pieces of them at 8 KV heads are 128 threadgroups; a chunk of 16 items has
# as many by itself. Every piece leaves partials of all its rows, so that a step of short chunks
# needs room for up to eight times its rows.
PREFILL_PIECES = 16  # of all items of a chunk together
MOST_PREFILL_PIECES = 8  # of an item
SHORTEST_PREFILL = 512


def split_tokens(num_tokens: np.ndarray, num_rows: np.ndarray, num_items: np.ndarray) -> np.ndarray:
    """Most tokens of a piece, for each item.

    Args:
        num_tokens: that the rows of an item see.
        num_rows: query rows of the item.
        num_items: into which the rows of its sequence are cut.
    """
    longest = np.full_like(num_tokens, LONGEST)
    if not _on_gpu():
        return longest
    pieces = np.maximum(-(-num_tokens // MOST_PIECES), SHORTEST)
    shares = np.clip(PREFILL_PIECES // num_items, 1, MOST_PREFILL_PIECES)
    chunks = np.clip(-(-num_tokens // shares), SHORTEST_PREFILL, LONGEST)
    return np.where(num_rows <= MOST_DRAFT_ROWS, pieces, chunks)


def _on_gpu() -> bool:
    simulated = os.environ.get("MLX_PAGED_SIM") == "1"
    return simulated or mx.default_device() == mx.Device(mx.gpu)
