"""The messages between `ProcessEngine` and its engine's process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from mlx_paged.core import CacheMiss, FinishReason
from mlx_paged.engine.client import EngineInfo, EngineRequest
from mlx_paged.engine.outputs import ReportParts
from mlx_paged.errors import StepError
from mlx_paged.kernels import OnKernel

# To the engine.


@dataclass(frozen=True)
class Start:
    """Makes the engine; the first message after a function that prepares the process, or None.

    Attributes:
        model, dtype, generation_config: See `mlx_paged.load`.
        options: Fields of `EngineConfig`.
        make_on_kernel: Makes the engine's `on_kernel`, by name.
    """

    model: str | None
    dtype: str
    generation_config: Mapping[str, Any] | None
    options: Mapping[str, Any]
    make_on_kernel: Callable[[], OnKernel] | None


class Submit(NamedTuple):
    """A request. Its answers are `number`, `number` + 1, and so on."""

    number: int
    request_id: str
    request: EngineRequest


class Leave(NamedTuple):
    """The reader of a request has gone."""

    number: int


class Call(NamedTuple):
    """Calls a method of the engine's client."""

    number: int
    method: str
    arguments: tuple[Any, ...]


# From the engine.


class Ready(NamedTuple):
    """The engine is made."""

    info: EngineInfo
    tokenizer: Any
    media: Any | None


class Failed(NamedTuple):
    """The engine could not be made."""

    error: Exception


class Dead(NamedTuple):
    """The engine takes no more requests."""

    reason: str


class Accepted(NamedTuple):
    """The engine has taken a request; see `RequestOutput`.

    Attributes:
        prompt_token_ids: None: those of the request.
    """

    prompt: str | None
    prompt_token_ids: list[int] | None
    arrival_time: float
    relaxed: tuple[str, ...]


class Reply(NamedTuple):
    """The result of a `Submit` or `Call`: a value, or the error."""

    number: int
    value: Any
    error: Exception | None = None


class Beginning(NamedTuple):
    """Fields of a request's output and metrics that are known with its first token."""

    num_cached_tokens: int
    cache_miss: CacheMiss | None
    scheduled_time: float | None
    first_token_time: float | None
    prompt_logprobs: list[ReportParts | None] | None


class Ending(NamedTuple):
    """Fields of a request's output and metrics that are known with its last token."""

    finished_time: float | None
    num_accepted_drafts: int
    num_rejected_drafts: int
    pooled: Any | None


class AnswerUpdate(NamedTuple):
    """A `SequenceUpdate` that is more than one token of a text that its reader decodes.

    Attributes:
        number: The answer.
        pieces: Texts of the tokens; None: the reader decodes them.
        num_text_tokens: Tokens of the text, if the answer has ended and the reader decodes it.
    """

    number: int
    num_tokens_before: int
    token_ids: list[int]
    pieces: list[str] | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    error: StepError | None
    reports: list[ReportParts] | None
    num_text_tokens: int | None
    beginning: Beginning | None
    ending: Ending | None


class StepNews(NamedTuple):
    """The news of all requests after a step.

    Attributes:
        numbers: Answers that gained one token and nothing else: an array of uint64, as bytes.
        tokens: Their tokens: an array of int64, as bytes.
        updates: Of other answers, and of the same ones after those tokens.
        launched: Tokens of each step that was launched, see `EngineClient.observe_steps`.
        refuses_requests: See `EngineClient`.
    """

    numbers: bytes
    tokens: bytes
    updates: list[AnswerUpdate]
    launched: list[int]
    refuses_requests: bool
