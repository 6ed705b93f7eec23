"""Deviations of mlx-vlm from the code that models were published with, and their corrections.

Each correction changes the modules of one model after its weights are loaded. The reference is
transformers, with which `tests/multimodal/test_reference_vision.py` compares. `DEVIATIONS` lists
the findings with versions, so that newer ones can be compared again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_paged.model.overrides import overridden
from mlx_paged.multimodal import deepseek_vl

#: The versions in which the deviations were found.
VERSIONS = {"mlx-vlm": "0.7.10", "transformers": "5.24.0"}


class Deviation(NamedTuple):
    """A difference between mlx-vlm and the reference.

    Attributes:
        packages: Packages of mlx-vlm that have it.
        what: Behavior of mlx-vlm, and of the reference.
    """

    packages: tuple[str, ...]
    what: str


#: All deviations, which this module, `families` and `files` correct.
DEVIATIONS = (
    Deviation(
        ("idefics2",),
        "numbers patch positions from -1 instead of 0, with other borders of buckets",
    ),
    Deviation(
        ("idefics2", "llava", "llava_next", "llava_onevision", "pixtral", "mistral3"),
        "ignores hidden_act in the tower's MLP",
    ),
    Deviation(
        ("idefics2",),
        "uses the text model's epsilon in the resampler, and MLX's default in the tower's "
        "last norm",
    ),
    Deviation(
        ("internvl", "qwen3_vl_moe"),
        "uses approximate instead of exact activations in the projector or the merger",
    ),
    Deviation(
        ("llama4",),
        "uses approximate instead of exact activations in the tower and its adapter",
    ),
    Deviation(
        ("granite4_vision", "kimi_k25", "kimi_vl"),
        "uses another GELU than hidden_act in the tower",
    ),
    Deviation(
        ("kimi_k25", "kimi_vl"),
        "uses a norm epsilon of 1e-6 instead of 1e-5 in the tower, and interpolates positions "
        "with zeros instead of the nearest values at the borders",
    ),
    Deviation(
        ("nemotron_h_nano_omni",),
        "allows time steps below time_step_min",
    ),
    Deviation(
        ("muse_glimmer",),
        "spreads the tower's positions over the patch grid; in the reference its sides are "
        "exchanged",
    ),
    Deviation(
        ("gemma3",),
        "scales image features by the roots of two widths, one a default; in the reference "
        "they cancel out",
    ),
    Deviation(
        ("glm4v", "glm4v_moe"),
        "interpolates the tower's positions linearly with zeros at the borders, instead of "
        "with cubic splines and the nearest values",
    ),
    Deviation(
        ("aya_vision",),
        "skips the norm after the tower's last layer for cohere2_vision",
    ),
    Deviation(
        ("llava_next",),
        "concatenates the tiles of an image; the reference arranges them, without padding and "
        "with line ends",
    ),
    Deviation(
        ("gemma3", "paligemma"),
        "uses a causal mask in generation, although an image's rows, or a whole prompt, see "
        "each other",
    ),
    Deviation(
        ("gemma3n",),
        "scales embeddings in decodes only; the reference in prompts, too",
    ),
    Deviation(
        ("qwen2_5_vl", "qwen3_omni_moe"),
        "ignores the seconds between a video's frames",
    ),
)


def correct(package: str, vlm: nn.Module, config: Mapping[str, Any]) -> None:
    """Changes a model's modules so that it computes the same as the reference.

    Args:
        package: Package of mlx-vlm.
        config: Config of the checkpoint, with transformers' defaults.
    """
    _set_tower(vlm, config.get("vision_config"))
    change = _CORRECTIONS.get(package)
    if change is not None:
        change(vlm, config)


# --- Activations ----------------------------------------------------------------------------------

_ACTIVATIONS: dict[str, Callable[[mx.array], mx.array]] = {
    "gelu": nn.gelu,
    "gelu_pytorch_tanh": nn.gelu_approx,
    "gelu_new": nn.gelu_approx,
    "gelu_fast": nn.gelu_approx,
    "quick_gelu": nn.gelu_fast_approx,
    "silu": nn.silu,
    "swish": nn.silu,
    "relu": nn.relu,
}
_MLPS = ("GELUMLP", "FastGELUMLP", "TanhGELUMLP")


def _set_tower(vlm: nn.Module, vision: Any) -> None:
    """Gives a tower the activation and the last norm's epsilon of its config."""
    name = vision.get("hidden_act") if isinstance(vision, Mapping) else None
    activation = _ACTIVATIONS.get(name or "")
    if activation is None:
        return
    for module in _tower_modules(vlm):
        if "post_layernorm" in module and "layer_norm_eps" in vision:
            module.post_layernorm.eps = vision["layer_norm_eps"]
        if type(module).__name__ in _MLPS and type(module).__module__ == "mlx_vlm.models.mlp":
            field = "act" if "act" in module else "activation_fn"
            module[field] = _Activation(activation)
        elif type(module).__module__ == "mlx_vlm.models.pixtral.vision" and "gate_proj" in module:
            _gate(module, activation)


