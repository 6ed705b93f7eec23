"""Hunyuan 3: a name, keys and values between tags, all with one suffix.

<tool_calls:opensource>
<tool_call:opensource>get_weather<tool_sep:opensource>
<arg_key:opensource>city</arg_key:opensource>
<arg_value:opensource>Oslo</arg_value:opensource>
</tool_call:opensource>
</tool_calls:opensource>
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from mlx_paged.parsing.tagged import TaggedFormat
from mlx_paged.parsing.tags import Tags, paired_tags

_SEPARATOR = re.compile(r"<tool_sep(:[\w.-]+)?>")


def _tags(suffix: str) -> Tags:
    return paired_tags(
        suffix=suffix,
        name_end=f"<tool_sep{suffix}>",
        blocks=((f"<tool_calls{suffix}>", f"</tool_calls{suffix}>"),),
    )


class Hunyuan3Format(TaggedFormat):
    """All calls are in one block. The suffix is the vocabulary's, or the template's."""

    names = ("hy_v3", "hunyuan3")
    models = "Hunyuan 3"
    tags = _tags("")
    markers = tags.markers
    begins_call = ("<tool_calls>", "<tool_call>")

    def __init__(self, vocabulary: Mapping[str, int], chat_template: str = "") -> None:
        super().__init__(vocabulary, chat_template)
        suffix = _suffix(vocabulary) or _suffix([chat_template])
        tags = _tags(suffix)
        self.tags, self.markers = tags, tags.markers  # type: ignore[misc]
        self.begins_call = (tags.blocks[0][0], tags.call)  # type: ignore[misc]

    @classmethod
    def matches(cls, chat_template: str, vocabulary: Mapping[str, int]) -> bool:
        return _SEPARATOR.search(chat_template) is not None or any(
            _SEPARATOR.fullmatch(token) for token in vocabulary
        )


def _suffix(texts: Iterable[str]) -> str:
    found = next(filter(None, map(_SEPARATOR.search, texts)), None)
    return found[1] or "" if found is not None else ""
