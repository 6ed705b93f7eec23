"""Converts a loaded model to paged caches, or explains why that is impossible.

`observe` reads the layout of the caches from a dense forward pass. `convert_to_paged` chooses how
to run the model's forward by trying it on a graph that is never evaluated. `build_paged_model` does
so for a family's modes, and compares the result with the dense cache if the family is unverified.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_paged.errors import UnsupportedModelError
from mlx_paged.model import patches
from mlx_paged.model.adaptations import adapt, context_limit
from mlx_paged.model.caches import ContextLimit, LatentScores, StepContext
from mlx_paged.model.config_files import vocab_size
from mlx_paged.model.families import require_family
from mlx_paged.model.layout import CacheLayout, CacheSpec, LayerSpec, Mode
from mlx_paged.model.observe import Observed, observe
from mlx_paged.model.output_rows import OutputRows
from mlx_paged.model.overrides import Overrides
from mlx_paged.model.paged_model import PagedModel
from mlx_paged.model.pipeline import Stage, enter_stage
from mlx_paged.model.plan import StateSlots, StepInputs
from mlx_paged.model.recurrent import regrouped
from mlx_paged.model.takes_media import TakesMedia
from mlx_paged.model.verify import difference_from_dense, difference_where_cut, tolerance_of
from mlx_paged.platform import Platform

logger = logging.getLogger(__name__)

# Errors of model code that gets handles instead of arrays, or positions instead of a number.
_MISFITS = (TypeError, ValueError, AttributeError, IndexError, RuntimeError, NotImplementedError)


def build_paged_model(
    model: nn.Module,
    config: Mapping[str, Any],
    *,
    block_size: int,
    platform: Platform | None = None,
) -> PagedModel:
    """Makes a model of a verified or registered family run on paged caches.

    Args:
        model: Its modules are changed in place.
        config: Its ``config.json``.
        block_size: Tokens of a KV block.
        platform: The device; None means MLX's default device.

    Raises:
        UnsupportedModelError: The family is neither, the model runs in none of the family's modes,
            or its logits differ from those with the dense cache.
    """
    family = model.paged_family if isinstance(model, TakesMedia) else require_family(config)
    model_type = str(config.get("model_type", family.name))
    paged = convert_to_paged(
        model, model_type, modes=family.modes, block_size=block_size, platform=platform
    )
    if family.must_compare(paged.layout.mode):
        if Stage.of(model) is not None:
            reason = "it is not proven, and no rank has all layers to compare its logits"
            raise UnsupportedModelError(model_type, reason)
        difference = difference_from_dense(paged, vocab_size(config))
        if not difference < tolerance_of(paged):
            raise UnsupportedModelError(
                model_type,
                f"its logits on paged caches ({paged.layout.mode}) differ from the dense ones by "
                f"{difference:.1e} of their size",
            )
        difference_of_cuts = difference_where_cut(paged, vocab_size(config))
        if not difference_of_cuts < tolerance_of(paged):
            raise UnsupportedModelError(
                model_type,
                "its logits on mlx-lm's own caches depend on where a prompt is cut into chunks: "
                f"they differ by {difference_of_cuts:.1e} of their size",
            )
        logger.warning(
            "model_type %r is not proven as this model runs (%s); it was compared with mlx-lm's "
            "dense cache and differs by %.1e",
            model_type,
            paged.layout.mode,
            difference,
        )
    enter_stage(paged, model_type, partial(_tried, paged))
    return paged


# --- Choosing a mode ------------------------------------------------------------------------------


def convert_to_paged(
    model: nn.Module,
    model_type: str,
    *,
    modes: Sequence[Mode] = tuple(Mode),
    block_size: int,
    platform: Platform | None = None,
) -> PagedModel:
    """Makes a model run on paged caches, in the first possible one of these modes.

    Args:
        model: Its modules are changed in place.
        model_type: Its name in errors.

    Raises:
        UnsupportedModelError: The model runs in none of them; it gives the reasons.
    """
    patches.install()
    # Products with weights that are not evaluated are MLX's: a first step would have other bits.
    mx.eval(model.parameters())
    observed = observe(model, model_type)
    _require_one_answer(observed, model_type)
    context = StepContext(ContextLimit())
    make = partial(
        PagedModel,
        model,
        context=context,
        output_rows=OutputRows(observed.projection, context),
        block_size=block_size,
        platform=platform,
    )
    reasons = []
    for mode in modes:
        overrides = Overrides()
        try:
            if mode.is_gathered:
                if isinstance(model, TakesMedia):
                    raise TypeError("its media bring what belongs to the rows of a whole step")
                return _tried(make(CacheLayout(mode, tuple(observed.specs), observed.tree)))
            return _page_flat(model, observed, mode, make, context, overrides)
        except _MISFITS as error:
            overrides.undo()
            reasons.append(f"{mode}: {str(error) or type(error).__name__}")
    raise UnsupportedModelError(model_type, "; ".join(reasons))


def _require_one_answer(observed: Observed, model_type: str) -> None:
    """Refuses masks that are wider than a rotating cache.

    With those, mlx-lm's prompts see tokens that its decodes do not, and the first row of a chunk
    sees fewer than the next one. So there is no reference to compare with.
    """
    for i, (spec, window) in enumerate(zip(observed.specs, observed.mask_windows)):
        kept = spec.window if isinstance(spec, LayerSpec) else None
        if kept is not None and window is not None and window > kept:
            raise UnsupportedModelError(
                model_type,
                f"layer {i} masks a window of {window} tokens over a cache of {kept}, so mlx-lm's "
                "own answers depend on where a prompt is cut into chunks",
            )


def _page_flat(
    model: nn.Module,
    observed: Observed,
    mode: Mode,
    make: Callable[[CacheLayout], PagedModel],
    context: StepContext,
    overrides: Overrides,
) -> PagedModel:
    """Pages a model that takes every token as a row; raises the model's errors if it cannot."""
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
    """Builds a step of eight sequences of one and two rows, on pools of a few blocks.

    Half of them begin in it. There are two of each kind, because code that takes an array of
    positions for a number fails on two and not on one.
    """
    paged.allocate(9, 13)
    lens = np.array([1, 2, 1, 2] * 2)
    slots = StateSlots([0, 0, 0, 0, 9, 10, 11, 12], range(1, 9))
    inputs = StepInputs(
        context_lens=lens + np.repeat([0, 1], 4),
        query_lens=lens,
        tables=[[block] for block in range(1, 9)],
        logit_rows=np.array([0, 2, 8]),
        state_slots=slots if paged.layout.has_states else None,
        adapters=np.zeros(int(lens.sum()), np.int32),
    )
    tokens = mx.zeros((int(lens.sum()),), dtype=mx.int32)
    with paged.watching_layers():
        logits = paged.forward(tokens, inputs, may_repeat=False)
    if logits.ndim != 2 or logits.shape[0] != 3:
        raise ValueError(f"its logits are of shape {logits.shape}, not (3, vocab_size)")
    paged.release()
    return paged
