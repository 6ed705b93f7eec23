"""ToolFormat: the parser of a family's tool calls, and a grammar that forces them."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from mlx_paged.parsing.definitions import Tool
from mlx_paged.parsing.events import ContentText, Event
from mlx_paged.parsing.lexer import Lexeme


class Parser(Protocol):
    """Turns lexemes into events. One parser reads one answer.

    One that tells reasoning from the rest has an attribute `in_reasoning` as well: whether what was
    read last is reasoning, None while that is not known.
    """

    def feed(self, lexeme: Lexeme) -> Iterable[Event]:
        """Takes the next lexeme. A marker that means nothing where it stands is text."""

    def finish(self) -> Iterable[Event]:
        """The answer has ended: what is held comes out, and an open call ends."""

    def passes(self, text: str) -> bool:
        """True if a text without markers is the answer's text as it is, and changes nothing here.

        (Most tokens do, and need not be fed.)
        """


class PlainText:
    """The parser of a model without a syntax of calls, or of a request without tools."""

    def feed(self, lexeme: Lexeme) -> Iterable[Event]:
        return (ContentText(lexeme.text),)

    def finish(self) -> Iterable[Event]:
        return ()

    def passes(self, text: str) -> bool:
        return True


class ToolFormat(ABC):
    """How the models of a family write tool calls.

    Args:
        vocabulary: the tokenizer's added tokens, by text. (A marker may be one, or several
            ordinary tokens.)
        chat_template: the model's, where a family has several ways to render calls.

    Attributes:
        names: vLLM's names of the format, for ``--tool-call-parser``.
        models: Whose it is, for the documentation.
        markers: Texts that mean something to its parser, for the `Lexer`.
        begins_call: Those of them with which a call begins, also within a reasoning that the model
            forgot to end.
        begins_text: Those that end a reasoning, too: a text begins with them.
        reads_everything: Whether its parser tells reasoning, text and calls apart by itself, with
            tools or without (channels).
        frames_text: Whether text stands between markers as well, so that its parser reads answers
            without tools too. (It does wherever it reads everything.)
    """

    names: ClassVar[tuple[str, ...]]
    models: ClassVar[str] = ""
    markers: ClassVar[tuple[str, ...]] = ()
    begins_call: ClassVar[tuple[str, ...]] = ()
    begins_text: ClassVar[tuple[str, ...]] = ()
    reads_everything: ClassVar[bool] = False
    frames_text: ClassVar[bool] = False

    def __init__(self, vocabulary: Mapping[str, int], chat_template: str = "") -> None:
        self.vocabulary = vocabulary
        self.chat_template = chat_template

    @classmethod
    def matches(cls, chat_template: str, vocabulary: Mapping[str, int]) -> bool:
        """True if a model's chat template and added tokens show that it writes this format."""
        return False

    def reads(self, tools: Sequence[Tool]) -> bool:
        """True if its parser must read an answer that may call `tools`."""
        return bool(tools) or self.reads_everything or self.frames_text

    @abstractmethod
    def parser(self, tools: Sequence[Tool]) -> Parser:
        """A parser for one answer.

        Args:
            tools: those of the request; where the syntax has no types, the types of arguments
                come from them.
        """

    @abstractmethod
    def forced(self, tools: Sequence[Tool], *, required: bool, parallel: bool) -> str:
        """A grammar, in llguidance's Lark, of an answer in which every call is valid.

        Args:
            tools: those that may be called; at least one.
            required: the answer is calls only; otherwise text in which calls may begin, and a
                call must be valid from its first marker on.
            parallel: whether there may be more than one call.
        """

    def counts(self, parameters: Mapping[str, Any]) -> Mapping[str, int]:
        """Limits of the number of parameters that `forced` enforces by itself, by keyword."""
        return {}

    def unenforced(self, tool: Tool) -> Iterable[tuple[str, object]]:
        """Parts of a schema that `forced` leaves out, beyond `prepare_schema`: paths of keywords,
        and their values.

        Raises:
            InvalidParameterError: the schema cannot be used at all.
        """
        return ()

    def literal(self, text: str) -> str:
        """A text in Lark, where the added tokens in it are tokens."""
        return lark_literal(text, self.vocabulary)


def lark_literal(text: str, vocabulary: Mapping[str, int]) -> str:
    """A text as a sequence of Lark's strings and, for the added tokens in it, ``<[id]>``.

    llguidance takes every added token for special: a string never matches one.
    """
    tokens = sorted((t for t in vocabulary if t and t in text), key=len, reverse=True)
    if not tokens:
        return json.dumps(text)
    parts = re.split("(" + "|".join(map(re.escape, tokens)) + ")", text)
    found = (f"<[{vocabulary[p]}]>" if p in vocabulary else json.dumps(p) for p in parts if p)
    return " ".join(found)


def lark_escape(text: str) -> str:
    """A text for a regular expression between Lark's slashes."""
    return re.sub(r"[^A-Za-z0-9_\s<>=:;,'\"\x80-\U0010ffff-]", r"\\\g<0>", text).replace(
        "\n", "\\n"
    )


def lark_json(
    schema: Mapping[str, Any] | bool,
    *,
    strict: bool = False,
    separators: tuple[str, str] | None = (", ", ": "),
) -> str:
    """A JSON value that is valid for a schema, in Lark.

    It is written as chat templates render the calls of history (Python's ``json.dumps``): with one
    space after commas and colons, so it cannot go on with space for ever.

    Args:
        strict: refuse what the grammar cannot enforce, when it is compiled. Otherwise unsupported
            keywords are left out.
        separators: of items and of keys; None: any space.
    """
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    options: dict[str, Any] = {"whitespace_flexible": separators is None}
    if separators is not None:
        options["item_separator"], options["key_separator"] = separators
    if not strict:
        options["lenient"] = True
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"


def lark_arguments(tool: Tool, separators: tuple[str, str] | None = (", ", ": ")) -> str:
    """The arguments of a tool as a JSON object, in Lark. (See `lark_json`.)"""
    schema = arguments_schema(tool.parameters)
    return lark_json(schema, strict=tool.strict, separators=separators)


def arguments_schema(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A tool's schema, for an object; without parameters that it does not list, if it lists any."""
    schema = {"type": "object", **parameters}
    if "properties" in schema and not schema.keys() & _ADDS_PROPERTIES:
        schema["additionalProperties"] = False
    return schema


_ADDS_PROPERTIES = {
    "$ref",
    "additionalProperties",
    "allOf",
    "anyOf",
    "dependentSchemas",
    "if",
    "minProperties",
    "oneOf",
    "patternProperties",
    "propertyNames",
    "unevaluatedProperties",
}
