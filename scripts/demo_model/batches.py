"""Assembles training rows: packed chats under varied system prompts, and plain source."""

from __future__ import annotations

import json
import lzma
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mlx_paged.demo.prompts import SYSTEM_PROMPT

from .house_rules import system_prompt
from .tokenizer import END, END_OF_TEXT, START
from .wording import phrase, renamed

KINDS = {
    "classic": 0.30,
    "family": 0.12,
    "composition": 0.22,
    "clean": 0.13,
    "loose": 0.09,
    "method": 0.14,
}
NAMED_SHARE = 0.06  # share of our own tasks whose request names the function


@dataclass
class Mixture:
    """Shares of the kinds of rows; the remainder is chats."""

    code: float
    functions: float = 0.06


def load_code(folder: Path) -> np.ndarray:
    """Returns the stream of source tokens, [N] uint16."""
    parts = []
    for path in sorted(folder.glob("code*.xz")):
        low, high = np.split(np.frombuffer(lzma.decompress(path.read_bytes()), dtype=np.uint8), 2)
        parts.append(low.astype(np.uint16) | (high.astype(np.uint16) << 8))
    return np.concatenate(parts)


class RowMaker:
    """Makes rows of tokens with a loss mask, which is 1 if the next token is a target."""

    def __init__(self, folder: Path, code: np.ndarray, length: int, seed: int) -> None:
        from tokenizers import Tokenizer

        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
        self.rng = random.Random(seed)
        self.code, self.length = code, length
        data = json.loads(lzma.decompress((folder / "tasks.json.xz").read_bytes()))
        self.tasks: dict[str, list[Any]] = data["tasks"]
        self.prose: list[str] = data["prose"]
        self.end: int = self.tokenizer.token_to_id(END_OF_TEXT)  # type: ignore[assignment]
        self.answers: dict[str, list[int]] = {}
        self.system_prompts: list[list[int]] = []

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text; recognizes special tokens."""
        return self.tokenizer.encode(text).ids

    def turn(self, tokens: list[int], mask: list[int]) -> None:
        """Appends one request and its answer."""
        kind = self.rng.choices(list(KINDS), list(KINDS.values()))[0]
        asks, answer = self.rng.choice(self.tasks[kind])
        own = kind in ("classic", "family", "composition")
        if own and self.rng.random() < NAMED_SHARE:
            request, answer = renamed(self.rng.choice(asks), answer, self.rng)
        else:
            request = phrase(self.rng.choice(asks), self.rng, method=kind == "method")
        head = self.encode(f"{START}user\n{request}{END}\n{START}assistant\n")
        body = self.answers.get(answer)
        if body is None:
            body = self.answers[answer] = self.encode(f"{answer}{END}")
        tail = self.encode("\n")
        tokens += head + body + tail
        mask += [0] * len(head) + [1] * len(body) + [0] * len(tail)

    def system(self) -> list[int]:
        """Returns a system message's tokens, from a slowly renewed pool (encoding is slow)."""
        if len(self.system_prompts) < 400 or self.rng.random() < 0.05:
            text = system_prompt(self.rng, self.prose, SYSTEM_PROMPT)
            head = [] if text is None else self.encode(f"{START}system\n{text}{END}\n")
            self.system_prompts.append(head[: self.length * 3 // 4])
            return self.system_prompts[-1]
        return self.rng.choice(self.system_prompts)

    def chats(self) -> tuple[list[int], list[int]]:
        """Returns a row of packed conversations, each with a system prompt and a few turns."""
        tokens: list[int] = []
        mask: list[int] = []
        while len(tokens) <= self.length:
            head = self.system()
            tokens += head
            mask += [0] * len(head)
            turns = (
                self.rng.choice((1, 1, 2, 3))
                if len(head) < 200
                else self.rng.choice((1, 2, 4, 8, 16))
            )
            for _ in range(turns):
                self.turn(tokens, mask)
            tokens.append(self.end)
            mask.append(0)
        return tokens, mask

    def functions(self) -> tuple[list[int], list[int]]:
        """Returns a row of single functions, each followed by the end-of-text token."""
        tokens: list[int] = []
        while len(tokens) <= self.length:
            kind = self.rng.choice(("classic", "classic", "family", "composition", "clean"))
            tokens += [*self.encode(self.rng.choice(self.tasks[kind])[1] + "\n"), self.end]
        return tokens, [1] * len(tokens)

    def row(self, mixture: Mixture) -> tuple[np.ndarray, np.ndarray]:
        """Returns tokens [length + 1] and the loss mask of all but the first, [length]."""
        kind = self.rng.random()
        if kind < mixture.code:
            start = self.rng.randrange(len(self.code) - self.length - 1)
            tokens = self.code[start : start + self.length + 1]
            return tokens.astype(np.int64), np.ones(self.length, dtype=np.float32)
        pair = self.functions() if kind < mixture.code + mixture.functions else self.chats()
        tokens, mask = (np.array(values[: self.length + 1], dtype=np.int64) for values in pair)
        return tokens, mask[1:].astype(np.float32)
