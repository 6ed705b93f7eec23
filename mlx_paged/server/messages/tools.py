"""Tools in Anthropic's requests: custom ones, and client tools whose schemas Anthropic defines."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mlx_paged.parsing.definitions import Tool, ToolChoice
from mlx_paged.server.errors import bad_request, shorten
from mlx_paged.server.messages.bodies import ClientTool, CountBody
from mlx_paged.server.tool_requests import check_parameters, require_distinct

_MODES: dict[str, Any] = {"auto": "auto", "any": "required", "tool": "named", "none": "none"}


class _Defined(NamedTuple):
    """A client tool whose input schema Anthropic defines."""

    name: str
    description: str
    properties: dict[str, Any]
    required: tuple[str, ...]

    @property
    def schema(self) -> dict[str, Any]:
        """JSON Schema of its input."""
        return {
            "type": "object",
            "properties": self.properties,
            "required": list(self.required),
            "additionalProperties": False,
        }


def _text(description: str) -> dict[str, Any]:
    return {"type": "string", "description": description}


_BASH = _Defined(
    "bash",
    "Runs commands in a bash shell that keeps its state between calls.",
    {
        "command": _text("The command to run. Required unless the tool is restarted."),
        "restart": {"type": "boolean", "description": "true restarts the shell."},
    },
    (),
)


def _commands(*names: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(names), "description": "The command to run."}


_VIEW_RANGE = {
    "type": "array",
    "items": {"type": "integer"},
    "minItems": 2,
    "maxItems": 2,
    "description": "Of view: first and last line, counted from 1; -1 as the last: to the end.",
}
_PATH = _text("Absolute path of a file or a folder, such as /repo/file.py.")
_INSERT_LINE = {
    "type": "integer",
    "description": "Of insert: the line after which the text comes; 0: before the first.",
}


def _editor(name: str, commands: Sequence[str], inserted: str) -> _Defined:
    """Returns a version of the text editor.

    Args:
        inserted: The property that holds the text of `insert`.
    """
    replaced = "Of str_replace: the text that replaces old_str."
    if inserted == "new_str":
        replaced += " Of insert: the text to insert."
    properties = {
        "command": _commands(*commands),
        "path": _PATH,
        "file_text": _text("Of create: the content of the new file."),
        "old_str": _text("Of str_replace: the text to replace; it must occur exactly once."),
        "new_str": _text(replaced),
        "insert_line": _INSERT_LINE,
        "view_range": _VIEW_RANGE,
    }
    if inserted != "new_str":
        properties[inserted] = _text("Of insert: the text to insert.")
    description = "Shows, creates and edits text files."
    return _Defined(name, description, properties, ("command", "path"))


_COMMANDS = ("view", "create", "str_replace", "insert")
_OLD_EDITOR = _editor("str_replace_editor", (*_COMMANDS, "undo_edit"), "new_str")
_MEMORY = _Defined(
    "memory",
    "Keeps notes in files below /memories, which last longer than this conversation.",
    {
        "command": _commands(*_COMMANDS, "delete", "rename"),
        "path": _text("Of all but rename: a file or folder below /memories."),
        "view_range": _VIEW_RANGE,
        "file_text": _text("Of create: the content of the new file."),
        "old_str": _text("Of str_replace: the text to replace; it must occur exactly once."),
        "new_str": _text("Of str_replace: the text that replaces old_str."),
        "insert_line": _INSERT_LINE,
        "insert_text": _text("Of insert: the text to insert."),
        "old_path": _text("Of rename: the path as it is."),
        "new_path": _text("Of rename: the path as it becomes."),
    },
    ("command",),
)
#: By type.
DEFINED: Mapping[str, _Defined] = {
    "bash_20241022": _BASH,
    "bash_20250124": _BASH,
    "text_editor_20241022": _OLD_EDITOR,
    "text_editor_20250124": _OLD_EDITOR,
    "text_editor_20250429": _editor("str_replace_based_edit_tool", _COMMANDS, "new_str"),
    "text_editor_20250728": _editor("str_replace_based_edit_tool", _COMMANDS, "insert_text"),
    "memory_20250818": _MEMORY,
}


def tools_of(body: CountBody) -> list[Tool]:
    """Returns the tools of a body.

    Raises:
        ApiError: 400 for tools of Anthropic's servers, for those that need a screen, and for
            missing fields.
    """
    found = []
    for i, tool in enumerate(body.tools or ()):
        where = f"tools.{i}"
        if tool.type in (None, "custom"):
            found.append(_client_tool(tool, where))
        elif tool.type in DEFINED:
            found.append(_defined(tool, DEFINED[tool.type], where))
        else:
            raise _unknown(tool.type, where)
    require_distinct(found)
    return found


def _client_tool(tool: ClientTool, where: str) -> Tool:
    """Converts a custom tool."""
    for field in ("name", "input_schema"):
        if getattr(tool, field) is None:
            at = f"{where}.{field}"
            raise bad_request(at, f"{at} is missing", "missing_field")
    assert tool.name is not None and tool.input_schema is not None
    at = f"{where}.input_schema"
    check_parameters(tool.input_schema, at)
    return Tool(tool.name, tool.description, tool.input_schema, bool(tool.strict), field=at)


def _defined(tool: ClientTool, defined: _Defined, where: str) -> Tool:
    """Converts a tool whose schema Anthropic defines."""
    if tool.name != defined.name:
        at = f"{where}.name"
        given = "it is missing" if tool.name is None else f"got {tool.name!r}"
        raise bad_request(at, f"{at} of {tool.type!r} must be {defined.name!r} but {given}")
    for field in ("input_schema", "description"):
        if getattr(tool, field) is not None:
            at = f"{where}.{field}"
            raise bad_request(at, f"{at} must not be given: {tool.type!r} has its own")
    description = defined.description
    if tool.max_characters is not None:
        description += f" view shows at most {tool.max_characters} characters of a file."
    return Tool(
        defined.name, description, defined.schema, bool(tool.strict), field=f"{where}.type"
    )  # fmt: skip


def _unknown(kind: str | None, where: str) -> Exception:
    shown = shorten(f"{kind}", 64)
    if re.match(r"computer_|browser_", shown):
        reason = "this server has no tools that control a screen"
    else:
        reason = "this server runs no tools"
    return bad_request(
        f"{where}.type",
        f"{where}.type {shown!r} is not supported: {reason}. Supported client tools: "
        f"'custom', {', '.join(map(repr, DEFINED))}",
        "unsupported_parameter",
    )


def choice_of(body: CountBody, tools: Sequence[Tool]) -> ToolChoice:
    """Returns the tools that may be called.

    Raises:
        ApiError: 400 for a choice without tools, or without the required name.
    """
    given = body.tool_choice
    if not tools:
        if given is not None and given.type in ("any", "tool"):
            raise bad_request("tool_choice", f"tool_choice {given.type!r} needs tools")
        return ToolChoice("none")
    if given is None:
        return ToolChoice("auto")
    parallel = not given.disable_parallel_tool_use
    if given.type != "tool":
        return ToolChoice(_MODES[given.type], parallel=parallel)
    if given.name is None:
        raise bad_request("tool_choice.name", "tool_choice.name is missing", "missing_field")
    return ToolChoice("named", (given.name,), parallel=parallel)


# Ids of calls. Anthropic's begin with `toolu_`; chat templates have their own formats.

_PREFIX = "toolu_"


def use_id(call_id: str) -> str:
    """Converts the id of a call to the id of a tool_use."""
    return _PREFIX + re.sub(r"[^a-zA-Z0-9_-]", "_", call_id.removeprefix("call_"))


def call_id(use_id: str) -> str:
    """Converts the id of a tool_use to the id of the call; inverts `use_id` where it can."""
    return use_id.removeprefix(_PREFIX) or use_id
