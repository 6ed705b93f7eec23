"""DropInRunner: runs a model over its pools the same way as the engine.

Both run ``[rows, 1]`` tokens, one row per token, because this is how the model family was verified.
mlx-lm's code may call the model with any shape.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_paged.errors import UnsupportedModelError
from mlx_paged.model.dense_access import order_reads, read_dense, write_dense
from mlx_paged.model.kv_formats import KVFormat
from mlx_paged.model.layout import CacheSpec, KVCacheGroupSpec, LayerSpec, StateSpec
from mlx_paged.model.mlx_lm_config import config_of
from mlx_paged.model.state_arrays import ArrayStateCache, State, StateArrays
from mlx_paged.ops import AttentionPlan

# Extra tokens that windows keep, so that a sequence can be trimmed a little.
WINDOW_SLACK = 64

Tables = Sequence[Sequence[int]]  # blocks of each sequence


class DropInRunner:
    """Runs steps of ragged sequences. Does not keep its model alive.

    Attributes:
        states: The states of the recurrent layers.
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
        block_size: int,
        kv_format: KVFormat | None = None,
    ) -> None:
        # Imported late, because an import of mlx_lm may have led here.
        from mlx_paged.engine.calibration import follow_known_verdicts
        from mlx_paged.model.wrap import build_paged_model

        follow_known_verdicts()
        config = config_of(model)
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
        self.states = StateArrays(paged.layout.states)
        paged.model = None  # type: ignore[assignment]

    def allocate(self, num_blocks: int) -> None:
        """Allocates the pools of all groups."""
        numbers = count()
        self._paged.allocate(
            num_blocks,
            state_cache=lambda spec: ArrayStateCache(spec, next(numbers), self.states),
        )
        caches = iter(self._paged.attention_caches)
        self._caches: list[Any] = [
            next(caches) if isinstance(spec, LayerSpec) else None for spec in self.specs
        ]
        for cache in self._paged.attention_caches:
            order_reads(cache)

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
        """Returns the bytes of one block's keys and values in the layers of a group."""
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
        with self.states.read_by(states):
            try:
                logits = self._paged.forward(tokens, inputs, may_repeat=input_embeddings is None)
            finally:
                self._paged.model = None  # type: ignore[assignment]
            made = self.states.made() if self.layout.has_states else []
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
        """See `write_dense`."""
        write_dense(self._caches[layer], keys, values, plan.slot_mapping)

    def read(self, layer: int, tables: Tables, start: int, end: int) -> tuple[mx.array, mx.array]:
        """See `read_dense`."""
        return read_dense(self._caches[layer], tables, start, end, self.block_size)

    def spec(self, layer: int) -> LayerSpec:
        """Returns the spec of an attention cache that the model uses."""
        spec = self.specs[layer]
        assert isinstance(spec, LayerSpec), f"cache {layer} of the model is not used"
        return spec

    # Pools.

    def pools(self) -> list[mx.array]:
        """Returns the current pool arrays."""
        return self._paged.pools()

    def restore(self, pools: list[mx.array]) -> None:
        """Restores the arrays that `pools` returned. Writes are in place, so the memory is the
        same."""
        self._paged.restore(pools)

    def copy_blocks(self, pairs: Iterable[tuple[int, int]], number: int = 0) -> None:
        """Copies blocks (src, dst) in every layer of a group."""
        copies = mx.array(list(pairs), dtype=mx.int32)
        for group_spec in self._group_specs(number):
            self._paged.copy_blocks(copies, group_spec)

    def resize(self, num_blocks: int, number: int = 0) -> None:
        """Changes the number of blocks of a group."""
        for group_spec in self._group_specs(number):
            self._paged.resize(num_blocks, group_spec)
