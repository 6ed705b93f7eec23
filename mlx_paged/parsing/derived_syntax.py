"""Derives a model's syntax of tool calls from its chat template.

The template renders turns with and without calls of made-up names, ids and arguments. The text
around these is the syntax.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

from mlx_paged.parsing.call_syntax import (
    ID,
    KEY,
    NAME,
    CallSyntax,
    Hole,
    JsonKeys,
    Parameters,
    Piece,
)
from mlx_paged.parsing.derived_reasoning import ReasoningMarkers, reasoning_of
from mlx_paged.templates.probe import (
    CONTENT,
    Message,
    Refused,
    TemplateProbe,
    is_marker,
    prompt_of,
    user_turn,
    written,
)


class NotDerived(Exception):
    """Why no syntax can be derived from a template, as a part of a sentence."""


class _TakesText(NotDerived):
    """The template renders arguments like Python does, so it expects their text."""


@dataclass(frozen=True)
class _Call:
    """A call to be rendered."""

    name: str
    id: str
    arguments: Mapping[str, Any]


# Nine letters and digits, which the strictest templates require.
_FIRST = _Call("probe_first", "qidxone01", {"key_one": "value one", "key_two": "value two"})
_SECOND = _Call("probe_second", "qidxtwo02", {"key_red": "value red", "key_blue": "value blue"})
_MARKUP = _Call("probe_first", "qidxone01", {"key_one": "a<b>&'c", "key_two": "value two"})
_EMPTY = _Call("probe_first", "qidxone01", {})
# Values of all types but strings.
_VALUES: Mapping[str, Any] = {
    "integer": 739,
    "number": 73.25,
    "boolean": True,
    "null": None,
    "array": [73, "inner"],
    "object": {"inner": 73},
}


def _tool(name: str, keys: Sequence[str]) -> dict[str, Any]:
    properties = {key: {"type": "string", "description": "A value."} for key in keys}
    parameters = {"type": "object", "properties": properties, "required": list(keys)}
    function = {"name": name, "description": "A function.", "parameters": parameters}
    return {"type": "function", "function": function}


_TOOLS = [_tool(call.name, list(call.arguments)) for call in (_FIRST, _SECOND)]


class _Writer:
    """Renders calls in one of the forms that templates take."""

    def __init__(
        self,
        probe: TemplateProbe,
        reasoning: ReasoningMarkers | None,
        *,
        are_objects: bool,
        content: str | None,
    ) -> None:
        self._probe = probe
        self._reasoning = reasoning
        self._are_objects = are_objects
        self._content = content
        self._prompt = prompt_of(probe, _TOOLS)
        self._before_text, self._after_text = self._rendered_text()

    def _rendered_text(self) -> tuple[str, str]:
        """Returns the text before and after a plain answer."""
        message = {"role": "assistant", "content": CONTENT}
        try:
            text = self._probe.render([user_turn(), message], _TOOLS)
        except Refused:
            return "", ""
        before, _, after = self._answered(text).rpartition(CONTENT)
        return before, after

    def body(self, *calls: _Call) -> str:
        """Returns the text a model writes to make calls, without the end of its turn.

        Raises:
            Refused: The template does not take them.
        """
        text, end = self._with_end(calls, self._content)
        if len(end.strip()) > 2:  # Some render more turns after it.
            at = text.find(end.strip(), text.rfind(calls[-1].name))
            text = text[:at] if at >= 0 else text
        return text

    def around_text(self, begin: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Returns the markers around the text of answers.

        Args:
            begin: Text before a call's own parts.
        """
        _, end = self._with_end((_FIRST,), self._content)
        begins, ends = [self._before_text], [self._after_text.removesuffix(end)]
        with suppress(Refused):
            before, found, after = self._with_end((_FIRST,), CONTENT)[0].partition(CONTENT)
            between, is_there, _ = after.partition(begin.strip() or _FIRST.name)
            if found and is_there:
                begins.append(before)
                ends.append(between)
        return _marks(begins), _marks(ends)

    def _with_end(self, calls: Sequence[_Call], content: str | None) -> tuple[str, str]:
        """Returns a turn with calls, and the end of such turns."""
        message: Message = {"role": "assistant", "content": content}
        message["tool_calls"] = [self._rendered(call) for call in calls]
        text = self._answered(self._probe.render([user_turn(), message], _TOOLS))
        end = self._probe.common_suffix(text, self._after_text)
        return text.removesuffix(end), end

    def _answered(self, text: str) -> str:
        text = written(self._probe, self._prompt, text)
        if self._reasoning is not None and self._reasoning.end in text:
            text = text.partition(self._reasoning.end)[2]
        return text.lstrip()

    def _rendered(self, call: _Call) -> dict[str, Any]:
        arguments: Any = dict(call.arguments)
        if not self._are_objects:
            arguments = json.dumps(arguments)
        function = {"name": call.name, "arguments": arguments}
        return {"id": call.id, "type": "function", "function": function}


