"""Which models fit, and how many tokens of keys and values beside them, by the engine's own rule.

The rule (`EngineConfig`): on a GPU, 0.9 of the device's memory less weights and the largest step's
activations; on the CPU 4 GiB, or half of the memory if that is less. Either way no more than
every sequence could use at full length. The engine measures the activations; here they are
estimated.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mlx_paged.doctor.shapes import Shape
from mlx_paged.engine.config import EngineConfig
from mlx_paged.errors import InvalidParameterError

# On the CPU quantised weights are dequantised when they are loaded: float32 is what MLX is fast in.
GPU_PRECISIONS = ("16-bit", "8-bit", "4-bit")
CPU_PRECISIONS = ("float32",)


@dataclass(frozen=True)
class Memory:
    """Memory as the engine sees it, in bytes.

    Attributes:
        device_bytes: What the default device may use.
        utilization: Share of it that the engine takes on a GPU.
    """

    on_gpu: bool
    device_bytes: int
    utilization: float


@dataclass(frozen=True)
class Fit:
    """Whether a model fits in a precision.

    Attributes:
        block_size: Tokens of a block.
        num_blocks: Blocks of the pool that the engine would have; 0: it does not fit.
        num_tokens: Tokens of keys and values in them.
        reason: Why it does not fit; empty where it does.
    """

    model: str
    precision: str
    weight_bytes: int
    kv_bytes_per_token: int
    activation_bytes: int
    block_size: int
    num_blocks: int
    num_tokens: int
    reason: str = ""


def fits(shapes: Iterable[Shape], memory: Memory, config: EngineConfig | None = None) -> list[Fit]:
    """Every shape in every precision that makes sense on the device.

    Args:
        config: of the engine; None: its defaults.
    """
    config = config or EngineConfig()
    precisions = GPU_PRECISIONS if memory.on_gpu else CPU_PRECISIONS
    return [fit(shape, precision, memory, config) for shape in shapes for precision in precisions]


def fit(shape: Shape, precision: str, memory: Memory, config: EngineConfig) -> Fit:
    """One shape in one precision."""
    weights = shape.weight_bytes(precision)
    per_token = shape.kv_bytes_per_token(precision)
    activations = shape.activation_bytes(
        config.max_num_batched_tokens, config.max_num_seqs, precision
    )
    share = memory.utilization if memory.on_gpu else 1.0
    usable = int(memory.device_bytes * share)
    left = usable - weights - activations
    reason, num_blocks = "", 0
    if left <= 0:
        what = "the weights alone" if weights > usable else "weights and activations"
        needed = weights if weights > usable else weights + activations
        reason = f"{what} take {_gib(needed)} of {_gib(usable)}"
    else:
        try:
            # Blocks of the CPU's pool that are never used cost nothing: the rule does not look at
            # the weights. What is said here to fit is there when all of it is used.
            num_blocks = config.num_blocks(
                [per_token], shape.max_len, left if memory.on_gpu else None
            )
            num_blocks = min(num_blocks, left // (config.block_size * per_token))
        except InvalidParameterError:
            num_blocks = 0
        if num_blocks < 2:
            num_blocks, reason = 0, f"{_gib(left)} are left for keys and values: no two blocks"
    return Fit(
        model=shape.name,
        precision=precision,
        weight_bytes=weights,
        kv_bytes_per_token=per_token,
        activation_bytes=activations,
        block_size=config.block_size,
        num_blocks=num_blocks,
        num_tokens=max(0, num_blocks - 1) * config.block_size,  # block 0 is never handed out
        reason=reason,
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB"
