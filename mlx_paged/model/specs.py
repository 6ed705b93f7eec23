"""What the layers of a model ask of the KV store, told in plain numbers.

A model is a tree of caches (mlx-lm gives one entry to a layer, and some entries hold several); the
leaves of that tree are described here, in order. The leaves of one `Reach` read and write through
the same block tables; recurrent leaves have no blocks but *state slots*, see
`mlx_paged.model.recurrent`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True)
class Reach:
    """How far back the rows of an attention layer see. Layers of one reach share block tables.

    At most one of the two is set; neither: every key up to the row's own position.
    """

    window: int | None = None  # keys at positions in (p - window, p]
    chunk: int | None = None  # keys at positions in [p - p % chunk, p]

    def first_visible(self, position: int) -> int:
        """The first position that a row at `position`, or any row after it, can see.

        Blocks that lie wholly before it are never read again.
        """
        if self.window is not None:
            return max(0, position - self.window + 1)
        if self.chunk is not None:
            return position - position % self.chunk
        return 0


FULL = Reach()


@dataclass(frozen=True)
class LayerSpec:
    """What one attention cache holds.

    Latent attention (DeepSeek's MLA) has one head, whose keys are latent and rotary key side by
    side, and whose values are the latents: the first `value_dim` numbers of the keys. They are
    stored once.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: mx.Dtype
    window: int | None = None  # keys at positions in (p - window, p]; None: all up to p
    chunk: int | None = None  # keys at positions in [p - p % chunk, p]; None: all up to p
    latent: bool = False

    @property
    def reach(self) -> Reach:
        """The group of layers whose block tables this one shares."""
        return Reach(self.window, self.chunk)

    @property
    def pool_dims(self) -> tuple[int, int]:
        """Head dims of the key pool and of the value pool: multiples of 8, as the ops take them."""
        # The value pool of latents holds nothing; the ops write both, and 8 is the least.
        return _padded(self.key_dim), _padded(0 if self.latent else self.value_dim)

    @property
    def bytes_per_token(self) -> int:
        """One token in both pools, in bytes."""
        return self.num_kv_heads * sum(self.pool_dims) * self.dtype.size


def _padded(dim: int) -> int:
    return max(8, -(-dim // 8) * 8)


@dataclass(frozen=True)
class StateSpec:
    """What one recurrent cache keeps of a sequence, whatever its length: its state arrays."""

    # Of each array, without the batch axis; None: an entry that the layer never uses.
    shapes: tuple[tuple[int, ...] | None, ...]
    dtypes: tuple[mx.Dtype, ...]

    @property
    def bytes_per_slot(self) -> int:
        """The states of one sequence, in bytes: what a snapshot costs."""
        return sum(math.prod(s) * d.size for s, d in zip(self.shapes, self.dtypes) if s is not None)


@dataclass(frozen=True)
class UnusedSpec:
    """A cache that the model makes and never writes to: a layer without attention."""


CacheSpec = LayerSpec | StateSpec | UnusedSpec