def _marks(texts: Iterable[str]) -> tuple[str, ...]:
    """The texts that are markers."""
    bare = dict.fromkeys(text.strip() for text in texts)
    return tuple(text for text in bare if is_marker(text) and not text[0].isalnum())


def derive_syntax(probe: TemplateProbe) -> CallSyntax:
    """The syntax of calls that a template renders.

    Raises:
        NotDerived: It renders none, or in a way that cannot be read back.
    """
    reasoning = reasoning_of(probe)
    refusals: list[str] = []
    reason = ""
    for content in ("", None):
        for are_objects in (True, False):
            writer = _Writer(probe, reasoning, are_objects=are_objects, content=content)
            try:
                body = writer.body(_FIRST)
            except Refused as refused:
                refusals.append(f"it refuses calls ({refused})")
                continue
            if _FIRST.name not in body:
                continue
            try:
                return _Analysis(probe, writer, body).syntax()
            except _TakesText as error:
                reason = reason or f"{error}"
            except NotDerived as error:
                raise NotDerived(reason or f"{error}") from error
    raise NotDerived(reason or (refusals[0] if len(refusals) == 4 else "it renders no calls"))


@dataclass(frozen=True)
class _Located:
    """A call within a rendered text.

    Attributes:
        kind: See `CallSyntax`.
        span: Its position.
        arguments: Position of its arguments ("json", "named").
        are_text: See `CallSyntax`.
        value: The object ("json").
    """

    kind: Literal["json", "named", "tagged", "python"]
    span: tuple[int, int]
    arguments: tuple[int, int] = (0, 0)
    are_text: bool = False
    value: Any = None


