"""Request bodies of `/v1/responses`, and the conversion of tools, tool choice and text format."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from starlette.requests import Request

from mlx_paged.engine.grammar import StructuredOutputs
from mlx_paged.parsing.custom import custom_tool
from mlx_paged.parsing.definitions import InputGrammar, Tool, ToolChoice
from mlx_paged.server import conversions, tool_requests
from mlx_paged.server.bodies import Body, GenerationBody, MaxTokens, contradiction
from mlx_paged.server.context import request_log_of
from mlx_paged.server.errors import bad_request, own_names
from mlx_paged.server.tool_requests import (
    MAX_TOOLS,
    Name,
    check_parameters,
    require_distinct,
    structured_outputs_of,
)

logger = logging.getLogger(__name__)

#: Joins a namespace and the name of a function in the name that the model sees.
JOINER = "__"

LOGPROBS, ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"
#: Supported values of `include`.
INCLUDABLE = (LOGPROBS, ENCRYPTED)


class Part(Body):
    """A part of a message, of reasoning, or of a call's output."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = Field(None, description="URL of an input_image: data:, https:, ...")
    detail: str | None = Field(None, description="For an input_image; low shrinks it.")
    file_id: str | None = Field(None, description="Not supported: 400.")
    filename: str | None = Field(None, description="Name of an input_file.")
    file_data: str | None = Field(
        None, description="Content of an input_file: a PDF or text, in base64 or as a data: URL."
    )
    file_url: str | None = Field(None, description="Not supported: 400.")


Parts = Annotated[list[Part], Field(fail_fast=True)]


class InputItem(Body):
    """An item of `input`. Its type determines which fields are used."""

    type: str | None = Field(
        None,
        description="message (the default), function_call, function_call_output, "
        "custom_tool_call, custom_tool_call_output, reasoning or item_reference.",
    )
    id: Annotated[str, Field(max_length=256)] | None = None
    status: str | None = None
    role: str | None = Field(None, description="user, assistant, system or developer.")
    content: str | Parts | None = None
    call_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    name: Name | None = None
    namespace: Name | None = None
    arguments: str | None = Field(None, description="Arguments of a call, as JSON text.")
    input: str | None = Field(None, description="Input of a call of a custom tool.")
    output: str | Parts | None = Field(None, description="Output of a call.")
    summary: Parts | None = Field(None, description="Summary of reasoning.")
    encrypted_content: str | None = Field(
        None, description="Encrypted reasoning; ignored unless this server wrote it."
    )


class CustomFormat(Body):
    """The input format of a custom tool."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = Field(None, description="lark: without recursion.")
    definition: Annotated[str, Field(max_length=1 << 16)] | None = None


class ResponseTool(Body):
    """A function, a custom tool, or a namespace of both."""

    type: str = Field(description="function, custom or namespace; web_search is ignored.")
    name: Name | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON Schema of an object.")
    strict: bool | None = Field(
        None, description="Refuse the request if the schema cannot be enforced."
    )
    format: CustomFormat | None = Field(
        None, description="Input format of a custom tool; null: any text."
    )
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS)] | None = Field(
        None, description="The tools of a namespace."
    )


class ToolChoiceObject(Body):
    """A tool that must be called, or tools that may be called."""

    type: str = Field(description="function, custom or allowed_tools.")
    name: Name | None = None
    namespace: Name | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[dict[str, Any]] | None = None


class TextFormat(Body):
    """The format of the text."""

    type: str = Field(description="text, json_object or json_schema.")
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Body):
    """Options for the text of the answer."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = Field(
        None, description="A hint; passed to the template."
    )


class Reasoning(Body):
    """Options for reasoning."""

    effort: Annotated[str, Field(max_length=64)] | None = Field(
        None, description="Passed to the template; none turns reasoning off."
    )
    summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="The summary is the reasoning itself."
    )
    generate_summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="The older name of summary."
    )
    context: Literal["auto"] | None = Field(None, description="The template decides.")
    mode: Literal["standard"] | None = None


