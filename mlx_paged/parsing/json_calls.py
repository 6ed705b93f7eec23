"""Calls that are JSON objects, read as they are written: ``{"name": ..., "arguments": {...}}``."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from typing import ClassVar, Protocol

from mlx_paged.parsing.events import (
    CallArguments,
    CallBegin,
    CallEnd,
    ContentText,
    Event,
)
from mlx_paged.parsing.json_value import SPACE, JsonValue


class JsonArguments:
    """Reads the arguments of a call, a JSON object; holds them until they prove to be JSON.

    Attributes:
        has_failed: True if they are not a JSON object; in that case, nothing was returned.
        raw: Their text as written, until a part of them was returned.
    """

    def __init__(self) -> None:
        self._value = JsonValue()
        self._held: list[str] = []
        self.has_failed = False
        self.raw: list[str] = []

    @property
    def has_begun(self) -> bool:
        """True if they have proven to be JSON."""
        return self._value.is_proven and not self.has_failed

    @property
    def has_ended(self) -> bool:
        """True if their last bracket was read."""
        return self._value.has_ended

    @property
    def is_complete(self) -> bool:
        """True if all of them were read and are JSON."""
        return self._value.has_ended and not self._value.is_broken

    @property
    def in_string(self) -> bool:
        """True if the text so far ends within a string, where a marker is text."""
        return self._value.in_string

    def take(self, text: str, at: int = 0) -> tuple[int, str]:
        """Continues from an index; returns where it stopped, and the JSON that became certain."""
        start = at
        at, piece = self._value.take(text, at, stops_if_broken=True)
        value = self._value
        is_object = not value.has_begun or value.first == "{"
        self.has_failed = self.has_failed or not is_object
        self.has_failed = self.has_failed or (value.is_broken and not value.is_proven)
        self._held.append(piece)
        if not self.has_begun:
            self.raw.append(text[start:at])
            return at, ""
        return at, self._take_held()

    def rest(self) -> str:
        """Returns the rest of arguments that the answer cut, which may still be held."""
        self._held.append(self._value.rest())
        return self._take_held()

    def _take_held(self) -> str:
        held = "".join(self._held)
        self._held.clear()
        self.raw.clear()
        return held


_State = Callable[[str, int], int]


class JsonCall:
    """Reads one call object; returns name and pieces of arguments as soon as they are certain.

    They are certain when the name is a tool's and the arguments have proven to be JSON. Arguments
    before the name are held until it is known. Some models write them as a JSON string, which is
    unpacked when it is complete. Some wrap name and arguments in another object, as in OpenAI's API
    (``{"type": "function", "function": {...}}``), which is entered.

    Args:
        known: Names of the tools that may be called.
        is_bare: True if any JSON may occur here, so an object with keys that no call has fails.
        skips: True reads a call of an unknown tool to its end, because others may follow it.
            Otherwise it has failed as soon as its name is known.
        needs_arguments: True if an object without arguments is not a call.

    Attributes:
        has_begun: True if its name was returned; before, it may turn out to be no call.
        has_ended: True if its last bracket was read.
        has_failed: True if it is not a call.
        is_skipped: True for a call of an unknown tool that is read to its end.
        raw: Its text as written, while it may turn out to be no call.
    """

    NAMES: ClassVar[tuple[str, ...]] = ("name", "function", "function_name", "tool_name", "tool")
    ARGUMENTS: ClassVar[tuple[str, ...]] = (
        "arguments",
        "parameters",
        "args",
        "tool_arguments",
        "input",
    )
    IDS: ClassVar[tuple[str, ...]] = ("id", "call_id", "tool_call_id")
    OTHERS: ClassVar[tuple[str, ...]] = (*IDS, "type", "index")
    OUTER: ClassVar[tuple[str, ...]] = (
        "function",
        "tool",
    )  # of an object that has name and arguments

    def __init__(
        self,
        known: Collection[str],
        *,
        is_bare: bool = False,
        skips: bool = False,
        needs_arguments: bool = False,
    ) -> None:
        self._known = known
        self._needs_arguments = needs_arguments
        self._is_bare = is_bare
        self._skips = skips
        self._state: _State = self._open
        self._depth = 0  # of objects entered
        self._key = ""
        self._value = JsonValue()
        self._value_text: list[str] = []
        self._name: str | None = None
        self._id: str | None = None
        self._arguments: JsonArguments | None = None
        self._pieces: list[str] = []  # of the arguments, read but not returned
        self._gave_arguments = False
        self.has_begun = False
        self.has_ended = False
        self.has_failed = False
        self.is_skipped = False
        self.raw: list[str] = []

    @property
    def in_string(self) -> bool:
        """True if the text so far ends within a string, where a marker is text."""
        if self.has_ended or self.has_failed:
            return False
        arguments = self._arguments
        return self._value.in_string or (arguments is not None and arguments.in_string)

    def feed(self, text: str, at: int, out: list[Event]) -> int:
        """Continues from an index; adds events to `out`, returns the index where it stopped."""
        start = at
        while at < len(text) and not self.has_ended and not self.has_failed:
            at = self._state(text, at)
            self._give(out)
        if not self.has_begun:
            self.raw.append(text[start:at])
        return at

    def finish(self, out: list[Event]) -> None:
        """The answer, or the block of the call, ends here."""
        if not self.has_begun:
            lacks_arguments = self._needs_arguments and self._arguments is None
            is_none = self._name not in self._known or lacks_arguments
            if is_none or self.has_failed or self.has_ended:
                self.has_failed = True
                return
            self._begin(out)
        if not self.has_ended:
            arguments = self._arguments
            if arguments is not None:
                self._pieces.append(arguments.rest())
            self._give_pieces(out)
            self.has_ended = True
            is_complete = arguments is not None and arguments.is_complete
            if is_complete and not self._gave_arguments:
                out.append(CallArguments("{}"))
            out.append(CallEnd(is_complete))

    def _begin(self, out: list[Event]) -> None:
        assert self._name is not None
        self.has_begun = True
        self.raw.clear()
        out.append(CallBegin(self._name, self._id))

    def _give(self, out: list[Event]) -> None:
        """Returns everything that has become certain."""
        if not self.has_begun:
            if self._name is None or self.has_failed or self.is_skipped:
                return
            if self._name not in self._known:
                self.is_skipped = self._skips
                self.has_failed = not self._skips
                return
            arguments = self._arguments
            if not self.has_ended and (arguments is None or not arguments.has_begun):
                return
            if arguments is None and self._needs_arguments:
                self.has_failed = True
                return
            self._begin(out)
        self._give_pieces(out)
        if self.has_ended:
            if not self._gave_arguments:
                out.append(CallArguments("{}"))
            out.append(CallEnd(self._arguments is None or self._arguments.is_complete))

    def _give_pieces(self, out: list[Event]) -> None:
        piece = "".join(self._pieces)
        self._pieces.clear()
        if piece:
            self._gave_arguments = True
            out.append(CallArguments(piece))

    # States: each continues from an index and returns where it stopped.

    def _open(self, text: str, at: int) -> int:
        at = _after_space(text, at)
        if at < len(text):
            self.has_failed = text[at] != "{"
            self._state = self._before_key
            at += not self.has_failed
        return at

    def _before_key(self, text: str, at: int) -> int:
        at = _after_space(text, at)
        if at == len(text):
            return at
        if text[at] == "}":
            return self._close(at)
        if text[at] == ",":
            return at + 1
        if text[at] == '"':
            self._begin_value(self._in_key)
        else:
            self._give_up()
        return at

    def _give_up(self) -> None:
        """Ends the object at text that is not JSON: a call that has begun ends here."""
        self.has_failed = not self.has_begun
        self.has_ended = self.has_begun

    def _in_key(self, text: str, at: int) -> int:
        at = self._read_value(text, at)
        if self._value.has_ended:
            self._key = _string("".join(self._value_text))
            known = self.NAMES + self.ARGUMENTS + self.OTHERS
            if self._is_bare and self._name is None and self._key not in known:
                self.has_failed = True
            self._state = self._before_value
        return at

    def _before_value(self, text: str, at: int) -> int:
        at = _after_space(text, at)
        if at == len(text):
            return at
        if text[at] == ":":
            self._state = self._at_value
            return at + 1
        self._give_up()
        return at

    def _at_value(self, text: str, at: int) -> int:
        at = _after_space(text, at)
        if at == len(text):
            return at
        if self._key in self.OUTER and text[at] == "{":
            self._depth += 1
            self._state = self._before_key
            return at + 1
        if self._key in self.ARGUMENTS and self._arguments is None:
            self._begin_value(self._in_other_arguments)
            if text[at] == "{":
                self._arguments = JsonArguments()
                self._state = self._in_arguments
        else:
            self._begin_value(self._in_other)
        return at

    def _in_arguments(self, text: str, at: int) -> int:
        assert self._arguments is not None
        at, piece = self._arguments.take(text, at)
        self._pieces.append(piece)
        if self._arguments.has_failed:
            self.has_failed = True
        elif self._arguments.has_ended:
            self._state = self._before_key
        return at

    def _in_other_arguments(self, text: str, at: int) -> int:
        """Reads arguments that are not an object; a string may contain one."""
        at = self._read_value(text, at)
        if self._value.has_ended:
            self._arguments = JsonArguments()
            inner = unpacked("".join(self._value_text))
            self._pieces.append(self._arguments.take(inner)[1])
            # Text of a skipped call has no meaning.
            self.has_failed = self._arguments.has_failed or not self._arguments.has_ended
            self._state = self._before_key
        return at

    def _in_other(self, text: str, at: int) -> int:
        at = self._read_value(text, at)
        if self._value.has_ended:
            value = "".join(self._value_text)
            if self._key in self.NAMES and self._name is None and self._value.first == '"':
                self._name = _string(value)
            elif self._key in self.IDS and self._value.first == '"':
                self._id = self._id or _string(value)
            self._state = self._before_key
        return at

    def _begin_value(self, state: _State) -> None:
        self._value = JsonValue()
        self._value_text = []
        self._state = state

    def _read_value(self, text: str, at: int) -> int:
        at, piece = self._value.take(text, at)
        self._value_text.append(piece)
        return at

    def _close(self, at: int) -> int:
        if self._depth:
            self._depth -= 1
        elif self._name is None:
            self.has_failed = True
        else:
            self.has_ended = True
        return at + 1


class CallsReader(Protocol):
    """Reads calls that can be recognized without markers.

    Attributes:
        num_calls: Number of calls that have begun.
        has_failed: True if the last text is not a call.
        in_string: True if the text so far ends within a string, where a marker is text.
    """

    @property
    def num_calls(self) -> int: ...

    @property
    def has_failed(self) -> bool: ...

    @property
    def in_string(self) -> bool: ...

    def feed(self, text: str, at: int, out: list[Event]) -> int:
        """Continues from an index; adds events to `out`, returns the index where it stopped.

        It stops at the end of the text, after the calls, or where it recognizes that there are
        none. In that case, `unread` returns the text read so far.
        """

    def finish(self, out: list[Event]) -> None:
        """Ends the answer, or the block of the calls, and with it an open call."""

    def unread(self) -> str:
        """Returns, and forgets, text that was read and is not a call."""


class JsonCalls:
    """Reads a sequence of call objects, or an array of them.

    A call of an unknown tool is text; other calls in the same array are still calls.

    Args:
        known: Names of the tools that may be called.
        is_bare, needs_arguments: See `JsonCall`.
        one: True ends with an object that is in no array.
        kind: Reads an object.

    Attributes:
        is_array: True if an array is open.
        has_ended: True after the end of an array; nothing more is read.
        num_calls: Number of calls that have begun.
    """

    def __init__(
        self,
        known: Collection[str],
        *,
        is_bare: bool = False,
        needs_arguments: bool = False,
        one: bool = False,
        kind: type[JsonCall] = JsonCall,
    ) -> None:
        self._known = known
        self._needs_arguments = needs_arguments
        self._is_bare = is_bare
        self._one = one
        self._kind = kind
        self._call: JsonCall | None = None
        self._skipped: list[str] = []  # calls of unknown tools, and the text before them
        self._space: list[str] = []  # between calls, in case none follows
        self.is_array = False
        self.has_ended = False
        self.num_calls = 0

    @property
    def in_string(self) -> bool:
        """True if the text so far ends within a string."""
        return self._call is not None and self._call.in_string

    @property
    def has_failed(self) -> bool:
        """True if the object that was read last is not a call."""
        return self._call is not None and self._call.has_failed

    def feed(self, text: str, at: int, out: list[Event]) -> int:
        """Continues from an index; adds events to `out`, returns the index where it stopped.

        It stops at the end of the text, after the array's bracket, or at a character that begins no
        call. An object that turned out to be no call (`has_failed`) is left for `unread`.
        """
        while at < len(text) and not self.has_ended:
            if self._call is None:
                c = text[at]
                if c == "{":
                    skips = self.is_array or not self._is_bare
                    self._call = self._kind(
                        self._known,
                        is_bare=self._is_bare,
                        skips=skips,
                        needs_arguments=self._needs_arguments,
                    )
                    continue
                # A bracket too many, after a call.
                is_stray = c in "}]"[: 1 if self.is_array else 2] and self.num_calls > 0
                if c not in " \t\r\n,;" and (c != "[" or self.is_array) and not is_stray:
                    if c != "]" or not self.is_array:
                        return at
                    self.is_array, self.has_ended = False, True
                    self._space.append(c)
                    return at + 1
                self.is_array = self.is_array or c == "["
                self._space.append(c)
                at += 1
                continue
            at = self._feed_call(self._call, text, at, out)
            if self._call is not None and self._call.has_failed:
                return at
        return at

    def _feed_call(self, call: JsonCall, text: str, at: int, out: list[Event]) -> int:
        begun, before = call.has_begun, len(out)
        at = call.feed(text, at, out)
        if call.has_begun and not begun:
            self.num_calls += 1
            if skipped := "".join(self._skipped).strip():
                out.insert(before, ContentText(skipped))
            self._skipped.clear()
            self._space.clear()
        if call.has_ended and not call.has_failed:
            self._call = None
            if call.is_skipped:
                self._skipped += [*self._space, *call.raw]
                self._space.clear()
            self.has_ended = self._one and not self.is_array
        return at

    def finish(self, out: list[Event]) -> None:
        """Ends the answer, or the block of the calls, and with it an open call.

        Text that turned out to be no call, and brackets without calls, are left for `unread`.
        """
        if self._call is not None:
            begun, before = self._call.has_begun, len(out)
            self._call.finish(out)
            if not self._call.has_failed:
                self.num_calls += not begun
                if not begun and (skipped := "".join(self._skipped).strip()):
                    out.insert(before, ContentText(skipped))
                if not begun:
                    self._skipped.clear()
                self._call = None

    def unread(self) -> str:
        """Returns, and forgets, text that was read and is not a call."""
        is_needed = self._skipped or not self.num_calls
        before = [*self._skipped, *self._space] if is_needed else []
        raw = "".join(before + (self._call.raw if self._call is not None else []))
        self._skipped, self._space, self._call, self.is_array = [], [], None, False
        return raw


def _after_space(text: str, at: int) -> int:
    return SPACE.match(text, at).end()  # type: ignore[union-attr]


def _string(text: str) -> str:
    """The value of a JSON string."""
    try:
        return str(json.loads(text))
    except ValueError:
        return text[1:-1]


def unpacked(text: str) -> str:
    """Converts arguments that are not an object: those in a string, or missing ones."""
    if text in ("null", "", "[]"):
        return "{}"
    inner = _string(text) if text.startswith('"') else ""
    value = JsonValue()
    end, mended = value.take(inner)
    if value.first == "{" and value.has_ended and not inner[end:].strip():
        return mended
    return "{}" if text.startswith('"') and not inner.strip() else text
