"""Our media processors make the pixels that transformers' image processors make, family by family.

`test_reference_vision.py` gives both models the pixels of our processors; here these are compared.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import numpy as np
import pytest
import transformers

pytest.importorskip("support.vlm", reason="mlx-vlm is not installed: make test installs it")

from PIL import Image
from support.media_checkpoints import PROCESSORS, write
from support.more_media_checkpoints import ALL_CHECKPOINTS
from support.more_reference_vision import _gemma4_patches, _minicpm_slices

from mlx_paged.multimodal import loading, mlx_vlm
from mlx_paged.multimodal.families import MEDIA_FAMILIES
from mlx_paged.multimodal.files import read_config
from mlx_paged.multimodal.processor import MediaModel

# Odd sides, one that is longer by far, one pixel, and sides that fit as they are.
SIZES = ((90, 61), (61, 133), (200, 41), (1, 1), (56, 56))
# Settings that a checkpoint leaves to mlx-vlm, and those that transformers' processor of text and
# pictures gives its image processor.
SETTINGS: dict[str, dict[str, Any]] = {
    "mistral3": {"patch_size": 2 * 14},  # (patches that are merged)
    "gemma4": {"max_soft_tokens": 70, "patch_size": 16, "pooling_kernel_size": 3},
    "internvl": {
        "size": {"height": 56, "width": 56},
        "crop_to_patches": True,
        "min_patches": 1,
        "max_patches": 4,
        "image_mean": [0.485, 0.456, 0.406],
        "image_std": [0.229, 0.224, 0.225],
    },
    "minicpmv4_6": {"max_slice_nums": 4, "scale_resolution": 56, "patch_size": 14},
}
#: Families by transformers' image processor. Of the others there, most need torchvision.
REFERENCES = {
    "aya_vision": "GotOcr2",
    "gemma3": "Gemma3",
    "gemma3n": "Siglip",
    "gemma4": "Gemma4",
    "glm4v": "Glm4v",
    "glm_ocr": "Glm46V",
    "granite4_vision": "LlavaNext",
    "idefics2": "Idefics2",
    "idefics3": "Idefics3",
    "internvl": "GotOcr2",
    "llava": "CLIP",
    "llava_next": "LlavaNext",
    "llava_onevision": "LlavaOnevision",
    "minicpmv4_6": "MiniCPMV4_6",
    "mistral3": "Pixtral",
    "paddleocr_vl": "PaddleOCRVL",
    "paligemma": "Siglip",
    "pixtral": "Pixtral",
    "qwen2_5_vl": "Qwen2VL",
    "qwen2_vl": "Qwen2VL",
    "qwen3_5": "Qwen2VL",
    "qwen3_omni_moe": "Qwen2VL",
    "qwen3_vl": "Qwen2VL",
    "smolvlm": "SmolVLM",
}
# Turns our arrays of a picture into transformers' where pixels have another layout.
JOINS: dict[str, Callable[[dict[str, list[Any]]], dict[str, np.ndarray]]] = {
    "gemma4": _gemma4_patches,
    "minicpmv4_6": _minicpm_slices,
}
_CHECKPOINTS = {**ALL_CHECKPOINTS, **PROCESSORS}


def picture(seed: int, width: int, height: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def media_of(name: str, path: Path) -> MediaModel:
    """A processor without a model."""
    write(path, _CHECKPOINTS[name](), weights=False)
    config = read_config(json.loads((path / "config.json").read_text()))
    mlx_vlm.import_mlx_vlm()
    importlib.import_module(f"mlx_vlm.models.{name}")
    vision = SimpleNamespace(spatial_merge_size=2)
    return MediaModel(
        loading._processor(path, name),
        SimpleNamespace(**{**config, "vision_config": vision}),
        MEDIA_FAMILIES[name],
    )


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", sorted(REFERENCES))
def test_pixels_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    media = media_of(name, tmp_path)
    settings = {
        field: value
        for field, value in _CHECKPOINTS[name]().processor.items()
        if not field.endswith(("_type", "_class"))
    } | SETTINGS.get(name, {})
    reference = getattr(transformers, f"{REFERENCES[name]}ImageProcessorPil")(**settings)
    for seed, size in enumerate(SIZES):
        image = picture(seed, *size)
        expected = np.concatenate(
            [np.array(part).reshape(-1) for part in reference(images=[image])["pixel_values"]]
        )
        [item] = media.process(media.placeholder("image"), images=[image]).inputs
        found: Any = item.arrays["pixel_values"]
        if name in JOINS:
            found = JOINS[name]({key: [value] for key, value in item.arrays.items()})
            found = found["pixel_values"]
        pixels = np.array(found).reshape(-1)
        assert pixels.shape == expected.shape, size
        np.testing.assert_allclose(pixels, expected, rtol=0, atol=1e-6, err_msg=str(size))
