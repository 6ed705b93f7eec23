"""Reads what macOS says: sysctl, sw_vers, system_profiler."""

from __future__ import annotations

import json
from typing import Any

from mlx_paged.cgroups import Limits
from mlx_paged.doctor import apple
from mlx_paged.doctor.capture import Captures
from mlx_paged.doctor.machine import CoreGroup, Gpu, Machine


def machine(captures: Captures) -> Machine:
    """The Mac that these outputs are of."""
    sysctl = fields(captures.commands.get("sysctl", ""))
    versions = fields(captures.commands.get("sw_vers", ""))
    version = versions.get("ProductVersion")
    build = versions.get("BuildVersion")
    gpus = displays(captures.commands.get("system_profiler", ""))
    chip = sysctl.get("machdep.cpu.brand_string")
    published = apple.find(chip, gpus[0].cores if gpus else None) if chip else None
    system = " ".join(filter(None, ["macOS", version, f"({build})" if build else None]))
    return Machine(
        system=system,
        system_version=version,
        kernel=captures.kernel,
        architecture=captures.architecture,
        chip=chip,
        model=sysctl.get("hw.model"),
        core_groups=core_groups(sysctl),
        logical_cores=_integer(sysctl.get("hw.logicalcpu")),
        affinity=captures.affinity,
        instruction_sets=("neon",) if captures.architecture == "arm64" else (),
        memory_bytes=_integer(sysctl.get("hw.memsize")),
        available_bytes=None,
        limits=Limits(),
        gpus=gpus,
        cuda_version=None,
        published=published,
        is_translated=sysctl.get("sysctl.proc_translated") == "1",
    )


def fields(output: str) -> dict[str, str]:
    """``name: value`` lines."""
    pairs = (line.partition(":") for line in output.splitlines())
    return {name.strip(): value.strip() for name, colon, value in pairs if colon}


def core_groups(sysctl: dict[str, str]) -> tuple[CoreGroup, ...]:
    """Cores by kind, under the names that macOS gives them; all as one where it tells no kinds."""
    groups = []
    for level, usual in enumerate(("Performance", "Efficiency")):
        count = _integer(sysctl.get(f"hw.perflevel{level}.physicalcpu"))
        if count:
            groups.append(CoreGroup(sysctl.get(f"hw.perflevel{level}.name") or usual, count))
    if not groups and (count := _integer(sysctl.get("hw.physicalcpu"))):
        groups.append(CoreGroup("Physical", count))
    return tuple(groups)


def displays(output: str) -> tuple[Gpu, ...]:
    """The GPUs in ``system_profiler SPDisplaysDataType -json``."""
    try:
        entries: Any = json.loads(output)["SPDisplaysDataType"]
    except (ValueError, KeyError, TypeError):
        return ()
    gpus = []
    for entry in entries if isinstance(entries, list) else []:
        if not isinstance(entry, dict):
            continue
        name = entry.get("sppci_model") or entry.get("_name")
        vendor = str(entry.get("spdisplays_vendor", "")).removeprefix("sppci_vendor_")
        if name:
            gpus.append(Gpu(str(name), vendor or "unknown", _integer(entry.get("sppci_cores"))))
    return tuple(gpus)


def _integer(text: Any) -> int | None:
    return int(text) if isinstance(text, str) and text.isdigit() else None
