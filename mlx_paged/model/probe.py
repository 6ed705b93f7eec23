"""Chooses how a model's forward is run, by trying it on a graph that is never evaluated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_paged.errors import UnsupportedModelError
from mlx_paged.model import seam
from mlx_paged.model.adaptations import adapt, context_limit
from mlx_paged.model.cache import LatentScores
from mlx_paged.model.layout import CacheLayout, Mode
from mlx_paged.model.observe import Observed, observe
from mlx_paged.model.output_rows import OutputRows
from mlx_paged.model.overrides import Overrides
from mlx_paged.model.paged_model import PagedModel, StepInputs
from mlx_paged.model.recurrent import StateSlots
from mlx_paged.model.regroup import regrouped
from mlx_paged.model.specs import CacheSpec, LayerSpec
from mlx_paged.model.step import StepContext

# What model code raises where it is given handles instead of arrays, positions instead of a number.
_MISFITS = (TypeError, ValueError, AttributeError, IndexError, RuntimeError, NotImplementedError)


def page(
    model: nn.Module, model_type: str, *, modes: Sequence[Mode] = tuple(Mode), block_size: int
) -> PagedModel:
    """Makes a model run on paged caches, in the first of these modes in which it can be.

    Args:
        model: its modules are changed in place.
        model_type: names it in errors.

    Raises:
        UnsupportedModelError: if none works; it says why not.
    """
    seam.install()
    observed = observe(model, model_type)
    context = StepContext()
    make = partial(
        PagedModel,
        model,
        context=context,
        output_rows=OutputRows(observed.projection, context),
        block_size=block_size,
    )
    reasons = []
    for mode in modes:
        overrides = Overrides()
        try:
            if mode.is_gathered:
                return _tried(make(CacheLayout(mode, tuple(observed.specs), observed.tree)))
            return _page_flat(model, observed, mode, make, context, overrides)
        except _MISFITS as error:
            overrides.undo()
            reasons.append(f"{mode}: {str(error) or type(error).__name__}")
    raise UnsupportedModelError(model_type, "; ".join(reasons))


def _page_flat(
    model: nn.Module,
    observed: Observed,
    mode: Mode,
    make: Callable[[CacheLayout], PagedModel],
    context: StepContext,
    overrides: Overrides,
) -> PagedModel:
    """A model that takes every token as a row; raises whatever goes wrong if it does not."""
    if bool(observed.recurrent) != (mode is Mode.REGROUPED):
        raise TypeError("it has recurrent state" if observed.recurrent else "it has no state")
    for i, (spec, window) in enumerate(zip(observed.specs, observed.mask_windows)):
        if isinstance(spec, LayerSpec) and window not in (None, spec.window):
            raise TypeError(f"layer {i} masks a window of {window} over a cache of another")
    for module, attends in observed.recurrent:
        if attends:
            raise TypeError(f"its {type(module).__name__} holds state and attends at once")
        overrides.replace(module, "__call__", regrouped(module, context))
    layout = CacheLayout(mode, tuple(observed.specs), observed.tree, context_limit(model))
    adapt(model, context, overrides)
    while True:
        try:
            return _tried(make(layout))
        except LatentScores as found:
            layout = replace(layout, specs=tuple(_as_latent(s, found.spec) for s in layout.specs))


def _as_latent(spec: CacheSpec, found: LayerSpec) -> CacheSpec:
    if spec != found:
        return spec
    return replace(
        found, key_dim=found.key_dim + found.value_dim, value_dim=found.key_dim, latent=True
    )


def _tried(paged: PagedModel) -> PagedModel:
    """Builds a step of four sequences of one and two rows, on pools of no size to speak of.

    Two of each length, as code that takes an array of positions for a number fails on two and not
    on one.
    """
    paged.allocate(5, 5)
    lens = np.array([1, 2, 1, 2])
    inputs = StepInputs(
        context_lens=lens + 1,
        query_lens=lens,
        tables=[[1], [2], [3], [4]],
        logit_rows=np.array([0, 2, 5]),
        state_slots=StateSlots([0, 0, 0, 0], [1, 2, 3, 4]) if paged.layout.has_states else None,
    )
    logits = paged.forward(mx.zeros((6,), dtype=mx.int32), inputs)
    if logits.ndim != 2 or logits.shape[0] != 3:
        raise ValueError(f"its logits are of shape {logits.shape}, not one row for each of 3")
    paged.release()
    return paged
