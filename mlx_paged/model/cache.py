"""Paged caches in the shape that mlx-lm's model code expects, one for each of its attention caches.

A forward takes its tokens as ``[T, 1]``: every token of every sequence is a batch row of length 1.
``cache.offset`` is then an int32 array of positions, one a row, which RoPE takes as it is; nothing
is padded and nothing is masked. ``update_and_fetch`` writes K and V to the pool and returns
*handles* that only the seam (`mlx_paged.model.seam`) can spend.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn, Protocol

import mlx.core as mx

from mlx_paged import ops
from mlx_paged.model.dense_prefill import serves
from mlx_paged.model.handles import KVHandle, Scores
from mlx_paged.model.specs import FULL, LayerSpec
from mlx_paged.model.step import StepContext


class LatentScores(TypeError):
    """A layer turned out to be latent attention; its pools were made for another kind."""

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__("[paged_attention] mask must be None for keys that are not latents")
        self.spec = spec


class PooledCache(Protocol):
    """What every attention cache has, however model code reads it."""

    spec: LayerSpec
    key_pool: mx.array
    value_pool: mx.array


class KVPools:
    """The two pools of one attention cache, and how its rows lie in them.

    Head dims that the kernels do not take are padded with zeros to a multiple of 8: scores do not
    change, and the values' padding is cut off again.
    """

    # mlx-lm's chunked cache counts the tokens that it dropped; nothing is dropped here.
    start_position = 0
    # Whether what was built of a step so far is worth starting, once this layer has written.
    begins_part = False

    def __init__(
        self, context: StepContext, spec: LayerSpec, *, num_blocks: int, block_size: int
    ) -> None:
        self.spec = spec
        self._context = context
        self._reach = spec.reach
        self.key_pool, self.value_pool = (
            ops.allocate_pool(num_blocks, block_size, spec.num_kv_heads, dim, spec.dtype)
            for dim in spec.pool_dims
        )

    def maybe_trim_front(self) -> None:
        """mlx-lm's chunked cache drops tokens here; the reach of the layer does."""

    def _write(self, keys: mx.array, values: mx.array, slot_mapping: mx.array) -> None:
        """Writes ``[num_tokens, num_kv_heads, dim]`` keys and values."""
        self.key_pool, self.value_pool = ops.write_kv(
            self.key_pool,
            self.value_pool,
            _pad(keys.astype(self.spec.dtype), self.key_pool.shape[-1]),
            _pad(values.astype(self.spec.dtype), self.value_pool.shape[-1]),
            slot_mapping,
        )
        if self.begins_part and self._context.step.starts_early:
            mx.async_eval(self.key_pool)  # type: ignore[no-untyped-call]


