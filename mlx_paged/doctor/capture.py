"""Takes down what the machine says of itself, as text; nothing is understood here."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from mlx_paged import cgroups

_SYSCTL = (
    *("hw.model", "hw.memsize", "hw.physicalcpu", "hw.logicalcpu", "hw.nperflevels"),
    *("hw.perflevel0.name", "hw.perflevel0.physicalcpu"),
    *("hw.perflevel1.name", "hw.perflevel1.physicalcpu"),
    *("machdep.cpu.brand_string", "sysctl.proc_translated", "iogpu.wired_limit_mb"),
)
COMMANDS: dict[str, dict[str, tuple[str, ...]]] = {
    "darwin": {
        "sysctl": ("sysctl", *_SYSCTL),
        "sw_vers": ("sw_vers",),
        "system_profiler": ("system_profiler", "SPDisplaysDataType", "-json"),
    },
    "linux": {
        "nvidia-smi": (
            "nvidia-smi",
            "--query-gpu=name,memory.total,driver_version,compute_cap",
            "--format=csv,noheader,nounits",
        ),
        "nvidia-smi-header": ("nvidia-smi",),
    },
}
FILES = {
    "linux": ("/proc/cpuinfo", "/proc/meminfo", "/proc/self/cgroup", "/etc/os-release"),
}
_SECONDS = 20.0  # system_profiler takes one or two


@dataclass(frozen=True)
class Captures:
    """Outputs of commands and contents of files; what could not be had is absent.

    Attributes:
        system: `sys.platform`: "linux" or "darwin".
        architecture: `platform.machine()`.
        kernel: `platform.release()`.
        affinity: CPUs that this process may run on; None: nobody knows.
    """

    system: str
    architecture: str
    kernel: str = ""
    commands: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    affinity: int | None = None


def take() -> Captures:
    """Asks this machine."""
    files = {path: text for path in FILES.get(sys.platform, ()) if (text := _read(path))}
    for path in cgroups.files_of(files.get(cgroups.OWN, "")):
        if text := _read(path):
            files[path] = text
    commands = COMMANDS.get(sys.platform, {})
    outputs = {name: text for name, c in commands.items() if (text := _output(c)) is not None}
    can_ask = hasattr(os, "sched_getaffinity")
    return Captures(
        system=sys.platform,
        architecture=platform.machine(),
        kernel=platform.release(),
        commands=outputs,
        files=files,
        affinity=len(os.sched_getaffinity(0)) if can_ask else None,
    )


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return None


def _output(command: tuple[str, ...]) -> str | None:
    """Standard output; None where there is no such program. (sysctl fails for one unknown name,
    after it answered for all others.)"""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout
