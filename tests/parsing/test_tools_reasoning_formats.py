"""Reasoning and calls in one answer, for every reasoning format with the calls of its models."""

from __future__ import annotations

import json
import random

import pytest
from support.tool_families import TOOLS, families
from support.tool_reading import SmallTokenizer, grouped, summary

from mlx_paged.parsing.answer import AnswerReader, answer_parser
from mlx_paged.parsing.lexer import Lexer
from mlx_paged.parsing.reasoning import REASONING_FORMATS
from mlx_paged.parsing.registry import format_of

FAMILIES = {family.name: family for family in families()}
THOUGHT = "I need the weather.\n\nIn {Oslo}, 2 < 3."
ARGUMENTS = {"city": "Oslo", "days": 3}

# (reasoning format, calls, tokens of the markers, whether prompts of the models open the reasoning)
PAIRS = [
    ("deepseek_r1", "deepseek_v3", ("<think>", "</think>"), True),
    ("deepseek_v3", "deepseek_v31", ("<think>", "</think>"), True),
    ("deepseek_v3", "deepseek_v32", ("<think>", "</think>"), True),
    ("qwen3", "hermes", ("<think>", "</think>"), False),
    ("qwen3", "qwen3_coder", ("<think>", "</think>"), True),
    ("glm45", "glm45", ("<think>", "</think>"), False),
    ("glm45", "glm47", ("<think>", "</think>"), True),
    ("kimi_k2", "kimi_k2", ("<think>", "</think>"), False),
    ("kimi", "hermes", ("◁think▷", "◁/think▷"), False),
    ("minimax_m2", "minimax_m2", ("<think>", "</think>"), True),
    ("gemma4", "gemma4", ("<|channel>", "<channel|>"), False),
    ("granite", "granite", (), False),
    ("mistral", "mistral", ("[THINK]", "[/THINK]"), False),
    ("seed_oss", "seed_oss", ("<seed:think>", "</seed:think>"), False),
    ("cohere", "cohere_command3", ("<|START_THINKING|>", "<|END_THINKING|>"), False),
    ("longcat", "longcat", ("<longcat_think>", "</longcat_think>"), False),
    ("qwen3", "lfm2", ("<think>", "</think>"), False),
    ("minimax_m3", "minimax_m3", ("<mm:think>", "</mm:think>"), True),
    ("kimi_k3", "kimi_k3", (), True),
    ("apriel", "apriel", (), True),
    ("hy_v3", "hy_v3", ("<think>", "</think>"), True),
    ("apertus", "apertus", ("<|inner_prefix|>", "<|inner_suffix|>"), False),
    ("plamo3", "plamo3", (), False),
    ("ernie45", "ernie45", ("<think>", "</think>"), True),
    ("olmo3", "olmo3", ("<think>", "</think>"), True),
    ("step3", "step3", ("<think>", "</think>"), True),
    ("deepseek_r1", "nemotron_nano_v2", ("<think>", "</think>"), True),
]


def read(reasoning: str, calls: str, tokens: tuple[str, ...], text: str, *, begins_inside: bool):  # type: ignore[no-untyped-def]
    family = FAMILIES[calls]
    tokenizer = SmallTokenizer(dict.fromkeys((*family.tokens, *tokens)))
    format = format_of(calls, tokenizer.added, family.template)
    of_reasoning = REASONING_FORMATS[reasoning]
    updates = tokenizer.encode(text)
    rng = random.Random(0)
    splits = [range(len(updates)), (), *({i} for i in range(0, len(updates), 9))]
    splits += [{i for i in range(len(updates)) if rng.random() < 0.3}]
    found = []
    for split in splits:
        parser = answer_parser(format, of_reasoning, TOOLS, begins_inside=begins_inside)
        markers = (*format.markers, of_reasoning.start, of_reasoning.end)
        special = {token: t for t, token in tokenizer.added.items() if t not in markers}
        reader = AnswerReader(Lexer(markers, tokenizer.added, special), parser, TOOLS)
        for token, piece in grouped(updates, set(split)):
            list(reader.feed(token, piece))
        list(reader.finish())
        found.append(summary(reader.answer))
    assert all(one == found[0] for one in found), found
    return found[0]


@pytest.mark.parametrize(("reasoning", "calls", "tokens", "opens"), PAIRS)
@pytest.mark.parametrize("content", ["", "Let me look."])
def test_reasoning_then_calls(
    reasoning: str, calls: str, tokens: tuple[str, ...], opens: bool, content: str
) -> None:
    family, format = FAMILIES[calls], REASONING_FORMATS[reasoning]
    call = family.render([("get_weather", ARGUMENTS)])
    for begins_inside in {opens, False}:
        start = "" if begins_inside else f"{format.start}\n"
        between = "\n\n" + content + "\n" * bool(content)
        text = f"{start}{THOUGHT}\n{format.end}{between}{call}"
        found = read(reasoning, calls, tokens, text, begins_inside=begins_inside)
        assert found["reasoning"] == THOUGHT
        assert found["content"].strip() == content
        [(name, arguments, is_complete, _)] = found["calls"]
        assert (name, json.loads(arguments), is_complete) == ("get_weather", ARGUMENTS, True)


@pytest.mark.parametrize(("reasoning", "calls", "tokens", "opens"), PAIRS)
def test_reasoning_alone_and_text_alone(
    reasoning: str, calls: str, tokens: tuple[str, ...], opens: bool
) -> None:
    format = REASONING_FORMATS[reasoning]
    cut = read(reasoning, calls, tokens, f"{format.start}\n{THOUGHT}", begins_inside=False)
    assert cut == {"reasoning": THOUGHT, "content": "", "calls": []}
    plain = read(reasoning, calls, tokens, "Only text.", begins_inside=False)
    assert plain == {"reasoning": "", "content": "Only text.", "calls": []}
    inside = read(reasoning, calls, tokens, f"So.{format.end}\n\nYes.", begins_inside=True)
    assert inside == {"reasoning": "So.", "content": "Yes.", "calls": []}


@pytest.mark.parametrize(("reasoning", "calls", "tokens", "opens"), PAIRS)
def test_a_call_ends_reasoning_that_the_model_forgot_to_end(
    reasoning: str, calls: str, tokens: tuple[str, ...], opens: bool
) -> None:
    family = FAMILIES[calls]
    if not family.render([("now", {})]).startswith(
        format_of(calls, {}, family.template).begins_call
    ):
        pytest.skip(f"calls of {calls} have no marker of their own")
    text = THOUGHT + "\n" + family.render([("get_weather", ARGUMENTS)])
    found = read(reasoning, calls, tokens, text, begins_inside=True)
    assert found["reasoning"] == THOUGHT
    assert [name for name, *_ in found["calls"]] == ["get_weather"]
