"""Spellings of one config: transformers 4, transformers 5, and fields that either leaves out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.models import dense_logits, save_tiny, tiny_config

# isort: split
from mlx_paged.engine.loading import load
from mlx_paged.model.config_normalization import normalize

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "factor": 4.0}


def old_and_new(
    model_type: str, scaling: dict[str, Any] | None, **fields: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """One config as transformers 4 and 5 write it."""
    old = {**tiny_config(model_type, **fields), "rope_theta": 7e5, "rope_scaling": scaling}
    new = {name: value for name, value in old.items() if name not in ("rope_theta", "rope_scaling")}
    new["rope_parameters"] = {**(scaling or {"rope_type": "default"}), "rope_theta": 7e5}
    return old, new


@pytest.mark.parametrize("scaling", [None, LINEAR, LLAMA3, YARN], ids=str)
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "olmo2", "seed_oss", "unknown"])
def test_both_spellings_read_the_same(model_type: str, scaling: dict[str, Any] | None) -> None:
    old, new = (normalize(config) for config in old_and_new(model_type, scaling))
    for name in ("rope_theta", "rope_scaling", "rope_parameters"):
        assert old[name] == new[name], name
    assert new["rope_theta"] == 7e5
    expected = None if scaling is None else {**scaling, "type": scaling["rope_type"]}
    assert new["rope_scaling"] == expected


def test_a_checkpoint_answers_the_same_in_both_spellings(tmp_path: Path) -> None:
    old, new = old_and_new("mistral", LINEAR)
    tokens = [(i * 37) % 90 for i in range(40)]
    logits = []
    for name, config in (("old", old), ("new", new)):
        save_tiny(tmp_path / name, old)
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        logits.append(dense_logits(load(tmp_path / name, dtype="float32").model, [tokens]))
    assert (logits[0] == logits[1]).all()
    del new["rope_parameters"]
    assert normalize(new)["rope_theta"] != 7e5  # (so the answers would differ without it)


def test_a_nested_text_config_is_read_too() -> None:
    inner = {"model_type": "qwen3", "hidden_size": 64, "rope_parameters": {"rope_theta": 5e6}}
    for outer in ("unknown_vl", "qwen3_vl"):
        text = normalize({"model_type": outer, "text_config": inner})["text_config"]
        assert text["rope_theta"] == 5e6 and text["rope_scaling"] is None
        assert text["rms_norm_eps"] == 1e-6, "transformers' default"
    assert inner == {**inner, "rope_parameters": {"rope_theta": 5e6}}, "the caller's stays"


def test_one_entry_per_layer_type_gives_both_bases() -> None:
    config = normalize({
        "model_type": "gemma3_text",
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        },
    })  # fmt: skip
    assert config["rope_theta"] == 1e6 and config["rope_local_base_freq"] == 2e4
    assert config["rope_scaling"] == {"type": "linear", "rope_type": "linear", "factor": 8.0}


def test_a_part_of_one_kind_of_layers_is_not_that_of_others() -> None:
    config = normalize({
        "model_type": "laguna",
        "rope_parameters": {
            "full_attention": {"rope_theta": 1e6, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_theta": 1e4},
        },
    })  # fmt: skip
    rope = config["rope_parameters"]
    assert rope["full_attention"]["partial_rotary_factor"] == 0.5
    assert rope["sliding_attention"]["partial_rotary_factor"] == 1.0


@pytest.mark.parametrize(
    ("model_type", "fields", "local"),
    [
        ("gemma3_text", {}, 1e4),
        ("gemma3_text", {"rope_local_base_freq": 3e4}, 3e4),
        ("olmo3", {}, 7e5),
        ("mimo_v2_flash", {"swa_rope_theta": 5e3}, 5e3),
    ],
)
def test_flat_fields_of_a_family_with_two_bases(
    model_type: str, fields: dict[str, Any], local: float
) -> None:
    config = normalize({"model_type": model_type, "rope_theta": 7e5, "rope_scaling": None} | fields)
    rope = config["rope_parameters"]
    assert rope["full_attention"]["rope_theta"] == config["rope_theta"] == 7e5
    assert rope["sliding_attention"]["rope_theta"] == local


def test_flat_fields_win_over_a_default_of_rope_parameters() -> None:
    """transformers 5 has llama3 scaling as Apertus' default, which a file of 4 did not mean."""
    config = normalize({"model_type": "apertus", "rope_theta": 1e4, "rope_scaling": None})
    assert config["rope_theta"] == 1e4 and config["rope_scaling"] is None
    assert normalize({"model_type": "apertus"})["rope_scaling"]["rope_type"] == "llama3"


