"""dots: invocations with named parameters on their own lines, in one block.

<dots_function_call>
<invoke name="get_weather">
<parameter name="city">
Oslo
</parameter>
</invoke>
</dots_function_call>

Some answers have a JSON object in the block instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mlx_paged.parsing.minimax_m2 import MinimaxM2Format
from mlx_paged.parsing.tagged import TaggedFormat

_BLOCK = ("<dots_function_call>", "</dots_function_call>")


class DotsFormat(TaggedFormat):
    """MiniMax M2's syntax with another block, and newlines around values."""

    names = ("dots",)
    models = "dots 3"
    tags = replace(MinimaxM2Format.tags, blocks=(_BLOCK,), trims_newlines=True)
    markers = tags.markers
    begins_call = (_BLOCK[0],)
    takes_json = True

    @classmethod
    def matches(cls, chat_template: str, vocabulary: Mapping[str, int]) -> bool:
        return _BLOCK[0] in chat_template
