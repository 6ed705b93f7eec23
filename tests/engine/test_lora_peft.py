"""Adapters that PEFT saves, against PEFT's own forward on transformers' models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import numpy as np
import pytest
from support.models import embedded
from support.oracle_torch import MISSING, oracle_torch
from support.parity import Driver, relative_rms
from support.reference_configs import REFERENCES
from support.reference_models import (
    CHUNKS,
    TOLERANCE,
    differences_by_chunk,
    reference_logits,
    save,
)

from mlx_paged.engine.loading import load
from mlx_paged.engine.lora.files import read_adapter
from mlx_paged.model.wrap import build_paged_model

pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

PARAMETERS = ["experts.gate_up_proj", "experts.up_proj", "experts.down_proj"]
FAMILIES = [
    "afmoe", "bailing_hybrid", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1",
    "ernie4_5_moe", "exaone_moe", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gpt_oss",
    "granitemoe", "granitemoehybrid", "jamba", "kimi_linear", "laguna", "lfm2_moe", "llama4_text",
    "mellum", "mimo_v2_flash", "minimax_m2", "mixtral", "nemotron_h", "olmoe", "phimoe",
    "qwen2_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next", "solar_open",
]  # fmt: skip
ATTENTION = ["q_proj", "v_proj"]


def differences(family: str, path: Path, **config: Any) -> list[float]:
    """Returns the relative error of the logits after each step, with PEFT as the reference."""
    peft = pytest.importorskip("peft", reason="peft is not installed: make test ORACLE=ON")
    model = save(REFERENCES[family], path)
    embedded().tokenizer.save_pretrained(path)
    oracle_torch().manual_seed(1)
    options = {"r": 4, "lora_alpha": 8, "target_modules": ATTENTION, **config}
    adapted = peft.get_peft_model(model, peft.LoraConfig(init_lora_weights=False, **options))
    adapted.eval().save_pretrained(path / "adapter")
    tokens = np.random.default_rng(0).integers(3, 90, sum(CHUNKS)).tolist()
    with adapted.disable_adapter():
        plain = reference_logits(adapted, tokens)
    expected = reference_logits(adapted, tokens)
    assert relative_rms(plain[-1], expected[-1]) > 100 * TOLERANCE
    loaded = load(path, dtype="float32")
    paged = build_paged_model(loaded.model, loaded.config, block_size=8)
    adapter = read_adapter("x", path / "adapter", paged.adapter_targets())
    paged.enable_adapters(1, 8)
    paged.load_adapter(1, adapter.layers)
    driver = Driver(paged)
    driver.adapter_slot = 1
    return differences_by_chunk(driver, tokens, expected)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_of_experts(family: str, tmp_path: Path) -> None:
    found = differences(family, tmp_path, target_parameters=PARAMETERS, target_modules=[])
    assert all(difference < TOLERANCE for difference in found), found


@pytest.mark.parametrize("parameters", [PARAMETERS[:1], PARAMETERS[2:]], ids=["up", "down"])
@pytest.mark.parametrize("family", ["gpt_oss", "olmoe"])
def test_one_of_the_parameters(family: str, parameters: list[str], tmp_path: Path) -> None:
    found = differences(family, tmp_path, target_parameters=parameters)
    assert all(difference < TOLERANCE for difference in found), found


def test_ranks_and_scales_of_single_layers(tmp_path: Path) -> None:
    found = differences(
        "qwen3",
        tmp_path,
        target_modules=["q_proj", "o_proj", "up_proj"],
        rank_pattern={"up_proj": 6},
        alpha_pattern={r"layers\.0\.self_attn\.q_proj": 3},
        use_rslora=True,
    )
    assert all(difference < TOLERANCE for difference in found), found
