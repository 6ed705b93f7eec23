"""Converts a loaded model to paged caches, or explains why that is impossible.

`observe` reads the layout of the caches from a dense forward pass. `convert_to_paged` chooses how
to run the model's forward by trying it on a graph that is never evaluated. `build_paged_model` does
so for a family's modes, and compares the result with the dense cache if the family is unverified.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import unwrap
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from mlx_paged.errors import UnsupportedModelError
from mlx_paged.model import patches
from mlx_paged.model.adaptations import adapt, context_limit
from mlx_paged.model.caches import ContextLimit, LatentScores, StepContext
from mlx_paged.model.config_files import vocab_size
from mlx_paged.model.families import require_family
from mlx_paged.model.layout import (
    CacheLayout,
    CacheSpec,
    LayerSpec,
    Mode,
    Shape,
    StateSpec,
    UnusedSpec,
    assemble,
)
from mlx_paged.model.paged_model import PagedModel
from mlx_paged.model.patches import OutputProjection, OutputRows, Overrides
from mlx_paged.model.pipeline import Stage, enter_stage
from mlx_paged.model.plan import StateSlots, StepInputs
from mlx_paged.model.recurrent import StateArrays, regrouped
from mlx_paged.model.sharding import Division
from mlx_paged.model.takes_media import TakesMedia
from mlx_paged.model.verify import difference_from_dense, difference_where_cut, tolerance_of
from mlx_paged.platform import Platform

logger = logging.getLogger(__name__)

# Sequences and tokens of the forward. A state that grows with its first tokens (n-gram contexts)
# has its full size after this many.
_SEQUENCES, _TOKENS = 2, 8
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
        UnsupportedModelError: None works; it gives the reasons.
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

    Half of them begin in it. Two of each kind, as code that takes an array of positions for a
    number fails on two and not on one.
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
    )
    tokens = mx.zeros((int(lens.sum()),), dtype=mx.int32)
    logits = paged.forward(tokens, inputs, may_repeat=False)
    if logits.ndim != 2 or logits.shape[0] != 3:
        raise ValueError(f"its logits are of shape {logits.shape}, not (3, vocab_size)")
    paged.release()
    return paged


# --- Observing a dense forward --------------------------------------------------------------------


@dataclass
class Observed:
    """The observations of one dense forward pass.

    Attributes:
        specs: Contents of each leaf of the cache tree; for latent attention, the two halves that
            mlx-lm stores.
        tree: Structure of the leaves.
        mask_windows: Window of the mask requested from each leaf, or None.
        recurrent: Modules that got a cache of recurrent state and passed it to no other, and True
            for those that also got a cache of attention.
        projection: The module that made the logits; None if none did.
    """

    specs: list[CacheSpec]
    tree: tuple[Shape, ...]
    mask_windows: list[int | None]
    recurrent: list[tuple[nn.Module, bool]] = field(default_factory=list)
    projection: OutputProjection | None = None


def observe(model: nn.Module, model_type: str) -> Observed:
    """Runs one lazy dense forward pass with mlx-lm's own caches, without evaluating it.

    It shows the contents of each cache, the modules with recurrent state, and the module that makes
    the logits, without knowledge of the family.

    Raises:
        UnsupportedModelError: A cache of an unsupported kind.
    """
    # Unwrapped: the drop-in would give paged caches instead of the model's own.
    leaves, tree = _flatten(unwrap(make_prompt_cache)(model))
    for leaf in leaves:
        _require_known(leaf, model_type)
    windows: list[int | None] = [None] * len(leaves)
    for i, leaf in enumerate(leaves):
        _record_masks(leaf, windows, i)
    calls = _Calls(model)
    with calls.recorded():
        tokens = mx.zeros((_SEQUENCES, _TOKENS), dtype=mx.int32)
        logits = model(tokens, cache=assemble(tree, leaves))
    specs = [_spec(leaf) for leaf in leaves]
    return Observed(specs, tree, windows, calls.recurrent(), calls.projection(logits))


def _flatten(caches: Sequence[Any]) -> tuple[list[Any], tuple[Shape, ...]]:
    """The leaves of mlx-lm's caches, and the tree to put them together again."""
    leaves: list[Any] = []

    def walk(cache: Any) -> Shape:
        if isinstance(cache, CacheList):
            return tuple(walk(child) for child in cache.caches)
        leaves.append(cache)
        return len(leaves) - 1

    tree = tuple(walk(cache) for cache in caches)
    return leaves, tree


def _leaves_of(caches: Any, is_leaf: Callable[[Any], bool]) -> Iterator[Any]:
    """Leaves among a module's arguments, however deep in lists they are."""
    if is_leaf(caches):
        yield caches
    elif isinstance(caches, CacheList):
        yield from _leaves_of(caches.caches, is_leaf)
    elif isinstance(caches, (list, tuple)):
        for child in caches:
            yield from _leaves_of(child, is_leaf)


