"""LoRA adapters on the device: a stack of slots for each linear layer that an adapter changes.

A layer with a stack computes ``W(x) + (x @ A[slot].T) @ B[slot]`` for rows that name a slot. Steps
without such rows have the same graph as without adapters.

Slots are written in place, through the operation that writes keys and values, so compiled steps,
which hold the stacks as constants, stay valid when an adapter is loaded. Only the first adapter to
change a layer creates its stack, which requires new graphs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from mlx_paged import kernels, ops
from mlx_paged.model.caches import StepContext
from mlx_paged.model.linear_parts import LinearPart, shape_of
from mlx_paged.model.overrides import Overrides
from mlx_paged.model.sharding import Division, linear_layers
from mlx_paged.platform import Platform

# Ranks are multiples of this, as vectorized loads and products of few rows require.
RANK_STEP = 8
# Kimi K3 uses these layers' weights directly, so overriding their calls would have no effect.
_NOT_CALLED = ("self_attention_res_proj", "mlp_res_proj", "output_attn_res_proj")
# Shape of the pools behind the stacks; it only matters to the operation that writes them.
_BLOCK, _MAX_DIM, _NO_VALUES = 8, 512, 8


class LowRank(NamedTuple):
    """The update of one linear layer: ``x -> (x @ a.T) @ b``.

    Attributes:
        a: ``[rank, in_features]`` float32.
        b: ``[rank, out_features]`` float32, including the adapter's scale.
    """

    a: np.ndarray
    b: np.ndarray

    def part(self, part: LinearPart) -> LowRank:
        """Returns the update of a parallel rank's part of the layer.

        If the layer's inputs are divided, the all-reduce of the partial outputs also adds up the
        partial updates.
        """
        return LowRank(self.a[:, part.inputs], self.b[:, part.outputs])


@dataclass(frozen=True)
class AdapterTargets:
    """The layers of a model that adapters may change, and the reasons against the others.

    Attributes:
        linear: (in_features, out_features) by the module's path; of the whole layer, even where
            this rank holds a part of it.
        refused: Kinds of the other modules, by path.
    """

    linear: Mapping[str, tuple[int, int]]
    refused: Mapping[str, str]

    @classmethod
    def of(cls, model: nn.Module, projection: nn.Module | None) -> AdapterTargets:
        """Lists the layers of a model.

        Args:
            projection: The module that computes the logits.
        """
        parts = Division.of(model).parts
        linear: dict[str, tuple[int, int]] = {}
        refused: dict[str, str] = {}
        for path, module in linear_layers(model).items():
            if module is projection:
                refused[path] = "the output projection"
            elif path.rpartition(".")[2] in _NOT_CALLED:
                refused[path] = "a layer that the model never calls"
            else:
                linear[path] = parts[path].whole if path in parts else shape_of(module)
        for path, module in model.named_modules():
            if isinstance(module, (nn.Embedding, nn.QuantizedEmbedding)):
                refused[path] = "an embedding"
            elif isinstance(module, (SwitchLinear, QuantizedSwitchLinear)):
                refused[path] = "a layer of experts"
        return cls(linear, refused)


class _Stack:
    """``[num_slots, *shape]``, whose slots are written in place."""

    def __init__(self, num_slots: int, shape: tuple[int, int], dtype: mx.Dtype) -> None:
        size = shape[0] * shape[1]
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
            values: At most as many rows and columns as the slot; zeros fill the rest.
        """
        given = np.zeros(self._shape, np.float32)
        if values is not None:
            given[: values.shape[0], : values.shape[1]] = values
        rows = mx.array(given.reshape(self._rows, 1, self._dim)).astype(self._pool.dtype)
        self._write(slot * self._rows, rows)

    def _write(self, first: int, rows: mx.array) -> None:
        at = mx.arange(first, first + len(rows), dtype=mx.int32)
        nothing = mx.zeros((len(rows), 1, _NO_VALUES), self._pool.dtype)
        self._pool, self._beside = ops.write_kv(self._pool, self._beside, rows, nothing, at)
        mx.eval(self._pool, self._beside)