def _tower_modules(vlm: nn.Module) -> Iterator[nn.Module]:
    for name in ("vision_tower", "vision_model"):
        tower = getattr(vlm, name, None)
        if isinstance(tower, nn.Module):
            yield from tower.modules()


class _Activation(nn.Module):  # type: ignore[misc]
    def __init__(self, function: Callable[[mx.array], mx.array]) -> None:
        super().__init__()
        self._function = function

    def __call__(self, x: mx.array) -> mx.array:
        return self._function(x)


def _gate(mlp: nn.Module, activation: Callable[[mx.array], mx.array]) -> None:
    def call(self: Any, x: mx.array) -> mx.array:
        return self.down_proj(activation(self.gate_proj(x)) * self.up_proj(x))

    mlp.__class__ = overridden(type(mlp), "__call__", call)


# --- Idefics2 -------------------------------------------------------------------------------------


def _idefics2(vlm: Any, config: Mapping[str, Any]) -> None:
    embeddings = vlm.vision_model.embeddings
    embeddings.__class__ = overridden(type(embeddings), "__call__", _idefics2_embeddings)
    eps = config["perceiver_config"].get("rms_norm_eps", 1e-6)
    for module in vlm.connector.modules():
        if isinstance(module, nn.RMSNorm):
            module.eps = eps


def _idefics2_embeddings(self: Any, x: mx.array, mask: mx.array | None = None) -> mx.array:
    """Returns patches with their positions, from ``[batch, height, width, 3]`` pixels."""
    found = mx.flatten(self.patch_embedding(x), start_axis=1, end_axis=2)
    batch, height, width = x.shape[0], x.shape[1] // self.patch_size, x.shape[2] // self.patch_size
    masks = np.ones((batch, height, width), bool) if mask is None else np.array(mask)
    side = self.num_patches
    bounds = np.arange(1 / side, 1.0, 1 / side).astype(np.float32)

    def buckets(count: int, length: int) -> np.ndarray:
        step = np.float32(1) / np.float32(max(1, count))
        places = np.minimum(np.arange(length, dtype=np.float32) * step, np.float32(1 - 1e-6))
        return np.digitize(places, bounds, right=False)

    rows = [
        buckets(each[:, 0].sum(), height)[:, None] * side + buckets(each[0].sum(), width)
        for each in masks
    ]
    positions = np.where(masks, np.stack(rows), 0).reshape(batch, -1)
    return found + self.position_embedding(mx.array(positions.astype(np.int32)))


# --- GLM 4V ---------------------------------------------------------------------------------------

_CUBIC = -0.75  # PyTorch's coefficient


def _glm4v(vlm: Any, config: Mapping[str, Any]) -> None:
    embeddings = vlm.vision_tower.embeddings
    embeddings.__class__ = overridden(type(embeddings), "__call__", _glm4v_embeddings)


def _glm4v_embeddings(
    self: Any,
    embeddings: mx.array,
    lengths: Any,
    image_shapes: Any,
    h_coords: mx.array,
    w_coords: mx.array,
) -> mx.array:
    """Adds positions to patches, spread over each image."""
    table = self.position_embedding.weight
    side = round(table.shape[0] ** 0.5)
    counts, shapes = np.array(lengths).reshape(-1), np.array(image_shapes).reshape(-1, 3)
    heights, widths = (np.repeat(shapes[:, axis], counts) for axis in (1, 2))
    indices, weights = [], []
    for coordinates, sizes in ((h_coords, heights), (w_coords, widths)):
        at = (np.array(coordinates, dtype=np.float64) + 0.5) / sizes * side - 0.5
        first = np.floor(at)
        near = first[:, None] + np.arange(-1, 3)
        weights.append(_cubic(np.abs(at[:, None] - near)))
        indices.append(np.clip(near, 0, side - 1).astype(np.int64))
    index = indices[0][:, :, None] * side + indices[1][:, None, :]
    weight = weights[0][:, :, None] * weights[1][:, None, :]
    rows = table[mx.array(index.reshape(len(index), 16).astype(np.int32))].astype(mx.float32)
    found = mx.array(weight.reshape(len(index), 1, 16).astype(np.float32)) @ rows
    return embeddings + found[:, 0].astype(table.dtype)


def _cubic(distance: np.ndarray) -> np.ndarray:
    """Weights of the cubic convolution kernel, for distances up to 2."""
    near = ((_CUBIC + 2) * distance - (_CUBIC + 3)) * distance**2 + 1
    far = ((_CUBIC * distance - 5 * _CUBIC) * distance + 8 * _CUBIC) * distance - 4 * _CUBIC
    return np.where(distance <= 1, near, np.where(distance < 2, far, 0.0))


# --- Others ---------------------------------------------------------------------------------------


def _cohere2_vision(vlm: Any, config: Mapping[str, Any]) -> None:
    """mlx-vlm runs it as Aya Vision, which takes a layer's output before the last norm."""
    if config.get("model_type") != "cohere2_vision":
        return
    tower = vlm.vision_tower
    base = type(tower)

    def call(self: Any, *args: Any, **options: Any) -> Any:
        last, embeddings, states = base.__call__(self, *args, **options)
        return last, embeddings, (*states[:-1], last)

    tower.__class__ = overridden(base, "__call__", call)


