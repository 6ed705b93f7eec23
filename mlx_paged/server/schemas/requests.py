"""The bodies of requests."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from mlx_paged.server.schemas.base import Body, TokenId
from mlx_paged.server.schemas.generation import GenerationBody

MaxTokens = Annotated[int, Field(ge=1, lt=1 << 31)]
TokenIds = list[TokenId]
NumLogprobs = Annotated[int, Field(ge=0)]


class ContentPart(Body):
    """A part of a message; this server reads text."""

    type: str
    text: str | None = None


class Message(Body):
    """One message of a conversation; fields that the template knows are handed to it."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | list[ContentPart] | None = None
    name: str | None = None


class ChatBody(GenerationBody):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: MaxTokens | None = Field(None, description="null: as many as the context allows.")
    max_completion_tokens: MaxTokens | None = Field(None, description="OpenAI's newer name.")
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = Field(None, description="Alternatives; needs logprobs.")
    echo: bool | None = Field(
        None, description="Begin with the last message, where it is the assistant's."
    )
    add_special_tokens: bool | None = Field(
        None, description="Also those that the tokenizer would add; false by default."
    )
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = Field(
        None, description="Go on with the last message; needs add_generation_prompt false."
    )
    chat_template: str | None = Field(
        None, description="Jinja source; needs --trust-request-chat-template."
    )
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = Field(None, description="Handed to the template.")
    reasoning_effort: str | None = Field(None, description="Handed to the template.")


class CompletionBody(GenerationBody):
    """`POST /v1/completions`."""

    prompt: str | TokenIds | list[str] | list[TokenIds]
    max_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | None = Field(
        None, description="16 by default; 0 only with echo."
    )
    best_of: Annotated[int, Field(ge=1, le=256)] | None = Field(
        None, description="Generate so many, return the n likeliest."
    )
    logprobs: NumLogprobs | None = None
    echo: bool | None = Field(None, description="Begin with the prompt.")
    suffix: str | None = Field(None, description="Not supported: 400.")
    add_special_tokens: bool | None = Field(
        None, description="Those that the tokenizer adds to a text; true by default."
    )


class TokenizeBody(Body):
    """`POST /tokenize`: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = Field(
        None, description="true by default for a prompt, false for messages."
    )
    add_generation_prompt: bool | None = Field(None, description="Of messages only, as the rest.")
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Any] | None = Field(None, description="Not supported yet: 400.")


class DetokenizeBody(Body):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(max_length=1 << 22)]
