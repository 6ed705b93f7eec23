"""Serves several models or replicas behind a router: validates options, divides memory."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from mlx_paged.cli.options import fields_of
from mlx_paged.cli.serve import access
from mlx_paged.cli.serve.model_options import ModelOptions
from mlx_paged.cli.serve.models import ServedModelOptions
from mlx_paged.cli.serve.one_model import OneModel
from mlx_paged.cli.serve.server_options import ServerOptions
from mlx_paged.cli.serve.several_options import SeveralOptions
from mlx_paged.errors import InvalidParameterError

if TYPE_CHECKING:
    from mlx_paged.server.router.spec import ModelSpec

_GIB = 1 << 30
_ENTRY = "mlx_paged.cli.serve.child"
# Default bytes of a model's KV cache, at most the budget divided by _KV_SHARE.
_KV_BYTES, _KV_SHARE = 4 * _GIB, 4
# Server options that the router passes on to the model processes.
_SHARED = (
    "read_timeout", "max_body_size", "max_body_memory", "max_logprobs", "request_timeout",
    "shutdown_timeout", "max_stored_responses", "max_stored_bytes", "strict_requests",
    "stream_interval", "stream_keepalive_deltas", "frontend_multiprocessing", "log_level",
    "log_format", "log_requests", "log_config", "otlp_traces_endpoint",
)  # fmt: skip


def run_several(
    models: Sequence[ServedModelOptions], server: ServerOptions, several: SeveralOptions
) -> int:
    """Serves models behind a router until a signal arrives; returns the exit status.

    Raises:
        InvalidParameterError: It names the option.
    """
    from mlx_paged.cli.serve.replicas import environments_of, with_shares
    from mlx_paged.engine.memory import default_budget, device_memory
    from mlx_paged.platform import Platform, is_cpu_default
    from mlx_paged.server import run
    from mlx_paged.server.config import ServerConfig
    from mlx_paged.server.rate_limits import keys_of
    from mlx_paged.server.router.service import RouterService
    from mlx_paged.server.router.spec import ModelSpec, check_names

    access.check(server)
    given = several.memory_budget
    budget = default_budget() if given is None else int(given * _GIB)
    if len(models) == 1 and not is_cpu_default():
        budget = device_memory()  # Each replica sizes its cache for its own device.
    shared = {name: getattr(server, name) for name in _SHARED}
    own = ServerOptions(**shared, serve_page=False, page_mcp=False, model_changes=False)
    specs: list[ModelSpec] = []
    for model in models:
        options = replace(model.options, served_model_names=list(model.names) or None)
        environments = environments_of(options)
        has_own_devices = len(environments) > 1 and not is_cpu_default()
        options = with_shares(options, has_own_devices=has_own_devices)
        if not (_is_sized(options) or (len(models) == 1 and has_own_devices)):
            kv_bytes = min(_KV_BYTES, budget // _KV_SHARE)
            if not has_own_devices:
                kv_bytes //= len(environments)
            options = replace(options, kv_cache_memory=kv_bytes)
        checked = OneModel.of(model.model, options, own)
        name, *aliases = checked.config.served_model_names
        specs.append(
            ModelSpec(
                name,
                model.model,
                tuple(aliases),
                kv_bytes=_kv_bytes(options),
                num_processes=options.num_ranks + server.frontend_multiprocessing,
                pinned=model.pinned or len(models) == 1,
                preload=model.preload,
                ttl=model.ttl,
                adapters=tuple(adapter for adapter, _ in checked.config.lora_modules),
                max_num_seqs=options.max_num_seqs,
                launch=pickle.dumps((model.model, options, own)),
                environments=environments,
                has_own_devices=has_own_devices,
            )
        )
    check_names(tuple(specs))
    specs = _chosen(specs, several)
    config = ServerConfig(
        **{**fields_of(ServerConfig, server), **access.config_fields(server)},
        served_model_names=tuple(spec.name for spec in specs),
    )
    keys_of(config)
    # On an NVIDIA GPU, even a process without a model takes some of its memory.
    has_cuda = Platform.current().has_cuda
    keeps_spare = not has_cuda if several.spare_process is None else several.spare_process

    def make_service(address: str) -> RouterService:
        return RouterService(
            specs, config, address, entry=_ENTRY, budget=budget, keeps_spare=keeps_spare
        )

    return run.serve(make_service, config, **access.listening(server))


def _chosen(specs: list[ModelSpec], several: SeveralOptions) -> list[ModelSpec]:
    """Applies --pin-model and --preload-model. By default, the first model is preloaded.

    Raises:
        InvalidParameterError: A name that no model has.
    """
    for index in _indices(specs, "pin_models", several.pin_models):
        specs[index] = replace(specs[index], pinned=True)
    for index in _indices(specs, "preload_models", several.preload_models):
        specs[index] = replace(specs[index], preload=True)
    if not any(spec.preload for spec in specs):
        specs[0] = replace(specs[0], preload=True)
    return specs


def _indices(specs: Sequence[ModelSpec], option: str, names: Sequence[str] | None) -> Iterator[int]:
    for name in names or ():
        found = [index for index, spec in enumerate(specs) if name in spec.names]
        if not found:
            known = ", ".join(spec.name for spec in specs)
            raise InvalidParameterError(option, f"the name of a model ({known})", name)
        yield found[0]


def _is_sized(options: ModelOptions) -> bool:
    """True if an option determines the size of the KV cache."""
    names = ("kv_cache_memory", "gpu_memory_utilization", "num_gpu_blocks_override")
    return any(getattr(options, name) is not None for name in names)


def _kv_bytes(options: ModelOptions) -> int:
    """Estimates the bytes of a KV cache; blocks are counted once the model is loaded."""
    from mlx_paged.engine.memory import device_memory
    from mlx_paged.platform import is_cpu_default

    if options.kv_cache_memory is not None:  # of each rank
        return options.kv_cache_memory * (options.num_ranks if is_cpu_default() else 1)
    if options.gpu_memory_utilization is not None:
        return int(options.gpu_memory_utilization * device_memory())
    return 0
