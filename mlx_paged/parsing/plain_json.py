"""xLAM, and any model that writes JSON when it is asked to: an array of call objects.

[{"name": "get_weather", "arguments": {"city": "Oslo"}}]
"""

from __future__ import annotations

from mlx_paged.parsing.bare_json import BareJsonFormat


class XlamFormat(BareJsonFormat):
    """An array, also in a block of code, or between markers that other families have."""

    names = ("xlam",)
    models = "xLAM"
    markers = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "</think>")
    line_starts = ("</think>",)
    begins_call = ("<tool_call>", "[TOOL_CALLS]")


class JsonFormat(BareJsonFormat):
    """Objects or an array, also in a block of code."""

    names = ("json",)
    models = "any, with a template that asks for JSON"
