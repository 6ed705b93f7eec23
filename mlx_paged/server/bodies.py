"""Bodies of requests, with the field names of OpenAI and vLLM.

A body's fields work or are refused; they are never ignored. A new field that `SamplingParams` has,
too, is one entry here. Any other is an entry here, and a line in the code that uses it.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from mlx_paged.engine.sampling_params import MAX_LOGPROB_TOKEN_IDS
from mlx_paged.server.config import MAX_SEQUENCES_PER_REQUEST
from mlx_paged.server.errors import ApiError, bad_request
from mlx_paged.server.request_fields import REFUSED
from mlx_paged.server.tool_requests import (
    MAX_TOOLS,
    CallBody,
    CallFunction,
    FunctionBody,
    NamedFunction,
    ResponseFormat,
    ToolBody,
    ToolChoiceBody,
)

TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
# A list fails at its first wrong entry, because reporting a hundred thousand would take seconds.
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
StopString = Annotated[str, Field(min_length=1, max_length=1024)]
BiasKey = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
Label = Annotated[str, Field(max_length=512)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
MaxTokens = Annotated[int, Field(ge=1, lt=1 << 31)]
NumLogprobs = Annotated[int, Field(ge=0)]

_OLDER = "An older name of a field of structured_outputs."


def _what_works_first(schema: dict[str, Any]) -> None:
    """Orders fields in documents: a class's own, then those of its bases, refused ones last."""
    refused = Unsupported.model_fields
    properties = schema.get("properties", {})
    schema["properties"] = dict(sorted(properties.items(), key=lambda item: item[0] in refused))


class Body(BaseModel):
    """A request's body.

    Types are strict ("5" is not a number), and numbers must be finite. Unknown fields stay in
    `model_extra`; the server logs them, or refuses them under ``--strict-requests``.
    """

    model_config = ConfigDict(
        extra="allow", strict=True, allow_inf_nan=False, json_schema_extra=_what_works_first
    )


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool | None = Field(None, description="Send usage in a last chunk.")
    continuous_usage_stats: bool | None = Field(None, description="Send usage in every chunk.")
    include_obfuscation: Literal[False] | None = None


class PredictionPart(Body):
    """A part of a predicted answer."""

    type: Literal["text"]
    text: str


class Prediction(Body):
    """OpenAI's predicted output."""

    type: Literal["content"]
    content: str | Annotated[list[PredictionPart], Field(fail_fast=True)]

    @property
    def text(self) -> str:
        """The whole predicted answer."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class Unsupported(Body):
    """Hints, and fields that are refused (`server.request_fields`)."""

    service_tier: Label | None = Field(None, description="A hint: there is one tier.")
    prompt_cache_key: Label | None = Field(None, description="A hint: there is one cache.")
    prompt_cache_options: Any = Field(None, description="A hint.")
    prompt_cache_retention: Label | None = Field(None, description="A hint.")
    session_id: Label | None = Field(None, description="A hint.")
    return_token_offsets: bool | None = Field(None, description="Has no effect here.")
    return_mm_kwargs: bool | None = Field(None, description="Has no effect here.")
    store: bool | None = Field(
        None, description="Accepted, but nothing is stored: this API has no way to retrieve it."
    )

    audio: Any = Field(None, description="Not supported: 400.")
    modalities: list[str] | None = Field(None, description='Only ["text"].')
    web_search_options: Any = Field(None, description="Not supported: 400.")
    moderation: Any = Field(None, description="Not supported: 400.")
    prompt_embeds: Any = Field(None, description="Not supported: 400.")
    use_beam_search: bool | None = Field(None, description="true is not supported: 400.")
    length_penalty: float | None = Field(None, description="Only 1: there is no beam search.")
    logits_processors: Any = Field(None, description="Not supported: 400.")
    mm_processor_kwargs: Any = Field(None, description="Not supported: 400.")
    kv_transfer_params: Any = Field(None, description="Not supported: 400.")
    ec_transfer_params: Any = Field(None, description="Not supported: 400.")
    vllm_xargs: Any = Field(None, description="Not supported: 400.")
    watermarking: bool | None = Field(None, description="true is not supported: 400.")
    repetition_detection: Any = Field(None, description="Not supported: 400.")
    routed_experts_prompt_start: int | None = Field(None, description="Only 0.")
    return_prompt_text: bool | None = Field(None, description="true is not supported: 400.")

    #: Refused in addition to `REFUSED` if given at all; [] does not count.
    refused: ClassVar[tuple[str, ...]] = ()

    def unsupported(self) -> tuple[str, str] | None:
        """Returns the first field that asks for such a feature, and why it is refused."""
        for name in self.refused:
            value = getattr(self, name)
            if value is not None and value != []:
                return name, f"{name} is not supported by this server"
        for name, allowed, reason in REFUSED:
            value = getattr(self, name)
            if value is not None and not any(_is_same(value, each) for each in allowed):
                values = " or ".join(json.dumps(each) for each in (*allowed, None) if each != [])
                return name, f"{name} must be {values}: {reason}"
        return None


def _is_same(value: Any, other: Any) -> bool:
    """Equality that tells false from 0, and true from 1."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


