"""The LoRA adapters of a model: its layers' calls add the update of each row's adapter.

A layer that an adapter changes computes ``W(x) + (x @ A[slot].T) @ B[slot]`` for rows that name a
slot. Steps without such rows have the same graph as without adapters. Only the first adapter to
change a layer creates its slots (`lora_slots`), which requires new graphs.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_paged import kernels, ops
from mlx_paged.model.caches import StepContext
from mlx_paged.model.expert_lora import ExpertOverrides, expert_layers
from mlx_paged.model.linear_parts import EXPERTS, shape_of
from mlx_paged.model.lora_slots import (
    AdaptedLayer,
    LowRank,
    features_of,
    updated,
)
from mlx_paged.model.overrides import Overrides
from mlx_paged.model.sharding import Division, linear_layers
from mlx_paged.model.takes_media import TakesMedia
from mlx_paged.platform import Platform

# Ranks are multiples of this, as vectorized loads and products of few rows require.
RANK_STEP = 8
_INTERLEAVED = ("gpt_oss",)
# Kimi K3 uses these layers' weights directly, so overriding their calls would have no effect.
_NOT_CALLED = ("self_attention_res_proj", "mlp_res_proj", "output_attn_res_proj")


@dataclass(frozen=True)
class AdapterTargets:
    """The layers of a model that adapters may change, and the reasons against the others.

    Attributes:
        linear: (in_features, out_features) by the module's path; of the whole layer, even where
            this rank holds a part of it.
        experts: (num_experts, in_features, out_features) of layers of experts, likewise.
        interleaves_experts: True if transformers has gates and up projections of experts in one
            parameter where they alternate; otherwise all gates come first.
        refused: Kinds of the other modules, by path.
    """

    linear: Mapping[str, tuple[int, int]]
    refused: Mapping[str, str]
    experts: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)
    interleaves_experts: bool = False

    @classmethod
    def of(
        cls, model: nn.Module, projection: nn.Module | None, apart: Collection[str] = ()
    ) -> AdapterTargets:
        """Lists the layers of a model.

        Args:
            projection: The module that computes the logits.
            apart: See `seen_apart`.
        """
        of_projection = set() if projection is None else {id(m) for m in projection.modules()}
        decoder = model.language_model if isinstance(model, TakesMedia) else model
        in_steps = {id(module) for module in decoder.modules()}
        division = Division.of(model)
        parts = division.parts
        linear: dict[str, tuple[int, int]] = {}
        refused: dict[str, str] = {}
        for path, module in linear_layers(model).items():
            if id(module) not in in_steps:
                refused[path] = "a layer of an encoder"
            elif id(module) in of_projection:
                refused[path] = "the output projection"
            elif path in apart:
                refused[path] = "a layer that does not see one vector for each row"
            elif path.rpartition(".")[2] in _NOT_CALLED:
                refused[path] = "a layer that the model never calls"
            else:
                linear[path] = parts[path].whole if path in parts else shape_of(module)
        for path, module in model.named_modules():
            if isinstance(module, (nn.Embedding, nn.QuantizedEmbedding)):
                refused[path] = "an embedding"
            elif isinstance(module, EXPERTS):
                refused[path] = "a layer of experts outside of an MLP"
        experts: dict[str, tuple[int, int, int]] = {}
        for path, (_, module) in expert_layers(model).items():
            if parts or division.elsewhere:
                refused[path] = "a layer of experts, on several ranks"
            else:
                experts[path] = features_of(module)  # type: ignore[assignment]
                del refused[path]
        return cls(linear, refused, experts, getattr(model, "model_type", "") in _INTERLEAVED)


@contextmanager
def seen_apart(model: nn.Module, context: StepContext) -> Iterator[set[str]]:
    """Finds layers whose calls cannot tell which rows they get: they see other than one vector for
    each row of a step, such as one token or one expert at a time, or return several arrays.

    Within it, a step with adapters must be built.

    Yields:
        Their paths, at the end.
    """
    layers, found, overrides = linear_layers(model), set[str](), Overrides()

    def watch(path: str, module: nn.Module) -> None:
        base = type(module)

        def call(self: Any, x: mx.array, *more: Any, **named: Any) -> Any:
            out = base.__call__(self, x, *more, **named)
            slots = context.adapters
            if slots is None:  # Another thread may run the model meanwhile.
                return out
            if x.size // x.shape[-1] != slots.shape[0] or not isinstance(out, mx.array):
                found.add(path)
            return out

        overrides.replace(module, "__call__", call)

    for path, module in layers.items():
        watch(path, module)
    try:
        yield found
    finally:
        overrides.undo()
    # A step does not call each of a list of experts.
    alike = {_without_numbers(path) for path in found}
    found.update(path for path in layers if _without_numbers(path) in alike)


def _without_numbers(path: str) -> str:
    return re.sub(r"\d+", "*", path)


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
        modules = dict(model.named_modules())
        self._experts: dict[str, tuple[nn.Module, nn.Module]] = {
            path: (modules[around], module)
            for path, (around, module) in expert_layers(model).items()
            if path in targets.experts
        }
        features = sum(sum(shape_of(module)) for module in self._modules.values())
        for num_experts, width, out_features in targets.experts.values():
            features += num_experts * (width + out_features)
        self.max_bytes = num_slots * rank * dtype.size * features
        # The dtype of rows for `ops.lora`. On the CPU, weights may have other dtypes.
        self._row_dtype = mx.float32 if platform.on_cpu else dtype
        self._context = context
        self._layers: dict[str, AdaptedLayer] = {}
        self._has_new_layers = False  # since the last load that succeeded
        self._overrides = Overrides()
        self._expert_overrides = ExpertOverrides(
            context, num_slots, self._row_dtype, self._overrides
        )

    def load(self, slot: int, layers: Mapping[str, LowRank]) -> bool:
        """Writes an adapter to a slot. No step in flight may use the slot, unless it runs on this
        thread's stream.

        Args:
            slot: From 0.
            layers: Updates by path, with at most the rank of the slots. Skips layers that other
                pipeline ranks hold.

        Returns:
            True if compiled steps with adapters are no longer valid.

        Raises:
            MemoryError: There is no memory for further layers. The next load continues.
        """
        added = layers.keys() - self._layers.keys()
        for path in added & self._modules.keys():
            module = self._modules[path]
            self._override(module, self._add(path, module))
        for path in added & self._experts.keys():
            around, module = self._experts[path]
            self._expert_overrides.add(around, module, self._add(path, module))
        for path, layer in self._layers.items():
            layer.write(slot, layers.get(path))
        is_new, self._has_new_layers = self._has_new_layers, False
        return is_new or "write_kv" in kernels.rejected

    @property
    def change_experts(self) -> bool:
        """True if an adapter has changed a layer of experts."""
        return not self._experts.keys().isdisjoint(self._layers)

    def _add(self, path: str, module: nn.Module) -> AdaptedLayer:
        part = self._parts.get(path)
        layer = AdaptedLayer(module, part, self.num_slots, self.rank, self.dtype)
        self._layers[path] = layer
        self._has_new_layers = True
        return layer

    def _override(self, module: nn.Module, layer: AdaptedLayer) -> None:
        base, context, row_dtype = type(module), self._context, self._row_dtype

        def call(self: Any, x: mx.array) -> mx.array:
            out = base.__call__(self, x)
            slots = context.adapters
            return out if slots is None else _adapted(out, x, slots, layer, row_dtype)

        self._overrides.replace(module, "__call__", call)


def _adapted(
    out: mx.array, x: mx.array, slots: mx.array, layer: AdaptedLayer, dtype: mx.Dtype
) -> mx.array:
    """Returns `out` plus each row's update.

    Args:
        out: ``[..., out_features]``, the layer's output for `x`.
        x: ``[..., in_features]``, the rows of the step in order, possibly as
            ``[num_seqs, length, in_features]``.
        slots: ``[num_rows]`` int32; -1 means no adapter.

    Raises:
        ValueError: `x` does not have `num_rows` rows.
    """
    shape = out.shape
    if x.shape[0] != slots.shape[0]:
        x, out = x.reshape(-1, x.shape[-1]), out.reshape(-1, shape[-1])
    x = x.astype(dtype)
    out = updated(out, dtype, lambda base: ops.lora(base, x, slots, layer.a, layer.b))
    return out if out.shape == shape else out.reshape(shape)
