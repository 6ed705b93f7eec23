"""BackgroundShare: limits background requests while other requests are unfinished."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sized

from mlx_paged.core.config import SchedulerConfig
from mlx_paged.core.queues import SequenceQueue

# Background requests get 1/8 of the running sequences and step tokens while others are unfinished.
_SHARE = 8


class BackgroundShare:
    """The share of running sequences and step tokens that background requests may have.

    Args:
        running: The running sequences; background ones come last.
        requests: The unfinished requests.

    Attributes:
        num_requests: Number of unfinished background requests.
        max_seqs: Maximum running background sequences while other requests are unfinished.
        max_tokens: Maximum background prompt tokens per step in that time.
    """

    def __init__(self, config: SchedulerConfig, running: SequenceQueue, requests: Sized) -> None:
        self._running = running
        self._requests = requests
        self.num_requests = 0
        self.max_seqs = max(1, config.max_num_seqs // _SHARE)
        self.max_tokens = max(1, config.max_num_batched_tokens // _SHARE)

    @property
    def is_limited(self) -> bool:
        """True while both background and other requests are unfinished."""
        return 0 < self.num_requests < len(self._requests)

    @property
    def num_others_running(self) -> int:
        """Number of running sequences ahead of the background ones."""
        return bisect_left(self._running.items, True, key=lambda seq: seq.request.background)
