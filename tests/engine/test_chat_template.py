"""Templates see the variables that a caller gives, and no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from mlx_lm.chat_templates import deepseek_v32
from support.thinking import tokenizer_with

# isort: split
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_paged.engine.chat_template import render_chat

USER = {"role": "user", "content": "hi"}
# Off unless it is asked for, as in DeepSeek V3.1 and Gemma 4; and on, as in Qwen 3.
THINKS = "{{ messages[0].content }}{% if CONDITION %} on{% endif %}"
OFF = THINKS.replace("CONDITION", "enable_thinking is defined and enable_thinking")
ON = THINKS.replace("CONDITION", "enable_thinking is undefined or enable_thinking")
SHOWN = "{{ enable_thinking is defined }} {{ thinking is defined }} {{ bos_token is defined }}"


def thinking_tokenizer(template: str = "") -> TokenizerWrapper:
    """One whose wrapper would switch thinking on."""
    tokenizer = TokenizerWrapper(
        tokenizer_with(["<think>", "</think>"], template=template)._tokenizer
    )
    assert tokenizer.has_thinking
    return tokenizer


@pytest.mark.parametrize(("template", "default"), [(OFF, "hi"), (ON, "hi on")])
def test_the_default_of_a_template_holds(template: str, default: str) -> None:
    tokenizer = thinking_tokenizer(template)
    assert render_chat(tokenizer, [USER]) == default
    assert render_chat(tokenizer, [USER], enable_thinking=True) == "hi on"
    assert render_chat(tokenizer, [USER], enable_thinking=False) == "hi"


def test_a_template_sees_what_transformers_gives_it() -> None:
    tokenizer = thinking_tokenizer(SHOWN)
    own = tokenizer._tokenizer.apply_chat_template([USER], tokenize=False)
    assert render_chat(tokenizer, [USER]) == own
    assert render_chat(tokenizer._tokenizer, [USER]) == own
    other = render_chat(tokenizer, [USER], chat_template="{{ messages|length }}{{ tools }}")
    assert other == "1None"


def test_a_null_is_there() -> None:
    template = "{{ messages[0].content is none }} {{ messages[0].content is defined }}"
    tokenizer = tokenizer_with(template=template)
    messages = [{"role": "assistant", "content": None}]
    assert render_chat(tokenizer, messages) == "True True"


@pytest.mark.parametrize("name", ["enable_thinking", "thinking"])
def test_a_renderer_in_python_gets_what_is_asked(name: str, monkeypatch) -> None:
    tokenizer = thinking_tokenizer()
    seen: list[dict[str, Any]] = []

    def render(messages: list[Any], **options: Any) -> str:
        seen.append(options)
        return "text"

    def owners() -> Callable[..., str]:
        return lambda messages, tokenize, **options: render(messages, **options)

    # One of mlx-lm's, and one of a tokenizer's own class.
    monkeypatch.setattr(tokenizer, "_chat_template", render)
    render_chat(tokenizer, [USER])
    render_chat(tokenizer, [USER], enable_thinking=True, tools=[{"type": "function"}])
    assert "enable_thinking" not in seen[0] and seen[1]["enable_thinking"] is True
    assert seen[1]["tools"] == [{"type": "function"}]
    monkeypatch.setattr(tokenizer, "_chat_template", None)
    monkeypatch.setattr(tokenizer._tokenizer, "apply_chat_template", owners())
    monkeypatch.setattr(tokenizer, "_thinking_kwarg", name)
    render_chat(tokenizer, [USER])
    render_chat(tokenizer, [USER], enable_thinking=False)
    assert {"enable_thinking", "thinking"}.isdisjoint(seen[2]) and seen[3][name] is False


def test_a_renderer_in_python_gets_no_variable_that_it_lacks(monkeypatch) -> None:
    tokenizer = thinking_tokenizer()
    monkeypatch.setattr(tokenizer, "_chat_template", deepseek_v32.apply_chat_template)
    asked = render_chat(tokenizer, [USER], reasoning_effort="medium", verbosity="low")
    assert asked == render_chat(tokenizer, [USER]) != ""
    assert render_chat(tokenizer, [USER], enable_thinking=False, verbosity="low") != asked
    monkeypatch.setattr(tokenizer, "_chat_template", lambda messages, tools: "text")
    with pytest.raises(TypeError, match="add_generation_prompt"):
        render_chat(tokenizer, [USER])
