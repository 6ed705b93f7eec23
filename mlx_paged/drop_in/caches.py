"""Paged prompt caches: subclasses of mlx-lm's caches, and conversion to and from dense ones."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, KVCache, RotatingKVCache

from mlx_paged.drop_in.paged_store import PagedStore
from mlx_paged.drop_in.sequence import PagedSequence
from mlx_paged.model.layout import CacheSpec, LayerSpec, StateSpec


class _PromptCache:
    """One layer of a sequence, in mlx-lm's cache protocol.

    A model called with these runs paged and never looks into them (see `registry`). Other code gets
    copies as dense arrays.

    Attributes:
        plain: The mlx-lm class that it replaces.
    """

    plain: type[Any] = KVCache

    def __init__(self, sequence: PagedSequence, layer: int) -> None:
        self.sequence = sequence
        self.layer = layer

    @property
    def offset(self) -> int:
        """Number of tokens in the cache; also the position of the next one."""
        return self.sequence.offsets[self.layer]

    @property
    def nbytes(self) -> int:
        return self.sequence.nbytes(self.layer)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # `memo` makes all layers of a prompt cache share one fork.
        return type(self)(copy.deepcopy(self.sequence, memo), self.layer)

    def __copy__(self) -> Any:
        return copy.deepcopy(self)

    def __reduce__(self) -> Any:
        return type(self.dense()).from_state, (self.dense().state,)

    def dense(self) -> Any:
        """Converts to mlx-lm's own cache with the same content."""
        return self.plain.from_state(self.state)  # type: ignore[attr-defined]


class _KVPromptCache(_PromptCache):
    """An attention layer."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Appends ``[batch, num_kv_heads, length, head_dim]``; returns the whole content."""
        self.sequence.write(self.layer, keys, values)
        return self.keys_and_values()

    def is_trimmable(self) -> bool:
        """True if `trim` can remove any number of tokens; False once some slid out of a window."""
        return self.sequence.is_trimmable(self.layer)

    def trim(self, n: int) -> int:
        """Removes up to `n` tokens from the end; returns how many were removed."""
        return self.sequence.trim(self.layer, n)

    def size(self) -> int:
        return self.offset

    def empty(self) -> bool:
        return self.offset == 0

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """``[batch, num_kv_heads, offset, head_dim]`` keys and values."""
        return self.sequence.dense(self.layer)

    @property
    def keys(self) -> mx.array | None:
        return None if self.empty() else self.keys_and_values()[0]

    @property
    def values(self) -> mx.array | None:
        return None if self.empty() else self.keys_and_values()[1]

    @property
    def state(self) -> Any:
        return self.keys, self.values, self.offset, *self._more_state()

    @state.setter
    def state(self, v: Any) -> None:
        source = self.plain.from_state(v)
        self._check(source)
        _restore(self, source)

    def _more_state(self) -> tuple[Any, ...]:
        """State of mlx-lm's class other than keys, values and offset."""
        return ()

    def _check(self, source: Any) -> None:
        """Raises `ValueError` if this cannot hold the content of mlx-lm's cache `source`."""


class PagedKVCache(_KVPromptCache, KVCache):  # type: ignore[misc]
    """Replaces mlx-lm's `KVCache`."""


class PagedRotatingKVCache(_KVPromptCache, RotatingKVCache):  # type: ignore[misc]
    """Replaces mlx-lm's `RotatingKVCache`: a layer with a sliding window.

    The dense view covers the window. The store keeps a few more tokens before it, so this cache
    stays trimmable a little longer than mlx-lm's.
    """

    plain = RotatingKVCache
    keep = 0

    @property
    def max_size(self) -> int:
        """The window size."""
        window = self.sequence.store.flat.spec(self.layer).window
        assert window is not None
        return window

    @property
    def _idx(self) -> int:
        return self.size()

    def size(self) -> int:
        return min(self.offset, self.max_size)

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """``[batch, num_kv_heads, size, head_dim]`` keys and values, oldest first."""
        return self.sequence.dense(self.layer, self.offset - self.size())

    def _more_state(self) -> tuple[Any, ...]:
        return self.keep, self.max_size, self._idx

    def _check(self, source: Any) -> None:
        if source.keep != 0 or source.max_size != self.max_size:
            raise ValueError(
                f"[paged prompt cache] state must be of keep 0 and max_size {self.max_size} but "
                f"got {source.keep} and {source.max_size}"
            )

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Like mlx-lm's: returns the union of the windows that the new rows see."""
        before = self.size() if keys.shape[2] == 1 else min(self.offset, self.max_size - 1)
        self.sequence.write(self.layer, keys, values)
        num_tokens = min(self.offset, before + keys.shape[2])
        if keys.shape[2] == 1:
            num_tokens = self.size()
        return self.sequence.dense(self.layer, self.offset - num_tokens)

    def make_mask(self, *args: Any, **kwargs: Any) -> Any:
        return self.dense().make_mask(*args, **kwargs)


