"""Watches one lazy dense forward of a model: nothing of it is ever evaluated.

It tells what each cache is given, which modules hold recurrent state, and which one makes the
logits, without knowing the family.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import unwrap
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import (
    ArraysCache,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from mlx_paged.errors import UnsupportedModelError
from mlx_paged.model.layout import Shape, flatten, leaves_of
from mlx_paged.model.output_rows import OutputProjection
from mlx_paged.model.specs import CacheSpec, LayerSpec, StateSpec, UnusedSpec

# Sequences and tokens of the forward. A state that grows with its first tokens (n-gram contexts)
# has its full size after this many.
_SEQUENCES, _TOKENS = 2, 8


@dataclass
class Observed:
    """What the forward told.

    Attributes:
        specs: What each leaf of the cache tree holds; of latent attention the two halves as mlx-lm
            keeps them.
        tree: How the leaves are put together.
        mask_windows: Window of the mask that was asked of each leaf; None: none was.
        recurrent: Modules that were given a cache of recurrent state and passed it to no other,
            and whether they were given a cache of attention too.
        projection: What made the logits; None if no module did.
    """

    specs: list[CacheSpec]
    tree: tuple[Shape, ...]
    mask_windows: list[int | None]
    recurrent: list[tuple[nn.Module, bool]] = field(default_factory=list)
    projection: OutputProjection | None = None


def observe(model: nn.Module, model_type: str) -> Observed:
    """Runs a model lazily with mlx-lm's own caches.

    Raises:
        UnsupportedModelError: for a cache of a kind that is not served.
    """
    # Unwrapped: the drop-in puts paged caches in the place of those that are asked about here.
    leaves, tree = flatten(unwrap(make_prompt_cache)(model))
    for leaf in leaves:
        _require_known(leaf, model_type)
    windows: list[int | None] = [None] * len(leaves)
    for i, leaf in enumerate(leaves):
        _record_masks(leaf, windows, i)
    calls = _Calls(model)
    with calls.recorded():
        logits = model(
            mx.zeros((_SEQUENCES, _TOKENS), dtype=mx.int32), cache=_assemble(leaves, tree)
        )
    specs = [_spec(leaf) for leaf in leaves]
    return Observed(specs, tree, windows, calls.recurrent(), calls.projection(logits))


def _assemble(leaves: list[Any], tree: tuple[Shape, ...]) -> list[Any]:
    from mlx_paged.model.layout import CacheLayout, Mode

    return CacheLayout(Mode.NATIVE, (), tree).assemble(leaves)


def _require_known(cache: Any, model_type: str) -> None:
    if type(cache) in (KVCache, ChunkedKVCache, ArraysCache):
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


class _Calls:
    """Records the calls of a model's modules, by wrapping their classes for a while."""

    def __init__(self, model: nn.Module) -> None:
        self._types = {type(m) for m in model.modules()}
        self._stack: list[tuple[nn.Module, set[int]]] = []
        self._holders: dict[int, tuple[nn.Module, bool]] = {}
        self._projections: list[tuple[OutputProjection, int]] = []

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Wraps `__call__` (and `as_linear`) of every class of the model's modules."""
        wrapped: list[tuple[type, str, Any]] = []
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
            given = (*args, *kwargs.values())
            states = {id(c) for c in leaves_of(given, lambda c: isinstance(c, ArraysCache))}
            for _, outer in calls._stack:
                outer -= states  # passed on: whoever is called last holds it
            calls._stack.append((module, states))
            result = original(module, *args, **kwargs)
            calls._stack.pop()
            if states:
                attends = any(
                    True
                    for _ in leaves_of(given, lambda c: isinstance(c, (KVCache, RotatingKVCache)))
                )
                calls._holders[id(module)] = (module, attends)
            if _is_projection(given, result):
                calls._projections.append((OutputProjection(module, method), result.shape[-1]))
            return result

        return call

    def recurrent(self) -> list[tuple[nn.Module, bool]]:
        """See `Observed.recurrent`."""
        return list(self._holders.values())

    def projection(self, logits: mx.array) -> OutputProjection | None:
        """The last, so outermost, module that made as many outputs as there are logits."""
        for projection, width in reversed(self._projections):
            if width == logits.shape[-1]:
                return projection
        return None


def _is_projection(given: tuple[Any, ...], result: Any) -> bool:
    """Whether a call made a row of numbers of every row of numbers, and nothing else."""
    if len(given) != 1 or not isinstance(given[0], mx.array) or not isinstance(result, mx.array):
        return False
    [x] = given
    return mx.issubdtype(x.dtype, mx.floating) and x.shape[:-1] == result.shape[:-1]
