"""The formats of the KV cache, by their names in `--kv-cache-dtype`.

`mlx_paged.ops` describes the layout of their pools. This module does not load MLX.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from mlx_paged.errors import InvalidParameterError

_GROUP = 32  # dims that share a scale and a minimum in 4 bits


class PoolFormat(StrEnum):
    """The format of a quantized pool. Its value is the pool's dtype, by which ops recognize it."""

    INT8 = "int8"  # one scale per token and head
    INT4 = "uint32"  # a scale and a minimum for each group of 32 dims
    FP8 = "uint8"  # e4m3, no scales

    def row_bytes(self, head_dim: int) -> int:
        """Returns the bytes of one token and head, its scales included."""
        if self is PoolFormat.INT8:
            return head_dim + 2
        if self is PoolFormat.INT4:
            return head_dim // 2 + 4 * -(-head_dim // _GROUP)
        return head_dim


@dataclass(frozen=True)
class KVFormat:
    """The formats of a layer's two pools."""

    name: str
    keys: PoolFormat
    values: PoolFormat


INT8 = KVFormat("int8", PoolFormat.INT8, PoolFormat.INT8)
INT8_K_INT4_V = KVFormat("int8_k_int4_v", PoolFormat.INT8, PoolFormat.INT4)
INT4 = KVFormat("int4", PoolFormat.INT4, PoolFormat.INT4)
FP8 = KVFormat("fp8", PoolFormat.FP8, PoolFormat.FP8)

AUTO = "auto"  # the dtype that the model computes in
SLIDING_WINDOW = "sliding_window"  # all layers with a window, see `skipped_layers`
FORMATS = {f.name: f for f in (INT8, INT8_K_INT4_V, INT4, FP8)}
# vLLM's names, and a shorter one.
_ALIASES = {
    "k8v4": INT8_K_INT4_V,
    "int8_per_token_head": INT8,
    "fp8_e4m3": FP8,
}
NAMES = (AUTO, *FORMATS, *_ALIASES)


def format_named(name: object) -> KVFormat | None:
    """Returns the format named by `--kv-cache-dtype`; None for "auto", which stores them
    unquantized.

    Raises:
        InvalidParameterError: Any other name.
    """
    if not isinstance(name, str) or name not in NAMES:
        raise InvalidParameterError("kv_cache_dtype", f"one of {', '.join(NAMES)}", name)
    return FORMATS.get(name) or _ALIASES.get(name)


def skipped_layers(layers: object) -> tuple[int | str, ...]:
    """Checks numbers of layers; "sliding_window" means all layers with a window.

    Args:
        layers: From `--kv-cache-dtype-skip-layers`: integers, or strings of them as in vLLM.

    Raises:
        InvalidParameterError: Anything else.
    """
    expected = f"layers, by number from 0, or {SLIDING_WINDOW!r}"
    if not isinstance(layers, (list, tuple)):
        raise InvalidParameterError("kv_cache_dtype_skip_layers", f"a list of {expected}", layers)
    skipped: list[int | str] = []
    for layer in layers:
        if isinstance(layer, str) and layer.isdecimal():
            layer = int(layer)
        is_number = isinstance(layer, int) and not isinstance(layer, bool) and layer >= 0
        if not is_number and layer != SLIDING_WINDOW:
            raise InvalidParameterError("kv_cache_dtype_skip_layers", expected, layer)
        skipped.append(layer)
    return tuple(skipped)