class _Layer:
    """A linear layer with its stacks.

    Args:
        part: The part of the layer that this module holds; None: all of it.
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
        width, out_features = shape_of(module)
        self._stacks = (
            _Stack(num_slots, (rank, width), dtype),
            _Stack(num_slots, (rank, out_features), dtype),
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


class AdapterLayers:
    """The adapters of a model.

    Args:
        model: Its linear layers change class when an adapter first changes them.
        targets: The layers that adapters may change.
        context: Holds the slot of each row of the step that is being built.
        num_slots: Maximum number of different adapters in a step.
        rank: Maximum rank, a multiple of `RANK_STEP`.
        dtype: Dtype of the stacks; on a GPU, the dtype of the model's activations.

    Attributes:
        num_slots, rank, dtype: As given.
        max_bytes: Bytes of the stacks if adapters change every layer.
    """

    def __init__(
        self,
        model: nn.Module,
        targets: AdapterTargets,
        context: StepContext,
        *,
        num_slots: int,
        rank: int,
        dtype: mx.Dtype,
        platform: Platform,
    ) -> None:
        self.num_slots, self.rank, self.dtype = num_slots, rank, dtype
        layers, division = linear_layers(model), Division.of(model)
        self._modules: dict[str, nn.Module] = {
            path: layers[path] for path in targets.linear if path not in division.elsewhere
        }
        self._parts = division.parts
        features = sum(sum(shape_of(module)) for module in self._modules.values())
        self.max_bytes = num_slots * rank * dtype.size * features
        # The dtype of rows for `ops.lora`. On the CPU, weights may have other dtypes.
        self._row_dtype = mx.float32 if platform.on_cpu else dtype
        self._context = context
        self._layers: dict[str, _Layer] = {}
        self._overrides = Overrides()

    def load(self, slot: int, layers: Mapping[str, LowRank]) -> bool:
        """Writes an adapter to a slot. No step in flight may use the slot, unless it runs on this
        thread's stream.

        Args:
            slot: From 0.
            layers: Updates by path, with at most the rank of the slots. Skips layers that other
                pipeline ranks hold.

        Returns:
            True if compiled steps with adapters are no longer valid.
        """
        added = (layers.keys() & self._modules.keys()) - self._layers.keys()
        for path in added:
            module, part = self._modules[path], self._parts.get(path)
            layer = _Layer(module, part, self.num_slots, self.rank, self.dtype)
            self._layers[path] = layer
            self._override(module, layer)
        for path, layer in self._layers.items():
            layer.write(slot, layers.get(path))
        return bool(added) or "write_kv" in kernels.rejected

    def _override(self, module: nn.Module, layer: _Layer) -> None:
        base, context, row_dtype = type(module), self._context, self._row_dtype

        def call(self: Any, x: mx.array) -> mx.array:
            out = base.__call__(self, x)
            slots = context.adapters
            return out if slots is None else _adapted(out, x, slots, layer, row_dtype)

        self._overrides.replace(module, "__call__", call)


def _adapted(
    out: mx.array, x: mx.array, slots: mx.array, layer: _Layer, dtype: mx.Dtype
) -> mx.array:
    """Returns `out` plus each row's update.

    Args:
        out: ``[..., out_features]``, the layer's output for `x`.
        x: ``[..., in_features]``, the rows of the step in order, possibly as
            ``[num_seqs, length, in_features]``.
        slots: ``[num_rows]`` int32; -1 means no adapter.

    Raises:
        ValueError: `x` does not have `num_rows` rows, or a multiple of them.
    """
    num_rows, shape = slots.shape[0], out.shape
    if x.shape[0] != num_rows or x.size != num_rows * x.shape[-1]:
        num_vectors = x.size // x.shape[-1]
        if num_vectors % num_rows:
            raise ValueError(f"[lora] x must have a multiple of {num_rows} rows but got {x.shape}")
        if num_vectors > num_rows:
            slots = mx.repeat(slots, num_vectors // num_rows)
        x, out = x.reshape(num_vectors, -1), out.reshape(num_vectors, -1)
    if out.dtype == dtype:
        out = ops.lora(out, x.astype(dtype), slots, layer.a, layer.b)
    else:  # Adding in another dtype would change rows that have no adapter.
        change = ops.lora(mx.zeros(out.shape, dtype), x.astype(dtype), slots, layer.a, layer.b)
        out = out + change.astype(out.dtype)
    return out if out.shape == shape else out.reshape(shape)
