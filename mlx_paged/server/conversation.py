"""Renderer: makes the tokens of prompts, with a chat template for conversations."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

from mlx_paged.content import num_characters
from mlx_paged.engine.chat.renderer import ChatRenderer, ChatText
from mlx_paged.engine.chat.rewrites import Spelling
from mlx_paged.engine.chat.tools_as_text import as_text
from mlx_paged.engine.media import MediaPrompts, PreparedMedia
from mlx_paged.parsing.definitions import Tool
from mlx_paged.parsing.special_tokens import added_tokens, special_texts, special_token_ids
from mlx_paged.server.config import ServerConfig
from mlx_paged.server.errors import bad_request, context_exceeded, shorten
from mlx_paged.templates.variables import knows_tools

T = TypeVar("T")

_ROOM_FOR_ANSWER = 1024  # tokens


@dataclass(frozen=True)
class Conversation:
    """The input of a chat template. Every API with messages makes one from its body.

    Attributes:
        messages: OpenAI's messages: `role`, `content` as a text, or as a list of texts and
            `MediaSource`s if it has media, and any other fields. An answer may have `reasoning` and
            `tool_calls` (`function` with `name` and `arguments`, JSON text). A result has the role
            "tool" and a `tool_call_id`.
        tools: Tools that the prompt offers.
        add_generation_prompt: The prompt ends with the beginning of an answer.
        continue_final_message: The prompt ends inside the last message.
        add_special_tokens: Adds the tokens that the tokenizer puts around a text; None follows
            transformers for the model (`ChatRenderer.tokens`).
        chat_template: The request's Jinja source, which replaces the model's template.
        template_kwargs: Other variables of the template.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Tool] = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool | None = None
    chat_template: str | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


class RenderedPrompt(NamedTuple):
    """A rendered conversation, ready for the engine.

    Attributes:
        token_ids: All tokens.
        media: Its images, videos and sounds, or None.
        spelling: The template's spelling; new ids of calls follow it.
    """

    token_ids: list[int]
    media: PreparedMedia | None = None
    spelling: Spelling = Spelling()


