"""Formats that write the arguments of a call as separate parameters, not as one JSON object."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from mlx_paged.parsing.definitions import Tool
from mlx_paged.parsing.format import ToolFormat
from mlx_paged.parsing.parameters import counts, unenforced


class ParameterFormat(ToolFormat):
    """A format whose grammar is made of `parameters.parameter_lists`.

    Attributes:
        nests: True if objects and arrays within values have their own notation, too.
    """

    nests: ClassVar[bool] = False

    def counts(self, parameters: Mapping[str, Any]) -> Mapping[str, int]:
        return counts(parameters)

    def unenforced(self, tool: Tool) -> Iterable[tuple[str, object]]:
        return unenforced(tool.parameters, tool.field, nested=self.nests)
