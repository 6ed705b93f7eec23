"""Runs cases: checks each, times it beside its peers and a copy, and makes rows of results."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx

from mlx_paged import extension
from mlx_paged.cli.bench.environment import memory_bytes
from mlx_paged.cli.bench.kernels import attention, layers, movement
from mlx_paged.cli.bench.kernels.cases import LAYER, Case, refusal
from mlx_paged.cli.bench.kernels.data import PoolCache, key_of
from mlx_paged.cli.bench.kernels.timing import (
    COPY,
    MOST_OUTPUT_BYTES,
    Copy,
    Timing,
    interleaved,
)
from mlx_paged.cli.bench.kernels.work import OURS, Checked, Work
from mlx_paged.errors import BackendUnavailableError, MlxPagedError

# Of memory that is there, what pools and dense copies may take.
_MOST_MEMORY = 0.6

_ON_POOLS = {
    "paged_attention": attention.attention,
    "write_kv": movement.write_kv,
    "copy_blocks": movement.copy_blocks,
    "gather_kv": movement.gather_kv,
}


@dataclass(frozen=True)
class Settings:
    """How cases are measured.

    Attributes:
        rounds: samples of each variant.
        past_cache: bytes that launches read before they read the same again.
        seed: of inputs and block tables.
    """

    rounds: int = 9
    past_cache: int = 256 << 20
    seed: int = 0


def use_device(name: str | None) -> str:
    """Makes "cpu" or "gpu" MLX's default device; None: the best that this build serves.

    Returns:
        "cpu" or "gpu".
    """
    if name is None:
        extension.use_supported_device()
    elif name == "cpu":
        mx.set_default_device(mx.cpu)
    else:
        backends = extension.build_info()["backends"]
        if not mx.is_available(mx.gpu):
            raise BackendUnavailableError("gpu", "MLX finds no GPU on this machine")
        if not {"metal", "cuda"} & set(backends.split()):
            raise BackendUnavailableError(
                "gpu", f"this build of mlx_paged has kernels for {backends} only"
            )
        mx.set_default_device(mx.gpu)
    return "gpu" if mx.default_device() == mx.Device(mx.gpu) else "cpu"


def gpu_head_dims() -> set[int]:
    """Head dims, the same for keys and values, that the GPU kernels are made for."""
    dims = set()
    for host_name, _, _ in extension.ext.kernel_names():
        if host_name.startswith("paged_decode_") and not host_name.startswith("paged_decode_m"):
            _, _, _, key_dim, value_dim, _ = host_name.split("_")
            if key_dim == value_dim:
                dims.add(int(key_dim))
    return dims


def device_memory(device: str) -> int | None:
    """Bytes that arrays of a device may be in; None where nobody tells."""
    if device == "gpu":
        info = mx.device_info()  # type: ignore[attr-defined]
        for name in ("memory_size", "total_memory"):  # of Metal and of CUDA
            if name in info:
                return int(info[name])
    return memory_bytes()


def divide(cases: Sequence[Case], device: str) -> tuple[list[Case], list[dict[str, Any]]]:
    """Cases that the backend serves, and the others with their ``reason``."""
    dims = gpu_head_dims()
    memory = device_memory(device)
    limit = None if memory is None else int(_MOST_MEMORY * memory)
    served, refused = [], []
    for case in cases:
        reason = refusal(case, device, dims, limit)
        if reason is None:
            served.append(case)
        else:
            refused.append({**asdict(case), "reason": reason})
    return served, refused


def measure(
    cases: Sequence[Case],
    device: str,
    settings: Settings,
    on_case: Callable[[Case, dict[str, Any] | None], None] = lambda case, row: None,
) -> list[dict[str, Any]]:
    """Rows of results, a case each.

    Args:
        on_case: told of each case when it begins (with None) and when it is done.

    Raises:
        WrongResultError: an op's result is not what it should be.
    """
    copy, pools, rows = Copy(device), PoolCache(), []
    for case in cases:
        on_case(case, None)
        try:
            row = _measure(case, device, copy, pools, settings)
        except (ValueError, RuntimeError) as error:
            if isinstance(error, MlxPagedError):
                raise
            raise MlxPagedError(f"{case}: {error}") from error
        rows.append(row)
        on_case(case, row)
        gc.collect()
    return rows


def _measure(
    case: Case, device: str, copy: Copy, pools: PoolCache, settings: Settings
) -> dict[str, Any]:
    if case.op in LAYER:
        work = layers.layer_op(case, settings.past_cache, settings.seed)
    else:
        data = pools.get(key_of(case, settings.past_cache, settings.seed))
        work = _ON_POOLS[case.op](case, data, settings.past_cache, settings.seed)
    checked = work.check()
    timings = interleaved(
        [*work.variants, copy.variant],
        settings.rounds,
        most_output_bytes=min(MOST_OUTPUT_BYTES[device], (device_memory(device) or 0) // 8 or 1),
    )
    return _row(case, work, checked, timings, copy.bytes)


def _row(
    case: Case, work: Work, checked: Checked, timings: dict[str, Timing], copy_bytes: int
) -> dict[str, Any]:
    ours, copy = timings[OURS], timings[COPY]
    return {
        **asdict(case),
        "bytes": work.bytes,
        "flops": work.flops,
        "seconds": ours.to_json(),
        "bytes_per_second": work.bytes / ours.median,
        "copy_bytes_per_second": copy_bytes / copy.median,
        "share_of_copy": work.bytes / copy_bytes * copy.over(ours),
        "max_relative_error": checked.max_relative_error,
        "checked": [checked.rows, checked.of],
        "peers": {
            name: {
                "seconds": timing.to_json(),
                "over_ours": timing.over(ours),
                "max_relative_error": checked.peers[name],
            }
            for name, timing in timings.items()
            if name not in (OURS, COPY)
        },
    }
