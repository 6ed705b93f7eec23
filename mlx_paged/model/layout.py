"""CacheLayout: what a model's layers store in the KV cache, in plain numbers.

A model has a tree of caches (mlx-lm gives one entry to a layer, and some entries hold several).
This describes its leaves, in order. The leaves of one `KVCacheGroupSpec` share block tables;
recurrent leaves have *state slots* instead, see `mlx_paged.model.recurrent`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Any

import mlx.core as mx

from mlx_paged.errors import InvalidParameterError
from mlx_paged.model.kv_formats import SLIDING_WINDOW, KVFormat


@dataclass(frozen=True)
class KVCacheGroupSpec:
    """The past that attention layers see. Layers with equal specs share block tables.

    At most one of the two fields is set; with neither, a row sees every key up to its position.
    """

    window: int | None = None  # keys at positions in (p - window, p]
    chunk: int | None = None  # keys at positions in [p - p % chunk, p]

    def first_visible(self, position: int) -> int:
        """Returns the first position that a row at `position`, or any row after it, can see.

        Blocks that lie wholly before it are never read again.
        """
        if self.window is not None:
            return max(0, position - self.window + 1)
        if self.chunk is not None:
            return position - position % self.chunk
        return 0


FULL = KVCacheGroupSpec()


@dataclass(frozen=True)
class LayerSpec:
    """The contents of one attention cache.

    Latent attention (DeepSeek's MLA) has one head. Its keys are latent and rotary key concatenated,
    and its values are the latents: the first `value_dim` elements of the keys. They are stored
    once, and not quantized.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: mx.Dtype
    window: int | None = None  # keys at positions in (p - window, p]; None: all up to p
    chunk: int | None = None  # keys at positions in [p - p % chunk, p]; None: all up to p
    latent: bool = False
    kv_format: KVFormat | None = None  # None: both pools are of `dtype`

    @property
    def group_spec(self) -> KVCacheGroupSpec:
        """The group whose block tables this layer shares."""
        return KVCacheGroupSpec(self.window, self.chunk)

    @property
    def pool_dims(self) -> tuple[int, int]:
        """Head dims of the key pool and of the value pool: multiples of 8, as the ops take them."""
        # The value pool of latents is unused, but the ops write both, and 8 is their minimum.
        return _padded(self.key_dim), _padded(0 if self.latent else self.value_dim)

    @property
    def pool_dtypes(self) -> tuple[mx.Dtype, mx.Dtype]:
        """Dtypes of the key pool and of the value pool, as the ops take them."""
        if self.kv_format is None:
            return self.dtype, self.dtype
        return getattr(mx, self.kv_format.keys), getattr(mx, self.kv_format.values)

    @property
    def bytes_per_token(self) -> int:
        """One token in both pools, in bytes."""
        keys, values = self.pool_dims
        if self.kv_format is None:
            return self.num_kv_heads * (keys + values) * self.dtype.size
        kept = self.kv_format.keys.row_bytes(keys) + self.kv_format.values.row_bytes(values)
        return self.num_kv_heads * kept


def _padded(dim: int) -> int:
    return max(8, -(-dim // 8) * 8)


@dataclass(frozen=True)
class StateSpec:
    """The state arrays of one recurrent cache for a sequence of any length."""

    # Shape of each array, without the batch axis; None: an entry that the layer never uses.
    shapes: tuple[tuple[int, ...] | None, ...]
    dtypes: tuple[mx.Dtype, ...]

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one sequence's states, and so of a snapshot."""
        return sum(math.prod(s) * d.size for s, d in zip(self.shapes, self.dtypes) if s is not None)


@dataclass(frozen=True)
class UnusedSpec:
    """A cache that the model creates but never writes: a layer without attention."""


CacheSpec = LayerSpec | StateSpec | UnusedSpec

# A leaf's index in `CacheLayout.specs`, or the entries of a layer that has several caches.
Shape = int | tuple["Shape", ...]


class Mode(StrEnum):
    """How to run a family's forward."""

    NATIVE = "native paged"  # all rows together, attention reads blocks
    REGROUPED = "regrouped"  # likewise; layers with recurrent state run on equal-length groups
    GATHERED = "gathered"  # once for each number of rows a sequence has; dense copies
    UNIFORM = "gathered alone"  # once for each length and position: positions are host integers

    @property
    def is_gathered(self) -> bool:
        """True if attention reads dense copies of the blocks."""
        return self in (Mode.GATHERED, Mode.UNIFORM)


@dataclass(frozen=True)
class CacheLayout:
    """The leaves of a model's cache tree, in order, and the tree.

    Attributes:
        kept: The leaves that have pools on this rank; None: all. Groups and block tables are those
            of the whole model on every rank.
    """

    mode: Mode
    specs: tuple[CacheSpec, ...]
    tree: tuple[Shape, ...]
    max_context_len: int | None = None  # tokens up to which the forward is exact; None: no limit
    kept: frozenset[int] | None = None

    def keeps(self, leaf: int) -> bool:
        """True if a leaf has pools on this rank."""
        return self.kept is None or leaf in self.kept

    @property
    def pooled(self) -> tuple[LayerSpec, ...]:
        """The leaves that have blocks on this rank."""
        return tuple(
            s for i, s in enumerate(self.specs) if isinstance(s, LayerSpec) and self.keeps(i)
        )

    @property
    def attention(self) -> tuple[LayerSpec, ...]:
        """The leaves that have blocks."""
        return tuple(s for s in self.specs if isinstance(s, LayerSpec))

    @property
    def states(self) -> tuple[StateSpec, ...]:
        """The leaves that have state slots."""
        return tuple(s for s in self.specs if isinstance(s, StateSpec))

    @property
    def compute_dtype(self) -> mx.Dtype:
        """The dtype of the model's rows, and of keys before they are stored."""
        return next((s.dtype for s in self.attention), None) or self.states[0].dtypes[0]

    @cached_property
    def group_specs(self) -> tuple[KVCacheGroupSpec, ...]:
        """The groups of the layers. Each needs its own block tables once blocks are freed."""
        return tuple(dict.fromkeys(spec.group_spec for spec in self.attention))

    @cached_property
    def has_states(self) -> bool:
        """True if sequences need state slots."""
        return bool(self.states)

    @cached_property
    def has_quantized_pools(self) -> bool:
        """True if any attention layer keeps rounded keys and values."""
        return any(spec.kv_format is not None for spec in self.attention)

    def bytes_per_token(self, group_spec: KVCacheGroupSpec | None = None) -> int:
        """Returns the bytes of one token's K and V in the pools of this rank, or in one group's."""
        return sum(s.bytes_per_token for s in self.pooled if group_spec in (None, s.group_spec))

    def with_kv_format(self, kv_format: KVFormat, skip: Sequence[int | str] = ()) -> CacheLayout:
        """Returns the layout with another format of the attention layers' pools.

        Latents and recurrent states keep theirs.

        Args:
            skip: Numbers of layers that keep their format, too; "sliding_window" means all layers
                with a window.

        Raises:
            InvalidParameterError: A layer that the model does not have.
        """
        skipped: set[int] = set()
        for layer in skip:
            if layer == SLIDING_WINDOW:
                windows = (i for i, s in enumerate(self.specs) if getattr(s, "window", None))
                skipped.update(windows)
            elif isinstance(layer, int) and layer < len(self.tree):
                skipped.update(_leaves(self.tree[layer]))
            else:
                expected = f"layers of the {len(self.tree)} that the model has"
                raise InvalidParameterError("kv_cache_dtype_skip_layers", expected, layer)
        specs = [
            replace(spec, kv_format=kv_format)
            if isinstance(spec, LayerSpec) and not spec.latent and i not in skipped
            else spec
            for i, spec in enumerate(self.specs)
        ]
        return replace(self, specs=tuple(specs))

    @property
    def bytes_per_slot(self) -> int:
        """The recurrent state of one sequence, in the layers of this rank."""
        return sum(
            spec.bytes_per_slot
            for i, spec in enumerate(self.specs)
            if isinstance(spec, StateSpec) and self.keeps(i)
        )


def _leaves(shape: Shape) -> list[int]:
    return [shape] if isinstance(shape, int) else [leaf for part in shape for leaf in _leaves(part)]


def assemble(tree: Sequence[Shape], leaves: Sequence[Any]) -> list[Any]:
    """Returns the leaves of a cache tree as model code takes them: one entry for each layer."""
    # Imported here, because importing mlx_lm imports the drop-in, which imports this module.
    from mlx_lm.models.cache import CacheList

    def build(shape: Shape) -> Any:
        if isinstance(shape, int):
            return leaves[shape]
        return CacheList(*(build(part) for part in shape))

    return [build(shape) for shape in tree]
