"""Compiles the GPU kernels that a model's steps will need, before the first request needs one."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from mlx_paged import kernels
from mlx_paged.model.media import StepMedia
from mlx_paged.model.paged_model import PagedModel
from mlx_paged.model.plan import StateSlots, StepInputs
from mlx_paged.model.takes_media import TakesMedia


def prepare_kernels(paged: PagedModel, on_kernel: kernels.OnKernel | None = None) -> int:
    """Compiles the kernels of a model, on machines that compile them (Apple's GPUs).

    It builds the graph of a step, which shows the layers' attention, and drops it unevaluated.

    Args:
        paged: The model with its pools.
        on_kernel: See `kernels.prepare_kernels`.

    Returns:
        The number of kernels; 0 if nothing is compiled.
    """
    if not kernels.compiles_kernels():
        return 0
    build_graphs(paged)
    return kernels.prepare_kernels(on_kernel)


def build_graphs(paged: PagedModel) -> None:
    """Builds the graph of a step of each kind, so that `attention_layers` has its attention."""
    _build(paged, 1, None)
    if isinstance(paged.model, TakesMedia) and paged.model.uses_bounds:
        none = np.zeros(0, dtype=np.int32)
        _build(paged, 2, StepMedia(none, None, None, np.array([[0, 0], [1, 1]])))


def _build(paged: PagedModel, num_rows: int, media: StepMedia | None) -> None:
    """Builds the graph of a step of one sequence that begins, and drops it."""
    inputs = StepInputs(
        context_lens=np.array([num_rows]),
        query_lens=np.array([num_rows]),
        tables=[[0]],
        logit_rows=np.array([0]),
        state_slots=StateSlots([0], [-1]) if paged.layout.has_states else None,
        media=media,
    )
    before = paged.pools()
    paged.forward(mx.zeros((num_rows,), dtype=mx.int32), inputs)
    paged.restore(before)
