"""Request bodies of Ollama's API.

As in the other APIs, a field is either supported or refused. Options of Ollama's loader change no
answer and are accepted. Streaming is the default here.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from mlx_paged.server.bodies import Body, NumLogprobs, StopString, TokenIds
from mlx_paged.server.pooling_bodies import MAX_TEXTS
from mlx_paged.server.tool_requests import MAX_TOOLS, Name, ToolBody

_LOADER = "Option of Ollama's loader; accepted, has no effect here."

# --- keep_alive -----------------------------------------------------------------------------------

# Units of Go's durations, in seconds.
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")
_DURATION = re.compile(rf"-?(?:(?:{_PART.pattern})+|\d+(?:\.\d+)?)")


def seconds_of(keep_alive: float | str) -> float:
    """Converts `keep_alive` to seconds; negative means forever.

    Args:
        keep_alive: Seconds, or a duration as Go writes it, such as "5m" or "1h30m". A text without
            a unit is in seconds.

    Raises:
        ValueError: It is neither.
    """
    if not isinstance(keep_alive, str):
        return float(keep_alive)
    if not _DURATION.fullmatch(keep_alive):
        raise ValueError("must be seconds, or a duration such as '5m' or '1h30m'; below 0: forever")
    parts = _PART.findall(keep_alive)
    if not parts:
        return float(keep_alive)
    total = sum(float(number) * _UNITS[unit] for number, unit in parts)
    return -total if keep_alive.startswith("-") else total


KeepAlive = Annotated[
    Annotated[float, Field(allow_inf_nan=False)] | Annotated[str, Field(max_length=64)],
    AfterValidator(seconds_of),
]


def _lower(role: Any) -> Any:
    return role.lower() if isinstance(role, str) else role


# --- Parts ----------------------------------------------------------------------------------------


class Options(Body):
    """Sampling and context options."""

    # Options that affect the answer.
    num_predict: Annotated[int, Field(ge=-2, lt=1 << 31)] | None = Field(
        None,
        description="Maximum tokens of the answer; 0 and below: as many as the context allows.",
    )
    num_ctx: Annotated[int, Field(ge=1, lt=1 << 31)] | None = Field(
        None, description="Tokens of prompt and answer, if less than the server's context."
    )
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = Field(
        None, description="0 and -1: all tokens."
    )
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = Field(
        None, description="-1: another answer every time."
    )
    stop: StopString | Annotated[list[StopString], Field(max_length=64)] | None = None
    repeat_penalty: Annotated[float, Field(gt=0, le=100)] | None = Field(
        None, description="Applies to the tokens of prompt and answer."
    )
    repeat_last_n: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = Field(
        None,
        description="Only -1 (all tokens) or 0 (no repeat_penalty), unless repeat_penalty is 1.",
    )
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None

    # Unsupported samplers: only the value that disables them is valid.
    typical_p: Annotated[float, Field(ge=1, le=1)] | None = Field(None, description="Only 1.")
    tfs_z: Annotated[float, Field(ge=1, le=1)] | None = Field(None, description="Only 1.")
    mirostat: Annotated[int, Field(ge=0, le=0)] | None = Field(None, description="Only 0.")
    mirostat_tau: float | None = Field(None, description="No effect without mirostat.")
    mirostat_eta: float | None = Field(None, description="No effect without mirostat.")
    penalize_newline: Literal[True] | None = Field(None, description="Only true.")
    num_keep: int | None = Field(None, description="Contexts are not shifted: no effect.")

    draft_num_predict: int | None = Field(None, description=_LOADER)
    embedding_only: bool | None = Field(None, description=_LOADER)
    f16_kv: bool | None = Field(None, description=_LOADER)
    logits_all: bool | None = Field(None, description=_LOADER)
    low_vram: bool | None = Field(None, description=_LOADER)
    main_gpu: int | None = Field(None, description=_LOADER)
    num_batch: int | None = Field(None, description=_LOADER)
    num_gpu: int | None = Field(None, description=_LOADER)
    num_thread: int | None = Field(None, description=_LOADER)
    numa: bool | None = Field(None, description=_LOADER)
    use_mlock: bool | None = Field(None, description=_LOADER)
    use_mmap: bool | None = Field(None, description=_LOADER)
    vocab_only: bool | None = Field(None, description=_LOADER)


class OllamaFunction(Body):
    """The function of a tool call."""

    name: Name
    arguments: dict[str, Any] = Field(default_factory=dict)
    index: int | None = Field(None, description="Index among the calls of its message.")


class OllamaCall(Body):
    """A tool call in an earlier answer."""

    id: str | None = None
    type: Literal["function"] | None = None
    function: OllamaFunction


Images = Annotated[list[str], Field(max_length=1024, fail_fast=True)]


class OllamaMessage(Body):
    """A message of a chat."""

    role: Annotated[
        Literal["system", "developer", "user", "assistant", "tool"], BeforeValidator(_lower)
    ]
    content: str | None = None
    thinking: str | None = Field(None, description="Thinking of an earlier answer.")
    images: Images | None = Field(None, description="In base64.")
    tool_calls: Annotated[list[OllamaCall], Field(fail_fast=True)] | None = None
    tool_name: str | None = Field(None, description="Name of the tool that returned this result.")
    tool_call_id: str | None = Field(None, description="Id of the call that this result answers.")


class OllamaTool(ToolBody):
    """A tool, in OpenAI's form."""

    type: str = Field("function", description="Only function.")