@pytest.mark.parametrize(
    ("config", "part"),
    [
        ({"model_type": "phi", "partial_rotary_factor": 0.25}, 0.25),
        ({"model_type": "phi", "rope_parameters": {"partial_rotary_factor": 0.25}}, 0.25),
        ({"model_type": "gpt_neox", "rotary_pct": 0.5, "rotary_emb_base": 500}, 0.5),
        ({"model_type": "glm4_moe"}, 0.5),
    ],
)
def test_the_rotated_part_is_a_flat_field(config: dict[str, Any], part: float) -> None:
    found = normalize(config)
    assert found["partial_rotary_factor"] == found["rotary_pct"] == part
    assert found["rope_parameters"]["partial_rotary_factor"] == part
    assert found["rope_scaling"] is None
    if "rotary_emb_base" in config:
        assert found["rope_theta"] == found["rotary_emb_base"] == 500


def test_scaling_knows_the_length_that_it_began_at() -> None:
    factors = {"type": "su", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    fields = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 1024}
    config = normalize({
        "model_type": "phi3", "rope_scaling": factors, "rope_theta": 1e4,
        "original_max_position_embeddings": 128, **fields,
    })  # fmt: skip
    scaling = config["rope_scaling"]
    assert scaling["type"] == scaling["rope_type"] == "longrope"
    assert scaling["original_max_position_embeddings"] == 128


def test_mrope_keeps_both_of_its_names() -> None:
    scaling = {"type": "mrope", "mrope_section": [2, 3, 3]}
    config = normalize({"model_type": "qwen2_vl_text", "rope_scaling": scaling, "rope_theta": 1e6})
    assert config["rope_scaling"]["mrope_section"] == [2, 3, 3]


def test_missing_fields_have_transformers_defaults_and_given_ones_stay() -> None:
    config = normalize({"model_type": "cohere", "logit_scale": 0.5})
    assert config["tie_word_embeddings"] is True and config["hidden_size"] == 8192
    assert config["logit_scale"] == 0.5
    assert not any("token_id" in name for name in config), "a default id would end answers"
    assert "hidden_size" not in normalize({"model_type": "cohere"}, fill=False)


def test_a_model_type_of_other_code_has_no_defaults_of_transformers() -> None:
    config = {"model_type": "bailing_hybrid", "rope_theta": 1e4}
    for name in (None, "BailingMoeV2_5ForCausalLM"):
        found = normalize({**config, "architectures": [name]})
        assert "partial_rotary_factor" not in found and "hidden_size" not in found
    found = normalize({**config, "architectures": ["BailingHybridForCausalLM"]})
    assert found["partial_rotary_factor"] == 1.0


def test_a_list_of_bases_stays_a_list() -> None:
    config = normalize({"model_type": "step3p5", "rope_theta": [1e4, 1e6], "num_hidden_layers": 2})
    assert config["rope_theta"] == [1e4, 1e6]


def test_what_transformers_cannot_read_still_has_its_rope_read() -> None:
    config = normalize({
        "model_type": "llama", "hidden_size": "wide", "rope_parameters": {"rope_theta": 3e4},
    })  # fmt: skip
    assert config["rope_theta"] == 3e4 and "rms_norm_eps" not in config


def test_weights_that_fit_mlx_lms_defaults_only_are_loaded(tmp_path: Path) -> None:
    """GLM has attention biases by transformers' default, and none by mlx-lm's."""
    save_tiny(tmp_path, tiny_config("glm"))
    model = load(tmp_path).model
    assert "bias" not in model.layers[0].self_attn.q_proj
