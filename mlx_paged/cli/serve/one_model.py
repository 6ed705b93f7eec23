"""OneModel: validates the options of one model and serves it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_paged.cli.options import fields_of
from mlx_paged.cli.serve import access
from mlx_paged.cli.serve.model_options import ModelOptions
from mlx_paged.cli.serve.server_options import ServerOptions
from mlx_paged.errors import InvalidParameterError
from mlx_paged.extras import needs_extra

if TYPE_CHECKING:
    from mlx_paged.engine.client import EngineClient
    from mlx_paged.server.config import ServerConfig
    from mlx_paged.server.engine_service import EngineService
    from mlx_paged.server.router.link import RouterLink

# Options of `EngineConfig` that are mappings.
_JSON_OBJECTS = (
    "hf_overrides", "limit_mm_per_prompt", "media_io_kwargs", "mm_processor_kwargs", "media_limits",
    "speculative_config",
)  # fmt: skip


@dataclass(frozen=True)
class OneModel:
    """A model with validated options.

    Attributes:
        model: Directory, GGUF file or hub id; None: the embedded model.
        engine: Options of its engine.
        config: Options of a server that has this model alone.
        sampling: Sampling defaults in place of the model's own; None: its own.
        log: Arguments of `logs.configure`.
    """

    model: str | None
    dtype: str
    engine: Mapping[str, Any]
    config: ServerConfig
    sampling: Mapping[str, Any] | None
    log: tuple[str, str, Path | None]

    @classmethod
    def of(cls, model: str | None, options: ModelOptions, server: ServerOptions) -> OneModel:
        """Checks the options.

        Raises:
            InvalidParameterError: It names the option.
        """
        from mlx_paged.engine.config import EngineConfig
        from mlx_paged.server.config import generation_config_of
        from mlx_paged.server.lora_modules import lora_modules_of

        engine = fields_of(EngineConfig, options)
        engine["pooler_config"] = _pooler_config(options)
        engine["kv_cache_dtype_skip_layers"] = options.kv_cache_dtype_skip_layers or ()
        for name in _JSON_OBJECTS:
            engine[name] = _json_object(name, getattr(options, name))
        modules = lora_modules_of(options.lora_modules or ())
        if modules and not options.enable_lora:
            expected = "given with --enable-lora"
            raise InvalidParameterError("lora_modules", expected, options.lora_modules)
        engine["warm_up_loras"] = tuple(module.path for module in modules)
        checked = EngineConfig(**engine)
        if options.max_model_len is not None:
            checked.scheduler_config(options.max_model_len)
        config = _server_config(model, options, server)
        sampling = generation_config_of(options.generation_config)
        log = server.log_level, server.log_format, server.log_config
        return cls(model, options.dtype, engine, config, sampling, log)

    def run(self, server: ServerOptions, link: RouterLink | None = None) -> int:
        """Serves it alone; returns the exit status. See `server.run.serve`.

        Args:
            link: Connects this process to its router; None: there is none.
        """
        from mlx_paged.server import run

        return run.serve(
            partial(self.service, link=link),
            self.config,
            **access.listening(server),
            is_behind_router=link is not None,
        )

    def service(self, address: str, link: RouterLink | None = None) -> EngineService:
        """Starts the engine and returns the service for `server.run`.

        Args:
            address: The address that the server listens on.
        """
        from mlx_paged.server.engine_service import EngineService

        return EngineService(self._start_engine(), self.config, address, link)

    def _start_engine(self) -> EngineClient:
        from mlx_paged.cli.progress import kernel_bar
        from mlx_paged.engine.async_engine import AsyncEngine
        from mlx_paged.engine.process.client import ProcessEngine

        given = {"dtype": self.dtype, "generation_config": self.sampling, **self.engine}
        given["make_on_kernel"] = kernel_bar
        if not self.config.frontend_multiprocessing:
            return AsyncEngine.from_model(self.model, **given)
        prepare = partial(prepare_engine_process, *self.log)
        return ProcessEngine.from_model(self.model, prepare=prepare, **given)


def prepare_engine_process(level: str, style: str, file: Path | None) -> None:
    """Prepares an engine's process as the command line prepares its own."""
    from mlx_paged import unpatch
    from mlx_paged.cli import transformers_import
    from mlx_paged.server import logs

    transformers_import.arrange()
    unpatch()
    logs.configure(level, style, file)


def _server_config(model: str | None, options: ModelOptions, server: ServerOptions) -> ServerConfig:
    from mlx_paged.server.config import ServerConfig, default_model_name, overrides_of
    from mlx_paged.server.lora_modules import lora_modules_of
    from mlx_paged.server.rate_limits import keys_of

    access.check(server)
    config = ServerConfig(
        **{
            **fields_of(ServerConfig, options),
            **fields_of(ServerConfig, server),
            **access.config_fields(server),
            "served_model_names": tuple(options.served_model_names or (default_model_name(model),)),
            "model": model,
            "chat_template": _template(options.chat_template),
            "override_generation_config": overrides_of(options.override_generation_config),
            "priority_scheduling": options.policy == "priority",
            "lora_modules": lora_modules_of(options.lora_modules or ()),
        }
    )
    keys_of(config)
    if server.otlp_traces_endpoint is not None:
        with needs_extra("otel", "--otlp-traces-endpoint"):
            from mlx_paged.server.tracing import checked_endpoint
        checked_endpoint(server.otlp_traces_endpoint)
    return config


def _pooler_config(options: ModelOptions) -> dict[str, Any] | None:
    """Combines the options for pooling; None if there are none."""
    found = _json_object("pooler_config", options.pooler_config) or {}
    if options.pooling_type is not None:
        found["pooling_type"] = options.pooling_type
    if options.pooling_normalize is not None:
        found["normalize"] = options.pooling_normalize == "true"
    return found or None


def _json_object(name: str, given: str | None) -> dict[str, Any] | None:
    if given is None:
        return None
    try:
        found = json.loads(given)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise InvalidParameterError(name, "a JSON object", given)
    return found


def _template(given: str | None) -> str | None:
    """Returns a template's source: the content of a file, or the text itself."""
    if given is None or "{" in given:
        return given
    try:
        return Path(given).read_text()
    except OSError as error:
        raise InvalidParameterError(
            "chat_template", f"a Jinja file or source ({error.strerror})", given
        ) from error
