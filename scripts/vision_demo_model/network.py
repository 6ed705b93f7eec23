# mypy: disable-error-code="misc"
"""Idefics3 in PyTorch, with Hugging Face's parameter names, for training (one picture size)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..demo_model.network import MLP
from .scenes import SIDE
from .tokenizer import VOCAB_SIZE

CONFIG: dict[str, Any] = {
    "architectures": ["Idefics3ForConditionalGeneration"],
    "model_type": "idefics3",
    "image_token_id": 4,
    "scale_factor": 2,
    "tie_word_embeddings": False,
    "vocab_size": VOCAB_SIZE,
    "pad_token_id": 0,
    "eos_token_id": [2, 0],
    "text_config": {
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": [2, 0],
    },
    "vision_config": {
        "model_type": "idefics3_vision",
        "hidden_size": 192,
        "intermediate_size": 576,
        "num_hidden_layers": 6,
        "num_attention_heads": 3,
        "image_size": SIDE,
        "patch_size": 8,
        "num_channels": 3,
        "layer_norm_eps": 1e-5,
        "hidden_act": "gelu_pytorch_tanh",
        "attention_dropout": 0.0,
    },
}


def _heads(x: Tensor, count: int) -> Tensor:
    return x.view(*x.shape[:2], count, -1).transpose(1, 2)


class VisionAttention(nn.Module):
    """Full attention with biases."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.v_proj, self.out_proj = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Maps [B, N, hidden] to itself."""
        q, k, v = (_heads(p(x), self.heads) for p in (self.q_proj, self.k_proj, self.v_proj))
        out = F.scaled_dot_product_attention(q, k, v)
        return self.out_proj(out.transpose(1, 2).flatten(2))


class VisionMLP(nn.Module):
    """Two linear maps with a GELU in between."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(hidden, inner), nn.Linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Maps [B, N, hidden] to itself."""
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class VisionLayer(nn.Module):
    """One pre-norm layer of the tower."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["layer_norm_eps"]
        self.self_attn = VisionAttention(hidden, config["num_attention_heads"])
        self.layer_norm1 = nn.LayerNorm(hidden, eps=eps)
        self.mlp = VisionMLP(hidden, config["intermediate_size"])
        self.layer_norm2 = nn.LayerNorm(hidden, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        """Applies attention and MLP, each with its residual."""
        x = x + self.self_attn(self.layer_norm1(x))
        return x + self.mlp(self.layer_norm2(x))


class VisionEmbeddings(nn.Module):
    """Patch and position embeddings."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, patch = config["hidden_size"], config["patch_size"]
        self.patch_embedding = nn.Conv2d(3, hidden, patch, stride=patch)
        self.position_embedding = nn.Embedding((config["image_size"] // patch) ** 2, hidden)

    def forward(self, pixels: Tensor) -> Tensor:
        """Maps [M, 3, H, W] to [M, N, hidden]."""
        return self.patch_embedding(pixels).flatten(2).mT + self.position_embedding.weight


class VisionEncoder(nn.Module):
    """The layers of the tower."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(VisionLayer(config) for _ in range(config["num_hidden_layers"]))


class VisionModel(nn.Module):
    """The tower."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.embeddings = VisionEmbeddings(config)
        self.encoder = VisionEncoder(config)
        self.post_layernorm = nn.LayerNorm(config["hidden_size"], eps=config["layer_norm_eps"])

    def forward(self, pixels: Tensor) -> Tensor:
        """Maps [M, 3, H, W] to [M, N, hidden]."""
        x = self.embeddings(pixels)
        for layer in self.encoder.layers:
            x = layer(x)
        return self.post_layernorm(x)


class Projection(nn.Module):
    """The connector's linear map."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        inner = config["vision_config"]["hidden_size"] * config["scale_factor"] ** 2
        self.proj = nn.Linear(inner, config["text_config"]["hidden_size"], bias=False)


class Connector(nn.Module):
    """Merges neighboring patches into one token."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.scale = config["scale_factor"]
        self.modality_projection = Projection(config)

    def forward(self, x: Tensor) -> Tensor:
        """Maps [M, N, hidden] to [M, N / scale**2, text hidden]."""
        count, number, hidden = x.shape
        side, s = int(number**0.5), self.scale
        x = x.view(count, side // s, s, side // s, s, hidden).permute(0, 1, 3, 2, 4, 5)
        return self.modality_projection.proj(x.reshape(count, number // s**2, hidden * s**2))


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, dim = config["hidden_size"], config["head_dim"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.q_proj = nn.Linear(hidden, self.heads * dim, bias=False)
        self.k_proj = nn.Linear(hidden, self.kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(hidden, self.kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(self.heads * dim, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attends causally; x is [B, L, hidden], cos and sin [B, 1, L, dim / 2]."""

        def rotate(t: Tensor) -> Tensor:
            left, right = t.float().chunk(2, dim=-1)
            turned = torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)
            return turned.to(t.dtype)

        q = rotate(_heads(self.q_proj(x), self.heads))
        k = rotate(_heads(self.k_proj(x), self.kv_heads))
        v = _heads(self.v_proj(x), self.kv_heads)
        group = self.heads // self.kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.self_attn, self.mlp = Attention(config), MLP(config)
        self.input_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Applies attention and MLP, each with its residual."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class TextModel(nn.Module):
    """The Llama, which takes embeddings."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.ModuleList(Block(config) for _ in range(config["num_hidden_layers"]))
        self.norm = nn.RMSNorm(config["hidden_size"], eps=config["rms_norm_eps"])
        half = config["head_dim"] // 2
        rates = config["rope_theta"] ** (-torch.arange(half, dtype=torch.float32) / half)
        self.register_buffer("rates", rates, persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Maps embeddings [B, L, hidden] at positions [B, L] to hidden states."""
        angles = (positions.float()[..., None] * self.rates)[:, None]
        cos, sin = angles.cos(), angles.sin()
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)


class Body(nn.Module):
    """Tower, connector and text model."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.vision_model = VisionModel(config["vision_config"])
        self.connector = Connector(config)
        self.text_model = TextModel(config["text_config"])


class Idefics3(nn.Module):
    """The whole model."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        self.model = Body(config)
        text = config["text_config"]
        self.lm_head = nn.Linear(text["hidden_size"], text["vocab_size"], bias=False)
        residual = ("o_proj.weight", "down_proj.weight", "out_proj.weight", "fc2.weight")
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                nn.init.normal_(parameter, std=0.006 if name.endswith(residual) else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        nn.init.normal_(self.model.vision_model.embeddings.patch_embedding.weight, std=0.05)
        nn.init.normal_(self.model.connector.modality_projection.proj.weight, std=0.03)

    def see(self, pixels: Tensor) -> Tensor:
        """Maps pictures [M, 3, H, W] to features [M, 64, hidden]."""
        return self.model.connector(self.model.vision_model(pixels))

    def forward(self, tokens: Tensor, positions: Tensor, features: Tensor) -> Tensor:
        """Returns logits [B, L, vocab]; the n-th image token takes the n-th row of the features."""
        text = self.model.text_model
        embedded = text.embed_tokens(tokens)
        flat = features.flatten(0, 1)
        here = tokens == self.config["image_token_id"]
        slot = (here.flatten().cumsum(0) - 1).clamp(0, len(flat) - 1).view_as(tokens)
        x = torch.where(here[..., None], flat[slot].to(embedded.dtype), embedded)
        return self.lm_head(text(x, positions))
