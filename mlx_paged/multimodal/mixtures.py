"""Makes mlx-vlm's mixtures of experts those of mlx-lm.

mlx-vlm has copies of mlx-lm's classes. Patches, conversions of weights, calibration, the step
compiler and adapters know the originals, which compute the same.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import switch_layers


def use_mlx_lm_mixtures(model: nn.Module) -> None:
    """Changes the classes of a model's layers of experts and of the modules around them.

    Subclasses keep theirs, because they may compute something else.
    """
    from mlx_vlm.models import switch_layers as of_vlm

    classes = {
        of_vlm.SwitchLinear: switch_layers.SwitchLinear,
        of_vlm.QuantizedSwitchLinear: switch_layers.QuantizedSwitchLinear,
        of_vlm.SwitchGLU: CombiningSwitchGLU,
        of_vlm.SwitchMLP: switch_layers.SwitchMLP,
    }
    for module in model.modules():
        found = classes.get(type(module))
        if found is None:
            continue
        module.__class__ = found
        if found is switch_layers.QuantizedSwitchLinear:
            module.global_scale = None  # mlx-vlm has no such scales.
        elif found is CombiningSwitchGLU and type(module.activation) is of_vlm.SwiGLU:
            module.activation = switch_layers.SwiGLU()


class CombiningSwitchGLU(switch_layers.SwitchGLU):  # type: ignore[misc]
    """mlx-lm's `SwitchGLU` with the further arguments of mlx-vlm's."""

    passes_pairs_on = True  # see `patches.keeps_order_of_pairs`

    def __call__(
        self,
        x: mx.array,
        indices: mx.array,
        weights: mx.array | None = None,
        shared: mx.array | None = None,
        residual: Any = None,
    ) -> mx.array:
        """Returns the results of a row's experts.

        Args:
            x: ``[..., k]``.
            indices: ``[..., top_k]``.
            weights: Like `indices`; adds up the weighted results of a row.
            shared: Added to the sum.
            residual: mlx-vlm's arguments for expanding it, see `hc_expand`.
        """
        from mlx_vlm.models.switch_layers import SwitchGLU

        return SwitchGLU._combine(super().__call__(x, indices), weights, shared, residual)
