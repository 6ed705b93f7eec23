"""Tools as coding agents and MCP servers send them, modeled on their public documentation.

They keep the output of schema generators: ``$schema``, defaults, safe-integer bounds, formats,
arbitrary property names.
"""

from __future__ import annotations

from typing import Any

_DRAFT_7 = "http://json-schema.org/draft-07/schema#"
_DRAFT_2020 = "https://json-schema.org/draft/2020-12/schema"
_SAFE = 9007199254740991

Tool = dict[str, Any]


def _tool(name: str, properties: dict[str, Any], required: list[str], **more: Any) -> Tool:
    schema = {"type": "object", "properties": properties, "required": required, **more}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def _zod(name: str, properties: dict[str, Any], required: list[str]) -> Tool:
    return _tool(name, properties, required, additionalProperties=False, **{"$schema": _DRAFT_2020})


def _text(description: str = "", **more: Any) -> dict[str, Any]:
    return {"type": "string", "description": description, **more}


def _flag(description: str = "", **more: Any) -> dict[str, Any]:
    return {"type": "boolean", "description": description, **more}


def _texts(**more: Any) -> dict[str, Any]:
    return {"type": "array", "items": {"type": "string"}, **more}


CODEX = [
    _tool(
        "shell",
        {
            "command": _texts(description="The command to execute"),
            "workdir": _text("The working directory to execute the command in"),
            "timeout_ms": {"type": "number", "description": "Timeout in milliseconds"},
            "with_escalated_permissions": _flag("Run without sandbox restrictions"),
            "justification": _text("Why escalated permissions are needed"),
        },
        ["command"],
        additionalProperties=False,
    ),
    _tool(
        "update_plan",
        {
            "explanation": _text(),
            "plan": {
                "type": "array",
                "description": "The list of steps",
                "items": {
                    "type": "object",
                    "properties": {
                        "step": {"type": "string"},
                        "status": _text(enum=["pending", "in_progress", "completed"]),
                    },
                    "required": ["step", "status"],
                    "additionalProperties": False,
                },
            },
        },
        ["plan"],
        additionalProperties=False,
    ),
    _tool("view_image", {"path": _text("Local path")}, ["path"], additionalProperties=False),
]
CLAUDE_CODE = [
    _zod(
        "Bash",
        {
            "command": _text("The command to execute"),
            "timeout": {"type": "number", "description": "Optional timeout (max 600000)"},
            "description": _text("What this command does"),
            "run_in_background": _flag("Run in the background"),
        },
        ["command"],
    ),
    _zod(
        "Read",
        {
            "file_path": _text("The absolute path"),
            "offset": {"type": "integer", "minimum": 0, "maximum": _SAFE},
            "limit": {"type": "integer", "exclusiveMinimum": 0, "maximum": _SAFE},
        },
        ["file_path"],
    ),
    _zod(
        "Edit",
        {
            "file_path": _text(),
            "old_string": _text(),
            "new_string": _text("(must be different from old_string)"),
            "replace_all": _flag(default=False),
        },
        ["file_path", "old_string", "new_string"],
    ),
    _zod(
        "Grep",
        {
            "pattern": _text(),
            "path": _text(),
            "output_mode": _text(enum=["content", "files_with_matches", "count"]),
            "-i": _flag("Case insensitive search"),
            "-A": {"type": "number"},
            "head_limit": {"type": "number"},
        },
        ["pattern"],
    ),
    _zod(
        "TodoWrite",
        {
            "todos": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {
                        "content": {"type": "string", "minLength": 1},
                        "status": {"type": "string", "enum": ["pending", "in_progress"]},
                        "activeForm": {"type": "string", "minLength": 1},
                    },
                    "required": ["content", "status", "activeForm"],
                    "additionalProperties": False,
                },
            }
        },
        ["todos"],
    ),
    _zod("WebFetch", {"url": _text(format="uri"), "prompt": _text()}, ["url", "prompt"]),
    _zod(
        "AskUserQuestion",
        {
            "questions": {
                "type": "array",
                "minItems": 1,
                "maxItems": 2,
                "items": {
                    "type": "object",
                    "properties": {
                        "question": {"type": "string"},
                        "multiSelect": {"type": "boolean", "default": False},
                    },
                    "required": ["question", "multiSelect"],
                    "additionalProperties": False,
                },
            },
            "answers": {
                "type": "object",
                "propertyNames": {"type": "string"},
                "additionalProperties": {"type": "string"},
            },
        },
        ["questions"],
    ),
]
MCP_FILESYSTEM = [
    _tool(
        "read_text_file",
        {"path": {"type": "string"}, "tail": {"type": "number"}, "head": {"type": "number"}},
        ["path"],
        additionalProperties=False,
        **{"$schema": _DRAFT_7},
    ),
    _tool(
        "edit_file",
        {
            "path": {"type": "string"},
            "edits": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {
                        "oldText": _text("Text to search for - must match exactly"),
                        "newText": _text("Text to replace with"),
                    },
                    "required": ["oldText", "newText"],
                    "additionalProperties": False,
                },
            },
            "dryRun": _flag("Preview changes", default=False),
        },
        ["path", "edits"],
        additionalProperties=False,
        **{"$schema": _DRAFT_7},
    ),
    _tool(
        "search_files",
        {
            "path": {"type": "string"},
            "pattern": {"type": "string"},
            "excludePatterns": _texts(default=[]),
        },
        ["path", "pattern"],
        additionalProperties=False,
        **{"$schema": _DRAFT_7},
    ),
]
MCP_GITHUB = [
    _tool(
        "create_issue",
        {
            "owner": _text("Repository owner"),
            "repo": _text("Repository name"),
            "title": _text("Issue title"),
            "labels": _texts(description="Labels to apply"),
            "milestone": {"type": "number"},
        },
        ["owner", "repo", "title"],
    ),
    _tool(
        "list_pull_requests",
        {
            "owner": _text(),
            "repo": _text(),
            "state": _text(enum=["open", "closed", "all"]),
            "page": {"type": "number", "minimum": 1},
            "perPage": {"type": "number", "minimum": 1, "maximum": 100},
        },
        ["owner", "repo"],
    ),
    _tool("get_me", {}, []),
]
AGENT_TOOLS = [*CODEX, *CLAUDE_CODE, *MCP_FILESYSTEM, *MCP_GITHUB]