class Renderer:
    """Tokenizer and chat template for many concurrent requests, on its own threads.

    Args:
        tokenizer: mlx-lm's wrapper.
        config: Gives the template, and the templates that are allowed.
        max_model_len: Maximum tokens of prompt and answer; longer texts are refused before they are
            tokenized. None means no limit.
        vocab_size: Token ids are below this.
        media: Makes prompts with media; None if the model accepts only text.
        media_reason: Why a multimodal model accepts only text.

    Attributes:
        added_tokens: Tokens that the tokenizer never splits, by text.
        special_texts: Texts of the special tokens, by id.
        end_texts: Texts of the tokens that end answers.
        max_characters: A longer text always has too many tokens; None means no limit.
    """

    def __init__(
        self,
        tokenizer: Any,
        config: ServerConfig,
        max_model_len: int | None,
        vocab_size: int,
        media: MediaPrompts | None = None,
        media_reason: str | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.added_tokens = added_tokens(tokenizer)
        self.special_texts = special_texts(tokenizer, special_token_ids(tokenizer))
        ends = [token for token in getattr(tokenizer, "eos_token_ids", ()) if token >= 0]
        self.end_texts = frozenset(special_texts(tokenizer, ends).values())
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self._config = config
        self._media = media
        processor = None if media is None else media.processor
        self._chats = ChatRenderer(tokenizer, processor, media_reason)
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="mlx-paged-text")
        # A longer text has too many tokens for the model in any case.
        longest = max(map(len, tokenizer.get_vocab()), default=1)
        self.max_characters = None if max_model_len is None else max_model_len * max(longest, 16)

    def close(self) -> None:
        """Ends its threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def run(self, function: Callable[[], T]) -> T:
        """Calls a function that takes a while on one of its threads."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)

    async def render(self, conversation: Conversation) -> list[int]:
        """Returns the tokens of a conversation; see `prompt`."""
        return (await self.prompt(conversation)).token_ids

    async def prompt(self, conversation: Conversation) -> RenderedPrompt:
        """Renders a conversation, with its media loaded.

        Raises:
            ApiError: There is no template, it refuses the conversation, or the request has its own
                template although that is not allowed.
            InvalidMediaError: Media are unusable, or the model does not accept them.
        """
        messages: Sequence[Mapping[str, Any]] = conversation.messages
        sources = self._chats.check_media(messages)
        tools = [tool.for_template() for tool in conversation.tools]
        special = conversation.add_special_tokens
        if self._config.tool_template:
            messages, tools = as_text(messages, tools), []
        # Checked before rendering; the template may drop a part, but hardly most.
        self._check_length(sum(num_characters(m.get("content")) for m in messages))
        template = self._template(conversation)

        def render() -> ChatText:
            found = self._chats.render(
                messages,
                tools,
                chat_template=template,
                add_generation_prompt=conversation.add_generation_prompt,
                continue_final_message=conversation.continue_final_message,
                variables=conversation.template_kwargs,
            )
            self._check_length(len(found.text))
            return found

        def tokens() -> RenderedPrompt:
            found = render()
            return RenderedPrompt(self._chats.tokens(found.text, special), spelling=found.spelling)

        try:
            if not sources:
                return await self.run(tokens)
            found = await self.run(render)
        except (TypeError, ValueError) as error:
            # Templates raise to refuse roles, orders and kinds of content. A request's own template
            # may also be broken. Both are the client's errors.
            lines = f"{error}".strip().splitlines() or ["no reason"]
            raise bad_request(
                "messages", f"the chat template does not take these messages: {shorten(lines[0])}"
            ) from error
        assert self._media is not None
        media = await self._media.prepare_async(
            found.text, sources, "messages", add_special_tokens=special
        )
        return RenderedPrompt(list(media.prompt.token_ids), media, found.spelling)

    @property
    def renders_tools(self) -> bool:
        """True if a prompt can offer tools."""
        return self._config.tool_template or knows_tools(self.chat_template)

    @property
    def chat_template(self) -> str:
        """The source of the template that requests without one of their own get."""
        found = self._config.chat_template or getattr(self.tokenizer, "chat_template", None) or ""
        if isinstance(found, Mapping):
            return str(found.get("tool_use") or found.get("default") or "")
        return str(found)

    def _template(self, conversation: Conversation) -> str | None:
        if conversation.chat_template is not None:
            if not self._config.trust_request_chat_template:
                raise bad_request(
                    "chat_template",
                    "chat_template is not taken from requests: the server was started without "
                    "--trust-request-chat-template",
                )
            return conversation.chat_template
        if self._config.chat_template is None and not self.tokenizer.has_chat_template:
            raise bad_request(
                "messages",
                "this model has no chat template: use /v1/completions, or start the server with "
                "--chat-template",
            )
        return self._config.chat_template

    async def encode(self, prompt: str | list[int], *, add_special_tokens: bool) -> list[int]:
        """Returns the tokens of a prompt, which may be tokens already.

        Raises:
            ApiError: It is too long, or has a token that the model does not have.
        """
        if not isinstance(prompt, str):
            self.check_tokens("prompt", prompt)
            return prompt
        self._check_length(len(prompt))
        return await self.run(
            lambda: list(self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens))
        )

    async def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens, including special ones."""
        self.check_tokens("tokens", tokens)
        return await self.run(lambda: str(self.tokenizer.decode(list(tokens))))

    async def token_strings(self, tokens: Sequence[int]) -> list[str]:
        """Returns each token as the vocabulary spells it."""
        convert = self.tokenizer.convert_ids_to_tokens
        return await self.run(lambda: [str(token) for token in convert(list(tokens))])

    def check_tokens(self, param: str, tokens: Sequence[int]) -> None:
        """Refuses token ids that the model does not have."""
        highest = max(tokens, default=0)
        if highest >= self.vocab_size:
            raise bad_request(
                param, f"{param} must be token ids below {self.vocab_size} but has {highest}"
            )

    def _check_length(self, num_characters: int) -> None:
        """Refuses texts that are too long with any tokens, before work is spent on them.

        Raises:
            ApiError: It is too long.
        """
        if self.max_characters is not None and num_characters > self.max_characters:
            assert self.max_model_len is not None
            raise context_exceeded(
                self.max_model_len, f"the prompt has {num_characters} characters, which is more"
            )

    def truncate(
        self,
        tokens: list[int],
        limit: int | None,
        num_answer: int | None,
        side: Literal["left", "right"] | None = None,
    ) -> list[int]:
        """Keeps the last tokens of a prompt, or the first ones.

        Args:
            limit: Number of tokens; -1 keeps as many as leave room for the answer, None keeps all.
            num_answer: Maximum tokens of the answer; None leaves a quarter of the context free, at
                most `_ROOM_FOR_ANSWER`.
            side: "right" keeps the first tokens, "left" and None the last ones.
        """
        if limit is None:
            return tokens
        if limit == 0:
            raise bad_request("truncate_prompt_tokens", "truncate_prompt_tokens must not be 0")
        max_len = self.max_model_len
        if limit == -1:
            if max_len is None:
                return tokens
            room = min(max_len // 4, _ROOM_FOR_ANSWER) if num_answer is None else num_answer
            # The engine refuses an answer that needs the whole context.
            limit = max(1, max_len - max(1, room))
            return tokens[:limit] if side == "right" else tokens[-limit:]
        if max_len is not None and limit > max_len:
            raise bad_request(
                "truncate_prompt_tokens",
                f"truncate_prompt_tokens must be at most {max_len} but got {limit}",
            )
        return tokens[:limit] if side == "right" else tokens[-limit:]
