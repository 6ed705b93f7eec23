"""Bodies of answers: what handlers build, and what the OpenAPI document is made of.

They are dicts with declared fields, since some are built for every token and a pydantic model costs
three times as much. mypy checks the code that builds them, the tests validate what was sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict  # (pydantic needs this one before Python 3.12)

from mlx_paged import __version__
from mlx_paged.engine.outputs import Logprob, PositionReport

FINGERPRINT = f"mlx-paged-{__version__}"

#: Why an answer ended. (One that ends for another reason is an error.)
Reason = Literal["stop", "length"]


class ErrorDetail(TypedDict):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(TypedDict):
    """OpenAI's error body."""

    error: ErrorDetail


class PromptDetails(TypedDict):
    """Of `prompt_tokens`."""

    cached_tokens: int


class Usage(TypedDict):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class TokenLogprob(TypedDict):
    """A token and how likely it was."""

    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(TokenLogprob):
    """A token of an answer, with its likeliest alternatives."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(TypedDict):
    """Log-probabilities of a chat's choice."""

    content: list[ContentLogprob]
    refusal: None


class PromptLogprob(TypedDict):
    """A token of a prompt, or one that could have been there."""

    logprob: float
    rank: int
    decoded_token: str


#: Of each token of a prompt, by token id; null for the first token, which follows nothing.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


class AnswerMessage(TypedDict):
    """The message of a choice."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(TypedDict):
    """One of n answers. `token_ids` are there where they are asked for."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Reason
    stop_reason: NotRequired[str | int | None]
    token_ids: NotRequired[list[int]]


class Answer(TypedDict):
    """What all answers begin with."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class ChatAnswer(Answer):
    """`POST /v1/chat/completions`."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: NotRequired[PromptLogprobs | None]
    prompt_token_ids: NotRequired[list[int]]


class Delta(TypedDict, total=False):
    """What a choice gained."""

    role: Literal["assistant"]
    content: str


class ChunkChoice(TypedDict):
    """A part of a choice. The last one has `finish_reason` and `stop_reason`."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: Reason | None
    stop_reason: NotRequired[str | int | None]
    token_ids: NotRequired[list[int]]


class ChatChunk(Answer):
    """An event of a streamed chat."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChunkChoice]
    usage: NotRequired[Usage | None]


class CompletionLogprobsAnswer(TypedDict):
    """Log-probabilities of a plain completion's choice: four lists of one length."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(TypedDict):
    """One of n answers to one of the prompts, or in a stream a part of it."""

    index: int
    text: str
    logprobs: CompletionLogprobsAnswer | None
    finish_reason: Reason | None
    stop_reason: NotRequired[str | int | None]
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[PromptLogprobs | None]


class CompletionAnswer(Answer):
    """`POST /v1/completions`, and an event of its stream."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]


class Model(TypedDict):
    """A name of the model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int | None


class ModelList(TypedDict):
    """`GET /v1/models`."""

    object: Literal["list"]
    data: list[Model]


class Tokens(TypedDict):
    """`POST /tokenize`."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None


class Text(TypedDict):
    """`POST /detokenize`."""

    prompt: str


class Status(TypedDict):
    """`/health`, `/live`, `/ready`."""

    status: Literal["loading", "ready", "draining", "dead"]


class Version(TypedDict):
    """`GET /version`."""

    version: str
    mlx_version: str
    mlx_lm_version: str
    backends: str


class Load(TypedDict):
    """`GET /load`."""

    server_load: int


class Reset(TypedDict):
    """`POST /reset_prefix_cache`."""

    num_blocks: int


class ServerInfo(TypedDict):
    """`GET /server_info`. What comes from the engine is there when it answers."""

    version: str
    status: str
    uptime_seconds: float
    config: dict[str, Any]
    build: dict[str, str]
    generation_defaults: NotRequired[dict[str, Any]]
    engine_config: NotRequired[dict[str, Any]]
    stats: NotRequired[dict[str, Any]]


# Log-probabilities, as the two endpoints report them.


def chat_logprobs(
    tokens: Sequence[int], reports: Sequence[PositionReport], num_top: int, *, as_ids: bool
) -> ChatLogprobs:
    """An entry for each token, with its `num_top` likeliest alternatives.

    Args:
        as_ids: name tokens "token_id:7".
    """

    def entry(token: int, found: Logprob) -> TokenLogprob:
        return {
            "token": _name(token, found, as_ids),
            "logprob": _finite(found.logprob),
            "bytes": list(found.decoded_token.encode()),
        }

    content: list[ContentLogprob] = [
        {
            **entry(token, report[token]),
            "top_logprobs": [entry(*top) for top in _likeliest(report, num_top)],
        }
        for token, report in zip(tokens, reports, strict=True)
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """Log-probabilities of a plain completion's choice, in pieces whose offsets go on.

    Args:
        num_top: alternatives of each token.
        as_ids: name tokens "token_id:7".
        first: text of the prompt's first token, of which nothing is reported.
    """

    def __init__(self, num_top: int, *, as_ids: bool, first: str = "") -> None:
        self._first = first
        self._num_top = num_top
        self._as_ids = as_ids
        self._offset = 0

    def piece(
        self, tokens: Sequence[int], reports: Sequence[PositionReport | None]
    ) -> CompletionLogprobsAnswer:
        """Those of the next tokens; None reports the first token of a prompt."""
        piece: CompletionLogprobsAnswer = {
            "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": [],
        }  # fmt: skip
        for token, report in zip(tokens, reports, strict=True):
            piece["text_offset"].append(self._offset)
            if report is None:
                piece["tokens"].append(f"token_id:{token}" if self._as_ids else self._first)
                piece["token_logprobs"].append(None)
                piece["top_logprobs"].append(None)
                self._offset += len(self._first)
                continue
            found = report[token]
            piece["tokens"].append(_name(token, found, self._as_ids))
            piece["token_logprobs"].append(_finite(found.logprob))
            top = [(token, found), *_likeliest(report, self._num_top)]
            piece["top_logprobs"].append(
                {_name(t, f, self._as_ids): _finite(f.logprob) for t, f in top}
            )
            self._offset += len(found.decoded_token)
        return piece


def prompt_logprobs(reports: Sequence[PositionReport | None] | None) -> PromptLogprobs | None:
    """vLLM's `prompt_logprobs`."""
    if reports is None:
        return None
    return [
        None
        if report is None
        else {
            str(token): {
                "logprob": _finite(found.logprob),
                "rank": found.rank,
                "decoded_token": found.decoded_token,
            }
            for token, found in report.items()
        }
        for report in reports
    ]


def _name(token: int, entry: Logprob, as_ids: bool) -> str:
    return f"token_id:{token}" if as_ids else entry.decoded_token


def _likeliest(report: PositionReport, count: int) -> list[tuple[int, Logprob]]:
    ordered = sorted(report.items(), key=lambda item: item[1].rank)
    return [item for item in ordered if item[1].rank <= count][:count]


def _finite(logprob: float) -> float:
    """JSON has no infinity; -9999 replaces it, as in OpenAI's API."""
    return max(logprob, -9999.0)
