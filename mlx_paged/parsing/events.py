"""Events of an answer as it is written: reasoning, text, tool calls.

Nothing changes them. (Those that come with each token are not frozen: it takes thrice as long to
make one.)
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
    """More of the text that is for the reader.

    Attributes:
        separator: What stands before it where all texts of the answer are one: a call, or
            reasoning, separates it from the text before.
    """

    text: str
    separator: str = ""


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A tool call begins; its name is known.

    Attributes:
        name: Of the tool, as the model wrote it.
        id: The id that the model gave it; None in nearly all families.
    """

    name: str
    id: str | None = None


@dataclass(slots=True)
class CallArguments:
    """More of the arguments of the call that began last: a piece of a JSON object's text."""

    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The call that began last has ended.

    Attributes:
        is_complete: False where the answer ended within it, or its arguments are not JSON.
        lacks_end: Whether the answer ended where more arguments could have followed: if something
            cut the answer, then nothing shows that these are all.
    """

    is_complete: bool = True
    lacks_end: bool = False


Event: TypeAlias = ReasoningText | ContentText | CallBegin | CallArguments | CallEnd
