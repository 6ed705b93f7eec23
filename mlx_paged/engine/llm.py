"""`LLM`: the engine for scripts. Prompts in, answers out."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlx_paged.engine.config import EngineConfig
from mlx_paged.engine.engine import Engine, EngineStats
from mlx_paged.engine.outputs import RequestOutput, SequenceUpdate
from mlx_paged.engine.sampling_params import SamplingParams
from mlx_paged.errors import InvalidParameterError
from mlx_paged.model.loader import LoadedModel, load
from mlx_paged.ops import OnKernel

Prompt = str | Sequence[int]
Message = Mapping[str, Any]

__all__ = ["LLM", "RequestOutput", "SamplingParams"]


class LLM:
    """A model with an engine around it.

    Example:
        >>> llm = LLM()
        >>> [output] = llm.chat([{"role": "user", "content": "Return the n-th Fibonacci number"}])
        >>> print(output.outputs[0].text)

    Args:
        model: a directory in mlx-lm's format, a Hugging Face id, or a model already loaded; None:
            the model embedded in this package.
        dtype: see `mlx_paged.load`.
        on_kernel: see `Engine`.
        options: fields of `EngineConfig`.

    Raises:
        ModelLoadError, UnsupportedModelError: see `mlx_paged.load`.
    """

    def __init__(
        self,
        model: str | Path | LoadedModel | None = None,
        *,
        dtype: str = "auto",
        on_kernel: OnKernel | None = None,
        **options: Any,
    ) -> None:
        config = EngineConfig(**options)
        loaded = model if isinstance(model, LoadedModel) else load(model, dtype=dtype)
        # (No `gc.freeze` as on the engine's thread: it would affect the whole process, and
        # keep an `LLM` that is dropped.)
        self.engine = Engine(loaded, config, on_kernel=on_kernel)
        self._ids = itertools.count()

    @property
    def tokenizer(self) -> Any:
        """mlx-lm's tokenizer of the model."""
        return self.engine.tokenizer

    def stats(self) -> EngineStats:
        """The engine's statistics."""
        return self.engine.stats()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Completes prompts, all at once.

        Args:
            prompts: a text, a list of token ids, or a sequence of either.
            params: for all prompts, or one for each.

        Returns:
            One output for each prompt, in their order.
        """
        outputs, inbox = self._add(_as_prompts(prompts), params)
        for _ in self._run(outputs, inbox):
            pass
        return outputs

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answers conversations, all at once.

        Args:
            messages: one conversation (messages with `role` and `content`), or a sequence of them.
            params: for all conversations, or one for each.
        """
        return self.generate(self.render_chats(messages), params)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[SequenceUpdate]:
        """Completes prompts, all at once, and yields every token as it comes.

        `SequenceUpdate.request_id` is the prompt's index, "0" for the first. Leaving the loop early
        aborts what is unfinished.
        """
        outputs, inbox = self._add(_as_prompts(prompts), params)
        place = {output.request_id: str(i) for i, output in enumerate(outputs)}
        for update in self._run(outputs, inbox):
            yield update._replace(request_id=place[update.request_id])

    def render_chats(
        self, messages: Sequence[Message] | Sequence[Sequence[Message]]
    ) -> list[list[int]]:
        """Tokens of conversations by the model's chat template, ready for the answer."""
        if not self.tokenizer.has_chat_template:
            raise InvalidParameterError(
                "messages", "a prompt: the model has no chat template", messages
            )
        chats = [messages] if messages and isinstance(messages[0], Mapping) else messages
        return [
            self.tokenizer.apply_chat_template(list(chat), add_generation_prompt=True)
            for chat in chats
        ]

    def _add(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> tuple[list[RequestOutput], _Inbox]:
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise InvalidParameterError(
                "params", f"one for all or one for each of {len(prompts)} prompts", len(params)
            )
        outputs: list[RequestOutput] = []
        inbox = _Inbox()
        try:
            for prompt, p in zip(prompts, params):
                text = prompt if isinstance(prompt, str) else None
                tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
                request_id = str(next(self._ids))
                outputs.append(
                    self.engine.add_request(request_id, tokens, p, prompt=text, sink=inbox)
                )
        except Exception:
            # One prompt of several is refused: run none of them.
            self._end(outputs)
            raise
        return outputs, inbox

    def _run(self, outputs: list[RequestOutput], inbox: _Inbox) -> Iterator[SequenceUpdate]:
        """Steps the engine until these are finished; yields their updates.

        Calls may overlap (a `generate` inside a `stream`): whichever steps the engine,
        each one's updates are put in its own inbox.
        """
        try:
            while inbox or not all(output.finished for output in outputs):
                while inbox:
                    yield inbox.popleft()
                self.engine.step()
        finally:
            self._end(outputs)

    def _end(self, outputs: list[RequestOutput]) -> None:
        """Ends those of these that are unfinished and forgets them."""
        for output in outputs:
            self.engine.abort(output.request_id)
            output.settle()
        self.engine.settle()


class _Inbox(deque[SequenceUpdate]):
    """Updates of one call that have not been read yet."""

    def put(self, update: SequenceUpdate) -> None:
        self.append(update)


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]
