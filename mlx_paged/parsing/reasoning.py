"""Reasoning formats: the markers around a model's reasoning before its answer."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Any

from mlx_paged.errors import InvalidParameterError
from mlx_paged.parsing.derived_reasoning import derive_reasoning
from mlx_paged.parsing.special_tokens import added_tokens, special_token_ids

logger = logging.getLogger(__name__)

#: Maximum characters between the two parts of an end marker.
_MAX_BETWEEN = 80


class Reasoning(Enum):
    """The beginning of an answer, given the end of its rendered prompt."""

    INSIDE = "inside"  # the prompt ends within the reasoning
    MAY_FOLLOW = "may follow"  # the answer may begin with reasoning, or not
    OVER = "over"  # the prompt ends with the end of the reasoning


@dataclass(frozen=True)
class ReasoningFormat:
    """The markers of reasoning in a model's text.

    Attributes:
        name: vLLM's name of its reasoning parser.
        start, end: Texts of the markers. If one contains an added token of the tokenizer, it is
            that token; the same characters from other tokens mean nothing.
        end_part: Marker before `end`, with a few tokens in between (harmony: the channel's name, a
            constraint, and the message); None: `end` is complete.
        forced_end: Ends the reasoning when its budget is spent; None uses `end`.
        is_required: True if everything before `end` is reasoning, with or without a `start`
            (channels).
        tokens: The markers in a model's tokens; None until `bound_to` makes them.
    """

    name: str
    start: str
    end: str
    end_part: str | None = None
    forced_end: str | None = None
    is_required: bool = False
    tokens: ReasoningTokens | None = field(default=None, compare=False, repr=False)

    def bound_to(self, tokenizer: Any) -> ReasoningFormat:
        """Returns the format for a tokenizer (mlx-lm's or transformers').

        Some models have the tags with a suffix (``<think:opensource>``), which then are the
        markers.
        """
        suffix = _suffix_of(self.start, tokenizer)
        if suffix:
            start, end = (tag.replace(">", f"{suffix}>") for tag in (self.start, self.end))
            return replace(self, start=start, end=end).bound_to(tokenizer)
        return replace(self, tokens=ReasoningTokens(self, tokenizer))

    def begins(self, prompt_token_ids: Sequence[int]) -> Reasoning:
        """Returns how an answer to a prompt begins.

        Only the prompt's end counts, after its last special token that is not a marker. Everything
        before belongs to other turns, whose text is irrelevant.

        Args:
            prompt_token_ids: As rendered by the chat template.
        """
        assert self.tokens is not None, "bound_to makes a format of a model's"
        return self.tokens.begins(prompt_token_ids)

    def begins_inside(self, prompt_token_ids: Sequence[int]) -> bool:
        """True if a prompt ends within the reasoning."""
        return self.begins(prompt_token_ids) is Reasoning.INSIDE


class ReasoningTokens:
    """The markers of a format in the tokens of a model.

    Attributes:
        start: Tokens of the start marker.
        forced_end: Tokens that end the reasoning.
        end_token: The token that is the end marker; None where it has several, or is text.
    """

    def __init__(self, format: ReasoningFormat, tokenizer: Any) -> None:
        self._format = format
        self._tokenizer = tokenizer
        added = added_tokens(tokenizer)
        self._added = {token: text for text, token in added.items()}

        def encode(text: str) -> tuple[int, ...]:
            if text in added:
                return (added[text],)
            return tuple(tokenizer.encode(text, add_special_tokens=False))

        self.start = encode(format.start)
        self.forced_end = encode(format.forced_end or format.end)
        self.end_token = added.get(format.end) if format.end_part is None else None
        parts = [p for p in (format.start, format.end_part, format.end) if p]
        markers = {token for text, token in added.items() if any(text in part for part in parts)}
        self._boundaries = special_token_ids(tokenizer) - markers
        self._texts: dict[int, str] = {}

    def begins(self, prompt: Sequence[int]) -> Reasoning:
        tail: list[int] = []
        for token in reversed(prompt):
            if token in self._boundaries:
                break
            tail.append(token)
        tail.reverse()
        text = self.spelled(tail)
        starts = list(self._start_pattern.finditer(text))
        ends = list(self.end_pattern.finditer(text))
        last_start = starts[-1].start() if starts else -1
        last_end = ends[-1].end() if ends else -1
        if last_end > last_start:
            return Reasoning.MAY_FOLLOW if text[last_end:].strip() else Reasoning.OVER
        if last_start >= 0 or self._format.is_required:
            return Reasoning.INSIDE
        return Reasoning.MAY_FOLLOW

    @cached_property
    def _start_pattern(self) -> re.Pattern[str]:
        return re.compile(re.escape(self.spelled_marker(self._format.start)))

    @cached_property
    def end_pattern(self) -> re.Pattern[str]:
        """Finds the end marker in the result of `spelled`."""
        pattern = re.escape(self.spelled_marker(self._format.end))
        if self._format.end_part is not None:
            before = re.escape(self.spelled_marker(self._format.end_part))
            pattern = f"{before}.{{0,{_MAX_BETWEEN}}}?{pattern}"
        return re.compile(pattern, re.DOTALL)

    @property
    def longest_end(self) -> int:
        """Maximum characters of the end marker in the result of `spelled`."""
        parts = (self._format.end_part or "", self._format.end)
        return sum(len(self.spelled_marker(p)) for p in parts) + _MAX_BETWEEN

    def spelled(self, tokens: Iterable[int]) -> str:
        """Returns tokens as text in which an added token differs from its characters."""
        texts, found = self._texts, []
        for token in tokens:
            text = texts.get(token)
            if text is None:
                text = texts[token] = self._spell(token)
            found.append(text)
        return "".join(found)

    def spelled_marker(self, text: str) -> str:
        """Returns a marker's text in the same form."""
        added = sorted(self._added.items(), key=lambda entry: -len(entry[1]))
        names = [(name, token) for token, name in added if name and name in text]
        if not names:
            return text
        tokens = dict(names)
        pattern = "|".join(re.escape(name) for name, _ in names)
        return re.sub(pattern, lambda m: _sentinel(tokens[m.group()]), text)

    def _spell(self, token: int) -> str:
        if token in self._added:
            return _sentinel(token)
        [piece] = self._tokenizer.convert_ids_to_tokens([token])
        if piece is None:
            return ""
        # A token decoded alone lacks the space of its sentence piece.
        return self._tokenizer.decode([token]) if "▁" not in piece else piece.replace("▁", " ")


