"""Waits for a GPU step without sleeping, unless that would disturb another process.

After a sleep, the host's work between two steps takes longer, because its core was powered down and
its caches are cold. GPU steps are so short that this slows every step, and the first token of a
request.
"""

from __future__ import annotations

import os

import mlx.core as mx

from mlx_paged import cgroups, runtime
from mlx_paged.platform import Platform

_MAX_SECONDS = 1.0  # seconds; a failed GPU never reports that it is done
_MIN_CPUS = 2.0  # The GPU's driver has threads, too.
_MIN_ASLEEP, _MAX_ASLEEP = 64, 4096


class ActiveWait:
    """Waits for arrays: actively, or not at all if another process wants the same core.

    On a shared core, a thread that never sleeps delays others, and the kernel gives it the core
    back late. So after a wait in which it lost the core, the caller sleeps in the next 64 waits,
    like MLX's own waits. If that happens again right away, it sleeps in the next 128, and so on.
    """

    def __init__(self) -> None:
        self._num_asleep = _MIN_ASLEEP
        self._left_asleep = 0

    @classmethod
    def on(cls, platform: Platform) -> ActiveWait | None:
        """Returns None if steps on this device should not be waited for actively."""
        return cls() if platform.has_cuda and usable_cpus() >= _MIN_CPUS else None

    def __call__(self, array: mx.array) -> None:
        """Returns when `array` is ready, or when the caller should block as usual."""
        if self._left_asleep > 0:
            self._left_asleep -= 1
        elif runtime.wait_actively(array, _MAX_SECONDS):
            self._num_asleep = _MIN_ASLEEP
        else:
            self._left_asleep = self._num_asleep
            self._num_asleep = min(2 * self._num_asleep, _MAX_ASLEEP)


def usable_cpus() -> float:
    """Returns the number of CPUs for this thread, by its affinity and its control group's limit."""
    # Macs have no such function, and no NVIDIA GPU.
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = cgroups.current().cpus
    return own if limit is None else min(own, limit)
