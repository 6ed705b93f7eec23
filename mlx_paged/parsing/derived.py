"""Formats for models of no listed family, derived from their chat template."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from mlx_paged.parsing.bare_json import BareCallsParser
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
from mlx_paged.parsing.definitions import Tool
from mlx_paged.parsing.derived_syntax import NotDerived, derive_syntax
from mlx_paged.parsing.escaped_json import escaped_arguments, left_out
from mlx_paged.parsing.format import Parser, ToolFormat, lark_arguments
from mlx_paged.parsing.frames import FramedParser
from mlx_paged.parsing.headed_json import Head, HeadedCalls
from mlx_paged.parsing.json_blocks import CallBlockParser
from mlx_paged.parsing.json_calls import CallsReader, JsonCall, JsonCalls
from mlx_paged.parsing.lark import MORE_CALLS, Lark
from mlx_paged.parsing.parameter_calls import ParameterCalls, ParameterTexts
from mlx_paged.parsing.parameter_format import ParameterFormat
from mlx_paged.parsing.parameters import parameter_lists
from mlx_paged.parsing.python_calls import PythonCalls
from mlx_paged.parsing.pythonic import python_call
from mlx_paged.parsing.schemas import Schema, types_of
from mlx_paged.parsing.sections import SectionParser
from mlx_paged.parsing.tagged_parser import TaggedParser
from mlx_paged.parsing.tags import Tags
from mlx_paged.templates.probe import TemplateProbe, is_marker
from mlx_paged.templates.variables import knows_tools

logger = logging.getLogger(__name__)

_TAG = re.compile(r"<[^<>\s]+>|\[/?\w+\]|[⟦⟨【〈《«◁⦅]/?\w+[⟧⟩】〉》»▷⦆]")
_ID = "/[A-Za-z0-9_-]{1,64}/"
_NUMBER = "/[0-9]{1,12}/"


@dataclass(frozen=True)
class Layout:
    """The markers of a syntax, and the texts next to them.

    Attributes:
        section, call: Beginning of a section, and of a call; "" if there is none.
        section_rest, call_rest: Text after them.
        ends: Markers that may follow a call.
    """

    section: str
    section_rest: str
    call: str
    call_rest: str
    ends: tuple[str, ...]

    @classmethod
    def of(cls, syntax: CallSyntax, vocabulary: Iterable[str]) -> Layout:
        """Returns the layout of a syntax.

        Raises:
            NotDerived: Nothing distinguishes calls from text.
        """
        tokens = sorted((t for t in vocabulary if len(t.strip()) > 1), key=len, reverse=True)
        tag = re.compile("|".join([*map(re.escape, tokens), _TAG.pattern]))
        section, section_rest = _split(syntax.section_start, tag)
        call, call_rest = _split(syntax.call_start, tag)
        ends: list[str] = []
        for text in (syntax.call_end, syntax.section_end):
            tags = tag.findall(text)
            ends += tags or ([text.strip()] if is_marker(text.strip()) else [])
        is_bare = not section and not call
        is_list = (syntax.section_start + syntax.call_start).strip() in ("", "[")
        if is_bare and (not is_list or syntax.kind in ("named", "tagged")):
            raise NotDerived("nothing that it renders before a call tells it from text")
        return cls(section, section_rest, call, call_rest, tuple(dict.fromkeys(ends)))

    @classmethod
    def of_tags(cls, tags: Tags) -> Layout:
        """Returns the layout of a syntax of tags, all of which are markers."""
        begin, _ = tags.blocks[0] if tags.blocks else ("", "")
        ends = [mark for mark in tags.markers if mark not in (begin, tags.call)]
        return cls(begin, "", tags.call, "", tuple(ends))

    @property
    def begins(self) -> tuple[str, ...]:
        """The markers that begin calls."""
        return tuple(dict.fromkeys(mark for mark in (self.section, self.call) if mark))


def _split(text: str, tag: re.Pattern[str]) -> tuple[str, str]:
    """The marker that a text begins with, and the rest."""
    text = text.lstrip()
    found = tag.match(text)
    marker = found[0] if found is not None else text.rstrip(" \t\n[{\"'(")
    if not is_marker(marker):
        return "", text
    return marker, text[len(marker) :]


class DerivedFormat(ToolFormat):
    """A format by its syntax. `derived_format` makes the class of one."""

    names = ()
    models = "any, by its chat template"
    syntax: ClassVar[CallSyntax]
    layout: ClassVar[Layout]

    def __str__(self) -> str:
        """Returns an example of a call, for logs and for the server's details of a model."""
        syntax = self.syntax
        inner = "".join(f"{{{p.value}}}" if isinstance(p, Hole) else p for p in syntax.pieces)
        if syntax.parameters is not None:
            of = syntax.parameters
            inner = f"{of.head}{of.key}{KEY}{of.before_value['string']}{{value}}{of.value_end}"
            inner = inner.replace(NAME, "{name}").replace(ID, "{id}").replace(KEY, "{key}")
            return repr(f"{syntax.section_start}{syntax.call_start}{inner}{of.tail}") + self._limit
        elif syntax.kind == "python":
            inner = "{name}({key}={value})"
        before, after = syntax.section_start + syntax.call_start, syntax.call_end
        return repr(before + inner + after + syntax.section_end) + self._limit

    @property
    def _limit(self) -> str:
        return "" if self.syntax.has_parallel else ", one call at a time"

    def grammar(self, tools: Sequence[Tool], *, required: bool, parallel: bool) -> str:
        lark, syntax, layout = Lark(self.vocabulary), self.syntax, self.layout
        parallel = parallel and syntax.has_parallel
        call = lark.rule(" | ".join(self._call(lark, tool) for tool in tools))
        # Literals around the call, up to its first marker and from it on.
        end = _literal(lark, syntax.call_end if syntax.kind != "tagged" else "")
        if not layout.begins:
            before = _literal(lark, syntax.section_start + syntax.call_start)
            more = f"({_literal(lark, syntax.separator)} {call}){MORE_CALLS}" if parallel else ""
            after = _literal(lark, syntax.section_end)
            calls = lark.rule(f"{before} {call} {end} {more} {after}")
            return lark.bare_answer(calls, r"{\[", required=required)
        is_shared = bool(syntax.section_start.strip())
        start = syntax.call_start
        if is_shared:
            one = f"{_literal(lark, start)} {call} {end}"
            more = f"({_literal(lark, syntax.separator)} {one}){MORE_CALLS}" if parallel else ""
            whole = f"{one} {more} {_literal(lark, syntax.section_end)}"
            start = syntax.section_start
        else:
            whole = f"{call} {end}"
        marker, rest = layout.begins[0], start.lstrip()
        rest = rest[len(marker) :]
        body = lark.rule(f"{_literal(lark, rest)} {whole}")
        around_text = [*syntax.text_begins, *syntax.text_ends]
        if not required and any(map(lark.has_token, around_text)):
            return self._with_text_marks(lark, f"{lark.literal(marker)} {body}", parallel)
        return lark.answer(
            marker,
            body,
            required=required,
            parallel=parallel and not is_shared,
            between=syntax.separator,
            others=layout.begins,
        )

    def framed(self, parser: Parser) -> Parser:
        """A parser that leaves out the markers around text as well."""
        begin, end = self.syntax.text_begins, self.syntax.text_ends
        return FramedParser(parser, begin=begin, end=end) if begin or end else parser

    def _with_text_marks(self, lark: Lark, call: str, parallel: bool) -> str:
        """An answer whose text is between tokens, which a rule must name."""
        marks = [lark.literal(m) for m in (*self.syntax.text_begins, *self.syntax.text_ends)]
        text = lark.terminal(lark.without(self.layout.begins))
        texts = lark.rule(" | ".join([text, *marks]))
        is_repeated = parallel and not self.syntax.section_start.strip()
        lark.rule(f"({texts}* {call}){'*' if is_repeated else '?'} {texts}*", "start")
        return lark.text()

    def _call(self, lark: Lark, tool: Tool) -> str:
        """A call without the texts around each."""
        parts = []
        for piece in self.syntax.pieces:
            if piece is Hole.ARGUMENTS:
                parts.append(self._arguments(lark, tool))
            elif piece is Hole.ID:
                parts.append(lark.terminal(_ID))
            elif piece is Hole.INDEX:
                parts.append(lark.terminal(_NUMBER))
            else:
                parts.append(_literal(lark, tool.name if piece is Hole.NAME else str(piece)))
        return " ".join(parts)

    def _arguments(self, lark: Lark, tool: Tool) -> str:
        if self.syntax.are_text:
            return f'"\\"" {escaped_arguments(lark, tool, self.syntax.separators)} "\\""'
        return lark.rule(lark_arguments(tool, self.syntax.separators))

    def unenforced(self, tool: Tool) -> Iterable[tuple[str, object]]:
        return left_out(tool.parameters, tool.field) if self.syntax.are_text else ()


