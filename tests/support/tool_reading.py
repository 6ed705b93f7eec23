"""Reads transcripts with a tool format, and walks the grammars that force calls."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jsonschema
import llguidance
import llguidance.numpy
import numpy as np

from mlx_paged.engine.grammar.lark import with_prepared_schemas
from mlx_paged.parsing.answer import Answer, AnswerReader, answer_parser
from mlx_paged.parsing.definitions import Tool
from mlx_paged.parsing.events import CallArguments, Event
from mlx_paged.parsing.format import ToolFormat
from mlx_paged.parsing.lexer import Lexer

EOS = "<|end of answer|>"
_WORDS = ('{"', '": ', '", "', "true", "null", "12", "</", "\n<", 'name="', "Oslo", " the", "é")


class SmallTokenizer:
    """A tokenizer of bytes, some words, and added tokens."""

    def __init__(self, added: Collection[str]) -> None:
        texts = [bytes([byte]) for byte in range(256)] + [word.encode() for word in _WORDS]
        self.added = {text: len(texts) + i for i, text in enumerate([*added, EOS])}
        self.tokens = texts + [text.encode() for text in self.added]
        self.special_token_ids = list(self.added.values())
        self.eos_token_id = self.added[EOS]
        self.bos_token_id = None
        self._pattern = re.compile(
            "|".join(map(re.escape, sorted(self.added, key=len, reverse=True)))
        )

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)

    def encode(self, text: str) -> list[tuple[int, str]]:
        """Each token of a text with the text that it completes, one character per token."""
        tokens: list[tuple[int, str]] = []
        at = 0
        while at < len(text):
            found = self._pattern.match(text, at)
            if found is not None:
                tokens.append((self.added[found[0]], found[0]))
                at = found.end()
            else:
                tokens += [(byte, "") for byte in text[at].encode()]
                tokens[-1] = (tokens[-1][0], text[at])
                at += 1
        return tokens

    def updates(self, ids: Iterable[int]) -> Iterator[tuple[int, str]]:
        """The same for token ids."""
        held = b""
        for token in ids:
            held += self.tokens[token]
            try:
                text = held.decode()
            except UnicodeDecodeError:
                yield token, ""
                continue
            held = b""
            yield token, text


def grouped(updates: Sequence[tuple[int, str]], cuts: Collection[int]) -> Iterator[tuple[int, str]]:
    """The same updates, but text arrives only with the tokens at some indices, and the last."""
    held = ""
    for i, (token, text) in enumerate(updates):
        held += text
        if i in cuts or i == len(updates) - 1:
            yield token, held
            held = ""
        else:
            yield token, ""


def reader(
    format: ToolFormat, tools: Sequence[Tool], vocabulary: Mapping[str, int]
) -> AnswerReader:
    """A reader of one answer without a reasoning format."""
    parser = answer_parser(format, None, tools, begins_inside=False)
    return AnswerReader(Lexer(format.markers, vocabulary), parser, tools)


def read(
    format: ToolFormat,
    tools: Sequence[Tool],
    vocabulary: Mapping[str, int],
    updates: Iterable[tuple[int, str]],
) -> tuple[Answer, list[Event]]:
    """The contents of an answer, and the events that delivered it."""
    answer_reader = reader(format, tools, vocabulary)
    events: list[Event] = []
    for token, text in updates:
        events += answer_reader.feed(token, text)
    events += answer_reader.finish()
    return answer_reader.answer, events


def summary(answer: Answer) -> dict[str, Any]:
    """An answer without generated ids."""
    calls = [
        (
            call.name,
            call.arguments,
            call.is_complete,
            None if call.id.startswith("call_") else call.id,
        )
        for call in answer.calls
    ]
    return {"reasoning": answer.reasoning, "content": answer.content, "calls": calls}


def pieces(events: Iterable[Event]) -> list[str]:
    """The pieces in which arguments arrived."""
    return [event.text for event in events if isinstance(event, CallArguments)]


class Walker:
    """Walks randomly through grammars: every token is one that the grammar allows."""

    def __init__(self, added: Collection[str]) -> None:
        self.tokenizer = SmallTokenizer(added)
        self._llguidance = llguidance.LLTokenizer(llguidance.TokenizerWrapper(self.tokenizer))
        self._matchers: dict[str, llguidance.LLMatcher] = {}

    def matcher(self, lark: str) -> llguidance.LLMatcher:
        """The state before the first token of an answer."""
        if lark not in self._matchers:  # compiling takes longer than a walk
            # Prepared like in the engine.
            prepared, _, _ = with_prepared_schemas(lark, strict=False, field="grammar")
            matcher = llguidance.LLMatcher(
                self._llguidance, llguidance.LLMatcher.grammar_from_lark(prepared)
            )
            assert not matcher.is_error(), f"{matcher.get_error()}\n{prepared}"
            self._matchers[lark] = matcher
        return self._matchers[lark].deep_copy()

    def accepts(self, lark: str, text: str) -> bool:
        """True if a whole answer matches the grammar."""
        ids = [token for token, _ in self.tokenizer.encode(text)]
        matcher = self.matcher(lark)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    def walk(
        self, lark: str, seed: int, prefix: str = "", markers: Sequence[str] = (), steps: int = 250
    ) -> list[int] | None:
        """Returns the tokens of a random answer; None if it did not end.

        Args:
            prefix: Start of the answer.
            markers: Texts that it continues with more often than by chance, if allowed.
        """
        rng = random.Random(seed)
        matcher = self.matcher(lark)
        mask = llguidance.numpy.allocate_token_bitmask(1, len(self.tokenizer.tokens))
        eos = self.tokenizer.eos_token_id
        # Otherwise the end of a string, object or answer would be left to chance.
        endings = [[token for token, _ in self.tokenizer.encode(text)] for text in markers]
        endings += [[ord("\n"), *ending] for ending in endings]
        endings += [[ord(c)] for c in "\"}])'"]
        ids = [token for token, _ in self.tokenizer.encode(prefix)]
        assert matcher.consume_tokens(ids), matcher.get_error()
        for step in range(steps):
            if rng.random() < (0.2 if step < 40 else 0.9):
                if matcher.is_accepting() and (step > 40 or rng.random() < 0.3):
                    return ids
                for ending in rng.sample(endings, len(endings)):
                    consumed = matcher.try_consume_tokens(ending)
                    if consumed == len(ending):
                        ids += ending
                        break
                    matcher.rollback(consumed)
            if not matcher.is_stopped():
                llguidance.numpy.fill_next_token_bitmask(matcher, mask)
                bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
                allowed = np.flatnonzero(bits[: len(self.tokenizer.tokens)]).tolist()
                assert allowed, b"".join(self.tokenizer.tokens[i] for i in ids)
                token = rng.choice(allowed)
                if token == eos:
                    return ids
                assert matcher.consume_token(token), matcher.get_error()
                ids.append(token)
            assert not matcher.is_error(), matcher.get_error()
            if matcher.is_stopped():
                return ids
        return None


def check(call_arguments: str, tool: Tool) -> None:
    """Raises if arguments are not valid JSON for a tool."""
    value = json.loads(call_arguments)
    jsonschema.Draft202012Validator(dict(tool.parameters)).validate(value)
