"""The primitives on the simulated GPU: MLX_PAGED_SIM=1 with the kernels of metal/."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
from sim import METAL, SimLibrary, launcher, missing
from sim.checks import library

from mlx_paged.extension import ext

needs_simulator = pytest.mark.skipif(missing() is not None, reason=missing() or "")


@cache
def kernels() -> SimLibrary:
    """Those of metal/; a kernel is compiled when it is first launched."""
    return library(METAL)


@contextmanager
def simulated(kernels_: SimLibrary | None = None) -> Iterator[None]:
    """Within it, the primitives run on the simulated GPU."""
    ext.set_simulator(launcher(kernels_ or kernels()))
    ext.simulated_launches()
    os.environ["MLX_PAGED_SIM"] = "1"
    try:
        yield
    finally:
        del os.environ["MLX_PAGED_SIM"]


def launches() -> list[dict[str, Any]]:
    """What was launched since the last call: kernel, buffers, constants, grid, threadgroup,
    threadgroup_memory, threadgroups, and traffic (buffer index -> bytes read, bytes written)."""
    return ext.simulated_launches()
