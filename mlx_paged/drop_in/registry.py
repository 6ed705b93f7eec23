"""Registry: finds the store of a model, if it has one, and routes the model's calls to it."""

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

from mlx_paged import ops
from mlx_paged.drop_in.caches import is_loops, leaves_of, sequence_of
from mlx_paged.drop_in.locking import InterruptsDeferred
from mlx_paged.drop_in.paged_store import PagedStore
from mlx_paged.engine.guard import check_process, claim_process
from mlx_paged.errors import MlxPagedError
from mlx_paged.model.kv_formats import KVFormat

#: Memory for prefixes that nobody uses at the moment, in bytes, for each model.
CACHE_BYTES_VARIABLE = "MLX_PAGED_CACHE_BYTES"

_SMALL = 1 << 16  # bytes

_stores: dict[int, _Entry] = {}  # by id(model): modules cannot be hashed
_warned: set[str] = set()
_finding = threading.Lock()  # of entries; what an entry holds has a lock of its own


class _Entry:
    """The stores of one model.

    Attributes:
        lock: Of all of them. Whoever has it may run the model in steps and look at its weights.
        stores: With the model's present weights, one for each set of caches that it may ask for
            (they can be changed at run time), and each format of keys and values.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.stores: dict[tuple[Any, ...], PagedStore | None] = {}
        self.limit: int | None = None  # bytes for unused prefixes; None: as the environment says
        self.sample_failure = ""  # there is no store
        self._weights: list[tuple[str, _Weight]] | None = None

    def store(
        self, model: nn.Module, kinds: tuple[Any, ...], kv_format: KVFormat | None
    ) -> PagedStore | None:
        """The store for a set of caches and a format, made when it is first asked for."""
        with InterruptsDeferred(), self.lock:
            if self._weights is None or not self._is_current(model, self._weights):
                self.retire()
                self._weights = [(name, _Weight(array)) for name, array in _weights(model)]
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
                # Whatever a model does with caches that it was not made for, it is not proven.
                kind = str(getattr(model, "model_type", type(model).__name__))
                reason = f"model_type {kind!r} is not supported: {type(error).__name__}: {error}"
        self.sample_failure = reason
        _warn(reason)
        return None

    def forget_weights(self) -> None:
        """Makes the next call begin a new store, whatever the weights look like."""
        with InterruptsDeferred(), self.lock:
            self.retire()
            self._weights = None

    def retire(self) -> None:
        """The stores are for nobody new."""
        stores, self.stores = self.stores, {}
        for store in stores.values():
            if store is not None:
                store.retire()

    @staticmethod
    def _is_current(model: nn.Module, known: list[tuple[str, _Weight]]) -> bool:
        """True if the weights are there that the stored keys and values were computed with."""
        weights = _weights(model)
        return len(weights) == len(known) and all(
            name == known_name and weight.is_still(array)
            for (name, array), (known_name, weight) in zip(weights, known)
        )


class _Weight:
    """An array's contents, remembered without keeping them alive; a small array's are kept."""

    def __init__(self, array: mx.array) -> None:
        self._contents = ops.array_contents(array)
        # (Another Python object: an update in place shall not reach it.)
        self._value = mx.array(array) if array.nbytes <= _SMALL else None

    def is_still(self, array: mx.array) -> bool:
        """True if this array has the same contents, or is a small one of the same values.

        (Gemma 3n replaces small weights of its own, by what they are already, in every forward.)
        """
        if self._contents.are_still_of(array):
            return True
        old = self._value
        if old is None or (old.shape, old.dtype) != (array.shape, array.dtype):
            return False
        if not mx.array_equal(old, array).item():
            return False
        self._contents = ops.array_contents(array)
        return True


def _weights(model: nn.Module) -> list[tuple[str, mx.array]]:
    """The parameters in their order, each with its name in its module.

    (Every new prompt cache asks: `Module.parameters` takes several times as long.)
    """
    found: list[tuple[str, mx.array]] = []

    def collect(name: str, value: object) -> None:
        if isinstance(value, mx.array):
            found.append((name, value))
        elif isinstance(value, dict):  # modules are
            for key, inner in value.items():
                if isinstance(inner, (mx.array, dict, list)) and not key.startswith("_"):
                    collect(key, inner)
        elif isinstance(value, list):
            for inner in value:
                collect(name, inner)

    collect("", model)
    return found


def store_for(
    model: Any, caches: Sequence[Any], kv_format: KVFormat | None = None
) -> PagedStore | None:
    """The store of a model; None (and one warning that names the family) where it has none.

    Args:
        caches: mlx-lm's own caches for the model.
        kv_format: what keys and values are kept in; None: as the model computes.

    Raises:
        ForkedProcessError: in a child of a process that has used MLX.
    """
    check_process()  # before any lock is asked for
    if not isinstance(model, nn.Module):
        return None
    if any(isinstance(c, RotatingKVCache) and c.keep for c in caches):
        return None  # asked for with `max_kv_size`: a cache that forgets the middle of its text
    with _finding:
        entry = _stores.get(id(model))
        if entry is None:
            entry = _stores[id(model)] = _Entry()
            weakref.finalize(model, _drop, id(model))
    kinds = tuple((type(c), getattr(c, "max_size", None)) for c in leaves_of(caches))
    return entry.store(model, kinds, kv_format)


def entry_of(model: Any) -> _Entry | None:
    """All that is known of a model."""
    return _stores.get(id(model))


def stores_of(model: Any) -> list[PagedStore]:
    """Every store of a model."""
    entry = _stores.get(id(model))
    return [] if entry is None else [s for s in entry.stores.values() if s is not None]


def forget_all() -> None:
    """Drops every store. Live prompt caches keep theirs."""
    for key in list(_stores):
        _drop(key)


def _drop(key: int) -> None:
    # (A finalizer, too: at any moment, in any thread, so it waits for no lock.)
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
    """Makes ``model(tokens, cache=caches)`` a step of the store; twice changes nothing.

    Only the class of the one model changes, to a subclass of itself. With any other cache, or none,
    the model is as mlx-lm made it.
    """
    base: Any = type(model)
    if getattr(base, "mlx_paged_reroutes", False):
        return  # (copies of a model have its class)
    signature = inspect.signature(base.__call__)

    @wraps(base.__call__)  # mlx-lm reads off its parameters what a model can do
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
