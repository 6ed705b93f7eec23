"""Slots of LoRA adapters on the device: a stack for each layer that an adapter changes.

Slots are written in place, through the operation that writes keys and values, so compiled steps,
which hold the stacks as constants, stay valid when an adapter is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_paged import kernels, ops
from mlx_paged.model.linear_parts import EXPERTS, LinearPart, shape_of

# Shape of the pools behind the stacks; it only matters to the operation that writes them.
_BLOCK, _MAX_DIM, _NO_VALUES = 8, 512, 8


class LowRank(NamedTuple):
    """The update of one linear layer, ``x -> (x @ a.T) @ b``, or one of each expert of a layer.

    Attributes:
        a: ``[rank, in_features]`` or ``[num_experts, rank, in_features]`` float32.
        b: Likewise with out_features; includes the adapter's scale.
    """

    a: np.ndarray
    b: np.ndarray

    @property
    def rank(self) -> int:
        """Its rank."""
        return self.a.shape[-2]

    def part(self, part: LinearPart) -> LowRank:
        """Returns the update of a parallel rank's part of the layer.

        Not for experts. If the layer's inputs are divided, the all-reduce of the partial outputs
        also adds up the partial updates.
        """
        return LowRank(self.a[:, part.inputs], self.b[:, part.outputs])


def features_of(module: nn.Module) -> tuple[int, ...]:
    """([num_experts,] in_features, out_features) of a linear layer."""
    if isinstance(module, EXPERTS):
        return module.num_experts, module.input_dims, module.output_dims
    return shape_of(module)


class Stack:
    """``[num_slots, *shape]``, whose slots are written in place."""

    def __init__(self, num_slots: int, shape: tuple[int, ...], dtype: mx.Dtype) -> None:
        size = math.prod(shape)
        self._dim = next(d for d in range(_MAX_DIM, 0, -8) if size % d == 0)
        self._rows = size // self._dim
        self._shape, self._num_slots = shape, num_slots
        blocks = -(-num_slots * self._rows // _BLOCK)
        self._pool = ops.allocate_pool(blocks, _BLOCK, 1, self._dim, dtype)
        self._beside = ops.allocate_pool(blocks, _BLOCK, 1, _NO_VALUES, dtype)
        self._write(0, mx.zeros((num_slots * self._rows, 1, self._dim), dtype))

    @property
    def array(self) -> mx.array:
        """``[num_slots, *shape]``: a view of the memory that `write` writes to."""
        count = self._num_slots * self._rows * self._dim
        flat = self._pool.reshape(-1)
        flat = flat if flat.size == count else flat[:count]
        view = flat.reshape(self._num_slots, *self._shape)
        mx.eval(view)
        return view

    def write(self, slot: int, values: np.ndarray | None) -> None:
        """Writes a slot and waits for the write. None writes zeros.

        Args:
            values: At most as large as the slot along each axis; zeros fill the rest.
        """
        given = np.zeros(self._shape, np.float32)
        if values is not None:
            given[tuple(slice(size) for size in values.shape)] = values
        rows = mx.array(given.reshape(self._rows, 1, self._dim)).astype(self._pool.dtype)
        self._write(slot * self._rows, rows)

    def _write(self, first: int, rows: mx.array) -> None:
        at = mx.arange(first, first + len(rows), dtype=mx.int32)
        nothing = mx.zeros((len(rows), 1, _NO_VALUES), self._pool.dtype)
        self._pool, self._beside = ops.write_kv(self._pool, self._beside, rows, nothing, at)
        mx.eval(self._pool, self._beside)


class AdaptedLayer:
    """The slots of a linear layer, or of one with experts.

    Args:
        module: The layer.
        part: The part of the layer that this module holds; None: all of it.

    Attributes:
        a: ``[num_slots, rank, in_features]``, or ``[num_slots, num_experts, rank, in_features]``.
        b: Likewise with out_features.
    """

    def __init__(
        self,
        module: nn.Module,
        part: LinearPart | None,
        num_slots: int,
        rank: int,
        dtype: mx.Dtype,
    ) -> None:
        self._part = part
        *num_experts, width, out_features = features_of(module)
        self._stacks = (
            Stack(num_slots, (*num_experts, rank, width), dtype),
            Stack(num_slots, (*num_experts, rank, out_features), dtype),
        )
        self._in_use: set[int] = set()
        self.a, self.b = (stack.array for stack in self._stacks)

    def write(self, slot: int, change: LowRank | None) -> None:
        """Writes a slot.

        Args:
            change: Update of the whole layer; None: the slot's adapter does not change it.
        """
        if change is None and slot not in self._in_use:
            return
        self._in_use.add(slot)
        if change is not None and self._part is not None:
            change = change.part(self._part)
        for stack, values in zip(self._stacks, change or (None, None)):
            stack.write(slot, values)
        if change is None:
            self._in_use.remove(slot)
        if "write_kv" in kernels.rejected:  # Its replacement copies.
            self.a, self.b = (stack.array for stack in self._stacks)


def updated(out: mx.array, dtype: mx.Dtype, update: Callable[[mx.array], mx.array]) -> mx.array:
    """Returns ``update(out)``, computed in another dtype.

    Args:
        update: Adds to an array of `dtype`, in some of its rows. The others keep their bits in
            `out`, too.
    """
    if out.dtype == dtype:
        return update(out)
    return out + update(mx.zeros(out.shape, dtype)).astype(out.dtype)