class PagedLayerCache(KVPools):
    """The cache of one attention layer: its two pools, read and written through the step's plan."""

    def __init__(
        self, context: StepContext, spec: LayerSpec, *, num_blocks: int, block_size: int
    ) -> None:
        super().__init__(context, spec, num_blocks=num_blocks, block_size=block_size)
        # The same two handles every step: what they stand for is in this cache.
        self.keys, self.values = KVHandle(self), KVHandle(self)

    @property
    def offset(self) -> mx.array:
        """``[num_rows]`` int32: the position of each row's token."""
        return self._context.step.plan.positions

    def make_mask(self, *args: Any, **kwargs: Any) -> None:
        """No mask: the plan says what each row may see, and the spec how far back."""
        return None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[KVHandle, KVHandle]:
        """Writes ``[T, num_kv_heads, 1, head_dim]`` keys and values to the pool."""
        self._write(keys.squeeze(2), values.squeeze(2), self._slots)
        return self.keys, self.values

    def keys_and_values(self) -> tuple[KVHandle, KVHandle]:
        """Handles for layers that attend to what this one has written."""
        return self.keys, self.values

    @property
    def _slots(self) -> mx.array:
        return self._context.step.plan_for(self._reach).slot_mapping

    def attend(
        self,
        queries: mx.array,
        *,
        scale: float,
        sinks: mx.array | None,
        scores: Scores | None = None,
        softcap: float | None = None,
    ) -> mx.array:
        """``[T, num_q_heads, 1, key_dim]`` queries -> ``[T, num_q_heads, 1, value_dim]``."""
        if scores is not None:
            raise LatentScores(self.spec)
        queries = queries.squeeze(2)
        return self._attend(queries, self.value_pool, scale=scale, sinks=sinks, softcap=softcap)

    def _attend(
        self,
        queries: mx.array,
        value_pool: mx.array,
        *,
        scale: float,
        sinks: mx.array | None,
        softcap: float | None,
    ) -> mx.array:
        # Some models upcast queries; the kernels accumulate in float32 whatever comes.
        rows = _pad(queries.astype(self.spec.dtype), self.key_pool.shape[-1])
        step = self._context.step
        if (
            step.prefill is not None
            and self._reach == FULL
            and serves(self.spec, sinks=sinks, softcap=softcap)
        ):
            out = step.prefill.attend(rows, self.key_pool, value_pool, scale)
            return mx.expand_dims(out, 2).astype(queries.dtype)
        out = ops.paged_attention(
            rows,
            self.key_pool,
            value_pool,
            step.plan_for(self._reach),
            scale=scale,
            window=self.spec.window,
            softcap=softcap,
            sinks=sinks,
        )
        if out.shape[-1] != self.spec.value_dim:
            out = out[..., : self.spec.value_dim]
        return mx.expand_dims(out, 2).astype(queries.dtype)


class LatentLayerCache(PagedLayerCache):
    """The cache of multi-head latent attention (DeepSeek): one latent and one rotary key a token.

    The pool's keys are both, side by side, and serve as values too, of which the first part counts.
    Model code passes the latent as keys *and* values, and the scores of the rotary half as a mask
    (`handles.Scores`), so queries are put together here in the same way.
    """

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[KVHandle, KVHandle]:
        """Writes ``[T, 1, 1, latent_dim]`` latents and ``[T, 1, 1, rope_dim]`` rotary keys."""
        both = mx.concatenate([keys, values], axis=-1).squeeze(2)
        self._write(both, mx.zeros((both.shape[0], 1, 0), both.dtype), self._slots)
        return self.keys, self.values

    def attend(
        self,
        queries: mx.array,
        *,
        scale: float,
        sinks: mx.array | None,
        scores: Scores | None = None,
        softcap: float | None = None,
    ) -> mx.array:
        """``[T, num_q_heads, 1, latent_dim]`` queries -> the same shape."""
        if scores is None:
            raise TypeError("[paged_attention] latent attention came without its rotary scores")
        whole = mx.concatenate([queries * scale, scores.queries], axis=-1).squeeze(2)
        return self._attend(whole, self.key_pool, scale=1.0, sinks=sinks, softcap=softcap)


class UnusedCache:
    """The cache of a layer that did not write to it when it was looked at, and must not now."""

    def make_mask(self, *args: Any, **kwargs: Any) -> None:
        """No mask."""
        return None

    def __getattr__(self, name: str) -> NoReturn:
        """An error for whatever else an attention layer asks of its cache."""
        raise RuntimeError(
            f"a layer asks {name!r} of a cache that it had not used when it was looked at"
        )


def copy_blocks(caches: Iterable[PooledCache], block_pairs: mx.array) -> None:
    """Copies blocks in every pool of these caches, before anything else of the step.

    Args:
        caches: of one reach, as block ids mean nothing in another.
        block_pairs: ``[num_pairs, 2]`` int32 of (src, dst).
    """
    caches = list(caches)
    pools = [pool for cache in caches for pool in (cache.key_pool, cache.value_pool)]
    pools = ops.copy_blocks(pools, block_pairs)
    for i, cache in enumerate(caches):
        cache.key_pool, cache.value_pool = pools[2 * i : 2 * i + 2]


def _pad(x: mx.array, dim: int) -> mx.array:
    missing = dim - x.shape[-1]
    return mx.pad(x, [(0, 0), (0, 0), (0, missing)]) if missing else x