Input = str | Annotated[list[InputItem], Field(fail_fast=True)]
Include = Annotated[list[str], Field(max_length=64)]
Tools = Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS, fail_fast=True)]


class ResponseBody(GenerationBody):
    """`POST /v1/responses`."""

    refused: ClassVar[tuple[str, ...]] = (
        *GenerationBody.refused, "conversation", "prompt", "context_management",
    )  # fmt: skip

    input: Input
    instructions: str | None = Field(None, description="A system message before the input.")
    previous_response_id: str | None = Field(None, description="Continue from a stored response.")
    store: bool | None = Field(
        None, description="Keep the response in memory for later requests; true by default."
    )
    include: Include | None = Field(None, description=f"{LOGPROBS}, {ENCRYPTED}.")
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoiceObject | None = None
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call.")
    max_tool_calls: Annotated[int, Field(ge=1)] | None = Field(
        None, description="No effect: there are no built-in tools."
    )
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    max_output_tokens: MaxTokens | None = Field(
        None, description="null: as many as the context allows."
    )
    top_logprobs: Annotated[int, Field(ge=0)] | None = Field(
        None, description="Alternatives per token of the text."
    )
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="auto: leave out the oldest messages where the input is too long."
    )
    chat_template: str | None = Field(
        None, description="Jinja source; needs --trust-request-chat-template."
    )
    chat_template_kwargs: dict[str, Any] | None = None
    client_metadata: dict[str, Any] | None = Field(None, description="Accepted without effect.")

    enable_response_messages: bool | None = Field(None, description="true: 400.")
    previous_input_messages: Any = Field(None, description="Not supported: 400.")
    previous_response: Any = Field(None, description="Not supported: 400.")
    background: bool | None = Field(
        None,
        description="true: return at once, and generate the response even if no client reads it.",
    )
    conversation: Any = Field(None, description="Not supported: 400.")
    prompt: Any = Field(None, description="Not supported: 400.")
    context_management: Any = Field(None, description="Not supported: 400.")

    def unsupported(self) -> tuple[str, str] | None:
        found = super().unsupported()
        if found is not None:
            return found
        for name, allowed, reason in _ONLY:
            if getattr(self, name) not in (None, *allowed):
                return name, f"{name} {reason}"
        for i, name in enumerate(self.include or ()):
            if name not in INCLUDABLE:
                where = f"include[{i}]"
                return where, f"{where} must be one of {', '.join(INCLUDABLE)} but got {name!r}"
        return None


# (field, accepted values, why no others are accepted).
_ONLY: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("n", (1,), "must be 1: a response has one answer"),
    ("response_format", (), "is a field of chats: give text.format"),
    ("prompt_logprobs", (), "is not supported: responses do not contain it"),
    ("truncate_prompt_tokens", (), "is a field of chats: give truncation"),
    ("truncation_side", (), "is a field of chats: give truncation"),
    ("enable_response_messages", (False,), "must be false: a response has items"),
    ("previous_input_messages", (), "is not supported: give input"),
    ("previous_response", (), "is not supported: give previous_response_id, or input"),
    ("return_token_ids", (False,), "must be false: a response has no field for them"),
)


class InputTokensBody(Body):
    """`POST /v1/responses/input_tokens`: the fields of `ResponseBody` that make the prompt."""

    model: str | None = None
    input: Input | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoiceObject | None = None
    parallel_tool_calls: bool | None = Field(None, description="No effect on the prompt.")
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="No effect: the whole input is counted."
    )
    conversation: None = None
    personality: None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


PromptBody = ResponseBody | InputTokensBody


def tools_of(body: PromptBody, request: Request) -> tuple[Tool, ...]:
    """Converts the tools of a body. Tools in namespaces get joined names.

    Raises:
        ApiError: 400 for a built-in tool, one without a name, or a repeated name.
    """
    found: list[Tool] = []
    ignored = []
    for i, tool in enumerate(body.tools or ()):
        where = f"tools[{i}]"
        if tool.type in ("function", "custom"):
            found.append(_tool(tool, where))
        elif tool.type == "namespace":
            found += _namespace(tool, where)
        elif tool.type.startswith("web_search"):
            ignored.append(tool.type)
        else:
            raise bad_request(
                f"{where}.type",
                f"{where}.type must be 'function', 'custom', 'namespace' or 'web_search' but got "
                f"{tool.type!r}: this server has no built-in tools",
                "unsupported_parameter",
            )
    if ignored:
        request_id = request_log_of(request).request_id
        logger.info("ignored tools: %s", ", ".join(ignored), extra={"request_id": request_id})
    require_distinct(found)
    return tuple(found)


