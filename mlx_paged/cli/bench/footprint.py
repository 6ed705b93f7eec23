"""How much memory a run took, as the process, MLX and the machine see it."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import psutil

_GIB = 1 << 30


@dataclass(frozen=True)
class Footprint:
    """Memory in bytes.

    Attributes:
        process_peak: most that was resident of this process, loading included.
        mlx_peak: most that MLX's arrays had since `mx.reset_peak_memory`: weights, activations, and
            a pool in full, be it touched or not.
        mlx_cache: freed buffers that MLX keeps.
        pool: of the KV pool; None for an engine without one.
        pool_used: most of it that held tokens at once, by the blocks of full attention; None
            likewise.
        system_used: of the machine's memory, all processes together.
        system_total: of the machine.
    """

    process_peak: int
    mlx_peak: int
    mlx_cache: int
    pool: int | None
    pool_used: int | None
    system_used: int
    system_total: int


def measure_footprint(pool: int | None = None, pool_used: int | None = None) -> Footprint:
    """The footprint of this process now."""
    system = psutil.virtual_memory()
    return Footprint(
        process_peak=peak_resident_bytes(),
        mlx_peak=mx.get_peak_memory(),
        mlx_cache=mx.get_cache_memory(),
        pool=pool,
        pool_used=pool_used,
        system_used=system.total - system.available,
        system_total=system.total,
    )


def peak_resident_bytes() -> int:
    """Most memory that was resident of this process."""
    try:
        # (`getrusage` would tell the parent's peak, if that was more: it survives `exec`.)
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def rows(footprints: Mapping[str, Footprint]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of a table with a column for each engine."""
    columns = list(footprints.values())

    def row(name: str, values: Sequence[int | None]) -> list[str]:
        return [name, *("-" if value is None else _size(value) for value in values)]

    return ["Memory", *footprints], [
        row("Process memory (peak)", [f.process_peak for f in columns]),
        row("MLX peak memory", [f.mlx_peak for f in columns]),
        row("MLX cache memory", [f.mlx_cache for f in columns]),
        row("KV pool", [f.pool for f in columns]),
        row("KV pool, most used", [f.pool_used for f in columns]),
        ["System memory", *(_share(f) for f in columns)],
    ]


def _size(size: int) -> str:
    return f"{size / _GIB:.2f} GiB" if size >= _GIB else f"{size / (1 << 20):.1f} MiB"


def _share(footprint: Footprint) -> str:
    used, total = footprint.system_used, footprint.system_total
    return f"{used / _GIB:.1f} / {total / _GIB:.1f} GiB ({used / total:.0%})"
