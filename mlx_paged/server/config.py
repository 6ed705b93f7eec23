"""Options of the server, and defaults of request fields."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mlx_paged.engine.sampling_params import SamplingParams
from mlx_paged.errors import InvalidParameterError
from mlx_paged.model.config_files import GENERATION_CONFIG, read_generation_config
from mlx_paged.parsing import registry
from mlx_paged.server.sites import is_host

#: Most sequences (prompts x n, or x best_of) that one HTTP request may start.
MAX_SEQUENCES_PER_REQUEST = 256
#: What is used of a generation config, as in vLLM; `max_new_tokens` limits every answer.
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
OVERRIDES = (*SAMPLING, "max_new_tokens")


#: What clients give as `model` that know no name: the one that is served.
DEFAULT_MODEL = "default"
#: Most bytes of a body where nothing is said.
MAX_BODY_SIZE = 16 << 20
#: Likewise with media, whose base64 takes four bytes for three: OpenAI's API takes 50 MB, and
#: Anthropic's 32. (Parsing a body holds up all streams, one of 64 MiB for a fifth of a second.)
MAX_MEDIA_BODY_SIZE = 48 << 20


@dataclass(frozen=True)
class ServerConfig:
    """How the endpoint behaves.

    Attributes:
        served_model_names: Names that requests may give as `model`; answers
            have the first.
        model: Path or hub id that was given to `serve`; requests may give it as `model` too.
        api_keys: Requests need one of these; none: no request does.
        api_key_file: YAML file with further keys, which may have limits of their own; None: none.
        requests_per_minute: Requests that each key may make, or without keys each address; None:
            any number.
        tokens_per_minute: Tokens of prompts and answers that each may use; None: any number.
        metrics_need_key: Whether `/metrics` and `/load` need a key too.
        chat_template: Jinja source that replaces the model's own.
        trust_request_chat_template: Accept `chat_template` from requests: it is code, which runs
            sandboxed but without a time limit.
        tool_call_parser: Syntax in which the model writes calls: a name of `parsing.registry`;
            "auto": what its template shows; "none": calls are text.
        enable_auto_tool_choice: Whether a model may decide by itself to call a tool.
        tool_template: Describe tools in a system message, and write calls as text, for templates
            that know no tools.
        generation_config: Where the defaults of requests come from: "auto" is the model's own
            `generation_config.json`, "vllm" none, else a directory that has one.
        override_generation_config: Entries that replace its.
        max_logprobs: Most alternatives a request may ask for, at most 20.
        strict_requests: Refuse unknown fields instead of logging them.
        stream_interval: Tokens that a streamed chunk waits for, at most.
        stream_keepalive_deltas: Send events without content, besides comments, while a stream has
            nothing else: for clients that ignore comments.
        request_timeout: Seconds until an unfinished request ends with 422; None: no limit.
        read_timeout: Seconds a client has to send the head of a request, then its body, and a
            reader of a stream to take a chunk.
        max_body_size: Most bytes of a request's body; None: `MAX_BODY_SIZE`, or, where the model
            takes media, `MAX_MEDIA_BODY_SIZE`.
        max_body_memory: Most bytes of the bodies of all requests that have not ended, apart from
            the first MiB of each.
        max_stored_responses: Most responses that are kept for later requests; 0: none is.
        max_stored_bytes: Most bytes of those, as JSON.
        files_dir: Folder of the files and batches of clients; None: there are none.
        max_file_size: Most bytes of a file.
        max_files_size: Most bytes of all files, as far as clients send more.
        max_batch_lines: Most lines of all batches that are answered at once; None: a few more than
            the engine runs at once.
        shutdown_timeout: Seconds that running requests have to finish after SIGTERM.
        allowed_origins: Origins of browser pages that may call the endpoint ("*": any).
        allowed_hosts: Names and addresses by which the server may be called, besides its own
            address and localhost ("*": any). Checked on loopback; elsewhere if there are any.
        root_path: Path under which a proxy serves this server.
        log_requests: Write one log line for each request.
        priority_scheduling: Whether the engine schedules by `priority`.
        otlp_traces_endpoint: URL of an OpenTelemetry collector that gets a span of each request;
            None: there is none.
        serve_page: Serve the chat page at `/`.
        mcp_config: File of MCP servers whose tools the page may use; None: there are none.
        page_mcp: MCP servers (HTTP) that users add on the page: "off" refuses them, "public" allows
            those of the Internet, "private" those of private networks and this machine, too.
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
    priority_scheduling: bool = False
    otlp_traces_endpoint: str | None = None
    serve_page: bool = True
    mcp_config: str | None = None
    page_mcp: Literal["off", "public", "private"] = "off"

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
        """The served name that a request means.

        Args:
            model: a served name, the path or id that was given to `serve`, or "default".

        Returns:
            None: it means no model of this server.
        """
        if model in self.served_model_names:
            return model
        others = {DEFAULT_MODEL}
        if self.model is not None:
            others |= {self.model, str(Path(self.model).resolve())}
        return self.model_name if model in others else None


def default_model_name(model: str | None) -> str:
    """The name a model is served under where none is given: its path or hub id, as in vLLM."""
    if model is None:
        return "mlx-paged-demo"
    path = Path(model)
    return path.resolve().name if path.is_dir() else model


@dataclass(frozen=True)
class GenerationDefaults:
    """Defaults of requests.

    Attributes:
        sampling: Fields of `SamplingParams` where a request has none.
        max_new_tokens: Most tokens of any answer; None: no limit but the context.
    """

    sampling: Mapping[str, Any] = field(default_factory=dict)
    max_new_tokens: int | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> GenerationDefaults:
        """Those of a generation config, whose other entries are not about requests.

        Raises:
            InvalidParameterError: a value that `SamplingParams` refuses.
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
    """Loads the directory or source that ``--generation-config`` names.

    Args:
        source: "auto": the model's own; "vllm": none; else a directory that has one.

    Returns:
        None for the model's own.

    Raises:
        InvalidParameterError: there is no such file, or it cannot be read.
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
        InvalidParameterError: it is not a JSON object, or has an unknown entry.
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
