"""Findings about what is installed: versions, ABI, extras."""

from __future__ import annotations

from pathlib import Path

from mlx_paged.doctor.finding import Finding, Status
from mlx_paged.doctor.software import Requirement, Software

_REBUILD = "pip install --force-reinstall --no-deps . (in mlx_paged's checkout)"
_USES = {
    "server": "`mlx-paged serve`",
    "bench": "`mlx-paged bench`",
    "chat": "`mlx-paged chat`",
}


def check(software: Software, *, on_mac: bool) -> list[Finding]:
    """Everything that can be told without importing any of it."""
    return [
        _itself(software),
        *(_requirement(r) for r in software.requirements),
        *_backend(software, on_mac),
        _built(software),
        *_built_for_this_mlx(software),
        *_abi(software),
        *_extras(software),
    ]


def _itself(software: Software) -> Finding:
    name, expected = "package mlx-paged", "installed, so that its requirements are known"
    if found := software.packages.get("mlx-paged"):
        return Finding(name, Status.OK, expected, f"mlx-paged {found}")
    remedy = "pip install . (in mlx_paged's checkout), with the Python that you run"
    return Finding(name, Status.BROKEN, expected, "not installed", remedy)


def _requirement(requirement: Requirement) -> Finding:
    name, wanted = requirement.name, requirement.specifier
    expected = f"{name} {wanted}" if wanted else name
    remedy = f"pip install '{name}{wanted}'"
    if requirement.installed is None:
        return Finding(f"package {name}", Status.BROKEN, expected, "not installed", remedy)
    found = f"{name} {requirement.installed}"
    if requirement.is_met:
        return Finding(f"package {name}", Status.OK, expected, found)
    # Another MLX crashes (no stable ABI); another mlx-lm may do, untested.
    status = Status.BROKEN if name == "mlx" else Status.WARNING
    return Finding(f"package {name}", status, expected, found, remedy)


def _backend(software: Software, on_mac: bool) -> list[Finding]:
    """MLX's compiled half is a package of its own, which an extra chooses."""
    if "mlx" not in software.packages:
        return []
    choices = ("mlx-metal",) if on_mac else ("mlx-cpu", "mlx-cuda-12", "mlx-cuda-13")
    expected = f"one of {', '.join(choices)}" if len(choices) > 1 else choices[0]
    found = [name for name in choices if name in software.packages]
    remedy = "pip install 'mlx-paged[cpu]', or [cuda12] or [cuda13] with an NVIDIA GPU"
    if on_mac:
        remedy = f"pip install --force-reinstall 'mlx=={software.packages['mlx']}'"
    if not found:
        return [Finding("MLX's backend", Status.BROKEN, expected, "none", remedy)]
    if len(found) > 1:
        remedy = f"pip uninstall {' '.join(found)}, then install the one that you want"
        both = f"{' and '.join(found)}, which overwrite each other's libmlx"
        return [Finding("MLX's backend", Status.WARNING, expected, both, remedy)]
    version = software.packages[found[0]]
    if version != software.packages["mlx"]:
        wrong = f"{found[0]} {version} beside mlx {software.packages['mlx']}"
        remedy = f"pip install '{found[0]}=={software.packages['mlx']}'"
        return [
            Finding("MLX's backend", Status.BROKEN, f"{expected} of MLX's version", wrong, remedy)
        ]
    return [Finding("MLX's backend", Status.OK, expected, f"{found[0]} {version}")]


def _built(software: Software) -> Finding:
    name, expected = "extension is built", "mlx_paged._ext beside the package"
    if software.extension is None or software.built_mlx is None:
        remedy = "pip install . (in mlx_paged's checkout)"
        return Finding(name, Status.BROKEN, expected, "no extension", remedy)
    return Finding(name, Status.OK, expected, Path(software.extension).name)


def _built_for_this_mlx(software: Software) -> list[Finding]:
    if software.built_mlx is None:
        return []
    running = software.packages.get("mlx")
    expected = f"MLX {software.built_mlx}, which the extension was built with"
    if running == software.built_mlx:
        return [Finding("extension fits MLX", Status.OK, expected, f"MLX {running}")]
    found = f"MLX {running}" if running else "no MLX"
    remedy = f"pip install 'mlx=={software.built_mlx}', or {_REBUILD}"
    return [Finding("extension fits MLX", Status.BROKEN, expected, found, remedy)]


def _abi(software: Software) -> list[Finding]:
    mine, mlxs = software.extension_abi, software.mlx_abi
    if software.extension is None:
        return []
    name = "nanobind ABI"
    expected = f"{mlxs} as in MLX" if mlxs else "the ABI of MLX"
    built = f"nanobind {software.built_nanobind}"
    if mine is None or mlxs is None:
        where = "MLX" if mlxs is None else "the extension"
        return [Finding(name, Status.SKIPPED, expected, f"{where} names none ({built})")]
    if mine == mlxs:
        number = mine.rpartition("_")[2]
        return [Finding(name, Status.OK, f"{number} as in MLX", f"{number} ({built})")]
    return [Finding(name, Status.BROKEN, expected, f"{mine} ({built})", _REBUILD)]


def _extras(software: Software) -> list[Finding]:
    findings = []
    for extra, use in _USES.items():
        members = software.extras.get(extra, ())
        missing = [m.name for m in members if m.installed is None]
        old = [f"{m.name} {m.installed}" for m in members if m.installed and not m.is_met]
        name, expected = f"extra [{extra}]", f"needed by {use} alone"
        remedy = f"pip install 'mlx-paged[{extra}]', if you want {use}"
        if missing:
            found = f"not installed: {', '.join(missing)}"
            findings.append(Finding(name, Status.NOTE, expected, found, remedy))
        elif old:
            found = f"too old: {', '.join(old)}"
            findings.append(Finding(name, Status.WARNING, expected, found, remedy))
        elif members:
            findings.append(Finding(name, Status.OK, expected, "installed"))
    return findings