class _Analysis:
    """Takes a rendered call apart."""

    def __init__(self, probe: TemplateProbe, writer: _Writer, body: str) -> None:
        self._probe = probe
        self._writer = writer
        self._body = body

    def syntax(self) -> CallSyntax:
        body = self._body
        found = _locate(body, _FIRST)
        begin, end = found.span
        base = CallSyntax(
            found.kind,
            call_start=body[:begin],
            call_end=body[end:],
            are_text=found.are_text,
        )
        second = None
        with suppress(NotDerived):  # At least the syntax of a single call is known.
            base, second = self._with_sections(base, found)
        if found.kind == "python":
            with suppress(Refused):
                call = replace(_FIRST, arguments={"key_one": True})
                base = replace(base, has_json_words="=true" in self._writer.body(call))
        if found.kind in ("json", "named"):
            base = self._of_json(base, found, second)
        elif found.kind == "tagged":
            base = replace(base, parameters=self._parameters(base))
        begins, ends = self._writer.around_text(base.section_start + base.call_start)
        return replace(base, text_begins=begins, text_ends=ends)

    def _with_sections(
        self, base: CallSyntax, found: _Located
    ) -> tuple[CallSyntax, tuple[str, _Located] | None]:
        """Separates text around all calls from text around each, by comparing two calls."""
        try:
            body = self._writer.body(_FIRST, _SECOND)
        except Refused:
            return base, None
        if _SECOND.name not in body or _FIRST.name not in body:
            return base, None
        first, second = _locate(body, _FIRST), _locate(body, _SECOND)
        if first.kind != found.kind or second.kind != found.kind:
            raise NotDerived("it renders several calls in another way than one")
        before, between = base.call_start, body[first.span[1] : second.span[0]]
        after = base.call_end
        if body[: first.span[0]] != before or not body.endswith(after):
            raise NotDerived("what it renders around several calls differs from that around one")
        start = self._probe.common_suffix(before, between)
        pieces: tuple[Piece, ...] = ()
        counters = [re.search(r"\d+$", t.removesuffix(start)) for t in (before, between)]
        numbers = [found[0] for found in counters if found is not None]
        if len(numbers) == 2 and int(numbers[1]) == int(numbers[0]) + 1:
            # A number before each call counts them.
            pieces = (Hole.INDEX, start)
            before = before.removesuffix(numbers[0] + start)
            between = between.removesuffix(numbers[1] + start)
            start = self._probe.common_suffix(before, between)
        end = self._probe.common_prefix(after, between)
        # Both may claim the text in between; the beginning of a call has priority.
        end = end[: max(0, len(between) - len(start))]
        separator = between[len(end) : len(between) - len(start)]
        section_start = before.removesuffix(start)
        syntax = replace(
            base,
            section_start=section_start,
            call_start=start,
            call_end=end,
            # A marker without a counterpart is no part of the calls: it ends the turn.
            section_end=after[len(end) :] if section_start else "",
            separator=separator,
            pieces=pieces,
            has_parallel=True,
        )
        return syntax, (body, second)

    def _of_json(
        self, base: CallSyntax, found: _Located, second: tuple[str, _Located] | None
    ) -> CallSyntax:
        pieces = _pieces(self._body, found, _FIRST)
        if second is not None:
            pieces = _with_index(pieces, _pieces(*second, _SECOND))
        if pieces.count(Hole.ARGUMENTS) != 1 or Hole.NAME not in pieces:
            raise NotDerived("it renders calls without their names")
        if found.kind == "named" and pieces.index(Hole.NAME) > pieces.index(Hole.ARGUMENTS):
            raise NotDerived("it renders the name of a call after its arguments")
        arguments = self._body[slice(*found.arguments)]
        arguments = json.loads(arguments) if found.are_text else arguments
        keys = None
        if found.kind == "json":
            keys = _keys(found.value)
        pieces = (*base.pieces, *pieces)
        return replace(base, pieces=pieces, separators=_separators(arguments), keys=keys)

    def _parameters(self, base: CallSyntax) -> Parameters:
        parts = re.split("value one|value two", self._holed(base, self._body, _FIRST))
        if len(parts) != 3:
            raise NotDerived("it renders its parameters more than once")
        first, middle, last = parts
        before, _, string = first.partition(KEY)
        again, _, of_second = middle.rpartition(KEY)
        if string != of_second or KEY in string:
            raise NotDerived("it renders its parameters in different ways")
        key = self._probe.common_suffix(before, again)
        value_end = self._probe.common_prefix(last, again)
        value_end = value_end[: max(0, len(again) - len(key))]
        tail, between = last.removeprefix(value_end), again[len(value_end) : len(again) - len(key)]
        if not key.strip() or len(value_end.strip()) < 2:
            raise NotDerived("its parameters have no tags of their own")
        with suppress(Refused):
            markup = str(_MARKUP.arguments["key_one"])
            texts = [markup, json.dumps(markup)[1:-1]]
            if not any(text in self._writer.body(_MARKUP) for text in texts):
                raise NotDerived("it escapes characters of its parameters")
        lead = value_end + between + key + KEY
        quote = string[-1:]
        before_value = {"string": string}
        are_json = False
        for type_name, value in _VALUES.items():
            found = self._before_value(base, value, lead, value_end + tail)
            if found is None and quote in ("'", '"') and value_end.startswith(quote):
                found = self._before_value(base, value, lead, value_end[1:] + tail)
                are_json = are_json or found is not None
            if found is not None:
                before_value[type_name] = found
            elif type_name in ("array", "object") and self._takes(value):
                raise NotDerived("its parameters that are arrays or objects are not JSON")
        if "integer" not in before_value:
            raise NotDerived("its parameters that are numbers are not JSON")
        if are_json:
            value_end, before_value["string"] = value_end[1:], string[:-1]
        head = before.removesuffix(key)
        empty = head + tail
        with suppress(Refused):
            empty = self._holed(base, self._writer.body(_EMPTY), _EMPTY)
        for type_name in _VALUES:
            before_value.setdefault(type_name, before_value["integer"])
        return Parameters(head, key, before_value, value_end, between, tail, empty, are_json)

    def _takes(self, value: Any) -> bool:
        """True if the template takes a parameter's value at all."""
        try:
            return bool(self._writer.body(replace(_FIRST, arguments={"key_one": value})))
        except Refused:
            return False

    def _before_value(self, base: CallSyntax, value: Any, lead: str, end: str) -> str | None:
        """Returns the text between a key and a value; None: the value is not JSON, or elsewhere."""
        call = replace(_FIRST, arguments={"key_one": "value one", "key_two": value})
        try:
            text = self._holed(base, self._writer.body(call), call).partition("value one")[2]
        except Refused:
            return None
        if not (text.startswith(lead) and text.endswith(end)):
            return None
        text = text[len(lead) : len(text) - len(end)]
        texts = (json.dumps(value), json.dumps(value, separators=(",", ":")), str(value))
        return next((text.removesuffix(t) for t in texts if text.endswith(t)), None)

    def _holed(self, base: CallSyntax, body: str, call: _Call) -> str:
        """Returns a call and its end, with holes for names, ids and keys."""
        text = body.removesuffix(base.section_end)[len(base.section_start + base.call_start) :]
        for hole, sentinels in ((NAME, [call.name]), (ID, [call.id]), (KEY, call.arguments)):
            for sentinel in sentinels:
                text = text.replace(sentinel, hole)
        return text


