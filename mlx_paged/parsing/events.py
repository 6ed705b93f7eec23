"""Events of an answer while it is written: reasoning, text, tool calls.

They are never modified. Those for each token are not frozen, because creating a frozen one takes
three times as long.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(slots=True)
class ReasoningText:
    """More of the reasoning."""

    text: str


@dataclass(slots=True)
class ContentText:
    """More text for the reader.

    Attributes:
        separator: Its separator if all texts of the answer are joined; a call, or reasoning,
            separates it from the text before.
    """

    text: str
    separator: str = ""


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A tool call begins; its name is known.

    Attributes:
        name: Name of the tool, as the model wrote it.
        id: The model's id; None in nearly all families.
    """

    name: str
    id: str | None = None


@dataclass(slots=True)
class CallArguments:
    """More of the arguments of the call that began last: a piece of a JSON object's text."""

    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The open call has ended.

    Attributes:
        is_complete: False if the answer ended within it, or its arguments are not JSON.
        lacks_end: True if the answer ended where more arguments could have followed. If the answer
            was cut, the arguments may be incomplete.
    """

    is_complete: bool = True
    lacks_end: bool = False


Event: TypeAlias = ReasoningText | ContentText | CallBegin | CallArguments | CallEnd
