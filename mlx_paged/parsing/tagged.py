"""Calls written as tags around a name, keys and values: one format for all families.

Families differ in their tags; the meaning is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from mlx_paged.parsing.definitions import Tool
from mlx_paged.parsing.format import Parser
from mlx_paged.parsing.lark import ONE_TO_MAX_CALLS, Lark
from mlx_paged.parsing.parameter_format import ParameterFormat
from mlx_paged.parsing.parameters import parameter_lists
from mlx_paged.parsing.schemas import Schema, types_of
from mlx_paged.parsing.tagged_parser import TaggedParser
from mlx_paged.parsing.tags import Tags


class TaggedFormat(ParameterFormat):
    """Calls in tags. A family is a subclass with its `tags`.

    Attributes:
        tags: Tags of the family.
        takes_json: True if a JSON object may replace the name, keys and values of a call.
    """

    tags: ClassVar[Tags]
    takes_json: ClassVar[bool] = False

    def parser(self, tools: Sequence[Tool]) -> Parser:
        return TaggedParser(self.tags, tools, takes_json=self.takes_json)

    def grammar(self, tools: Sequence[Tool], *, required: bool, parallel: bool) -> str:
        lark = Lark(self.vocabulary)
        tags = self.tags
        if not tags.blocks:
            call = lark.rule(" | ".join(self._call(lark, tool) for tool in tools))
            return lark.answer(
                tags.call, call, required=required, parallel=parallel, between=tags.newline
            )
        begin, end = tags.blocks[0]
        opening = lark.literal(tags.newline + tags.before_call + tags.call)
        call = lark.rule(" | ".join(f"{opening} {self._call(lark, tool)}" for tool in tools))
        is_repeated = parallel and tags.has_shared_block
        rest = f"{call}{ONE_TO_MAX_CALLS if is_repeated else ''} {lark.literal(tags.newline + end)}"
        # A call is read without its block, too.
        others = [*self.begins_call, tags.call, *tags.others]
        return lark.answer(
            begin,
            lark.rule(rest),
            required=required,
            parallel=parallel,
            between=tags.newline,
            others=others,
        )

    def _call(self, lark: Lark, tool: Tool) -> str:
        """The rule of a call after its first tag."""
        tags = self.tags
        alternatives = []
        for parameters, root in parameter_lists(tool.parameters):
            parts = [self._name(lark, tool)]
            for name, schema, is_required in parameters:
                value_end = ("\n" if tags.trims_newlines else "") + tags.value_end
                values = []
                for end, of_end in self._key_ends(schema, types_of(schema, tool.parameters)):
                    before = tags.newline + tags.key + name + end
                    before += tags.newline + tags.value if tags.value else ""
                    before += "\n" if tags.trims_newlines else ""
                    value = self._value(lark, of_end, root, value_end, strict=tool.strict)
                    values.append(f"{lark.literal(before)} {value}")
                parts.append(f"({' | '.join(values)}){'' if is_required else '?'}")
            parts.append(lark.literal(tags.newline + tags.call_end + tags.after_call))
            alternatives.append(" ".join(parts))
        return lark.rule(" | ".join(alternatives))

    def _name(self, lark: Lark, tool: Tool) -> str:
        """Returns a tool's name and the text after it, in Lark."""
        return lark.literal(tool.name + self.tags.name_end)

    def _value(
        self, lark: Lark, schema: Schema, root: Schema, value_end: str, *, strict: bool
    ) -> str:
        """A value and its end, in Lark."""
        return lark.value(schema, root, value_end, strict=strict)

    def _key_ends(self, schema: Schema, types: frozenset[str]) -> list[tuple[str, Schema]]:
        """Returns the possible ends of a key, each with the schema of the values after it.

        Args:
            schema, types: Those of the key's values.
        """
        strings = [end for end, is_string in self.tags.key_ends if is_string is not False]
        others = [end for end, is_string in self.tags.key_ends if is_string is not True]
        if strings[0] == others[0]:
            return [(strings[0], schema)]
        ends: list[tuple[str, Schema]] = []
        if "string" in types:
            ends.append((strings[0], {"allOf": [schema, {"type": "string"}]}))
        if rest := sorted(types - {"string"}):
            ends.append((others[0], {"allOf": [schema, {"type": rest}]}))
        return ends
