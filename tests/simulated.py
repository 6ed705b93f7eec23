"""The primitives on the simulated GPU: MLX_PAGED_SIM=1 with the kernels of metal/."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from sim import METAL, SimLibrary, launcher

from mlx_paged.core import ext


@cache
def kernels() -> SimLibrary:
    """All of metal/; a kernel is compiled when it is first launched."""
    return SimLibrary(files=sorted(METAL.glob("*.metal")), defines={"METAL_FUNC": "inline"})


@contextmanager
def simulated(library: SimLibrary | None = None) -> Iterator[None]:
    """Within it, the primitives run the kernels of `library` (by default those of metal/)."""
    ext.set_simulator(launcher(library or kernels()))
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
