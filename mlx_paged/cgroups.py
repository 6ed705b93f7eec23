"""Memory and CPU limits from a Linux process's control groups, versions 1 and 2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

OWN = "/proc/self/cgroup"  # lists this process's groups
_ROOT = "/sys/fs/cgroup"
_NAMES = (
    *("memory.max", "cpu.max"),
    *("memory.limit_in_bytes", "cpu.cfs_quota_us", "cpu.cfs_period_us"),
)
# Version 1 writes "no limit" as the largest page multiple that fits in 63 bits.
_NO_LIMIT = 1 << 62


@dataclass(frozen=True)
class Limits:
    """The tightest limits of a process's group and its ancestors; None means no limit.

    Attributes:
        memory_bytes: Maximum memory.
        memory_file: The file with that limit.
        cpus: CPU time in CPUs: 1.5 means 150 ms per 100 ms.
    """

    memory_bytes: int | None = None
    memory_file: str | None = None
    cpus: float | None = None


def current() -> Limits:
    """Returns this process's limits; all None without control groups."""
    files = {OWN: _read(OWN)}
    for path in files_of(files[OWN]):
        files[path] = _read(path)
    return limits(files)


def limits(files: Mapping[str, str]) -> Limits:
    """Parses limits from captured files.

    Args:
        files: Contents by path: `OWN`, and the paths that `files_of` returns for it.
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
    """Lists the files that may limit a process, in its control group and all ancestors.

    In a container, the group's path often names a host folder; then only the root exists.

    Args:
        own: Contents of `OWN`.
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


def unified_folders(own: str) -> list[str]:
    """Lists the folders of a process's version 2 group and its ancestors, the group first.

    Args:
        own: Contents of `OWN`.
    """
    path = next((line[3:] for line in own.splitlines() if line.startswith("0::")), None)
    if path is None:
        return []
    parts = [part for part in path.split("/") if part]
    return [
        "/".join([root, *parts[:depth]])
        for root in (_ROOT, f"{_ROOT}/unified")
        for depth in range(len(parts), -1, -1)
    ]


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _share(quota: str, period: str) -> list[float]:
    """Returns [CPUs], or [] for no limit: "max" or "-1"."""
    if not quota.isdigit() or not period.isdigit() or int(period) == 0:
        return []
    return [int(quota) / int(period)]
