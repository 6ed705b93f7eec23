"""The machine's key: everything that can change the outcome of calibration."""

from __future__ import annotations

import hashlib
import os
import platform
from functools import cache
from pathlib import Path

import mlx.core as mx

from mlx_paged import extension
from mlx_paged.calibration import tensor_units
from mlx_paged.platform import Platform, is_cpu_default


def key() -> dict[str, str]:
    """Returns the chip, OS, MLX, our version and build, and whether kernels for tensor units can
    run, by name."""
    info = {} if is_cpu_default() else mx.device_info(mx.gpu)  # type: ignore[attr-defined]
    return {
        "chip": str(info.get("device_name", platform.machine())),
        "os": " ".join((platform.system(), platform.mac_ver()[0] or platform.release())),
        "mlx": extension.ext.build_info()["mlx_version"],
        "mlx_paged": extension.build_info()["version"],
        "kernels": _kernels_hash(),
        "tensor_units": tensor_units.unavailable() or "available",
    }


@cache
def _kernels_hash() -> str:
    """A hash of the extension and the kernels' sources, which change between releases too."""
    sha = hashlib.sha256()
    metal = Path(__file__).resolve().parent.parent / "metal"
    for path in [Path(str(extension.ext.__file__)), *sorted(metal.glob("*.h"))]:
        try:
            state = path.stat()
        except OSError:
            continue
        sha.update(f"{path.name} {state.st_size} {state.st_mtime_ns}\n".encode())
    return sha.hexdigest()[:16]


def is_needed(platform_: Platform) -> bool:
    """True if engines calibrate by themselves on this device: on Apple's GPUs.

    The CPU's kernels and NVIDIA's are tested on such machines before a release.
    """
    backends = extension.ext.build_info()["backends"].split()
    return not platform_.on_cpu and "metal" in backends and not os.environ.get("MLX_PAGED_CHECK")
