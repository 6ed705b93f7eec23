"""Limits of the control groups that a Linux process is in, versions 1 and 2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mlx_paged.doctor.capture import CGROUPS, cgroup_files

# Version 1 writes "no limit" as the largest multiple of a page that fits 63 bits.
_NO_LIMIT = 1 << 62


@dataclass(frozen=True)
class Limits:
    """The tightest of a process's own group and all above it; None: no limit.

    Attributes:
        memory_bytes: Most memory.
        memory_file: Which file says so.
        cpus: CPU time in CPUs: 1.5 is 150 ms in every 100 ms.
        root_memory_bytes: What the mounted root's file says. (The engine reads only that one.)
    """

    memory_bytes: int | None = None
    memory_file: str | None = None
    cpus: float | None = None
    root_memory_bytes: int | None = None


def limits(files: Mapping[str, str]) -> Limits:
    """Reads them from captured files.

    Args:
        files: contents by path; "/proc/self/cgroup" names the groups.
    """
    memory: dict[str, int] = {}
    cpus: list[float] = []
    for path in cgroup_files(files.get("/proc/self/cgroup", "")):
        text = files.get(path, "").strip()
        folder, _, name = path.rpartition("/")
        if name in ("memory.max", "memory.limit_in_bytes"):
            if text.isdigit() and int(text) < _NO_LIMIT:
                memory[path] = int(text)
        elif name == "cpu.max":
            quota, _, period = text.partition(" ")
            cpus += _share(quota, period or "100000")
        elif name == "cpu.cfs_quota_us":
            cpus += _share(text, files.get(f"{folder}/cpu.cfs_period_us", "").strip())
    file = min(memory, key=lambda path: memory[path], default=None)
    roots = [
        memory[path]
        for path in (f"{CGROUPS}/memory.max", f"{CGROUPS}/memory/memory.limit_in_bytes")
        if path in memory
    ]
    return Limits(
        memory_bytes=None if file is None else memory[file],
        memory_file=file,
        cpus=min(cpus, default=None),
        root_memory_bytes=min(roots, default=None),
    )


def _share(quota: str, period: str) -> list[float]:
    """["max" and "-1" mean no limit.]"""
    if not quota.isdigit() or not period.isdigit() or int(period) == 0:
        return []
    return [int(quota) / int(period)]
