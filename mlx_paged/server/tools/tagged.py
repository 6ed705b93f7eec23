"""Calls written as tags around a name, keys and values: one parser and one grammar for all of them.

The families differ in their tags; what the tags mean is the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from mlx_paged.server.tools.definitions import Tool
from mlx_paged.server.tools.events import (
    CallArguments,
    CallBegin,
    CallEnd,
    ContentText,
    Event,
)
from mlx_paged.server.tools.format import Parser, ToolFormat
from mlx_paged.server.tools.json_calls import JsonCalls, JsonValue
from mlx_paged.server.tools.lark import Lark
from mlx_paged.server.tools.lexer import Lexeme
from mlx_paged.server.tools.parameters import counts, parameter_lists, unenforced
from mlx_paged.server.tools.schemas import ArgumentsWriter, Schema, types_of

_LONGEST_NAME = 256  # characters; what is longer is no name


@dataclass(frozen=True)
class Tags:
    """The tags of a family.

    Attributes:
        call: Before a name.
        name_end: After the name; "" where the next tag ends it.
        call_end: After the last value.
        key: Before a key.
        key_ends: After it, with what each says of the value: True: it is a string, False: it is
            none, None: the tool's schema says it. The first one is ours; others are understood.
        value: Before a value, after the key's end; "" for nothing.
        value_end: After it.
        blocks: Around all calls; the first pair is ours. Empty where each call stands by itself.
        has_shared_block: Whether all calls are in one block; otherwise each has its own.
        newline: Between tags, as the chat template writes it.
        trims_newlines: Whether a newline at either end of a value belongs to the tags.
        others: Tags without a meaning of their own: they are left out around calls and keys, and so
            are words between them.
        before_call, after_call: Text around a call, as the chat template writes it: others of the
            tags.
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
    before_call: str = ""
    after_call: str = ""

    @property
    def markers(self) -> tuple[str, ...]:
        """Those for the lexer.

        (What ends a name or a key is looked for only there, unless it is a tag of its own.)
        """
        tags = [self.call, self.call_end, self.key, self.value, self.value_end, *self.others]
        tags += [self.name_end] if self.name_end.startswith("<") else []
        tags += [end for end, _ in self.key_ends if self.value]
        return tuple(tag for tag in tags + [tag for pair in self.blocks for tag in pair] if tag)


class TaggedFormat(ToolFormat):
    """Calls of tags. A family is a subclass with its `tags`.

    Attributes:
        tags: Of the family.
        takes_json: Whether a JSON object may stand for the name, keys and values of a call.
    """

    tags: ClassVar[Tags]
    takes_json: ClassVar[bool] = False

    def parser(self, tools: Sequence[Tool]) -> Parser:
        return TaggedParser(self.tags, tools, takes_json=self.takes_json)

    def counts(self, parameters: Mapping[str, Any]) -> Mapping[str, int]:
        return counts(parameters)

    def unenforced(self, tool: Tool) -> Iterable[tuple[str, object]]:
        return unenforced(tool.parameters, tool.field)

    def forced(self, tools: Sequence[Tool], *, required: bool, parallel: bool) -> str:
        lark = Lark(self.vocabulary)
        tags = self.tags
        if not tags.blocks:
            call = lark.rule(" | ".join(self._call(lark, tool) for tool in tools))
            return lark.answer(
                tags.call, call, required=required, parallel=parallel, between=tags.newline
            )
        begin, end = tags.blocks[0]
        opening = lark.literal(tags.newline + tags.before_call + tags.call)
        call = lark.rule(" | ".join(f"{opening} {self._call(lark, tool)}" for tool in tools))
        is_repeated = parallel and tags.has_shared_block
        rest = f"{call}{'+' if is_repeated else ''} {lark.literal(tags.newline + end)}"
        # (A call is read without its block, too.)
        others = [*self.begins_call, tags.call, *tags.others]
        return lark.answer(
            begin,
            lark.rule(rest),
            required=required,
            parallel=parallel,
            between=tags.newline,
            others=others,
        )

    def _call(self, lark: Lark, tool: Tool) -> str:
        """The rule of a call after its first tag."""
        tags = self.tags
        alternatives = []
        for parameters, root in parameter_lists(tool.parameters):
            parts = [self._name(lark, tool)]
            for name, schema, is_required in parameters:
                value_end = ("\n" if tags.trims_newlines else "") + tags.value_end
                values = []
                for end, of_end in self._key_ends(schema, types_of(schema, tool.parameters)):
                    before = tags.newline + tags.key + name + end
                    before += tags.newline + tags.value if tags.value else ""
                    before += "\n" if tags.trims_newlines else ""
                    value = self._value(lark, of_end, root, value_end, strict=tool.strict)
                    values.append(f"{lark.literal(before)} {value}")
                parts.append(f"({' | '.join(values)}){'' if is_required else '?'}")
            parts.append(lark.literal(tags.newline + tags.call_end + tags.after_call))
            alternatives.append(" ".join(parts))
        return lark.rule(" | ".join(alternatives))

    def _name(self, lark: Lark, tool: Tool) -> str:
        """A tool's name and what follows it, in Lark."""
        return lark.literal(tool.name + self.tags.name_end)

    def _value(
        self, lark: Lark, schema: Schema, root: Schema, value_end: str, *, strict: bool
    ) -> str:
        """A value and its end, in Lark."""
        return lark.value(schema, root, value_end, strict=strict)

    def _key_ends(self, schema: Schema, types: frozenset[str]) -> list[tuple[str, Schema]]:
        """What may end a key, each with the schema of the values that may follow it.

        Args:
            schema, types: of the key's values.
        """
        strings = [end for end, is_string in self.tags.key_ends if is_string is not False]
        others = [end for end, is_string in self.tags.key_ends if is_string is not True]
        if strings[0] == others[0]:
            return [(strings[0], schema)]
        ends: list[tuple[str, Schema]] = []
        if "string" in types:
            ends.append((strings[0], {"allOf": [schema, {"type": "string"}]}))
        if rest := sorted(types - {"string"}):
            ends.append((others[0], {"allOf": [schema, {"type": rest}]}))
        return ends


