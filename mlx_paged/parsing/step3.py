"""Step 3: invocations with named parameters, between tokens around each call and all of them.

<｜tool_calls_begin｜>
<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="get_weather">
<steptml:parameter name="city">Oslo</steptml:parameter>
</steptml:invoke><｜tool_call_end｜>
<｜tool_calls_end｜>
"""

from __future__ import annotations

from collections.abc import Mapping

from mlx_paged.parsing.tagged import TaggedFormat
from mlx_paged.parsing.tags import attribute_tags

_BEGIN, _SEPARATOR, _END = "<｜tool_call_begin｜>", "<｜tool_sep｜>", "<｜tool_call_end｜>"


class Step3Format(TaggedFormat):
    """The tokens around a call are read wherever they stand, as some answers lack them."""

    names = ("step3",)
    models = "Step 3"
    tags = attribute_tags(
        "steptml:invoke",
        "steptml:parameter",
        blocks=(("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"), (_BEGIN, _END)),
        others=(_BEGIN, _SEPARATOR, _END),
        words=("function",),
        before_call=f"{_BEGIN}function{_SEPARATOR}",
        after_call=_END,
    )
    markers = tags.markers
    begins_call = ("<｜tool_calls_begin｜>", _BEGIN)

    @classmethod
    def matches(cls, chat_template: str, vocabulary: Mapping[str, int]) -> bool:
        return "<steptml:" in chat_template
