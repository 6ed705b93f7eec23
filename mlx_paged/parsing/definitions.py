"""Tools of a request, and the calls that an answer may or must contain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class InputGrammar:
    """The constraint on the input of a custom tool."""

    syntax: Literal["lark", "regex"]
    definition: str


@dataclass(frozen=True)
class Tool:
    """A function that the model may call.

    Attributes:
        name: Its name for the model, unique among the tools of a request.
        description: For the model.
        parameters: JSON Schema of its arguments, an object.
        strict: True if calls must be valid for that schema, or the request is refused.
        namespace: The client's group for it (Responses API). The model sees `namespace` and the
            local name joined by `__`, which is `name` here.
        local_name: Its name within that group; without one, the same as `name`.
        field: The request's path of `parameters`, for errors.
        is_custom: True if its input is a text: its only parameter (`parsing.custom`).
        grammar: Grammar of a custom tool's input; None allows any text.
    """

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object"})
    strict: bool = False
    namespace: str | None = None
    local_name: str = ""
    field: str = "tools"
    is_custom: bool = False
    grammar: InputGrammar | None = None

    def __post_init__(self) -> None:
        if not self.local_name:
            object.__setattr__(self, "local_name", self.name)

    def for_template(self) -> dict[str, Any]:
        """Returns OpenAI's format, which chat templates expect."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = dict(self.parameters)
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class ToolChoice:
    """The tools an answer may call.

    Attributes:
        mode: "auto": text, calls or both; "none": no call; "required": at least one call;
            "named": a call of the function in `names`.
        names: The tools that may be called, if not all (`allowed_tools`, or the named one).
        parallel: True if there may be several calls.
    """

    mode: Literal["auto", "none", "required", "named"] = "auto"
    names: tuple[str, ...] | None = None
    parallel: bool = True

    @property
    def forces_a_call(self) -> bool:
        """True if an answer without a call is wrong."""
        return self.mode in ("required", "named")

    def of(self, tools: tuple[Tool, ...]) -> tuple[Tool, ...]:
        """Returns those of `tools` that may be called."""
        if self.mode == "none":
            return ()
        if self.names is None:
            return tools
        return tuple(tool for tool in tools if tool.name in self.names)