class _JsonFormat(DerivedFormat):
    """Calls that are objects of JSON."""

    def parser(self, tools: Sequence[Tool]) -> Parser:
        assert self.syntax.keys is not None
        kind, layout = _call_kind(self.syntax.keys), self.layout
        known = {tool.name for tool in tools}
        if not layout.begins:
            return BareCallsParser(
                lambda: JsonCalls(known, is_bare=True, kind=kind), "{[", (), layout.ends
            )
        one = bool(layout.call) and not layout.ends
        return _sections(self, lambda: JsonCalls(known, one=one, kind=kind))


def _call_kind(keys: JsonKeys) -> type[JsonCall]:
    class Call(JsonCall):
        NAMES = (keys.name,)
        ARGUMENTS = (keys.arguments,)
        IDS = () if keys.id is None else (keys.id,)
        OTHERS = (*JsonCall.OTHERS, *IDS, *keys.outer)
        OUTER = keys.outer

    return Call


class _NamedFormat(DerivedFormat):
    """Calls whose name is outside of the JSON."""

    def parser(self, tools: Sequence[Tool]) -> Parser:
        syntax, layout = self.syntax, self.layout
        at = syntax.pieces.index(Hole.ARGUMENTS)
        lead = "" if layout.call else layout.section_rest
        head = Head([layout.call_rest, *syntax.pieces[:at]], lead)
        # A tag after the call is a marker of its own.
        end = re.split("|".join(map(re.escape, layout.ends)) or r"\Z", syntax.call_end)[0]
        tail: list[Piece] = [*syntax.pieces[at + 1 :], end]
        names = {tool.name for tool in tools}
        marks, separator = (*layout.begins, *layout.ends), syntax.separator
        return _sections(self, lambda: HeadedCalls(head, tail, names, separator, marks))


