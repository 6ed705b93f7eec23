"""Port: one layer of a store, in the shapes in which mlx-lm's code calls a model.

mlx-lm runs ``[batch, length]`` tokens where the engine runs ``[rows, 1]``. Keys, values and queries
are flattened to rows on the way in, and the output is put back in shape on the way out.
"""

from __future__ import annotations

import mlx.core as mx

from mlx_paged import ops
from mlx_paged.attention import seam
from mlx_paged.attention.cache import KVHandle, PagedLayerCache, Step, StepContext
from mlx_paged.ops import AttentionPlan

_NO_ROWS = mx.array([], dtype=mx.int32)


class Port:
    """What the seam meets behind the keys that `update_and_fetch` returned.

    A layer has one port, whichever sequence is at work: mlx-lm's code finishes a forward before it
    builds another.
    """

    def __init__(self, layer: PagedLayerCache, context: StepContext) -> None:
        self.layer = layer
        self._context = context
        self._step: Step | None = None
        self._batch = 0
        self.keys, self.values = KVHandle(self), KVHandle(self)  # type: ignore[arg-type]

    def write(
        self, plan: AttentionPlan, keys: mx.array, values: mx.array
    ) -> tuple[KVHandle, KVHandle]:
        """Writes ``[batch, num_kv_heads, length, head_dim]`` keys and values.

        Raises:
            ValueError: for other heads or head dims than the layer had when it was first seen.
        """
        spec = self.layer.spec
        for name, array, dim in (("keys", keys, spec.key_dim), ("values", values, spec.value_dim)):
            if (array.shape[1], array.shape[3]) != (spec.num_kv_heads, dim):
                raise ValueError(
                    f"[paged prompt cache] {name} must be of {spec.num_kv_heads} heads of {dim} "
                    f"but got {array.shape[1]} of {array.shape[3]}: this cache belongs to another "
                    "model"
                )
        seam.install()  # unpatching takes it out; who still holds a paged cache needs it
        self._batch = keys.shape[0]
        self._step = Step(plan, _NO_ROWS)
        # (Weights may have changed their type since: mlx-lm's caches keep theirs too.)
        rows = [_to_rows(x).astype(spec.dtype) for x in (keys, values)]
        self._context.enter(self._step)
        try:
            self.layer.update_and_fetch(*rows)
        finally:
            self._context.leave()
        return self.keys, self.values

    def attend(self, queries: mx.array, *, scale: float, sinks: mx.array | None) -> mx.array:
        """``[batch, num_q_heads, length, key_dim]`` -> ``[batch, num_q_heads, length, value_dim]``.

        It sees the keys of the last `write`, and those before them.
        """
        assert self._step is not None, "keys are written before they are attended to"
        if queries.shape[0] != self._batch:
            raise ValueError(
                f"[paged prompt cache] queries must be of batch {self._batch} like the keys but "
                f"got {queries.shape[0]}"
            )
        rows = _to_rows(queries).astype(self.layer.spec.dtype)
        self._context.enter(self._step)
        try:
            out = self.layer.attend(rows, scale=scale, sinks=sinks)
        finally:
            self._context.leave()
        self._after_reading(out)
        return _from_rows(out, self._batch).astype(queries.dtype)

    def gather(self, tables: list[list[int]], num_tokens: int) -> tuple[mx.array, mx.array]:
        """Dense ``[batch, num_kv_heads, num_tokens, head_dim]`` keys and values."""
        width = max(map(len, tables))
        padded = [table + [0] * (width - len(table)) for table in tables]
        keys, values = ops.gather_kv(
            self.layer.key_pool,
            self.layer.value_pool,
            mx.array(padded, dtype=mx.int32),
            mx.array([num_tokens] * len(tables), dtype=mx.int32),
            num_tokens,
        )
        self._after_reading([keys, values])
        return keys, values

    def grow(self, num_blocks: int) -> None:
        """Makes room for more blocks; what is there stays."""
        for name in ("key_pool", "value_pool"):
            old = getattr(self.layer, name)
            _, block_size, heads, dim = old.shape
            more = ops.allocate_pool(num_blocks - len(old), block_size, heads, dim, old.dtype)
            pool = mx.concatenate([old, more])
            mx.eval(pool)  # pool by pool, so that only one of them is there twice
            setattr(self.layer, name, pool)

    def _after_reading(self, out: mx.array | list[mx.array]) -> None:
        """Whatever is written next comes after this read, in whatever order results are asked for.

        Writing is in place, and mlx-lm's callers may well trim a cache and go on before they
        evaluate logits.
        """
        self.layer.key_pool, self.layer.value_pool = mx.depends(
            [self.layer.key_pool, self.layer.value_pool], out
        )


def _to_rows(x: mx.array) -> mx.array:
    """``[batch, heads, length, dim]`` -> ``[batch * length, heads, 1, dim]``."""
    batch, heads, length, dim = x.shape
    if length == 1:
        return x
    return x.transpose(0, 2, 1, 3).reshape(batch * length, heads, 1, dim)


def _from_rows(x: mx.array, batch: int) -> mx.array:
    rows, heads, _, dim = x.shape
    if rows == batch:
        return x
    return x.reshape(batch, rows // batch, heads, dim).transpose(0, 2, 1, 3)