def _sentinel(token: int) -> str:
    """Returns a token as two characters, the first of which is half a surrogate, so in no text."""
    return "\ud800" + chr(token)


def _think(*names: str) -> list[ReasoningFormat]:
    return [ReasoningFormat(name, "<think>", "</think>") for name in names]


_HARMONY = ReasoningFormat(
    "openai_gptoss",
    "<|channel|>analysis<|message|>",
    "<|message|>",
    end_part="<|channel|>final",
    forced_end="<|end|><|start|>assistant<|channel|>final<|message|>",
    is_required=True,
)

#: The formats by vLLM's names.
REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    format.name: format
    for format in (
        *_think("deepseek_r1", "deepseek_v3", "ernie45", "glm45", "holo2", "kimi_k2", "minimax_m2"),
        *_think("hy_v3", "minimax_m1", "nemotron_v3", "olmo3", "qwen3", "step3", "step3p5"),
        ReasoningFormat("apertus", "<|inner_prefix|>", "<|inner_suffix|>"),
        ReasoningFormat("apriel", "Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
        ReasoningFormat("cohere", "<|START_THINKING|>", "<|END_THINKING|>"),
        ReasoningFormat("gemma4", "<|channel>thought", "<channel|>"),
        replace(_HARMONY, name="gpt_oss"),
        ReasoningFormat("granite", "Here is my thought process:", "Here is my response:"),
        ReasoningFormat(
            "inkling",
            "<|content_thinking|>",
            "<|content_text|>",
            forced_end="<|end_message|><|message_model|><|content_text|>",
            is_required=True,
        ),
        ReasoningFormat("kimi", "◁think▷", "◁/think▷"),
        ReasoningFormat("kimi_k3", "<|open|>think<|sep|>", "<|close|>think<|sep|>"),
        ReasoningFormat("longcat", "<longcat_think>", "</longcat_think>"),
        ReasoningFormat("minimax_m3", "<mm:think>", "</mm:think>"),
        ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
        ReasoningFormat(
            "muse_glimmer",
            " to=self<|message|>",
            " to=user<|message|>",
            forced_end="<|eom|><|start|>assistant to=user<|message|>",
            is_required=True,
        ),
        _HARMONY,
        ReasoningFormat("plamo3", "<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>"),
        ReasoningFormat("seed_oss", "<seed:think>", "</seed:think>"),
        ReasoningFormat(
            "solar_open",
            "<|think|>",
            "<|content|>",
            forced_end="<|end|><|begin|>assistant<|content|>",
            is_required=True,
        ),
    )
}