class _PythonFormat(ParameterFormat, DerivedFormat):
    """Calls as Python writes them."""

    @property
    def _is_list(self) -> bool:
        return (self.syntax.section_start + self.syntax.call_start).rstrip().endswith("[")

    def parser(self, tools: Sequence[Tool]) -> Parser:
        if not self.layout.begins:
            return BareCallsParser(lambda: PythonCalls(tools), "[", (), self.layout.ends)
        if self._is_list:
            return _sections(self, lambda: PythonCalls(tools))
        return _sections(self, lambda: PythonCalls(tools, in_list=False))

    def _call(self, lark: Lark, tool: Tool) -> str:
        return python_call(lark, tool, has_json_words=self.syntax.has_json_words)


class _TaggedFormat(ParameterFormat, DerivedFormat):
    """Calls with separate parameters."""

    def parser(self, tools: Sequence[Tool]) -> Parser:
        parts, layout = self._parts, self.layout
        if _has_fixed_tags(self.syntax):
            inner = TaggedParser(_tags(self.syntax), tools)
            between = (self.syntax.separator,)
            return self.framed(SectionParser(inner, between=between, begins=layout.begins))
        texts = ParameterTexts.of(
            parts, "" if layout.call else layout.section_rest, layout.call_rest
        )
        return _sections(self, lambda: ParameterCalls(texts, tools, self.syntax.separator))

    @property
    def _parts(self) -> Parameters:
        assert self.syntax.parameters is not None
        return self.syntax.parameters

    def _call(self, lark: Lark, tool: Tool) -> str:
        parts = self._parts
        alternatives = []
        for parameters, root in parameter_lists(tool.parameters):
            rules = [
                (self._parameter(lark, tool, name, schema, root), is_required)
                for name, schema, is_required in parameters
            ]
            if rules:
                alternatives.append(self._parameters(lark, tool, rules))
            if not any(is_required for _, is_required in rules):
                alternatives.append(_filled(lark, parts.empty, tool))
        return lark.rule(" | ".join(dict.fromkeys(alternatives)))

    def _parameter(self, lark: Lark, tool: Tool, name: str, schema: Schema, root: Schema) -> str:
        """A parameter: its key, its value and its end."""
        parts = self._parts
        end = parts.value_end.replace(KEY, name)
        types = types_of(schema, tool.parameters)
        by_text: dict[str, list[str]] = {}
        for type_name in sorted(types):
            by_text.setdefault(parts.before_value[type_name], []).append(type_name)
        values = []
        for before, of_text in by_text.items():
            narrowed: Schema = schema
            if len(by_text) > 1:
                narrowed = {"allOf": [schema, {"type": of_text}]}
            if parts.are_json:
                value = f"{lark.json(narrowed, root, strict=tool.strict)} {_literal(lark, end)}"
            else:
                value = lark.value(narrowed, root, end, strict=tool.strict)
            values.append(f"{_literal(lark, parts.key + name + before)} {value}")
        return lark.rule(" | ".join(values))

    def _parameters(self, lark: Lark, tool: Tool, rules: Sequence[tuple[str, bool]]) -> str:
        """Returns the parameters of a call in order, of which optional ones may be missing."""
        parts = self._parts
        head, tail = _filled(lark, parts.head, tool), _filled(lark, parts.tail, tool)
        between = _literal(lark, parts.between)
        first = []
        for i, (rule, is_required) in enumerate(rules):
            rest = [f"({between} {r}){'' if needed else '?'}" for r, needed in rules[i + 1 :]]
            first.append(" ".join([rule, *rest]))
            if is_required:
                break
        return f"{head} {lark.rule(' | '.join(first))} {tail}"


