"""A request's wish to think reaches a template under the name that the template reads."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.thinking import tokenizer_with

from mlx_paged.engine.chat.renderer import ChatRenderer
from mlx_paged.server.bodies import ChatBody
from mlx_paged.server.chat import turn_of as chat_turn
from mlx_paged.server.config import ServerConfig
from mlx_paged.server.conversation import Renderer
from mlx_paged.server.messages.bodies import MessagesBody
from mlx_paged.server.messages.turns import turn_of as messages_turn
from mlx_paged.server.responses_api.body import ResponseBody, template_kwargs_of
from mlx_paged.templates.variables import variables_of

USER = [{"role": "user", "content": "hi"}]
#: Templates, with what they write at the end: unasked, asked to think, asked not to.
TEMPLATES: dict[str, tuple[str, str, str, str]] = {
    "qwen 3": (
        "{% if enable_thinking is defined and enable_thinking is false %}off{% else %}on"
        "{% endif %}",
        "on", "on", "off",
    ),
    "deepseek v3.1": (
        "{% if not thinking is defined %}{% set thinking = false %}{% endif %}"
        "{% if thinking %}on{% else %}off{% endif %}", "off", "on", "off",
    ),
    "granite": ("{%- if thinking %}on{%- else %}off{%- endif %}", "off", "on", "off"),
    "kimi k2.5": (
        "{%- if thinking is defined and thinking is false -%}off{%- else -%}on{%- endif -%}",
        "on", "on", "off",
    ),
    "command a": ("{{ 'off' if reasoning is defined and not reasoning else 'on' }}",
                  "on", "on", "off"),
    "hyperclova": (
        "{{ 'on' if force_reasoning else 'off' if skip_reasoning else 'auto' }}",
        "auto", "on", "off",
    ),
    "hunyuan 3": (
        "{% set effort = reasoning_effort | default('no_think') %}"
        "{% if effort not in ['high', 'low', 'no_think'] %}{{ raise_exception('effort') }}"
        "{% endif %}"
        "{{ 'off' if effort == 'no_think' else 'on ' + effort }}", "off", "on high", "off",
    ),
    "minimax m3": (
        "{% set ns = namespace(mode=thinking_mode | default('adaptive')) %}"
        "{% if ns.mode | lower == 'disabled' %}off{% elif ns.mode == 'enabled' %}on{% else %}auto"
        "{% endif %}", "auto", "on", "off",
    ),
    "the word for thinking only": (
        "{{ 'on' if thinking_mode is not defined or thinking_mode == 'thinking' else 'off' }}",
        "on", "on", "off",
    ),
    "seed oss": (
        "{% if thinking_budget is defined and thinking_budget == 0 %}off{% else %}on{% endif %}",
        "on", "on", "off",
    ),
    "tags of training": (
        "{% generation %}{{ 'on' if thinking else 'off' }}{% endgeneration %}", "off", "on", "off",
    ),
    "wants a system message": (
        "{% if messages[0].role != 'system' %}{{ raise_exception('no rule') }}{% endif %}"
        "{{ 'on' if thinking else 'off' }}", "off", "on", "off",
    ),
    "no switch": ("{% if preserve_thinking %}{{ messages[1] }}{% endif %}same",
                  "same", "same", "same"),
    "levels without an end": ("{{ reasoning_effort or 'medium' }}", "medium", "medium", "medium"),
}  # fmt: skip


def text_of(template: str, **variables: Any) -> str:
    chats = ChatRenderer(tokenizer_with(template=template))
    return chats.render(USER, variables=variables).text


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_wish_has_the_name_that_the_template_reads(name: str) -> None:
    template, unasked, on, off = TEMPLATES[name]
    chats = ChatRenderer(tokenizer_with(template=template))
    for variables, expected in (
        ({}, unasked),
        ({"enable_thinking": True}, on),
        ({"enable_thinking": False}, off),
        ({"thinking": True}, on),
        ({"thinking": False}, off),
        ({"clear_thinking": False, "preserve_thoughts": True, "other": False}, unasked),
    ):
        messages = [{"role": "system", "content": "rule"}, *USER] if "system" in name else USER
        assert chats.render(messages, variables=variables).text == expected, variables


def test_what_a_request_sets_itself_is_left_alone() -> None:
    hunyuan, minimax = TEMPLATES["hunyuan 3"][0], TEMPLATES["minimax m3"][0]
    assert text_of(hunyuan, enable_thinking=True, reasoning_effort="low") == "on low"
    assert text_of(hunyuan, enable_thinking=False, reasoning_effort="none") == "off"
    assert text_of(minimax, enable_thinking=True, thinking_mode="disabled") == "off"
    both = "{{ enable_thinking is defined }} {{ thinking is defined }}"
    assert text_of(both, enable_thinking=False) == "True False"
    assert text_of(both, thinking=False) == "False True"


def test_only_what_is_read_counts() -> None:
    template = (
        "{% macro f(thinking) %}{{ thinking }}{% endmacro %}{% set on = 1 %}{{ f(on) }}{{ x }}"
    )
    assert variables_of(template) == {"x"}


def prompts(
    template: str, chat: dict[str, Any], messages: dict[str, Any], response: Any
) -> list[str]:
    tokenizer = tokenizer_with(template=template)
    renderer = Renderer(tokenizer, ServerConfig(), None, len(tokenizer.get_vocab()))
    of_chat = chat_turn(ChatBody.model_validate({"messages": USER, **chat})).conversation
    body = MessagesBody.model_validate(
        {"model": None, "max_tokens": 1, "messages": USER, **messages}
    )
    of_messages = messages_turn(body).conversation
    kwargs = template_kwargs_of(ResponseBody.model_validate({"input": "hi", **response}))
    found = [
        tokenizer.decode(asyncio.run(renderer.render(conversation)))
        for conversation in (of_chat, of_messages)
    ]
    renderer.close()
    return [*found, text_of(template, **kwargs)]


@pytest.mark.parametrize("name", ["deepseek v3.1", "kimi k2.5", "hunyuan 3", "minimax m3"])
def test_every_api_passes_the_wish_on_and_nothing_unasked(name: str) -> None:
    template, unasked, on, off = TEMPLATES[name]
    assert prompts(template, {}, {}, {}) == [unasked] * 3
    none, disabled = {"reasoning_effort": "none"}, {"thinking": {"type": "disabled"}}
    assert prompts(template, none, disabled, {"reasoning": {"effort": "none"}}) == [off] * 3
    asked, enabled = (
        {"enable_thinking": True},
        {"thinking": {"type": "enabled", "budget_tokens": 9}},
    )
    kwargs = {"chat_template_kwargs": asked}
    assert prompts(template, asked, enabled, kwargs) == [on] * 3
    high = {"reasoning_effort": "high"}
    assert prompts(template, high, enabled, {"reasoning": {"effort": "high"}}) == [on] * 3
