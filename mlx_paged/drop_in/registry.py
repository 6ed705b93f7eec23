"""Registry: finds or creates the store of a model, and routes the model's calls to it."""

from __future__ import annotations

import inspect
import os
import threading
import warnings
import weakref
from collections.abc import Sequence
from functools import wraps
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import RotatingKVCache

from mlx_paged.drop_in.caches import is_loops, leaves_of, sequence_of
from mlx_paged.drop_in.paged_store import PagedStore
from mlx_paged.engine.guard import check_process, claim_process
from mlx_paged.errors import MlxPagedError
from mlx_paged.interrupts import InterruptsDeferred
from mlx_paged.model.kv_formats import KVFormat
from mlx_paged.model.weight_identity import Weights

#: Environment variable: bytes per model for unused prefixes.
CACHE_BYTES_VARIABLE = "MLX_PAGED_CACHE_BYTES"

_stores: dict[int, _Entry] = {}  # by id(model), because modules are not hashable
_warned: set[str] = set()
_finding = threading.Lock()  # guards _stores; each entry has its own lock


class _Entry:
    """The stores of one model.

    Attributes:
        lock: Shared by all stores. Its holder may run the model and read its weights.
        stores: Stores for the model's current weights, one per set of cache types and KV format.
            The set can change at run time.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.stores: dict[tuple[Any, ...], PagedStore | None] = {}
        self.limit: int | None = None  # bytes for unused prefixes; None: from the environment
        self.sample_failure = ""  # why there is no store
        self._weights: Weights | None = None

    def store(
        self, model: nn.Module, kinds: tuple[Any, ...], kv_format: KVFormat | None
    ) -> PagedStore | None:
        """Returns the store for a set of cache types and a KV format; creates it on first use."""
        with InterruptsDeferred(), self.lock:
            if self._weights is None or not self._weights.are_still_of(model):
                self.retire()
                self._weights = Weights(model)
            key = (*kinds, kv_format)
            if key not in self.stores:
                self.stores[key] = self._make(model, kv_format)
            return self.stores[key]

    def _make(self, model: nn.Module, kv_format: KVFormat | None) -> PagedStore | None:
        cache_bytes = _cache_bytes() if self.limit is None else self.limit
        reason = _unusable_device()
        if reason is None:
            try:
                claim_process()
                store = PagedStore(
                    model, cache_bytes=cache_bytes, lock=self.lock, kv_format=kv_format
                )
                _reroute(model)
                return store
            except MlxPagedError as error:
                reason = str(error)
            except Exception as error:
                # A model may fail in any way with caches that it does not know.
                kind = str(getattr(model, "model_type", type(model).__name__))
                reason = f"model_type {kind!r} is not supported: {type(error).__name__}: {error}"
        self.sample_failure = reason
        _warn(reason)
        return None

    def forget_weights(self) -> None:
        """Makes the next call create a new store, even if the weights look unchanged."""
        with InterruptsDeferred(), self.lock:
            self.retire()
            self._weights = None

    def retire(self) -> None:
        """Retires all stores; only their current holders keep using them."""
        stores, self.stores = self.stores, {}
        for store in stores.values():
            if store is not None:
                store.retire()


def store_for(
    model: Any, caches: Sequence[Any], kv_format: KVFormat | None = None
) -> PagedStore | None:
    """Returns the store of a model. If it has none, warns once with the reason and returns None.

    Args:
        caches: mlx-lm's own caches for the model.
        kv_format: Storage format of keys and values; None uses the model's dtype.

    Raises:
        ForkedProcessError: Called in a forked child of a process that has used MLX.
    """
    check_process()  # before taking any lock
    if not isinstance(model, nn.Module):
        return None
    if any(isinstance(c, RotatingKVCache) and c.keep for c in caches):
        return None  # `max_kv_size` is set: the cache drops the middle of the text
    with _finding:
        entry = _stores.get(id(model))
        if entry is None:
            entry = _stores[id(model)] = _Entry()
            weakref.finalize(model, _drop, id(model))
    kinds = tuple((type(c), getattr(c, "max_size", None)) for c in leaves_of(caches))
    return entry.store(model, kinds, kv_format)


def entry_of(model: Any) -> _Entry | None:
    """Returns the entry of a model, or None."""
    return _stores.get(id(model))


def stores_of(model: Any) -> list[PagedStore]:
    """Returns all stores of a model."""
    entry = _stores.get(id(model))
    return [] if entry is None else [s for s in entry.stores.values() if s is not None]


def forget_all() -> None:
    """Drops all stores. Live prompt caches keep theirs."""
    for key in list(_stores):
        _drop(key)


def _drop(key: int) -> None:
    # Also runs as a finalizer, at any time in any thread, so it must not wait for a lock.
    entry = _stores.pop(key, None)
    if entry is not None:
        entry.retire()


def _warn(reason: str) -> None:
    if reason not in _warned:
        _warned.add(reason)
        warnings.warn(
            f"mlx_paged leaves this model to mlx-lm's own dense caches: {reason}",
            RuntimeWarning,
            stacklevel=6,
        )


def _unusable_device() -> str | None:
    from mlx_paged.platform import has_kernels

    if has_kernels():
        return None
    return "this build of mlx_paged has no kernels for the default device, a GPU"


def _cache_bytes() -> int:
    from mlx_paged.engine.memory import device_memory

    value = os.environ.get(CACHE_BYTES_VARIABLE)
    if value is None:
        return device_memory() // 8
    if not value.isdecimal():
        raise ValueError(f"{CACHE_BYTES_VARIABLE} must be a number of bytes but is {value!r}")
    return int(value)


def _reroute(model: nn.Module) -> None:
    """Makes ``model(tokens, cache=caches)`` a step of the store. Idempotent.

    Changes only this model's class, to a subclass. With any other cache, or none, the model behaves
    as before.
    """
    base: Any = type(model)
    if getattr(base, "mlx_paged_reroutes", False):
        return  # a copy of a rerouted model has its class
    signature = inspect.signature(base.__call__)

    @wraps(base.__call__)  # mlx-lm inspects the parameters for features
    def __call__(self: Any, *args: Any, **kwargs: Any) -> mx.array:
        caches = kwargs.get("cache")
        if caches is None and len(args) > 1:
            caches = signature.bind(self, *args, **kwargs).arguments.get("cache")
        sequence = sequence_of(caches) if caches else None
        if caches is None or sequence is None:
            return base.__call__(self, *args, **kwargs)
        if not sequence.store.flat.is_of(self):
            raise ValueError("[paged prompt cache] this cache belongs to another model")
        arguments = signature.bind(self, *args, **kwargs).arguments
        (_, tokens), *others = ((k, v) for k, v in arguments.items() if v is not self)
        options = {k: v for k, v in others if k != "cache" and v is not None}
        embeddings = options.pop("input_embeddings", None)
        if options:
            raise TypeError(
                f"[paged prompt cache] {sorted(options)} must be None: a paged step makes its own. "
                "Set MLX_PAGED_DISABLE=1 to run this model with mlx-lm's own caches"
            )
        return sequence.forward(tokens, embeddings, is_lazy=not is_loops(caches))

    members = {"__call__": __call__, "__module__": base.__module__, "mlx_paged_reroutes": True}
    model.__class__ = type(base.__name__, (base,), members)
