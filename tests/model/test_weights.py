"""Weights in the forms that people have them in: quantized, with adapters fused, tied or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_map
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load as load_dense
from mlx_lm.utils import quantize_model, save_config, save_model
from support.family_configs import config_of
from support.models import dense_logits, embedded
from support.parity import Driver, family_model, mixed_step, relative_difference, relative_rms

from mlx_paged.engine.loading import load
from mlx_paged.model.wrap import convert_to_paged

# Relative error of the logits, with the same weights.
TOLERANCE = 1e-5
# Families of each kind of attention, with weights that quantize: groups of 32.
FAMILIES = ["llama", "deepseek_v3", "gpt_oss", "gemma3_text", "qwen3_next", "lfm2", "mixtral"]
WIDE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "shared_expert_intermediate_size": 64,
    "block_ff_dim": 128,
}
QUANTIZED: dict[str, dict[str, Any]] = {
    "4 bit": {"bits": 4, "group_size": 32},
    "8 bit": {"bits": 8, "group_size": 32},
    "mxfp4": {"bits": 4, "group_size": 32, "mode": "mxfp4"},
}


def wide(family: str, **fields: Any) -> dict[str, Any]:
    config = config_of(family)
    return config | {name: size for name, size in WIDE.items() if name in config} | fields


def differences(model: nn.Module, family: str) -> float:
    driver = Driver(convert_to_paged(model, family, block_size=8))
    return max(relative_difference(model, driver, 96).values())


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("family", FAMILIES)
def test_quantized_weights_match(family: str, name: str) -> None:
    config = wide(family)
    model, _ = quantize_model(family_model(config), config, **{"mode": "affine", **QUANTIZED[name]})
    quantized = [m for m in model.modules() if hasattr(m, "bits")]
    assert len(quantized) > 8
    # (Activations of 22 bits, also with AVX2: 1.13e-5 with gemma3_text.)
    assert differences(model, family) < 2 * TOLERANCE


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma4_text", "qwen3_next"])
def test_tied_and_untied_heads_match(family: str, tied: bool) -> None:
    model = family_model(wide(family, tie_word_embeddings=tied))
    assert ("lm_head" in model) is not tied
    assert differences(model, family) < TOLERANCE


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_quantized_heads_match(tied: bool) -> None:
    config = wide("qwen3", tie_word_embeddings=tied)
    model, _ = quantize_model(family_model(config), config, bits=4, group_size=32)
    head = model.model.embed_tokens if tied else model.lm_head
    assert isinstance(head, nn.QuantizedEmbedding if tied else nn.QuantizedLinear)
    assert differences(model, "qwen3") < TOLERANCE


def with_adapters(model: nn.Module, keys: set[str] | None = None) -> nn.Module:
    """LoRA layers whose adapters do something."""
    linear_to_lora_layers(model, 4, {"rank": 4, "scale": 2.0, "dropout": 0.0, "keys": keys})
    for name, module in model.named_modules():
        if hasattr(module, "lora_b"):
            module.lora_b = mx.random.normal(module.lora_b.shape) * 0.3
            assert name
    model.eval()
    return model


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "qwen3_next"])
def test_adapters_match(family: str, fused: bool) -> None:
    plain = family_model(wide(family))
    model = with_adapters(family_model(wide(family)))
    if fused:
        layers = [(n, m.fuse()) for n, m in model.named_modules() if hasattr(m, "lora_b")]
        model.update_modules(mx_tree(layers))
    assert differences(model, family) < TOLERANCE
    tokens = mx.array([[1, 2, 3]])
    assert mx.abs(model(tokens) - plain(tokens)).max().item() > 1e-2, "they do something"


def test_an_adapter_on_the_head_matches() -> None:
    """The rows are selected before the head as a whole, adapter included."""
    from mlx_lm.tuner.lora import LoRALinear

    model = family_model(wide("llama"))
    model.lm_head = LoRALinear.from_base(model.lm_head, r=4)
    model.lm_head.lora_b = mx.random.normal(model.lm_head.lora_b.shape)
    model.eval()
    assert differences(model, "llama") < TOLERANCE


def mx_tree(layers: list[tuple[str, nn.Module]]) -> Any:
    from mlx.utils import tree_unflatten

    return tree_unflatten(layers)


@pytest.mark.parametrize("variant", ["k_eq_v", "moe"])
def test_gemma4_variants_match(variant: str) -> None:
    fields: dict[str, Any] = {
        "k_eq_v": {"attention_k_eq_v": True, "num_kv_shared_layers": 0},
        "moe": {
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
    }[variant]
    assert differences(family_model(config_of("gemma4_text") | fields), "gemma4_text") < TOLERANCE


# --- From a directory -----------------------------------------------------------------------------


def save(path: Path, config: dict[str, Any], model: nn.Module) -> None:
    path.mkdir()
    save_model(path, model)
    save_config(dict(config), path / "config.json")
    embedded().tokenizer.save_pretrained(path)


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_quantized_directory_loads(tmp_path: Path, name: str) -> None:
    config = wide("qwen2")
    model, config = quantize_model(
        family_model(config), config, **{"mode": "affine", **QUANTIZED[name]}
    )
    save(tmp_path / "model", config, model)
    tokens = mx.array([[1, 2, 3, 4]])
    expected = load_dense(str(tmp_path / "model"))[0](tokens)
    loaded = load(tmp_path / "model")
    # On the CPU the weights are dequantized, which changes nothing but the order of sums.
    assert mx.allclose(loaded.model(tokens), expected, rtol=1e-3, atol=1e-3)
    assert differences(loaded.model, "qwen2") < TOLERANCE


def test_what_a_wrapper_says_of_its_text_model_is_found(tmp_path: Path) -> None:
    inner = config_of("gemma3")["text_config"] | {"max_position_embeddings": 300}
    config = {"model_type": "gemma3", "vocab_size": 96, "text_config": inner}
    save(tmp_path / "model", config, family_model(config))
    loaded = load(tmp_path / "model")
    assert (loaded.vocab_size, loaded.max_model_len) == (96, 300)


# --- Half precision -------------------------------------------------------------------------------


def _widened(weight: mx.array) -> mx.array:
    return weight.astype(mx.float32) if mx.issubdtype(weight.dtype, mx.floating) else weight


# Without experts: MLX's CPU backend multiplies those in float32 only.
@pytest.mark.parametrize(
    "family",
    [
        "deepseek_v3",
        "stablelm",
        "gemma3_text",
        "lfm2",
        *(pytest.param(family, marks=pytest.mark.long) for family in ("nemotron_h", "rwkv7")),
    ],
)
def test_half_precision_is_as_near_the_truth_as_mlx_lm(family: str) -> None:
    config = config_of(family)
    if family == "deepseek_v3":
        config["n_routed_experts"] = None
    model, exact = family_model(config), family_model(config)
    model.set_dtype(mx.bfloat16)
    exact.update(tree_map(_widened, model.parameters()))
    paged = convert_to_paged(model, family, block_size=8)
    assert {spec.dtype for spec in paged.layout.attention} <= {mx.bfloat16}
    driver = Driver(paged)
    rng = np.random.default_rng(1)
    errors = []
    for name, got in mixed_step(driver, lambda n: rng.integers(0, 96, n).tolist()).items():
        chunks = driver.sequences[name].chunks
        truth = dense_logits(exact, chunks)
        errors.append([relative_rms(got, truth), relative_rms(dense_logits(model, chunks), truth)])
    ours, theirs = np.sqrt(np.mean(np.square(errors), axis=0))
    assert ours < 1.5 * theirs, f"{ours:.3f} against mlx-lm's {theirs:.3f}"