def _require_known(cache: Any, model_type: str) -> None:
    if type(cache) in (KVCache, ChunkedKVCache, ArraysCache, StateArrays):
        return
    if type(cache) is RotatingKVCache and cache.keep == 0:
        return
    raise UnsupportedModelError(model_type, f"its {type(cache).__name__} layers are not served")


def _record_masks(leaf: Any, windows: list[int | None], i: int) -> None:
    make_mask = getattr(leaf, "make_mask", None)
    if make_mask is None or isinstance(leaf, ArraysCache):
        return

    def record(*args: Any, **kwargs: Any) -> Any:
        windows[i] = kwargs.get("window_size") or windows[i]
        return make_mask(*args, **kwargs)

    leaf.make_mask = record


def _spec(cache: Any) -> CacheSpec:
    if isinstance(cache, ArraysCache):
        states = cache.cache
        if all(state is None for state in states):
            return UnusedSpec()
        return StateSpec(
            tuple(None if s is None else s.shape[1:] for s in states),
            tuple(mx.float32 if s is None else s.dtype for s in states),
        )
    if cache.keys is None:
        return UnusedSpec()
    return LayerSpec(
        num_kv_heads=cache.keys.shape[1],
        key_dim=cache.keys.shape[3],
        value_dim=cache.values.shape[3],
        dtype=cache.keys.dtype,
        window=cache.max_size if isinstance(cache, RotatingKVCache) else None,
        chunk=cache.chunk_size if isinstance(cache, ChunkedKVCache) else None,
    )


# One thread at a time wraps the classes, so it restores what it found.
_wrapping = threading.Lock()


class _Calls:
    """Records this thread's calls of a model's modules, by wrapping their classes temporarily.

    Other threads may run models of the same classes at the same time.
    """

    def __init__(self, model: nn.Module) -> None:
        self._thread = threading.current_thread()
        self._types = {type(m) for m in model.modules()}
        self._num_ranks = Division.of(model).num_ranks
        self._stack: list[tuple[nn.Module, set[int]]] = []
        self._holders: dict[int, tuple[nn.Module, bool]] = {}
        self._projections: list[tuple[OutputProjection, int]] = []

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Wraps `__call__` (and `as_linear`) of every class of the model's modules."""
        wrapped: list[tuple[type, str, Any]] = []
        with _wrapping:
            try:
                for kind, method in self._methods():
                    original = kind.__dict__[method]
                    wrapped.append((kind, method, original))
                    setattr(kind, method, self._wrap(original, method))
                yield
            finally:
                for kind, method, original in wrapped:
                    setattr(kind, method, original)

    def _methods(self) -> set[tuple[type, str]]:
        return {
            (kind, method)
            for leaf_type in self._types
            for kind in leaf_type.__mro__
            for method in ("__call__", "as_linear")
            if method in kind.__dict__ and kind is not nn.Module
        }

    def _wrap(self, original: Any, method: str) -> Any:
        calls = self

        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is not calls._thread:
                return original(module, *args, **kwargs)
            given = (*args, *kwargs.values())
            states = {id(c) for c in _leaves_of(given, lambda c: isinstance(c, ArraysCache))}
            for _, outer in calls._stack:
                outer -= states  # passed on: the last module called holds it
            calls._stack.append((module, states))
            result = original(module, *args, **kwargs)
            calls._stack.pop()
            if states:
                attention = _leaves_of(given, lambda c: isinstance(c, (KVCache, RotatingKVCache)))
                calls._holders[id(module)] = (module, next(attention, None) is not None)
            if _is_projection(given, result):
                calls._projections.append((OutputProjection(module, method), result.shape[-1]))
            return result

        return call

    def recurrent(self) -> list[tuple[nn.Module, bool]]:
        """See `Observed.recurrent`."""
        return list(self._holders.values())

    def projection(self, logits: mx.array) -> OutputProjection | None:
        """Returns the last, so outermost, module that made as many outputs as there are logits, or
        this rank's part of them."""
        for projection, width in reversed(self._projections):
            if logits.shape[-1] in (width, width * self._num_ranks):
                return projection
        return None


def _is_projection(given: tuple[Any, ...], result: Any) -> bool:
    """Returns True if a call mapped the last axis of one floating-point array, and nothing else."""
    if len(given) != 1 or not isinstance(given[0], mx.array) or not isinstance(result, mx.array):
        return False
    [x] = given
    return mx.issubdtype(x.dtype, mx.floating) and x.shape[:-1] == result.shape[:-1]
