"""Runs models as on another device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mlx_paged.model.paged_model import PagedModel
from mlx_paged.platform import Platform

# Fields of a `Platform` with an NVIDIA GPU; `max_gpu_step_rows` is 0 unless set.
CUDA: dict[str, Any] = {"has_cuda": True, "pinned_uploads": True}
CUDA_PROGRAMS: dict[str, Any] = {**CUDA, "max_gpu_step_rows": 64}


def platform_with(**fields: Any) -> Platform:
    """This machine's platform with some fields replaced."""
    return replace(Platform.current(), **fields)


def run_as_on(paged: PagedModel, **fields: Any) -> None:
    """Makes a model plan and run its next steps like a device with this platform."""
    paged.platform = replace(paged.platform, **fields)
    paged._graph_runner.platform = paged._planner.platform = paged.platform
