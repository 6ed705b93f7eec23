"""Observes a dense forward pass of a model: the contents of its caches, and the modules with state.

It needs no knowledge of the family.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import unwrap
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from mlx_paged.errors import UnsupportedModelError
from mlx_paged.model.layout import CacheSpec, LayerSpec, Shape, StateSpec, UnusedSpec, assemble
from mlx_paged.model.output_rows import OutputProjection
from mlx_paged.model.recurrent import StateArrays
from mlx_paged.model.sharding import Division

# Sequences and tokens of the forward. A state that grows with its first tokens (n-gram contexts)
# has its full size after this many.
_SEQUENCES, _TOKENS = 2, 8


@dataclass
class Observed:
    """The observations of one dense forward pass.

    Attributes:
        specs: Contents of each leaf of the cache tree; for latent attention, the two halves that
            mlx-lm stores.
        tree: Structure of the leaves.
        mask_windows: Window of the mask requested from each leaf, or None.
        recurrent: Modules that got a cache of recurrent state and passed it to no other module,
            each with True if it also got a cache of attention.
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
    """Returns the leaves of mlx-lm's caches, and the tree to put them together again."""
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
        """Returns the last, and thus outermost, module that made as many outputs as there are
        logits, or this rank's part of them."""
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
