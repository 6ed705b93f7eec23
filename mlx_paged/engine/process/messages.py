"""The messages between `ProcessEngine` and its engine process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

from mlx_paged.core import CacheMiss, FinishReason
from mlx_paged.engine.client import EngineInfo, EngineRequest
from mlx_paged.engine.outputs import ReportParts
from mlx_paged.errors import InvalidParameterError, StepError
from mlx_paged.kernels import OnKernel

# To the engine.


@dataclass(frozen=True)
class Start:
    """Creates the engine. Follows the first message: a function that prepares the process, or None.

    Attributes:
        model, dtype, generation_config: See `mlx_paged.load`.
        options: Fields of `EngineConfig`.
        make_on_kernel: See `AsyncEngine.from_model`. Pickled by name.
    """

    model: str | None
    dtype: str
    generation_config: Mapping[str, Any] | None
    options: Mapping[str, Any]
    make_on_kernel: Callable[[], AbstractContextManager[OnKernel | None]] = nullcontext


class Submit(NamedTuple):
    """Submits a request. Its answers get the numbers `number`, `number` + 1, and so on."""

    number: int
    request_id: str
    request: EngineRequest


class Leave(NamedTuple):
    """The reader of a request is gone."""

    number: int


class Call(NamedTuple):
    """Calls a method of the child's `AsyncEngine`."""

    number: int
    method: str
    arguments: tuple[Any, ...]


# From the engine.


class Ready(NamedTuple):
    """The engine is ready."""

    info: EngineInfo
    tokenizer: Any
    media: Any | None


class Failed(NamedTuple):
    """The engine could not be created."""

    error: Exception


class Dead(NamedTuple):
    """The engine accepts no more requests."""

    reason: str


class Accepted(NamedTuple):
    """The engine has accepted a request; see `RequestOutput`.

    Attributes:
        prompt_token_ids: None if equal to the request's prompt, to keep the message small.
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
    """Fields of a request's output and metrics that its first token settles."""

    num_cached_tokens: int
    cache_miss: CacheMiss | None
    scheduled_time: float | None
    first_token_time: float | None
    prompt_logprobs: list[ReportParts | None] | None


class Ending(NamedTuple):
    """Fields of a request's output and metrics that its last token settles."""

    finished_time: float | None
    num_accepted_drafts: int
    num_rejected_drafts: int
    pooled: Any | None


class AnswerUpdate(NamedTuple):
    """A `SequenceUpdate` with more in it than one token whose text the reader decodes.

    Attributes:
        number: The answer.
        pieces: Texts of the tokens; None if the reader decodes them.
        num_text_tokens: Tokens of the text, once an answer has ended whose reader decodes it.
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


class StepUpdates(NamedTuple):
    """The updates of all requests after a step.

    Attributes:
        numbers: Answers that gained one token and nothing else, as the bytes of a uint64 array.
        tokens: Their tokens, as the bytes of an int64 array.
        updates: All other updates, to be applied after those tokens.
        launched: Number of tokens of each launched step; see `EngineClient.observe_steps`.
        refuses_requests: See `EngineClient`.
    """

    numbers: bytes
    tokens: bytes
    updates: list[AnswerUpdate]
    launched: list[int]
    refuses_requests: bool


def not_for_two_processes(error: Exception) -> InvalidParameterError:
    """Returns the error for a tokenizer or media processor that cannot be pickled or unpickled."""
    expected = (
        f"off for this model: another process cannot use its tokenizer or processor ({error})"
    )
    return InvalidParameterError("frontend_multiprocessing", expected, True)