def _tool(tool: ResponseTool, where: str) -> Tool:
    """Converts a function or a custom tool."""
    if tool.name is None:
        raise bad_request(f"{where}.name", f"{where}.name is missing", "missing_field")
    if tool.type == "custom":
        if tool.format is None or tool.format.type == "text":
            return custom_tool(tool.name, tool.description, where)
        where = f"{where}.format"
        syntax, definition = tool.format.syntax, tool.format.definition
        if syntax is None or definition is None:
            at = f"{where}.{'syntax' if syntax is None else 'definition'}"
            raise bad_request(at, f"{at} is missing", "missing_field")
        grammar = InputGrammar(syntax, definition)
        return custom_tool(tool.name, tool.description, f"{where}.definition", grammar)
    schema = {"type": "object", "properties": {}} if tool.parameters is None else tool.parameters
    check_parameters(schema, f"{where}.parameters")
    field = f"{where}.parameters"
    return Tool(tool.name, tool.description, schema, bool(tool.strict), field=field)


def _namespace(tool: ResponseTool, where: str) -> list[Tool]:
    """Flattens a namespace into its tools, and prefixes the first description with its own."""
    if tool.name is None:
        raise bad_request(f"{where}.name", f"{where}.name is missing", "missing_field")
    found = []
    for i, inner in enumerate(tool.tools or ()):
        there = f"{where}.tools[{i}]"
        if inner.type not in ("function", "custom"):
            raise bad_request(
                f"{there}.type",
                f"{there}.type must be 'function' or 'custom' but got {inner.type!r}",
                "unsupported_parameter",
            )
        plain = _tool(inner, there)
        descriptions = (tool.description if i == 0 else None, plain.description)
        found.append(
            replace(
                plain,
                name=joined(tool.name, plain.name),
                description="\n\n".join(filter(None, descriptions)) or None,
                namespace=tool.name,
            )
        )
    return found


def joined(namespace: str | None, name: str) -> str:
    """Returns the name by which the model calls a function."""
    return name if namespace is None else f"{namespace}{JOINER}{name}"


def choice_of(body: PromptBody, tools: tuple[Tool, ...]) -> ToolChoice:
    """Converts the tool choice.

    Raises:
        ApiError: 400 for a choice that names no tool of the request.
    """
    given, several = body.tool_choice, body.parallel_tool_calls is not False
    if given is None or isinstance(given, str):
        if given == "required" and not tools:
            raise bad_request("tool_choice", "tool_choice 'required' needs functions in tools")
        if not tools or given == "none":
            return ToolChoice("none")
        return ToolChoice(given or "auto", parallel=several)
    if given.type in ("function", "custom"):
        if given.name is None:
            raise bad_request("tool_choice.name", "tool_choice.name is missing", "missing_field")
        names = _named(given.namespace, given.name, tools, "tool_choice")
        return ToolChoice("named", names, parallel=False)
    if given.type != "allowed_tools":
        raise bad_request(
            "tool_choice.type",
            "tool_choice.type must be 'function', 'custom' or 'allowed_tools' but got "
            f"{given.type!r}: this server has no built-in tools",
            "unsupported_parameter",
        )
    for field in ("mode", "tools"):
        if getattr(given, field) is None:
            where = f"tool_choice.{field}"
            raise bad_request(where, f"{where} is missing", "missing_field")
    assert given.mode is not None and given.tools is not None
    allowed: list[str] = []
    for i, entry in enumerate(given.tools):
        allowed += _allowed(entry, tools, f"tool_choice.tools[{i}]")
    if not allowed and given.mode == "auto":
        return ToolChoice("none")
    if not allowed:
        raise bad_request("tool_choice.tools", "tool_choice.tools must have a function to call")
    return ToolChoice(given.mode, tuple(dict.fromkeys(allowed)), parallel=several)


