"""Parser of calls written as tags around a name, keys and values."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from mlx_paged.parsing.definitions import Tool
from mlx_paged.parsing.events import (
    CallArguments,
    CallBegin,
    CallEnd,
    ContentText,
    Event,
)
from mlx_paged.parsing.json_calls import JsonCalls
from mlx_paged.parsing.json_value import JsonValue
from mlx_paged.parsing.lexer import Lexeme
from mlx_paged.parsing.schemas import ArgumentsWriter, properties_of
from mlx_paged.parsing.tags import Tags

_MAX_NAME_LENGTH = 256  # characters; a longer text is not a name
_MAX_KEY_LENGTH = 2 * _MAX_NAME_LENGTH  # with its end

_State = Callable[[Lexeme], Iterator[Event]]


class TaggedParser:
    """Reads calls in tags.

    A tag counts only at a valid position; elsewhere it is text. A value ends at its end tag only if
    another key, or the end of the call, follows, so a value may contain the tag. If models omit the
    end tag, the value ends before the key of another parameter of the tool, or at the call's end.
    Text at a position without text is returned after the call.

    Args:
        tags: Tags of the family.
        tools: Tools that may be called; a call of another one is text.
        takes_json: See `TaggedFormat`.
    """

    def __init__(self, tags: Tags, tools: Sequence[Tool], *, takes_json: bool = False) -> None:
        self._tags = tags
        self._tools = {tool.name: tool for tool in tools}
        self._takes_json = takes_json
        self._block_ends = dict(tags.blocks)
        self._ends = {tags.call_end, tags.value_end, *self._block_ends.values()}
        self._block_end: str | None = None  # of the block that is open
        self._follows_call = False
        self._state: _State = self._outside
        self._raw: list[str] = []  # of a possible call
        self._noise: list[str] = []  # text in a block, before a call
        self._stray: list[str] = []  # text in a call at a position without text
        self._name = ""
        self._missing: set[str] = set()  # the call's required parameters
        self._known: set[str] = set()  # parameters of its tool
        self._keys: set[str] = set()  # parameters so far
        self._key = ""
        self._value = JsonValue()
        self._lexemes: list[Lexeme] = []  # of a value that is not a string
        self._is_late = False  # the answer has ended
        self._space = ""  # at the end of a value, so far
        self._held: list[Lexeme] = []  # the possible end of the value, or a part of it
        self._held_text = ""  # a key or a name within it
        self._in_held_name = False
        self._writer = ArgumentsWriter(None)
        self._is_string: bool | None = None
        self._json: JsonCalls | None = None

    def feed(self, lexeme: Lexeme) -> Iterator[Event]:
        return self._state(lexeme)

    def passes(self, text: str) -> bool:
        return self._state == self._outside and not self._follows_call

    @property
    def _is_in_json(self) -> bool:
        """Within a string of an array or an object a tag is text, unless the string never ends."""
        return self._value.in_string and self._value.first in ("[", "{") and not self._is_late

    def finish(self) -> Iterator[Event]:
        end = Lexeme(self._tags.value_end, True)
        if self._state == self._in_value and self._is_in_json and end in self._lexemes:
            lexemes, self._is_late = self._lexemes, True
            self._value, self._space, self._lexemes = JsonValue(), "", []
            self._writer.restart()
            for lexeme in lexemes:
                yield from self._state(lexeme)
            yield from self.finish()
            return
        if self._state == self._in_held_end and self._held[0].text in self._ends:
            yield from self._end_value()
        state, self._state = self._state, self._outside
        if state == self._outside:
            return
        if state == self._in_json:
            yield from self._end_json("")
        elif state == self._in_json_arguments:
            if rest := self._value.rest():
                yield CallArguments(rest)
            yield CallEnd(self._value.has_ended and not self._value.is_broken)
        elif state == self._in_block:
            if self._noise or not self._follows_call:
                yield from self._end_block("")
        elif state == self._in_name:
            name = self._name.strip()
            if name in self._tools and not self._tags.name_end:
                yield CallBegin(name)
                yield CallEnd(is_complete=False)
            elif name or not self._follows_call:
                yield from self._no_call()
        elif state in (self._after_value, self._in_arguments):
            if state == self._after_value:
                yield from self._add_space()
                yield CallArguments(self._writer.end())
            if is_complete := self._missing <= self._keys:
                yield CallArguments(self._writer.close())
            yield CallEnd(is_complete, lacks_end=True)
            if self._tags.attributes and not self._keys:
                self._stray = []  # cut attributes
            yield from self._beside_call()
        else:
            if state in (self._in_held_key, self._in_held_end):
                yield from self._add("".join(lexeme.text for lexeme in self._held))
            if state in (self._in_value, self._in_held_key, self._in_held_end):
                yield from self._add_space()
            yield CallEnd(is_complete=False)
            yield from self._beside_call()
            if self._key and state in (self._in_key, self._before_value):
                yield ContentText(self._tags.key + self._key)
            elif held := self._writer.held.strip():
                opening = self._tags.key + self._key + self._tags.key_ends[0][0]
                yield ContentText(opening + self._tags.value + held)

    # States.

    def _outside(self, lexeme: Lexeme) -> Iterator[Event]:
        tags = self._tags
        if lexeme.is_marker and lexeme.text in self._block_ends:
            self._block_end = self._block_ends[lexeme.text]
            self._raw = [lexeme.text]
            self._state = self._in_block
        elif lexeme == (tags.call, True):
            # Some models forget to open the block.
            self._raw = [lexeme.text]
            self._begin_name()
        elif self._is_other(lexeme):
            return
        elif lexeme.is_marker and lexeme.text == self._block_end:
            self._block_end = None
        elif not (self._follows_call and lexeme.is_marker and lexeme.text in self._ends):
            # After a call, an end tag is redundant.
            self._follows_call = self._follows_call and not lexeme.text.strip()
            yield ContentText(lexeme.text)

    def _is_other(self, lexeme: Lexeme) -> bool:
        """Returns True for a tag without a meaning of its own."""
        return lexeme.is_marker and lexeme.text in self._tags.others

    def _in_block(self, lexeme: Lexeme) -> Iterator[Event]:
        if lexeme == (self._tags.call, True):
            self._raw.append(lexeme.text)
            self._begin_name()
        elif lexeme.is_marker and lexeme.text == self._block_end:
            yield from self._end_block(lexeme.text)
            self._block_end = None
            self._state = self._outside
        elif self._takes_json and not lexeme.is_marker and lexeme.text.lstrip()[:1] in ("{", "["):
            self._json = JsonCalls(self._tools)
            self._state = self._in_json
            yield from self._in_json(lexeme)
        elif self._is_other(lexeme):
            self._raw.append(lexeme.text)
            self._noise.append(" ")
        elif lexeme.is_marker and lexeme.text in self._block_ends:  # once more
            self._block_end = self._block_ends[lexeme.text]
            self._raw.append(lexeme.text)
        elif self._follows_call and lexeme.is_marker and lexeme.text in self._ends:
            return
        elif not lexeme.is_marker and len("".join(self._noise) + lexeme.text) <= _MAX_NAME_LENGTH:
            self._raw.append(lexeme.text)
            self._noise.append(lexeme.text)
        else:
            self._noise.append(lexeme.text)
            self._raw.append(lexeme.text)
            yield from self._end_block("")
            self._state = self._outside

    @property
    def _has_call(self) -> bool:
        """True if a call was in the open block."""
        return not (self._raw and self._raw[0] in self._block_ends)

    def _end_block(self, tag: str) -> Iterator[Event]:
        """Ends a block. Without a call, all of it is text, including tags."""
        if self._has_call:
            yield from self._noise_as_content()
            return
        self._raw.append(tag)
        self._block_end = None
        yield from self._as_content()

    def _noise_as_content(self, name: str = "") -> Iterator[Event]:
        """Emits the text before a call, or between calls.

        Args:
            name: Name of the next call, which some models also write before it.
        """
        noise, self._raw, self._noise = "".join(self._noise), [], []
        for word in (*self._tags.words, name) if self._tags.words else ():
            noise = re.sub(rf"(?<!\S){re.escape(word)}(?!\S)", "", noise)
        if noise := noise.strip():
            self._follows_call = False
            yield ContentText(noise + "\n")

    def _begin_name(self) -> None:
        self._name = ""
        self._state = self._in_name

    def _in_name(self, lexeme: Lexeme) -> Iterator[Event]:
        tags = self._tags
        if lexeme.is_marker:
            ends = not tags.name_end and lexeme.text in (tags.key, tags.call_end)
            name, rest = self._name.strip(), ""
            if not tags.name_end and name not in self._tools:
                name, _, rest = name.partition("\n")  # text after the name
            is_named = name.strip() in self._tools
            if lexeme.text == tags.name_end and is_named:
                yield from self._begin_call(name)
            elif ends and is_named:
                yield from self._begin_call(name.strip())
                self._stray.append(rest)
                yield from self._in_arguments(lexeme)
            elif lexeme.text == tags.call and not self._name.strip():  # once more
                self._raw += [self._name, lexeme.text]
                self._begin_name()
            else:
                yield from self._no_call()
                yield from self._outside(lexeme)
            return
        self._name += lexeme.text
        if self._takes_json and self._name.lstrip()[:1] in ("{", "["):
            self._json = JsonCalls(self._tools)
            self._state = self._in_json
            yield from self._in_json(Lexeme(self._name))
            return
        at = self._name.find(tags.name_end) if tags.name_end else -1
        if at >= 0 and self._name[:at].strip() in self._tools:
            rest = self._name[at + len(tags.name_end) :]
            yield from self._begin_call(self._name[:at].strip())
            if rest:
                yield from self._in_arguments(Lexeme(rest))
        elif at >= 0 or len(self._name) > _MAX_NAME_LENGTH + len(tags.name_end):
            yield from self._no_call()

    def _leave_block(self) -> None:
        """Leaves a block without a call, so that its end tag will be text."""
        if not self._has_call:
            self._block_end = None

    def _no_call(self) -> Iterator[Event]:
        """Emits everything that was read as text."""
        self._leave_block()
        self._raw.append(self._name)
        self._name = ""
        self._follows_call = False
        yield from self._as_content()
        self._state = self._outside

    def _as_content(self) -> Iterator[Event]:
        raw, self._raw, self._noise = "".join(self._raw), [], []
        if raw:
            yield ContentText(raw)

    def _begin_call(self, name: str) -> Iterator[Event]:
        yield from self._noise_as_content(name)
        self._stray = []
        parameters = self._tools[name].parameters
        self._writer = ArgumentsWriter(parameters, trims_newlines=self._tags.trims_newlines)
        self._missing = set(parameters.get("required") or ())
        self._known = set(properties_of(parameters))
        self._keys = set()
        self._state = self._in_arguments
        yield CallBegin(name)

    def _in_arguments(self, lexeme: Lexeme) -> Iterator[Event]:
        """Reads text between a name or a value and the next key."""
        is_first = not (self._keys or self._stray_text())
        if not lexeme.is_marker and is_first and lexeme.text.lstrip()[:1] == "{":
            self._value = JsonValue()
            self._state = self._in_json_arguments
            yield from self._in_json_arguments(lexeme)
            return
        if lexeme == (self._tags.key, True):
            self._key = ""
            self._state = self._in_key
        elif lexeme == (self._tags.call_end, True):
            yield CallArguments(self._writer.close())
            yield from self._end_call()
        elif lexeme.is_marker and (
            lexeme.text in (self._tags.call, self._block_end) or lexeme.text in self._block_ends
        ):
            # The call's end is missing.
            yield CallArguments(self._writer.close())
            yield from self._end_call()
            yield from self._state(lexeme)
        elif not lexeme.is_marker:
            self._stray.append(lexeme.text)

    def _end_call(self, *, is_complete: bool = True) -> Iterator[Event]:
        self._state = self._in_block if self._block_end is not None else self._outside
        self._follows_call = True
        yield CallEnd(is_complete, lacks_end=self._is_late)
        yield from self._beside_call()

    def _beside_call(self) -> Iterator[Event]:
        """Emits text in a call at a position without text."""
        text, self._stray = self._stray_text(), []
        if text:
            yield ContentText(text + "\n")

    def _stray_text(self) -> str:
        text = "".join(self._stray)
        if self._tags.attributes:
            text = re.sub(self._tags.attributes, "", text)
        return text.strip()

    def _ends_key(self, lexeme: Lexeme) -> bool:
        """True for a tag that cannot follow a key, so the text before it was not one."""
        tags = self._tags
        others = (tags.key, tags.call, tags.call_end, tags.value_end, self._block_end)
        return lexeme.is_marker and (lexeme.text in others or lexeme.text in self._block_ends)

    def _no_key(self, lexeme: Lexeme) -> Iterator[Event]:
        self._stray.append(f" {self._key} ")
        self._key = ""
        self._state = self._in_arguments
        yield from self._in_arguments(lexeme)

    def _in_key(self, lexeme: Lexeme) -> Iterator[Event]:
        ends = dict(self._tags.key_ends)
        if self._ends_key(lexeme) or len(self._key) > _MAX_KEY_LENGTH:
            yield from self._no_key(lexeme)
            return
        if lexeme.is_marker and self._tags.value:
            if lexeme.text in ends:
                self._is_string = ends[lexeme.text]
                self._state = self._before_value
            elif lexeme.text == self._tags.value:  # the key's end is missing
                yield from self._begin_value()
            else:
                self._key += lexeme.text
            return
        self._key += lexeme.text
        if self._tags.value:
            return
        if (found := self._end_of_key(self._key)) is not None:
            at, end = found
            self._is_string = ends[end]
            self._key, rest = self._key[:at], self._key[at + len(end) :]
            yield from self._begin_value()
            if rest:
                yield from self._in_value(Lexeme(rest))

    def _end_of_key(self, text: str) -> tuple[int, str] | None:
        """Returns the end of a key without a marker after it, and what ends it."""
        found = min(
            ((at, -len(end), end) for end, _ in self._tags.key_ends if (at := text.find(end)) >= 0),
            default=None,
        )
        return None if found is None else (found[0], found[2])

    def _before_value(self, lexeme: Lexeme) -> Iterator[Event]:
        if lexeme == (self._tags.value, True):
            yield from self._begin_value()
        elif self._ends_key(lexeme):
            yield from self._no_key(lexeme)
        elif not lexeme.is_marker and lexeme.text.strip():  # the value's tag is missing
            yield from self._begin_value()
            yield from self._in_value(Lexeme(lexeme.text.lstrip()))

    def _begin_value(self) -> Iterator[Event]:
        self._state = self._in_value
        self._value = JsonValue()
        self._space, self._lexemes = "", []
        key = self._key.strip()
        self._keys.add(key)
        yield CallArguments(self._writer.begin(key, is_string=self._is_string))

    def _in_value(self, lexeme: Lexeme) -> Iterator[Event]:
        tags = self._tags
        if not self._writer.is_string:
            self._lexemes.append(lexeme)
        if lexeme.is_marker and not self._is_in_json:
            self._held, self._held_text = [lexeme], ""
            if lexeme.text == tags.value_end:
                self._state = self._after_value
                return
            if lexeme.text == tags.key:
                self._state = self._in_held_key
                return
            if lexeme.text in self._ends or lexeme.text in (tags.call, *self._block_ends):
                self._state = self._in_held_end
                self._in_held_name = lexeme.text == tags.call
                return
        yield from self._add(lexeme.text)

    def _add(self, text: str) -> Iterator[Event]:
        """Adds to a value. Whitespace at its end is held, because it may belong to the tags."""
        text = self._space + text
        certain = text.rstrip()
        self._space = text[len(certain) :]
        yield from self._write(certain)

    def _add_space(self, *, is_end_missing: bool = False) -> Iterator[Event]:
        """Ends the value; the whitespace held at its end is part of it.

        Args:
            is_end_missing: Its end tag is missing, so a newline belongs to the tag that follows.
        """
        space, self._space = self._space, ""
        if is_end_missing and "\n" in space:
            keeps_newline = self._tags.trims_newlines  # The writer drops it.
            space = space[: space.rindex("\n") + keeps_newline]
        yield from self._write(space)

    def _write(self, text: str) -> Iterator[Event]:
        if not text:
            return
        if not self._writer.is_string:
            self._value.take(text)
        if piece := self._writer.add(text):
            yield CallArguments(piece)

    def _after_value(self, lexeme: Lexeme) -> Iterator[Event]:
        """After a tag that ends the value if the right text follows."""
        tags = self._tags
        follows = (tags.key, tags.call_end, tags.call, self._block_end)
        if not lexeme.is_marker:
            if not lexeme.text.strip():
                self._held.append(lexeme)
                return
            begun = ("".join(held.text for held in self._held[1:]) + lexeme.text).lstrip()
            if any(tag is not None and tag.startswith(begun) for tag in follows):
                self._held.append(lexeme)  # space, or a tag that the answer's end cut
                return
        if lexeme.is_marker and lexeme.text in follows:
            yield from self._add_space()
            yield CallArguments(self._writer.end())
            self._state = self._in_arguments
            yield from self._in_arguments(lexeme)
            return
        yield from self._not_ended(lexeme)

    def _in_held_key(self, lexeme: Lexeme) -> Iterator[Event]:
        """Within a possible next key; if it is one, the value has ended before it."""
        tags = self._tags
        self._held.append(lexeme)
        is_end = False
        if lexeme.is_marker:
            is_end = bool(tags.value) and (
                lexeme.text == tags.value or lexeme.text in dict(tags.key_ends)
            )
            is_none = not is_end
        else:
            self._held_text += lexeme.text
            found = None if tags.value else self._end_of_key(self._held_text)
            if found is not None:
                is_end, self._held_text = True, self._held_text[: found[0]]
            is_none = len(self._held_text) > _MAX_NAME_LENGTH
        if is_end and self._may_follow(self._held_text.strip()):
            yield from self._end_value()
        elif is_end or is_none:
            self._held.pop()
            yield from self._not_ended(lexeme)

    def _may_follow(self, key: str) -> bool:
        """True for the key of another parameter."""
        is_known = key in self._known if self._known else _is_name(key)
        return is_known and key not in self._keys

    def _in_held_end(self, lexeme: Lexeme) -> Iterator[Event]:
        """After a tag that ends the call, or begins another, if the right text follows.

        In a block, that is the block's end, or a call of a tool. Without an open block, and after a
        block's end, anything may follow; only the value's end tag proves that the tags were text.
        """
        tags, first = self._tags, self._held[0].text
        is_sure = first == tags.call_end and lexeme.text == self._block_end and lexeme.is_marker
        if self._in_held_name:
            if not lexeme.is_marker:
                self._held_text += lexeme.text
            name = self._held_text
            is_whole = lexeme.is_marker and lexeme.text in (tags.key, tags.call_end)
            if tags.name_end:
                name, found, _ = name.partition(tags.name_end)
                is_whole = bool(found)
            is_sure = is_sure or (is_whole and name.strip() in self._tools)
            is_short = len(name) <= _MAX_NAME_LENGTH
            self._in_held_name = not is_whole and not lexeme.is_marker and is_short
        if lexeme == (tags.call, True):
            self._in_held_name, self._held_text = True, ""
        if is_sure:
            self._held.append(lexeme)
            yield from self._end_value()
            return
        is_open = self._block_end is not None and first != self._block_end
        can_be_anything = first in self._ends and not is_open
        may_go_on = (
            self._in_held_name
            or (not lexeme.is_marker and not lexeme.text.strip())
            or (lexeme.is_marker and lexeme.text in self._block_ends)
        )
        ends_text = lexeme.is_marker and lexeme.text in (tags.value_end, tags.key)
        if ends_text and not self._in_held_name:
            yield from self._not_ended(lexeme)
        elif may_go_on or can_be_anything:
            self._held.append(lexeme)
        else:
            yield from self._not_ended(lexeme)

    def _end_value(self) -> Iterator[Event]:
        """Ends the value before the held text."""
        held, self._held = self._held, []
        yield from self._add_space(is_end_missing=True)
        yield CallArguments(self._writer.end())
        self._state = self._in_arguments
        for lexeme in held:
            yield from self._state(lexeme)

    def _not_ended(self, lexeme: Lexeme) -> Iterator[Event]:
        """Adds the held lexemes to the value, and then this one."""
        held, self._held = "".join(held.text for held in self._held), []
        self._state = self._in_value
        yield from self._add(held)
        yield from self._in_value(lexeme)

    def _in_json(self, lexeme: Lexeme) -> Iterator[Event]:
        """Reads a call written as JSON, or several, instead of a name and values."""
        assert self._json is not None
        if lexeme == (self._tags.call_end, True) and not self._json.in_string:
            yield from self._end_json(lexeme.text)
            self._state = self._in_block if self._block_end is not None else self._outside
            return
        if lexeme.is_marker and lexeme.text == self._block_end and not self._json.in_string:
            yield from self._end_json("")
            self._state = self._in_block
            yield from self._in_block(lexeme)
            return
        out: list[Event] = []
        at = self._json.feed(lexeme.text, 0, out)
        yield from self._of_json(out)
        if at < len(lexeme.text):
            yield from self._end_json("")
            self._state = self._outside
            if self._follows_call and self._block_end is None:
                self._block_end = self._tags.call_end
            yield from self._outside(Lexeme(lexeme.text[at:]))

    def _end_json(self, tag: str) -> Iterator[Event]:
        assert self._json is not None
        out: list[Event] = []
        self._json.finish(out)
        yield from self._of_json(out)
        unread, has_calls = self._json.unread(), self._json.num_calls > 0
        self._json = None
        self._follows_call = has_calls
        if has_calls:  # Others may be of unknown tools.
            unread, tag = unread.strip(), ""
        self._raw += [unread, tag]
        yield from self._as_content()

    def _of_json(self, events: Sequence[Event]) -> Iterator[Event]:
        """Yields events of the JSON reader. The tags before a call are not text any more."""
        if events:
            self._raw = []
        yield from events

    def _in_json_arguments(self, lexeme: Lexeme) -> Iterator[Event]:
        """Reads arguments written as one JSON object instead of keys and values."""
        value, tags = self._value, self._tags
        ends = (tags.call_end, tags.call, self._block_end, *self._block_ends)
        if lexeme.is_marker and lexeme.text in ends and not value.in_string:
            if rest := value.rest():
                yield CallArguments(rest)
            yield from self._end_call(is_complete=value.has_ended and not value.is_broken)
            if lexeme.text != tags.call_end:
                yield from self._state(lexeme)
            return
        if value.has_ended:
            self._stray.append("" if lexeme.is_marker else lexeme.text)
            return
        at, piece = value.take(lexeme.text)
        self._stray.append(lexeme.text[at:])
        if piece:
            yield CallArguments(piece)


def _is_name(text: str) -> bool:
    """Returns True for a word, which can be a name."""
    name = text.strip()
    return 0 < len(name) <= len(text) <= _MAX_NAME_LENGTH and not re.search(r"[\s<>{}]", name)
