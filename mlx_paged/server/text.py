"""Prompts become tokens: tokenization and chat templates, off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import jinja2

from mlx_paged.server.config import ServerConfig
from mlx_paged.server.errors import ApiError, bad_request, shorten
from mlx_paged.server.schemas.requests import ChatBody, Message, TokenizeBody

T = TypeVar("T")

# What `chat_template_kwargs` must not replace: the arguments of the renderer itself.
_RESERVED_KWARGS = {
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversation",
    "max_length",
    "messages",
    "padding",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "sanitize_control_tokens",
    "tokenize",
    "tokenizer_kwargs",
    "tools",
    "truncation",
}


class TextService:
    """The tokenizer, for many requests at once.

    Args:
        tokenizer: mlx-lm's wrapper.
        config: whose templates are taken.
        max_model_len: longer texts need not be tokenized to be refused; None: no limit.
        vocab_size: token ids are below this.
    """

    def __init__(
        self, tokenizer: Any, config: ServerConfig, max_model_len: int | None, vocab_size: int
    ) -> None:
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self._config = config
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="mlx-paged-text")
        # A text of more characters than this has too many tokens for the model, whatever it says.
        longest = max(map(len, tokenizer.get_vocab()), default=1)
        self._max_characters = None if max_model_len is None else max_model_len * max(longest, 16)

    def close(self) -> None:
        """Lets go of its threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Tokens of a text."""
        self._check_length(text)
        tokenizer = self.tokenizer
        return await self._run(
            lambda: list(tokenizer.encode(text, add_special_tokens=add_special_tokens))
        )

    async def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones included."""
        self.check_tokens("tokens", tokens)
        return await self._run(lambda: str(self.tokenizer.decode(list(tokens))))

    def token_strings(self, tokens: Sequence[int]) -> list[str]:
        """Each token as the vocabulary spells it."""
        return [str(t) for t in self.tokenizer.convert_ids_to_tokens(list(tokens))]

    def check_tokens(self, param: str, tokens: Sequence[int]) -> None:
        """Refuses token ids that the model does not have."""
        for token in tokens:
            if token >= self.vocab_size:
                raise bad_request(
                    param, f"{param} must be token ids below {self.vocab_size} but has {token}"
                )

    async def render_chat(self, body: ChatBody | TokenizeBody) -> list[int]:
        """Tokens of a conversation by the chat template.

        Raises:
            ApiError: there is no template, it refuses the conversation, or the request asks for
                what is not allowed.
        """
        template = self._template(body)
        messages = [_plain(message, i) for i, message in enumerate(body.messages or [])]
        for message in messages:
            self._check_length(message.get("content") or "")
        kwargs = dict(body.chat_template_kwargs or {})
        if reserved := _RESERVED_KWARGS & kwargs.keys():
            name = f"chat_template_kwargs.{min(reserved)}"
            raise bad_request(name, f"{name} must not be given: the server sets it")
        if isinstance(body, ChatBody):
            if body.documents is not None:
                kwargs["documents"] = body.documents
            if body.reasoning_effort is not None:
                kwargs.setdefault("reasoning_effort", body.reasoning_effort)
        goes_on = bool(body.continue_final_message)
        prompts = body.add_generation_prompt
        if goes_on and prompts:
            raise bad_request(
                "continue_final_message",
                "continue_final_message needs add_generation_prompt to be false",
            )
        if template is not None:
            kwargs["chat_template"] = template
        tokenizer = self.tokenizer

        def render() -> list[int]:
            text = tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=(not goes_on) if prompts is None else prompts,
                continue_final_message=goes_on,
                **kwargs,
            )
            special = bool(body.add_special_tokens)
            return list(tokenizer.encode(text, add_special_tokens=special))

        try:
            return await self._run(render)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            # Templates refuse roles, orders and kinds of content by raising; which is the client's
            # business, as is a template of its own that is broken.
            reason = shorten(f"{error}".strip().splitlines()[0] if f"{error}" else "no reason")
            raise bad_request(
                "messages", f"the chat template does not take these messages: {reason}"
            ) from error

    def _template(self, body: ChatBody | TokenizeBody) -> str | None:
        if body.chat_template is not None:
            if not self._config.trust_request_chat_template:
                raise bad_request(
                    "chat_template",
                    "chat_template is not taken from requests: the server was started without "
                    "--trust-request-chat-template",
                )
            return body.chat_template
        if self._config.chat_template is None and not self.tokenizer.has_chat_template:
            raise bad_request(
                "messages",
                "this model has no chat template: use /v1/completions, or start the server with "
                "--chat-template",
            )
        return self._config.chat_template

    def _check_length(self, text: str) -> None:
        if self._max_characters is not None and len(text) > self._max_characters:
            raise too_long(f"a text of {len(text)} characters", self.max_model_len)

    async def prompt_of(self, prompt: str | list[int], *, add_special_tokens: bool) -> list[int]:
        """Tokens of one prompt of `/v1/completions`."""
        if isinstance(prompt, str):
            return await self.encode(prompt, add_special_tokens=add_special_tokens)
        self.check_tokens("prompt", prompt)
        return prompt

    def truncate(self, tokens: list[int], limit: int | None) -> list[int]:
        """Keeps the last `limit` tokens (-1: as many as the model takes beside an answer)."""
        if limit is None:
            return tokens
        if limit == -1:
            return tokens if self.max_model_len is None else tokens[-(self.max_model_len - 1) :]
        if limit == 0:
            raise bad_request("truncate_prompt_tokens", "truncate_prompt_tokens must not be 0")
        if self.max_model_len is not None and limit > self.max_model_len:
            raise bad_request(
                "truncate_prompt_tokens",
                f"truncate_prompt_tokens must be at most {self.max_model_len} but got {limit}",
            )
        return tokens[-limit:]


def too_long(what: str, limit: int | None) -> ApiError:
    """400: it cannot fit."""
    return bad_request(
        "prompt", f"this model's context length is {limit} tokens, but the request has {what}",
        "context_length_exceeded",
    )  # fmt: skip


def _plain(message: Message, index: int) -> dict[str, Any]:
    """A message as templates expect it: its content one text."""
    plain: dict[str, Any] = {"role": message.role, **(message.model_extra or {})}
    for name in ("tool_calls", "tool_call_id", "function_call"):
        if plain.get(name) is None:
            plain.pop(name, None)
    if message.name is not None:
        plain["name"] = message.name
    if isinstance(message.content, list):
        texts = []
        for j, part in enumerate(message.content):
            where = f"messages.{index}.content.{j}"
            if part.type not in ("text", "input_text") or part.text is None:
                raise bad_request(
                    where, f"{where} must be a text part: this server reads text, not {part.type!r}"
                )
            texts.append(part.text)
        plain["content"] = "\n".join(texts)
    else:
        plain["content"] = message.content
        if message.content is None and message.role != "assistant":
            where = f"messages.{index}.content"
            raise bad_request(where, f"{where} must be a text or text parts but is null")
    return plain
