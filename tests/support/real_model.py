"""SmolLM2 for tests: the checkpoint, a dense float32 model of mlx-lm, and logits of both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import llama

from mlx_paged.demo.prompts import REAL_CHATS, REAL_SYSTEM_PROMPT, SYSTEM_PROMPT
from mlx_paged.model.kv_formats import format_named
from mlx_paged.model.loader import LoadedModel
from mlx_paged.model.plan import StepInputs
from mlx_paged.model.wrap import build_paged_model
from support.plain import plain_caches

BLOCK_SIZE = 32
# Tokens per step: later steps of a text read the keys and values of earlier ones.
CHUNK = 128
NUM_TOKENS = 288  # of each text

CONVERSATIONS = [
    [{"role": "system", "content": REAL_SYSTEM_PROMPT}, {"role": "user", "content": chat}]
    for chat in REAL_CHATS
]

_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def dense_model(path: Path) -> nn.Module:
    """mlx-lm's Llama with the file's weights, as the `gguf` package dequantizes them to float32."""
    import gguf
    from gguf.quants import dequantize

    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    heads, kv_heads = (fields[f"llama.attention.head_count{kind}"] for kind in ("", "_kv"))
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=fields["llama.embedding_length"],
        num_hidden_layers=fields["llama.block_count"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        rms_norm_eps=fields["llama.attention.layer_norm_rms_epsilon"],
        rope_theta=fields["llama.rope.freq_base"],
        vocab_size=len(fields["tokenizer.ggml.tokens"]),
        tie_word_embeddings=True,
    )
    weights = {}
    for tensor in reader.tensors:
        shape = [int(n) for n in reversed(tensor.shape)]
        values = dequantize(np.asarray(tensor.data), tensor.tensor_type).reshape(shape)
        weights[_name(tensor.name)] = mx.array(
            _unpermuted(tensor.name, values, heads, kv_heads).astype(np.float32)
        )
    model = llama.Model(args)
    model.load_weights(list(weights.items()))
    mx.eval(model.parameters())
    return model


def _name(name: str) -> str:
    if not name.startswith("blk."):
        return {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}[
            name.removesuffix(".weight")
        ] + ".weight"
    _, layer, kind, _ = name.split(".")
    return f"model.layers.{layer}.{_NAMES[kind]}.weight"


def _unpermuted(name: str, values: np.ndarray, heads: int, kv_heads: int) -> np.ndarray:
    """Undoes llama.cpp's order of the rows of queries and keys: pairs side by side."""
    for kind, count in (("attn_q.", heads), ("attn_k.", kv_heads)):
        if kind in name:
            rows, columns = values.shape
            pairs = values.reshape(count, rows // count // 2, 2, columns)
            return pairs.swapaxes(1, 2).reshape(rows, columns)
    return values


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """``[num_tokens, vocab_size]``, float32; sums are float64."""
    x = logits - logits.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True, dtype=np.float64)).astype(np.float32)


def dense_logits(model: nn.Module, tokens: list[int], first: int = 0) -> np.ndarray:
    """Logits ``[num_tokens - first, vocab_size]`` of mlx-lm's dense path, from one position on."""
    hidden = model.model(mx.array(tokens)[None], cache=plain_caches(model))
    return np.array(model.model.embed_tokens.as_linear(hidden[0, first:]))


def paged_logits(
    loaded: LoadedModel, tokens: list[int], kv_cache_dtype: str, activations: str = "float32"
) -> np.ndarray:
    """The same through pools of a format, in steps of `CHUNK` tokens."""
    paged = build_paged_model(loaded.model, loaded.config, block_size=BLOCK_SIZE)
    paged.layout = paged.layout.with_kv_format(format_named(kv_cache_dtype))
    paged.round_activations(activations)
    num_blocks = -(-len(tokens) // BLOCK_SIZE)
    paged.allocate(num_blocks + 1)
    table = (np.random.default_rng(0).permutation(num_blocks) + 1).tolist()
    logits = []
    for begin in range(0, len(tokens), CHUNK):
        end = min(begin + CHUNK, len(tokens))
        inputs = StepInputs(
            context_lens=np.array([end]),
            query_lens=np.array([end - begin]),
            tables=[table[: -(-end // BLOCK_SIZE)]],
            logit_rows=np.arange(end - begin),
        )
        found = paged.forward(mx.array(np.array(tokens[begin:end], np.int32)), inputs)
        mx.eval(found, *paged.pools())
        logits.append(np.array(found))
    return np.concatenate(logits)


def texts(tokenizer: Any) -> list[list[int]]:
    """Tokens of texts that the model did not write: English prose, and Python source."""
    source = Path(__file__).parents[1] / "demo" / "held_out_sample.txt"
    return [tokenizer.encode(text)[:NUM_TOKENS] for text in (SYSTEM_PROMPT, source.read_text())]
