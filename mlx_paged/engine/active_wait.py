"""Waiting for a GPU's step without sleeping, where that disturbs nobody.

What the host does between two steps takes longer after it has slept: its core was off, and the
caches of that are empty. For steps as short as a GPU's this shows in every one, and most of all in
the first token of a request.
"""

from __future__ import annotations

import os

import mlx.core as mx

from mlx_paged import cgroups, ops
from mlx_paged.platform import Platform

_LONGEST = 1.0  # seconds; a GPU that failed never says that it is done
_FEWEST_CPUS = 2.0  # as the GPU's driver has threads too
_FEWEST_ASLEEP, _MOST_ASLEEP = 64, 4096


class ActiveWait:
    """Waits for arrays: actively, or, where another process wants the same core, not at all.

    To a process on the same core a thread that does not sleep is a bad neighbour, and gets the core
    back late. So after a wait in which it lost the core the caller sleeps (as MLX's own waits do)
    in the next 64; 128 where that happens again at once, and so on.
    """

    def __init__(self, platform: Platform) -> None:
        self._is_wanted = platform.has_cuda and usable_cpus() >= _FEWEST_CPUS
        self._num_asleep = _FEWEST_ASLEEP
        self._left_asleep = 0

    def __call__(self, array: mx.array) -> None:
        """Returns when `array` is there, or when whoever needs it should wait as usual."""
        if not self._is_wanted:
            return
        if self._left_asleep > 0:
            self._left_asleep -= 1
        elif ops.wait_actively(array, _LONGEST):
            self._num_asleep = _FEWEST_ASLEEP
        else:
            self._left_asleep = self._num_asleep
            self._num_asleep = min(2 * self._num_asleep, _MOST_ASLEEP)


def usable_cpus() -> float:
    """CPUs that this thread may run on, or the share of them that its control group allows."""
    # (Not on a Mac, where no GPU is NVIDIA's.)
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = cgroups.current().cpus
    return own if limit is None else min(own, limit)