def _allowed(entry: dict[str, Any], tools: tuple[Tool, ...], where: str) -> tuple[str, ...]:
    """Returns the names of the tools that an entry of `allowed_tools` allows."""
    kind, name, namespace = entry.get("type"), entry.get("name"), entry.get("namespace")
    if isinstance(kind, str) and kind.startswith("web_search"):
        return ()
    if not isinstance(name, str) or not isinstance(namespace, str | None):
        raise bad_request(where, f"{where} must name a function or a namespace")
    if kind in ("function", "custom"):
        return _named(namespace, name, tools, where)
    found = tuple(tool.name for tool in tools if kind == "namespace" and tool.namespace == name)
    if not found:
        raise bad_request(where, f"{where} must be a function or namespace of tools")
    return found


def _named(
    namespace: str | None, name: str, tools: tuple[Tool, ...], where: str
) -> tuple[str, ...]:
    """Finds a tool by its name, with or without its namespace; returns a tuple of its full name."""
    wanted = joined(namespace, name)
    for tool in tools:
        if tool.name == wanted:
            return (tool.name,)
    found = tuple(t.name for t in tools if namespace is None and t.local_name == name)
    if len(found) == 1:
        return found
    problem = "several namespaces have it" if found else "tools does not have it"
    raise bad_request(where, f"{where} names {wanted!r}, but {problem}")


def text_of(body: ResponseBody) -> StructuredOutputs | None:
    """Returns the constraint on the answer's text; None means free text.

    Raises:
        ApiError: 400 for an unknown format, or two of them.
        InvalidParameterError: A value that `StructuredOutputs` refuses.
    """
    wanted = structured_outputs_of(body)
    given = None if body.text is None else body.text.format
    if given is None or given.type == "text":
        return wanted
    if wanted is not None:
        raise bad_request(
            "structured_outputs",
            "structured_outputs must not be given together with text.format",
        )
    if given.type == "json_object":
        return StructuredOutputs(json_object=True)
    if given.type != "json_schema":
        raise bad_request(
            "text.format.type",
            "text.format.type must be 'text', 'json_object' or 'json_schema' but got "
            f"{given.type!r}",
        )
    if given.schema_ is None:
        where = "text.format.schema"
        raise bad_request(where, f"{where} is missing", "missing_field")
    with own_names(names_of(body)):
        return StructuredOutputs(json=given.schema_, strict=bool(given.strict))


def names_of(body: ResponseBody) -> dict[str, str]:
    """Maps fields of structured outputs to a body's names, for errors (`errors.own_name`)."""
    given = None if body.text is None else body.text.format
    if given is None or given.type == "text":
        return tool_requests.names_of(body)
    return {
        "structured_outputs": "text.format",
        "structured_outputs.json": "text.format.schema",
        "structured_outputs.json_object": "text.format",
    }


def template_kwargs_of(body: PromptBody) -> dict[str, Any]:
    """Returns the variables of the chat template.

    Raises:
        ApiError: 400 for one that the server sets, or two that contradict each other.
    """
    kwargs = conversions.template_kwargs_of(body.chat_template_kwargs)
    effort = None if body.reasoning is None else body.reasoning.effort
    verbosity = None if body.text is None else body.text.verbosity
    for field, name, value in (
        ("reasoning.effort", "reasoning_effort", effort),
        ("text.verbosity", "verbosity", verbosity),
    ):
        if value is not None and kwargs.setdefault(name, value) != value:
            raise contradiction(field, f"chat_template_kwargs.{name}")
    if effort is not None:  # Some templates think only on request.
        kwargs.setdefault("enable_thinking", effort != "none")
    return kwargs


def summary_of(reasoning: Reasoning | None) -> str | None:
    """Returns the requested kind of reasoning summary; None: the reasoning itself."""
    if reasoning is None:
        return None
    return reasoning.summary or reasoning.generate_summary
