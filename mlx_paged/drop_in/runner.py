"""DropInRunner: runs a model over its pools the same way as the engine.

Both run ``[rows, 1]`` tokens, one row per token, because this is how the model family was verified.
mlx-lm's code may call the model with any shape.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from functools import partial
from itertools import count
from typing import Any
from weakref import WeakSet

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_paged import ops
from mlx_paged.drop_in.states import (
    Arrays,
    ArrayStateCache,
    Entries,
    State,
    StateBatch,
    StepStates,
    fitted,
)
from mlx_paged.errors import UnsupportedModelError
from mlx_paged.model.kv_formats import KVFormat
from mlx_paged.model.layout import CacheSpec, KVCacheGroupSpec, LayerSpec, StateSpec
from mlx_paged.ops import AttentionPlan

# Extra tokens that windows keep, so that a sequence can be trimmed a little.
WINDOW_SLACK = 64

Tables = Sequence[Sequence[int]]  # blocks of each sequence


class DropInRunner:
    """Runs steps of ragged sequences. Does not keep its model alive.

    Attributes:
        windows: Windows of the model's layers. Layers with the same window form a group with its
            own block tables. Group 0 has all other layers, including chunked attention, which
            releases no blocks.

    Args:
        model: Its modules are changed in place, with effect only while a step is built.
        kv_format: Storage format of keys and values; None uses the model's dtype.

    Raises:
        UnsupportedModelError: The family is not verified, or this model is not supported.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        num_blocks: int,
        block_size: int,
        kv_format: KVFormat | None = None,
    ) -> None:
        # Imported late, because an import of mlx_lm may have led here.
        from mlx_paged.model.wrap import build_paged_model

        config = _config_of(model)
        paged = build_paged_model(model, config, block_size=block_size)
        if paged.layout.max_context_len is not None:
            raise UnsupportedModelError(
                config["model_type"],
                f"its RoPE changes with contexts beyond {paged.layout.max_context_len} tokens",
            )
        if kv_format is not None:
            paged.layout = paged.layout.with_kv_format(kv_format)
        self.layout = paged.layout
        self.block_size = block_size
        self._model = weakref.ref(model)
        self._paged = paged
        self.windows = tuple(r for r in paged.layout.group_specs if r.window is not None)
        self._numbers = {group_spec: number for number, group_spec in enumerate(self.windows, 1)}
        # The index of each cache with recurrent state among its kind.
        self.state_numbers = {
            layer: number
            for number, layer in enumerate(
                i for i, spec in enumerate(paged.layout.specs) if isinstance(spec, StateSpec)
            )
        }
        self._step_states = StepStates(paged.layout.states)
        self._batches: WeakSet[StateBatch] = WeakSet()
        self._unfinished: WeakSet[StateBatch] = WeakSet()  # not yet returned by `unfinished`
        numbers = count()
        paged.allocate(
            num_blocks,
            state_cache=lambda spec: ArrayStateCache(spec, next(numbers), self._step_states),
        )
        paged.model = None  # type: ignore[assignment]
        caches = iter(paged.attention_caches)
        self._caches: list[Any] = [
            next(caches) if isinstance(spec, LayerSpec) else None for spec in self.specs
        ]
        for cache in paged.attention_caches:
            _order_reads(cache)

    @property
    def specs(self) -> Sequence[CacheSpec]:
        """The spec of each cache, in the order of mlx-lm's flattened caches."""
        return self.layout.specs

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        return self.layout.bytes_per_token()

    @property
    def num_groups(self) -> int:
        """Number of layer groups with their own block tables."""
        return 1 + len(self.windows)

    def group_of(self, group_spec: KVCacheGroupSpec) -> int:
        """Returns the number of the group of these layers."""
        return self._numbers.get(group_spec, 0)

    def block_bytes(self, number: int) -> int:
        """Bytes of one block's keys and values in the layers of a group."""
        group_specs = self._group_specs(number)
        return self.block_size * sum(
            self.layout.bytes_per_token(group_spec) for group_spec in group_specs
        )

    def _group_specs(self, number: int) -> list[KVCacheGroupSpec]:
        return [
            group_spec
            for group_spec in self.layout.group_specs
            if self.group_of(group_spec) == number
        ]

    def is_of(self, model: object) -> bool:
        """True if this runs `model`."""
        return self._model() is model

    # Steps.

    def forward(
        self,
        tokens: mx.array,
        tables: Sequence[Tables],
        context_lens: Sequence[int],
        query_lens: Sequence[int],
        logit_rows: np.ndarray,
        input_embeddings: mx.array | None = None,
        states: Sequence[State | None] = (),
    ) -> tuple[mx.array, list[State]]:
        """``[num_rows]`` int32 tokens -> ``[len(logit_rows), vocab_size]`` logits, lazily.

        Returns:
            The logits, and the recurrent state of each sequence after the step; no states if the
            model has no recurrent layers.

        Args:
            tables: Blocks of each sequence, for each group.
            context_lens: Number of tokens of each sequence after this step.
            query_lens: Number of rows of each sequence in this step.
            input_embeddings: ``[num_rows, hidden_size]``, replaces the token embeddings.
            states: State of each sequence before the step, for recurrent models; None before the
                first token.
        """
        from mlx_paged.model.plan import StateSlots, StepInputs

        slots = None
        if self.layout.has_states:  # placeholder slots; they only mark which sequences begin
            writes = range(1, 1 + len(query_lens))
            slots = StateSlots([0 if s is None else i for i, s in zip(writes, states)], writes)
        inputs = StepInputs(
            np.array(context_lens, dtype=np.int64),
            np.array(query_lens, dtype=np.int64),
            self._by_group(tables),
            logit_rows,
            slots,
        )
        model: Any = self._model()
        if input_embeddings is not None:
            if self.layout.mode.is_gathered:
                raise TypeError(
                    "[paged prompt cache] input_embeddings must be None for a model that runs in "
                    "groups. Set MLX_PAGED_DISABLE=1 to run it with mlx-lm's own caches"
                )
            model = partial(model, input_embeddings=input_embeddings[:, None])
        self._paged.model = model
        made: list[State] = []
        with self._step_states.read_by(states):
            try:
                logits = self._paged.forward(tokens, inputs)
            finally:
                self._paged.model = None  # type: ignore[assignment]
            if self.layout.has_states:
                made = self._step_states.made()
                for state in made:
                    self._remember(state.batch)
        # A head that was replaced later, for example by a quantized one, returns all rows.
        if len(logits) != len(logit_rows):
            logits = logits[mx.array(logit_rows)]
        return logits, made

    def _by_group(self, tables: Sequence[Tables]) -> Tables | Mapping[KVCacheGroupSpec, Tables]:
        if not self.windows:
            return tables[0]
        return {
            group_spec: tables[self.group_of(group_spec)] for group_spec in self.layout.group_specs
        }

    # Single layers: dense reads and writes.

    def write(self, layer: int, plan: AttentionPlan, keys: mx.array, values: mx.array) -> None:
        """Writes ``[batch, num_kv_heads, length, head_dim]`` keys and values of one layer.

        Raises:
            ValueError: The number of heads or the head dim does not match the layer.
        """
        spec = self.spec(layer)
        dims = (spec.key_dim, spec.value_dim)
        if spec.latent:
            dims = (spec.value_dim, spec.key_dim - spec.value_dim)
        for name, array, dim in zip(("keys", "values"), (keys, values), dims):
            if (array.shape[1], array.shape[3]) != (spec.num_kv_heads, dim):
                raise ValueError(
                    f"[paged prompt cache] {name} must be of {spec.num_kv_heads} heads of {dim} "
                    f"but got {array.shape[1]} of {array.shape[3]}: this cache belongs to another "
                    "model"
                )
        if spec.latent:  # mlx-lm keeps two arrays, the pool has them side by side
            keys, values = mx.concatenate([keys, values], axis=-1), values[..., :0]
        cache = self._caches[layer]
        cache.key_pool, cache.value_pool = ops.write_kv(
            cache.key_pool,
            cache.value_pool,
            _to_rows(keys, spec.dtype, spec.pool_dims[0]),
            _to_rows(values, spec.dtype, spec.pool_dims[1]),
            plan.slot_mapping,
        )

    def read(self, layer: int, tables: Tables, start: int, end: int) -> tuple[mx.array, mx.array]:
        """Dense ``[batch, num_kv_heads, end - start, head_dim]`` keys and values of one layer."""
        spec, cache = self.spec(layer), self._caches[layer]
        first, start = divmod(start, self.block_size)
        end -= first * self.block_size
        tables = [table[first:] for table in tables]
        width = max(map(len, tables))
        padded = [[*table, *[0] * (width - len(table))] for table in tables]
        keys, values = ops.gather_kv(
            cache.key_pool,
            cache.value_pool,
            mx.array(padded, dtype=mx.int32),
            mx.array([end] * len(tables), dtype=mx.int32),
            end,
            dtype=None if spec.kv_format is None else spec.dtype,
        )
        _write_after(cache, [keys, values])
        if spec.latent:
            keys, values = keys[..., : spec.value_dim], keys[..., spec.value_dim : spec.key_dim]
        else:
            keys, values = keys[..., : spec.key_dim], values[..., : spec.value_dim]
        return (keys[:, :, start:], values[:, :, start:]) if start else (keys, values)

    def spec(self, layer: int) -> LayerSpec:
        """Returns the spec of an attention cache that the model uses."""
        spec = self.specs[layer]
        assert isinstance(spec, LayerSpec), f"cache {layer} of the model is not used"
        return spec

    # Recurrent states.

    def checked_states(self, number: int, entries: Sequence[mx.array | None]) -> Entries:
        """Converts ``[num_seqs, ...]`` arrays from outside to the form of a recurrent cache.

        Raises:
            ValueError: The shapes do not match the layer, or the batch sizes differ.
        """
        spec = self.layout.states[number]
        if len(entries) != len(spec.shapes):
            raise ValueError(
                f"[paged prompt cache] recurrent state must be {len(spec.shapes)} arrays but got "
                f"{len(entries)}: this cache belongs to another model"
            )
        checked = [fitted(a, s, d) for a, s, d in zip(entries, spec.shapes, spec.dtypes)]
        sizes = {len(array) for array in checked if array is not None}
        if len(sizes) > 1:
            raise ValueError(
                f"[paged prompt cache] recurrent state must be of one batch but got {sorted(sizes)}"
            )
        return checked

    def states_of(self, arrays: Arrays, num_seqs: int) -> list[State]:
        """Returns the states of a batch, from the ``[num_seqs, ...]`` arrays of each cache."""
        batch = StateBatch(arrays, num_seqs)
        self._remember(batch)
        return [State(batch, row) for row in range(num_seqs)]

    def alone(self, state: State) -> State:
        """See `State.alone`."""
        alone = state.alone()
        self._remember(alone.batch)
        return alone

    def _remember(self, batch: StateBatch) -> None:
        self._batches.add(batch)
        self._unfinished.add(batch)

    @property
    def state_bytes(self) -> int:
        """Memory of all live states."""
        return sum(batch.nbytes for batch in list(self._batches))

    # Pools.

    def pools(self) -> list[mx.array]:
        """Returns the current pool arrays."""
        return self._paged.pools()

    def unfinished(self) -> list[mx.array]:
        """Returns the state arrays created since the last call, for evaluation."""
        states = [array for batch in self._unfinished for array in batch.present]
        self._unfinished.clear()
        return states

    @property
    def has_unfinished(self) -> bool:
        """True if states were created since the last `unfinished`."""
        return bool(self._unfinished)

    def restore(self, pools: list[mx.array]) -> None:
        """Restores the arrays that `pools` returned. Writes are in place, so the memory is the
        same."""
        self._paged.restore(pools)

    def copy_blocks(self, pairs: Iterable[tuple[int, int]], number: int = 0) -> None:
        """Copies blocks (src, dst) in every layer of a group."""
        copies = mx.array(list(pairs), dtype=mx.int32)
        for group_spec in self._group_specs(number):
            self._paged.copy_blocks(copies, group_spec)

    def _caches_of(self, number: int) -> list[Any]:
        caches = self._paged.attention_caches
        return [cache for cache in caches if self.group_of(cache.spec.group_spec) == number]

    def cut(self, num_blocks: int, number: int = 0) -> None:
        """Frees the memory of a group's blocks from `num_blocks` on."""
        for cache in self._caches_of(number):
            for name in ("key_pool", "value_pool"):
                pool = mx.contiguous(getattr(cache, name)[:num_blocks])
                mx.eval(pool)
                setattr(cache, name, pool)
        mx.clear_cache()  # MLX would keep the freed memory

    def grow(self, num_blocks: int, number: int = 0) -> None:
        """Grows a group to `num_blocks` blocks; keeps the existing ones."""
        for cache in self._caches_of(number):
            for name, dim in zip(("key_pool", "value_pool"), cache.spec.pool_dims):
                old: mx.array = getattr(cache, name)
                more, block_size, heads = num_blocks - len(old), *old.shape[1:3]
                added = ops.allocate_pool(more, block_size, heads, dim, old.dtype)
                pool = mx.concatenate([old, added])
                mx.eval(pool)  # one pool at a time, so that only one exists twice
                setattr(cache, name, pool)


