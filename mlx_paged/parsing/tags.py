"""Tags of families that write calls with them, around a name, keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Tags:
    """The tags of a family.

    Attributes:
        call: Before a name.
        name_end: After the name; "" if the next tag ends it.
        call_end: After the last value.
        key: Before a key.
        key_ends: After it, with the type that each declares for the value: True: a string, False:
            no string, None: by the tool's schema. We write the first; others are understood.
        value: Before a value, after the key's end; "" for none.
        value_end: After it.
        blocks: Around all calls; we write the first pair. Empty if there is none.
        has_shared_block: True if all calls are in one block; otherwise each has its own.
        newline: Between tags, as in the chat template.
        trims_newlines: True if a newline at either end of a value belongs to the tags.
        others: Tags without a meaning of their own, dropped around calls and keys.
        words: Words next to them, also without a meaning.
        attributes: Regular expression of text after a name, also without a meaning.
        before_call, after_call: Text around a call in the chat template, from the other tags.
    """

    call: str
    name_end: str
    call_end: str
    key: str
    key_ends: tuple[tuple[str, bool | None], ...]
    value: str
    value_end: str
    blocks: tuple[tuple[str, str], ...] = ()
    has_shared_block: bool = True
    newline: str = "\n"
    trims_newlines: bool = False
    others: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    attributes: str = ""
    before_call: str = ""
    after_call: str = ""

    @property
    def markers(self) -> tuple[str, ...]:
        """Returns the markers for the lexer.

        The end of a name or a key is searched only there, unless it is a tag of its own.
        """
        tags = [self.call, self.call_end, self.key, self.value, self.value_end, *self.others]
        tags += [self.name_end] if self.name_end.startswith("<") else []
        tags += [end for end, _ in self.key_ends if self.value]
        return tuple(tag for tag in tags + [tag for pair in self.blocks for tag in pair] if tag)


def attribute_tags(call: str, key: str, **others: Any) -> Tags:
    """Tags with names and keys as attributes: ``<call name="f"><key name="x">1</key></call>``.

    Args:
        call, key: Names of the tags.
        others: More fields of `Tags`, or other values of these.
    """
    fields: dict[str, Any] = {
        "call": f'<{call} name="',
        "name_end": '">',
        "call_end": f"</{call}>",
        "key": f'<{key} name="',
        "key_ends": (('">', None),),
        "value": "",
        "value_end": f"</{key}>",
    }
    return Tags(**{**fields, **others})


def paired_tags(prefix: str = "", suffix: str = "", **others: Any) -> Tags:
    """Returns GLM's tags: ``<tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>``.

    Args:
        prefix, suffix: Around the names of all tags.
        others: See `attribute_tags`.
    """
    fields: dict[str, Any] = {
        "call": f"<{prefix}tool_call{suffix}>",
        "name_end": "",
        "call_end": f"</{prefix}tool_call{suffix}>",
        "key": f"<{prefix}arg_key{suffix}>",
        "key_ends": ((f"</{prefix}arg_key{suffix}>", None),),
        "value": f"<{prefix}arg_value{suffix}>",
        "value_end": f"</{prefix}arg_value{suffix}>",
    }
    return Tags(**{**fields, **others})
