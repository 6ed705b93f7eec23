"""ToolFormat: a model family's syntax of tool calls, as a parser and as a grammar."""

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

    A parser that recognizes reasoning also has an attribute `in_reasoning`: True if the last text
    was reasoning, None while that is unknown.
    """

    def feed(self, lexeme: Lexeme) -> Iterable[Event]:
        """Reads the next lexeme. A marker without meaning at its position is text."""

    def finish(self) -> Iterable[Event]:
        """Ends the answer: releases held text, and ends an open call."""

    def passes(self, text: str) -> bool:
        """Returns True if a text without markers is the answer's text and changes no state here.

        Most tokens are of this kind, and need not be fed.
        """


class PlainTextParser:
    """Parser for a model without a syntax of calls, or for a request without tools."""

    def feed(self, lexeme: Lexeme) -> Iterable[Event]:
        return (ContentText(lexeme.text),)

    def finish(self) -> Iterable[Event]:
        return ()

    def passes(self, text: str) -> bool:
        return True


class ToolFormat(ABC):
    """A family's syntax of tool calls.

    Args:
        vocabulary: The tokenizer's added tokens, by text. A marker may be one of these, or several
            ordinary tokens.
        chat_template: The model's template, for families with several ways to render calls.

    Attributes:
        names: vLLM's names of the format, for ``--tool-call-parser``.
        models: Its models, for the documentation.
        markers: Texts that its parser interprets, for the `Lexer`.
        begins_call: Markers that begin a call, even within reasoning that the model forgot to end.
        begins_text: Markers that begin a text, and so also end reasoning.
        reads_everything: True if its parser separates reasoning, text and calls itself, with or
            without tools (channels).
        frames_text: True if text is also between markers, so that its parser reads answers even
            without tools. Always true with `reads_everything`.
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
        """Returns True if its parser must read an answer that may call `tools`."""
        return bool(tools) or self.reads_everything or self.frames_text

    @abstractmethod
    def parser(self, tools: Sequence[Tool]) -> Parser:
        """Returns a parser for one answer.

        Args:
            tools: Tools of the request. If the syntax has no types, they provide those of the
                arguments.
        """

    @abstractmethod
    def grammar(self, tools: Sequence[Tool], *, required: bool, parallel: bool) -> str:
        """Returns a grammar, in llguidance's Lark, of an answer in which every call is valid.

        Args:
            tools: Tools that may be called; at least one.
            required: The answer consists of calls only. Otherwise it is text in which calls may
                begin, and a call must be valid from its first marker on.
            parallel: There may be several calls.
        """

    def counts(self, parameters: Mapping[str, Any]) -> Mapping[str, int]:
        """Returns limits on the number of parameters that `grammar` enforces itself, by keyword."""
        return {}

    def unenforced(self, tool: Tool) -> Iterable[tuple[str, object]]:
        """Returns paths and values of keywords that `grammar` does not enforce, beyond those that
        `prepare_schema` relaxes.

        Raises:
            InvalidParameterError: The schema cannot be used at all.
        """
        return ()

    def literal(self, text: str) -> str:
        """Returns a text in Lark, with its added tokens as tokens."""
        return lark_literal(text, self.vocabulary)


def lark_literal(text: str, vocabulary: Mapping[str, int]) -> str:
    """Returns a text as strings of Lark and, for the added tokens in it, ``<[id]>``.

    llguidance takes every added token for special: a string never matches one.
    """
    tokens = sorted((t for t in vocabulary if t and t in text), key=len, reverse=True)
    if not tokens:
        return json.dumps(text)
    parts = re.split("(" + "|".join(map(re.escape, tokens)) + ")", text)
    found = (f"<[{vocabulary[p]}]>" if p in vocabulary else json.dumps(p) for p in parts if p)
    return " ".join(found)


def lark_escape(text: str) -> str:
    """Escapes a text for a regular expression between Lark's slashes."""
    return re.sub(r"[^A-Za-z0-9_\s<>=:;,'\"\x80-\U0010ffff-]", r"\\\g<0>", text).replace(
        "\n", "\\n"
    )


def lark_json(
    schema: Mapping[str, Any] | bool,
    *,
    strict: bool = False,
    separators: tuple[str, str] | None = (", ", ": "),
) -> str:
    """Returns a JSON value that is valid for a schema, in Lark.

    It is written like chat templates render earlier calls (Python's ``json.dumps``), with one space
    after commas and colons, so it cannot continue with whitespace forever.

    Args:
        strict: Refuse keywords that the grammar cannot enforce, when it is compiled. Otherwise they
            are dropped.
        separators: Item and key separators; None allows any whitespace.
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
    """Returns the arguments of a tool as a JSON object, in Lark. See `lark_json`."""
    schema = arguments_schema(tool.parameters)
    return lark_json(schema, strict=tool.strict, separators=separators)


def arguments_schema(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the schema of a tool's arguments, an object. If it lists parameters, others are not
    allowed, unless it says so."""
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
