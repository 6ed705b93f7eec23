"""Sessions: recorded conversations as numbers of tokens.

A prompt of a session is its shared prefix, then everything that was said. So each prompt begins
with the one before, and with the answer to it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

BLOCK = 32  # tokens


@dataclass(frozen=True)
class Turn:
    """A prompt and its answer.

    Attributes:
        new_tokens: Tokens of the prompt after the previous answer.
        answer_tokens: Tokens of the answer.
    """

    new_tokens: int
    answer_tokens: int


@dataclass(frozen=True)
class Recording:
    """A recorded conversation.

    Attributes:
        group: Recordings of a group begin with the same `shared_tokens` tokens.
        shared_tokens: A multiple of `BLOCK`.
        turns: The first one's `new_tokens` include the shared ones.
    """

    group: int
    shared_tokens: int
    turns: tuple[Turn, ...]

    @property
    def prompts(self) -> list[int]:
        """Tokens of each turn's prompt."""
        ends = accumulate(turn.new_tokens + turn.answer_tokens for turn in self.turns)
        return [end - turn.answer_tokens for end, turn in zip(ends, self.turns)]


@dataclass(frozen=True)
class Session:
    """A recording that is played by one user.

    Attributes:
        key: No other session has it.
        start: Seconds until its first prompt arrives.
        first_turn: Earlier turns were played before the simulation began.
    """

    key: int
    recording: Recording
    start: float
    first_turn: int = 0


def grouped(conversations: Sequence[Sequence[Sequence[int]]]) -> list[Recording]:
    """Makes recordings of the tokens of messages: user, assistant, user, and so on.

    Conversations whose first message begins with the same 64 tokens are a group. A last message of
    the user has no answer and is left out.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, messages in enumerate(conversations):
        groups.setdefault(tuple(messages[0][:64]), []).append(number)
    found: dict[int, Recording] = {}
    for group, members in enumerate(groups.values()):
        firsts = [conversations[number][0] for number in members]
        shared = _common(firsts) // BLOCK * BLOCK if len(members) > 1 else 0
        shared = min(shared, *(len(first) - 1 for first in firsts)) // BLOCK * BLOCK
        for number in members:
            sizes = [len(message) for message in conversations[number]]
            pairs = zip(sizes[::2], sizes[1::2])
            turns = tuple(Turn(asked, answered) for asked, answered in pairs if answered)
            found[number] = Recording(group, shared, turns)
    return [found[number] for number in sorted(found) if found[number].turns]


def _common(texts: Iterable[Sequence[int]]) -> int:
    """Number of tokens that all texts begin with."""
    length = 0
    for column in zip(*texts):
        if len(set(column)) > 1:
            break
        length += 1
    return length


def save(path: Path, traffic: dict[str, list[Recording]]) -> None:
    """Writes recordings, one a line: group, shared tokens, and the lengths of all messages."""
    lines = []
    for name, recordings in traffic.items():
        rows = [
            [each.group, each.shared_tokens,
             *(tokens for turn in each.turns for tokens in (turn.new_tokens, turn.answer_tokens))]
            for each in recordings
        ]  # fmt: skip
        lines.append(f"{json.dumps(name)}: [\n" + ",\n".join(map(json.dumps, rows)) + "\n]")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def load(path: Path) -> dict[str, list[Recording]]:
    """Reads what `save` wrote."""
    return {
        name: [
            Recording(group, shared, tuple(map(Turn, sizes[::2], sizes[1::2])))
            for group, shared, *sizes in rows
        ]
        for name, rows in json.loads(path.read_text()).items()
    }
