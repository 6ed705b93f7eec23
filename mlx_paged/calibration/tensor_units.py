"""Tensor units: which machines compile and run kernels for them (metal/tensor_*.h)."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from mlx_paged.platform import is_cpu_default

# Requirements of MLX's tensor-unit kernels (`is_nax_available` in its backend/metal/device.cpp).
MACOS = (26, 2)
GENERATION = 17  # the M5's
PHONE_GENERATION = 18  # of architectures whose name ends with p


def unavailable(info: Mapping[str, Any] | None = None, macos: str | None = None) -> str | None:
    """Returns why this machine runs no kernels for tensor units; None if it does.

    Args:
        info: MLX's information about the GPU; None: about this machine's.
        macos: The version of macOS, empty on other systems; None: this machine's.
    """
    if info is None:
        info = {} if is_cpu_default() else mx.device_info(mx.gpu)  # type: ignore[attr-defined]
    if macos is None:
        macos = platform.mac_ver()[0]
    name = str(info.get("architecture", ""))
    found = re.fullmatch(r"applegpu_g(\d+)(\w)", name)
    if not found:
        return f"the GPU's architecture is {name or 'unknown'}, not one of Apple's"
    needed = PHONE_GENERATION if found[2] == "p" else GENERATION
    if int(found[1]) < needed:
        return f"the GPU's architecture is {name}; tensor units begin with generation {needed}"
    if _version(macos) < MACOS:
        needs = ".".join(map(str, MACOS))
        return f"the system is macOS {macos or 'unknown'}; tensor units need macOS {needs}"
    return None


def _version(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)))
