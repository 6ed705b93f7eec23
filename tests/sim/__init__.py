"""A simulator that executes Metal kernels on the CPU; see docs/dev/metal-without-a-mac.md."""

from .abi import Buffer, Report, SimFault, SimLaunchError, Traffic
from .coverage import Coverage
from .library import METAL, SimCompileError, SimLibrary, launcher
from .toolchain import missing

__all__ = [
    "METAL",
    "Buffer",
    "Coverage",
    "Report",
    "SimCompileError",
    "SimFault",
    "SimLaunchError",
    "SimLibrary",
    "Traffic",
    "launcher",
    "missing",
]
