"""Options of the server itself; those of the engine are `EngineConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: Most sequences (prompts x n, or x best_of) that one HTTP request may start.
MAX_SEQUENCES_PER_REQUEST = 256


@dataclass(frozen=True)
class ServerConfig:
    """How the endpoint behaves.

    Attributes:
        served_model_names: Names that requests may give as `model`; the first is the one answers
            carry.
        api_keys: Any of these opens the endpoint; none: it is open to all.
        chat_template: Jinja source that replaces the model's own.
        trust_request_chat_template: Take `chat_template` from requests: they run code of their
            own, sandboxed but without a limit of time.
        generation_config: Where the defaults of requests come from: "auto" is the model's own
            `generation_config.json`, "vllm" none, else a directory that has one.
        override_generation_config: Entries that replace its.
        max_logprobs: Most alternatives a request may ask for, at most 20.
        strict_requests: Refuse fields that nobody knows instead of logging them.
        stream_interval: Tokens that a streamed chunk waits for, at most.
        request_timeout: Seconds until an unfinished request ends with 408; None: no limit.
        read_timeout: Seconds a client has to send the head of a request, then its body, and a
            reader of a stream to take a chunk.
        max_body_size: Most bytes of a request's body.
        shutdown_timeout: Seconds that running requests have to finish after SIGTERM.
        allowed_origins: Origins of browser pages that may call the endpoint ("*": any).
        root_path: Path under which a proxy shows the server.
        log_requests: One log line a request.
        priority_scheduling: Whether the engine heeds `priority`.
        serve_page: Serve the chat page at `/`.
    """

    served_model_names: tuple[str, ...] = ("mlx-paged-demo",)
    api_keys: tuple[str, ...] = ()
    chat_template: str | None = None
    trust_request_chat_template: bool = False
    generation_config: str = "auto"
    override_generation_config: Mapping[str, Any] = field(default_factory=dict)
    max_logprobs: int = 20
    strict_requests: bool = False
    stream_interval: int = 1
    request_timeout: float | None = None
    read_timeout: float = 60.0
    max_body_size: int = 16 << 20
    shutdown_timeout: float = 30.0
    allowed_origins: tuple[str, ...] = ()
    root_path: str = ""
    log_requests: bool = True
    priority_scheduling: bool = False
    serve_page: bool = True

    @property
    def model_name(self) -> str:
        """The name that answers carry."""
        return self.served_model_names[0]


def default_model_name(model: str | None) -> str:
    """The name a model is served under where none is given: its path or hub id, as in vLLM."""
    if model is None:
        return "mlx-paged-demo"
    path = Path(model)
    return path.resolve().name if path.is_dir() else model
