"""Options of the server, and defaults of request fields."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mlx_paged.engine.sampling_params import SamplingParams
from mlx_paged.errors import InvalidParameterError
from mlx_paged.gguf.reader import is_gguf, stem_of
from mlx_paged.model.config_files import GENERATION_CONFIG, read_generation_config
from mlx_paged.parsing import registry
from mlx_paged.server.sites import is_host

#: Maximum sequences (prompts x n, or x best_of) of one HTTP request.
MAX_SEQUENCES_PER_REQUEST = 256
#: Used fields of a generation config, as in vLLM; `max_new_tokens` limits every answer.
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
OVERRIDES = (*SAMPLING, "max_new_tokens")


#: Clients without a model name send this as `model`; it means the served one.
DEFAULT_MODEL = "default"
#: Ollama's clients may append this to a name.
DEFAULT_TAG = ":latest"
#: Default maximum bytes of a body.
MAX_BODY_SIZE = 16 << 20
#: The same for models with media, whose base64 takes four bytes for three. OpenAI's API allows 50
#: MB, Anthropic's 32. Parsing a body stalls all streams, one of 64 MiB for a fifth of a second.
MAX_MEDIA_BODY_SIZE = 48 << 20


@dataclass(frozen=True)
class ServerConfig:
    """Options of the server.

    Attributes:
        served_model_names: Names that requests may give as `model`; answers use the first.
        model: Path or hub id given to `serve`; requests may also give it as `model`.
        api_keys: Requests need one of these; if empty, none do.
        api_key_file: YAML file with further keys, which may have their own limits; None: no file.
        requests_per_minute: Maximum requests per key, or per address without keys; None means no
            limit.
        tokens_per_minute: Maximum tokens of prompts and answers per key; None means no limit.
        metrics_need_key: Require a key for `/metrics` and `/load`, too.
        chat_template: Jinja source that replaces the model's template.
        trust_request_chat_template: Accept `chat_template` from requests. It is code that runs in a
            sandbox without a time limit.
        tool_call_parser: The model's syntax of calls: a name of `parsing.registry`, "auto" to
            detect it by the template, or "none" to treat calls as text.
        enable_auto_tool_choice: Let models decide to call a tool.
        tool_template: Describe tools in a system message, and write calls as text, for templates
            that know no tools.
        generation_config: Source of the defaults of requests: "auto" for the model's own
            `generation_config.json`, "vllm" for none, or a directory that has one.
        override_generation_config: Entries that replace the source's.
        max_logprobs: Maximum alternatives that a request may ask for, at most 20.
        strict_requests: Refuse unknown fields instead of logging them.
        stream_interval: Tokens per streamed chunk, at most.
        stream_keepalive_deltas: Send empty events besides comments while a stream has nothing else,
            for clients that ignore comments.
        request_timeout: Seconds until an unfinished request ends with 422; None means no limit.
        read_timeout: Seconds for a client to send the head of a request, then its body, and for a
            reader of a stream to take a chunk.
        max_body_size: Maximum bytes of a body; None: `MAX_BODY_SIZE`, or `MAX_MEDIA_BODY_SIZE` if
            the model takes media.
        max_body_memory: Maximum bytes of the bodies of all unfinished requests, without the first
            MiB of each.
        max_stored_responses: Maximum responses kept for later requests; 0 keeps none.
        max_stored_bytes: Maximum bytes of those, as JSON.
        files_dir: Folder for clients' files and batches; None turns them off.
        max_file_size: Maximum bytes of a file.
        max_files_size: Maximum bytes of all files; reaching it stops uploads.
        max_batch_lines: Maximum lines of all batches in progress; None: a few more than the engine
            runs at once.
        shutdown_timeout: Seconds for running requests to finish after SIGTERM.
        allowed_origins: Origins of browser pages that may call the server ("*": any).
        allowed_hosts: Names and addresses of the server, besides its own address and localhost
            ("*": any). Checked on loopback, and elsewhere if there are any.
        root_path: Path under which a proxy serves this server.
        log_requests: Write one log line for each request.
        frontend_multiprocessing: True if the engine runs in its own process.
        priority_scheduling: True if the engine schedules by `priority`.
        otlp_traces_endpoint: URL of an OpenTelemetry collector that gets a span of each request;
            None: no collector.
        serve_page: Serve the chat page at `/`.
        mcp_config: File of MCP servers whose tools the page may use; None: no file.
        lora_modules: (name, path) of adapters that requests may name as their model.
        allow_runtime_lora_updating: Let requests load and unload adapters, from any directory.
        page_mcp: MCP servers (HTTP) that users add on the page: "off" refuses them, "public" allows
            public addresses, "private" also those of private networks and this machine.
        model_changes: Let clients fetch models from the hub, and remove them from its cache.
    """

    served_model_names: tuple[str, ...] = ("mlx-paged-demo",)
    model: str | None = None
    api_keys: tuple[str, ...] = ()
    api_key_file: str | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    metrics_need_key: bool = False
    chat_template: str | None = None
    trust_request_chat_template: bool = False
    tool_call_parser: str = "auto"
    enable_auto_tool_choice: bool = True
    tool_template: bool = False
    generation_config: str = "auto"
    override_generation_config: Mapping[str, Any] = field(default_factory=dict)
    max_logprobs: int = 20
    strict_requests: bool = False
    stream_interval: int = 1
    stream_keepalive_deltas: bool = False
    request_timeout: float | None = None
    read_timeout: float = 60.0
    max_body_size: int | None = None
    max_body_memory: int = 1 << 30
    max_stored_responses: int = 1024
    max_stored_bytes: int = 64 << 20
    files_dir: str | None = None
    max_file_size: int = 200 << 20
    max_files_size: int = 10 << 30
    max_batch_lines: int | None = None
    shutdown_timeout: float = 30.0
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    root_path: str = ""
    log_requests: bool = True
    frontend_multiprocessing: bool = False
    priority_scheduling: bool = False
    otlp_traces_endpoint: str | None = None
    serve_page: bool = True
    mcp_config: str | None = None
    lora_modules: tuple[tuple[str, str], ...] = ()
    allow_runtime_lora_updating: bool = False
    page_mcp: Literal["off", "public", "private"] = "off"
    model_changes: bool = False

    def __post_init__(self) -> None:
        names = ("auto", "none", *registry.names())
        if self.tool_call_parser not in names:
            raise InvalidParameterError(
                "tool_call_parser", f"one of {', '.join(names)}", self.tool_call_parser
            )
        for host in self.allowed_hosts:
            if host != "*" and not is_host(host):
                raise InvalidParameterError(
                    "allowed_hosts",
                    "names or addresses without scheme and port, such as llm.example.com, or '*'",
                    host,
                )

    @property
    def needs_key(self) -> bool:
        """True if requests need a key."""
        return bool(self.api_keys) or self.api_key_file is not None

    @property
    def model_name(self) -> str:
        """The name in answers."""
        return self.served_model_names[0]

    def served_name(self, model: str) -> str | None:
        """Returns the served name that a request means.

        Args:
            model: A served name, the path or id given to `serve`, or "default".

        Returns:
            None if it means no model of this server.
        """
        if model in self.served_model_names:
            return model
        return self.model_name if model in self.reserved_names else None

    @property
    def reserved_names(self) -> set[str]:
        """All names that requests may give the model itself."""
        names = {*self.served_model_names, DEFAULT_MODEL}
        if self.model is not None:
            names |= {self.model, str(Path(self.model).resolve())}
        return names


def default_model_name(model: str | None) -> str:
    """Returns the default model name: its directory's or file's name, or its hub id."""
    if model is None:
        return "mlx-paged-demo"
    path = Path(model)
    if is_gguf(path):
        return stem_of(path)
    return path.resolve().name if path.is_dir() else model


@dataclass(frozen=True)
class GenerationDefaults:
    """Defaults of requests.

    Attributes:
        sampling: Fields of `SamplingParams` for requests without them.
        max_new_tokens: Maximum tokens of any answer; None means that only the context limits.
    """

    sampling: Mapping[str, Any] = field(default_factory=dict)
    max_new_tokens: int | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> GenerationDefaults:
        """Returns the defaults of a generation config; its other entries are not for requests.

        Raises:
            InvalidParameterError: A value that `SamplingParams` refuses.
        """
        sampling = {name: config[name] for name in SAMPLING if config.get(name) is not None}
        limit = config.get("max_new_tokens")
        try:
            SamplingParams(**sampling, max_tokens=limit)
        except InvalidParameterError as error:
            name = "max_new_tokens" if error.field == "max_tokens" else error.field
            raise InvalidParameterError(
                f"{name} of the generation config", error.expected, error.actual
            ) from error
        return cls(sampling, limit)


def generation_config_of(source: str) -> dict[str, Any] | None:
    """Loads the source that ``--generation-config`` names.

    Args:
        source: "auto" for the model's own, "vllm" for none, or a directory that has one.

    Returns:
        None for the model's own.

    Raises:
        InvalidParameterError: The file does not exist, or cannot be read.
    """
    if source == "auto":
        return None
    if source == "vllm":
        return {}
    directory = Path(source)
    if not (directory / GENERATION_CONFIG).is_file():
        expected = f"'auto', 'vllm' or a directory that has a {GENERATION_CONFIG}"
        raise InvalidParameterError("generation_config", expected, source)
    return read_generation_config(directory)


def overrides_of(given: str) -> dict[str, Any]:
    """Parses ``--override-generation-config``.

    Raises:
        InvalidParameterError: It is not a JSON object, or has an unknown entry.
    """
    try:
        found = json.loads(given)
    except ValueError:
        found = None
    name = "override_generation_config"
    if not isinstance(found, dict):
        raise InvalidParameterError(name, "a JSON object", given)
    unknown = sorted(found.keys() - set(OVERRIDES))
    if unknown:
        raise InvalidParameterError(name, f"of {', '.join(OVERRIDES)}", unknown[0])
    GenerationDefaults.of(found)
    return found
