"""Paged caches with the interface that mlx-lm's model code expects, one for each attention cache.

A forward pass takes its tokens as ``[T, 1]``: each token of each sequence is a batch entry, a
*row*. ``cache.offset`` is then an int32 array with one position per row, which RoPE accepts.
Nothing is padded or masked. ``update_and_fetch`` writes K and V to the pool and returns *handles*,
which only the attention patch (`mlx_paged.model.patches`) accepts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn, Unpack

import mlx.core as mx

from mlx_paged import ops
from mlx_paged.model import dense_prefill
from mlx_paged.model.layerwise import LayerwiseSubmit
from mlx_paged.model.layout import FULL, KVCacheGroupSpec, LayerSpec
from mlx_paged.model.media import MediaRows
from mlx_paged.model.plan import StatePlan
from mlx_paged.ops import AttentionOptions, AttentionPlan

# --- The step -------------------------------------------------------------------------------------

Attend = Callable[[mx.array, AttentionPlan], mx.array]


class LastLayerPruning:
    """The rows whose results are needed, in a step of prompts, where most are not.

    The last layer computes attention and everything after it for these rows only
    (`ops.select_rows`).

    Args:
        rows: ``[num_selected]`` int32, each the last row of its sequence.
        plan: Plan of these rows, for the last layer with pools.
        layer: That layer.
        pools: Returns all pools, as written by the step so far.

    Attributes:
        plan, layer: As given.
    """

    def __init__(
        self,
        rows: mx.array,
        plan: AttentionPlan,
        layer: int,
        pools: Callable[[], list[mx.array]],
    ) -> None:
        self._rows = rows
        self.plan = plan
        self.layer = layer
        self._pools = pools
        self._attention: list[tuple[mx.array, mx.array, Attend]] = []

    def on(self, rows: mx.array, plan: AttentionPlan) -> LastLayerPruning:
        """Returns the same for other arrays, in a step that has not been built."""
        return LastLayerPruning(rows, plan, self.layer, self._pools)

    def attention_built(self, layer: int, queries: mx.array, out: mx.array, attend: Attend) -> None:
        """Records a layer's attention.

        Args:
            queries: ``[num_rows, num_q_heads, key_dim]``.
            out: ``[num_rows, num_q_heads, value_dim]``.
            attend: Computes the same from queries and a plan.
        """
        if layer == self.layer:
            self._attention.append((queries, out, attend))

    def of(self, x: mx.array) -> mx.array:
        """``[num_rows, ...]`` -> ``[num_selected, ...]``."""
        pools, known = self._pools(), []
        for queries, out, attend in self._attention:
            selected = ops.select_rows(queries, self._rows, kept=pools)
            known.append((out, attend(selected, self.plan)))
        return ops.select_rows(x, self._rows, kept=pools, known=known)


@dataclass(frozen=True)
class Step:
    """One forward pass over ragged sequences.

    Attributes:
        plan: Plan of full-attention layers; positions and slots of every row.
        logit_rows: ``[num_samples]`` int32: rows whose logits are needed.
        plans: Plans of other groups. A group without one uses `plan`.
        states: Plan of recurrent layers; None for a model without them.
        prefill: Plan of full-attention layers whose long chunks use MLX's own attention.
        layerwise: Submits layers while later ones are built; None submits the whole step.
        media: Inputs of the rows besides tokens, for a multimodal model.
        selected: Computes the needed rows if they are few; None gathers them.
        num_ordered_rows: See `StepInputs`.
        features: Likewise.
        adapters: ``[num_rows]`` int32: the slot of each row's adapter, from 0, or -1. None for a
            step without adapters.
    """

    plan: AttentionPlan
    logit_rows: mx.array
    plans: Mapping[KVCacheGroupSpec, AttentionPlan] = field(default_factory=dict)
    states: StatePlan | None = None
    prefill: dense_prefill.DensePrefill | None = None
    layerwise: LayerwiseSubmit | None = None
    media: MediaRows | None = None
    selected: LastLayerPruning | None = None
    num_ordered_rows: int = 0
    features: mx.array | None = None
    adapters: mx.array | None = None

    def plan_for(self, group_spec: KVCacheGroupSpec) -> AttentionPlan:
        """Returns the plan that layers of this group read and write through."""
        return self.plans.get(group_spec, self.plan)

    def select(self, x: mx.array) -> mx.array:
        """Gathers the needed rows: ``[num_rows, ...]`` -> ``[num_samples, ...]``."""
        return x[self.logit_rows] if self.selected is None else self.selected.of(x)


@dataclass
class ContextLimit:
    """The maximum context length of a paged model.

    Attributes:
        longest: Maximum tokens of a sequence; None means no known limit.
    """

    longest: int | None = None


class StepContext(threading.local):
    """Holds the step that this thread is building. One per model; its caches and output head read
    it. Another thread may run the model with other caches meanwhile.

    Args:
        limit: Shared by all threads; None means no limit.
    """

    def __init__(self, limit: ContextLimit | None = None) -> None:
        self.limit = limit or ContextLimit()
        self._step: Step | None = None
        self.adapters: mx.array | None = None  # of the rows that model code sees now
        self.pairs_have_slots = False  # see `expert_lora`
        self.activations = "float32"  # see `ops.activations`

    @property
    def step(self) -> Step:
        """The current step. Raises outside of one, where a paged cache has no meaning."""
        if self._step is None:
            raise RuntimeError("a paged cache was used outside of a step of the model runner")
        return self._step

    @property
    def active(self) -> bool:
        """True if a step is being built."""
        return self._step is not None

    def enter(self, step: Step, activations: str = "float32") -> None:
        """Begins building `step`."""
        self._step, self.adapters, self.activations = step, step.adapters, activations

    def leave(self) -> None:
        """Ends the step, because the arrays of a finished step must not be kept alive here."""
        self._step = self.adapters = None

    @contextmanager
    def slots_in_pairs(self) -> Iterator[None]:
        """Within it, the numbers of experts include the slot of each row's adapter."""
        self.pairs_have_slots = True
        try:
            yield
        finally:
            self.pairs_have_slots = False

    @contextmanager
    def rows(self, rows: mx.array | None) -> Iterator[None]:
        """Within it, model code sees only these rows of the step, in this order; None means all."""
        before = self.adapters
        if before is not None and rows is not None:
            self.adapters = before[rows]
        try:
            yield
        finally:
            self.adapters = before


