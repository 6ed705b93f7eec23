"""Records which processes run, with `perf`, so that a benchmark can leave out what others disturb.

Needs Linux and the right to trace the scheduler.
"""

from __future__ import annotations

import bisect
import contextlib
import re
import subprocess
from collections.abc import Collection, Iterator
from pathlib import Path

_SWITCH = re.compile(r"\s*(-?\d+)/(-?\d+)\s+\[(\d+)\]\s+([\d.]+):")
# Upper bound of the processors whose current run may have begun before a given time.
_NUM_PROCESSORS = 256


@contextlib.contextmanager
def recorded(file: Path) -> Iterator[None]:
    """Records to a file, which is complete when the block has ended."""
    command = ["perf", "record", "-q", "-k", "CLOCK_MONOTONIC", "-a", "-e", "sched:sched_switch",
               "-o", str(file), "--", "cat"]  # fmt: skip
    with subprocess.Popen(command, stdin=subprocess.PIPE):  # Closing stdin ends it.
        yield


class OtherPrograms:
    """The times at which processors ran other processes, as given by `time.monotonic`.

    Args:
        file: See `recorded`.
        own: Ids of the processes that are measured.
    """

    def __init__(self, file: Path, own: Collection[int]) -> None:
        command = ["perf", "script", "-i", str(file), "-F", "pid,tid,cpu,time", "--ns"]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        runs: list[tuple[float, float]] = []
        last: dict[str, float] = {}  # by processor
        for line in printed.splitlines():
            found = _SWITCH.match(line)
            if found is None:
                continue
            pid, tid, cpu, now = int(found[1]), int(found[2]), found[3], float(found[4])
            # An event is of the thread that leaves its processor. The idle one is 0.
            if cpu in last and tid != 0 and pid not in own:
                runs.append((last[cpu], now))
            last[cpu] = now
        runs.sort()
        self._begins = [begin for begin, _ in runs]
        self._ends = [end for _, end in runs]

    def share(self, begin: float, end: float) -> float:
        """Returns the sum of their run times between two times, divided by the time between."""
        first = max(0, bisect.bisect_left(self._begins, begin) - _NUM_PROCESSORS)
        last = bisect.bisect_left(self._begins, end)
        runs = zip(self._begins[first:last], self._ends[first:last], strict=True)
        return sum(max(0.0, min(end, e) - max(begin, b)) for b, e in runs) / (end - begin)
