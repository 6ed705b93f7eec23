"""From captured text to a machine, on any system."""

from __future__ import annotations

from mlx_paged.doctor import linux, mac
from mlx_paged.doctor.capture import Captures
from mlx_paged.doctor.machine import Machine


def machine(captures: Captures) -> Machine:
    """Understands captured outputs; what is missing or strange becomes None, never an exception."""
    return mac.machine(captures) if captures.system == "darwin" else linux.machine(captures)
