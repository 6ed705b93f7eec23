"""The GPU kernels: which ones exist, which ones calibration rejected, and their compilation."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

from mlx_paged.extension import ext

OnKernel = Callable[[int, int], None]  # (number of kernels done, total)

# Host names of the kernels that never run. `reject_kernels` replaces the set, so read it as an
# attribute of this module.
rejected: frozenset[str] = frozenset()

#: Dtypes of plain pools, and of what layers compute in, as they are in the names of kernels.
DTYPE_NAMES = {mx.float32: "float32", mx.float16: "float16", mx.bfloat16: "bfloat16"}


def reject_kernels(host_names: Iterable[str]) -> None:
    """Replaces the set of GPU kernels that never run, by the names of metal/kernel_table.h.

    Calibration rejects kernels that are wrong, crash or are slower than another way on this
    machine. Attention then uses other kernels for the same rows. If none is left, and for writes,
    copies, adapters, greedy tokens, thresholds and masks, MLX's own operations take over
    (`plain_ops`). Steps with such kernels do not compile as a whole.
    """
    global rejected
    rejected = frozenset(host_names)
    ext.reject_kernels(sorted(rejected))


def allow_tensor_kernels(allowed: bool) -> None:
    """Lets kernels for tensor units (metal/tensor_*.h) run unless they are rejected.

    They never run before calibration has found that this machine compiles them.
    """
    ext.allow_tensor_kernels(allowed)


def kernel_files() -> dict[str, str]:
    """Returns every kernel of metal/ with the file that has it."""
    return {name: file for name, file, _ in ext.kernel_names()}


@dataclass(frozen=True)
class AttentionLayer:
    """A kind of attention layer, as far as it determines kernels.

    Attributes:
        group: Query heads per KV head.
        features: Bits of its options: window, soft cap, sinks, bounds, ALiBi.
        key_format, value_format: 0: plain; otherwise a quantized pool (csrc/pool_format.h).
    """

    dtype: str
    group: int
    key_dim: int
    value_dim: int
    features: int
    key_format: int
    value_format: int


def attention_layers() -> list[AttentionLayer]:
    """Returns the kinds of attention in graphs that this process has built."""
    return [AttentionLayer(*numbers) for numbers in ext.attention_layers()]


def attention_kernel(layer: AttentionLayer, rows: int) -> str:
    """Returns the GPU kernel for sequences with `rows` rows in a step; empty if there is none."""
    return ext.attention_kernel(
        getattr(mx, layer.dtype), layer.group, layer.key_dim, layer.value_dim, rows
    )


def allow_step_rows(num_rows: int) -> None:
    """Sets the maximum rows of a step that may run as a whole; see `executables`."""
    ext.allow_step_rows(num_rows)


MAX_ROWS = (1 << 31) - 1


class AllowedProduct(NamedTuple):
    """A kernel that may multiply this many rows, by the name of metal/kernel_table.h."""

    kernel: str
    min_rows: int
    max_rows: int  # MAX_ROWS: no limit

    def __str__(self) -> str:
        if self.max_rows == MAX_ROWS:
            rows = f"{self.min_rows} or more"
        elif self.max_rows > self.min_rows:
            rows = f"{self.min_rows} to {self.max_rows}"
        else:
            rows = str(self.min_rows)
        return f"{self.kernel} (rows: {rows})"


def allow_products(products: Iterable[AllowedProduct]) -> None:
    """Replaces the kernels that may multiply outside of whole steps on Apple's GPUs.

    MLX computes all other products there.
    """
    ext.allow_products(sorted(products))


def product_kernels(dtype: str, mode: str, bits: int, rows: int) -> list[str]:
    """Returns the GPU kernels that can multiply outside of whole steps, the preferred one first.

    Up to 16 rows it is the kernel of whole steps. Above them they are those for tensor units, if
    they are allowed. Rejected kernels are left out.

    Args:
        dtype: Dtype of the rows.
        mode: The weight's mode of `mx.quantize`.
        bits: Its bits; 0: a dense weight.
    """
    return ext.product_kernels(getattr(mx, dtype), mode, bits, rows)


def set_piece_tokens(num_tokens: int) -> None:
    """Sets the minimum tokens of context per work item of a decode on a GPU.

    Args:
        num_tokens: 0: the number built in (csrc/attention_plan.cpp).
    """
    ext.set_piece_tokens(num_tokens)


def compiles_kernels() -> bool:
    """True if GPU kernels are compiled on this machine on first use, as with Metal."""
    if os.environ.get("MLX_PAGED_SIM") == "1":
        return True
    is_metal = "metal" in ext.build_info()["backends"].split()
    return is_metal and mx.default_device() == mx.Device(mx.gpu)


def prepare_kernels(on_kernel: OnKernel | None = None) -> int:
    """Compiles every GPU kernel that later steps may need.

    Covers the kinds of attention used in graphs built by this process. On Metal, each kernel takes
    a fraction of a second.

    Args:
        on_kernel: Called with (number done, total) before each kernel and after the last.

    Returns:
        The number of kernels.
    """
    pipelines = ext.pipelines_to_come()
    for done, (name, function_constants) in enumerate(pipelines):
        if on_kernel is not None:
            on_kernel(done, len(pipelines))
        ext.prepare_pipeline(name, function_constants)
    if on_kernel is not None:
        on_kernel(len(pipelines), len(pipelines))
    return len(pipelines)
