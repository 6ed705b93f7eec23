"""ModelStore: the public interface to a model's paged memory."""

from __future__ import annotations

import inspect
from typing import Any

import mlx.nn as nn
from mlx_lm.models import cache as mlx_lm_cache

from mlx_paged.drop_in.paged_store import PagedStore, StoreStats
from mlx_paged.drop_in.patching import is_patched
from mlx_paged.drop_in.registry import entry_of, store_for, stores_of
from mlx_paged.errors import InvalidParameterError, MlxPagedError


class NoStoreError(MlxPagedError, RuntimeError):
    """A model has no paged store; the message says why."""


class ModelStore:
    """The paged memory of one model. Safe to use while other threads run the model.

    Args:
        model: An mlx-lm model. Its store is created if it has none yet.

    Raises:
        InvalidParameterError: `model` is not a model.
        NoStoreError: mlx-lm is not paged, or the model uses mlx-lm's own caches.
    """

    def __init__(self, model: Any) -> None:
        if not isinstance(model, nn.Module):
            raise InvalidParameterError("model", "a model as mlx_lm.load returns it", model)
        if not is_patched():
            raise NoStoreError(
                "no model has a paged store: mlx-lm is not paged at the moment "
                "(mlx_paged.unpatch was called, or MLX_PAGED_DISABLE is set)"
            )
        if not stores_of(model):
            try:
                caches = inspect.unwrap(mlx_lm_cache.make_prompt_cache)(model)
            except Exception as error:
                raise NoStoreError(
                    f"{type(model).__name__} has no paged store: mlx-lm makes no prompt cache for "
                    f"it ({type(error).__name__}: {error})"
                ) from error
            store_for(model, caches)
        self._model = model
        self._stores()  # raises

    def _stores(self) -> list[PagedStore]:
        # Looked up each time, because new weights start a new store.
        found = stores_of(self._model)
        if not found:
            entry = entry_of(self._model)
            reason = entry.sample_failure if entry is not None else ""
            raise NoStoreError(
                f"this model has no paged store: {reason or 'its stores were forgotten since'}"
            )
        return found

    @property
    def block_size(self) -> int:
        """Number of tokens per block."""
        return self._stores()[-1].block_size

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        return self._stores()[-1].flat.bytes_per_token

    @property
    def nbytes(self) -> int:
        """Memory of the whole store, including empty blocks."""
        return self.stats().nbytes

    def stats(self) -> StoreStats:
        """Current statistics."""
        return StoreStats.sum([store.stats() for store in self._stores()])

    @property
    def limit(self) -> int:
        """Maximum size of the store in bytes while it keeps prefixes that no live prompt cache
        holds.

        The store grows past the limit for live caches, and shrinks again when they are gone. A new
        limit takes effect at once, and also applies to later weights of the model; 0 keeps almost
        nothing. The default is `MLX_PAGED_CACHE_BYTES`, or an eighth of the device's memory.
        """
        return self._stores()[-1].limit

    @limit.setter
    def limit(self, value: int) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise InvalidParameterError("limit", "a number of bytes, at least 0,", value)
        stores = self._stores()
        entry = entry_of(self._model)
        if entry is not None:
            entry.limit = value
        for store in stores:
            store.set_limit(value)

    @property
    def limit_tokens(self) -> int:
        """`limit` in tokens."""
        return self.limit // max(1, self.bytes_per_token)

    @limit_tokens.setter
    def limit_tokens(self, value: int) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise InvalidParameterError("limit_tokens", "a number of tokens, at least 0,", value)
        if not self.bytes_per_token:
            raise InvalidParameterError(
                "limit_tokens", "left alone (this model keeps states, no tokens: set limit)", value
            )
        self.limit = value * self.bytes_per_token

    def clear(self) -> int:
        """Drops all prefixes that no live prompt cache holds. Live caches are not affected.

        Returns:
            Number of bytes freed.
        """
        before = self.nbytes
        for store in self._stores():
            store.clear()
        return before - self.nbytes

    def __repr__(self) -> str:
        stats = self.stats()
        return (
            f"<ModelStore of {type(self._model).__module__}: {stats.nbytes / 2**20:.1f} MiB, "
            f"{stats.num_used_blocks} blocks used, {stats.num_cached_blocks} cached, "
            f"{stats.num_free_blocks} free, limit {self.limit / 2**20:.1f} MiB>"
        )
