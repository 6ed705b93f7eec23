"""Skeletons: conversations with a unique word in place of each text, name and argument.

A rendered skeleton is short, and words missing from it show what a chat template dropped.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mlx_paged.engine.chat.tools_as_text import Messages

# Cost of a missing word, in units of `Rewrite.cost`. Text next to calls is a remark.
_LOST, _LOST_REMARK = 100, 20
#: The tool of skeletons.
TOOL = {
    "type": "function",
    "function": {
        "name": "tool",
        "description": "A tool.",
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "string", "description": "A text."}},
            "required": ["x"],
        },
    },
}


@dataclass
class Skeleton:
    """A conversation with words in place of its texts.

    Attributes:
        messages: In the normal form.
        words: Words that a prompt must contain, with their meanings.
        remarks: Words that it should contain: texts next to calls.
        objects: Arguments as Python would show them. A template that does so needs JSON text.
    """

    messages: Messages = field(default_factory=list)
    words: dict[str, str] = field(default_factory=dict)
    remarks: dict[str, str] = field(default_factory=dict)
    objects: list[str] = field(default_factory=list)
    _count: int = 0

    @classmethod
    def of(cls, messages: Messages) -> Skeleton:
        """Returns the skeleton of a conversation in the normal form."""
        skeleton = cls()
        names: dict[str, str] = {}
        for message in messages:
            skeleton.messages.append(skeleton._message(message, names))
        return skeleton

    def penalty(self, form: Messages, render: Callable[[Messages], str]) -> float:
        """Returns how much a template leaves out of a form of the messages; infinite if it refuses
        them."""
        try:
            text = render(form)
        except Exception:  # Templates may raise anything.
            return math.inf
        lost = sum(word not in text for word in self.words)
        lost += sum(shown in text for shown in self.objects)
        if any(message.get("content", "") is None for message in form):
            lost += "None" in text
        if any(isinstance(message.get("content"), list) for message in form):
            lost += any(part in text for part in ("'type': 'text'", '"type": "text"'))
        return lost * _LOST + any(word not in text for word in self.remarks) * _LOST_REMARK

    def left_out(self, form: Messages, render: Callable[[Messages], str]) -> list[str]:
        """Returns the words that a template silently leaves out of a form of the messages."""
        try:
            text = render(form)
        except Exception:  # Templates may raise anything.
            return []
        meanings = {**self.words, **self.remarks}
        missing = dict.fromkeys(meanings[word] for word in meanings if word not in text)
        return [f"left out: {', '.join(missing)}"] if missing else []

    def _text(self, text: str, words: dict[str, str], meaning: str) -> str:
        if not text.strip():
            return text
        self._count += 1
        word = f"zq{self._count}qz"
        words[word] = meaning
        return word

    def _message(self, message: Mapping[str, Any], names: dict[str, str]) -> dict[str, Any]:
        found = dict(message)
        words, meaning = self.words, f"text of the role {message['role']}"
        if message.get("tool_calls"):
            words, meaning = self.remarks, "text beside calls"
        content = message.get("content")
        if isinstance(content, str):
            found["content"] = self._text(content, words, meaning)
        elif isinstance(content, list):
            found["content"] = [self._text(part, words, meaning) for part in content]
        for key in ("reasoning", "reasoning_content", "thinking"):  # Few show it in old turns.
            if key in found:
                found[key] = "zqthought"
        if calls := message.get("tool_calls"):
            found["tool_calls"] = [self._call(call, names) for call in calls]
        elif (id := message.get("tool_call_id")) in names:
            found["tool_call_id"] = _renamed(id, message.get("name", ""), names[id])
            found["name"] = "zqname"  # The original value does not show that the call has one.
        return found

    def _call(self, call: Mapping[str, Any], names: dict[str, str]) -> dict[str, Any]:
        name, id = call["function"]["name"], call.get("id")
        word = self._text(name, self.words, "the name of a called tool")
        arguments = self.arguments(call["function"].get("arguments"))
        found = {**call, "function": {**call["function"], "name": word, "arguments": arguments}}
        if id is not None:
            names[id] = word
            found["id"] = _renamed(id, name, word)
        return found

    def arguments(self, arguments: Any) -> Any:
        """Returns JSON text of arguments, with words in place of their first key and value."""
        meaning = "the arguments of a call"
        try:
            value = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
        except (ValueError, RecursionError):  # of a call that was cut
            return self._text("cut", self.words, meaning)
        if not isinstance(value, dict):
            return json.dumps(self._text("value", self.words, meaning))
        if not value:
            return "{}"
        key, inner = (self._text(text, self.words, meaning) for text in ("key", "value"))
        self.objects.append(str({key: inner}))
        return json.dumps({key: inner})


def _renamed(id: str, name: str, word: str) -> str:
    """Returns an id with the word of a tool, because Kimi's ids contain the tool's name."""
    return id.replace(f".{name}:", f".{word}:")
