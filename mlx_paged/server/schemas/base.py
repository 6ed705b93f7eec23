"""What every request body shares."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]


class Body(BaseModel):
    """A request's body.

    Types are strict ("5" is no number), numbers finite. Fields that nobody knows are kept apart in
    `model_extra`: the server logs them, or refuses them under ``--strict-requests``.
    """

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class StreamOptions(Body):
    """What a stream carries besides text."""

    include_usage: bool | None = Field(None, description="Send usage in a last chunk.")
    continuous_usage_stats: bool | None = Field(None, description="Send usage in every chunk.")
    include_obfuscation: Literal[False] | None = None


class ResponseFormat(Body):
    """Only plain text so far."""

    type: str


class Unsupported(Body):
    """Known fields whose feature this server does not have: refused, never ignored."""

    tools: list[Any] | None = Field(None, description="Not supported yet: 400.")
    tool_choice: Any = Field(None, description='Only "none", or "auto" without tools.')
    parallel_tool_calls: bool | None = Field(None, description="Means nothing without tools.")
    functions: list[Any] | None = Field(None, description="Not supported: 400.")
    function_call: Any = Field(None, description="Not supported: 400.")
    response_format: ResponseFormat | None = Field(
        None, description='Only {"type": "text"} so far.'
    )
    structured_outputs: Any = Field(None, description="Not supported yet: 400.")
    guided_json: Any = Field(None, description="Not supported yet: 400.")
    guided_regex: Any = Field(None, description="Not supported yet: 400.")
    guided_choice: Any = Field(None, description="Not supported yet: 400.")
    guided_grammar: Any = Field(None, description="Not supported yet: 400.")
    prediction: Any = Field(None, description="Not supported: 400.")
    audio: Any = Field(None, description="Not supported: 400.")
    modalities: list[str] | None = Field(None, description='Only ["text"].')
    store: bool | None = Field(None, description="true is refused: nothing is stored.")
    service_tier: str | None = Field(None, description='Only "auto" or "default".')
    web_search_options: Any = Field(None, description="Not supported: 400.")
    prompt_embeds: Any = Field(None, description="Not supported: 400.")
    use_beam_search: bool | None = Field(None, description="true is not supported: 400.")
    length_penalty: float | None = Field(None, description="Of beam search: only 1.")
    verbosity: str | None = Field(None, description='Only "medium": models are not told.')
    moderation: Any = Field(None, description="Not supported: 400.")
    prompt_cache_retention: str | None = Field(None, description='Only "in_memory".')
    prompt_cache_options: Any = Field(None, description="Not supported: 400.")
    include_reasoning: bool | None = Field(None, description="false is not supported yet: 400.")
    thinking_token_budget: Any = Field(None, description="Not supported yet: 400.")
    logits_processors: Any = Field(None, description="Not supported: 400.")
    mm_processor_kwargs: Any = Field(None, description="Not supported: 400.")
    kv_transfer_params: Any = Field(None, description="Not supported: 400.")
    vllm_xargs: Any = Field(None, description="Not supported: 400.")

    def unsupported(self) -> tuple[str, str] | None:
        """The first field that asks for what there is not, and why that is refused."""
        for names, reason in (
            (_LATER, "is not supported yet by this server"),
            (_NEVER, "is not supported by this server"),
        ):
            for name in names:
                value = getattr(self, name)
                if value is not None and value != []:
                    return name, f"{name} {reason}"
        if self.tool_choice not in (None, "none", "auto"):
            reason = "is not supported yet by this server: only 'none' and 'auto', without tools"
            return "tool_choice", f"tool_choice {reason}"
        if self.response_format is not None and self.response_format.type != "text":
            reason = "is not supported yet by this server: only {'type': 'text'}"
            return "response_format", f"response_format {reason}"
        for name, allowed, reason in _ONLY:
            if getattr(self, name) not in (None, *allowed):
                return name, f"{name} must be {' or '.join(map(repr, allowed))}: {reason}"
        return None


# Refused where they are given at all ([] is nothing).
_LATER = (
    "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    "tools", "functions", "thinking_token_budget",
)  # fmt: skip
_NEVER = (
    "function_call", "prediction", "audio", "web_search_options", "prompt_embeds", "moderation",
    "prompt_cache_options", "logits_processors", "mm_processor_kwargs", "kv_transfer_params",
    "vllm_xargs",
)  # fmt: skip
# (field, values that ask for what this server does anyway, why it takes no other).
_ONLY: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("modalities", (["text"],), "this server writes text only"),
    ("store", (False,), "this server stores nothing"),
    ("service_tier", ("auto", "default"), "there is one tier"),
    ("use_beam_search", (False,), "this server has no beam search"),
    ("length_penalty", (1,), "this server has no beam search"),
    ("verbosity", ("medium",), "models are not told"),
    ("prompt_cache_retention", ("in_memory",), "prefixes are kept in memory only"),
    ("include_reasoning", (True,), "reasoning is not told apart yet"),
)
