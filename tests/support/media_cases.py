"""Cases of models with media: prompts, items and small configurations."""

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
from mlx_paged.multimodal.rope_positions import Grid, rope_positions
from support.reference import HEAD_DIM

V, IMG, VIDEO, SOUND, START = 200, 190, 191, 192, 188
HEADS, KV_HEADS = max(1, 64 // HEAD_DIM), max(1, 32 // HEAD_DIM)
TEXT = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": V,
    "rms_norm_eps": 1e-5,
}
# Keys (and latents) of widths that a GPU takes, too, where heads are of such a one.
LATENT_DIMS = {
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": max(16, HEAD_DIM - 16),
    "v_head_dim": HEAD_DIM,
    "kv_lora_rank": max(48, 2 * HEAD_DIM) - 16,
}


def sections(*of_16: int) -> list[int]:
    """How M-RoPE divides a head, from how it divides one of 16."""
    return [count * HEAD_DIM // 16 for count in of_16]


@dataclass
class Item:
    """A picture: its tokens, which of them are rows, and its arrays."""

    token_ids: list[int]
    arrays: dict[str, np.ndarray]
    kind: str = "image"
    rows: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    grid: tuple[int, int, int] | None = None  # after merging
    # mlx-vlm's `token_ids`, if its model expands the placeholders itself.
    short: list[int] | None = None

    def inputs(self) -> MediaInputs:
        ids = np.array(self.short or self.token_ids, dtype=np.int32)
        return MediaInputs(self.kind, self.arrays, ids, self.rows)  # type: ignore[arg-type]


@dataclass
class Prompt:
    """Tokens with items between them."""

    parts: list[list[int] | Item]

    @property
    def token_ids(self) -> list[int]:
        return [i for p in self.parts for i in (p.token_ids if isinstance(p, Item) else p)]

    @property
    def short_ids(self) -> list[int]:
        return [
            i for p in self.parts for i in ((p.short or p.token_ids) if isinstance(p, Item) else p)
        ]

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
    axes: dict[str, int] = field(default_factory=dict)
    # Arrays of a whole prompt, where they are not those of its pictures put together.
    join: Callable[[Prompt], dict[str, Any]] | None = None
    sound: Callable[[int], Item] | None = None
    most_pictures: int = 2
    only_pictures: bool = False  # prompts are one item each, and see each other as a whole
    sees_pictures: bool = False  # the positions of a picture see each other

    def prompt(self, *seeds: int) -> Prompt:
        """Text, a picture for each seed with text behind it."""
        if self.only_pictures:
            return Prompt([self.picture(seed) for seed in seeds])
        parts: list[Any] = [[5, 6, 7]]
        for seed in seeds:
            parts[-1].append(START)
            parts += [self.picture(seed), [189, *(20 + (seed * 7 + i) % 60 for i in range(9))]]
        return Prompt(parts)

    def sounds(self, *seeds: int, picture: int | None = None) -> Prompt:
        """Text, a sound for each seed with text behind it; and a picture before them."""
        assert self.sound is not None
        found = Prompt([[5, 6, 7]]) if picture is None else self.prompt(picture)
        for seed in seeds:
            found.parts += [self.sound(seed), [187, *(20 + (seed * 3 + i) % 60 for i in range(9))]]
        return found

    def whole(self, prompt: Prompt) -> tuple[mx.array, mx.array | None, dict[str, Any]]:
        """mlx-vlm's inputs: tokens, pixels, other arrays."""
        tokens = mx.array([prompt.short_ids])
        items = [item for _, item in prompt.items]
        if not items:
            return tokens, None, {}
        if self.join is not None:
            joined = self.join(prompt)
            return tokens, joined.pop("pixel_values", None), joined
        joined = {
            name: mx.array(
                np.concatenate(
                    [i.arrays[name] for i in items if name in i.arrays], self.axes.get(name, 0)
                )
            )
            for item in items
            for name in item.arrays
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


def patch_item(seed: int, *, patch: int = 14, kind: str = "image") -> Item:
    """Qwen's patches; another grid for every seed."""
    t, h, w = (1, 4 + 2 * (seed % 2), 8)
    pixels = np.random.default_rng(seed).standard_normal((t * h * w, 3 * 2 * patch * patch))
    names = ("pixel_values", "image_grid_thw")
    arrays = dict(zip(names, (pixels.astype(np.float32), np.array([[t, h, w]]))))
    num = t * h * w // 4
    return Item([IMG] * num, arrays, kind, np.arange(num, dtype=np.int32), (t, h // 2, w // 2))


def square_item(
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


def noise_of(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def vision_config(model_type: str, size: int = 28, **more: Any) -> dict[str, Any]:
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