def _locate(body: str, call: _Call) -> _Located:
    """Finds a call and its parts.

    Raises:
        NotDerived: Its syntax is unknown.
    """
    at = body.find(call.name)
    for begin, end, value in _values(body):
        is_text = isinstance(value, str) and _loaded(value) == call.arguments
        if not is_text and value != call.arguments:
            continue
        for outer_begin, outer_end, outer in _values(body):
            holds = outer_begin <= min(at, begin) and outer_end >= end
            if holds and isinstance(outer, dict) and _path(outer, call.name) is not None:
                return _Located("json", (outer_begin, outer_end), (begin, end), is_text, outer)
        places = [begin, end]
        for text in (call.name, call.id):
            places += [p for found in re.finditer(text, body) for p in found.span()]
        return _Located("named", (min(places), max(places)), (begin, end), is_text)
    if _python_literal(body, call):
        raise _TakesText("it renders arguments in Python's notation of dictionaries")
    keys, values = list(call.arguments), [str(value) for value in call.arguments.values()]
    texts = [text for pair in zip(keys, values, strict=True) for text in pair]
    places = [body.find(text, at) for text in texts]
    if -1 in places or places != sorted(places):
        raise NotDerived("it renders calls without their arguments")
    last = places[-1] + len(values[-1])
    opened = body[at + len(call.name) : places[0]]
    if opened.strip() == "(" and body[places[0] :].startswith(f"{keys[0]}="):
        closed = re.compile(r"""["']\s*\)""").match(body, last)
        if closed is None:
            raise NotDerived("it renders calls as functions whose strings have no quotes")
        return _Located("python", (at, closed.end()))
    holes = [(text, m) for text in (call.name, call.id, *keys) for m in re.finditer(text, body)]
    begin = min(m.start() for text, m in holes if text in (call.name, call.id))
    return _Located("tagged", (begin, max([last, *(m.end() for _, m in holes)])))


