"""Checkpoints that transformers saves give transformers' logits, family by family.

mlx-lm's dense cache is the oracle of `test_parity_families.py`; it cannot show where mlx-lm itself
deviates from the code that a model was published with. Here the reference is transformers.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.models import embedded
from support.oracle_torch import MISSING
from support.reference_configs import LONGROPE, REFERENCES, TEXT_OF_MULTIMODAL, scaled_references
from support.reference_models import TOLERANCE, differences, reference_logits, save

# isort: split
from mlx_lm.utils import MODEL_REMAPPING

from mlx_paged import LLM, SamplingParams
from mlx_paged.engine.loading import load
from mlx_paged.errors import UnsupportedModelError
from mlx_paged.model.families import PROVEN
from mlx_paged.model.families import REFUSED as MODULE_REFUSED

pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
SCALED = scaled_references()
# Families whose weights have other names in transformers' modules than in published files.
RENAMED = (
    "afmoe", "bailing_hybrid", "deepseek_v3", "ernie4_5_moe", "exaone", "gpt_neox", "granitemoe",
    "granitemoehybrid", "jamba", "kimi_linear", "laguna", "longcat_flash", "mimo_v2_flash",
    "minimax_m2", "mixtral", "nemotron_h", "olmo_hybrid", "olmoe", "phimoe", "qwen2_moe",
    "qwen3_5_moe_text", "qwen3_moe", "qwen3_next", "solar_open",
)  # fmt: skip
REFUSED = {
    "minimax": "layer_types",  # (MiniMax-01; mlx-lm's module of that name is MiniMax-M2)
    "olmo": "fails on prompts",
}


@pytest.mark.one_in(12)
@pytest.mark.parametrize("name", sorted(REFERENCES.keys() - REFUSED.keys()))
def test_logits_are_those_of_transformers(name: str, tmp_path: Path, record_property: Any) -> None:
    found = differences(REFERENCES[name], tmp_path)
    record_property("difference", max(found))
    # Each by itself: `max` may step over a NaN.
    assert all(difference < TOLERANCE for difference in found), found


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", RENAMED)
def test_weights_under_the_names_of_transformers_own_modules(name: str, tmp_path: Path) -> None:
    """``save_original_format=False``: experts of a layer in one array, and other names."""
    found = differences(REFERENCES[name], tmp_path, original=False)
    assert all(difference < TOLERANCE for difference in found), found


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", sorted(SCALED))
def test_every_type_of_rope_scaling(name: str, tmp_path: Path) -> None:
    found = differences(SCALED[name], tmp_path)
    assert all(difference < TOLERANCE for difference in found), found


@pytest.mark.parametrize("max_model_len", [64, 65])
def test_longrope_by_the_longest_context_of_an_engine(max_model_len: int, tmp_path: Path) -> None:
    """Up to the original length by the factors of short contexts, as transformers does."""
    rope = {**LONGROPE, "original_max_position_embeddings": 64}
    config = {"rope_parameters": rope, "original_max_position_embeddings": 64}
    model = save(replace(REFERENCES["phi3"], config=config), tmp_path)
    embedded().tokenizer.save_pretrained(tmp_path)
    tokens = np.random.default_rng(0).integers(3, 90, 40).tolist()
    expected = reference_logits(model, tokens)[-1].astype(np.float64)
    expected -= np.logaddexp.reduce(expected)
    llm = LLM(load(tmp_path, dtype="float32"), max_model_len=max_model_len, block_size=8)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=4)
    [output] = llm.generate([tokens], params)
    assert output.outputs[0].logprobs is not None
    [found] = output.outputs[0].logprobs
    difference = max(abs(expected[token] - each.logprob) for token, each in found.items())
    assert (difference < 1e-4) == (max_model_len == 64)


@pytest.mark.parametrize("name", sorted(TEXT_OF_MULTIMODAL))
def test_text_models_of_multimodal_checkpoints(name: str, tmp_path: Path) -> None:
    found = differences(TEXT_OF_MULTIMODAL[name], tmp_path)
    assert all(difference < TOLERANCE for difference in found), found


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_mlx_lm_cannot_run_is_refused_by_name(name: str, tmp_path: Path) -> None:
    save(REFERENCES[name], tmp_path)
    embedded().tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=f"'{name}'.*{REFUSED[name]}"):
        load(tmp_path)


def test_every_text_family_of_transformers_is_compared() -> None:
    """Modules of mlx-lm without one have no code in transformers, or a multimodal model only."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    compared = {reference.model_type.removesuffix("_text") for reference in REFERENCES.values()}
    types = {*PROVEN, *MODULE_REFUSED, *MODEL_REMAPPING} & set(CONFIG_MAPPING)
    text = {name for name in types if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    # (iquestcoder is a Llama, and gemma4_unified has a tower and gemma4's text model.)
    others = {"gemma4_unified", "iquestcoder"}
    assert {name.removesuffix("_text") for name in text} - compared == others
