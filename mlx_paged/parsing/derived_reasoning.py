"""Derives the markers of reasoning from a chat template."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from mlx_paged.templates.probe import (
    CONTENT,
    REASONING,
    USER,
    Message,
    Refused,
    TemplateProbe,
    is_marker,
    prompt_of,
    user_turn,
    with_reasoning,
)
from mlx_paged.templates.variables import possible_switches


@dataclass(frozen=True)
class ReasoningMarkers:
    """The texts around reasoning, without the space at their ends."""

    start: str
    end: str


_CALL = {
    "id": "probe0000",
    "type": "function",
    "function": {"name": "probe_function", "arguments": {}},
}


def derive_reasoning(chat_template: str, vocabulary: Iterable[str] = ()) -> ReasoningMarkers | None:
    """The markers that a template puts around reasoning; None: it renders none, or without an end.

    Args:
        chat_template: Its source.
        vocabulary: The tokenizer's added tokens.
    """
    if re.search(r"reasoning|think|thought", chat_template) is None:
        return None
    return reasoning_of(TemplateProbe(chat_template, vocabulary))


def reasoning_of(probe: TemplateProbe) -> ReasoningMarkers | None:
    """The same for a compiled template."""
    switches = ({each.name: each.on} for each in possible_switches(probe.source) if each.on)
    for variables in ({}, *switches):
        prompt = prompt_of(probe, variables=variables)
        try:
            plain = probe.render([user_turn(), _answer()], variables=variables)
        except Refused:
            continue
        # Some keep reasoning only next to calls, or only in a turn that continues.
        for message in (_answer(), {**_answer(), "tool_calls": [_CALL]}):
            try:
                text = probe.render([user_turn(), with_reasoning(message)], variables=variables)
            except Refused:
                continue
            if found := _markers(probe, prompt, plain, text):
                return found
        if found := _of_prompt(probe, prompt, plain):
            return found
    return None


def _of_prompt(probe: TemplateProbe, prompt: str, plain: str) -> ReasoningMarkers | None:
    """Returns the markers of a template whose prompts open reasoning and whose history omits it."""
    start = _last(probe, prompt)
    if not _is_tag(start) or start in _before(plain, CONTENT):
        return None
    ends = (
        re.sub(r"(?<=[\[<◁])(?=\w)", "/", start),
        re.sub(r"(?<=<[|｜])(?=\w)", "/", start),
        *(start.replace(a, b) for a, b in (("START", "END"), ("start", "end"), ("begin", "end"))),
    )
    for end in ends:
        if end != start and end in probe.source:
            return ReasoningMarkers(start, end)
    return None


def _answer() -> Message:
    return {"role": "assistant", "content": CONTENT}


def _markers(probe: TemplateProbe, prompt: str, plain: str, text: str) -> ReasoningMarkers | None:
    at, content_at = text.find(REASONING), text.find(CONTENT)
    if at < 0 or content_at < at + len(REASONING):
        return None
    between = text[at + len(REASONING) : content_at]
    # A prefix of every answer's content does not end reasoning.
    before_content = _before(plain, CONTENT)
    end = _first(probe, between)
    if not end:
        return None
    before = _before(text, REASONING)
    header = _header(prompt)
    if before.startswith(header):
        before = before[len(header) :]
    else:
        before = before[len(probe.common_prefix(before, before_content)) :]
    start = before.strip()
    if not start:  # The prompt ends with it, or there is none.
        start = _last(probe, _before(text, REASONING))
        if not _pairs(start, end) and start in before_content:
            return None  # the header of a turn
    elif len(probe.atoms(start)) > 1 and _pairs(last := _last(probe, start), end):
        start = last
    if not is_marker(start) or not is_marker(end) or start == end:
        return None
    return ReasoningMarkers(start, end)


def _before(text: str, sentinel: str) -> str:
    """Returns the text between the user's text and the next one."""
    return text[text.rfind(USER, 0, text.find(sentinel)) + len(USER) : text.find(sentinel)]


def _header(prompt: str) -> str:
    """Returns the start of the assistant's turn, without a reasoning marker at its end."""
    return prompt[prompt.rfind(USER) + len(USER) :]


def _first(probe: TemplateProbe, text: str) -> str:
    """Returns the marker that begins a text: a tag, or its whole first line."""
    text = text.strip()
    first = next(iter(probe.atoms(text)), "")
    return first if _is_tag(first) else text.split("\n", 1)[0].strip()


def _last(probe: TemplateProbe, text: str) -> str:
    text = text.strip()
    last = probe.atoms(text)[-1] if text else ""
    return last if _is_tag(last) else text.rsplit("\n", 1)[-1].strip()


def _is_tag(atom: str) -> bool:
    return len(atom) > 2 and not atom.replace("_", "").isalnum()


def _pairs(start: str, end: str) -> bool:
    """True if two markers form a pair: think and /think, START_X and END_X."""
    words = [set(re.findall(r"[^\W\d_]{3,}", text.lower())) for text in (start, end)]
    return bool(words[0] & words[1])
