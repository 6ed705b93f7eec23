"""Random walks through grammars, and checks of the formats that grammars can enforce."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from jsonschema import Draft202012Validator, FormatChecker

from mlx_paged.engine.grammar.compiler import CompiledGrammar, GrammarCompiler
from mlx_paged.engine.grammar.matcher import GrammarMatcher, GrammarRules, fill_masks

MAX_TOKENS = 200
PREFERRED = ('"', "}", "]", ",", ":", "0", "1", "5", '"}', '"]', '":', "},")


class Formats(FormatChecker):
    """jsonschema's format checks, except for rules that a grammar cannot enforce."""

    def check(self, instance: object, format: str) -> None:
        if not (isinstance(instance, str) and is_beyond(format, instance)):
            Draft202012Validator.FORMAT_CHECKER.check(instance, format)


def is_beyond(name: str, value: str) -> bool:
    """True if a text has details that llguidance's format patterns do not check: February 29 in
    other years, 60 seconds, total length of labels, punycode."""
    if name in ("date", "date-time") and "-02-29" in value:
        return True
    if name in ("time", "date-time") and re.search(r":60(?!\d)", value):
        return True
    return name == "hostname" and (len(value) > 253 or "xn--" in value.lower())


class Walks:
    """Walks randomly through many grammars at once, with masks made like an engine step's."""

    def __init__(self, compiler: GrammarCompiler, seed: int) -> None:
        self._compiler = compiler
        self._rng = np.random.default_rng(seed)
        tokens = [compiler.tokenizer.tokenize_str(text) for text in PREFERRED]
        self._preferred = np.array([found[0] for found in tokens if len(found) == 1])
        self._eos = np.array(sorted(compiler.eos_token_ids))

    def run(self, grammars: Sequence[CompiledGrammar]) -> list[str | None]:
        """Returns the text of an answer for each grammar; None if it was cut off."""
        num_words = self._compiler.num_words
        matchers = [
            GrammarMatcher(
                GrammarRules(g, eos_token_ids=self._compiler.eos_token_ids, num_words=num_words), 0
            )
            for g in grammars
        ]
        answers: list[list[int]] = [[] for _ in grammars]
        texts: list[str | None] = [None] * len(grammars)
        going = list(range(len(grammars)))
        for step in range(MAX_TOKENS):
            words = np.zeros((len(going), num_words), np.int32)
            fill_masks([matchers[i] for i in going], words)
            left = []
            for place, i in enumerate(going):
                assert matchers[i].failed is None, matchers[i].failed
                token = self._choose(words[place], step)
                if token in self._eos:
                    texts[i] = self._text(answers[i])
                    continue
                answers[i].append(token)
                matchers[i].follow(answers[i])
                if matchers[i].is_complete:
                    texts[i] = self._text(answers[i])
                else:
                    left.append(i)
            going = left
            if not going:
                break
        return texts

    def _choose(self, words: np.ndarray, step: int) -> int:
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        assert len(allowed), "no token may follow"
        if step > 60 and (end := np.intersect1d(allowed, self._eos)).size:
            return int(end[0])
        if self._rng.random() < (0.35 if step < 60 else 0.9):
            liked = self._preferred[np.isin(self._preferred, allowed)]
            if len(liked):
                return int(self._rng.choice(liked))
        return int(self._rng.choice(allowed))

    def _text(self, tokens: list[int]) -> str:
        return self._compiler.tokenizer.decode_bytes(tokens).decode()
