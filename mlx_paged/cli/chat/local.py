"""An engine in this process: earlier turns of a conversation come from its prefix cache."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any

from mlx_paged.cli.chat.conversation import Message, Turn
from mlx_paged.cli.entry import deferred_interrupt
from mlx_paged.engine.llm import LLM
from mlx_paged.engine.outputs import RequestOutput
from mlx_paged.engine.sampling_params import SamplingParams
from mlx_paged.errors import MlxPagedError
from mlx_paged.server.config import GenerationDefaults

_ID = "chat"


class LocalBackend:
    """See `Backend`.

    Args:
        model: as for `mlx_paged.load`.
        name: what to call it.
        engine_options: fields of `EngineConfig`.
    """

    def __init__(self, model: str | None, name: str, **engine_options: Any) -> None:
        self._llm = LLM(model, **engine_options)
        if not self._llm.tokenizer.has_chat_template:
            raise MlxPagedError(
                f"{name} has no chat template: complete texts with "
                "'mlx-paged generate --ignore-chat-template'"
            )
        self.model = name
        self.turn = Turn()
        # The model's defaults replace ours; without a limit it is as many tokens as fit.
        own = GenerationDefaults.of(self._llm.engine.generation_config)
        self.defaults: dict[str, Any] = {
            "temperature": 0.7,
            **own.sampling,
            "max_tokens": own.max_new_tokens,
        }

    def answer(self, messages: list[Message], params: dict[str, Any]) -> Generator[str, None, None]:
        """See `Backend`."""
        engine = self._llm.engine
        prompt = self._render(messages)
        output = engine.add_request(_ID, prompt, SamplingParams(**{**self.defaults, **params}))
        self.turn = Turn(prompt_tokens=len(prompt))
        try:
            with deferred_interrupt() as interrupted:
                while engine.has_unfinished and not output.finished:
                    for update in engine.step():
                        if update.error is not None:
                            raise update.error
                        if update.text:
                            yield update.text
                    if interrupted.is_set():
                        raise KeyboardInterrupt
        finally:
            engine.abort(_ID)
            engine.settle()
            self._note(output)

    def _render(self, messages: list[Message]) -> list[int]:
        try:
            return self._llm.render_chats(messages)[0]
        except MlxPagedError:
            raise
        except Exception as error:  # templates may raise any error
            raise MlxPagedError(f"the model's chat template does not take this: {error}") from error

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
        stats = self._llm.stats()
        usage, block = stats.usage, self._llm.engine.config.block_size
        limit = self._llm.engine.max_model_len
        return [
            ("context", "any length" if limit is None else f"{limit} tokens"),
            ("KV blocks", f"{usage.num_usable_blocks} of {block} tokens"),
            ("of them cached", str(usage.num_cached_blocks)),
            ("steps", str(stats.num_steps)),
        ]

    def close(self) -> None:
        """See `Backend`."""
