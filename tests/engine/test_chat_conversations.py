"""`LLM.chat` gives a model the conversation that the server would give it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import pytest
from support.chat_templates import TEMPLATES
from support.models import tiny_config, tiny_model
from support.thinking import VOCAB_SIZE, tokenizer_with

from mlx_paged import LLM
from mlx_paged.engine.chat.acceptance import TemplateForms
from mlx_paged.engine.chat.renderer import TemplateRefusal
from mlx_paged.errors import InvalidParameterError
from mlx_paged.model.loader import LoadedModel
from mlx_paged.server.bodies import ChatBody
from mlx_paged.server.chat import turn_of
from mlx_paged.server.config import ServerConfig
from mlx_paged.server.conversation import Renderer

CALL = {"name": "now", "arguments": '{"zone": "Oslo"}'}
ANSWER = {"role": "assistant", "content": None, "reasoning_content": "hmm",
          "tool_calls": [{"id": "call_1", "type": "function", "function": CALL}]}  # fmt: skip
HISTORY: list[dict[str, Any]] = [
    {"role": "developer", "content": "rule"},
    {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
    ANSWER,
    {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
    {"role": "user", "content": "next"},
]
LEGACY = [
    {"role": "user", "content": "ask"},
    {"role": "assistant", "content": "", "function_call": CALL},
    {"role": "function", "name": "now", "content": "noon"},
]


def llm_of(template: str) -> LLM:
    config = tiny_config("llama", vocab_size=VOCAB_SIZE, num_hidden_layers=1)
    model = LoadedModel(tiny_model(config), tokenizer_with(template=template), config, "chats")
    return LLM(model, num_gpu_blocks_override=16, block_size=8)


def served(llm: LLM, messages: Sequence[Any]) -> list[int]:
    """The prompt that a server makes of a chat."""
    renderer = Renderer(llm.tokenizer, ServerConfig(), None, VOCAB_SIZE)
    body = ChatBody.model_validate({"messages": messages})
    prompt = asyncio.run(renderer.render(turn_of(body).conversation))
    renderer.close()
    return prompt


@pytest.mark.parametrize("name", ["mistral v3", "llama3", "deepseek v3", "gpt-oss", "gemma2"])
def test_a_program_s_conversation_is_that_of_a_server(name: str) -> None:
    llm = llm_of(TEMPLATES[name])
    for messages in (HISTORY, LEGACY, HISTORY[:2]):
        [prompt] = llm.render_chats(messages)
        assert prompt == served(llm, messages)
    assert "noon" in llm.tokenizer.decode(llm.render_chats(HISTORY)[0])


def test_what_a_template_loses_is_told(caplog) -> None:
    llm = llm_of(TEMPLATES["gemma2"])
    with caplog.at_level(logging.WARNING, "mlx_paged"):
        llm.render_chats([{"role": "system", "content": "rule"}, {"role": "user", "content": "a"}])
    assert "system messages are the user's" in caplog.text


def test_another_thread_may_empty_the_cache_of_forms_at_any_time() -> None:
    class Emptied(dict[Any, Any]):
        """Another thread finds it full right after each change or look."""

        def __setitem__(self, key: Any, value: Any) -> None:
            super().__setitem__(key, value)
            self.clear()

        def __contains__(self, key: Any) -> bool:
            found = super().__contains__(key)
            self.clear()
            return found

    def render(messages: Any, _: Any) -> str:
        return "|".join(f"{message['role']}:{message.get('content')}" for message in messages)

    forms = TemplateForms(render)
    messages = [{"role": "user", "content": "two"}]
    assert forms.rendered(messages, (), render) == "user:two"
    forms._choices = Emptied(forms._choices)
    for _ in range(3):  # the first one finds the conversation
        assert forms.rendered(messages, (), render) == "user:two"


def test_what_no_form_of_a_conversation_is_taken_is_an_error_of_its_own() -> None:
    with pytest.raises(TemplateRefusal, match="never"):
        llm_of("{{ raise_exception('never') }}").render_chats(HISTORY)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"content": "a"}, "messages[0].role"),
        ({"role": "user", "content": 7}, "messages[0].content"),
        ({"role": "assistant", "tool_calls": "x"}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages[0].tool_calls[0].function"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 7}}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"role": "assistant", "function_call": {}}, "messages[0].function_call.name"),
        ({"role": "tool", "tool_call_id": 7, "content": ""}, "messages[0].tool_call_id"),
    ],
)
def test_a_message_that_cannot_be_is_named(message: dict[str, Any], field: str) -> None:
    llm = llm_of("{{ messages }}")
    with pytest.raises(InvalidParameterError) as caught:
        llm.render_chats([message])
    assert caught.value.field == field
