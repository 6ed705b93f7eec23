"""Request bodies of Anthropic's API.

Clients send more fields than a server of open models supports, and new ones every month. Fields
that change no answer are accepted; fields that ask for an unsupported feature are refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from mlx_paged.server.bodies import Body, Label, StopString
from mlx_paged.server.tool_requests import MAX_TOOLS, Name

_NO_EFFECT = "Accepted; has no effect here."


class Block(Body):
    """A content block of a message or of a tool result."""

    type: str
    text: str | None = None
    thinking: str | None = Field(None, description="Thinking of an earlier answer.")
    id: str | None = Field(None, description="Id of a tool_use.")
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = Field(None, description="Id of the tool_use that a result answers.")
    content: str | Annotated[list[Block], Field(fail_fast=True)] | None = Field(
        None, description="Content of a tool_result or search_result."
    )
    is_error: bool | None = None
    tool_name: str | None = Field(None, description="Name of a tool that was found.")
    title: str | None = Field(None, description="Title of a search result or a document.")
    context: str | None = Field(None, description="What a document is about.")
    citations: dict[str, Any] | None = Field(
        None, description="Only enabled: false, as citations are not supported."
    )
    source: Any = Field(None, description="Source of an image, a document or a search result.")


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
        "and their older versions, have inputs defined by Anthropic. Others: 400.",
    )
    name: Name | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = Field(None, description="JSON Schema of an object.")
    strict: bool | None = Field(
        None, description="Refuse the request if the schema cannot be enforced."
    )
    max_characters: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Maximum characters of a file that a text editor shows."
    )


class Choice(Body):
    """The tools that may be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, description="Name of the tool.")
    disable_parallel_tool_use: bool | None = Field(
        None, description="true allows at most one call."
    )


class Thinking(Body):
    """Configuration of extended thinking."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | None = Field(
        None, description="Maximum tokens of thinking, which is then ended."
    )
    display: Literal["summarized", "omitted"] | None = Field(
        None, description="omitted: thinking blocks without their text."
    )


class OutputFormat(Body):
    """The constraint on the answer's text."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class OutputConfig(Body):
    """Effort and format of the answer."""

    effort: Label | None = Field(None, description="Passed to the template as reasoning_effort.")
    format: OutputFormat | None = None


class Metadata(Body):
    """Metadata of the request."""

    user_id: Annotated[str, Field(max_length=4096)] | None = Field(None, description="Logged.")


class CountBody(Body):
    """`POST /v1/messages/count_tokens`: the fields that make the prompt."""

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
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="As in vLLM.")

    # Options of Anthropic's own service.
    mcp_servers: list[dict[str, Any]] | None = Field(None, description="Not supported: 400.")
    billing_policy: Any = Field(None, description=_NO_EFFECT)
    cache_control: Any = Field(None, description="Accepted; prefixes are cached without it.")
    compaction: Any = Field(None, description="Not supported: 400.")
    context_management: Any = Field(None, description=_NO_EFFECT)
    speed: Label | None = Field(None, description=_NO_EFFECT)
    user_profile_id: Label | None = Field(None, description=_NO_EFFECT)
    workspace_id: Label | None = Field(None, description=_NO_EFFECT)


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

    # Options of Anthropic's own service.
    service_tier: Literal["auto", "standard_only"] | None = Field(None, description=_NO_EFFECT)
    container: Any = Field(None, description="Not supported: 400.")
    diagnostics: Any = Field(None, description=_NO_EFFECT)
    fallback_credit_token: Any = Field(None, description=_NO_EFFECT)
    fallbacks: Any = Field(None, description=_NO_EFFECT)
    inference_geo: Label | None = Field(None, description=_NO_EFFECT)
    thread: Any = Field(None, description="Not supported: 400.")


#: Fields that ask for features of Anthropic's service.
REFUSED = ("mcp_servers", "compaction", "container", "thread")
