"""How long a piece of context one work item should cover."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# Threadgroups that keep a large GPU busy: four for each of 40 cores. A single sequence of 8k tokens
# and 8 KV heads reaches it in pieces of about 400 tokens.
THREADGROUPS = 160
# A shorter piece would cost more in partials and merging than it gains: at 256 tokens and a head
# dim of 128 in 16 bits, a query head's partial is half a percent of the keys and values read.
SHORTEST = 256
# A longer one would be waited for when all others are done.
LONGEST = 4096
STEP = 64  # the largest block size


def split_tokens(context_lens: Sequence[int] | np.ndarray, num_kv_heads: int) -> int:
    """The `split_tokens` of `build_plan` with which a GPU is busy.

    Args:
        context_lens: of the sequences that have query rows in this step.
        num_kv_heads: each work item is a threadgroup for every KV head.
    """
    tokens = int(np.asarray(context_lens, dtype=np.int64).sum())
    even = tokens * num_kv_heads // THREADGROUPS // STEP * STEP
    return min(max(even, SHORTEST), LONGEST)
