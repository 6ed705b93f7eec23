"""Small random models of mlx-vlm, and prompts with pictures for them.

A case gives a prompt in two forms: as mlx-vlm's own `generate_step` takes it, and as tokens with
items for `PagedModel`. No file is read and no processor is needed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map_with_path

from mlx_paged.model.media import MediaInputs
from mlx_paged.model.rope_positions import Grid, rope_positions

V, IMG, VIDEO, START = 200, 190, 191, 188
TEXT = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": V,
    "rms_norm_eps": 1e-5,
}


@dataclass
class Item:
    """A picture: its tokens, which of them are rows, and its arrays."""

    token_ids: list[int]
    arrays: dict[str, np.ndarray]
    kind: str = "image"
    rows: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    grid: tuple[int, int, int] | None = None  # after merging

    def inputs(self) -> MediaInputs:
        ids = np.array(self.token_ids, dtype=np.int32)
        return MediaInputs(self.kind, self.arrays, ids, self.rows)  # type: ignore[arg-type]


@dataclass
class Prompt:
    """Tokens with items between them."""

    parts: list[list[int] | Item]

    @property
    def token_ids(self) -> list[int]:
        return [i for p in self.parts for i in (p.token_ids if isinstance(p, Item) else p)]

    @property
    def items(self) -> list[tuple[int, Item]]:
        """With their offsets."""
        found, offset = [], 0
        for part in self.parts:
            if isinstance(part, Item):
                found.append((offset, part))
            offset += len(part.token_ids) if isinstance(part, Item) else len(part)
        return found

    def rope(self) -> tuple[np.ndarray, int]:
        grids = [Grid(offset, *item.grid) for offset, item in self.items if item.grid]
        return rope_positions(len(self.token_ids), grids)


@dataclass
class Case:
    """A model, and how to make pictures and whole prompts for it."""

    model: nn.Module
    module: str
    picture: Callable[[int], Item]  # of a seed
    # Axis along which mlx-vlm takes several pictures, by the name of the array.
    axes: dict[str, int]

    def prompt(self, *seeds: int) -> Prompt:
        """Text, a picture for each seed with text behind it."""
        parts: list[Any] = [[5, 6, 7]]
        for seed in seeds:
            parts[-1].append(START)
            parts += [self.picture(seed), [189, *(20 + (seed * 7 + i) % 60 for i in range(9))]]
        return Prompt(parts)

    def whole(self, prompt: Prompt) -> tuple[mx.array, mx.array | None, dict[str, Any]]:
        """What mlx-vlm takes: tokens, pixels, other arrays."""
        tokens = mx.array([prompt.token_ids])
        items = [item for _, item in prompt.items]
        if not items:
            return tokens, None, {}
        joined = {
            name: mx.array(np.concatenate([i.arrays[name] for i in items], self.axes.get(name, 0)))
            for name in items[0].arrays
        }
        return tokens, joined.pop("pixel_values", None), joined


def vary(model: nn.Module, seed: int = 0) -> nn.Module:
    """Weights that make everything matter: nothing stays zero or one."""
    mx.random.seed(seed)

    def varied(path: str, weight: mx.array) -> mx.array:
        if not mx.issubdtype(weight.dtype, mx.floating):
            return weight
        weight = weight.astype(mx.float32)
        noise = mx.random.normal(weight.shape)
        if weight.ndim == 1 or "norm" in path:
            return weight + 0.1 * noise
        if (weight == weight.reshape(-1)[0]).all().item():
            return weight + 0.2 * noise
        return weight * 2 if "proj" in path else weight

    model.update(tree_map_with_path(varied, model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    return model


def package(name: str) -> Any:
    return importlib.import_module(f"mlx_vlm.models.{name}")


# --- Pictures -------------------------------------------------------------------------------------


def _patches(seed: int, *, patch: int = 14, kind: str = "image") -> Item:
    """Qwen's patches; another grid for every seed."""
    t, h, w = (1, 4 + 2 * (seed % 2), 8)
    pixels = np.random.default_rng(seed).standard_normal((t * h * w, 3 * 2 * patch * patch))
    names = ("pixel_values", "image_grid_thw")
    arrays = dict(zip(names, (pixels.astype(np.float32), np.array([[t, h, w]]))))
    num = t * h * w // 4
    return Item([IMG] * num, arrays, kind, np.arange(num, dtype=np.int32), (t, h // 2, w // 2))


def _square(
    seed: int,
    *,
    size: int,
    rows: int,
    tiles: bool = False,
    sizes: bool = False,
    between: list[int] | None = None,
    token: int = IMG,
) -> Item:
    pixels = np.random.default_rng(seed).standard_normal((1, 3, size, size)).astype(np.float32)
    arrays: dict[str, np.ndarray] = {"pixel_values": pixels[None] if tiles else pixels}
    if sizes:
        arrays["image_sizes"] = np.array([[size, size]])
    ids = [token] * rows
    if between:
        ids = [*ids[: rows // 2], *between, *ids[rows // 2 :]]
    return Item(ids, arrays, rows=np.flatnonzero(np.array(ids) == token).astype(np.int32))


def _vision(model_type: str, size: int = 28, **more: Any) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 2,
        "image_size": size,
        "patch_size": 14,
        "num_channels": 3,
        **more,
    }


# --- Families -------------------------------------------------------------------------------------


def _qwen2(name: str, vision: dict[str, Any]) -> Case:
    m = package(name)
    model = m.Model(
        m.ModelConfig(
            text_config=m.TextConfig(
                model_type=name, **TEXT, rope_scaling={"type": "mrope", "mrope_section": [2, 3, 3]}
            ),
            vision_config=m.VisionConfig(model_type=name, **vision),
            model_type=name,
            image_token_id=IMG,
            video_token_id=VIDEO,
            vision_start_token_id=START,
            vocab_size=V,
        )
    )
    return Case(model, name, _patches, {})


def qwen2_vl() -> Case:
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2}
    return _qwen2("qwen2_vl", {**vision, "image_size": 56, "patch_size": 14, "in_channels": 3})


def qwen2_5_vl() -> Case:
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2}
    more = {"out_hidden_size": 64, "image_size": 56, "patch_size": 14, "in_channels": 3}
    return _qwen2("qwen2_5_vl", {**vision, **more, "fullatt_block_indexes": [1], "window_size": 28})


_QWEN3_VISION = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 14,
    "in_channels": 3,
    "num_position_embeddings": 16,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}


