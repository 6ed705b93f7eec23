"""Replaces RoPE modules of mlx-lm whose frequencies differ from the config's.

Most modules of mlx-lm use plain RoPE, or ignore some fields of a scaling. `conform_rope` computes
frequencies like transformers (`modeling_rope_utils.py`) and replaces modules that differ, layer by
layer. So every family supports every type of scaling.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import rope_utils

from mlx_paged.errors import UnsupportedModelError

_SCALINGS = ("default", "linear", "llama3", "yarn", "longrope", "dynamic", "proportional")
_TOLERANCE = 1e-4  # of frequencies, which mlx-lm computes in float32


class ScaledRoPE(nn.Module):  # type: ignore[misc]
    """RoPE defined by its wavelengths.

    Args:
        dims: Rotated dims of a head; later ones stay.
        wavelengths: ``[dims / 2]``: positions per radian.
        scale: Scale of the rotated dims.
    """

    def __init__(self, dims: int, wavelengths: np.ndarray, scale: float, traditional: bool) -> None:
        super().__init__()
        self.dims = dims
        self.traditional = traditional
        self.scale = scale
        self._freqs = mx.array(wavelengths.astype(np.float32))

    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        return self._rotate(x, offset, self._freqs, self.scale)

    def _rotate(self, x: mx.array, offset: Any, wavelengths: mx.array, scale: float) -> mx.array:
        if scale != 1.0:
            x = x.at[..., : self.dims].multiply(scale)
        return mx.fast.rope(
            x,
            self.dims,
            traditional=self.traditional,
            base=None,
            scale=1.0,
            offset=offset,
            freqs=wavelengths,
        )


class LongRoPE(ScaledRoPE):
    """RoPE with one of two lists of wavelengths; `__call__` uses those of long contexts.

    Args:
        long: Wavelengths and scale of contexts beyond `original`.
        short: Those of contexts up to it.
        original: Tokens.
    """

    def __init__(
        self,
        dims: int,
        long: tuple[np.ndarray, float],
        short: tuple[np.ndarray, float],
        original: int,
        traditional: bool,
    ) -> None:
        super().__init__(dims, *long, traditional)
        self.original = original
        self._short_freqs = mx.array(short[0].astype(np.float32))
        self.short_scale = short[1]

    def rotate_short(self, x: mx.array, offset: Any = 0) -> mx.array:
        """Rotates like `__call__`, for contexts up to `original` tokens."""
        return self._rotate(x, offset, self._short_freqs, self.short_scale)


def conform_rope(model: nn.Module, config: Mapping[str, Any], *, part: float | None) -> list[str]:
    """Replaces the modules that differ from a normalized text config; returns their paths.

    Args:
        part: Rotated part of a head if the config gives none, for a model whose modules ignore the
            config; None for other models.

    Raises:
        UnsupportedModelError: The config has an unknown scaling.
    """
    given = config.get("rope_parameters")
    if not isinstance(given, Mapping) or "alpha" in given:
        return []  # Its module implements Hunyuan's own scaling.
    nested = any(isinstance(value, Mapping) for value in given.values())
    kinds = config.get("layer_types") or ()
    replaced = []
    layers = model.layers if hasattr(model, "layers") else model.model.layers
    found = [
        (index, layer, path, module)
        for index, layer in enumerate(layers)
        for path, module in layer.named_modules()
        if path and _rope_of(module) is not None
    ]
    for index, layer, path, module in found:
        current = _rope_of(module)
        assert current is not None
        parameters, layer_kind = given, kinds[index] if index < len(kinds) else None
        if nested:
            parameters = given.get(layer_kind)  # type: ignore[assignment]
        if not isinstance(parameters, Mapping) or "rope_theta" not in parameters:
            continue
        dims, wavelengths, scale, traditional = current
        if part is not None:
            own = config.get("swa_head_dim") if layer_kind == "sliding_attention" else None
            head_dim = own or config["head_dim"]
            dims = int(head_dim * parameters.get("partial_rotary_factor", part))
        kind = parameters.get("rope_type", "default")
        if kind not in _SCALINGS:
            raise UnsupportedModelError(
                str(config.get("model_type")),
                f"rope_type must be one of {', '.join(_SCALINGS)} but config.json says {kind!r}",
            )
        if kind == "dynamic":
            new: nn.Module = rope_utils.DynamicNTKScalingRoPE(
                dims,
                int(config.get("max_position_embeddings") or 2048),
                traditional,
                float(parameters["rope_theta"]),
                float(parameters["factor"]),
            )
            if _same_fields(module, new):
                continue
        else:
            truncate = given.get("truncate", True)
            original = int(parameters.get("original_max_position_embeddings") or 0)
            expected, factor = wavelengths_of(parameters, dims, config, truncate=truncate)
            if kind == "longrope" and (config.get("max_position_embeddings") or 0) > original:
                base = float(parameters["rope_theta"]) ** (np.arange(0, dims, 2) / dims)
                short = _longrope(parameters, base, config, is_short=True)
                new = LongRoPE(dims, (expected, factor), short, original, traditional)
            elif (
                dims == current[0] and _close(expected, wavelengths) and math.isclose(factor, scale)
            ):
                continue
            else:
                new = ScaledRoPE(dims, expected, factor, traditional)
        parent, name = _parent(layer, path)
        setattr(parent, name, new)
        replaced.append(f"layers.{index}.{path}")
    return replaced


def _parent(layer: nn.Module, path: str) -> tuple[Any, str]:
    *parents, name = path.split(".")
    found: Any = layer
    for part in parents:
        found = found[int(part)] if part.isdigit() else getattr(found, part)
    return found, name


def _close(a: np.ndarray, b: np.ndarray) -> bool:
    with np.errstate(divide="ignore"):
        return a.shape == b.shape and np.allclose(1 / a, 1 / b, rtol=_TOLERANCE, atol=0)


def _same_fields(module: nn.Module, new: nn.Module) -> bool:
    fields = ("dims", "base", "factor", "max_position_embeddings", "traditional")
    return type(module) is type(new) and all(
        getattr(module, name) == getattr(new, name) for name in fields
    )


def _rope_of(module: nn.Module) -> tuple[int, np.ndarray, float, bool] | None:
    """Rotated dims, wavelengths, scale, and layout of a RoPE module; None for other modules."""
    if type(module) is nn.RoPE:
        exponents = np.arange(0, module.dims, 2) / module.dims
        return module.dims, module.base**exponents / module.scale, 1.0, module.traditional
    if type(module) is rope_utils.DynamicNTKScalingRoPE:
        exponents = np.arange(0, module.dims, 2) / module.dims
        return module.dims, module.base**exponents, 1.0, module.traditional
    if type(module) is rope_utils.SuScaledRoPE:
        return module.dim, np.array(module._freqs, np.float64), module._scale, False
    if isinstance(
        module, (rope_utils.Llama3RoPE, rope_utils.YarnRoPE, rope_utils.ProportionalRoPE)
    ):
        scale = getattr(module, "mscale", 1.0)
        return module.dims, np.array(module._freqs, np.float64), scale, module.traditional
    # Families' own classes, each with one scaling.
    kind = type(module).__qualname__
    if kind == "DynamicNTKScalingRoPE":
        exponents = np.arange(0, module.dims, 2) / module.dims
        return module.dims, module.original_base**exponents / module.scale, 1.0, module.traditional
    if kind in ("DynamicNTKAlphaRoPE", "DeepseekV2YarnRotaryEmbedding"):
        wavelengths = np.array(module._freqs, np.float64)
        scale = getattr(module, "mscale", 1.0)
        return 2 * wavelengths.size, wavelengths, scale, kind.startswith("Deepseek")
    return None


def wavelengths_of(
    parameters: Mapping[str, Any], dims: int, config: Mapping[str, Any], *, truncate: bool = True
) -> tuple[np.ndarray, float]:
    """Returns the wavelengths ``[dims / 2]`` in float64, and the scale of the rotated dims."""
    base = float(parameters["rope_theta"])
    plain = base ** (np.arange(0, dims, 2) / dims)
    kind = parameters.get("rope_type", "default")
    if kind == "linear":
        return plain * parameters["factor"], 1.0
    if kind == "llama3":
        return _llama3(parameters, plain), 1.0
    if kind == "yarn":
        return _yarn(parameters, plain, base, dims, config, truncate)
    if kind == "longrope":
        return _longrope(parameters, plain, config)
    if kind == "proportional":
        num_rotated = int(parameters.get("partial_rotary_factor", 1.0) * dims // 2)
        found = np.full(dims // 2, np.inf)
        found[:num_rotated] = plain[:num_rotated] * parameters.get("factor", 1.0)
        return found, 1.0
    return plain, 1.0


def _llama3(parameters: Mapping[str, Any], plain: np.ndarray) -> np.ndarray:
    factor, length = parameters["factor"], parameters["original_max_position_embeddings"]
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    rotations = length / (2 * math.pi * plain)  # in the original context
    smooth = np.clip((rotations - low) / (high - low), 0, 1)
    return plain / ((1 - smooth) / factor + smooth)


def _yarn(
    parameters: Mapping[str, Any],
    plain: np.ndarray,
    base: float,
    dims: int,
    config: Mapping[str, Any],
    truncate: bool,
) -> tuple[np.ndarray, float]:
    length = parameters["original_max_position_embeddings"]
    factor = parameters.get("factor") or config["max_position_embeddings"] / length

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    scale = parameters.get("attention_factor")
    if scale is None:
        first, second = parameters.get("mscale"), parameters.get("mscale_all_dim")
        scale = magnitude(first) / magnitude(second) if first and second else magnitude(1.0)

    def dim_of(rotations: float) -> float:
        return dims * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = dim_of(parameters.get("beta_fast") or 32)
    high = dim_of(parameters.get("beta_slow") or 1)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    ramp = np.clip((np.arange(dims // 2) - low) / ((high - low) or 0.001), 0, 1)
    return 1 / (ramp / (factor * plain) + (1 - ramp) / plain), float(scale)


def _longrope(
    parameters: Mapping[str, Any],
    plain: np.ndarray,
    config: Mapping[str, Any],
    *,
    is_short: bool = False,
) -> tuple[np.ndarray, float]:
    """Returns wavelengths and scale for contexts beyond the original length, or for shorter ones.

    A model without longer contexts uses the latter.
    """
    length = parameters["original_max_position_embeddings"]
    longest = config.get("max_position_embeddings") or length
    factor = parameters.get("factor") or longest / length
    scale = parameters.get("attention_factor")
    kind = "short" if is_short or longest <= length else "long"
    if scale is None:
        # Phi-3.5-MoE has its own for each.
        scale = parameters.get(f"{kind}_mscale") or (
            1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(length))
        )
    return np.array(parameters[f"{kind}_factor"], np.float64) * plain, float(scale)
