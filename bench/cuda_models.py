"""Models of well-known shapes with random bfloat16 weights, for benchmarks on a GPU."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import llama, qwen3, qwen3_moe
from mlx_lm.utils import load_tokenizer

from mlx_paged.demo import model_path
from mlx_paged.model.loader import LoadedModel

_COMMON = {"head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5}

CONFIGS: dict[str, dict[str, Any]] = {
    "Llama-3.2-3B": {
        **_COMMON,
        "model_type": "llama",
        "hidden_size": 3072,
        "num_hidden_layers": 28,
        "intermediate_size": 8192,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    },
    "Qwen3-0.6B": {
        **_COMMON,
        "model_type": "qwen3",
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "vocab_size": 151936,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
    "Qwen3-30B-A3B": {
        **_COMMON,
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "vocab_size": 151936,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
    },
    "Llama-3.1-8B, 4 bits": {
        **_COMMON,
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    },
}
_MODULES = {"llama": llama, "qwen3": qwen3, "qwen3_moe": qwen3_moe}


def random_model(name: str = "Llama-3.2-3B") -> LoadedModel:
    """A model of `CONFIGS`; with "4 bits" in its name its layers are quantised."""
    config = CONFIGS[name]
    module = _MODULES[config["model_type"]]
    model = module.Model(module.ModelArgs.from_dict(config))
    mx.random.seed(0)
    weights = []
    for path, array in tree_flatten(model.parameters()):
        weight = (0.02 * mx.random.normal(array.shape)).astype(mx.bfloat16)
        mx.eval(weight)  # one at a time: the random numbers are of 32 bits
        weights.append((path, weight))
    model.update(tree_unflatten(weights))
    if "4 bits" in name:
        nn.quantize(model, group_size=64, bits=4)
    mx.eval(model.parameters())
    model.eval()
    mx.clear_cache()
    return LoadedModel(model, load_tokenizer(model_path()), config, f"random {name}")
