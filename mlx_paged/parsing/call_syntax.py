"""CallSyntax: how a model writes tool calls, as texts around names, ids and arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from mlx_paged.templates.probe import is_marker


class Hole(Enum):
    """The parts that differ from call to call."""

    NAME = "name"
    ID = "id"
    INDEX = "index"
    ARGUMENTS = "arguments"


Piece = str | Hole


@dataclass(frozen=True)
class JsonKeys:
    """Keys of a call that is a JSON object; `outer` are those of enclosing objects."""

    name: str
    arguments: str
    id: str | None = None
    outer: tuple[str, ...] = ()


#: Placeholders for name, id and key. They are private characters, which no template contains.
NAME, ID, KEY = "\ue0e1", "\ue0e2", "\ue0e3"


@dataclass(frozen=True)
class Parameters:
    """A call with separate parameters. Its texts may contain `NAME`, `ID` and `KEY`.

    Attributes:
        head: From the name or the id to the first parameter.
        key: Before a key.
        before_value: Between a key and its value, by the JSON type of the value.
        value_end: After a value.
        between: Between that and the next parameter.
        tail: From the last value's end to the call's end.
        empty: All of a call without parameters.
        are_json: True if strings are also written as JSON.
    """

    head: str
    key: str
    before_value: Mapping[str, str]
    value_end: str
    between: str
    tail: str
    empty: str
    are_json: bool = False

    @property
    def are_fixed(self) -> bool:
        """True if the texts after the name are tags that are the same in every call."""
        rest = self.head[1:] + self.key + self.value_end + self.tail
        tags = (self.key.strip(), self.value_end.strip())
        is_fixed = self.head.startswith(NAME) and not any(hole in rest for hole in (NAME, ID, KEY))
        return is_fixed and not self.are_json and all(map(is_marker, tags))


@dataclass(frozen=True)
class CallSyntax:
    """The syntax of calls.

    Attributes:
        kind: "json": an object with name and arguments. "named": JSON arguments, with the name
            outside. "tagged": separate parameters in tags. "python": Python's syntax of calls.
        section_start, section_end: Around all calls of an answer.
        call_start, call_end: Around each.
        separator: Between two.
        pieces: A call between `call_start` and `call_end`: texts and holes ("json", "named").
        are_text: True if arguments are a JSON string that contains the object.
        separators: Item and key separators in JSON; None: whitespace varies.
        keys: For "json".
        parameters: For "tagged".
        has_json_words: True if "python" contains ``true`` and ``null``.
        has_parallel: True if an answer may have several calls.
        text_begins, text_ends: Markers around the text of answers.
    """

    kind: Literal["json", "named", "tagged", "python"]
    call_start: str
    call_end: str
    section_start: str = ""
    section_end: str = ""
    separator: str = ""
    pieces: tuple[Piece, ...] = ()
    are_text: bool = False
    separators: tuple[str, str] | None = (", ", ": ")
    keys: JsonKeys | None = None
    parameters: Parameters | None = None
    has_json_words: bool = False
    has_parallel: bool = False
    text_begins: tuple[str, ...] = ()
    text_ends: tuple[str, ...] = ()
