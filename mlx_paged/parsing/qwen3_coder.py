"""Qwen3-Coder, Qwen 3.5 and others: a name and parameters in tags of XML's kind.

<tool_call>
<function=get_weather>
<parameter=city>
Oslo
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from mlx_paged.parsing.tagged import TaggedFormat
from mlx_paged.parsing.tags import Tags

# A call with one short value, and the space in it.
_CALL = re.compile(
    r"<function=[\w.-]+>(?P<between>\s*)<parameter=[\w.-]+>(?P<before>\n?)[^<\n]+\n?</parameter>"
)


class Qwen3CoderFormat(TaggedFormat):
    """A block for each call. Values are text on their own lines, unless the template writes them
    between the tags: then a newline at either end is a part of the value.
    """

    names: ClassVar[tuple[str, ...]] = ("qwen3_coder", "qwen3_xml")
    models = "Qwen3-Coder, Qwen 3.5, Nemotron 3, Step 3.5"
    tags = Tags(
        call="<function=",
        name_end=">",
        call_end="</function>",
        key="<parameter=",
        key_ends=((">", None),),
        value="",
        value_end="</parameter>",
        blocks=(("<tool_call>", "</tool_call>"),),
        has_shared_block=False,
        trims_newlines=True,
    )
    markers: ClassVar[tuple[str, ...]] = tags.markers
    begins_call: ClassVar[tuple[str, ...]] = ("<tool_call>", "<function=")

    def __init__(self, vocabulary: Mapping[str, int], chat_template: str = "") -> None:
        super().__init__(vocabulary, chat_template)
        found = _CALL.search(chat_template, max(0, chat_template.rfind("<function=")))
        if found is not None:
            self.tags = replace(  # type: ignore[misc]
                self.tags,
                newline="\n" if found["between"] else "",
                trims_newlines=found["before"] == "\n",
            )

    @classmethod
    def matches(cls, chat_template: str, vocabulary: Mapping[str, int]) -> bool:
        return "<function=" in chat_template and "<parameter=" in chat_template


class MimoFormat(Qwen3CoderFormat):
    """The same without whitespace between tags."""

    names = ("mimo",)
    models = "MiMo V2"
    tags = replace(Qwen3CoderFormat.tags, newline="", trims_newlines=False)

    @classmethod
    def matches(cls, chat_template: str, vocabulary: Mapping[str, int]) -> bool:
        found = _CALL.search(chat_template, max(0, chat_template.rfind("<function=")))
        is_tight = found is not None and not found["between"] + found["before"]
        return is_tight and super().matches(chat_template, vocabulary)


class SeedOssFormat(Qwen3CoderFormat):
    """The same in blocks of another name."""

    names = ("seed_oss",)
    models = "Seed-OSS"
    tags = replace(Qwen3CoderFormat.tags, blocks=(("<seed:tool_call>", "</seed:tool_call>"),))
    markers: ClassVar[tuple[str, ...]] = tags.markers
    begins_call: ClassVar[tuple[str, ...]] = ("<seed:tool_call>", "<function=")

    @classmethod
    def matches(cls, chat_template: str, vocabulary: Mapping[str, int]) -> bool:
        has_block = "<seed:tool_call>" in chat_template or "<seed:tool_call>" in vocabulary
        return has_block and "<function=" in chat_template
