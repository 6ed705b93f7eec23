"""Finds the models that fit and the token capacity of their KV caches, by the engine's own rule.

The rule (`EngineConfig`): on a GPU, 0.9 of the device's memory minus weights and the largest step's
activations; on the CPU 4 GiB, or half of the memory if that is less. Either way, at most what all
sequences need at full length. The engine measures the activations; this module estimates them.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlx_paged.doctor.jobs import Memory
from mlx_paged.engine.config import EngineConfig
from mlx_paged.errors import InvalidParameterError
from mlx_paged.model.kv_formats import FORMATS, KVFormat

# Bits per weight by precision. In MLX's affine formats, 64 weights share a 16-bit scale and bias.
_GPU_PRECISIONS = {"16-bit": 16.0, "8-bit": 8.5, "4-bit": 4.5}
# On the CPU, weights keep the checkpoint's dtype; keys, values and activations are float32.
PRECISIONS = _GPU_PRECISIONS | {"float32": 32.0}


@dataclass(frozen=True)
class Shape:
    """A decoder with grouped-query attention and gated MLPs, dense or with experts.

    Attributes:
        parameters: Number of all weights.
        intermediate: Hidden size of one expert.
        active_experts: Experts per token; 1 for a dense MLP.
    """

    name: str
    parameters: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_len: int
    active_experts: int = 1

    def weight_bytes(self, precision: str) -> int:
        """Bytes of the weights; `precision` is one of `PRECISIONS`."""
        return int(self.parameters * PRECISIONS[precision] / 8)

    def kv_bytes_per_token(self, precision: str, kv_format: KVFormat | None = None) -> int:
        """Bytes of one token's keys and values over all layers; by default 16 bits per number, or
        32 for float32."""
        if kv_format is None:
            return 2 * self.layers * self.kv_heads * self.head_dim * _value_bytes(precision)
        row = sum(f.row_bytes(self.head_dim) for f in (kv_format.keys, kv_format.values))
        return self.layers * self.kv_heads * row

    def activation_bytes(self, rows: int, sampled_rows: int, precision: str) -> int:
        """Estimates the bytes of the largest step.

        The factors are fitted to the engine's measurements on the CPU for Llamas of eight shapes,
        which reached two thirds of the estimate or more, and never exceeded it.

        Args:
            rows: Tokens of the step.
            sampled_rows: Sequences that sample a token from float32 logits.
        """
        mlp = 7 * self.intermediate * self.active_experts
        row = mlp + 8 * self.heads * self.head_dim + 12 * self.hidden
        return rows * row * _value_bytes(precision) + sampled_rows * self.vocab * 3 * 4


def _value_bytes(precision: str) -> int:
    return 4 if precision == "float32" else 2


# From the `config.json` of each, and the sizes of its published weight files.
# fmt: off
EMBEDDED = Shape("embedded model", 10_572_672, 6, 384, 6, 2, 64, 960, 4096, 4096)
MODELS: tuple[Shape, ...] = (
    EMBEDDED,
    Shape("Qwen3-0.6B", 596_049_920, 28, 1024, 16, 8, 128, 3072, 151936, 40960),
    Shape("Llama-3.2-1B", 1_235_814_400, 16, 2048, 32, 8, 64, 8192, 128256, 131072),
    Shape("Llama-3.2-3B", 3_212_749_824, 28, 3072, 24, 8, 128, 8192, 128256, 131072),
    Shape("Qwen3-4B", 4_022_468_096, 36, 2560, 32, 8, 128, 9728, 151936, 40960),
    Shape("Mistral-7B-v0.3", 7_248_023_552, 32, 4096, 32, 8, 128, 14336, 32768, 32768),
    Shape("Llama-3.1-8B", 8_030_261_248, 32, 4096, 32, 8, 128, 14336, 128256, 131072),
    Shape("Qwen2.5-14B", 14_770_033_664, 48, 5120, 40, 8, 128, 13824, 152064, 131072),
    Shape("Qwen3-30B-A3B", 30_532_122_624, 48, 2048, 32, 4, 128, 768, 151936, 40960, 8),
    Shape("Qwen3-32B", 32_762_123_264, 64, 5120, 64, 8, 128, 25600, 151936, 40960),
    Shape("Llama-3.3-70B", 70_553_706_496, 80, 8192, 64, 8, 128, 28672, 128256, 131072),
)
# fmt: on


@dataclass(frozen=True)
class Fit:
    """The result for one model in one precision.

    Attributes:
        num_blocks: Blocks of the engine's pool; 0 if the model does not fit.
        num_tokens: Tokens of keys and values that they hold.
        quantized_tokens: The same with the formats of `--kv-cache-dtype`, by name.
        reason: Why the model does not fit; empty if it does.
    """

    model: str
    precision: str
    weight_bytes: int
    kv_bytes_per_token: int
    activation_bytes: int
    num_blocks: int
    num_tokens: int
    quantized_tokens: dict[str, int]
    reason: str = ""


def fits(memory: Memory) -> list[Fit]:
    """Sizes every model in every precision that makes sense on the device, with engine defaults."""
    config = EngineConfig()
    return [
        fit(shape, precision, memory, config)
        for shape in MODELS
        for precision in (_GPU_PRECISIONS if memory["on_gpu"] else PRECISIONS)
    ]


def fit(shape: Shape, precision: str, memory: Memory, config: EngineConfig) -> Fit:
    """Sizes one shape in one precision."""
    on_gpu = memory["on_gpu"]
    values = precision if on_gpu else "float32"
    weights, per_token = shape.weight_bytes(precision), shape.kv_bytes_per_token(values)
    quantized = dict.fromkeys(FORMATS, 0)
    activations = shape.activation_bytes(config.step_tokens, config.max_num_seqs, values)
    usable = int(memory["device_bytes"] * (memory["utilization"] if on_gpu else 1.0))
    left = usable - weights - activations
    reason, num_blocks = "", 0
    if weights > usable:
        reason = f"the weights alone take {_gib(weights)} of {_gib(usable)}"
    elif left <= 0:
        reason = f"weights and activations take {_gib(weights + activations)} of {_gib(usable)}"
    else:

        def blocks_of(per_token: int) -> int:
            # On the CPU, the engine ignores the weights, because unused blocks cost nothing. A
            # model fits here only if its whole pool can be used.
            try:
                most = config.num_blocks([per_token], shape.max_len, left if on_gpu else None)
            except InvalidParameterError:
                return 0
            return min(most, left // (config.block_size * per_token))

        num_blocks = blocks_of(per_token)
        for name, kv_format in FORMATS.items():
            blocks = blocks_of(shape.kv_bytes_per_token(precision, kv_format))
            quantized[name] = _tokens(blocks, config)
        if num_blocks < 2:
            num_blocks, reason = 0, f"{_gib(left)} are left for keys and values: no two blocks"
    return Fit(
        model=shape.name,
        precision=precision,
        weight_bytes=weights,
        kv_bytes_per_token=per_token,
        activation_bytes=activations,
        num_blocks=num_blocks,
        num_tokens=_tokens(num_blocks, config),
        quantized_tokens=quantized,
        reason=reason,
    )


def _tokens(num_blocks: int, config: EngineConfig) -> int:
    return max(0, num_blocks - 1) * config.block_size  # block 0 is never allocated


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB"
