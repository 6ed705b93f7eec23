"""Module paths of mlx-lm by GGUF's names, as most families have them."""

from __future__ import annotations

_LAYER = "model.layers.{}"

#: Embedding, last norm and output.
ENDS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
ATTENTION = {
    "attn_q": f"{_LAYER}.self_attn.q_proj",
    "attn_k": f"{_LAYER}.self_attn.k_proj",
    "attn_v": f"{_LAYER}.self_attn.v_proj",
    "attn_output": f"{_LAYER}.self_attn.o_proj",
}
QK_NORMS = {
    "attn_q_norm": f"{_LAYER}.self_attn.q_norm",
    "attn_k_norm": f"{_LAYER}.self_attn.k_norm",
}
#: Norms before attention and MLP.
NORMS = {
    "attn_norm": f"{_LAYER}.input_layernorm",
    "ffn_norm": f"{_LAYER}.post_attention_layernorm",
}
MLP = {
    "ffn_gate": f"{_LAYER}.mlp.gate_proj",
    "ffn_up": f"{_LAYER}.mlp.up_proj",
    "ffn_down": f"{_LAYER}.mlp.down_proj",
}
LLAMA = {**ENDS, **ATTENTION, **NORMS, **MLP}


def experts(mlp: str = "mlp", stacked: str = "switch_mlp", gate: str = "gate") -> dict[str, str]:
    """Returns the names of a mixture of experts, each of whose matrices is one tensor."""
    return {
        "ffn_gate_inp": f"{_LAYER}.{mlp}.{gate}",
        "ffn_gate_exps": f"{_LAYER}.{mlp}.{stacked}.gate_proj",
        "ffn_up_exps": f"{_LAYER}.{mlp}.{stacked}.up_proj",
        "ffn_down_exps": f"{_LAYER}.{mlp}.{stacked}.down_proj",
    }


def shared_experts(path: str) -> dict[str, str]:
    """Returns the names of an MLP that all tokens take.

    Args:
        path: Its path in a layer.
    """
    return {
        "ffn_gate_shexp": f"{_LAYER}.{path}.gate_proj",
        "ffn_up_shexp": f"{_LAYER}.{path}.up_proj",
        "ffn_down_shexp": f"{_LAYER}.{path}.down_proj",
    }