def _filled(lark: Lark, text: str, tool: Tool) -> str:
    """A text with holes, for a tool."""
    parts = re.split(f"({ID})", text.replace(NAME, tool.name))
    return " ".join(lark.terminal(_ID) if p == ID else _literal(lark, p) for p in parts if p)


_KINDS: Mapping[str, type[DerivedFormat]] = {
    "json": _JsonFormat,
    "named": _NamedFormat,
    "tagged": _TaggedFormat,
    "python": _PythonFormat,
}


def derived_format(chat_template: str, vocabulary: Mapping[str, int]) -> ToolFormat:
    """The format of a model's calls, derived from its chat template.

    Raises:
        NotDerived: The template does not show it.
    """
    try:
        syntax = derive_syntax(TemplateProbe(chat_template, vocabulary))
        return format_of_syntax(syntax, vocabulary, chat_template)
    except (ArithmeticError, LookupError, RecursionError, ValueError, re.error) as error:
        # A template may render anything. A server without tools is better than none.
        logger.exception("deriving the syntax of tool calls failed")
        raise NotDerived(f"it renders what is not understood ({error})") from error


def format_of_syntax(
    syntax: CallSyntax, vocabulary: Mapping[str, int], chat_template: str = ""
) -> ToolFormat:
    """The format of a syntax.

    Raises:
        NotDerived: Nothing would distinguish calls from text.
    """
    base = _KINDS[syntax.kind]
    if _has_fixed_tags(syntax):
        return _format(_TaggedFormat, syntax, Layout.of_tags(_tags(syntax)))(
            vocabulary, chat_template
        )
    layout = Layout.of(syntax, vocabulary)
    if syntax.parameters is not None:  # (its reader takes the call's end for text)
        end = syntax.section_end.strip()
        layout = replace(layout, ends=(end,) if is_marker(end) else ())
    beside = layout.section_rest + layout.call_rest
    if syntax.kind == "json" and (syntax.pieces[0] is Hole.INDEX or beside.strip(" \t\r\n[")):
        base = _NamedFormat  # Something other than a marker precedes the object.
    texts = [syntax.section_start, syntax.call_start, syntax.call_end, syntax.section_end]
    texts += [piece for piece in syntax.pieces if isinstance(piece, str)]
    if syntax.parameters is not None:
        parts = syntax.parameters
        texts += [parts.head, parts.key, *parts.before_value.values(), parts.value_end, parts.tail]
    # The lexer would omit special tokens that are not markers.
    inside = [t for t in vocabulary if len(t.strip()) > 1 and any(t in x for x in texts)]
    return _format(base, syntax, layout, inside)(vocabulary, chat_template)


def _format(
    base: type[DerivedFormat], syntax: CallSyntax, layout: Layout, more: Iterable[str] = ()
) -> type[ToolFormat]:
    """The class of a format."""
    found = [*layout.begins, *layout.ends, *syntax.text_begins, *syntax.text_ends, *more]

    class Format(base):  # type: ignore[valid-type, misc]
        markers = tuple(dict.fromkeys(found))
        begins_call = layout.begins
        frames_text = bool(syntax.text_begins or syntax.text_ends)

    Format.syntax, Format.layout = syntax, layout
    return Format


