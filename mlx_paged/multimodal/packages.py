"""Finds mlx-vlm's package for a config, which tells a multimodal model from a text model.

It is consulted for every model, so this module imports nothing else of the package.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Config names with a different package name, as in mlx-vlm's own table.
_PACKAGES = {
    "deepseek_vl_hybrid": "multi_modality",
    "llava_qwen2": "fastvlm",
    "granite4-vision": "granite4_vision",
    "lfm2-vl": "lfm2_vl",
    "llava-qwen2": "llava_bunny",
    "bunny-llama": "llava_bunny",
    "cohere2_vision": "aya_vision",
    "falcon-perception": "falcon_perception",
    "granite-vision": "granite_vision",
    "inkling_mm_model": "inkling",
    "jvlm": "jina_vlm",
    "moondream1": "moondream2",
    "muse_spark_open": "muse_spark",
    "nemotron_h_omni": "nemotron_h_nano_omni",
    "nemotronh_nano_omni_reasoning_v3": "nemotron_h_nano_omni",
    "phi4-siglip": "phi4_siglip",
    "rf-detr": "rfdetr",
    "sam3.1_video": "sam3_1",
    "sam3_video": "sam3",
    "unlimited-ocr": "unlimited_ocr",
}
# Keys in the config of a multimodal model.
_SECTIONS = ("vision_config", "audio_config")
# Multimodal families whose configs have no section for an encoder.
_WITHOUT_SECTIONS = frozenset(
    ("fastvlm", "llava_bunny", "minicpmo", "molmo", "phi3_v", "phi4mm", "qwen3_omni_moe")
)


def package_of(config: Mapping[str, Any]) -> str | None:
    """mlx-vlm's package for a multimodal ``config.json``; None: it describes a text model."""
    name = str(config.get("model_type", "")).lower()
    name = _PACKAGES.get(name, name)
    vision = config.get("vision_config")
    if name == "llava" and isinstance(vision, Mapping) and vision.get("model_type") == "pixtral":
        name = "pixtral"  # transformers' name
    if _is_llava(config):
        name = "llava"
    if any(config.get(section) for section in _SECTIONS) or name in _WITHOUT_SECTIONS:
        return name
    return None


def _is_llava(config: Mapping[str, Any]) -> bool:
    """True for a DeepSeek-VL that has one encoder and generates text only (see `deepseek_vl`)."""
    if config.get("model_type") == "deepseek_vl":
        return True
    vision = config.get("vision_config") or {}
    hybrid = vision.get("cls") == "HybridVisionTower" or "high_res_cfg" in vision.get("params", {})
    return (
        config.get("model_type") == "multi_modality"
        and not hybrid
        and "gen_vision_config" not in config  # Janus
    )
