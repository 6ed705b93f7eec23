"""shard: keeps one rank's part of a model's weights, with mlx-lm's own `shard()`.

Each rank has a part of the heads and of the inner columns of every MLP. mlx-lm's files determine
which layers are cut and where the parts are added up. This module adds two things:

- Layers stay of MLX's own classes, which patches, conversions and the step compiler know. A layer
  whose outputs are cut is a plain linear layer; one whose inputs are cut is in a `Summed`.
- Where ranks outnumber KV heads, each KV head is on several ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.distributed import (
    AllToShardedLinear,
    QuantizedAllToShardedLinear,
    QuantizedShardedToAllLinear,
    ShardedToAllLinear,
)
from mlx.utils import tree_map, tree_unflatten

from mlx_paged.errors import UnsupportedModelError
from mlx_paged.model.families import module_of
from mlx_paged.model.linear_parts import LINEAR, LinearPart, NumberedOutputs

#: Families that mlx-lm has a `shard()` for, and that cannot use it here.
REFUSED: dict[str, str] = {
    "minimax_m3_vl": "its sparse attention gives other logits when its heads are divided",
    "prism_hadamard_qwen35": "mlx-lm's shard() cannot divide its rotated layers",
}

# Attributes of mlx-lm's modules. Each file has its own names.
_HEADS = ("n_heads", "num_heads", "num_attention_heads", "num_k_heads", "num_v_heads")
_KV_HEADS = ("n_kv_heads", "num_kv_heads", "num_key_value_heads")
_CUT_OUTPUTS = {
    AllToShardedLinear: nn.Linear,
    QuantizedAllToShardedLinear: nn.QuantizedLinear,
}
_CUT_INPUTS = {
    ShardedToAllLinear: nn.Linear,
    QuantizedShardedToAllLinear: nn.QuantizedLinear,
}


@dataclass(frozen=True)
class Division:
    """The division of a model's weights.

    Attributes:
        num_ranks: Ranks that share the model. If logits are divided, all parts are equally large.
        parts: This rank's parts of the linear layers, by path in the whole model.
        elsewhere: Paths of linear layers that are wholly on other ranks.
    """

    num_ranks: int = 1
    parts: Mapping[str, LinearPart] = field(default_factory=dict)
    elsewhere: frozenset[str] = frozenset()

    @classmethod
    def of(cls, model: nn.Module) -> Division:
        """Returns the division of any model."""
        found = getattr(model, "division", None)
        return found if isinstance(found, Division) else cls()


class Summed(nn.Module):  # type: ignore[misc]
    """Adds up a linear layer whose inputs are divided among the ranks.

    Args:
        linear: This rank's part. Only one rank's may have a bias.
    """

    def __init__(self, linear: nn.Module, group: mx.distributed.Group) -> None:
        super().__init__()
        self.linear = linear
        self.group = group

    def __call__(self, x: mx.array) -> mx.array:
        return mx.distributed.all_sum(self.linear(x), group=self.group)


def shard(model: nn.Module, config: Mapping[str, Any], group: mx.distributed.Group) -> None:
    """Keeps this rank's part of the weights; does not evaluate them.

    Args:
        model: An mlx-lm model. Its modules are changed in place.
        config: Its ``config.json``.

    Raises:
        UnsupportedModelError: mlx-lm has no `shard()` for the family, or its heads or widths
            cannot be divided among the ranks.
    """
    model_type, size = str(config.get("model_type", "")), group.size()
    if not hasattr(model, "shard"):
        raise UnsupportedModelError(
            model_type, f"mlx-lm has no shard() for it, so it cannot run on {size} ranks"
        )
    if (reason := REFUSED.get(module_of(config))) is not None:
        raise UnsupportedModelError(model_type, f"{reason}, so it cannot run on {size} ranks")
    try:
        numbered = NumberedOutputs(model)
        for module in model.modules():
            _divide_heads(module, size)
        model.shard(group)
    except (AssertionError, ValueError) as error:
        reason = f"it cannot be divided among {size} ranks: {error}"
        raise UnsupportedModelError(model_type, reason) from error
    model.division = Division(size, numbered.restore(model, group.rank()))
    _use_plain_layers(model, group)
    _drop_gradients(model)


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the linear layers of any model, by their paths in the whole model."""
    layers = {path: m for path, m in model.named_modules() if isinstance(m, LINEAR)}
    for path, module in model.named_modules():
        if isinstance(module, Summed):
            layers[path] = layers.pop(f"{path}.linear")
    return layers


def _divide_heads(module: nn.Module, size: int) -> None:
    """Checks the heads of an attention layer, and repeats those of keys and values if needed.

    mlx-lm divides them unchecked, and a count that is no multiple would give wrong answers.
    """
    for name in _HEADS:
        count = getattr(module, name, None)
        if isinstance(count, int) and count % size:
            raise ValueError(f"{type(module).__name__} has {count} heads")
    for name in _KV_HEADS:
        count = getattr(module, name, None)
        if not isinstance(count, int) or count % size == 0:
            continue
        if size % count or not _is_repeatable(module):
            raise ValueError(f"{type(module).__name__} has {count} heads of keys and values")
        for projection in (module.k_proj, module.v_proj):
            projection.update(tree_map(_repeated(count, size // count), projection.parameters()))
        setattr(module, name, size)


def _is_repeatable(module: nn.Module) -> bool:
    """True if keys and values have a projection each, and no norm that spans their heads."""
    norm = getattr(module, "k_norm", None)
    projections = (getattr(module, name, None) for name in ("k_proj", "v_proj"))
    return all(isinstance(p, nn.Module) for p in projections) and (
        norm is None or len(norm.weight) * 2 <= module.k_proj.weight.shape[0]
    )


def _repeated(num_heads: int, times: int) -> Callable[[mx.array], mx.array]:
    """Repeats each head of a projection's outputs; quantized weights are packed along inputs."""

    def repeat(weight: mx.array) -> mx.array:
        by_head = weight.reshape(num_heads, weight.shape[0] // num_heads, *weight.shape[1:])
        return mx.repeat(by_head, times, axis=0).reshape(-1, *weight.shape[1:])

    return repeat


def _use_plain_layers(model: nn.Module, group: mx.distributed.Group) -> None:
    summed = []
    for path, module in model.named_modules():
        if (plain := _CUT_OUTPUTS.get(type(module))) is not None:
            module.__class__ = plain
        elif (plain := _CUT_INPUTS.get(type(module))) is not None:
            module.__class__ = plain
            if group.rank() and "bias" in module:
                del module["bias"]  # One rank adds it.
            summed.append((path, Summed(module, group)))
    model.update_modules(tree_unflatten(summed))


def _drop_gradients(model: nn.Module) -> None:
    """Replaces `sum_gradients` in the model's files with the identity.

    It only affects gradients, but would add an operation to the graph of every step.
    """
    for module in {type(each).__module__ for each in model.modules()}:
        names = vars(sys.modules[module])
        if "sum_gradients" in names:
            names["sum_gradients"] = lambda group: _identity


def _identity(x: mx.array) -> mx.array:
    return x
