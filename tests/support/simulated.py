"""The primitives on the simulated GPU: `mlx_paged.ops` with `mlx_paged._sim`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx
import pytest
from sim import METAL, SimLibrary, launcher, missing
from sim.checks import library as compiled_library

from mlx_paged import executables, kernels, layer_ops, ops

try:
    from mlx_paged import _sim as sim_ext
except ImportError:
    sim_ext = None

# For queries about the launches that a GPU would get, without running any.
needs_sim_extension = pytest.mark.skipif(
    sim_ext is None,
    reason="mlx_paged._sim is not built: install with "
    "-Ccmake.define.MLX_PAGED_BUILD_TESTS=ON, as `make test` does",
)
_reason = needs_sim_extension.kwargs["reason"] if sim_ext is None else missing()
needs_simulator = pytest.mark.skipif(_reason is not None, reason=_reason or "")


@cache
def metal_library() -> SimLibrary:
    """The library of metal/; compiles a kernel on its first launch."""
    return compiled_library(METAL)


@contextmanager
def simulated_extension() -> Iterator[None]:
    """Within this context, `mlx_paged._sim` takes the place of the native extension."""
    with ExitStack() as stack:
        for module in (ops, layer_ops, kernels, executables):
            stack.enter_context(mock.patch.object(module, "ext", sim_ext))
        stack.enter_context(mock.patch.dict(os.environ, MLX_PAGED_SIM="1"))
        yield


@contextmanager
def simulated(library: SimLibrary | None = None) -> Iterator[None]:
    """Within this context, primitives run on the simulated GPU, and work is split as for a GPU."""
    sim_ext.set_simulator(launcher(library or metal_library()))
    sim_ext.simulated_launches()
    with simulated_extension():
        yield


METAL_4 = {"__METAL_VERSION__": "400", "__HAVE_TENSOR__": "1"}


@cache
def tensor_library(root: Path = METAL, tensor_layout: int = 1) -> SimLibrary:
    """The library of a folder as the compiler of macOS 26 gets it.

    The default layout of cooperative tensors is not the one that MLX assumes.
    """
    files = sorted(Path(root).glob("*.metal"))
    return SimLibrary(files=files, root=root, defines=METAL_4, tensor_layout=tensor_layout)


@contextmanager
def simulated_tensor_units(library_: SimLibrary | None = None) -> Iterator[None]:
    """Like `simulated`, on a GPU with tensor units whose kernels are proven."""
    with simulated(library_ or tensor_library()):
        kernels.allow_tensor_kernels(True)
        try:
            yield
        finally:
            kernels.allow_tensor_kernels(False)


def launches() -> list[dict[str, Any]]:
    """Launches since the last call: kernel, buffers, constants, grid, threadgroup,
    threadgroup_memory, threadgroups, and traffic (buffer index -> bytes read, bytes written)."""
    return sim_ext.simulated_launches()


def planned_launches(*args: Any, **options: Any) -> list[dict[str, Any]]:
    """Launches that a GPU would run for a call of `ops.paged_attention`, with the plan's arrays as
    separate arguments; ``cuda=True``: an NVIDIA GPU."""
    return sim_ext.paged_attention_launches(*args, **options)


def shared_rows_with_cuda(
    queries: mx.array, key_pool: mx.array, value_pool: mx.array, *, has_alibi: bool = False
) -> int:
    """`ops.max_shared_rows` on an NVIDIA GPU."""
    return sim_ext.max_shared_rows_with_cuda(queries, key_pool, value_pool, has_alibi)


def planned_writes(*args: Any, **options: Any) -> list[dict[str, Any]]:
    """The same for a call of `ops.write_kv`."""
    return sim_ext.write_kv_launches(*args, **options)
