"""Limits of the control groups that a Linux process is in, versions 1 and 2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

OWN = "/proc/self/cgroup"  # names the groups of this process
_ROOT = "/sys/fs/cgroup"
_NAMES = (
    *("memory.max", "cpu.max"),
    *("memory.limit_in_bytes", "cpu.cfs_quota_us", "cpu.cfs_period_us"),
)
# Version 1 writes "no limit" as the largest multiple of a page that fits 63 bits.
_NO_LIMIT = 1 << 62


@dataclass(frozen=True)
class Limits:
    """The tightest of a process's own group and all above it; None: no limit.

    Attributes:
        memory_bytes: Most memory.
        memory_file: The file with that limit.
        cpus: CPU time in CPUs: 1.5 is 150 ms in every 100 ms.
    """

    memory_bytes: int | None = None
    memory_file: str | None = None
    cpus: float | None = None


def current() -> Limits:
    """Those of this process; none where there are no control groups."""
    files = {OWN: _read(OWN)}
    for path in files_of(files[OWN]):
        files[path] = _read(path)
    return limits(files)


def limits(files: Mapping[str, str]) -> Limits:
    """Reads them from captured files.

    Args:
        files: contents by path; those of `OWN` and of `files_of` it.
    """
    memory: dict[str, int] = {}
    cpus: list[float] = []
    for path in files_of(files.get(OWN, "")):
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
    return Limits(
        memory_bytes=None if file is None else memory[file],
        memory_file=file,
        cpus=min(cpus, default=None),
    )


def files_of(own: str) -> list[str]:
    """Files that may limit a process, in its own control group and in all above it.

    Args:
        own: contents of `OWN`.

    In a container the group's path often names a folder of the host; then only the root exists.
    """
    folders: dict[str, None] = {_ROOT: None}
    for line in own.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        mounts = [c for c in controllers.split(",") if c in ("memory", "cpu", "cpuacct")]
        roots = [f"{_ROOT}/{controllers}", *(f"{_ROOT}/{c}" for c in mounts)]
        if not controllers:  # version 2, alone or beside version 1
            roots = [_ROOT, f"{_ROOT}/unified"]
        elif not mounts:
            continue
        parts = [part for part in path.split("/") if part]
        for root in roots:
            for depth in range(len(parts) + 1):
                folders["/".join([root, *parts[:depth]])] = None
    return [f"{folder}/{name}" for folder in folders for name in _NAMES]


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _share(quota: str, period: str) -> list[float]:
    """["max" and "-1" mean no limit.]"""
    if not quota.isdigit() or not period.isdigit() or int(period) == 0:
        return []
    return [int(quota) / int(period)]
