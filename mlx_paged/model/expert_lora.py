"""LoRA adapters of experts.

A layer of experts sees pairs of a row and an expert, and with many of them, mlx-lm sorts them by
expert before it calls the layer. Then only the experts' numbers travel with the pairs. So the
module around the layer multiplies each number by the number of slots, plus one, and adds the row's
slot. Pairs that are sorted by these numbers are also sorted by expert, and the layer takes the
numbers apart.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

from mlx_paged import ops
from mlx_paged.model import patches
from mlx_paged.model.caches import StepContext
from mlx_paged.model.linear_parts import EXPERTS
from mlx_paged.model.lora_slots import AdaptedLayer, updated
from mlx_paged.model.overrides import Overrides

#: Classes of modules around layers of experts.
AROUND = (SwitchGLU, SwitchMLP)


def expert_layers(model: nn.Module) -> dict[str, tuple[str, nn.Module]]:
    """Returns the layers of experts, by path, each with the path of the module around it."""
    found: dict[str, tuple[str, nn.Module]] = {}
    for path, module in model.named_modules():
        if isinstance(module, AROUND):
            for name, child in module.children().items():
                if isinstance(child, EXPERTS):
                    found[f"{path}.{name}"] = path, child
    return found


class ExpertOverrides:
    """Adds adapters to the results of layers of experts.

    Args:
        context: Holds the slot of each row of the step that is being built.
        num_slots: Maximum number of different adapters in a step.
        dtype: Of the rows that adapters take.
        overrides: Replaces the modules' calls.
    """

    def __init__(
        self, context: StepContext, num_slots: int, dtype: mx.Dtype, overrides: Overrides
    ) -> None:
        self._context, self._dtype, self._overrides = context, dtype, overrides
        self._base = num_slots + 1
        self._around: set[int] = set()  # ids of modules
        self._layers: dict[int, AdaptedLayer] = {}  # by the module's id

    def add(self, around: nn.Module, module: nn.Module, layer: AdaptedLayer) -> None:
        """Adds the adapters of one layer.

        Args:
            around: The module that calls it. It and its layers of experts change their classes.
        """
        self._layers[id(module)] = layer
        if id(around) not in self._around:
            self._around.add(id(around))
            self._override_around(around)
            # Those without adapters, too, have to take the pairs' numbers apart.
            for child in around.children().values():
                if isinstance(child, EXPERTS):
                    self._override_layer(child)

    def _override_layer(self, module: nn.Module) -> None:
        base, context = type(module), self._context

        def call(
            self_: Any, x: mx.array, indices: mx.array, sorted_indices: bool = False
        ) -> mx.array:
            slots, layer = context.adapters, self._layers.get(id(self_))
            if slots is None or not context.pairs_have_slots:
                out = base.__call__(self_, x, indices, sorted_indices)
                if slots is None or layer is None:
                    return out
                return self._adapted(out, x, slots, indices, layer)
            experts = indices // self._base
            out = base.__call__(self_, x, experts, sorted_indices)
            if layer is None:
                return out
            slots = (indices % self._base).astype(mx.int32).reshape(-1) - 1
            # As rows of one pair each.
            x = mx.broadcast_to(x, (*indices.shape, *x.shape[-2:]))
            x = x.reshape(-1, 1, *x.shape[-2:])
            pairs = out.reshape(-1, 1, *out.shape[-2:])
            pairs = self._adapted(pairs, x, slots, experts.reshape(-1, 1), layer)
            return pairs.reshape(out.shape)

        self._overrides.replace(module, "__call__", call)

    def _override_around(self, around: nn.Module) -> None:
        base, context = type(around), self._context

        def call(self_: Any, x: mx.array, indices: mx.array, *more: Any, **named: Any) -> mx.array:
            slots = context.adapters
            if slots is None or patches.keeps_order_of_pairs(base):
                return base.__call__(self_, x, indices, *more, **named)
            slots = (slots + 1).astype(indices.dtype).reshape(*indices.shape[:-1], 1)
            with context.slots_in_pairs(), patches.separate_experts():
                return base.__call__(self_, x, indices * self._base + slots, *more, **named)

        self._overrides.replace(around, "__call__", call)

    def _adapted(
        self,
        out: mx.array,
        x: mx.array,
        slots: mx.array,
        experts: mx.array,
        layer: AdaptedLayer,
    ) -> mx.array:
        """Returns `out` plus each pair's update.

        Args:
            out: ``[..., top_k, 1, out_features]``.
            x: ``[..., 1 or top_k, 1, in_features]``.
            slots: ``[num_rows]`` int32; -1 means no adapter.
            experts: ``[..., top_k]``.
        """
        x = x.astype(self._dtype)
        return updated(
            out,
            self._dtype,
            lambda base: ops.expert_lora(base, x, slots, experts, layer.a, layer.b),
        )