def _deepseek_vl(vlm: Any, config: Mapping[str, Any]) -> None:
    """DeepSeek-VL runs as LLaVA, which takes a layer's output before the encoder's last norm."""
    if config.get("published_type") not in deepseek_vl.TYPES:
        return
    tower = vlm.vision_tower
    base = type(tower)

    def call(self: Any, *args: Any, **options: Any) -> Any:
        pooled, last, states = base.__call__(self, *args, **options)
        normed = self.vision_model.post_layernorm(last)
        return pooled, normed, (*states[:-1], normed)

    tower.__class__ = overridden(base, "__call__", call)


def _internvl(vlm: Any, config: Mapping[str, Any]) -> None:
    name = config.get("projector_hidden_act", "gelu")
    vlm.multi_modal_projector.activation = _Activation(_ACTIVATIONS[name])


def _qwen3_vl_moe(vlm: Any, config: Mapping[str, Any]) -> None:
    name = config["vision_config"].get("hidden_act", "gelu_pytorch_tanh")
    for module in vlm.vision_tower.modules():
        if "act_fn" in module:
            is_merger = type(module).__name__ == "PatchMerger"
            module.act_fn = _Activation(nn.gelu if is_merger else _ACTIVATIONS[name])


def _granite4_vision(vlm: Any, config: Mapping[str, Any]) -> None:
    name = config["vision_config"].get("hidden_act", "gelu_pytorch_tanh")
    for module in vlm.vision_tower.modules():
        if "activation_fn" in module:
            module.activation_fn = _Activation(_ACTIVATIONS[name])


def _moonvit(vlm: Any, config: Mapping[str, Any]) -> None:
    """Kimi's tower, of VL and of K2.5."""
    for module in vlm.vision_tower.modules():
        if "activation_fn" in module:
            module.activation_fn = _Activation(nn.gelu_approx)
        elif isinstance(module, nn.LayerNorm):
            module.eps = 1e-5
        elif type(module).__name__ == "Learnable2DInterpPosEmb":
            module.__class__ = overridden(type(module), "__call__", _moonvit_positions)


def _moonvit_positions(
    self: Any, x: mx.array, grids: mx.array, grid_shapes: Any = None
) -> mx.array:
    """Adds positions to patches, spread over each image."""
    found = []
    for height, width in np.array(grids if grid_shapes is None else grid_shapes)[:, -2:].tolist():
        rows, columns = (
            mx.array(_cubic_matrix(size, count))
            for size, count in zip(self.weight.shape[:2], (height, width))
        )
        spread = rows @ self.weight.astype(mx.float32).flatten(1)
        spread = columns @ mx.unflatten(spread, 1, self.weight.shape[1:])
        found.append(spread.flatten(0, 1))
    return x + mx.concatenate(found).astype(x.dtype)


def _cubic_matrix(size: int, count: int) -> np.ndarray:
    """``[count, size]``: cubic interpolation of an axis, over the nearest values at its ends."""
    at = (np.arange(count) + 0.5) / count * size - 0.5
    near = np.floor(at)[:, None] + np.arange(-1, 3)
    weights = _cubic(np.abs(at[:, None] - near))
    matrix = np.zeros((count, size), dtype=np.float32)
    places = np.clip(near, 0, size - 1).astype(np.int64)
    np.add.at(matrix, (np.arange(count)[:, None], places), weights)
    return matrix


def _llama4(vlm: Any, config: Mapping[str, Any]) -> None:
    for module in vlm.vision_model.modules():
        if "activation_fn" in module:
            module.activation_fn = _Activation(nn.gelu)


def _nemotron_omni(vlm: Any, config: Mapping[str, Any]) -> None:
    min_step = config.get("text_config", config.get("llm_config", {})).get("time_step_min")
    for layer in vlm.language_model.layers:
        if min_step is not None and hasattr(layer.mixer, "time_step_limit"):
            layer.mixer.time_step_limit = (float(min_step), float("inf"))


def _muse_glimmer(vlm: Any, config: Mapping[str, Any]) -> None:
    embedder = vlm.vision_tower.patch_embedder
    base = type(embedder)

    def positions(self: Any, grid: Any) -> mx.array:
        """The reference's patches have the positions of a grid with its sides exchanged."""
        return base._position_embeddings(self, [(t, width, height) for t, height, width in grid])

    embedder.__class__ = overridden(base, "_position_embeddings", positions)


_CORRECTIONS: dict[str, Callable[[Any, Mapping[str, Any]], None]] = {
    "idefics2": _idefics2,
    "aya_vision": _cohere2_vision,
    "internvl": _internvl,
    "llava": _deepseek_vl,
    "granite4_vision": _granite4_vision,
    "kimi_k25": _moonvit,
    "kimi_vl": _moonvit,
    "llama4": _llama4,
    "muse_glimmer": _muse_glimmer,
    "nemotron_h_nano_omni": _nemotron_omni,
    "qwen3_vl_moe": _qwen3_vl_moe,
    "glm4v": _glm4v,
    "glm4v_moe": _glm4v,
}
