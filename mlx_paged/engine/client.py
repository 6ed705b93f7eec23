"""EngineClient: the interface of an engine for the server and other asynchronous callers.

`AsyncEngine` runs the engine on a thread, `ProcessEngine` in another process: callers never see a
scheduler, an array or an `Engine`. `LocalClient` is the synchronous counterpart. All take the same
`EngineRequest` and pass it through `Intake.process`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mlx_paged.engine.config import EngineConfig
from mlx_paged.engine.grammar.compiler import GrammarCompiler
from mlx_paged.engine.lora.request import LoRARequest
from mlx_paged.engine.media import MediaPrompts, PreparedMedia, TextWithMedia
from mlx_paged.engine.pooling.params import PoolingParams
from mlx_paged.engine.request_stream import RequestStream
from mlx_paged.engine.sampling.sequence_sampler import TokenMask
from mlx_paged.engine.sampling_params import SamplingParams
from mlx_paged.engine.stats import EngineStats
from mlx_paged.errors import InvalidParameterError
from mlx_paged.parsing.reasoning import ReasoningFormat


@dataclass(frozen=True)
class EngineRequest:
    """A request, for generation or for pooling.

    Attributes:
        prompt: A text, token ids (a list or an array of integers), or vLLM's mapping with `prompt`
            and `multi_modal_data` (see `LLM.generate`).
        params: How to choose tokens and when to stop, or how to pool. None: the defaults of the
            engine's runner.
        request_id: Unique among unfinished requests; None generates one.
        priority: Lower is served first under the priority policy.
        background: Under either policy, other requests go first (`core.background`).
        timeout: Seconds until the request ends with "timeout".
        cache_salt: Requests with different salts share no cached blocks.
        token_mask: Called before each token for the tokens that may follow. It blocks the engine's
            thread; a grammar of `structured_outputs` is much faster.
        media: The media of a prompt of token ids, already prepared.
        lora_request: Its LoRA adapter; None: `EngineConfig.adapter_path`, if any.
    """

    prompt: str | Sequence[int] | Mapping[str, Any] | TextWithMedia
    params: SamplingParams | PoolingParams | None = None
    request_id: str | None = None
    priority: int = 0
    background: bool = False
    timeout: float | None = None
    cache_salt: str | None = None
    token_mask: TokenMask | None = None
    media: PreparedMedia | None = None
    lora_request: LoRARequest | None = None

    @property
    def num_answers(self) -> int:
        """Number of answers: `n` of its sampling parameters; 1 for pooling."""
        return getattr(self.params, "n", 1)

    def id_or(self, ids: Iterator[int]) -> str:
        """Returns `request_id`, or a generated one with the next of `ids`.

        Raises:
            InvalidParameterError: `request_id` is not a string.
        """
        if self.request_id is None:
            return f"request-{next(ids)}"
        if not isinstance(self.request_id, str):
            raise InvalidParameterError("request_id", "a string", self.request_id)
        return self.request_id


@dataclass(frozen=True)
class EngineInfo:
    """Properties of an engine that never change. Plain data.

    Attributes:
        config: Its options.
        vocab_size: Token ids are below this.
        max_request_len: Maximum tokens of prompt and answer together, limited by model and pool.
        max_model_len: Maximum tokens that the model allows; None if only the pool limits them.
        generation_config: The model's default sampling settings; the engine does not apply them.
        reasoning_format: The model's reasoning format; None if it has none, or an unknown one.
        hidden_size: Size of an embedding before `dimensions` cuts it; None if the engine generates.
        labels: Classes of a model that classifies texts; empty if it makes embeddings.
        prompts: Prompts that the model was trained to see before texts, by name of their purpose.
        media_reason: Why a multimodal checkpoint accepts no media.
    """

    config: EngineConfig
    vocab_size: int
    max_request_len: int
    max_model_len: int | None
    generation_config: Mapping[str, Any]
    reasoning_format: ReasoningFormat | None
    hidden_size: int | None
    labels: tuple[str, ...]
    prompts: Mapping[str, str]
    media_reason: str | None

    @property
    def scores_pairs(self) -> bool:
        """True if the engine scores pairs of texts instead of embedding them."""
        return len(self.labels) == 1


class EngineClient(Protocol):
    """Serves many callers from one engine. Any event loop of any thread may call it."""

    async def ready(self) -> None:
        """Waits until the engine is ready; raises the error if it could not be created."""

    @property
    def is_alive(self) -> bool:
        """True if the engine accepts requests."""

    # Once it is ready.

    @property
    def refuses_requests(self) -> bool:
        """True while `submit` raises `MemoryPressureError`."""

    @property
    def info(self) -> EngineInfo:
        """Properties of the engine that never change."""

    @property
    def tokenizer(self) -> Any:
        """mlx-lm's wrapper of the model's tokenizer."""

    @property
    def media(self) -> Any | None:
        """The model's media processor (`LoadedModel.media`); None if it takes only text."""

    @property
    def media_prompts(self) -> MediaPrompts:
        """Prepares prompts with media."""

    @property
    def grammar_compiler(self) -> GrammarCompiler:
        """Compiles the grammars of structured outputs.

        Raises:
            InvalidParameterError: The engine does not generate.
        """

    async def submit(self, request: EngineRequest) -> RequestStream:
        """Submits a request; returns the stream of its updates once the engine has accepted it.

        Raises:
            InvalidParameterError: An invalid option; the error names the field.
            InvalidMediaError: An item is unusable, or the model does not support its kind.
            RequestTooLargeError: Prompt and answer could never fit.
            DuplicateRequestError: An unfinished request has this id.
            EngineOverloadedError: Too many requests wait.
            MemoryPressureError: The system is critically short of memory.
            EngineDeadError: The engine stopped.
        """

    async def abort(self, request_id: str) -> bool:
        """Ends a request; its stream ends with "abort". Returns True if it was unfinished."""

    async def reset_prefix_cache(self) -> int:
        """Empties the prefix cache; returns the number of blocks that it held."""

    async def add_lora(self, request: LoRARequest) -> None:
        """Reads an adapter now, so that errors appear before a request names it.

        Raises:
            AdapterError: Files are missing, damaged or of an unsupported kind.
            InvalidParameterError: The engine accepts no adapters, or none of this rank.
        """

    async def remove_lora(self, request: LoRARequest) -> None:
        """Drops an adapter. Running requests keep theirs."""

    async def stats(self) -> EngineStats:
        """Returns the engine's statistics, taken between two steps."""

    def observe_steps(self, observer: Callable[[int], None]) -> None:
        """Has the engine call a function with the number of tokens of each step it launches.

        It runs on the engine's thread, so it must be quick. There is one observer.
        """

    async def shutdown(self, drain_timeout: float = 0.0) -> None:
        """Accepts no more requests; ends when all have finished, or after `drain_timeout` seconds.

        Requests that are still unfinished are aborted.
        """