def _qwen3(name: str, text: dict[str, Any], deepstack: list[int]) -> Case:
    m = package(name)
    model = m.Model(
        m.ModelConfig.from_dict(
            {
                "text_config": m.TextConfig.from_dict({**TEXT, "head_dim": 16, **text}),
                "vision_config": m.VisionConfig.from_dict(
                    {"model_type": name, **_QWEN3_VISION, "deepstack_visual_indexes": deepstack}
                ),
                "model_type": name,
                "image_token_id": IMG,
                "video_token_id": VIDEO,
                "image_token_index": IMG,
                "video_token_index": VIDEO,
                "vision_start_token_id": START,
                "vocab_size": V,
            }
        )
    )
    return Case(model, name, _patches, {})


_MROPE = {"rope_type": "mrope", "mrope_section": [2, 3, 3]}


def qwen3_vl() -> Case:
    text = {"model_type": "qwen3_vl_text", "rope_theta": 1e4, "max_position_embeddings": 1000}
    return _qwen3("qwen3_vl", {**text, "rope_scaling": _MROPE}, [0, 1])


def qwen3_vl_moe() -> Case:
    text = {"model_type": "qwen3_vl_moe_text", "rope_theta": 1e4, "max_position_embeddings": 1000}
    return _qwen3("qwen3_vl_moe", {**text, **_EXPERTS, "rope_scaling": _MROPE}, [0, 1])


_DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "max_position_embeddings": 1000,
    "rope_parameters": {
        "type": "default",
        "mrope_section": [1, 1, 0],
        "rope_theta": 10000,
        "partial_rotary_factor": 0.25,
    },
}


def qwen3_5() -> Case:
    return _qwen3("qwen3_5", {"model_type": "qwen3_5_text", **_DELTA}, [])


def qwen3_5_moe() -> Case:
    more = {"shared_expert_intermediate_size": 32, **_EXPERTS}
    return _qwen3("qwen3_5_moe", {"model_type": "qwen3_5_moe_text", **_DELTA, **more}, [])


def gemma3() -> Case:
    m = package("gemma3")
    model = m.Model(
        m.ModelConfig(
            text_config=m.TextConfig(
                model_type="gemma3",
                **TEXT,
                head_dim=16,
                mm_tokens_per_image=16,
                sliding_window=16,
                sliding_window_pattern=2,
            ),
            vision_config=m.VisionConfig(**_vision("gemma3", 112)),
            model_type="gemma3",
            hidden_size=64,
            pad_token_id=0,
            image_token_index=IMG,
            vocab_size=V,
        )
    )
    return Case(model, "gemma3", lambda seed: _square(seed, size=112, rows=16), {})


def llava() -> Case:
    m = package("llava")
    model = m.Model(
        m.ModelConfig(
            text_config=m.TextConfig(model_type="llama", **TEXT),
            vision_config=m.VisionConfig(**_vision("clip_vision_model", 56)),
            model_type="llava",
            image_token_index=IMG,
            vocab_size=V,
            vision_feature_layer=-1,
        )
    )
    return Case(model, "llava", lambda seed: _square(seed, size=56, rows=16), {})


def _idefics(name: str) -> Case:
    m = package(name)
    model = m.Model(
        m.ModelConfig(
            text_config=m.TextConfig(model_type=name, **TEXT),
            vision_config=m.VisionConfig(
                **_vision("smolvlm_vision" if name == "smolvlm" else name, 112)
            ),
            model_type=name,
            image_token_id=IMG,
            scale_factor=2,
        )
    )
    return Case(
        model,
        name,
        # (Text between the rows, as where a picture is split into tiles.)
        lambda seed: _square(seed, size=112, rows=16, tiles=True, between=[151, 152]),
        {"pixel_values": 1},
    )


def idefics3() -> Case:
    return _idefics("idefics3")


def smolvlm() -> Case:
    return _idefics("smolvlm")


CASES: dict[str, Callable[[], Case]] = {
    make.__name__: make
    for make in (
        qwen2_vl,
        qwen2_5_vl,
        qwen3_vl,
        qwen3_vl_moe,
        qwen3_5,
        qwen3_5_moe,
        gemma3,
        llava,
        idefics3,
        smolvlm,
    )
}
