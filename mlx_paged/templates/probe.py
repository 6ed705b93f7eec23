"""Renders a chat template with made-up conversations, to learn the format its model writes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Message = dict[str, Any]

# Markers around a text. No template contains these private-use characters.
_BOS, _EOS = "\ue0f1", "\ue0f2"

USER, CONTENT, REASONING = "question zero", "answer content zero", "reasoning text zero"

# A complete or partial tag, a bracketed word, a number, a word, or a single character.
_ATOM = r"""</?[^\s<>"'=]*>?|\[/?\w+\]|[⟦⟨【〈《«◁⦅]/?\w+[⟧⟩】〉》»▷⦆]|\d+|[^\W\d]+|[\s\S]"""


class Refused(Exception):
    """The template rejects a conversation."""


class TemplateProbe:
    """A chat template and the means to render it.

    Args:
        chat_template: The template's source.
        vocabulary: The tokenizer's added tokens.

    Attributes:
        source: The template's source.
    """

    def __init__(self, chat_template: str, vocabulary: Iterable[str] = ()) -> None:
        self.source = chat_template
        tokens = sorted((t for t in vocabulary if len(t.strip()) > 1), key=len, reverse=True)
        self._atom = re.compile("|".join([*map(re.escape, tokens), _ATOM]))

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        add_generation_prompt: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Renders a conversation, up to the token that ends the last turn.

        Raises:
            Refused: The template raises an error or cannot be compiled.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            [text], _ = render_jinja_template(
                [list(messages)],
                tools=list(tools) or None,
                chat_template=self.source,
                add_generation_prompt=add_generation_prompt,
                bos_token=_BOS,
                eos_token=_EOS,
                **(variables or {}),
            )
        except Exception as error:  # a template can raise any error
            raise Refused(str(error)) from error
        if not add_generation_prompt:
            text = text.rstrip().removesuffix(_EOS) if text.rstrip().endswith(_EOS) else text
        return str(text).replace(_BOS, "")

    def atoms(self, text: str) -> list[str]:
        """Splits a text into pieces that are never cut: tokens, tags, words, other characters."""
        return self._atom.findall(text)

    def common_prefix(self, a: str, b: str) -> str:
        """The longest common prefix, in whole atoms."""
        shared = 0
        for x, y in zip(self.atoms(a), self.atoms(b), strict=False):
            if x != y:
                break
            shared += len(x)
        return a[:shared]

    def common_suffix(self, a: str, b: str) -> str:
        """The longest common suffix, in whole atoms."""
        shared = 0
        for x, y in zip(reversed(self.atoms(a)), reversed(self.atoms(b)), strict=False):
            if x != y:
                break
            shared += len(x)
        return a[len(a) - shared :]


def user_turn() -> Message:
    """The first message of all conversations."""
    return {"role": "user", "content": USER}


def with_reasoning(message: Message) -> Message:
    """A message with reasoning, under every key that templates use."""
    names = ("reasoning_content", "reasoning", "thinking", "thought")
    return {**message, **dict.fromkeys(names, REASONING)}


def prompt_of(
    probe: TemplateProbe,
    tools: Sequence[Mapping[str, Any]] = (),
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Returns the text that starts the model's turn; "" if the template rejects it."""
    try:
        return probe.render([user_turn()], tools, add_generation_prompt=True, variables=variables)
    except Refused:
        return ""


def written(probe: TemplateProbe, prompt: str, text: str) -> str:
    """Returns the part of a rendered conversation that the model wrote, after the prompt."""
    if prompt and text.startswith(prompt):
        return text[len(prompt) :]
    return text[len(probe.common_prefix(text, prompt)) :]


def is_marker(text: str) -> bool:
    """True if a text is distinctive: neither JSON punctuation nor a short word."""
    if len(text) == 2:
        return re.fullmatch(r"""[^\s\w{}\[\]"',:()]{2}""", text) is not None
    return len(text) > 2 and re.search(r"""[^\s{}\[\]"',:()]""", text) is not None
