"""Paged caches in the shape that mlx-lm's model code expects, one per layer.

A forward takes its tokens as ``[T, 1]``: every token of every sequence is a batch row of length 1.
``cache.offset`` is then an int32 array of positions, one a row, which RoPE takes as it is; nothing
is padded and nothing is masked. ``update_and_fetch`` writes K and V to the pool and returns
*handles* that only the seam (`mlx_paged.attention.seam`) can spend.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_paged import ops
from mlx_paged.attention.specs import LayerSpec
from mlx_paged.ops import AttentionPlan


@dataclass(frozen=True)
class Step:
    """What the layers of one forward share."""

    plan: AttentionPlan
    logit_rows: mx.array  # [num_samples] int32: rows whose logits are wanted


class StepContext:
    """Holds the step that is being built. One per model; its caches and output head look here."""

    def __init__(self) -> None:
        self._step: Step | None = None

    @property
    def step(self) -> Step:
        """The current step; an error outside of one, where a paged cache has no meaning."""
        if self._step is None:
            raise RuntimeError("a paged cache was used outside of a step of the model runner")
        return self._step

    @property
    def active(self) -> bool:
        """Whether a step is being built."""
        return self._step is not None

    def enter(self, step: Step) -> None:
        """Starts building `step`."""
        self._step = step

    def leave(self) -> None:
        """Ends it: the arrays of a finished step must not be kept alive here."""
        self._step = None


class KVHandle(mx.array):
    """Stands for a layer's keys or values where model code passes them on to attention.

    A subclass of ``mx.array`` of shape (0,): anything that would treat it as dense data fails
    loudly instead of computing with something else.
    """

    def __new__(cls, cache: PagedLayerCache) -> KVHandle:
        return super().__new__(cls)  # type: ignore[call-arg]

    def __init__(self, cache: PagedLayerCache) -> None:
        super().__init__([])
        self.cache = cache

    def _refuse(self, other: object) -> KVHandle:
        raise TypeError("a KV handle stands for a layer's keys or values and cannot be changed")

    # Anything else gives an empty array; in place, broadcasting would leave the handle as it was.
    __iadd__ = __isub__ = __imul__ = __itruediv__ = __ifloordiv__ = __imod__ = __ipow__ = _refuse
    __iand__ = __ior__ = __ixor__ = __ilshift__ = __irshift__ = __imatmul__ = _refuse


class PagedLayerCache:
    """The cache of one attention layer: its two pools, read and written through the step's plan."""

    def __init__(
        self, context: StepContext, spec: LayerSpec, *, num_blocks: int, block_size: int
    ) -> None:
        self.spec = spec
        self._context = context
        heads = (num_blocks, block_size, spec.num_kv_heads)
        self.key_pool = ops.allocate_pool(*heads, spec.key_dim, spec.dtype)
        self.value_pool = ops.allocate_pool(*heads, spec.value_dim, spec.dtype)
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
        self.key_pool, self.value_pool = ops.write_kv(
            self.key_pool,
            self.value_pool,
            keys.squeeze(2),
            values.squeeze(2),
            self._context.step.plan.slot_mapping,
        )
        return self.keys, self.values

    def attend(self, queries: mx.array, *, scale: float, sinks: mx.array | None) -> mx.array:
        """``[T, num_q_heads, 1, key_dim]`` queries -> ``[T, num_q_heads, 1, value_dim]``."""
        out = ops.paged_attention(
            queries.squeeze(2),
            self.key_pool,
            self.value_pool,
            self._context.step.plan,
            scale=scale,
            window=self.spec.window,
            sinks=sinks,
        )
        return mx.expand_dims(out, 2)


def copy_blocks(caches: list[PagedLayerCache], block_pairs: mx.array) -> None:
    """Copies blocks in every pool of every layer, before anything else of the step.

    Args:
        block_pairs: ``[num_pairs, 2]`` int32 of (src, dst).
    """
    pools = [pool for cache in caches for pool in (cache.key_pool, cache.value_pool)]
    pools = ops.copy_blocks(pools, block_pairs)
    for i, cache in enumerate(caches):
        cache.key_pool, cache.value_pool = pools[2 * i : 2 * i + 2]
