"""mlx-lm's own `load`, paged, turns checkpoints of transformers 5 as their config says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm import load as load_by_mlx_lm
from mlx_lm import utils as mlx_lm_utils
from support.models import embedded, save_tiny, tiny_config, tiny_model

from mlx_paged import drop_in
from mlx_paged.engine.loading import load

TOKENS = mx.array([[5, 9, 17, 3, 44, 21, 8, 60, 2, 7, 31, 12]])
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}


def checkpoint(path: Path, model_type: str, rope: dict[str, Any]) -> Path:
    """A model with random weights whose config has `rope_parameters` and no flat fields."""
    path.mkdir()
    config = {**tiny_config(model_type), "max_position_embeddings": 64, "rope_theta": 10000.0}
    save_tiny(path, config, tiny_model(config))
    embedded().tokenizer.save_pretrained(path)
    config = {name: value for name, value in config.items() if not name.startswith("rope_")}
    (path / "config.json").write_text(json.dumps({**config, "rope_parameters": rope}))
    return path


def logits(model: Any) -> np.ndarray:
    return np.array(model(TOKENS).astype(mx.float32))


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "seed_oss"])
@pytest.mark.parametrize("scaling", [{"rope_type": "default"}, YARN], ids=["plain", "yarn"])
def test_rope_parameters_are_read(model_type: str, scaling: dict[str, Any], tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "model", model_type, {"rope_theta": 77.0, **scaling})
    model, _ = load_by_mlx_lm(str(path))
    expected = logits(load(path).model)
    np.testing.assert_allclose(logits(model), expected, rtol=1e-4, atol=1e-4)


def test_a_class_of_the_caller_is_left_alone(tmp_path: Path) -> None:
    class Own(nn.Module):
        """Neither `model` nor `layers`, as mlx-lm's have them."""

        def __init__(self, args: Any) -> None:
            super().__init__()
            self.args = args

        def load_weights(self, weights: Any, **_: Any) -> Any:
            self.names = [name for name, _ in weights]
            return self

    class Args:
        @classmethod
        def from_dict(cls, config: dict[str, Any]) -> dict[str, Any]:
            return config

    path = checkpoint(tmp_path / "model", "llama", {"rope_theta": 77.0, "rope_type": "default"})
    model, _ = mlx_lm_utils.load_model(path, get_model_classes=lambda config: (Own, Args))
    assert isinstance(model, Own) and model.names and model.args["rope_theta"] == 77.0


def test_without_the_drop_in_mlx_lm_takes_its_own_base(tmp_path: Path) -> None:
    """So the test above tests something; a fixed mlx-lm makes the seam superfluous."""
    path = checkpoint(tmp_path / "model", "llama", {"rope_theta": 77.0, "rope_type": "default"})
    expected = logits(load(path).model)
    drop_in.unpatch()
    try:
        model, _ = load_by_mlx_lm(str(path))
    finally:
        drop_in.patch()
    assert np.abs(logits(model) - expected).max() > 0.1
