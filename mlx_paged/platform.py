"""Platform: capabilities of MLX's default device, queried once when a model is loaded.

They do not change while a model is served, so a step reads them here instead of asking the device.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass, field

import mlx.core as mx

from mlx_paged import executables, extension, ops

# MLX raises plain RuntimeErrors; its allocators and drivers use these words.
_OUT_OF_MEMORY = (
    "unable to allocate",
    "cannot allocate",
    "bad_alloc",
    "attempting to allocate",
    "out of memory",
    "outofmemory",
    "insufficient memory",
    "memory allocation failed",
)


@dataclass(frozen=True, slots=True)
class Platform:
    """The device that a model runs on.

    Attributes:
        on_cpu: True if MLX's default device is the CPU.
        has_cuda: True if it is an NVIDIA GPU and this build has kernels for it.
        plans_for_gpu: True if attention is planned for GPU kernels: on a GPU, or in the Metal
            simulator.
        simd: Instruction set of the CPU kernels.
        activations: Formats to which linear layers can round their inputs; see `ops.activations`.
        max_cpu_step_rows: Maximum rows per step for `executables.CpuExecutable`; 0 if unsupported.
        max_gpu_step_rows: Maximum rows per step for `executables.GpuExecutable`; 0 if unsupported.
        pinned_uploads: True if `ops.upload` sends arrays from pinned memory, where they may stay.
        native_dtypes: Dtypes that `ops.linear` multiplies natively on this device.
        repeats_steps: True if the GPU replays whole steps of equal shape. The arrays of a plan
            should then keep their sizes while contexts grow.
    """

    on_cpu: bool
    has_cuda: bool
    plans_for_gpu: bool
    simd: str
    activations: tuple[str, ...]
    max_cpu_step_rows: int
    max_gpu_step_rows: int
    pinned_uploads: bool
    native_dtypes: tuple[mx.Dtype, ...]
    repeats_steps: bool = field(init=False)

    @classmethod
    def current(cls) -> Platform:
        """Queries MLX's current default device."""
        on_cpu, has_cuda = is_cpu_default(), ops.has_cuda()
        return cls(
            on_cpu=on_cpu,
            has_cuda=has_cuda,
            plans_for_gpu=not on_cpu or os.environ.get("MLX_PAGED_SIM") == "1",
            simd=extension.ext.build_info()["simd"],
            activations=tuple(ops.activations()),
            max_cpu_step_rows=executables.max_cpu_step_rows(),
            max_gpu_step_rows=executables.max_gpu_step_rows(),
            pinned_uploads=has_cuda,
            native_dtypes=(mx.float32,) if on_cpu else (mx.float16, mx.bfloat16),
        )

    @property
    def max_exact_rows(self) -> int | None:
        """Maximum rows of a step in which each row has the bits that it has alone; None: any."""
        return ops.max_product_rows() if self.has_cuda else None

    @property
    def draws_screen(self) -> bool:
        """True on an Apple GPU, which also draws the screen."""
        return not self.on_cpu and not self.has_cuda

    def __post_init__(self) -> None:
        repeats = self.has_cuda or self.max_gpu_step_rows > 0
        object.__setattr__(self, "repeats_steps", repeats)


def is_cpu_default() -> bool:
    """True if MLX's default device is the CPU now. For code outside of a served model."""
    return mx.default_device() == mx.Device(mx.cpu)


def has_kernels() -> bool:
    """True if this build has kernels for MLX's default device."""
    backends = set(extension.ext.build_info()["backends"].split())
    return is_cpu_default() or bool({"metal", "cuda"} & backends)


def has_gpu_kernels() -> bool:
    """True if MLX's default device is a GPU for which this build has kernels, or simulated."""
    simulated = os.environ.get("MLX_PAGED_SIM") == "1"
    return simulated or (not is_cpu_default() and has_kernels())


def use_supported_device() -> None:
    """Sets MLX's default device to the CPU if this build has no kernels for the GPU.

    Warns, because otherwise a slow run on a Mac would have no visible cause.
    """
    if not has_kernels():
        warnings.warn(
            "this build of mlx_paged has no GPU kernels; MLX's default device is now the CPU. "
            "For NVIDIA GPUs run in its checkout: "
            "MLX_PAGED_CUDA=ON pip install --force-reinstall --no-deps .",
            RuntimeWarning,
            stacklevel=3,
        )
        mx.set_default_device(mx.cpu)


def is_out_of_memory(error: BaseException) -> bool:
    """Returns True if MLX could not allocate memory. A smaller computation may still run."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(words in text for words in _OUT_OF_MEMORY)