# --- Handles --------------------------------------------------------------------------------------


class _Handle(mx.array):
    """A placeholder for keys, values or scores that model code passes on to attention.

    It is a subclass of ``mx.array`` of shape (0,). ``array @ object`` raises without asking the
    object, but the reflected operators of a subclass are called first. Code that treats a handle as
    dense data raises an error instead of computing something wrong.
    """

    def __new__(cls, *args: Any) -> Any:
        return super().__new__(cls)  # type: ignore[call-arg]

    def __init__(self, dtype: mx.Dtype = mx.float32) -> None:
        super().__init__([], dtype)

    def _refuse(self, other: object) -> Any:
        raise TypeError("a KV handle stands for a layer's keys or values and cannot be changed")

    # Other operations return an empty array. In place, broadcasting would leave the handle as is.
    __iadd__ = __isub__ = __imul__ = __itruediv__ = __ifloordiv__ = __imod__ = __ipow__ = _refuse
    __iand__ = __ior__ = __ixor__ = __ilshift__ = __irshift__ = __imatmul__ = _refuse


class KVHandle(_Handle):
    """Stands for a layer's keys or values."""

    def __init__(self, cache: PagedLayerCache) -> None:
        # Some models cast the output of attention to the dtype of the values.
        super().__init__(cache.spec.dtype)
        self.cache = cache

    def astype(self, *args: Any, **kwargs: Any) -> KVHandle:
        """Itself: the pool keeps its dtype, and the kernels accumulate in float32."""
        return self

    def swapaxes(self, axis1: int, axis2: int, **kwargs: Any) -> Any:
        """``keys.swapaxes(-1, -2)``: the right operand of a product with queries."""
        if {axis1, axis2} == {-1, -2} and self is self.cache.values:
            return TransposedHandle(self)
        return super().swapaxes(axis1, axis2, **kwargs)


class TransposedHandle(_Handle):
    """Stands for the rotary keys of multi-head latent attention, transposed.

    mlx-lm's latent attention multiplies them with the rotary part of the queries by itself and
    passes the product on as an additive mask; `Scores` stands for that product.
    """

    def __init__(self, handle: KVHandle) -> None:
        super().__init__()
        self.handle = handle

    def __rmatmul__(self, queries: mx.array) -> Scores:
        return Scores(self.handle, queries)


