"""Shapes of well-known models, to say which of them fit. From the `config.json` of each."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Bits of a weight by precision. MLX's affine quantisation keeps a 16-bit scale and bias for 64.
_QUANTISED_EXTRA = 2 * 16 / 64
PRECISIONS: dict[str, float] = {
    "float32": 32,
    "16-bit": 16,
    "8-bit": 8 + _QUANTISED_EXTRA,
    "4-bit": 4 + _QUANTISED_EXTRA,
}


@dataclass(frozen=True)
class Shape:
    """A decoder with grouped attention and a gated MLP, dense or of experts.

    Attributes:
        experts: Experts of a layer; 0: one dense MLP.
        active_experts: Of them, those that a token visits.
        qkv_bias: Whether queries, keys and values have a bias.
        qk_norm: Whether queries and keys are normed by head.
        tied: Whether the output projection is the embedding.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_len: int
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: int = 0
    active_experts: int = 1

    @property
    def parameters(self) -> int:
        """All weights."""
        return self.layers * self._layer_weights + self._embeddings + self._vectors

    def weight_bytes(self, precision: str) -> int:
        """Bytes of the weights.

        Args:
            precision: one of `PRECISIONS`; norms and biases stay in 16 bits (or 32).
        """
        bits = PRECISIONS[precision]
        matrices = self.layers * self._layer_weights + self._embeddings
        return int((matrices * bits + self._vectors * max(16, min(bits, 32))) / 8)

    def kv_bytes_per_token(self, precision: str) -> int:
        """Bytes of a token's keys and values in all layers, in 16 bits, or 32 for float32."""
        return 2 * self.layers * self.kv_heads * self.head_dim * value_bytes(precision)

    def activation_bytes(self, rows: int, sampled_rows: int, precision: str) -> int:
        """An estimate of what the largest step needs. (The engine measures it, with the model.)

        The factors are fitted to what the engine measured on the CPU for Llamas of eight shapes:
        it was between the estimate and two thirds of it.

        Args:
            rows: tokens of the step.
            sampled_rows: sequences of which a token is drawn, from float32 logits.
        """
        mlp = 7 * self.intermediate * self.active_experts
        row = mlp + 8 * self.heads * self.head_dim + 12 * self.hidden
        return rows * row * value_bytes(precision) + sampled_rows * self.vocab * 3 * 4

    @property
    def _layer_weights(self) -> int:
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        router = self.hidden * self.experts
        return attention + router + max(1, self.experts) * 3 * self.hidden * self.intermediate

    @property
    def _embeddings(self) -> int:
        return self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def _vectors(self) -> int:
        bias = (self.heads + 2 * self.kv_heads) * self.head_dim if self.qkv_bias else 0
        norms = 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        return self.layers * (norms + bias) + self.hidden


def value_bytes(precision: str) -> int:
    """Bytes of an activation, a key or a value."""
    return 4 if precision == "float32" else 2


# fmt: off
WELL_KNOWN: tuple[Shape, ...] = (
    Shape("Qwen3-0.6B", 28, 1024, 16, 8, 128, 3072, 151936, 40960, tied=True, qk_norm=True),
    Shape("Llama-3.2-1B", 16, 2048, 32, 8, 64, 8192, 128256, 131072, tied=True),
    Shape("Llama-3.2-3B", 28, 3072, 24, 8, 128, 8192, 128256, 131072, tied=True),
    Shape("Qwen3-4B", 36, 2560, 32, 8, 128, 9728, 151936, 40960, tied=True, qk_norm=True),
    Shape("Mistral-7B-v0.3", 32, 4096, 32, 8, 128, 14336, 32768, 32768),
    Shape("Llama-3.1-8B", 32, 4096, 32, 8, 128, 14336, 128256, 131072),
    Shape("Qwen2.5-14B", 48, 5120, 40, 8, 128, 13824, 152064, 131072, qkv_bias=True),
    Shape("Qwen3-30B-A3B", 48, 2048, 32, 4, 128, 768, 151936, 40960, qk_norm=True, experts=128,
          active_experts=8),
    Shape("Qwen3-32B", 64, 5120, 64, 8, 128, 25600, 151936, 40960, qk_norm=True),
    Shape("Llama-3.3-70B", 80, 8192, 64, 8, 128, 28672, 128256, 131072),
)
# fmt: on


def embedded(folder: Path) -> Shape:
    """The model that comes with the package, from its `config.json`."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return Shape(
        "embedded model",
        config["num_hidden_layers"],
        config["hidden_size"],
        config["num_attention_heads"],
        config["num_key_value_heads"],
        config["head_dim"],
        config["intermediate_size"],
        config["vocab_size"],
        config["max_position_embeddings"],
        tied=config["tie_word_embeddings"],
    )
