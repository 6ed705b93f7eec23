"""Formats that write nested objects and arrays in a notation of their own, not as JSON."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod

from mlx_paged.parsing.definitions import Tool
from mlx_paged.parsing.lark import Lark
from mlx_paged.parsing.parameter_format import ParameterFormat
from mlx_paged.parsing.schemas import Schema, resolved


class NestedFormat(ParameterFormat):
    """A format with nested values. Its grammar has a rule for each part of a tool's schema."""

    nests = True


class SchemaRules(ABC):
    """Writes the rules of a tool's arguments in such a notation.

    Args:
        lark: Destination of the rules.
        tool: The tool whose schema they follow.
    """

    def __init__(self, lark: Lark, tool: Tool) -> None:
        self._lark = lark
        self._root = tool.parameters
        self._is_strict = tool.strict
        self._names: dict[tuple[str, str], str] = {}  # of rules, by tag and schema

    def _rule(self, schema: Schema, tag: str = "") -> str:
        """Returns the rule of a value. A schema may contain itself.

        Args:
            tag: End of the value, if the notation repeats its key there.
        """
        schema = resolved(schema, self._root)
        known = (tag, json.dumps(schema, sort_keys=True))
        if known not in self._names:
            self._names[known] = self._lark.reserve()
            self._lark.define(self._names[known], self._value(schema, tag))
        return self._names[known]

    @abstractmethod
    def _value(self, schema: Schema, tag: str) -> str:
        """The body of a value's rule."""
