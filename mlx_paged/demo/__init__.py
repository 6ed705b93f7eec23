"""The embedded default model, a small Llama that writes Python functions, and prompts for it."""

from __future__ import annotations

from pathlib import Path


def model_path() -> Path:
    """Returns the directory of the embedded model, ready for `mlx_lm.load`."""
    return Path(__file__).parent / "model"


def vision_model_path() -> Path:
    """Returns the directory of the embedded vision model, for `mlx_paged.LLM` or `mlx_vlm.load`."""
    return Path(__file__).parent / "vision_model"
