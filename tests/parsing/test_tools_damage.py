"""Damaged answers of every format: what a client gets is sound, and no word is lost."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
from support.tool_families import TOOLS, Family, families
from support.tool_reading import SmallTokenizer, grouped, summary

from mlx_paged.parsing import mistral
from mlx_paged.parsing.answer import Answer, AnswerReader, answer_parser
from mlx_paged.parsing.format import ToolFormat
from mlx_paged.parsing.lexer import Lexer
from mlx_paged.parsing.reasoning import REASONING_FORMATS, ReasoningFormat
from mlx_paged.parsing.registry import FORMATS, format_of

#: Answers of each format and each kind of damage.
COUNT = 4
DAMAGES = (
    *("none", "deleted", "doubled", "cut", "without ends", "text between", "unknown tool"),
    "mistyped",
)

# How families that tell everything apart by themselves write reasoning.
CHANNELS = {
    "openai": "<|channel|>analysis<|message|>{}<|end|><|start|>assistant",
    "solar_open": "<|think|>{}<|end|><|begin|>assistant",
    "inkling": "<|content_thinking|>{}<|end_message|><|message_model|>",
    "muse_glimmer": " to=self<|message|>{}<|eom|><|start|>assistant",
}
NAMES = {tool.name for tool in TOOLS}
WORD = re.compile(r"(?<!\w)zq[a-z]{2}(?!\w)")


@pytest.fixture(autouse=True)
def same_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mistral, "new_call_id", lambda *_: "call_1234")


class Words:
    """Words that are never the same."""

    def __init__(self) -> None:
        self._count = 0

    def __call__(self) -> str:
        """Two of them."""
        self._count += 2
        return " ".join(
            f"zq{chr(97 + i // 26)}{chr(97 + i % 26)}" for i in (self._count - 2, self._count - 1)
        )


@dataclass
class Right:
    """An answer as the model should write it.

    Attributes:
        text: All of it.
        calls: Names and arguments of its calls.
    """

    text: str
    calls: list[tuple[str, Any]]


class Formats:
    """A format and the reasoning of its models, with the markers as tokens or without."""

    def __init__(self, family: Family, *, has_tokens: bool) -> None:
        self.family = family
        own = REASONING_FORMATS.get(family.name, REASONING_FORMATS["qwen3"])
        self.reasoning: ReasoningFormat | None = None if family.name in CHANNELS else own
        thinking = [own.start, own.end] if self.reasoning is not None else []
        self.tokenizer = SmallTokenizer((*family.tokens, *thinking) if has_tokens else ())
        self.format: ToolFormat = format_of(family.name, self.tokenizer.added, family.template)
        self.markers = [*self.format.markers, *thinking]
        self.first_letters = {marker[0] for marker in self.markers}
        marks = sorted({*self.markers, *family.tokens}, key=len, reverse=True)
        self.marks = re.compile("|".join(map(re.escape, marks)) or "(?!)")

    def right(self, rng: Random) -> Right:
        """A random answer: reasoning, text, and calls."""
        words, family = Words(), self.family
        text = ""
        if rng.random() < 0.6:
            if self.reasoning is None:
                text = CHANNELS[family.name].format(words())
            else:
                text = f"{self.reasoning.start}{words()}{self.reasoning.end}\n\n"
        makes = (
            lambda: ("get_weather", {"city": words(), "days": rng.randint(1, 9)}),
            lambda: ("write_file", {"path": words(), "text": f"{words()}\n{words()}"}),
            lambda: ("search.web-v2", {"query": words(), "exact": True, "tags": [words()]}),
            lambda: ("now", {}),
        )
        if rng.random() < 0.7:
            text += family.before(f"{words()}\n")
        most = 3 if family.has_parallel else 1
        calls = [rng.choice(makes)() for _ in range(rng.randint(1, most))]
        return Right(text + family.render(calls), calls)

    def read(self, updates: Sequence[tuple[int, str]], *, is_cut: bool) -> Answer:
        """The contents of an answer."""
        parser = answer_parser(self.format, self.reasoning, TOOLS, begins_inside=False)
        lexer = Lexer(dict.fromkeys(self.markers), self.tokenizer.added)
        reader = AnswerReader(lexer, parser, TOOLS)
        for token, text in updates:
            reader.feed(token, text)
        list(reader.finish(is_cut=is_cut))
        return reader.answer

    def without_begun(self, text: str) -> str:
        """A text without its last characters, if these may begin a marker, and space."""
        for marker in self.markers:
            for length in range(len(marker) - 1, 0, -1):
                if text.endswith(marker[:length]):
                    return text[:-length].rstrip()
        return text.rstrip()

    def damaged(self, right: Right, damage: str, rng: Random) -> str:
        """An answer with one fault."""
        text = right.text
        places = [found.span() for found in self.marks.finditer(text)]
        begin, end = rng.choice(places) if places else (0, 0)
        if damage == "deleted":
            return text[:begin] + text[end:]
        if damage == "doubled":
            return text[:end] + text[begin:]
        if damage == "without ends":
            tags = getattr(self.format, "tags", None)
            ends = re.escape(tags.value_end) if tags is not None and tags.value_end else "(?!)"
            return re.sub(ends, lambda found: found[0] if rng.random() < 0.4 else "", text)
        if damage == "text between":
            at = rng.choice([begin, end, len(text)])
            return f"{text[:at]} zqzy zqzz {text[at:]}"
        if damage == "mistyped":
            places = [found.start() for found in re.finditer(r"[{}\[\]\":,=()]", text)]
            at = rng.choice(places) if places else 0
            wrong = rng.choice(["", text[at] * 2, rng.choice("{}[]:,\"'")])
            return text[:at] + wrong + text[at + 1 :]
        if damage == "unknown tool":
            return text.replace(rng.choice(right.calls)[0], "erase_disk")
        return text


def check(of: Formats, right: Right, damage: str, rng: Random) -> None:
    text = of.damaged(right, damage, rng)
    is_cut = damage == "cut"
    updates = of.tokenizer.encode(text)
    if is_cut:
        updates = updates[: rng.randrange(len(updates))]
        while updates and updates[-1][1] in of.first_letters:  # (it may be a letter)
            updates.pop()
        text = "".join(piece for _, piece in updates)
    answer = of.read(updates, is_cut=is_cut)
    found = summary(answer)
    split = {i for i in range(len(updates)) if rng.random() < 0.2}
    assert summary(of.read(list(grouped(updates, split)), is_cut=is_cut)) == found, text
    for call in answer.calls:
        assert call.name in NAMES, text
        if call.is_complete:
            assert isinstance(json.loads(call.arguments), dict), (text, call.arguments)
    complete = [(c.name, json.loads(c.arguments)) for c in answer.calls if c.is_complete]
    shown = answer.content + answer.reasoning + "".join(call.arguments for call in answer.calls)
    if is_cut:
        assert complete == right.calls[: len(complete)], (text, found)
        whole = of.read(of.tokenizer.encode(right.text), is_cut=False)
        if of.marks.search(text) is not None:
            assert whole.content.startswith(of.without_begun(answer.content)), (text, found)
        return
    if damage == "mistyped":  # (what is in a wrong place need not mean anything)
        return
    if of.family.name == "kimi_k2":  # (noise before the first call, which other servers hide)
        text = re.sub(r"(?<=<\|tool_calls_section_begin\|>) zqzy zqzz ", "", text)
    lost = [word for word in WORD.findall(text) if word not in shown]
    assert not lost, (text, lost, found)
    if damage == "none":
        assert complete == right.calls, (text, found)


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    ("family", "has_tokens"),
    [
        pytest.param(family, has_tokens, id=f"{family.name}-{kind}")
        for family in families()
        for kind, has_tokens in (("tokens", True), ("spelled", False))
        if has_tokens or family.is_spelled
    ],
)
def test_damaged_answers(family: Family, has_tokens: bool) -> None:
    of = Formats(family, has_tokens=has_tokens)
    rng = Random(f"{family.name} {has_tokens}")
    for damage in DAMAGES:
        for _ in range(COUNT):
            check(of, of.right(rng), damage, rng)


def test_every_listed_format_is_tried() -> None:
    tried = {family.name for family in families()}
    assert all(tried.intersection(format.names) for format in FORMATS)
