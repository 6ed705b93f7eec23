"""Prepares a turn: renders its prompt, and determines the grammar of its answers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, cast

from starlette.requests import Request

from mlx_paged.content import sources_of
from mlx_paged.engine.grammar import StructuredOutputs
from mlx_paged.engine.grammar.dead_ends import without_impossible_parts
from mlx_paged.engine.grammar.lark import with_forcing
from mlx_paged.engine.grammar.schema import prepare_schema
from mlx_paged.engine.sampling_params import SamplingParams
from mlx_paged.errors import InvalidParameterError
from mlx_paged.parsing.custom import with_pattern
from mlx_paged.parsing.definitions import Tool, ToolChoice
from mlx_paged.parsing.format import ToolFormat, arguments_schema, lark_json
from mlx_paged.parsing.parameters import unenforced_paths
from mlx_paged.server.context import context_of
from mlx_paged.server.errors import bad_request, own_name, own_names
from mlx_paged.server.served_model import ServedModel
from mlx_paged.server.streaming import unless_disconnected
from mlx_paged.server.turn import PreparedTurn, Turn


async def prepare(
    request: Request, model: ServedModel, turn: Turn, params: SamplingParams
) -> PreparedTurn:
    """Renders the prompt of a turn, and determines the constraint on its answers.

    Args:
        model: The model that answers.
        params: Parameters of the answers; `structured_outputs` comes from the turn.

    Raises:
        ApiError: The model's template cannot render the turn, or the turn contradicts itself.
        InvalidParameterError: The constraint is invalid, or cannot be enforced.
        InvalidMediaError: An image, a video or a sound is unusable.
    """
    renderer = model.renderer
    offered = turn.tools if turn.choice.mode != "none" else ()
    callable_tools = turn.choice.of(turn.tools)
    if turn.choice.names is not None:
        for name in turn.choice.names:
            if all(tool.name != name for tool in turn.tools):
                raise bad_request("tool_choice", f"tool_choice names {name!r}, which tools lack")
    if turn.choice.forces_a_call and not callable_tools:
        raise bad_request("tool_choice", f"tool_choice {turn.choice.mode!r} needs tools")
    tool_format = model.tool_format
    if offered:
        check_takes_tools(model)
        takes_auto = context_of(request).config.enable_auto_tool_choice
        if turn.choice.mode == "auto" and not takes_auto:
            raise bad_request(
                "tool_choice",
                "tool_choice must not be 'auto': the server was started with "
                "--no-enable-auto-tool-choice",
                "unsupported_parameter",
            )
    conversation = replace(turn.conversation, tools=offered)
    if sources_of(conversation.messages):  # Loading media may take long.
        rendered = await unless_disconnected(request, renderer.prompt(conversation))
    else:
        rendered = await renderer.prompt(conversation)
    constraint, relaxed, names = await _constraint_in_time(model, turn, callable_tools)
    reads_markers = turn.parses and (
        bool(tool_format and tool_format.reads(offered)) or model.reasoning_format is not None
    )
    return PreparedTurn(
        rendered.token_ids,
        rendered.media,
        params.constrained(
            constraint,
            # Markers are special tokens in many models; the lexer leaves the others out.
            skip_special_tokens=params.skip_special_tokens and not reads_markers,
        ),
        callable_tools,
        relaxed,
        turn.choice.forces_a_call,
        names,
        model,
        tool_format,
        reads_markers,
        not params.skip_special_tokens or not reads_markers,
        rendered.spelling,
        sum(len(message.get("tool_calls") or ()) for message in conversation.messages),
    )


def check_takes_tools(model: ServedModel, param: str = "tools") -> None:
    """Refuses tools if the prompt cannot describe them, or calls cannot be recognized.

    Args:
        param: The field of the tools in the body.

    Raises:
        ApiError: 400 with the reason.
    """
    if model.renderer.renders_tools and model.tool_format is not None:
        return
    lacks = "its chat template has no place for them"
    if model.renderer.renders_tools:
        lacks = f"{model.no_tool_format} (see --tool-call-parser)"
    raise bad_request(
        param,
        f"{param} cannot be given to this model: {lacks}; a server started with --tool-template "
        "describes them in a message of its own",
        "unsupported_parameter",
    )


# Maximum schemas of a request that are compiled one by one to find the one that fails.
_MAX_PARTS = 64


class _Constraint(NamedTuple):
    """The constraint on the answers of a turn.

    Attributes:
        outputs: None means no constraint.
        relaxed: Parts of schemas that are not enforced.
        names: The request's names of the fields of `outputs`, for errors.
    """

    outputs: StructuredOutputs | None
    relaxed: tuple[str, ...]
    names: Mapping[str, str]


async def _constraint_in_time(
    model: ServedModel, turn: Turn, tools: tuple[Tool, ...]
) -> _Constraint:
    """Like `_constraint`, with a time limit for hostile schemas, and checked by compiling."""
    if turn.structured_outputs is None and not (tools and _follows_grammar(turn, tools)):
        return _Constraint(None, (), turn.names)
    compiler = model.engine.grammar_compiler
    # The field being compiled; a thread changes it.
    schema_field = own_name("structured_outputs.json", turn.names)
    about: list[tuple[str, Any]] = [(schema_field, turn.structured_outputs)]

    async def prepared(*, prune: bool) -> _Constraint:
        return await compiler.prepare_async(
            lambda: _constraint(turn, tools, model.tool_format, about, prune=prune),
            lambda: about[0],
        )

    try:
        found = await prepared(prune=False)
    except InvalidParameterError as error:
        if error.field != "tools":
            raise
        raise await _error_of_part(model, turn, tools, error) from error
    if found.outputs is None:
        return found
    try:
        with own_names(found.names):
            compiled = await compiler.compile_async(found.outputs)
    except InvalidParameterError as error:
        if found.outputs is turn.structured_outputs:
            raise
        try:  # Parts without a value are rare, and finding them takes longer.
            found = await prepared(prune=True)
            assert found.outputs is not None
            await compiler.compile_async(found.outputs)
        except InvalidParameterError:
            raise await _error_of_part(model, turn, tools, error) from error
        return found
    if found.outputs is turn.structured_outputs:
        relaxed = tuple(own_name(path, found.names) for path in compiled.relaxed)
        return found._replace(relaxed=relaxed)
    return found


async def _error_of_part(
    model: ServedModel, turn: Turn, tools: tuple[Tool, ...], error: InvalidParameterError
) -> InvalidParameterError:
    """Turns an error about the grammar of several tools into one about the schema at fault."""
    alone = [replace(turn, structured_outputs=None, choice=ToolChoice("required"), tools=(tool,))
             for tool in tools]  # fmt: skip
    if turn.structured_outputs is not None:
        alone.insert(0, replace(turn, tools=()))
    for part in alone if 1 < len(alone) <= _MAX_PARTS else ():
        try:
            await _constraint_in_time(model, part, part.tools)
        except InvalidParameterError as found:
            return found
    if len(alone) == 1:
        return InvalidParameterError(tools[0].field, error.expected, tools[0].parameters)
    return InvalidParameterError("tools", error.expected, [tool.parameters for tool in tools])


def _follows_grammar(turn: Turn, tools: tuple[Tool, ...]) -> bool:
    """Returns True if answers with possible calls need a grammar."""
    choice = turn.choice
    strict = any(tool.strict for tool in tools)
    is_limited = choice.names is not None or not choice.parallel
    return choice.forces_a_call or turn.structured_outputs is not None or strict or is_limited


def _constraint(
    turn: Turn,
    tools: tuple[Tool, ...],
    tool_format: ToolFormat | None,
    about: list[tuple[str, Any]],
    *,
    prune: bool = False,
) -> _Constraint:
    """Returns the grammar of an answer, if any, and the parts of schemas that it relaxes.

    Args:
        about: Its only item is set to the current field and its value.
        prune: Removes parts of tools' schemas that no value satisfies.

    Raises:
        ApiError, InvalidParameterError: A schema is invalid, or, if strict, cannot be enforced.
    """
    choice, wanted = turn.choice, turn.structured_outputs
    schema, relaxed = _schema_of(turn, must_be_one=bool(tools) and not choice.forces_a_call)
    if not tools or not _follows_grammar(turn, tools):
        return _Constraint(wanted, relaxed, turn.names)
    assert tool_format is not None
    if choice.forces_a_call:
        relaxed = ()
    prepared = []
    for tool in tools:
        about[0] = tool.field, tool.parameters
        with _as_definition(tool):
            found = _prepared(tool, tool_format, prune=prune)
        prepared.append(found.tool)
        relaxed += tuple(path for path in found.relaxed if path not in relaxed)
    if choice.forces_a_call:
        parallel = choice.parallel and choice.mode == "required"
        grammar = tool_format.grammar(prepared, required=True, parallel=parallel)
    elif wanted is not None:  # calls, or the constrained text
        assert schema is not None
        calls = tool_format.grammar(prepared, required=True, parallel=choice.parallel)
        calls = re.sub(r"^start:", "calls:", calls, flags=re.MULTILINE)
        grammar = f"start: calls | answer\nanswer: {lark_json(schema)}\n{calls}"
    else:
        grammar = tool_format.grammar(prepared, required=False, parallel=choice.parallel)
    # A format that reads everything also writes the reasoning.
    grammar = with_forcing(grammar)
    return _Constraint(
        StructuredOutputs(grammar=grammar, enable_in_reasoning=tool_format.reads_everything),
        relaxed,
        {"structured_outputs": tools[0].field if len(tools) == 1 else "tools"},
    )


class _PreparedTool(NamedTuple):
    """A tool whose schema can be enforced, except for relaxed parts."""

    tool: Tool
    relaxed: tuple[str, ...]


def _prepared(tool: Tool, tool_format: ToolFormat, *, prune: bool) -> _PreparedTool:
    """Prepares a tool for a grammar; see `_constraint`."""
    # Formats count some things themselves, because llguidance counts fewer. Preparing a schema
    # decides for all properties whether they may be present, so the schema is closed before.
    tool = with_pattern(tool)
    counts = tool_format.counts(tool.parameters)
    others = {key: value for key, value in tool.parameters.items() if key not in counts}
    closed = arguments_schema(others)
    found = prepare_schema(closed, strict=tool.strict, field=tool.field)
    ready = cast(dict[str, Any], found.schema)
    possible = without_impossible_parts(ready) if prune else ready
    schema_of_tool = {**(possible if isinstance(possible, dict) else ready), **counts}
    left_out = unenforced_paths(list(tool_format.unenforced(tool)), tool.field, strict=tool.strict)
    relaxed = tuple(dict.fromkeys((*found.relaxed, *left_out)))
    return _PreparedTool(replace(tool, parameters=schema_of_tool), relaxed)


@contextmanager
def _as_definition(tool: Tool) -> Iterator[None]:
    """Turns errors about the schema of a custom tool's input into errors about its definition."""
    try:
        yield
    except InvalidParameterError as error:
        if not tool.is_custom or error.field == tool.field:
            raise
        expected = f"a grammar that can be enforced in the calls of this model ({error.expected})"
        raise InvalidParameterError(tool.field, expected, error.actual) from error


def _schema_of(
    turn: Turn, *, must_be_one: bool
) -> tuple[Mapping[str, Any] | bool | None, tuple[str, ...]]:
    """Returns the prepared JSON schema of a turn's text, or None."""
    wanted = turn.structured_outputs
    if wanted is None:
        return None, ()
    if wanted.json_object:
        return {"type": "object"}, ()
    if wanted.json_schema is not None:
        found = prepare_schema(
            wanted.json_schema,
            strict=wanted.strict,
            field=own_name("structured_outputs.json", turn.names),
            whitespace_pattern=wanted.whitespace_pattern,
            disable_any_whitespace=wanted.disable_any_whitespace,
            disable_additional_properties=wanted.disable_additional_properties,
        )
        return found.schema, found.relaxed
    if must_be_one:
        raise bad_request(
            "structured_outputs",
            "structured_outputs beside tools must be a JSON schema or json_object: only these can "
            "be an alternative to calls",
        )
    return None, ()