# --- Bodies ---------------------------------------------------------------------------------------


class ModelRequest(Body):
    """Fields of every body about a model."""

    model: str | None = Field(None, description='A served name, perhaps with ":latest".')
    keep_alive: KeepAlive | None = Field(
        None,
        description="How long the model stays loaded: seconds, or a duration such as 5m; below 0: "
        "forever.",
    )
    options: Options | None = None


class GenerationRequest(ModelRequest):
    """Fields that chats and prompts share."""

    stream: bool | None = Field(None, description="true by default.")
    format: Literal["json", ""] | dict[str, Any] | None = Field(
        None, description="json, or the JSON schema of the answer."
    )
    think: bool | Literal["low", "medium", "high", "max"] | None = Field(
        None, description="Enables thinking, or sets its effort."
    )
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = Field(None, description="Alternatives; needs logprobs.")
    truncate: bool | None = Field(
        None,
        description="false refuses a prompt that is longer than the context. By default, a chat "
        "loses its oldest messages and a prompt its beginning.",
    )
    shift: Literal[False] | None = Field(
        None, description="Only false: an answer ends where the context ends."
    )

    @property
    def streams(self) -> bool:
        """True if the answer is a stream."""
        return self.stream is not False


class OllamaChatBody(GenerationRequest):
    """`POST /api/chat`."""

    messages: Annotated[list[OllamaMessage], Field(fail_fast=True)] | None = Field(
        None, description="If missing, the request only loads the model."
    )
    tools: Annotated[list[OllamaTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None


class GenerateBody(GenerationRequest):
    """`POST /api/generate`."""

    prompt: str | None = Field(None, description="If missing, the request only loads the model.")
    system: str | None = Field(None, description="The system message.")
    images: Images | None = Field(None, description="In base64.")
    raw: bool | None = Field(None, description="Takes the prompt as it is, without the template.")
    context: TokenIds | None = Field(
        None, description="`context` of an earlier answer, which the prompt continues."
    )
    suffix: str | None = Field(None, description="Not supported: 400.")
    template: str | None = Field(None, description="Not supported: 400.")
    width: Any = Field(None, description="Image models only: 400.")
    height: Any = Field(None, description="Image models only: 400.")
    steps: Any = Field(None, description="Image models only: 400.")

    #: Unsupported fields, with the reason for the error message.
    REFUSED: ClassVar[dict[str, str]] = {
        "suffix": "this server does not fill in the middle of texts",
        "template": "templates are Jinja here, and are set at the start (--chat-template)",
        "width": "this server generates text",
        "height": "this server generates text",
        "steps": "this server generates text",
    }


class EmbedBody(ModelRequest):
    """`POST /api/embed`."""

    input: str | Annotated[list[str], Field(max_length=MAX_TEXTS, fail_fast=True)] | None = Field(
        None, description="One text or several. If missing, the request only loads the model."
    )
    truncate: bool | None = Field(
        None, description="false refuses a longer text than the context; by default its end is cut."
    )
    dimensions: Annotated[int, Field(ge=0, lt=1 << 31)] | None = Field(
        None, description="Keep only the first N numbers, scaled to length 1; 0 keeps all."
    )


class EmbeddingsBody(ModelRequest):
    """`POST /api/embeddings`: the older form of `/api/embed`."""

    prompt: str | None = Field(
        None, description="A text. If missing, the request only loads the model."
    )


class PullBody(Body):
    """`POST /api/pull`."""

    model: str | None = Field(None, description="A hub id, or a served name.")
    name: str | None = Field(None, description="An older name of model.")
    stream: bool | None = Field(None, description="false answers at the end, without progress.")
    insecure: bool | None = Field(None, description="No effect: the hub's certificate is checked.")


class DeleteBody(Body):
    """`DELETE /api/delete`."""

    model: str | None = Field(None, description="A hub id, or a served name.")
    name: str | None = Field(None, description="An older name of model.")


class ShowBody(Body):
    """`POST /api/show`."""

    model: str | None = Field(None, description="A served name.")
    name: str | None = Field(None, description="An older name of model.")
    verbose: bool | None = Field(None, description="No effect.")
    system: str | None = Field(None, description="No effect.")
    template: str | None = Field(None, description="No effect.")
    options: Any = Field(None, description="No effect.")
