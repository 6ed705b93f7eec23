"""ServedModel: one model of the server and everything that its requests need."""

from __future__ import annotations

import asyncio
import copy
import logging

from mlx_paged.content import KINDS, Kind
from mlx_paged.engine.client import EngineClient, EngineInfo
from mlx_paged.engine.lora.request import LoRARequest
from mlx_paged.engine.media import IoOptions
from mlx_paged.engine.stats import EngineStats
from mlx_paged.parsing import registry
from mlx_paged.parsing.derived import why_not_derived
from mlx_paged.parsing.format import ToolFormat
from mlx_paged.parsing.hermes import HermesFormat
from mlx_paged.parsing.reasoning import ReasoningFormat
from mlx_paged.server.config import (
    MAX_BODY_SIZE,
    MAX_MEDIA_BODY_SIZE,
    GenerationDefaults,
    ServerConfig,
)
from mlx_paged.server.conversation import Renderer
from mlx_paged.server.errors import ApiError
from mlx_paged.server.lora_modules import LoraModule, LoraModules
from mlx_paged.server.metrics import Metrics
from mlx_paged.server.responses_api.store import ResponseStore

logger = logging.getLogger(__name__)


class ServedModel:
    """One model of the server: its engine, its formats, its defaults and its stored responses.

    Args:
        engine: The caller shuts it down.
        config: The server's options.

    Attributes:
        names: Names that requests may use; responses use the first.
        response_store: Stored responses that later requests may continue.
        defaults: Defaults for omitted fields, from the model's generation config.
        failure: Why the engine could not be started; None otherwise.
        tool_format: The model's tool-call syntax; None if unknown or disabled.
        no_tool_format: Why `tool_format` is None; "" otherwise.
        reasoning_format: The model's reasoning markers; None if it has none.
        lora_modules: Its adapters.
        lora_request: Adapter of the requests; None: the base model.
    """

    def __init__(self, engine: EngineClient, config: ServerConfig) -> None:
        self.engine = engine
        self.names = config.served_model_names
        self.response_store = ResponseStore(config.max_stored_responses, config.max_stored_bytes)
        self.defaults = GenerationDefaults()
        self.failure: Exception | None = None
        self.tool_format: ToolFormat | None = None
        self.no_tool_format = ""
        self.reasoning_format: ReasoningFormat | None = None
        self.lora_modules = LoraModules(engine, config.reserved_names)
        self.lora_request: LoRARequest | None = None
        self._config = config
        self._renderer: Renderer | None = None
        self._ready = asyncio.Event()

    @property
    def name(self) -> str:
        """The name in answers."""
        return self.names[0]

    @property
    def is_loaded(self) -> bool:
        """True if the engine was ever ready."""
        return self._renderer is not None

    @property
    def is_dead(self) -> bool:
        """True if the engine could not be started, or has stopped."""
        return self.failure is not None or not self.engine.is_alive

    async def start(self, metrics: Metrics) -> None:
        """Waits for the engine, then sets up what depends on it. Sets `failure` on error."""
        try:
            await self.engine.ready()
            info = self.engine.info
            self.defaults = GenerationDefaults.of(
                {**info.generation_config, **self._config.override_generation_config}
            )
            stats = await self.engine.stats()
            renderer = Renderer(
                self.engine.tokenizer,
                self._config,
                info.max_request_len,
                info.vocab_size,
                None if self.engine.media is None else self.engine.media_prompts,
                info.media_reason,
            )
            await self.lora_modules.load_all(LoraModule(*m) for m in self._config.lora_modules)
            metrics.attach(self.engine, self.name, stats)
            self.tool_format = _tool_format(self._config, renderer)
            if self.tool_format is None:
                self.no_tool_format = _no_tool_format(self._config, renderer)
            self.reasoning_format = info.reasoning_format
            _log_capacity(info, stats)
            self._renderer = renderer
        except Exception as error:
            self.failure = error
        finally:
            self._ready.set()

    async def started_or_failed(self) -> None:
        """Waits until `start` has ended."""
        await self._ready.wait()

    def close(self) -> None:
        """Ends the tokenizer's threads."""
        if self._renderer is not None:
            self._renderer.close()

    # Once it is loaded.

    def with_adapter(self, lora_request: LoRARequest) -> ServedModel:
        """Returns this model with an adapter, for one request."""
        adapted = copy.copy(self)
        adapted.lora_request = lora_request
        return adapted

    @property
    def info(self) -> EngineInfo:
        """Properties of its engine."""
        return self.engine.info

    @property
    def renderer(self) -> Renderer:
        """Tokenizer and chat template."""
        assert self._renderer is not None
        return self._renderer

    @property
    def num_processes(self) -> int:
        """Number of processes that serve it: the ranks, and this one if the engine is separate."""
        return self.info.config.num_ranks + self._config.frontend_multiprocessing

    @property
    def media_io(self) -> IoOptions:
        """How to read media if a request does not say."""
        return self.info.config.media_options.io

    @property
    def media_kinds(self) -> tuple[Kind, ...]:
        """Kinds of media that requests may contain."""
        media, options = self.engine.media, self.info.config.media_options
        kinds = () if media is None else media.kinds
        return tuple(kind for kind in KINDS if kind in kinds and options.max_items(kind))

    @property
    def input_modalities(self) -> tuple[str, ...]:
        """Kinds of input: text, and media."""
        return ("text", *self.media_kinds)

    @property
    def max_body_size(self) -> int:
        """Maximum bytes of a body."""
        if self._config.max_body_size is not None:
            return self._config.max_body_size
        return MAX_BODY_SIZE if self.engine.media is None else MAX_MEDIA_BODY_SIZE

    def check_runner(self, runner: str, path: str) -> None:
        """Refuses a request for another kind of engine.

        Raises:
            ApiError: 400.
        """
        own = self.info.config.runner
        if own != runner:
            does = {"generate": "generates text", "pooling": "embeds texts"}[own]
            raise ApiError(
                400,
                f"{path} needs a server started with --runner {runner}: this one {does}",
                code="wrong_runner",
            )