class RequestFields(Body):
    """Fields of every request with a prompt or texts."""

    user: Label | None = Field(None, description="Logged.")
    priority: Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)] | None = Field(
        None, description="Lower values go first; needs --scheduling-policy priority."
    )
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = Field(
        None, description="Requests with different salts share no cached blocks."
    )
    request_id: Annotated[str, Field(pattern=r"^[\x21-\x7e]{1,128}$")] | None = Field(
        None, description="Replaces the X-Request-Id header."
    )
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = Field(
        None,
        description="Keep only the last tokens, this many; -1: as many as fit.",
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="right keeps the first tokens instead."
    )


class GenerationBody(Unsupported, RequestFields):
    """Fields that chat and plain completions share. null means the default everywhere."""

    model: str | None = Field(None, description="A served name; null and default mean the first.")

    # Sampling.
    temperature: Annotated[float, Field(ge=0)] | None = Field(
        None, description="0 is greedy; 1 by default, unless the model has its own default."
    )
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = Field(
        None, description="0 and -1: all tokens."
    )
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    logit_bias: Annotated[dict[BiasKey, Bias], Field(max_length=4096)] | None = Field(
        None, description="Token ids, as strings, to numbers added to their logits."
    )
    allowed_token_ids: Annotated[TokenIds, Field(min_length=1)] | None = Field(
        None, description="Generate only these tokens."
    )
    bad_words: Annotated[list[StopString], Field(max_length=256)] | None = Field(
        None, description="Never generate these texts."
    )
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = Field(
        None, description="Make a sampled answer repeatable."
    )
    n: Annotated[int, Field(ge=1, le=256)] | None = None

    # The end of an answer.
    stop: StopString | Annotated[list[StopString], Field(max_length=64)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024)] | None = None
    include_stop_str_in_output: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    ignore_eos: bool | None = None

    # The format of the answer's text.
    response_format: ResponseFormat | None = Field(
        None, description="text, json_object, json_schema, or vLLM's structural_tag."
    )
    structured_outputs: dict[str, Any] | None = Field(
        None,
        description="vLLM's: one of json, regex, choice, grammar, json_object, structural_tag.",
    )
    guided_json: dict[str, Any] | str | None = Field(None, description=_OLDER)
    guided_json_object: bool | None = Field(None, description=_OLDER)
    guided_regex: str | None = Field(None, description=_OLDER)
    guided_choice: list[str] | None = Field(None, description=_OLDER)
    guided_grammar: str | None = Field(None, description=_OLDER)
    guided_whitespace_pattern: str | None = Field(None, description=_OLDER)
    guided_decoding_backend: str | None = Field(None, description='Only "auto" or "guidance".')
    structural_tag: dict[str, Any] | str | None = Field(None, description=_OLDER)
    thinking_token_budget: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = Field(
        None, description="Maximum tokens of reasoning; then its end is forced. -1: no limit."
    )

    prediction: Prediction | None = Field(
        None,
        description="A guess of the answer: drafts for a server with --speculative-config. "
        "The answer is the same.",
    )

    # The contents of the answer.
    logprob_token_ids: (
        Annotated[TokenIds, Field(min_length=1, max_length=MAX_LOGPROB_TOKEN_IDS)] | None
    ) = Field(
        None,
        description="Report these tokens instead of the likeliest; needs logprobs.",
    )
    prompt_logprobs: Annotated[int, Field(ge=0)] | None = Field(
        None,
        description="Report log-probabilities of prompt tokens, with this many alternatives each.",
    )
    skip_special_tokens: bool | None = Field(
        None, description="Remove special tokens from the text; true by default."
    )
    spaces_between_special_tokens: bool | None = Field(
        None, description="Must be false if skip_special_tokens is false."
    )
    return_tokens_as_token_ids: bool | None = Field(
        None, description='Name tokens as "token_id:7" in log-probabilities.'
    )
    return_token_ids: bool | None = Field(None, description="Return token ids, too.")

    # Streaming.
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stream_interval: Annotated[int, Field(ge=1, lt=1 << 31)] | None = Field(
        None, description="Tokens per chunk, if more than --stream-interval."
    )

    # The request as such.
    safety_identifier: Label | None = Field(None, description="Logged.")
    metadata: Annotated[dict[Label, Label], Field(max_length=16)] | None = Field(
        None, description="Logged."
    )


