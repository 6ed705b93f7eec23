"""Bodies of Anthropic's requests.

Clients send more fields than a server of one open model supports, and new ones every month. Fields
that change no answer are accepted. Requests for missing features are refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from mlx_paged.server.bodies import Body, Label, StopString
from mlx_paged.server.tool_requests import MAX_TOOLS, Name

_NO_MEANING = "Taken; it changes nothing here."


class Block(Body):
    """A part of a message, or of the result of a tool."""

    type: str
    text: str | None = None
    thinking: str | None = Field(None, description="Of an earlier answer.")
    id: str | None = Field(None, description="Of the use of a tool.")
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = Field(None, description="Which use of a tool this is a result of.")
    content: str | Annotated[list[Block], Field(fail_fast=True)] | None = Field(
        None, description="The result of a tool."
    )
    is_error: bool | None = None
    tool_name: str | None = Field(None, description="Of a tool that was found.")
    title: str | None = Field(None, description="Of a search result, or of a document.")
    context: str | None = Field(None, description="Of a document: what it is about.")
    citations: dict[str, Any] | None = Field(
        None, description="Of a document: citations are not supported, only enabled: false."
    )
    source: Any = Field(None, description="Of an image, a document or a search result.")


Blocks = Annotated[list[Block], Field(fail_fast=True)]


class MessageBody(Body):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: str | Blocks


class ClientTool(Body):
    """A tool that the client runs."""

    type: str | None = Field(
        None,
        description='null or "custom"; bash_20250124, text_editor_20250728 and memory_20250818, '
        "and the older ones, have an input that Anthropic has defined. Others: 400.",
    )
    name: Name | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = Field(None, description="JSON Schema of an object.")
    strict: bool | None = Field(
        None, description="Refuse the request if the schema cannot be enforced."
    )
    max_characters: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Of a text editor: how much of a file it shows."
    )


class Choice(Body):
    """The tools that may be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, description="Of the tool.")
    disable_parallel_tool_use: bool | None = Field(
        None, description="true allows one call at most."
    )


class Thinking(Body):
    """True if the model thinks first."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | None = Field(
        None, description="Maximum tokens of thinking; then its end is forced."
    )
    display: Literal["summarized", "omitted"] | None = Field(
        None, description="omitted leaves the text of thinking out."
    )


class OutputFormat(Body):
    """The constraint on the answer's text."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class OutputConfig(Body):
    """How the model answers."""

    effort: Label | None = Field(None, description="Passed to the template as reasoning_effort.")
    format: OutputFormat | None = None


class Metadata(Body):
    """Metadata of the request."""

    user_id: Annotated[str, Field(max_length=4096)] | None = Field(None, description="Logged.")


class CountBody(Body):
    """`POST /v1/messages/count_tokens`: the parts of a prompt."""

    model: str | None = Field(None, description="A served name; null and default mean the first.")
    messages: Annotated[list[MessageBody], Field(min_length=1, fail_fast=True)]
    system: str | Blocks | None = None
    tools: Annotated[list[ClientTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = Field(
        None, description="An older name of output_config.format."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="vLLM's.")

    # Options of Anthropic's own servers.
    mcp_servers: list[dict[str, Any]] | None = Field(None, description="Not supported: 400.")
    billing_policy: Any = Field(None, description=_NO_MEANING)
    cache_control: Any = Field(None, description="Accepted; prefixes are cached without it.")
    compaction: Any = Field(None, description="Not supported: 400.")
    context_management: Any = Field(None, description=_NO_MEANING)
    speed: Label | None = Field(None, description=_NO_MEANING)
    user_profile_id: Label | None = Field(None, description=_NO_MEANING)
    workspace_id: Label | None = Field(None, description=_NO_MEANING)


class MessagesBody(CountBody):
    """`POST /v1/messages`."""

    max_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] = Field(
        description="0: only compute the prompt, so that its prefix is cached."
    )
    stop_sequences: Annotated[list[StopString], Field(max_length=64)] | None = None
    temperature: Annotated[float, Field(ge=0)] | None = Field(
        None, description="0 is greedy; 1 by default, unless the model has its own default."
    )
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = Field(
        None, description="0 and -1: all tokens."
    )
    stream: bool | None = None
    metadata: Metadata | None = None
    priority: Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)] | None = Field(
        None, description="Lower values go first; needs --scheduling-policy priority."
    )
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = Field(
        None, description="Requests with different salts share no cached blocks."
    )

    # Options of Anthropic's own servers.
    service_tier: Literal["auto", "standard_only"] | None = Field(None, description=_NO_MEANING)
    container: Any = Field(None, description="Not supported: 400.")
    diagnostics: Any = Field(None, description=_NO_MEANING)
    fallback_credit_token: Any = Field(None, description=_NO_MEANING)
    fallbacks: Any = Field(None, description=_NO_MEANING)
    inference_geo: Label | None = Field(None, description=_NO_MEANING)
    thread: Any = Field(None, description="Not supported: 400.")


#: Fields that need work of Anthropic's servers.
REFUSED = ("mcp_servers", "compaction", "container", "thread")