def _config_of(model: nn.Module) -> dict[str, Any]:
    """Returns the fields of a model's ``config.json`` that the model object still has."""
    model_type = str(getattr(model, "model_type", type(model).__name__))
    for base in type(model).__mro__:
        package, _, module = base.__module__.rpartition(".")
        if package == "mlx_lm.models":  # one module may run several model types
            model_type = module
            break
    args = getattr(model, "args", None)
    # `asdict` recurses: a multimodal model's text model has its own args.
    fields = asdict(args) if is_dataclass(args) and not isinstance(args, type) else {}
    return {**fields, "model_type": model_type}


def _order_reads(cache: Any) -> None:
    """Makes every write depend on the reads before it, in any order of evaluation.

    Writes are in place, and mlx-lm's callers may trim a cache and continue before they evaluate
    logits. The engine evaluates every step, so it does not need this.
    """
    method = "attend" if hasattr(cache, "attend") else "update_and_fetch"
    read = getattr(type(cache), method)

    def read_in_order(*args: Any, **kwargs: Any) -> Any:
        out = read(cache, *args, **kwargs)
        _write_after(cache, out)
        return out

    setattr(cache, method, read_in_order)


def _write_after(cache: Any, reads: Any) -> None:
    reads = list(reads) if isinstance(reads, tuple) else reads
    cache.key_pool, cache.value_pool = mx.depends([cache.key_pool, cache.value_pool], reads)


def _to_rows(x: mx.array, dtype: mx.Dtype, pool_dim: int) -> mx.array:
    """``[batch, heads, length, dim]`` -> ``[batch * length, heads, pool_dim]``."""
    batch, heads, length, dim = x.shape
    rows = x.transpose(0, 2, 1, 3).reshape(batch * length, heads, dim).astype(dtype)
    missing = pool_dim - dim
    return mx.pad(rows, [(0, 0), (0, 0), (0, missing)]) if missing else rows