MediaUrl = str | dict[str, Any]


class ContentPart(Body):
    """A part of a message: a text, or, for models that take them, an image, a video or a sound."""

    type: str = Field(
        description="text, image_url, video_url, audio_url, input_audio or file; input_image, "
        "image, video and audio too."
    )
    text: str | None = None
    refusal: str | None = None
    image_url: MediaUrl | None = Field(
        None, description='A URL (data:, https:, ...), or {"url": ..., "detail": ...}.'
    )
    video_url: MediaUrl | None = Field(None, description='A URL, or {"url": ...}.')
    audio_url: MediaUrl | None = Field(None, description='A URL, or {"url": ...}.')
    image: MediaUrl | None = Field(None, description="A URL, in an image part.")
    video: MediaUrl | None = Field(None, description="A URL, in a video part.")
    audio: MediaUrl | None = Field(None, description="A URL, in an audio part.")
    url: str | None = Field(None, description="A URL, in an image, video or audio part.")
    input_audio: dict[str, Any] | None = Field(
        None, description='{"data": in base64, "format": "wav", "mp3", ...}.'
    )
    detail: str | None = Field(None, description="For an input_image; low shrinks it.")
    file_id: str | None = Field(None, description="Not supported: 400.")
    file: dict[str, Any] | None = Field(
        None, description='For a file: {"filename", "file_data"}, a PDF or text in base64.'
    )
    fps: float | None = Field(None, description="Maximum frames per second of a video.")
    num_frames: int | None = Field(None, description="Maximum frames of a video.")
    max_frames: int | None = Field(None, description="Qwen's name for num_frames, as is nframes.")
    nframes: int | None = None
    uuid: str | None = Field(None, description="vLLM's id of media. No effect.")


class Message(Body):
    """One message of a conversation; fields that the template knows are handed to it."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    reasoning: str | None = Field(
        None, description="Reasoning of an assistant message, as is reasoning_content."
    )
    reasoning_content: str | None = None
    tool_calls: Annotated[list[CallBody], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    function_call: CallFunction | None = Field(None, description="The older form of tool_calls.")
    refusal: str | None = None


Messages = Annotated[list[Message], Field(min_length=1, fail_fast=True)]


class MediaFields(Body):
    """How the media of a conversation are read."""

    media_io_kwargs: dict[str, Any] | None = Field(
        None, description='How media are read: {"video": {"num_frames": 8}}.'
    )
    video_fps: float | None = Field(None, description="Maximum frames per second of all videos.")
    video_max_frames: int | None = Field(None, description="Maximum frames of all videos.")
    max_frames: int | None = Field(None, description="Another name of video_max_frames.")


class ChatReasoning(Body):
    """About the reasoning of an answer, as the Responses API and OpenRouter have it."""

    effort: Label | None = Field(None, description="The same as reasoning_effort.")
    max_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | None = Field(
        None, description="The same as thinking_token_budget."
    )
    enabled: bool | None = Field(None, description="The same as enable_thinking.")
    exclude: bool | None = Field(None, description="true sets include_reasoning to false.")
    summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="A hint: reasoning is not summarized."
    )


class TemplateFields(Body):
    """The request's own chat template, and arguments of a template."""

    chat_template: str | None = Field(
        None, description="Jinja source; needs --trust-request-chat-template."
    )
    chat_template_kwargs: dict[str, Any] | None = None


