"""Installed packages, read from metadata without importing any of them."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata

# Packages listed in a bug report.
_PACKAGES = (
    *("mlx-paged", "mlx", "mlx-metal", "mlx-cpu", "mlx-cuda-12", "mlx-cuda-13", "mlx-lm"),
    *("nanobind", "numpy", "scipy-openblas32", "transformers", "rich", "typer"),
)
# Environment variables that affect this package, and those whose values are hidden.
_VARIABLES = re.compile(r"(MLX_|OPENBLAS_|OMP_NUM_THREADS$|CUDA_VISIBLE_DEVICES$|LD_PRELOAD$)")
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD")


@dataclass(frozen=True)
class Requirement:
    """A required package and its installed version; None if it is missing."""

    name: str
    specifier: str
    installed: str | None
    is_met: bool


@dataclass(frozen=True)
class Software:
    """Versions and settings of this interpreter.

    Attributes:
        packages: Installed version by distribution.
        requirements: mlx-paged itself and its requirements, without the extras.
        environment: MLX_PAGED_*, MLX_* and a few others; values of secrets are hidden.
    """

    python: str
    executable: str
    packages: Mapping[str, str]
    requirements: tuple[Requirement, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


def installed() -> Software:
    """Collects the facts about this interpreter."""
    return Software(
        python=f"{platform.python_version()} ({platform.python_implementation()})",
        executable=sys.executable,
        packages={name: v for name in _PACKAGES if (v := _version(name)) is not None},
        requirements=tuple(_requirements()),
        environment=environment(os.environ),
    )


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables that affect this package."""
    return {
        name: "(set)" if _SECRET.search(name) else value
        for name, value in sorted(variables.items())
        if _VARIABLES.match(name)
    }


def _requirements() -> Iterator[Requirement]:
    own = _version("mlx-paged")
    yield Requirement("mlx-paged", "", own, own is not None)
    try:
        from packaging.requirements import Requirement as Parsed
    except ImportError:  # mlx-lm requires it, so those packages are missing anyway
        return
    try:
        lines = metadata.requires("mlx-paged") or []
    except metadata.PackageNotFoundError:  # a checkout that was never installed
        return
    for parsed in map(Parsed, lines):
        if parsed.marker is None or parsed.marker.evaluate({"extra": ""}):
            found = _version(parsed.name)
            is_met = found is not None and parsed.specifier.contains(found, prereleases=True)
            yield Requirement(parsed.name, str(parsed.specifier), found, is_met)


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