_State = Callable[[Lexeme], Iterator[Event]]


class TaggedParser:
    """Reads calls of tags.

    A tag counts where the syntax has a place for it; anywhere else it is text. A value ends at its
    end tag only if another key, or the end of the call, follows, so a value may contain the tag.
    """

    def __init__(self, tags: Tags, tools: Sequence[Tool], *, takes_json: bool = False) -> None:
        self._tags = tags
        self._tools = {tool.name: tool for tool in tools}
        self._takes_json = takes_json
        self._block_ends = dict(tags.blocks)
        self._block_end: str | None = None  # of the block that is open
        self._state: _State = self._outside
        self._raw: list[str] = []  # what was read of a call that may be none
        self._word = ""  # text in a block, since its last tag
        self._name = ""
        self._missing: set[str] = set()  # the call's required parameters
        self._keys: set[str] = set()  # those that were there
        self._key = ""
        self._value = JsonValue()
        self._held: list[str] = []  # after an end tag that may be a part of the value
        self._writer = ArgumentsWriter(None)
        self._is_string: bool | None = None
        self._json: JsonCalls | None = None

    def feed(self, lexeme: Lexeme) -> Iterator[Event]:
        return self._state(lexeme)

    def passes(self, text: str) -> bool:
        return self._state == self._outside

    def finish(self) -> Iterator[Event]:
        state, self._state = self._state, self._outside
        if state == self._outside:
            return
        if state == self._in_json:
            yield from self._end_json("")
        elif state == self._in_json_arguments:
            yield CallEnd(self._value.has_ended)
        elif state == self._in_block:
            # A block without a call is no syntax of ours.
            yield from self._as_content()
        elif state == self._in_name:
            name = self._name.strip()
            if name in self._tools and not self._tags.name_end:
                yield CallBegin(name)
                yield CallEnd(is_complete=False)
            else:
                yield from self._no_call()
        elif state in (self._after_value, self._in_arguments):
            if state == self._after_value:
                yield CallArguments(self._writer.end())
            if is_complete := self._missing <= self._keys:
                yield CallArguments(self._writer.close())
            yield CallEnd(is_complete)
        else:
            yield CallEnd(is_complete=False)

    # States.

    def _outside(self, lexeme: Lexeme) -> Iterator[Event]:
        if lexeme.is_marker and lexeme.text in self._block_ends:
            self._block_end = self._block_ends[lexeme.text]
            self._raw = [lexeme.text]
            self._state = self._in_block
        elif lexeme == (self._tags.call, True):
            # (Some models forget to open the block.)
            self._raw = [lexeme.text]
            self._begin_name()
        elif not self._is_stray(lexeme) and not self._is_other(lexeme):
            yield ContentText(lexeme.text)

    def _is_stray(self, lexeme: Lexeme) -> bool:
        """Whether it is the end of a block that was left before."""
        is_end = lexeme.is_marker and lexeme.text in self._block_ends.values()
        return is_end and self._block_end is not None

    def _is_other(self, lexeme: Lexeme) -> bool:
        """True for a tag without a meaning of its own."""
        return lexeme.is_marker and lexeme.text in self._tags.others

    def _is_word(self, lexeme: Lexeme) -> bool:
        """True if it may be a word between such tags, or the next part of one."""
        self._word = "" if lexeme.is_marker else self._word + lexeme.text
        word = self._word.strip()
        return not lexeme.is_marker and (not word or (bool(self._tags.others) and _is_name(word)))

    def _in_block(self, lexeme: Lexeme) -> Iterator[Event]:
        if lexeme == (self._tags.call, True):
            self._raw.append(lexeme.text)
            self._begin_name()
        elif lexeme.is_marker and lexeme.text == self._block_end:
            if self._raw:  # no call was there
                self._raw.append(lexeme.text)
                yield from self._as_content()
            self._block_end = None
            self._state = self._outside
        elif self._takes_json and not lexeme.is_marker and lexeme.text.lstrip()[:1] in ("{", "["):
            self._json = JsonCalls()
            self._state = self._in_json
            yield from self._in_json(lexeme)
        elif not (self._is_word(lexeme) or self._is_other(lexeme)):
            self._leave_block()
            self._raw.append(lexeme.text)
            yield from self._as_content()
            self._state = self._outside
        elif self._raw:
            self._raw.append(lexeme.text)

    def _begin_name(self) -> None:
        self._name = ""
        self._state = self._in_name

    def _in_name(self, lexeme: Lexeme) -> Iterator[Event]:
        tags = self._tags
        if lexeme.is_marker:
            ends = not tags.name_end and lexeme.text in (tags.key, tags.call_end)
            if lexeme.text == tags.name_end and _is_name(self._name):
                yield from self._begin_call(self._name.strip())
            elif ends and _is_name(self._name):
                yield from self._begin_call(self._name.strip())
                yield from self._in_arguments(lexeme)
            else:
                yield from self._no_call()
                yield from self._outside(lexeme)
            return
        self._name += lexeme.text
        if self._takes_json and self._name.lstrip()[:1] in ("{", "["):
            self._json = JsonCalls()
            self._state = self._in_json
            yield from self._in_json(Lexeme(self._name))
            return
        at = self._name.find(tags.name_end) if tags.name_end else -1
        if at >= 0 and _is_name(self._name[:at]):
            rest = self._name[at + len(tags.name_end) :]
            yield from self._begin_call(self._name[:at].strip())
            if rest:
                yield from self._in_arguments(Lexeme(rest))
        elif at >= 0 or len(self._name) > _LONGEST_NAME + len(tags.name_end):
            yield from self._no_call()

    def _leave_block(self) -> None:
        """A block in which no call was is none: its end will be text."""
        if self._raw and self._raw[0] in self._block_ends:
            self._block_end = None

    def _no_call(self) -> Iterator[Event]:
        """What was read is text."""
        self._leave_block()
        self._raw.append(self._name)
        self._name = ""
        yield from self._as_content()
        self._state = self._outside

    def _as_content(self) -> Iterator[Event]:
        raw, self._raw = "".join(self._raw), []
        if raw:
            yield ContentText(raw)

    def _begin_call(self, name: str) -> Iterator[Event]:
        self._raw = []
        tool = self._tools.get(name)
        self._writer = ArgumentsWriter(
            tool.parameters if tool is not None else None, trims_newlines=self._tags.trims_newlines
        )
        self._missing = set(tool.parameters.get("required") or ()) if tool is not None else set()
        self._keys = set()
        self._state = self._in_arguments
        yield CallBegin(name)

    def _in_arguments(self, lexeme: Lexeme) -> Iterator[Event]:
        """Between a name or a value and the next key. (Other text there has no meaning.)"""
        if not lexeme.is_marker and not self._keys and lexeme.text.lstrip()[:1] == "{":
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
        elif lexeme.is_marker and lexeme.text in (self._tags.call, self._block_end):
            # The call's end is missing.
            yield CallArguments(self._writer.close())
            yield from self._end_call()
            yield from self._state(lexeme)

    def _end_call(self) -> Iterator[Event]:
        self._state = self._in_block if self._block_end is not None else self._outside
        yield CallEnd()

    def _in_key(self, lexeme: Lexeme) -> Iterator[Event]:
        ends = dict(self._tags.key_ends)
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
        found = min(
            ((at, -len(end), end) for end in ends if (at := self._key.find(end)) >= 0), default=None
        )
        if found is not None:
            at, _, end = found
            self._is_string = ends[end]
            self._key, rest = self._key[:at], self._key[at + len(end) :]
            yield from self._begin_value()
            if rest:
                yield from self._in_value(Lexeme(rest))

    def _before_value(self, lexeme: Lexeme) -> Iterator[Event]:
        if lexeme == (self._tags.value, True):
            yield from self._begin_value()

    def _begin_value(self) -> Iterator[Event]:
        self._state = self._in_value
        self._value = JsonValue()
        key = self._key.strip()
        self._keys.add(key)
        yield CallArguments(self._writer.begin(key, is_string=self._is_string))

    def _in_value(self, lexeme: Lexeme) -> Iterator[Event]:
        # (Within a string of an array or an object a tag is text.)
        is_in_json = self._value.in_string and self._value.first in ("[", "{")
        if lexeme == (self._tags.value_end, True) and not is_in_json:
            self._held = [lexeme.text]
            self._state = self._after_value
        else:
            yield from self._add(lexeme.text)

    def _add(self, text: str) -> Iterator[Event]:
        """More of a value."""
        if not self._writer.is_string:
            self._value.take(text)
        if piece := self._writer.add(text):
            yield CallArguments(piece)

    def _after_value(self, lexeme: Lexeme) -> Iterator[Event]:
        """After a tag that ends the value, if what follows is right."""
        tags = self._tags
        follows = (tags.key, tags.call_end, tags.call, self._block_end)
        if not lexeme.is_marker:
            if not lexeme.text.strip():
                self._held.append(lexeme.text)
                return
            begun = ("".join(self._held[1:]) + lexeme.text).lstrip()
            if any(tag is not None and tag.startswith(begun) for tag in follows):
                self._held.append(lexeme.text)  # space, or a tag that the answer's end cut
                return
        if lexeme.is_marker and lexeme.text in follows:
            yield CallArguments(self._writer.end())
            self._state = self._in_arguments
            yield from self._in_arguments(lexeme)
            return
        self._state = self._in_value
        yield from self._add("".join(self._held))
        yield from self._in_value(lexeme)

    def _in_json(self, lexeme: Lexeme) -> Iterator[Event]:
        """The call is a JSON object, or several, in the place of a name and values."""
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
            yield ContentText(lexeme.text[at:])

    def _end_json(self, tag: str) -> Iterator[Event]:
        assert self._json is not None
        out: list[Event] = []
        self._json.finish(out)
        yield from self._of_json(out)
        unread, self._json = self._json.unread(), None
        if self._raw:  # there was no call
            self._raw += [unread, tag]
            yield from self._as_content()

    def _of_json(self, events: Sequence[Event]) -> Iterator[Event]:
        """Events of the JSON's reader. What was read before belongs to a text that is no call."""
        for event in events:
            if isinstance(event, ContentText):
                self._raw.append(event.text)
                yield from self._as_content()
            else:
                self._raw = []
                yield event

    def _in_json_arguments(self, lexeme: Lexeme) -> Iterator[Event]:
        """All arguments are one JSON object, in the place of keys and values."""
        if self._value.has_ended:
            if lexeme.is_marker and lexeme.text in (self._tags.call_end, self._block_end):
                yield from self._end_call()
                if lexeme.text == self._block_end:
                    yield from self._state(lexeme)
            return
        _, piece = self._value.take(lexeme.text)
        if piece:
            yield CallArguments(piece)


def _is_name(text: str) -> bool:
    """Whether it can be a tool's name: a word."""
    name = text.strip()
    return 0 < len(name) <= len(text) <= _LONGEST_NAME and not re.search(r"[\s<>{}]", name)
