"""FlatModel: a model and its pools, run the one way in which its family was proven.

The engine runs ``[rows, 1]`` tokens, every token a row, and so does this, whatever shape mlx-lm's
code calls the model in.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_paged import ops
from mlx_paged.attention import seam
from mlx_paged.attention.cache import PagedLayerCache, Step, StepContext, copy_blocks
from mlx_paged.attention.layer_ops import native_ops
from mlx_paged.attention.plan import build_plan
from mlx_paged.ops import AttentionPlan


class FlatModel:
    """Runs steps of ragged sequences. Does not keep its model alive.

    Args:
        model: its output projection is changed in place, so that it projects wanted rows only.

    Raises:
        UnsupportedModelError: the family is not proven, or this model of it is not served.
    """

    def __init__(self, model: nn.Module, *, num_blocks: int, block_size: int) -> None:
        # Here, not above: this very import of mlx_lm may have come from there.
        from mlx_paged.models.families import layer_specs, require_proven
        from mlx_paged.models.output_rows import select_output_rows

        model_type = str(getattr(model, "model_type", type(model).__name__))
        require_proven(model_type)
        self.specs = layer_specs(model, model_type)
        self.block_size = block_size
        self._model = weakref.ref(model)
        seam.install()
        self._context = StepContext()
        select_output_rows(model, self._context)
        self._caches = [
            PagedLayerCache(self._context, spec, num_blocks=num_blocks, block_size=block_size)
            for spec in self.specs
        ]
        for cache in self._caches:
            _order_reads(cache)

    @property
    def bytes_per_token(self) -> int:
        """Keys and values of a token in all layers."""
        return sum(spec.bytes_per_token for spec in self.specs)

    def is_of(self, model: object) -> bool:
        """Whether this runs that very model."""
        return self._model() is model

    # Steps.

    def forward(
        self,
        tokens: mx.array,
        tables: Sequence[Sequence[int]],
        context_lens: Sequence[int],
        query_lens: Sequence[int],
        logit_rows: np.ndarray,
        input_embeddings: mx.array | None = None,
    ) -> mx.array:
        """``[num_rows]`` int32 tokens -> ``[len(logit_rows), vocab_size]`` logits, lazily.

        Args:
            tables: blocks of each sequence.
            context_lens: tokens of each sequence once this step's are written.
            query_lens: how many of them are this step's rows.
            input_embeddings: ``[num_rows, hidden_size]``, in the place of the tokens'.
        """
        seam.ensure_installed()
        plan = build_plan(tables, context_lens, query_lens, block_size=self.block_size)
        model: Any = self._model()
        options = {}
        if input_embeddings is not None:
            options["input_embeddings"] = input_embeddings[:, None]
        self._context.enter(Step(plan, mx.array(logit_rows.astype(np.int32))))
        try:
            with native_ops(plan.positions):
                logits = model(tokens[:, None], cache=self._caches, **options)
        finally:
            self._context.leave()
        logits = logits.reshape(-1, logits.shape[-1])
        # (A head that was replaced since, by quantising it, say, gives all rows.)
        return logits if len(logits) == len(logit_rows) else logits[mx.array(logit_rows)]

    # Layers by themselves, for what is put in and taken out.

    def write(self, layer: int, plan: AttentionPlan, keys: mx.array, values: mx.array) -> None:
        """Writes ``[batch, num_kv_heads, length, head_dim]`` keys and values of one layer.

        Raises:
            ValueError: for other heads or head dims than the layer has.
        """
        spec = self.specs[layer]
        for name, array, dim in (("keys", keys, spec.key_dim), ("values", values, spec.value_dim)):
            if (array.shape[1], array.shape[3]) != (spec.num_kv_heads, dim):
                raise ValueError(
                    f"[paged prompt cache] {name} must be of {spec.num_kv_heads} heads of {dim} "
                    f"but got {array.shape[1]} of {array.shape[3]}: this cache belongs to another "
                    "model"
                )
        cache = self._caches[layer]
        cache.key_pool, cache.value_pool = ops.write_kv(
            cache.key_pool,
            cache.value_pool,
            _to_rows(keys).astype(spec.dtype),
            _to_rows(values).astype(spec.dtype),
            plan.slot_mapping,
        )

    def plan(
        self, tables: Sequence[Sequence[int]], context_lens: Sequence[int], query_lens: list[int]
    ) -> AttentionPlan:
        """Of a step in which layers are written one by one."""
        return build_plan(tables, context_lens, query_lens, block_size=self.block_size)

    def read(
        self, layer: int, tables: Sequence[Sequence[int]], num_tokens: int
    ) -> tuple[mx.array, mx.array]:
        """Dense ``[batch, num_kv_heads, num_tokens, head_dim]`` keys and values of one layer."""
        cache = self._caches[layer]
        width = max(map(len, tables))
        padded = [[*table, *[0] * (width - len(table))] for table in tables]
        keys, values = ops.gather_kv(
            cache.key_pool,
            cache.value_pool,
            mx.array(padded, dtype=mx.int32),
            mx.array([num_tokens] * len(tables), dtype=mx.int32),
            num_tokens,
        )
        _write_after(cache, [keys, values])
        return keys, values

    # Pools.

    def pools(self) -> list[mx.array]:
        """Every pool as it is now."""
        return [pool for cache in self._caches for pool in (cache.key_pool, cache.value_pool)]

    def restore(self, pools: list[mx.array]) -> None:
        """Puts back what `pools` returned: the same memory, as writing is in place."""
        for i, cache in enumerate(self._caches):
            cache.key_pool, cache.value_pool = pools[2 * i : 2 * i + 2]

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies blocks, as (src, dst), in every layer."""
        copy_blocks(self._caches, mx.array(list(pairs), dtype=mx.int32))

    def grow(self, num_blocks: int) -> None:
        """Makes room for more blocks; what is there stays."""
        for cache in self._caches:
            for name in ("key_pool", "value_pool"):
                old: mx.array = getattr(cache, name)
                more, block_size, heads, dim = num_blocks - len(old), *old.shape[1:]
                added = ops.allocate_pool(more, block_size, heads, dim, old.dtype)
                pool = mx.concatenate([old, added])
                mx.eval(pool)  # pool by pool, so that only one of them is there twice
                setattr(cache, name, pool)


def _order_reads(cache: Any) -> None:
    """Makes whatever is written after an attention come after it, in whatever order results are
    asked for.

    Writing is in place, and mlx-lm's callers may well trim a cache and go on before they evaluate
    logits. (The engine evaluates every step, and needs nothing of this.)
    """
    attend = type(cache).attend

    def attend_in_order(*args: Any, **kwargs: Any) -> mx.array:
        out: mx.array = attend(cache, *args, **kwargs)
        _write_after(cache, out)
        return out

    cache.attend = attend_in_order


def _write_after(cache: Any, reads: mx.array | list[mx.array]) -> None:
    cache.key_pool, cache.value_pool = mx.depends([cache.key_pool, cache.value_pool], reads)


def _to_rows(x: mx.array) -> mx.array:
    """``[batch, heads, length, dim]`` -> ``[batch * length, heads, dim]``."""
    batch, heads, length, dim = x.shape
    return x.transpose(0, 2, 1, 3).reshape(batch * length, heads, dim)
