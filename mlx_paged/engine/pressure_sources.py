"""Sources of the system's memory pressure: macOS's pressure level and Linux's stall times.

- macOS: `kern.memorystatus_vm_pressure_level`, the level that Activity Monitor shows in color.
- Linux: PSI (`memory.pressure` of the process's control group, else `/proc/pressure/memory`), the
  share of the last ten seconds in which tasks waited for memory. The counters of `memory.events`
  are not used, because reading a large file also fills the page cache up to the limit.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import Protocol

from mlx_paged import cgroups, macos

logger = logging.getLogger(__name__)

_SYSCTL = "kern.memorystatus_vm_pressure_level"
_SYSTEM_FILE = "/proc/pressure/memory"
# Percent of the last ten seconds: in which some task waited for memory, and in which all did.
_SOME_WARNING = 10.0
_FULL_CRITICAL = 20.0


class PressureLevel(IntEnum):
    """How short of memory the system is."""

    NORMAL = 0
    WARNING = 1
    CRITICAL = 2


# Values of the sysctl, which are those of a dispatch source for memory pressure.
_MAC_LEVELS = {1: PressureLevel.NORMAL, 2: PressureLevel.WARNING, 4: PressureLevel.CRITICAL}


class PressureSource(Protocol):
    """Reports how short of memory the system is."""

    @property
    def name(self) -> str:
        """The file or value that it reads, for the log."""

    def read(self) -> PressureLevel:
        """Returns the current level. Any exception means that the source does not work here."""


class MacSource:
    """macOS's pressure level.

    Args:
        sysctl: Returns the integer value of a name.
    """

    name = _SYSCTL

    def __init__(self, sysctl: Callable[[str], int] | None = None) -> None:
        self._sysctl = macos.sysctl_integer if sysctl is None else sysctl

    def read(self) -> PressureLevel:
        """See `PressureSource`."""
        return mac_level(self._sysctl(_SYSCTL))


class LinuxSource:
    """A file with Linux's pressure stall information."""

    def __init__(self, path: str) -> None:
        self.name = path

    def read(self) -> PressureLevel:
        """See `PressureSource`."""
        return psi_level(Path(self.name).read_text())


def system_source() -> PressureSource | None:
    """Returns this system's source, after reading it once; None if none works."""
    try:
        source: PressureSource
        if sys.platform == "darwin":
            source = MacSource()
        else:
            own = Path(cgroups.OWN).read_text(errors="replace")
            source = LinuxSource(psi_file(own, lambda path: Path(path).is_file()))
        source.read()
    except Exception as error:
        logger.debug("this system does not tell its memory pressure: %s", error)
        return None
    return source


def mac_level(value: int) -> PressureLevel:
    """Returns the level of a value of macOS's sysctl.

    Raises:
        ValueError: An unknown value.
    """
    level = _MAC_LEVELS.get(value)
    if level is None:
        raise ValueError(f"{_SYSCTL} must be 1, 2 or 4 but is {value}")
    return level


def psi_level(text: str) -> PressureLevel:
    """Returns the level of a PSI file.

    Args:
        text: Lines like ``some avg10=1.53 avg60=0.87 avg300=0.31 total=53478``.

    Raises:
        ValueError: A line is missing.
    """
    found = dict(re.findall(r"^(some|full) avg10=(\d+\.?\d*)", text, re.MULTILINE))
    if set(found) != {"some", "full"}:
        raise ValueError(f"expected a line of some and a line of full with avg10 but got {text!r}")
    if float(found["full"]) >= _FULL_CRITICAL:
        return PressureLevel.CRITICAL
    if float(found["some"]) >= _SOME_WARNING:
        return PressureLevel.WARNING
    return PressureLevel.NORMAL


def psi_file(own: str, exists: Callable[[str], bool]) -> str:
    """Returns the PSI file of a process's control group, or the system's if the group has none.

    Args:
        own: Contents of `cgroups.OWN`.
    """
    groups = (f"{folder}/memory.pressure" for folder in cgroups.unified_folders(own))
    return next((path for path in groups if exists(path)), _SYSTEM_FILE)
