"""Reads what Linux says: /proc, control groups, nvidia-smi."""

from __future__ import annotations

import re

from mlx_paged.cgroups import limits
from mlx_paged.doctor.capture import Captures
from mlx_paged.doctor.machine import CoreGroup, Gpu, Machine

# (implementer, part) of an ARM core's MIDR register, as Linux's arch/arm64 cputype.h lists them.
_ARM_CORES = {
    (0x41, 0xD08): "ARM Cortex-A72",
    (0x41, 0xD0B): "ARM Cortex-A76",
    (0x41, 0xD0C): "ARM Neoverse N1",
    (0x41, 0xD40): "ARM Neoverse V1",
    (0x41, 0xD49): "ARM Neoverse N2",
    (0x41, 0xD4F): "ARM Neoverse V2",
    (0x41, 0xD84): "ARM Neoverse V3",
    (0x41, 0xD8E): "ARM Neoverse N3",
    (0xC0, 0xAC3): "Ampere-1",
}
# What matters to the CPU kernels and to MLX; a kernel build is named by the first of each list.
_INSTRUCTION_SETS = {
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
    "avx2": {"avx2", "fma", "f16c"},
    "neon": {"asimd"},
    "sve": {"sve"},
    "amx": {"amx_tile"},
    "bf16": {"avx512_bf16"},
}


def machine(captures: Captures) -> Machine:
    """The Linux machine, or container, that these files are of."""
    files = captures.files
    processors = _blocks(files.get("/proc/cpuinfo", ""))
    memory = _meminfo(files.get("/proc/meminfo", ""))
    release = {
        name: value.strip('"')
        for name, equals, value in (
            line.partition("=") for line in files.get("/etc/os-release", "").splitlines()
        )
        if equals
    }
    return Machine(
        system=release.get("PRETTY_NAME", "Linux"),
        system_version=release.get("VERSION_ID"),
        kernel=captures.kernel,
        architecture=captures.architecture,
        chip=_chip(processors),
        model=None,
        core_groups=_core_groups(processors),
        logical_cores=len(processors) or None,
        affinity=captures.affinity,
        instruction_sets=_instruction_sets(processors),
        memory_bytes=memory.get("MemTotal"),
        available_bytes=memory.get("MemAvailable"),
        limits=limits(files),
        gpus=nvidia(captures.commands.get("nvidia-smi", "")),
        cuda_version=_cuda_version(captures.commands.get("nvidia-smi-header", "")),
        published=None,
    )


def nvidia(output: str) -> tuple[Gpu, ...]:
    """GPUs from nvidia-smi's lines of name, MiB of memory, driver and compute capability."""
    gpus = []
    for line in output.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != 4:  # "NVIDIA-SMI has failed because ..."
            continue
        name, mib, driver, capability = cells
        gpus.append(
            Gpu(
                name,
                "NVIDIA",
                memory_bytes=int(mib) << 20 if mib.isdigit() else None,
                driver=driver,
                compute_capability=capability if capability[:1].isdigit() else None,
            )
        )
    return tuple(gpus)


def _cuda_version(header: str) -> str | None:
    found = re.search(r"CUDA(?: UMD)? Version:\s*(\d+\.\d+)", header)
    return found.group(1) if found else None


def _blocks(cpuinfo: str) -> list[dict[str, str]]:
    """One for each logical CPU."""
    blocks = []
    for text in re.split(r"\n\s*\n", cpuinfo):
        pairs = (line.partition(":") for line in text.splitlines())
        block = {name.strip(): value.strip() for name, colon, value in pairs if colon}
        if "processor" in block:
            blocks.append(block)
    return blocks


def _chip(processors: list[dict[str, str]]) -> str | None:
    names: dict[str, None] = {}
    for block in processors:
        names[block.get("model name") or _arm_core(block) or ""] = None
    return " + ".join(filter(None, names)) or None


def _arm_core(block: dict[str, str]) -> str | None:
    """An ARM core's name; /proc/cpuinfo has numbers only."""
    try:
        key = int(block["CPU implementer"], 16), int(block["CPU part"], 16)
    except (KeyError, ValueError):
        return None
    return _ARM_CORES.get(key, f"ARM core 0x{key[0]:02x}/0x{key[1]:03x}")


def _core_groups(processors: list[dict[str, str]]) -> tuple[CoreGroup, ...]:
    if not processors:
        return ()
    if all("core id" in block for block in processors):
        cores = {(block.get("physical id"), block["core id"]) for block in processors}
        return (CoreGroup("Physical", len(cores)),)
    kinds = [_arm_core(block) or "Logical" for block in processors]
    return tuple(CoreGroup(kind, kinds.count(kind)) for kind in dict.fromkeys(kinds))


def _instruction_sets(processors: list[dict[str, str]]) -> tuple[str, ...]:
    if not processors:
        return ()
    first = processors[0]
    flags = set((first.get("flags") or first.get("Features") or "").split())
    return tuple(name for name, needed in _INSTRUCTION_SETS.items() if needed <= flags)


def _meminfo(text: str) -> dict[str, int]:
    """Bytes by name."""
    found = re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)
    return {name: int(kib) * 1024 for name, kib in found}