#: Formats whose markers are plain text or several tokens, so only the template shows them.
_SHOWN: Sequence[tuple[tuple[str, ...], str]] = (
    (("Here is my thought process:",), "granite"),
    (("[BEGIN FINAL RESPONSE]",), "apriel"),
    (("<|plamo:begin_think:plamo|>",), "plamo3"),
    (("<|open|>", "<|close|>", "<|sep|>", "think"), "kimi_k3"),
    (("<mm:think>", "</mm:think>"), "minimax_m3"),
    (("<think>", "</think>"), "deepseek_r1"),
    (("<beginning_of_sentence>ai",), "minimax_m1"),
)

# In this order: (an added token of the vocabulary, a text of the template or None, the format).
_HINTS: Sequence[tuple[str, str | None, str]] = (
    ("<|channel|>", "analysis", "openai_gptoss"),
    ("<|channel>", None, "gemma4"),
    ("<seed:think>", None, "seed_oss"),
    ("[THINK]", None, "mistral"),
    ("◁think▷", None, "kimi"),
    ("<longcat_think>", None, "longcat"),
    ("<|START_THINKING|>", None, "cohere"),
    ("<mm:think>", None, "minimax_m3"),
    ("<|sep|>", "<|open|>", "kimi_k3"),
    ("<|think|>", "<|content|>", "solar_open"),
    ("<|content_thinking|>", None, "inkling"),
    ("<|inner_prefix|>", None, "apertus"),
    ("<|eom|>", " to=self<|message|>", "muse_glimmer"),
    ("<think>", "<minimax:tool_call>", "minimax_m2"),
    ("<think>", "<arg_key>", "glm45"),
    ("<think>", "<|tool_calls_section_begin|>", "kimi_k2"),
    ("<think>", "<|im_start|>", "qwen3"),
    ("<think>", None, "deepseek_r1"),
)


def detect(tokenizer: Any) -> ReasoningFormat | None:
    """Detects a model's reasoning format by its vocabulary and chat template; None if it has none.

    Args:
        tokenizer: mlx-lm's or transformers'.
    """
    vocabulary = added_tokens(tokenizer)
    template = _template_of(tokenizer)
    for token, text, name in _HINTS:
        if token in vocabulary and (text is None or text in template):
            return REASONING_FORMATS[name].bound_to(tokenizer)
    if _suffix_of("<think>", tokenizer):
        return REASONING_FORMATS["hy_v3"].bound_to(tokenizer)
    for texts, name in _SHOWN:
        if all(text in template for text in texts):
            return REASONING_FORMATS[name].bound_to(tokenizer)
    if (markers := derive_reasoning(template, vocabulary)) is not None:
        logger.info(
            "reasoning: no listed format fits; derived from the chat template: %r to %r",
            markers.start,
            markers.end,
        )
        return ReasoningFormat("derived", markers.start, markers.end).bound_to(tokenizer)
    return None


def _suffix_of(tag: str, tokenizer: Any) -> str:
    """The suffix that a tokenizer's tokens, or its template, have in a tag's name; "": none."""
    vocabulary = added_tokens(tokenizer)
    if not tag.startswith("<") or not tag.endswith(">") or tag in vocabulary:
        return ""
    pattern = re.compile(re.escape(tag[:-1]) + r"(:[\w.-]+)>")
    for text in (*vocabulary, _template_of(tokenizer)):
        if (found := pattern.search(text)) is not None:
            return found[1]
    return ""


def format_of(name: str, tokenizer: Any) -> ReasoningFormat | None:
    """Returns the format named by `EngineConfig.reasoning_parser`; "auto" detects it.

    Raises:
        InvalidParameterError: An unknown name.
    """
    if name == "auto":
        return detect(tokenizer)
    if name in ("none", ""):
        return None
    format = REASONING_FORMATS.get(name)
    if format is None:
        known = ", ".join(REASONING_FORMATS)
        raise InvalidParameterError("reasoning_parser", f'"auto", "none", or one of {known}', name)
    return format.bound_to(tokenizer)


def _template_of(tokenizer: Any) -> str:
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, Mapping):  # several, by name
        template = "\n".join(str(text) for text in template.values())
    elif isinstance(template, list):
        template = "\n".join(str(entry) for entry in template)
    return template if isinstance(template, str) else ""
