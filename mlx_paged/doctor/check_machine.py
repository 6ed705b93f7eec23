"""Findings about the machine and its system, and what MLX and the engine make of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mlx_paged.doctor.finding import Finding, Status
from mlx_paged.doctor.machine import Machine
from mlx_paged.doctor.software import Software

# What MLX's installation page asks for (ml-explore.github.io/mlx, "Build and Install").
_LEAST_MACOS = (14, 0)
_LEAST_DRIVER = {"mlx-cuda-12": (550, 54, 14), "mlx-cuda-13": (580,)}
_LEAST_CAPABILITY = (7, 5)
_GIB = 1 << 30


def check(
    machine: Machine,
    software: Software,
    build: Mapping[str, str] | None,
    memory: Mapping[str, Any] | None,
) -> list[Finding]:
    """Everything that is wrong with the machine for this software.

    Args:
        build: `extension.build_info()`, where the extension loads.
        memory: the answer of the job "memory", where it could be had.
    """
    findings = [*_mac(machine), *_nvidia(machine, software)]
    if memory is not None and not machine.is_mac:
        findings.append(_memory_limit(machine, memory))
    if build is not None:
        findings += [_threads(machine, build), *_simd(machine, build)]
        findings += _unused_gpu(machine, build)
    return findings


def version(text: str | None) -> tuple[int, ...]:
    """Numbers of a dotted version, up to the first part that is none."""
    numbers = []
    for part in (text or "").split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def _mac(machine: Machine) -> list[Finding]:
    if not machine.is_mac:
        return []
    least = ".".join(map(str, _LEAST_MACOS))
    found = machine.system
    if not version(machine.system_version):
        system = Finding("macOS", Status.SKIPPED, f"macOS {least} or later", "version unknown")
    elif version(machine.system_version) < _LEAST_MACOS:
        remedy = f"update macOS to {least} or later; MLX's wheels need it"
        system = Finding("macOS", Status.BROKEN, f"macOS {least} or later", found, remedy)
    else:
        system = Finding("macOS", Status.OK, f"macOS {least} or later", found)
    expected = "a Python for arm64, on an Apple chip"
    name = "native Python"
    if machine.is_translated:
        remedy = "install a Python for arm64 (python.org or Homebrew) and make the environment anew"
        return [system, Finding(name, Status.BROKEN, expected, "x86_64 under Rosetta 2", remedy)]
    if machine.architecture != "arm64":
        remedy = "use a Mac with an Apple chip: MLX has no build for Intel ones"
        return [system, Finding(name, Status.BROKEN, expected, machine.architecture, remedy)]
    return [system, Finding(name, Status.OK, expected, machine.architecture)]


def _nvidia(machine: Machine, software: Software) -> list[Finding]:
    cards = [gpu for gpu in machine.gpus if gpu.vendor == "NVIDIA"]
    backend = next((name for name in _LEAST_DRIVER if name in software.packages), None)
    if backend and not cards and not machine.is_mac:
        remedy = "nvidia-smi must work: install the driver, or run the container with --gpus all"
        return [Finding("NVIDIA driver", Status.WARNING, f"a GPU for {backend}", "no GPU", remedy)]
    findings = []
    for gpu in cards:
        if backend:
            least = _LEAST_DRIVER[backend]
            words = f"{'.'.join(map(str, least))} or later, for {backend}"
            found = f"{gpu.driver} ({gpu.name})"
            if version(gpu.driver) < least:
                remedy = f"update the driver to {words}" + (
                    ", or use the extra [cuda12]" if backend == "mlx-cuda-13" else ""
                )
                findings.append(Finding("NVIDIA driver", Status.BROKEN, words, found, remedy))
            else:
                findings.append(Finding("NVIDIA driver", Status.OK, words, found))
        capability = version(gpu.compute_capability)
        if capability and capability < _LEAST_CAPABILITY:
            least_words = ".".join(map(str, _LEAST_CAPABILITY))
            findings.append(
                Finding(
                    "NVIDIA GPU",
                    Status.WARNING,
                    f"compute capability {least_words} or more",
                    f"{gpu.compute_capability} ({gpu.name})",
                    "use the CPU backend: pip install 'mlx-paged[cpu]'",
                )
            )
    return findings


def _unused_gpu(machine: Machine, build: Mapping[str, str]) -> list[Finding]:
    """A GPU that this build has no kernels for."""
    backends = build["backends"].split()
    if any(gpu.vendor == "NVIDIA" for gpu in machine.gpus):
        wanted, remedy = "cuda", "build for CUDA as docs/cuda.md says: MLX with [cuda13], nvcc, fmt"
    elif machine.is_mac and machine.gpus:
        wanted, remedy = "metal", "pip install --force-reinstall --no-deps . (on this Mac)"
    else:
        return []
    expected = f"kernels for {machine.gpus[0].name} ({wanted})"
    found = f"built for {', '.join(backends)}"
    if wanted in backends:
        return [Finding("GPU kernels", Status.OK, expected, found)]
    return [Finding("GPU kernels", Status.WARNING, expected, found, remedy)]


def _memory_limit(machine: Machine, memory: Mapping[str, Any]) -> Finding:
    """A control group's limit that the engine does not see would kill it."""
    name, limit = "memory limit", machine.limits.memory_bytes
    seen = int(memory["physical_bytes"])
    expected = "a limit of the control group that the engine sees, or none"
    if limit is None:
        return Finding(name, Status.OK, expected, f"none; {seen / _GIB:.1f} GiB")
    found = f"{limit / _GIB:.1f} GiB ({machine.limits.memory_file})"
    if seen <= limit:
        return Finding(name, Status.OK, expected, found)
    remedy = f"pass --kv-cache-memory with what {limit / _GIB:.1f} GiB leave beside the weights"
    found += f"; the engine counts on {seen / _GIB:.1f} GiB"
    return Finding(name, Status.WARNING, expected, found, remedy)


def _threads(machine: Machine, build: Mapping[str, str]) -> Finding:
    """More threads than CPU time: all of them wait while the quota is used up."""
    threads, quota = int(build["num_threads"]), machine.limits.cpus
    expected = "no more threads than this process gets CPUs"
    cpus = machine.usable_cpus
    found = f"{threads} threads" + (f" on {cpus:g} CPUs" if cpus is not None else "")
    most = max(1, math.ceil(cpus)) if cpus is not None else threads
    if threads <= most:
        return Finding("threads", Status.OK, expected, found)
    if quota is not None and quota == cpus:
        found += " (CPU quota of the control group)"
    remedy = f"set MLX_PAGED_NUM_THREADS={most}"
    return Finding("threads", Status.WARNING, expected, found, remedy)


def _simd(machine: Machine, build: Mapping[str, str]) -> list[Finding]:
    best = next((s for s in ("avx512", "avx2", "neon") if s in machine.instruction_sets), None)
    if best is None:
        return []
    expected, found = f"CPU kernels for {best}", f"CPU kernels for {build['simd']}"
    if build["simd"] == best:
        return [Finding("instruction set", Status.OK, expected, found)]
    remedy = "unset MLX_PAGED_SIMD, unless you meant it"
    return [Finding("instruction set", Status.WARNING, expected, found, remedy)]
