"""Tools, their choice, and the form of the text, as bodies of chats and completions have them."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from mlx_paged.engine import grammar
from mlx_paged.engine.grammar import StructuredOutputs
from mlx_paged.parsing.custom import custom_tool
from mlx_paged.parsing.definitions import InputGrammar, Tool, ToolChoice
from mlx_paged.server.errors import bad_request, own_names

logger = logging.getLogger(__name__)

#: Maximum tools of a request.
MAX_TOOLS = 1024

Name = Annotated[str, Field(min_length=1, max_length=256)]


class _Part(BaseModel):
    """A part of a body. Unknown fields are kept and ignored."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class FunctionBody(_Part):
    """A function that the model may call."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON Schema of an object.")
    strict: bool | None = Field(
        None, description="Refuse the request if the schema cannot be enforced."
    )


class CustomGrammar(_Part):
    """The grammar of a custom tool's input."""

    syntax: Literal["lark", "regex"] = Field(description="lark: without recursion.")
    definition: Annotated[str, Field(max_length=1 << 16)]


class CustomFormat(_Part):
    """The input format of a custom tool."""

    type: Literal["text", "grammar"]
    grammar: CustomGrammar | None = None


class CustomBody(_Part):
    """A custom tool: its input is a text."""

    name: Name
    description: str | None = None
    format: CustomFormat | None = Field(None, description="null: any text.")


class ToolBody(_Part):
    """A tool."""

    type: str = Field(description="function or custom.")
    function: FunctionBody | None = None
    custom: CustomBody | None = None


class NamedFunction(_Part):
    """The name of a function, or of a custom tool."""

    name: Name


class AllowedTools(_Part):
    """Some of the tools."""

    mode: Literal["auto", "required"]
    tools: list[dict[str, Any]]


class ToolChoiceBody(_Part):
    """One tool, or some of them."""

    type: Literal["function", "custom", "allowed_tools"]
    function: NamedFunction | None = None
    custom: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None


class JsonSchemaFormat(_Part):
    """A JSON schema with a name."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(_Part):
    """The format of an answer's text."""

    type: str
    json_schema: JsonSchemaFormat | None = None


class CallFunction(_Part):
    """The function of a call, and its arguments as JSON text."""

    name: str
    arguments: str | dict[str, Any] | None = None


class CallInput(_Part):
    """The custom tool of a call, and its input."""

    name: str
    input: str | None = None


class CallBody(_Part):
    """A call in an earlier answer: of a function, or of a custom tool."""

    id: str | None = None
    type: str | None = None
    function: CallFunction | None = None
    custom: CallInput | None = None


def tools_of(tools: list[ToolBody] | None, functions: list[FunctionBody] | None) -> list[Tool]:
    """Returns the tools of a body; `functions` is their legacy form.

    Raises:
        ApiError: 400 for a tool of another kind, and for a name that is used twice.
    """
    if tools and functions:
        raise bad_request("functions", "functions must not be given beside tools")
    found = []
    for i, tool in enumerate(tools or ()):
        if tool.type not in ("function", "custom"):
            where = f"tools[{i}].type"
            raise bad_request(
                where, f"{where} must be 'function' or 'custom' but got {tool.type!r}"
            )
        where = f"tools[{i}].{tool.type}"
        if getattr(tool, tool.type) is None:
            raise bad_request(where, f"{where} is missing", "missing_field")
        if tool.custom is not None and tool.type == "custom":
            found.append(_custom(tool.custom, where))
        elif tool.function is not None:
            found.append(_tool(tool.function, where))
    found += [_tool(function, f"functions[{i}]") for i, function in enumerate(functions or ())]
    require_distinct(found)
    return found


def _tool(body: FunctionBody, where: str) -> Tool:
    schema = {"type": "object", "properties": {}} if body.parameters is None else body.parameters
    check_parameters(schema, f"{where}.parameters")
    return Tool(body.name, body.description, schema, bool(body.strict), field=f"{where}.parameters")


def _custom(body: CustomBody, where: str) -> Tool:
    if body.format is None or body.format.type == "text":
        return custom_tool(body.name, body.description, where)
    where = f"{where}.format.grammar"
    grammar = body.format.grammar
    if grammar is None:
        raise bad_request(where, f"{where} is missing", "missing_field")
    field = f"{where}.definition"
    wanted = InputGrammar(grammar.syntax, grammar.definition)
    return custom_tool(body.name, body.description, field, wanted)


def check_parameters(schema: dict[str, Any], where: str) -> None:
    """Refuses a schema that is not for an object, because arguments are one.

    Raises:
        ApiError: It is for another type.
    """
    kind = schema.get("type", "object")
    if kind != "object":
        raise bad_request(where, f"{where}.type must be 'object' but got {kind!r}")


