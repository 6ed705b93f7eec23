"""Fields that chat and plain completions share: sampling, stopping, streaming, vLLM's extras."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from mlx_paged.server.schemas.base import StreamOptions, TokenId, Unsupported

StopString = Annotated[str, Field(min_length=1, max_length=1024)]
BiasKey = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
Label = Annotated[str, Field(max_length=512)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


class GenerationBody(Unsupported):
    """What chat and plain completions have in common. null stands for the default everywhere."""

    model: str | None = Field(None, description="One of the served names; null: the first.")

    # Sampling.
    temperature: Annotated[float, Field(ge=0, le=100)] | None = Field(
        None, description="0 is greedy; 1 by default, unless the model has a default of its own."
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
        None, description="Token id (as a string) to what is added to its logit."
    )
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=1 << 20)] | None = (
        Field(None, description="Nothing but these tokens is generated.")
    )
    bad_words: Annotated[list[StopString], Field(max_length=256)] | None = Field(
        None, description="Texts that are not generated."
    )
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = Field(
        None, description="Makes a sampled answer repeatable."
    )
    n: Annotated[int, Field(ge=1, le=256)] | None = None

    # Where an answer ends.
    stop: StopString | Annotated[list[StopString], Field(max_length=64)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024)] | None = None
    include_stop_str_in_output: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    ignore_eos: bool | None = None

    # What the answer tells.
    prompt_logprobs: Annotated[int, Field(ge=0)] | None = Field(
        None, description="Log-probabilities of the prompt, and of so many alternatives."
    )
    skip_special_tokens: bool | None = Field(
        None, description="Leave special tokens out of the text; true by default."
    )
    spaces_between_special_tokens: bool | None = Field(
        None, description="true needs skip_special_tokens: this server adds no spaces."
    )
    return_tokens_as_token_ids: bool | None = Field(
        None, description='Name tokens "token_id:7" in log-probabilities.'
    )
    return_token_ids: bool | None = Field(None, description="Token ids beside the text.")

    # Streaming.
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    # The request as such.
    user: Label | None = Field(None, description="Logged.")
    safety_identifier: Label | None = Field(None, description="Logged.")
    metadata: Annotated[dict[Label, Label], Field(max_length=16)] | None = Field(
        None, description="Logged."
    )
    prompt_cache_key: Label | None = Field(
        None, description="A hint for the placement of requests; there is one cache here."
    )
    priority: Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)] | None = Field(
        None, description="Lower is served first; needs --scheduling-policy priority."
    )
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = Field(
        None, description="Requests of different salts share no cached blocks."
    )
    request_id: Annotated[str, Field(pattern=r"^[\x21-\x7e]{1,128}$")] | None = Field(
        None, description="Instead of the X-Request-Id header."
    )

    # The prompt.
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = Field(
        None, description="Keep only so many of the last tokens; -1: as many as the model takes."
    )

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_continuous_usage(self) -> bool:
        """Whether each chunk carries usage."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)
