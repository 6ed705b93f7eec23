"""Installed packages, read from metadata: none of them is imported."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata

# Packages of a bug report.
_PACKAGES = (
    *("mlx-paged", "mlx", "mlx-metal", "mlx-cpu", "mlx-cuda-12", "mlx-cuda-13", "mlx-lm"),
    *("nanobind", "numpy", "scipy-openblas32", "transformers", "rich", "typer"),
)
# Variables that affect this package, and those whose values are not shown.
_VARIABLES = re.compile(r"(MLX_|OPENBLAS_|OMP_NUM_THREADS$|CUDA_VISIBLE_DEVICES$|LD_PRELOAD$)")
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD")


@dataclass(frozen=True)
class Requirement:
    """A required package and its installed version, or None."""

    name: str
    specifier: str
    installed: str | None
    is_met: bool


@dataclass(frozen=True)
class Software:
    """Versions and settings of this interpreter.

    Attributes:
        packages: Installed version by distribution.
        requirements: mlx-paged itself and what it needs, without the extras.
        environment: MLX_PAGED_*, MLX_* and a few others; values of secrets are hidden.
    """

    python: str
    executable: str
    packages: Mapping[str, str]
    requirements: tuple[Requirement, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


def installed() -> Software:
    """Facts about this interpreter."""
    return Software(
        python=f"{platform.python_version()} ({platform.python_implementation()})",
        executable=sys.executable,
        packages={name: v for name in _PACKAGES if (v := _version(name)) is not None},
        requirements=tuple(_requirements()),
        environment=environment(os.environ),
    )


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables that change what happens here."""
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
    except ImportError:  # it comes with mlx-lm's requirements; then those are missing anyway
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
