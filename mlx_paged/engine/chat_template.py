"""Renders conversations with a model's chat template and the caller's variables.

mlx-lm's wrapper adds `enable_thinking` to every call, which overrides the template's default. A
router imports this module, but neither mlx-lm nor transformers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

Messages = Sequence[Mapping[str, Any]]


def render_chat(
    tokenizer: Any,
    messages: Messages,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    chat_template: str | None = None,
    **variables: Any,
) -> str:
    """Returns the text of a conversation.

    Args:
        tokenizer: mlx-lm's wrapper, or a tokenizer of transformers.
        messages: Passed on unchanged, including keys whose value is None.
        add_generation_prompt: End the text with the beginning of an answer.
        continue_final_message: End the text inside the last message.
        tools: OpenAI's format; None means no tools.
        chat_template: Jinja source that replaces the model's template.
        variables: Other variables of the template.

    Raises:
        Exception: The template refuses the messages or fails. It may raise any error.
    """
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    inner = tokenizer._tokenizer if isinstance(tokenizer, TokenizerWrapper) else tokenizer
    options: dict[str, Any] = {
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": continue_final_message,
        **variables,
    }
    written_in_python = getattr(tokenizer, "_chat_template", None)  # see mlx_lm.chat_templates
    if written_in_python is not None and chat_template is None:
        return _called(written_in_python, messages, {"tools": tools, **options}, variables)
    if not _renders_as_transformers(inner):
        if chat_template is not None:
            options["chat_template"] = chat_template
        if "enable_thinking" in options:  # Some of these functions call it `thinking`.
            name = getattr(tokenizer, "_thinking_kwarg", "enable_thinking")
            options[name] = options.pop("enable_thinking")
        if tools is not None:
            options["tools"] = tools
        return str(inner.apply_chat_template(list(messages), tokenize=False, **options))
    from transformers.utils.chat_template_utils import render_jinja_template

    # `apply_chat_template` drops keys whose value is None, but some templates test for them:
    # DeepSeek's write a message's calls only if its content is none.
    source = inner.get_chat_template(chat_template, tools)
    options = {"documents": None, **inner.special_tokens_map, **options}
    [text], _ = render_jinja_template(
        conversations=[list(messages)], tools=tools, chat_template=source, **options
    )
    return str(text)


def _called(
    program: Any, messages: Messages, options: dict[str, Any], variables: Mapping[str, Any]
) -> str:
    """Renders with a template written in Python. Like Jinja, it ignores unknown variables."""
    while True:
        try:
            return str(program(list(messages), **options))
        except TypeError as error:
            found = re.search(r"unexpected keyword argument '(\w+)'", str(error))
            if found is None or found[1] not in options or found[1] not in variables:
                raise
            del options[found[1]]


def is_program(tokenizer: Any) -> bool:
    """True if a function renders a tokenizer's chats, in place of a Jinja template."""
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    inner = tokenizer._tokenizer if isinstance(tokenizer, TokenizerWrapper) else tokenizer
    has_own = getattr(tokenizer, "_chat_template", None) is not None
    return has_own or not _renders_as_transformers(inner)


def _renders_as_transformers(inner: Any) -> bool:
    """True if a tokenizer relies on a template to render chats."""
    from transformers import PreTrainedTokenizerBase

    function = getattr(inner.apply_chat_template, "__func__", None)
    return function is PreTrainedTokenizerBase.apply_chat_template