def require_distinct(tools: Iterable[Tool]) -> None:
    """Refuses two tools with the same name.

    Raises:
        ApiError: There are two.
    """
    names = set()
    for tool in tools:
        if tool.name in names:
            raise bad_request("tools", f"tools must have different names but two are {tool.name!r}")
        names.add(tool.name)


def choice_of(
    given: str | ToolChoiceBody | None, parallel: bool | None, tools: Iterable[Tool]
) -> ToolChoice:
    """Returns the tools that may be called.

    Raises:
        ApiError: 400 for a choice without tools, or without fields that its type needs.
    """
    several = parallel is not False
    if not tools:
        if isinstance(given, ToolChoiceBody) or given == "required":
            raise bad_request("tool_choice", "tool_choice needs tools")
        return ToolChoice("none")
    if given is None or given == "auto":
        return ToolChoice("auto", parallel=several)
    if given == "none":
        return ToolChoice("none")
    if given == "required":
        return ToolChoice("required", parallel=several)
    assert isinstance(given, ToolChoiceBody)
    if given.type != "allowed_tools":
        named: NamedFunction | None = getattr(given, given.type)
        where = f"tool_choice.{given.type}"
        if named is None:
            raise bad_request(where, f"{where} is missing")
        return ToolChoice("named", (named.name,), parallel=False)
    if given.allowed_tools is None:
        raise bad_request("tool_choice.allowed_tools", "tool_choice.allowed_tools is missing")
    names = []
    for i, tool in enumerate(given.allowed_tools.tools):
        function = tool.get("function", tool.get("custom", tool))
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str):
            where = f"tool_choice.allowed_tools.tools[{i}]"
            raise bad_request(where, f"{where} must name a tool")
        names.append(name)
    return ToolChoice(given.allowed_tools.mode, tuple(names), parallel=several)


def format_of(given: ResponseFormat | None) -> StructuredOutputs | None:
    """Reads `response_format`; None means free text.

    Raises:
        ApiError: 400 for an unknown type, or a schema that is missing.
        InvalidParameterError: The schema is invalid.
    """
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return StructuredOutputs(json_object=True)
    if given.type == "json_schema":
        body = given.json_schema
        if body is None:
            where = "response_format.json_schema"
            raise bad_request(where, f"{where} is missing", "missing_field")
        if body.schema_ is None:
            where = "response_format.json_schema.schema"
            raise bad_request(where, f"{where} is missing", "missing_field")
        return StructuredOutputs(json=body.schema_, strict=bool(body.strict))
    if given.type == "structural_tag":  # vLLM's type
        return StructuredOutputs(structural_tag={"type": given.type, **(given.model_extra or {})})
    raise bad_request(
        "response_format.type",
        "response_format.type must be 'text', 'json_object', 'json_schema' or 'structural_tag' but "
        f"got {given.type!r}",
    )


#: Older names of vLLM's, and the fields of `structured_outputs` that they are.
GUIDED = {
    "guided_json": "json",
    "guided_json_object": "json_object",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_whitespace_pattern": "whitespace_pattern",
    "structural_tag": "structural_tag",
}


def structured_outputs_of(body: Any) -> StructuredOutputs | None:
    """Returns the constraint on an answer's text, from whichever field of a body has it.

    Raises:
        ApiError: 400 for two of them.
        InvalidParameterError: `StructuredOutputs` refuses a value.
    """
    guided = {
        field: value
        for name, field in GUIDED.items()
        if (value := getattr(body, name, None)) is not None
    }
    with own_names(names_of(body)):
        from_format = format_of(body.response_format)
    given = [
        name
        for name, is_given in (
            ("response_format", from_format is not None),
            ("structured_outputs", body.structured_outputs is not None),
            ("guided_json, guided_regex, ...", bool(guided)),
        )
        if is_given
    ]
    if len(given) > 1:
        raise bad_request(
            given[1], f"{given[1]} must not be given beside {given[0]}: each says what the text is"
        )
    if from_format is not None:
        return from_format
    wanted = body.structured_outputs if body.structured_outputs is not None else guided or None
    with own_names(names_of(body)):
        return grammar.structured_outputs_of(wanted)


def names_of(body: Any) -> dict[str, str]:
    """Maps fields of structured outputs to a body's names, for errors (`errors.own_name`)."""
    if body.response_format is not None and body.response_format.type != "text":
        schema = "response_format.json_schema.schema"
        return {
            "structured_outputs": "response_format",
            "structured_outputs.json": schema,
            "structured_outputs.json_object": "response_format",
            "structured_outputs.structural_tag": "response_format",
        }
    return {
        f"structured_outputs.{field}": name
        for name, field in GUIDED.items()
        if getattr(body, name, None) is not None
    }