class ChatBody(GenerationBody, MediaFields, TemplateFields):
    """`POST /v1/chat/completions`."""

    messages: Messages
    tools: Annotated[list[ToolBody], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoiceBody | None = None
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call.")
    functions: Annotated[list[FunctionBody], Field(max_length=MAX_TOOLS)] | None = Field(
        None, description="The older form of tools."
    )
    function_call: Literal["none", "auto"] | NamedFunction | None = None
    include_reasoning: bool | None = Field(None, description="false leaves reasoning out.")
    enable_thinking: bool | None = Field(None, description="Passed to the template.")
    max_tokens: MaxTokens | None = Field(None, description="null: as many as the context allows.")
    max_completion_tokens: MaxTokens | None = Field(None, description="OpenAI's newer name.")
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = Field(None, description="Alternatives; needs logprobs.")
    echo: bool | None = Field(
        None, description="Begin with the last message, if it is the assistant's."
    )
    add_special_tokens: bool | None = Field(
        None, description="Add the tokenizer's special tokens; null: as transformers does."
    )
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = Field(
        None, description="Continue the last message; needs add_generation_prompt false."
    )
    documents: list[dict[str, Any]] | None = Field(None, description="Passed to the template.")
    reasoning_effort: str | None = Field(
        None, description="Passed to the template; none turns reasoning off."
    )
    reasoning: ChatReasoning | None = Field(
        None, description="Another form of reasoning_effort and the other reasoning fields."
    )
    verbosity: str | None = Field(None, description="A hint; passed to the template.")

    @model_validator(mode="after")
    def _take_reasoning(self) -> ChatBody:
        """Sets the fields that `reasoning` stands for.

        Raises:
            ApiError: 400 for a field that is given in both forms with different values.
        """
        given = self.reasoning
        if given is None:
            return self
        for name, other, value in (
            ("effort", "reasoning_effort", given.effort),
            ("max_tokens", "thinking_token_budget", given.max_tokens),
            ("enabled", "enable_thinking", given.enabled),
            ("exclude", "include_reasoning", None if given.exclude is None else not given.exclude),
        ):
            if value is not None and getattr(self, other) not in (None, value):
                raise contradiction(f"reasoning.{name}", other)
            if value is not None:
                setattr(self, other, value)
        return self


class DocumentBody(Body):
    """`POST /extract_text`."""

    data: str = Field(description="A PDF in base64.")


class CompletionBody(GenerationBody):
    """`POST /v1/completions`."""

    refused: ClassVar[tuple[str, ...]] = (*GenerationBody.refused, "tools", "functions")

    tools: list[Any] | None = Field(None, description="Chats only: 400.")
    tool_choice: Literal["none", "auto"] | None = Field(
        None, description="No effect: completions have no tools."
    )
    parallel_tool_calls: bool | None = Field(None, description="No effect without tools.")
    functions: list[Any] | None = Field(None, description="Chats only: 400.")
    function_call: Literal["none", "auto"] | None = Field(
        None, description="No effect, like tool_choice."
    )

    prompt: (
        str
        | TokenIds
        | Annotated[list[str], Field(max_length=MAX_SEQUENCES_PER_REQUEST, fail_fast=True)]
        | Annotated[list[TokenIds], Field(max_length=MAX_SEQUENCES_PER_REQUEST, fail_fast=True)]
    )
    max_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | None = Field(
        None, description="16 by default; 0 only with echo."
    )
    best_of: Annotated[int, Field(ge=1, le=256)] | None = Field(
        None, description="Generate this many answers; return the n likeliest."
    )
    logprobs: NumLogprobs | None = None
    echo: bool | None = Field(None, description="Begin with the prompt.")
    suffix: str | None = Field(None, description="Not supported: 400.")
    max_completion_tokens: MaxTokens | None = Field(None, description="The same as max_tokens.")
    verbosity: Literal["medium"] | None = Field(
        None, description="No effect: completions have no template."
    )
    add_special_tokens: bool | None = Field(
        None, description="Add the tokenizer's special tokens; true by default."
    )


class TokenizeBody(MediaFields):
    """`POST /tokenize`: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = Field(
        None, description="true by default for a prompt; for messages, as in a chat."
    )
    add_generation_prompt: bool | None = Field(
        None, description="For messages only, as the fields below."
    )
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[ToolBody], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None


class DetokenizeBody(Body):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: TokenIds


def contradiction(name: str, other: str) -> ApiError:
    """400 for two fields of one meaning with different values."""
    return bad_request(name, f"{other} and {name} mean the same but say different things")
