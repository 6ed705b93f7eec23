"""Warnings about options that make the CPU slow, or that have no effect."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_paged import ops

# Weights that `--cpu-activations int8` applies to.
_INT8_BITS, _INT8_GROUPS = (4, 8), (32, 64, 128)


def of_dtype(model: nn.Module, dtype: str) -> str | None:
    """Returns a warning about a dtype on the CPU; None if it is as fast as "auto".

    Args:
        model: The loaded model, before it is converted.
    """
    if dtype in ("float16", "bfloat16"):
        return (
            f"dtype {dtype!r} computes in 16 bits, which takes a CPU up to 25 times as long (twice "
            "with quantized weights); dtype 'auto' keeps the weights as they are, and computes in "
            "float32"
        )
    if dtype == "float32" and (bits := _quantized_bits(model)):
        return (
            f"dtype 'float32' dequantizes the weights of {bits} bits: they take {32 // bits} times "
            "the memory, and answers come up to 4 times slower; dtype 'auto' computes in float32 "
            "too, and keeps them"
        )
    if dtype == "float32" and _has_16_bits(model):
        return (
            "dtype 'float32' widens the weights of 16 bits: they take twice the memory and answers "
            "up to twice the time; dtype 'auto' computes in float32 too, and keeps them"
        )
    return None


def of_activations(model: nn.Module, activations: str) -> str | None:
    """Returns a warning if no weight of a loaded model can use `cpu_activations`."""
    if activations == "float32" or any(_applies(module, activations) for module in model.modules()):
        return None
    needed = {
        "int8": f"affine weights of 4 or 8 bits in groups of {_listed(_INT8_GROUPS)}",
        "bfloat16": "bfloat16 weights",
    }[activations]
    return (
        f"cpu_activations {activations!r} has no effect: it needs linear layers with {needed}, and "
        "this model, as it is loaded, has none"
    )


def _quantized_bits(model: nn.Module) -> int | None:
    """Returns the fewest bits of the weights that would stay quantized with dtype "auto"."""
    found = [
        int(module.bits)
        for module in model.modules()
        if isinstance(module, nn.QuantizedLinear)
        and ops.has_product(module.mode, module.bits, module.group_size)
    ]
    return min(found, default=None)


def _has_16_bits(model: nn.Module) -> bool:
    return any(
        isinstance(module, nn.Linear) and module.weight.dtype in (mx.float16, mx.bfloat16)
        for module in model.modules()
    )


def _applies(module: Any, activations: str) -> bool:
    if activations == "bfloat16":
        return isinstance(module, nn.Linear) and module.weight.dtype == mx.bfloat16
    return (
        isinstance(module, nn.QuantizedLinear)
        and module.mode == "affine"
        and module.bits in _INT8_BITS
        and module.group_size in _INT8_GROUPS
    )


def _listed(numbers: tuple[int, ...]) -> str:
    *first, last = map(str, numbers)
    return f"{', '.join(first)} or {last}"