class PagedChunkedKVCache(_KVPromptCache, ChunkedKVCache):  # type: ignore[misc]
    """Replaces mlx-lm's `ChunkedKVCache`: a layer that sees only the current chunk of the text."""

    plain = ChunkedKVCache
    start_position = 0

    @property
    def chunk_size(self) -> int:
        chunk = self.sequence.store.flat.spec(self.layer).chunk
        assert chunk is not None
        return chunk

    def _more_state(self) -> tuple[Any, ...]:
        return self.chunk_size, self.start_position

    def maybe_trim_front(self) -> None:
        """Does nothing: the store keeps all chunks."""

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> Any:
        """Exists because mlx-lm's server looks for it. Sequences with these run in the store."""
        raise ValueError("chunked caches cannot be merged into a dense batch")


class PagedArraysCache(_PromptCache, ArraysCache):  # type: ignore[misc]
    """Replaces mlx-lm's `ArraysCache`: a layer with recurrent state."""

    plain = ArraysCache
    # Padding of mlx-lm's batches; paged batches have none.
    left_padding = None
    lengths = None

    @property
    def cache(self) -> list[mx.array | None]:
        """``[batch, ...]`` arrays; None before the first token."""
        return list(self.sequence.states(self.layer))

    @cache.setter
    def cache(self, entries: Sequence[mx.array | None]) -> None:
        self.sequence.set_states(self.layer, entries)

    def __setitem__(self, idx: int, value: mx.array | None) -> None:
        entries = self.cache
        entries[idx] = value
        self.cache = entries

    @property
    def state(self) -> Any:
        return self.cache, self.left_padding, self.lengths

    @state.setter
    def state(self, v: Any) -> None:
        source = self.plain.from_state(v)
        if source.left_padding is not None or source.lengths is not None:
            raise ValueError("[paged prompt cache] state must be of sequences without padding")
        self.cache = source.cache


class _UnusedCache(PagedKVCache):
    """Replaces a cache that the model creates but never uses."""

    def empty(self) -> bool:
        return True

    def is_trimmable(self) -> bool:
        return True

    @property
    def nbytes(self) -> int:
        return 0

    def dense(self) -> KVCache:
        return KVCache()


class _WorkingCache(_PromptCache):
    """Stand-in for one of a model's caches in mlx-lm's own loops.

    The loops evaluate `state` after every prompt chunk. Here that waits for the chunk without a
    copy.
    """

    @property
    def offset(self) -> int:
        return self.sequence.offset

    @property
    def state(self) -> Any:
        return self.sequence.store.written() if self.layer == 0 else []

    def is_trimmable(self) -> bool:
        return not self.sequence.store.has_states

    def trim(self, n: int) -> int:
        n = min(n, self.offset)
        if self.layer == 0:
            self.sequence.trim_all(n)
        return n


def prompt_cache(sequence: PagedSequence) -> list[Any]:
    """Returns the caches of a sequence, in the structure that mlx-lm uses for the model."""
    leaves = [_kind_of(spec)(sequence, i) for i, spec in enumerate(sequence.store.flat.specs)]
    return [_assembled(shape, leaves) for shape in sequence.store.flat.layout.tree]


def _assembled(shape: Any, leaves: list[Any]) -> Any:
    # Not `CacheLayout.assemble`: that one keeps the leaves alive until garbage collection, but a
    # dropped prompt cache must free its blocks at once.
    if isinstance(shape, int):
        return leaves[shape]
    return CacheList(*(_assembled(part, leaves) for part in shape))


