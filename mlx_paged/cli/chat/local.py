"""LocalBackend: answers with an engine in this process, whose prefix cache has earlier turns."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping
from functools import cached_property
from typing import Any

from mlx_paged.cli.chat.attachments import refusal
from mlx_paged.cli.chat.conversation import Call, Message, Turn
from mlx_paged.cli.entry import deferred_interrupt
from mlx_paged.content import Kind
from mlx_paged.engine.chat.messages import messages_of
from mlx_paged.engine.chat.renderer import ChatRenderer, TemplateRefusal
from mlx_paged.engine.chat.tools_as_text import as_text
from mlx_paged.engine.client import EngineRequest
from mlx_paged.engine.local_client import LocalClient
from mlx_paged.engine.media import TextWithMedia
from mlx_paged.engine.outputs import RequestOutput, SequenceUpdate
from mlx_paged.engine.sampling_params import SamplingParams
from mlx_paged.errors import MlxPagedError
from mlx_paged.parsing import registry
from mlx_paged.parsing.answer import AnswerReader, answer_reader
from mlx_paged.parsing.definitions import Tool
from mlx_paged.parsing.events import ContentText
from mlx_paged.parsing.format import ToolFormat
from mlx_paged.parsing.hermes import HermesFormat
from mlx_paged.parsing.special_tokens import added_tokens, special_texts, special_token_ids
from mlx_paged.server.config import GenerationDefaults
from mlx_paged.templates.variables import knows_tools


class LocalBackend:
    """See `Backend`.

    Args:
        model: See `mlx_paged.load`.
        name: The name of the model to show.
        engine_options: Fields of `EngineConfig`.
    """

    def __init__(self, model: str | None, name: str, **engine_options: Any) -> None:
        self._client = LocalClient.from_model(model, **engine_options)
        self._engine = self._client.engine
        if not self._engine.tokenizer.has_chat_template:
            raise MlxPagedError(
                f"{name} has no chat template: complete texts with "
                "'mlx-paged generate --ignore-chat-template'"
            )
        self.model = name
        self.turn = Turn()
        self.tools: tuple[Tool, ...] = ()
        # The model's own defaults take precedence. max_tokens None: as many as fit.
        own = GenerationDefaults.of(self._engine.generation_config)
        self.defaults: dict[str, Any] = {
            "temperature": 0.7,
            **own.sampling,
            "max_tokens": own.max_new_tokens,
        }

    def answer(self, messages: list[Message], params: dict[str, Any]) -> Generator[str, None, None]:
        """See `Backend`."""
        prompt = self._prompt(messages)
        values = {**self.defaults, **params}
        if self.tools:
            values["skip_special_tokens"] = False  # Call markers are special tokens in many models.
        batch, reader = self._client.batch(streams=True), None
        try:
            output = batch.submit(EngineRequest(prompt, SamplingParams(**values)), "messages")
            self.turn = Turn(prompt_tokens=len(output.prompt_token_ids))
            if self.tools:
                reader = self._reader(output.prompt_token_ids)
            with deferred_interrupt() as interrupted:
                for updates in batch.steps():
                    for update in updates:
                        if update.error is not None:
                            raise update.error
                        if reader is not None:
                            yield from _read(reader, update)
                        elif update.text:
                            yield update.text
                    if interrupted.is_set():
                        raise KeyboardInterrupt
        finally:
            batch.close()
            for output in batch.outputs:
                self._note(output)
            if reader is not None:
                self._note_calls(reader)

    def _prompt(self, messages: list[Message]) -> list[int] | TextWithMedia:
        """Renders a conversation to tokens, or to text with its media."""
        plain = messages_of(messages, "messages", self._engine.config.media_options.io)
        offered = [tool.for_template() for tool in self.tools]
        has_tools = bool(offered) or any("tool_calls" in message for message in messages)
        if has_tools and self.describes_tools:
            plain, offered = as_text(plain, offered), []
        try:
            found = self._chats.render(plain, offered)
        except TemplateRefusal as error:
            raise MlxPagedError(f"the model's chat template does not take this: {error}") from error
        if found.sources:
            return TextWithMedia(found.text, found.sources)
        return self._chats.tokens(found.text)

    @cached_property
    def _chats(self) -> ChatRenderer:
        return ChatRenderer.of(self._engine)

    def refusal(self, kind: Kind) -> str | None:
        """See `Backend`."""
        engine = self._engine
        kinds = () if engine.media is None else engine.media.kinds
        return refusal(kind, kinds, self.model, engine.media_reason)

    @cached_property
    def describes_tools(self) -> bool:
        """True if a system message describes the tools, because the chat template does not, or its
        format of calls is unknown (as with ``serve --tool-template``)."""
        return self._own_format is None

    @cached_property
    def _own_format(self) -> ToolFormat | None:
        tokenizer = self._engine.tokenizer
        template = getattr(tokenizer, "chat_template", None) or ""
        if isinstance(template, Mapping):
            template = template.get("tool_use") or template.get("default") or ""
        if not knows_tools(str(template)):
            return None
        return registry.detect(str(template), added_tokens(tokenizer))

    def _reader(self, prompt: list[int]) -> AnswerReader:
        tokenizer, reasoning = self._engine.tokenizer, self._engine.reasoning_format
        added = added_tokens(tokenizer)
        tool_format = self._own_format or HermesFormat(added)
        special = special_texts(tokenizer, special_token_ids(tokenizer))
        ends = special_texts(tokenizer, tokenizer.eos_token_ids).values()
        return answer_reader(
            tool_format,
            reasoning,
            self.tools,
            prompt,
            added,
            special,
            ends=ends,
            new_id=self._chats.spelling().new_id,
        )

    def _note_calls(self, reader: AnswerReader) -> None:
        turn, answer = self.turn, reader.answer
        turn.reasoning = answer.reasoning
        turn.calls = [Call(c.id, c.name, c.arguments) for c in answer.calls if c.is_complete]
        if turn.calls and turn.finish_reason == "stop":
            turn.finish_reason = "tool_calls"

    def _note(self, output: RequestOutput) -> None:
        turn, metrics, [answer] = self.turn, output.metrics, output.outputs
        turn.cached_tokens = output.num_cached_tokens
        turn.completion_tokens = len(answer.token_ids)
        turn.ttft = metrics.time_to_first_token
        turn.seconds = (metrics.finished_time or time.monotonic()) - metrics.arrival_time
        reason = None if answer.finish_reason is None else answer.finish_reason.value
        turn.finish_reason = "stopped" if reason == "abort" else reason

    def facts(self) -> list[tuple[str, str]]:
        """See `Backend`."""
        stats = self._engine.stats()
        usage, block = stats.usage, self._engine.config.block_size
        limit = self._engine.max_model_len
        return [
            ("context", "any length" if limit is None else f"{limit} tokens"),
            ("KV blocks", f"{usage.num_usable_blocks} of {block} tokens"),
            ("of them cached", str(usage.num_cached_blocks)),
            ("steps", str(stats.num_steps)),
        ]

    def close(self) -> None:
        """See `Backend`."""
        self._engine.intake.close()


def _read(reader: AnswerReader, update: SequenceUpdate) -> Iterator[str]:
    """Yields the text of an update without reasoning and calls."""
    events = [event for token, text in update.tokens() for event in reader.feed(token, text)]
    if update.finish_reason is not None:
        events += reader.finish(is_cut=update.finish_reason != "stop")
    yield from (e.separator + e.text for e in events if isinstance(e, ContentText))
