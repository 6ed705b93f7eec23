"""The machine: captures its own reports as text, and parses them.

`take` captures and `read` parses, so captures of one system can be parsed on another.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from mlx_paged import cgroups, macos

_SYSCTL = (
    *("hw.memsize", "hw.logicalcpu", "machdep.cpu.brand_string", "sysctl.proc_translated"),
    macos.WIRED_LIMIT,
)
COMMANDS: dict[str, dict[str, tuple[str, ...]]] = {
    "darwin": {
        "sysctl": ("sysctl", *_SYSCTL),
        "sw_vers": ("sw_vers",),
    },
    "linux": {
        "nvidia-smi": (
            "nvidia-smi",
            "--query-gpu=name,memory.total,driver_version,compute_cap",
            "--format=csv,noheader,nounits",
        ),
    },
}
_FILES = ("/proc/cpuinfo", "/proc/meminfo", cgroups.OWN, "/etc/os-release")
_SECONDS = 20.0  # timeout of a command, because a driver may hang


@dataclass(frozen=True)
class Disk:
    """Returns the directory of downloaded models, Hugging Face's cache."""

    folder: str
    free_bytes: int


@dataclass(frozen=True)
class Captures:
    """Outputs of commands and contents of files; unreadable ones are left out.

    Attributes:
        system: `sys.platform`: "linux" or "darwin".
        architecture: `platform.machine()`.
        affinity: CPUs that this process may run on; None if unknown.
    """

    system: str
    architecture: str
    commands: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    affinity: int | None = None
    disk: Disk | None = None


@dataclass(frozen=True)
class Gpu:
    """A GPU by Apple or NVIDIA; None for values that the machine does not report.

    Attributes:
        memory_bytes: Dedicated memory; None if it shares the main memory.
        compute_capability: NVIDIA's compute capability, such as "9.0".
    """

    name: str
    memory_bytes: int | None = None
    driver: str | None = None
    compute_capability: str | None = None


@dataclass(frozen=True)
class Machine:
    """Hardware and operating system; None for values that the machine does not report.

    Attributes:
        system: "macOS 15.1" or a Linux distribution.
        architecture: Processor architecture: "arm64", "aarch64", "x86_64".
        is_translated: True if Rosetta 2 runs this process (an x86 Python on an Apple chip).
        wired_limit_mb: On a Mac, the limit of the GPU's memory; 0 is the system's default.
    """

    system: str
    architecture: str
    chip: str | None
    logical_cores: int | None
    affinity: int | None
    memory_bytes: int | None
    available_bytes: int | None
    limits: cgroups.Limits
    gpus: tuple[Gpu, ...]
    is_translated: bool = False
    disk: Disk | None = None
    wired_limit_mb: int | None = None

    @property
    def usable_cpus(self) -> float | None:
        """CPU time available to this process, in CPUs."""
        known = [n for n in (self.logical_cores, self.affinity, self.limits.cpus) if n is not None]
        return min(known, default=None)

    @property
    def is_mac(self) -> bool:
        """True on macOS."""
        return self.system.startswith("macOS")


def take() -> Captures:
    """Captures the reports of this machine."""
    files = {path: text for path in _FILES if (text := _contents(path))}
    limiting = cgroups.files_of(files.get(cgroups.OWN, ""))
    files |= {path: text for path in limiting if (text := _contents(path))}
    commands = COMMANDS.get(sys.platform, {})
    can_ask = hasattr(os, "sched_getaffinity")
    return Captures(
        system=sys.platform,
        architecture=platform.machine(),
        commands={name: text for name, c in commands.items() if (text := _output(c)) is not None},
        files=files,
        affinity=len(os.sched_getaffinity(0)) if can_ask else None,
        disk=_disk(),
    )


def read(captures: Captures) -> Machine:
    """Parses captures; missing or unknown values become None, never an exception."""
    return _mac(captures) if captures.system == "darwin" else _linux(captures)


def _mac(captures: Captures) -> Machine:
    sysctl = _fields(captures.commands.get("sysctl", ""))
    version = _fields(captures.commands.get("sw_vers", "")).get("ProductVersion")
    chip = sysctl.get("machdep.cpu.brand_string")
    return Machine(
        system=f"macOS {version or ''}".strip(),
        architecture=captures.architecture,
        chip=chip,
        logical_cores=_integer(sysctl.get("hw.logicalcpu")),
        affinity=captures.affinity,
        memory_bytes=_integer(sysctl.get("hw.memsize")),
        available_bytes=None,
        limits=cgroups.Limits(),
        gpus=(Gpu(chip),) if chip and chip.startswith("Apple") else (),
        is_translated=sysctl.get("sysctl.proc_translated") == "1",
        disk=captures.disk,
        wired_limit_mb=_integer(sysctl.get(macos.WIRED_LIMIT)),
    )


def _linux(captures: Captures) -> Machine:
    files = captures.files
    cpuinfo = files.get("/proc/cpuinfo", "")
    memory = re.findall(r"^(\w+):\s+(\d+) kB", files.get("/proc/meminfo", ""), re.MULTILINE)
    sizes = {name: int(kib) * 1024 for name, kib in memory}
    release = _fields(files.get("/etc/os-release", ""), "=")
    return Machine(
        system=release.get("PRETTY_NAME", "Linux").strip('"'),
        architecture=captures.architecture,
        chip=_fields(cpuinfo).get("model name"),  # ARM's /proc/cpuinfo has no such field
        logical_cores=len(re.findall(r"^processor\s*:", cpuinfo, re.MULTILINE)) or None,
        affinity=captures.affinity,
        memory_bytes=sizes.get("MemTotal"),
        available_bytes=sizes.get("MemAvailable"),
        limits=cgroups.limits(files),
        gpus=nvidia_gpus(captures.commands.get("nvidia-smi", "")),
        disk=captures.disk,
    )


def nvidia_gpus(output: str) -> tuple[Gpu, ...]:
    """Parses nvidia-smi's lines of name, MiB of memory, driver and compute capability."""
    rows = [[cell.strip() for cell in line.split(",")] for line in output.splitlines()]
    return tuple(
        Gpu(
            name,
            memory_bytes=int(mib) << 20 if mib.isdigit() else None,
            driver=driver,
            compute_capability=capability if capability[:1].isdigit() else None,
        )
        # Other lines are errors: "NVIDIA-SMI has failed because ...".
        for name, mib, driver, capability in (row for row in rows if len(row) == 4)
    )


def _fields(text: str, separator: str = ":") -> dict[str, str]:
    """Parses ``name: value`` lines; keeps the first value of a repeated name."""
    pairs = [line.partition(separator) for line in text.splitlines()]
    return {name.strip(): value.strip() for name, found, value in reversed(pairs) if found}


def _integer(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() else None


def _disk() -> Disk | None:
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    try:
        cache = Path(os.environ.get("HF_HUB_CACHE") or f"{home}/hub").expanduser().absolute()
        existing = next(folder for folder in (cache, *cache.parents) if folder.exists())
        return Disk(str(cache), shutil.disk_usage(existing).free)
    except (OSError, RuntimeError):  # unreadable, or no home directory
        return None


def _contents(path: str) -> str | None:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return None


def _output(command: tuple[str, ...]) -> str | None:
    """Returns standard output; None if there is no such program. Ignores the exit status: sysctl
    fails if one name is unknown, after answering for all others."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout
