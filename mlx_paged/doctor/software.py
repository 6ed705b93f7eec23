"""What is installed, read without importing any of it: an extension of another ABI may crash."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

# Packages of a bug report beside those that the extras name.
_PACKAGES = (
    *("mlx-paged", "mlx", "mlx-metal", "mlx-cpu", "mlx-cuda-12", "mlx-cuda-13", "mlx-lm"),
    *("nanobind", "numpy", "scipy-openblas32", "transformers", "rich", "typer"),
)
_SHOWN_EXTRAS = ("cpu", "cuda12", "cuda13", "server", "bench", "chat")
# nanobind compiles the ABI that two extensions must share into both, as a string.
_NANOBIND_ABI = re.compile(rb"nanobind_[a-z0-9_]*_v\d+")
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD")


@dataclass(frozen=True)
class Requirement:
    """A requirement of ours and what is installed; None: nothing is."""

    name: str
    specifier: str
    installed: str | None
    is_met: bool


@dataclass(frozen=True)
class Software:
    """Versions, and what the extension was built with.

    Attributes:
        packages: Installed version by distribution.
        requirements: Those that always hold.
        extras: Requirements by extra.
        built_mlx: MLX that the extension was built with; None: it is not built.
        built_nanobind: nanobind that it was built with.
        extension: Its file; None: not built.
        extension_abi: nanobind's ABI in it; None: not found out.
        mlx_abi: nanobind's ABI in MLX.
        environment: MLX_PAGED_*, MLX_* and a few others; values of secrets are hidden.
    """

    python: str
    executable: str
    packages: Mapping[str, str]
    requirements: tuple[Requirement, ...] = ()
    extras: Mapping[str, tuple[Requirement, ...]] = field(default_factory=dict)
    built_mlx: str | None = None
    built_nanobind: str | None = None
    extension: str | None = None
    extension_abi: str | None = None
    mlx_abi: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


def installed() -> Software:
    """Of this interpreter."""
    packages = {name: v for name in _PACKAGES if (v := _version(name)) is not None}
    always, extras = _requirements(_required_lines(), _version)
    try:
        from mlx_paged import _build
    except ImportError:
        built_mlx = built_nanobind = None
    else:
        built_mlx, built_nanobind = _build.MLX_VERSION, _build.NANOBIND_VERSION
    extension = _origin("mlx_paged._ext")
    return Software(
        python=f"{platform.python_version()} ({platform.python_implementation()})",
        executable=sys.executable,
        packages=packages,
        requirements=always,
        extras=extras,
        built_mlx=built_mlx,
        built_nanobind=built_nanobind,
        extension=extension,
        extension_abi=_abi_of(extension),
        mlx_abi=_abi_of(_mlx_core()),
        environment=environment(os.environ),
    )


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables that change what happens here."""
    kept = re.compile(r"(MLX_|OPENBLAS_|OMP_NUM_THREADS$|CUDA_VISIBLE_DEVICES$|LD_PRELOAD$)")
    return {
        name: "(set)" if _SECRET.search(name) else value
        for name, value in sorted(variables.items())
        if kept.match(name)
    }


def nanobind_abi(binary: bytes) -> str | None:
    """The ABI string in a library that nanobind made."""
    found = _NANOBIND_ABI.search(binary)
    return found.group().decode() if found else None


def _requirements(
    lines: list[str], version_of: Callable[[str], str | None]
) -> tuple[tuple[Requirement, ...], dict[str, tuple[Requirement, ...]]]:
    """Our requirements on this system: those that always hold, and each extra's own."""
    try:
        from packaging.requirements import Requirement as Parsed
    except ImportError:  # it comes with mlx-lm's requirements; then those are missing anyway
        return (), {}
    always: dict[str, Requirement] = {}
    extras: dict[str, list[Requirement]] = {name: [] for name in _SHOWN_EXTRAS}
    for line in lines:
        parsed = Parsed(line)
        version = version_of(parsed.name)
        is_met = version is not None and parsed.specifier.contains(version, prereleases=True)
        made = Requirement(parsed.name, str(parsed.specifier), version, is_met)
        if parsed.marker is None or parsed.marker.evaluate({"extra": ""}):
            always[parsed.name] = made
            continue
        for name, members in extras.items():
            if parsed.marker.evaluate({"extra": name}):
                members += [made]
                # `mlx[cuda13]` brings a package of that backend.
                for part in parsed.extras:
                    backend = f"mlx-{re.sub(r'cuda(?=[0-9])', 'cuda-', part)}"
                    found = version_of(backend)
                    is_met = found is not None and parsed.specifier.contains(found)
                    members += [Requirement(backend, str(parsed.specifier), found, is_met)]
    return tuple(always.values()), {name: tuple(members) for name, members in extras.items()}


def _required_lines() -> list[str]:
    try:
        return metadata.requires("mlx-paged") or []
    except metadata.PackageNotFoundError:  # a checkout that was never installed
        return []


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _origin(module: str) -> str | None:
    try:
        spec = find_spec(module)
    except (ImportError, ValueError):
        return None
    return spec.origin if spec else None


def _mlx_core() -> str | None:
    """MLX's extension, found without importing MLX. (mlx is a namespace package.)"""
    try:
        spec = find_spec("mlx")
    except (ImportError, ValueError):
        return None
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(folder).glob("core*.so")):
            return str(file)
    return None


def _abi_of(file: str | None) -> str | None:
    try:
        return nanobind_abi(Path(file).read_bytes()) if file else None
    except OSError:
        return None