class Scores(_Handle):
    """A placeholder for ``queries @ keys^T``, to be added to the scores of the same layer."""

    def __init__(self, handle: KVHandle, queries: mx.array) -> None:
        super().__init__()
        self.handle = handle
        self.queries = queries  # [T, num_q_heads, 1, dim], already scaled


# --- Caches ---------------------------------------------------------------------------------------


class LatentScores(TypeError):
    """A layer turned out to be latent attention, but its pools were made for another kind."""

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__("[paged_attention] mask must be None for keys that are not latents")
        self.spec = spec


class _Written(NamedTuple):
    """The keys and values a layer has just written, until its attention has been built."""

    step: Step
    keys: mx.array  # [num_rows, num_kv_heads, dim]
    values: mx.array


class KVPools:
    """The key pool and the value pool of one attention cache.

    Head dims that the kernels do not take are padded with zeros to a multiple of 8: scores do not
    change, and the values' padding is cut off again.
    """

    # mlx-lm's chunked cache counts dropped tokens; nothing is dropped here.
    start_position = 0
    # mlx-vlm asks for the column that a batch shares, and without one reads positions on the host.
    _idx = 0
    layer = 0  # index among the layers with pools
    _written: _Written | None = None

    def __init__(
        self, context: StepContext, spec: LayerSpec, *, num_blocks: int, block_size: int
    ) -> None:
        self.spec = spec
        self._context = context
        self._group_spec = spec.group_spec
        self.key_pool, self.value_pool = (
            ops.allocate_pool(num_blocks, block_size, spec.num_kv_heads, dim, dtype)
            for dim, dtype in zip(spec.pool_dims, spec.pool_dtypes)
        )
        self._dims = spec.pool_dims

    def maybe_trim_front(self) -> None:
        """mlx-lm's chunked cache drops tokens here; here, the layer's spec hides them."""

    def _write(self, keys: mx.array, values: mx.array, slot_mapping: mx.array) -> None:
        """Writes ``[num_tokens, num_kv_heads, dim]`` keys and values."""
        keys = _pad(keys.astype(self.spec.dtype), self._dims[0])
        values = _pad(values.astype(self.spec.dtype), self._dims[1])
        self.key_pool, self.value_pool = ops.write_kv(
            self.key_pool, self.value_pool, keys, values, slot_mapping
        )
        step = self._context.step
        if step.prefill is not None:
            self._written = _Written(step, keys, values)
        if step.layerwise is not None:
            step.layerwise.layer_built(self.layer, self.key_pool, keys)


