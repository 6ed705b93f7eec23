"""Paged prompt caches that are mlx-lm's own to whoever looks at them, and how they are made."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, RotatingKVCache

from mlx_paged.drop_in.sequence import PagedSequence
from mlx_paged.drop_in.store import PagedStore


class _PromptCache:
    """One layer of a sequence, in mlx-lm's cache protocol.

    A model that is called with these runs paged and never looks into them (`reroute`). Whoever does
    gets dense keys and values, which are copies.
    """

    def __init__(self, sequence: PagedSequence, layer: int) -> None:
        self.sequence = sequence
        self.layer = layer

    @property
    def offset(self) -> int:
        """Tokens in the cache: the position of the next one."""
        return self.sequence.offsets[self.layer]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Stores ``[batch, num_kv_heads, length, head_dim]``; returns all that is there."""
        self.sequence.write(self.layer, keys, values)
        return self.keys_and_values()

    def is_trimmable(self) -> bool:
        return True

    def trim(self, n: int) -> int:
        """Forgets the last `n` tokens, or all there are; returns how many that were."""
        return self.sequence.trim(self.layer, n)

    def size(self) -> int:
        return self.offset

    def empty(self) -> bool:
        return self.offset == 0

    @property
    def nbytes(self) -> int:
        return self.sequence.nbytes(self.layer)

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """``[batch, num_kv_heads, offset, head_dim]`` keys and values."""
        return self.sequence.dense(self.layer)

    @property
    def keys(self) -> mx.array | None:
        return None if self.empty() else self.keys_and_values()[0]

    @property
    def values(self) -> mx.array | None:
        return None if self.empty() else self.keys_and_values()[1]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # All layers of a prompt cache find the same fork in `memo`.
        return type(self)(copy.deepcopy(self.sequence, memo), self.layer)

    def __copy__(self) -> Any:
        return copy.deepcopy(self)

    def __reduce__(self) -> Any:
        return type(self.dense()).from_state, (self.dense().state,)

    def dense(self) -> Any:
        """mlx-lm's own cache with the same content."""
        raise NotImplementedError


class PagedKVCache(_PromptCache, KVCache):  # type: ignore[misc]
    """Stands where mlx-lm has a `KVCache`."""

    @property
    def state(self) -> Any:
        return self.keys, self.values, self.offset

    @state.setter
    def state(self, v: Any) -> None:
        keys, values, offset = v
        _restore(self, keys, values, offset)

    def dense(self) -> KVCache:
        return KVCache.from_state(self.state)


class PagedRotatingKVCache(_PromptCache, RotatingKVCache):  # type: ignore[misc]
    """Stands where mlx-lm has a `RotatingKVCache`: a layer with a sliding window.

    The dense view has what the window holds. The store has the tokens before it too, so this one
    can be trimmed at any length.
    """

    keep = 0

    @property
    def max_size(self) -> int:
        """The window."""
        window = self.sequence.store.specs[self.layer].window
        assert window is not None
        return window

    @property
    def _idx(self) -> int:
        return self.size()

    def size(self) -> int:
        return min(self.offset, self.max_size)

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """``[batch, num_kv_heads, size, head_dim]`` keys and values, oldest first."""
        keys, values = self.sequence.dense(self.layer)
        start = self.offset - self.size()
        return keys[:, :, start:], values[:, :, start:]

    @property
    def state(self) -> Any:
        return self.keys, self.values, self.offset, self.keep, self.max_size, self._idx

    @state.setter
    def state(self, v: Any) -> None:
        source = RotatingKVCache.from_state(v)
        if source.keep != 0 or source.max_size != self.max_size:
            raise ValueError(
                f"[paged prompt cache] state must be of keep 0 and max_size {self.max_size} but "
                f"got {source.keep} and {source.max_size}"
            )
        _restore(self, *_window_of(source), source.offset)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """As mlx-lm's: rows of a longer piece see each its own window, so it returns them all."""
        before = self.size() if keys.shape[2] == 1 else min(self.offset, self.max_size - 1)
        self.sequence.write(self.layer, keys, values)
        num_tokens = min(self.offset, before + keys.shape[2])
        if keys.shape[2] == 1:
            num_tokens = self.size()
        dense = self.sequence.dense(self.layer)
        return tuple(x[:, :, self.offset - num_tokens :] for x in dense)  # type: ignore[return-value]

    def make_mask(self, *args: Any, **kwargs: Any) -> Any:
        return self.dense().make_mask(*args, **kwargs)

    def dense(self) -> RotatingKVCache:
        return RotatingKVCache.from_state(self.state)


class _WorkingCache(_PromptCache):
    """What mlx-lm's own loops are given.

    After every chunk of a prompt they evaluate the state of the caches: here that is the store's
    pools, which finishes the chunk and copies nothing.
    """

    @property
    def state(self) -> Any:
        return self.sequence.store.pools() if self.layer == 0 else []


def prompt_cache(sequence: PagedSequence) -> list[Any]:
    """The caches of a sequence, one for each layer."""
    return [
        (PagedKVCache if spec.window is None else PagedRotatingKVCache)(sequence, layer)
        for layer, spec in enumerate(sequence.store.specs)
    ]


def working_caches(sequence: PagedSequence) -> list[Any]:
    """The same for a loop of mlx-lm's."""
    return [_WorkingCache(sequence, layer) for layer in range(len(sequence.offsets))]


def sequence_of(caches: Sequence[Any]) -> PagedSequence | None:
    """The sequence behind a whole prompt cache; None where that is not one of ours."""
    if not caches or not isinstance(caches[0], _PromptCache):
        return None
    sequence = caches[0].sequence
    whole = len(caches) == len(sequence.offsets) and all(
        isinstance(c, _PromptCache) and c.sequence is sequence and c.layer == i
        for i, c in enumerate(caches)
    )
    return sequence if whole else None


def is_importable(caches: Sequence[Any], store: PagedStore) -> bool:
    """Whether `import_dense` can take mlx-lm's own caches of a model."""
    return len(caches) == len(store.specs) and all(
        (type(c) is KVCache and spec.window is None)
        or (type(c) is RotatingKVCache and c.keep == 0 and c.max_size == spec.window)
        for c, spec in zip(caches, store.specs)
    )


def import_dense(caches: Sequence[Any], store: PagedStore) -> PagedSequence:
    """Copies mlx-lm's own caches of one sequence into a store."""
    sequence = PagedSequence(store)
    for source, target in zip(caches, prompt_cache(sequence)):
        if isinstance(source, RotatingKVCache):
            _restore(target, *_window_of(source), source.offset)
        elif not source.empty():
            keys, values = source.keys_and_values()
            _restore(target, keys, values, source.offset)
    return sequence


def _window_of(cache: RotatingKVCache) -> tuple[Any, Any]:
    """The tokens that a rotating cache still has, oldest first."""
    if cache.keys is None:
        return None, None
    num_tokens = cache.size()
    return tuple(cache._temporal_order(x)[:, :, -num_tokens:] for x in (cache.keys, cache.values))


def _restore(cache: _PromptCache, keys: mx.array | None, values: mx.array, offset: int) -> None:
    """Makes one layer hold `offset` tokens, of which the last are given."""
    cache.trim(cache.offset)
    if keys is None or offset == 0:
        return
    keys, values = keys[:, :, :offset], values[:, :, :offset]  # mlx-lm's buffers may be longer
    sequence, length = cache.sequence, keys.shape[2]
    # What a window has lost is never read again: it gets its place in the blocks, and no content.
    sequence.offsets[cache.layer] = offset - length
    sequence.write(cache.layer, keys, values)
