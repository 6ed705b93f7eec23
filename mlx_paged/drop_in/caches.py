"""Paged prompt caches with mlx-lm's classes, attributes and methods, and how they are made."""

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

    A model that is called with these runs paged and never looks into them (`registry`). Other code
    gets dense arrays, which are copies.

    Attributes:
        plain: mlx-lm's class, whose place it takes.
    """

    plain: type[Any] = KVCache

    def __init__(self, sequence: PagedSequence, layer: int) -> None:
        self.sequence = sequence
        self.layer = layer

    @property
    def offset(self) -> int:
        """Tokens in the cache: the position of the next one."""
        return self.sequence.offsets[self.layer]

    @property
    def nbytes(self) -> int:
        return self.sequence.nbytes(self.layer)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # All layers of a prompt cache find the same fork in `memo`.
        return type(self)(copy.deepcopy(self.sequence, memo), self.layer)

    def __copy__(self) -> Any:
        return copy.deepcopy(self)

    def __reduce__(self) -> Any:
        return type(self.dense()).from_state, (self.dense().state,)

    def dense(self) -> Any:
        """mlx-lm's own cache with the same content."""
        return self.plain.from_state(self.state)  # type: ignore[attr-defined]


class _KVPromptCache(_PromptCache):
    """A layer with attention."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Stores ``[batch, num_kv_heads, length, head_dim]``; returns all that is there."""
        self.sequence.write(self.layer, keys, values)
        return self.keys_and_values()

    def is_trimmable(self) -> bool:
        """True if `trim` takes any number; not once tokens have slid out of a window for good."""
        return self.sequence.is_trimmable(self.layer)

    def trim(self, n: int) -> int:
        """Forgets the last `n` tokens, or all there are; returns how many that were."""
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
        """State of mlx-lm's class besides keys, values and offset."""
        return ()

    def _check(self, source: Any) -> None:
        """Raises `ValueError` where a cache of mlx-lm's cannot be taken."""


class PagedKVCache(_KVPromptCache, KVCache):  # type: ignore[misc]
    """Stands where mlx-lm has a `KVCache`."""


class PagedRotatingKVCache(_KVPromptCache, RotatingKVCache):  # type: ignore[misc]
    """Stands where mlx-lm has a `RotatingKVCache`: a layer with a sliding window.

    The dense view has what the window holds. The store has some more before it, so this one can be
    trimmed as long as mlx-lm's, and a little longer.
    """

    plain = RotatingKVCache
    keep = 0

    @property
    def max_size(self) -> int:
        """The window."""
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
        """As mlx-lm's: rows of a longer piece see each its own window, so it returns them all."""
        before = self.size() if keys.shape[2] == 1 else min(self.offset, self.max_size - 1)
        self.sequence.write(self.layer, keys, values)
        num_tokens = min(self.offset, before + keys.shape[2])
        if keys.shape[2] == 1:
            num_tokens = self.size()
        return self.sequence.dense(self.layer, self.offset - num_tokens)

    def make_mask(self, *args: Any, **kwargs: Any) -> Any:
        return self.dense().make_mask(*args, **kwargs)


class PagedChunkedKVCache(_KVPromptCache, ChunkedKVCache):  # type: ignore[misc]
    """Stands where mlx-lm has a `ChunkedKVCache`: a layer that sees its own chunk of the text."""

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
        """Nothing is dropped here."""

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> Any:
        """For mlx-lm's server, which asks for it: sequences with these run in the store."""
        raise ValueError("chunked caches cannot be merged into a dense batch")


class PagedArraysCache(_PromptCache, ArraysCache):  # type: ignore[misc]
    """Stands where mlx-lm has an `ArraysCache`: a layer with recurrent state."""

    plain = ArraysCache
    # mlx-lm's batches are padded, and these say how; here nothing is.
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
    """Stands for a cache that the model makes and does not use."""

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

    After every chunk of a prompt they evaluate the state of the caches: here that waits for the
    chunk and copies nothing.
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
    """The caches of a sequence, put together as mlx-lm does for the model."""
    leaves = [_kind_of(spec)(sequence, i) for i, spec in enumerate(sequence.store.flat.specs)]
    return [_assembled(shape, leaves) for shape in sequence.store.flat.layout.tree]


def _assembled(shape: Any, leaves: list[Any]) -> Any:
    # (`CacheLayout.assemble` does the same and keeps the leaves until cycles are collected; the
    # blocks of a prompt cache are to be free the moment it goes.)
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
    """The same for a loop of mlx-lm's."""
    return [_WorkingCache(sequence, i) for i in range(len(sequence.store.flat.layout.tree))]


def is_loops(caches: Sequence[Any]) -> bool:
    """True if these are `working_caches`."""
    return isinstance(caches[0], _WorkingCache)


def sequence_of(caches: Sequence[Any]) -> PagedSequence | None:
    """The sequence behind a whole prompt cache; None where that is not one of ours."""
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
    """A model's caches, taken out of the lists that some models have them in."""
    leaves: list[Any] = []
    for cache in caches:
        leaves += leaves_of(cache.caches) if isinstance(cache, CacheList) else [cache]
    return leaves


def dense_copy(cache: Any) -> Any:
    """mlx-lm's own cache with the same content; a cache that is not ours as it is."""
    if isinstance(cache, CacheList):
        return CacheList(*(dense_copy(c) for c in cache.caches))
    return cache.dense() if isinstance(cache, _PromptCache) else cache


def is_importable(caches: Sequence[Any], store: PagedStore) -> bool:
    """True if `import_dense` can take mlx-lm's own caches of a model."""
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
    """Copies mlx-lm's own caches of one sequence into a store."""
    sequence = PagedSequence(store)
    leaves = leaves_of(caches)
    for source, target in zip(leaves, leaves_of(prompt_cache(sequence))):
        if isinstance(target, PagedArraysCache):
            if any(array is not None for array in source.cache):
                target.cache = source.cache
        elif not source.empty():
            _restore(target, source)
    # Unused ones move along.
    sequence.move_to(max((s.offset for s in leaves if hasattr(s, "offset")), default=0))
    return sequence


def _restore(cache: _KVPromptCache, source: Any) -> None:
    """Makes one layer hold what one of mlx-lm's caches does."""
    cache.trim(cache.offset)
    if source.keys is None or source.offset == 0:
        return
    if isinstance(source, RotatingKVCache):
        parts = (source._temporal_order(x) for x in (source.keys, source.values))
        keys, values = (x[:, :, -source.size() :] for x in parts)
    else:
        keys, values = source.keys_and_values()
    # Tokens that left a window are never read again: they get a place, and no content.
    cache.sequence.offsets[cache.layer] = source.offset - keys.shape[2]
    cache.sequence.write(cache.layer, keys, values)
