"""Divides the devices, or cores and memory, of this machine among the replicas of a model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from mlx_paged.cli.serve.model_options import ModelOptions
from mlx_paged.engine.ranks.launch import THREADS, launched_rank, threads_of, visible_gpus
from mlx_paged.errors import InvalidParameterError
from mlx_paged.platform import Platform

_FIELD = "data_parallel_size"


def environments_of(options: ModelOptions) -> tuple[Mapping[str, str], ...]:
    """Returns the environment variables for each replica's process; none for a single one.

    Raises:
        InvalidParameterError: This machine cannot run the replicas.
    """
    size, num_ranks = options.data_parallel_size, options.num_ranks
    if size == 1:
        return ({},)
    if launched_rank() is not None:
        raise InvalidParameterError(_FIELD, "1 under mlx.launch", size)
    if options.allow_runtime_lora_updating:
        expected = "1 with --allow-runtime-lora-updating, which changes one replica only"
        raise InvalidParameterError(_FIELD, expected, size)
    if options.role == "prefill":
        expected = "1 with --role prefill, which listens on one address"
        raise InvalidParameterError(_FIELD, expected, size)
    platform = Platform.current()
    if platform.on_cpu:
        return ({} if THREADS in os.environ else {THREADS: threads_of(size * num_ranks)},) * size
    if not platform.has_cuda:
        raise InvalidParameterError(_FIELD, "1 on a Mac, whose GPU is one device", size)
    devices = visible_gpus()
    if len(devices) < size * num_ranks:
        ranks = "" if num_ranks == 1 else f" with {num_ranks} for the ranks of each"
        expected = f"at most {len(devices) // num_ranks}, as {len(devices)} GPUs are visible{ranks}"
        raise InvalidParameterError(_FIELD, expected, size)
    return tuple(
        {"CUDA_VISIBLE_DEVICES": ",".join(devices[first : first + num_ranks])}
        for first in range(0, size * num_ranks, num_ranks)
    )


def with_shares(options: ModelOptions, *, has_own_devices: bool) -> ModelOptions:
    """Returns the options of each replica, with its share of the memory.

    Options in bytes or blocks apply to each replica as they are.
    """
    share = options.gpu_memory_utilization
    if share is None or has_own_devices:
        return options
    return replace(options, gpu_memory_utilization=share / options.data_parallel_size)