def _tool_format(config: ServerConfig, renderer: Renderer) -> ToolFormat | None:
    if config.tool_template:
        return HermesFormat(renderer.added_tokens)  # The template shows this syntax.
    if config.tool_call_parser == "auto":
        return registry.detect(renderer.chat_template, renderer.added_tokens)
    if config.tool_call_parser == "none":
        return None
    name, added = config.tool_call_parser, renderer.added_tokens
    return registry.format_of(name, added, renderer.chat_template)


def _no_tool_format(config: ServerConfig, renderer: Renderer) -> str:
    """Returns why the model's tool-call syntax is unknown."""
    if config.tool_call_parser == "none":
        return "--tool-call-parser is none"
    if not renderer.renders_tools:
        return "the chat template has no place for tools"
    reason = why_not_derived(renderer.chat_template, renderer.added_tokens)
    return f"no listed format fits the chat template, and none can be derived: {reason}"


def _log_capacity(info: EngineInfo, stats: EngineStats) -> None:
    """Logs the size of the KV cache, in vLLM's terms."""
    block_size, num_blocks = info.config.block_size, stats.usage.num_usable_blocks
    limit, model_len = info.max_request_len, info.max_model_len
    # The last token of an answer needs no slot.
    at_once = num_blocks / max(1, -(-(limit - 1) // block_size))
    logger.info("KV cache size: %s tokens", f"{num_blocks * block_size:,}")
    if info.config.max_step_time_ms:
        limit_ms = info.config.max_step_time_ms
        logger.info("Steps with prompts: at most about %g ms (--max-step-time-ms)", limit_ms)
    logger.info("Maximum concurrency for %s tokens per request: %.2fx", f"{limit:,}", at_once)
    if model_len is not None and limit < model_len:
        logger.warning(
            "the KV cache is smaller than the context: requests may have at most %s tokens, not "
            "%s; --kv-cache-memory, --gpu-memory-utilization or --num-gpu-blocks-override makes it "
            "larger, --max-model-len the context shorter",
            f"{limit:,}",
            f"{model_len:,}",
        )