class PagedLayerCache(KVPools):
    """The cache of one attention layer: its two pools, read and written through the step's plan."""

    def __init__(
        self, context: StepContext, spec: LayerSpec, *, num_blocks: int, block_size: int
    ) -> None:
        super().__init__(context, spec, num_blocks=num_blocks, block_size=block_size)
        # The same two handles every step, because they stand for this cache.
        self.keys, self.values = KVHandle(self), KVHandle(self)
        # (query heads, has ALiBi) of each layer that attends to these pools -> `max_shared_rows`
        self._shared_rows: dict[tuple[int, bool], int] = {}

    @property
    def shared_rows(self) -> int | None:
        """`ops.max_shared_rows` of its layers; None before a step of them was built."""
        return min(self._shared_rows.values(), default=None)

    @property
    def offset(self) -> mx.array:
        """``[num_rows]`` int32: the position of each row's token."""
        return self._context.step.plan.positions

    def make_mask(self, *args: Any, **kwargs: Any) -> None:
        """Returns no mask, because plan and spec determine the keys that each row sees."""
        return None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[KVHandle, KVHandle]:
        """Writes ``[T, num_kv_heads, 1, head_dim]`` keys and values to the pool."""
        self._write(keys.squeeze(2), values.squeeze(2), self._slots)
        return self.keys, self.values

    def keys_and_values(self) -> tuple[KVHandle, KVHandle]:
        """Returns handles for layers that attend to this layer's keys and values."""
        return self.keys, self.values

    state = property(keys_and_values)  # as mlx-vlm asks for them

    @property
    def _slots(self) -> mx.array:
        return self._context.step.plan_for(self._group_spec).slot_mapping

    def attend(
        self,
        queries: mx.array,
        *,
        scores: Scores | None = None,
        **options: Unpack[AttentionOptions],
    ) -> mx.array:
        """``[T, num_q_heads, 1, key_dim]`` queries -> ``[T, num_q_heads, 1, value_dim]``."""
        if scores is not None:
            raise LatentScores(self.spec)
        return self._attend(queries.squeeze(2), self.value_pool, options)

    def _attend(
        self, queries: mx.array, value_pool: mx.array, options: AttentionOptions
    ) -> mx.array:
        options["window"] = self.spec.window
        # Some models upcast queries; the kernels accumulate in float32 anyway.
        rows = _pad(queries.astype(self.spec.dtype), self._dims[0])
        step = self._context.step
        pools = self.key_pool, value_pool
        layer = rows.shape[1], "alibi_slopes" in options
        if layer not in self._shared_rows:
            self._shared_rows[layer] = ops.max_shared_rows(rows, *pools, has_alibi=layer[1])

        def attend(rows: mx.array, plan: AttentionPlan) -> mx.array:
            out = ops.paged_attention(
                rows, *pools, plan, activations=self._context.activations, **options
            )
            return out if out.shape[-1] == self.spec.value_dim else out[..., : self.spec.value_dim]

        written, self._written = self._written, None
        if (
            step.prefill is not None
            and self._group_spec == FULL
            and dense_prefill.serves(self.spec, options)
        ):
            own = None
            if written is not None and written.step is step:
                own = written.keys, written.values
            out = step.prefill.attend(rows, pools, own, options["scale"])
            if step.layerwise is not None:
                step.layerwise.attention_built(self.layer, out)
        else:
            out = attend(rows, step.plan_for(self._group_spec))
        if step.selected is not None:
            step.selected.attention_built(self.layer, rows, out, attend)
        return mx.expand_dims(out, 2).astype(queries.dtype)


class LatentLayerCache(PagedLayerCache):
    """The cache of multi-head latent attention (DeepSeek): one latent and one rotary key per token.

    The pool's keys are both, concatenated. They also serve as values, of which only the first part
    counts. Model code passes the latent as keys *and* values, and the scores of the rotary half as
    a mask (`Scores`), so queries are concatenated here in the same way.
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
        scores: Scores | None = None,
        **options: Unpack[AttentionOptions],
    ) -> mx.array:
        """Attends with ``[T, num_q_heads, 1, latent_dim]`` queries; returns the same shape."""
        if scores is None:
            raise TypeError("[paged_attention] latent attention came without its rotary scores")
        if self._context.step.plan_for(self._group_spec).bounds is not None:
            raise ValueError("[paged_attention] bounds must be None for latent attention")
        whole = mx.concatenate([queries * options["scale"], scores.queries], axis=-1).squeeze(2)
        options["scale"] = 1.0
        return self._attend(whole, self.key_pool, options)


class UnusedCache:
    """The cache of a layer that did not write to it in the observed forward, and must not now."""

    def make_mask(self, *args: Any, **kwargs: Any) -> None:
        """No mask."""
        return None

    def __getattr__(self, name: str) -> NoReturn:
        """Raises for anything else that an attention layer reads from its cache."""
        raise RuntimeError(
            f"a layer reads {name!r} of a cache that it had not used in the observed forward"
        )


class ElsewhereCache:
    """The cache of another rank's layer: it has positions, and takes no tokens."""

    start_position, _idx = KVPools.start_position, KVPools._idx
    _offset = None  # mlx-vlm asks for it before `_idx`.

    def __init__(self, context: StepContext) -> None:
        self._context = context

    @property
    def offset(self) -> mx.array:
        """``[num_rows]`` int32: the position of each row's token."""
        return self._context.step.plan.positions

    def make_mask(self, *args: Any, **kwargs: Any) -> None:
        """No mask."""
        return None

    def maybe_trim_front(self) -> None:
        """See `KVPools`."""

    def __getattr__(self, name: str) -> NoReturn:
        """Raises for anything else that an attention layer reads from its cache."""
        raise RuntimeError(f"the model reads {name!r} of the cache of a layer on another rank")


def copy_blocks(caches: Iterable[KVPools], block_pairs: mx.array) -> None:
    """Copies blocks in every pool of these caches, before the rest of the step.

    Args:
        caches: Caches of one group, because block ids are meaningless in another.
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