def _kind_of(spec: CacheSpec) -> type[_PromptCache]:
    if isinstance(spec, StateSpec):
        return PagedArraysCache
    if not isinstance(spec, LayerSpec):
        return _UnusedCache
    if spec.chunk is not None:
        return PagedChunkedKVCache
    return PagedKVCache if spec.window is None else PagedRotatingKVCache


def working_caches(sequence: PagedSequence) -> list[Any]:
    """Returns stand-in caches of a sequence for mlx-lm's own loops."""
    return [_WorkingCache(sequence, i) for i in range(len(sequence.store.flat.layout.tree))]


def is_loops(caches: Sequence[Any]) -> bool:
    """True if these are `working_caches`."""
    return isinstance(caches[0], _WorkingCache)


def sequence_of(caches: Sequence[Any]) -> PagedSequence | None:
    """Returns the sequence behind a whole prompt cache, or None if it is not a paged one."""
    leaves = leaves_of(caches)
    if not leaves or not isinstance(leaves[0], _PromptCache):
        return None
    sequence = leaves[0].sequence
    if all(isinstance(c, _WorkingCache) for c in leaves):
        return sequence
    whole = len(leaves) == len(sequence.offsets) and all(
        isinstance(c, _PromptCache) and c.sequence is sequence and c.layer == i
        for i, c in enumerate(leaves)
    )
    return sequence if whole else None


def leaves_of(caches: Sequence[Any]) -> list[Any]:
    """Flattens a model's caches; some models nest them in lists."""
    leaves: list[Any] = []
    for cache in caches:
        leaves += leaves_of(cache.caches) if isinstance(cache, CacheList) else [cache]
    return leaves


def dense_copy(cache: Any) -> Any:
    """Converts a paged cache to mlx-lm's own; returns any other cache as is."""
    if isinstance(cache, CacheList):
        return CacheList(*(dense_copy(c) for c in cache.caches))
    return cache.dense() if isinstance(cache, _PromptCache) else cache


def is_importable(caches: Sequence[Any], store: PagedStore) -> bool:
    """True if `import_dense` can take these mlx-lm caches."""
    leaves = leaves_of(caches)
    return len(leaves) == len(store.flat.specs) and all(map(_fits, leaves, store.flat.specs))


def _fits(cache: Any, spec: CacheSpec) -> bool:
    if type(cache) is ArraysCache:
        is_padded = cache.left_padding is not None or cache.lengths is not None
        return (
            isinstance(spec, StateSpec) and not is_padded and len(cache.cache) == len(spec.shapes)
        )
    if isinstance(spec, StateSpec):
        return False
    if type(cache) is RotatingKVCache:
        return cache.keep == 0 and cache.max_size == getattr(spec, "window", None)
    if type(cache) is ChunkedKVCache:
        return cache.chunk_size == getattr(spec, "chunk", None)
    if not isinstance(spec, LayerSpec):
        return type(cache) is KVCache and cache.empty()
    return type(cache) is KVCache and spec.window is None and spec.chunk is None


def import_dense(caches: Sequence[Any], store: PagedStore) -> PagedSequence:
    """Copies mlx-lm's caches of one sequence into a store."""
    sequence = PagedSequence(store)
    leaves = leaves_of(caches)
    for source, target in zip(leaves, leaves_of(prompt_cache(sequence))):
        if isinstance(target, PagedArraysCache):
            if any(array is not None for array in source.cache):
                target.cache = source.cache
        elif not source.empty():
            _restore(target, source)
    # Unused caches move along.
    sequence.move_to(max((s.offset for s in leaves if hasattr(s, "offset")), default=0))
    return sequence


def _restore(cache: _KVPromptCache, source: Any) -> None:
    """Loads the content of an mlx-lm cache into one layer."""
    cache.trim(cache.offset)
    if source.keys is None or source.offset == 0:
        return
    if isinstance(source, RotatingKVCache):
        parts = (source._temporal_order(x) for x in (source.keys, source.values))
        keys, values = (x[:, :, -source.size() :] for x in parts)
    else:
        keys, values = source.keys_and_values()
    # Tokens outside the window are never read again, so they get positions but no content.
    cache.sequence.offsets[cache.layer] = source.offset - keys.shape[2]
    cache.sequence.write(cache.layer, keys, values)