def _has_fixed_tags(syntax: CallSyntax) -> bool:
    """Returns True if calls are parameters in tags that are the same in every call."""
    parts = syntax.parameters
    if parts is None or not parts.are_fixed:
        return False
    return is_marker(syntax.call_start.strip()) and is_marker(parts.tail.strip())


def _tags(syntax: CallSyntax) -> Tags:
    """The tags for the parser, without the space between them."""
    parts = syntax.parameters
    assert parts is not None
    call, call_end = syntax.call_start.strip(), parts.tail.strip()
    blocks: tuple[tuple[str, str], ...] = ()
    if syntax.section_start.strip():
        blocks = ((syntax.section_start.strip(), syntax.section_end.strip()),)
    # A call may have its own block around the tag with its name.
    outer = re.match(r"(<[^<>\s]+>)\s*(?=<)", call)
    closing = re.search(r"(?<=>)\s*(</?[^<>\s]+>)$", call_end)
    if not blocks and outer is not None and closing is not None:
        blocks = ((outer[1], closing[1]),)
        call, call_end = call[outer.end() :], call_end[: closing.start()].strip()
    of_string = parts.before_value["string"]
    # One newline, after the key's end or before the value's end, is part of these texts. If both
    # have one, newlines are trimmed instead.
    trims = of_string.strip() != "" and of_string.endswith("\n") and parts.value_end[0] == "\n"
    kinds: dict[str, bool | None] = {}
    for type_name, text in parts.before_value.items():
        text = text.strip() or text
        is_string = type_name == "string"
        kinds[text] = is_string if kinds.get(text, is_string) == is_string else None
    key_ends, value = tuple(kinds.items()), ""
    split = re.fullmatch(r"(</[^<>\s]+>)\s*(<[^<>\s]+>)", of_string)
    if split is not None and len(key_ends) == 1:
        key_ends, value = ((split[1], None),), split[2]
    return Tags(
        call=call,
        name_end=parts.head.removeprefix(NAME).strip(),
        call_end=call_end,
        key=parts.key.strip(),
        key_ends=key_ends,
        value=value,
        value_end=parts.value_end.strip() if trims else parts.value_end.rstrip(),
        blocks=blocks,
        has_shared_block=bool(syntax.section_start.strip()),
        trims_newlines=trims,
    )


def _literal(lark: Lark, text: str) -> str:
    return lark.literal(text) if text else ""


def _sections(format: DerivedFormat, reader: Callable[[], CallsReader]) -> Parser:
    """A parser of blocks of calls, in sections or without them."""
    layout, syntax = format.layout, format.syntax
    inner = CallBlockParser((layout.call or layout.section,), layout.ends, reader)
    section = layout.section if layout.call else ""
    end = next(
        (
            mark
            for mark in reversed(layout.ends)
            if syntax.section_end.strip().endswith(mark) and mark not in syntax.call_end
        ),
        "",
    )
    between = (syntax.separator, syntax.section_end.strip().removesuffix(end))
    return format.framed(
        SectionParser(
            inner,
            section,
            end,
            lead=layout.section_rest,
            between=between if layout.call else (),
            begins=layout.begins,
            ends=layout.ends,
        )
    )


def why_not_derived(chat_template: str, vocabulary: Mapping[str, int]) -> str:
    """Returns why no format can be derived, as a part of a sentence; "" if one can."""
    try:
        derived_format(chat_template, vocabulary)
    except NotDerived as reason:
        return f"{reason}"
    return ""


def derived_or_none(chat_template: str, vocabulary: Mapping[str, int]) -> ToolFormat | None:
    """The derived format of a template that takes tools; None, and a warning, without one."""
    if not knows_tools(chat_template):
        return None
    try:
        found = derived_format(chat_template, vocabulary)
    except NotDerived as reason:
        logger.warning(
            "no listed format of tool calls fits the chat template, and none can be derived: %s; "
            "requests with tools are refused (see --tool-call-parser, --tool-template)",
            reason,
        )
        return None
    logger.info("tool calls: no listed format fits; derived from the chat template: %s", found)
    return found
