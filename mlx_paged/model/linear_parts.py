"""LinearPart: one rank's part of a linear layer."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

#: Classes of linear layers.
LINEAR = (nn.Linear, nn.QuantizedLinear)
#: Classes of layers that have a matrix for each expert.
EXPERTS = (SwitchLinear, QuantizedSwitchLinear)


class LinearPart(NamedTuple):
    """A rank's part of a linear layer.

    Attributes:
        whole: (in_features, out_features) of the whole layer.
        inputs: The inputs that this rank has.
        outputs: ``[out_features of the part]``: the number of each output in the whole layer.
    """

    whole: tuple[int, int]
    inputs: slice
    outputs: np.ndarray


def shape_of(module: nn.Module) -> tuple[int, int]:
    """(in_features, out_features) of a linear layer."""
    out_features, width = module.weight.shape
    if isinstance(module, nn.QuantizedLinear):  # its weights are packed into uint32
        width = width * 32 // module.bits
    return width, out_features


class NumberedOutputs:
    """Finds the parts of its linear layers that a model keeps when its own file divides it.

    mlx-lm divides a bias like the outputs, in fused layers, too. So while the model's file divides
    the layers, every bias holds the numbers of the outputs. No weight is evaluated.

    Args:
        model: A whole mlx-lm model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers: dict[str, _Whole] = {}
        for path, module in model.named_modules():
            if isinstance(module, LINEAR):
                whole = _Whole(shape_of(module), module.weight.shape[1], module.get("bias"))
                self._layers[path] = whole
                module.bias = mx.arange(whole.shape[1])

    def restore(self, model: nn.Module, rank: int) -> dict[str, LinearPart]:
        """Gives the layers of the divided model their parts of their biases.

        Args:
            model: The same one. Its layers may be of other classes now.

        Returns:
            The parts of the layers, by path.
        """
        modules: dict[str, nn.Module] = dict(model.named_modules())
        parts = {}
        for path, whole in self._layers.items():
            module = modules[path]
            outputs = module.bias
            if whole.bias is None:
                del module["bias"]
            else:
                module.bias = whole.bias[outputs]
            width, packed = whole.shape[0], module.weight.shape[1]
            inputs = slice(0, width)
            if packed < whole.packed_width:
                width = width * packed // whole.packed_width
                inputs = slice(rank * width, (rank + 1) * width)
            parts[path] = LinearPart(whole.shape, inputs, np.array(outputs))
        return parts


class _Whole(NamedTuple):
    """A linear layer before it is divided."""

    shape: tuple[int, int]  # (in_features, out_features)
    packed_width: int  # of a row of its weights, in elements of their array
    bias: mx.array | None