def _values(text: str) -> Iterator[tuple[int, int, Any]]:
    """Yields every JSON object and string in a text, outer ones first."""
    decoder = json.JSONDecoder()
    for found in re.finditer(r'[{"]', text):
        try:
            value, end = decoder.raw_decode(text, found.start())
        except (ValueError, RecursionError):
            continue
        yield found.start(), end, value


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _python_literal(body: str, call: _Call) -> bool:
    for found in re.finditer(r"\{", body):
        end = body.find("}", found.start())
        try:
            if end > 0 and ast.literal_eval(body[found.start() : end + 1]) == call.arguments:
                return True
        except (ValueError, SyntaxError):
            continue
    return False


def _path(value: Mapping[str, Any], wanted: Any) -> list[str] | None:
    """The keys that lead to a value within objects."""
    for key, inner in value.items():
        if inner == wanted:
            return [key]
        if isinstance(inner, dict) and (rest := _path(inner, wanted)) is not None:
            return [key, *rest]
    return None


def _keys(value: Mapping[str, Any]) -> JsonKeys:
    name = _path(value, _FIRST.name)
    arguments = _path(value, _FIRST.arguments) or _path(value, json.dumps(_FIRST.arguments))
    if arguments is None:  # a string with other space in it
        arguments = next(
            (p for p in map(list, _paths(value)) if _loaded(str(_at(value, p))) is not None), None
        )
    if name is None or arguments is None:
        raise NotDerived("it renders calls as objects without names or arguments")
    call_id = _path(value, _FIRST.id)
    outer = dict.fromkeys([*name[:-1], *arguments[:-1]])
    return JsonKeys(name[-1], arguments[-1], call_id[-1] if call_id else None, tuple(outer))


def _paths(value: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for key, inner in value.items():
        yield (key,)
        if isinstance(inner, dict):
            yield from ((key, *rest) for rest in _paths(inner))


def _at(value: Any, path: Sequence[str]) -> Any:
    for key in path:
        value = value[key]
    return value


def _pieces(body: str, found: _Located, call: _Call) -> tuple[Piece, ...]:
    """A call as texts and holes."""
    (begin, end), arguments = found.span, found.arguments
    pieces: list[Piece] = []
    holes = {call.name: Hole.NAME, call.id: Hole.ID}
    pattern = re.compile("|".join(map(re.escape, holes)))
    for part in (body[begin : arguments[0]], None, body[arguments[1] : end]):
        if part is None:
            pieces.append(Hole.ARGUMENTS)
            continue
        at = 0
        for hole in pattern.finditer(part):
            pieces += [part[at : hole.start()], holes[hole[0]]]
            at = hole.end()
        pieces.append(part[at:])
    return tuple(piece for piece in pieces if piece != "")


def _with_index(first: tuple[Piece, ...], second: tuple[Piece, ...]) -> tuple[Piece, ...]:
    """Returns the common pieces of two calls, with a hole for a number that counts them."""
    pieces: list[Piece] = []
    if len(first) != len(second):
        raise NotDerived("it renders two calls in different ways")
    for a, b in zip(first, second, strict=True):
        if a == b:
            pieces.append(a)
            continue
        if isinstance(a, Hole) or isinstance(b, Hole):
            raise NotDerived("it renders two calls in different ways")
        parts = [re.split(r"(\d+)", text) for text in (a, b)]
        if len(parts[0]) != len(parts[1]):
            raise NotDerived("it renders two calls in different ways")
        for x, y in zip(*parts, strict=True):
            if x == y:
                pieces.append(x)
            elif x.isdecimal() and y.isdecimal() and int(y) == int(x) + 1:
                pieces.append(Hole.INDEX)
            else:
                raise NotDerived("it renders two calls in different ways")
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if isinstance(piece, str) and isinstance(last, str):
            joined[-1] = last + piece
        elif piece != "":
            joined.append(piece)
    return tuple(joined)


def _separators(text: str) -> tuple[str, str] | None:
    for item in (", ", ","):
        for key in (": ", ":"):
            if json.dumps(_FIRST.arguments, separators=(item, key)) == text:
                return item, key
    return None
