"""`LLM`: the engine for scripts. Prompts in, answers out."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from mlx_paged.engine import gc_pause
from mlx_paged.engine.chat.messages import messages_of
from mlx_paged.engine.chat.renderer import ChatRenderer
from mlx_paged.engine.config import EngineConfig
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.guard import check_process
from mlx_paged.engine.media.loader import MediaLoader, loader_of
from mlx_paged.engine.media.prompt import PreparedMedia, check_kinds, media_model_of, prepare
from mlx_paged.engine.outputs import RequestOutput, SequenceUpdate
from mlx_paged.engine.pooling.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    cosine,
    joined,
    pairs_of,
)
from mlx_paged.engine.pooling.params import PoolingParams
from mlx_paged.engine.request_options import (
    TextWithMedia,
    conversations_of,
    media_prompts_of,
    params_for,
    pooling_params_of,
    prompts_of,
)
from mlx_paged.engine.sampling_params import SamplingParams
from mlx_paged.engine.stats import EngineStats
from mlx_paged.errors import ForkedProcessError, InvalidParameterError
from mlx_paged.model.loader import LoadedModel, load
from mlx_paged.model.media_text import unmarked
from mlx_paged.ops import OnKernel

Prompt = str | Sequence[int] | Mapping[str, Any] | TextWithMedia
Message = Mapping[str, Any]

# Seconds after which a thread looks whether another one's steps have served it.
_TURN = 0.001

__all__ = ["LLM", "RequestOutput", "SamplingParams"]


class LLM:
    """A model with an engine around it.

    Several threads may call it: their requests run in the same steps. Ctrl-C, or any other
    exception, ends the requests of the call that it leaves; the next call works
    (`Engine.recover`). A process made by `fork` cannot use it, and says so.

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
        check_process()
        config = EngineConfig(**options)
        loaded = model if isinstance(model, LoadedModel) else load(model, dtype=dtype)
        # (No `gc.freeze` as on the engine's thread: it would affect the whole process, and
        # keep an `LLM` that is dropped. `gc_pause` keeps collections out of steps.)
        self.engine = Engine(loaded, config, on_kernel=on_kernel)
        self._ids = itertools.count()
        self._turn = threading.RLock()  # held by a thread that waits to add a request
        self._left: deque[_Call] = deque()  # calls whose requests are to be ended
        self._media: MediaLoader | None = None  # once there was a prompt with media

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
            prompts: a text, a list (or an array) of token ids, vLLM's mapping with `prompt` and
                `multi_modal_data` ({"image": a picture or a list of them}), or a sequence of these.
                A text has the model's placeholder where an item belongs.
            params: for all prompts, or one for each.

        Returns:
            One output for each prompt, in their order.

        Raises:
            InvalidMediaError: an item that cannot be used, or that the model does not take.
        """
        call = _Call()
        # (No generator, as in `stream`: an exception in this frame would not end it.)
        try:
            self._add(call, media_prompts_of(prompts), params, sink=None)
            while not call.finished:
                self._step()
        finally:
            self._end(call)
        return call.outputs

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answers conversations, all at once.

        Args:
            messages: one conversation (messages with `role` and `content`), or a sequence of them.
                A content is a text, or a list of parts: OpenAI's (`text`, `image_url`, `video_url`,
                `input_audio`), or `{"type": "image", "image": ...}` (also video, audio) with a
                picture of Pillow, an array, bytes, a `pathlib.Path` or a URL. Answers may have
                `tool_calls` and `reasoning`. What the chat template does not take is written
                differently, as the server does it; a warning names what is lost.
            params: for all conversations, or one for each.

        Raises:
            InvalidMediaError: an item that cannot be used, or that the model does not take.
            InvalidParameterError: a message that cannot be, or a model without a chat template.
            TemplateRefusal: the template takes a conversation in no form.
        """
        return self.generate(self.chat_prompts(messages), params)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[SequenceUpdate]:
        """Completes prompts, all at once, and yields every token as it comes.

        `SequenceUpdate.request_id` is the prompt's index, "0" for the first. Leaving the loop early
        aborts what is unfinished.
        """
        call, inbox = _Call(), _Inbox()
        try:
            self._add(call, media_prompts_of(prompts), params, sink=inbox)
            place = {request_id: str(i) for i, request_id in enumerate(call.request_ids)}
            while inbox or not call.finished:
                while inbox:
                    update = inbox.popleft()
                    yield update._replace(request_id=place[update.request_id])
                if not call.finished:
                    self._step()
        finally:
            self._end(call)

    def embed(
        self, prompts: Prompt | Sequence[Prompt], params: PoolingParams | None = None
    ) -> list[EmbeddingRequestOutput]:
        """The vectors of texts, all at once; for `LLM(runner="pooling")`.

        Args:
            prompts: a text, a list (or an array) of token ids, or a sequence of either.
            params: for all of them.

        Returns:
            One output for each prompt, in their order.

        Raises:
            InvalidParameterError: the runner is "generate", or the model classifies; see also
                `PoolingParams`.
            StepError: the model failed on one of them.
        """
        given = self.engine.config.pooler_config
        if getattr(given, "classifier_from_token", None) is not None:
            expected = "None to embed texts; `score` has what this model makes of pairs,"
            raise InvalidParameterError("classifier_from_token", expected, given)
        if self.engine.labels:
            expected = "one that makes embeddings; `classify` has what this one makes of texts,"
            raise InvalidParameterError("model", expected, self.engine.labels)
        return self._pool(prompts_of(prompts), pooling_params_of(params))

    def classify(
        self, prompts: Prompt | Sequence[Prompt], params: PoolingParams | None = None
    ) -> list[ClassificationRequestOutput]:
        """The classes of texts, all at once; for a model with a classification layer.

        Args:
            prompts: see `embed`.
            params: for all of them; with `normalize=False` the layer's outputs instead of
                probabilities.

        Returns:
            One output for each prompt, in their order.

        Raises:
            InvalidParameterError: the model has no such layer; see also `embed`.
            StepError: the model failed on one of them.
        """
        if not self.engine.labels:
            expected = "one that classifies texts (...ForSequenceClassification)"
            raise InvalidParameterError("model", expected, self.engine.config.runner)
        return [
            ClassificationRequestOutput(
                output.request_id,
                output.prompt,
                output.prompt_token_ids,
                ClassificationOutput(output.outputs.embedding),
                output.num_cached_tokens,
            )
            for output in self._pool(prompts_of(prompts), pooling_params_of(params))
        ]

    def score(
        self,
        text_1: Prompt | Sequence[Prompt],
        text_2: Prompt | Sequence[Prompt],
        params: PoolingParams | None = None,
        *,
        chat_template: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """How near texts are: the cosines of their vectors; for `LLM(runner="pooling")`.

        With `classifier_from_token` (see `PoolerConfig`): what the model says of each pair.

        Args:
            text_1: one text, which is compared with each of the others, or as many as those.
            text_2: one text or several.
            params: for all of them; `normalize` has no effect.
            chat_template: Jinja source for a query and a document, where the model scores pairs;
                None: one text behind the other.

        Returns:
            One output for each of `text_2`.

        Raises:
            InvalidParameterError: the numbers of texts do not fit; see also `embed`.
            StepError: the model failed on one of them.
        """
        sides = [prompts_of(text_1), prompts_of(text_2)]
        pairs = pairs_of(len(sides[0]), len(sides[1]), fields=("text_1", "text_2"))
        params = replace(pooling_params_of(params), normalize=True)
        if len(self.engine.labels) > 1:
            expected = "one of a single class, or one that makes embeddings"
            raise InvalidParameterError("model", expected, self.engine.labels)
        if self.engine.info.scores_pairs:
            texts = [
                joined(self.tokenizer, sides[0][i], sides[1][j], chat_template) for i, j in pairs
            ]
            return [
                ScoringRequestOutput(
                    output.request_id,
                    output.prompt_token_ids,
                    ScoringOutput(output.outputs.embedding[0]),
                    output.num_cached_tokens,
                )
                for output in self._pool([*texts], params)
            ]
        if chat_template is not None:
            expected = "None where texts are embedded one by one"
            raise InvalidParameterError("chat_template", expected, chat_template)
        found = self._pool([*sides[0], *sides[1]], params)
        first, second = found[: len(sides[0])], found[len(sides[0]) :]
        return [
            ScoringRequestOutput(
                f"{first[i].request_id}-{second[j].request_id}",
                [*first[i].prompt_token_ids, *second[j].prompt_token_ids],
                ScoringOutput(cosine(first[i].outputs.embedding, second[j].outputs.embedding)),
                first[i].num_cached_tokens + second[j].num_cached_tokens,
            )
            for i, j in pairs
        ]

    def render_chats(
        self, messages: Sequence[Message] | Sequence[Sequence[Message]]
    ) -> list[list[int]]:
        """Tokens of conversations by the model's chat template, ready for the answer."""
        return [
            self._prepared(prompt, "messages").prompt.token_ids
            if isinstance(prompt, TextWithMedia)
            else prompt
            for prompt in self.chat_prompts(messages)
        ]

    def chat_prompts(
        self, messages: Sequence[Message] | Sequence[Sequence[Message]]
    ) -> list[list[int] | TextWithMedia]:
        """Conversations as prompts for `generate` and `stream`: tokens, or a text with its media.

        Args:
            messages: see `chat`.

        Raises:
            InvalidMediaError: see `chat`.
            InvalidParameterError: a message that cannot be, or a model without a chat template.
            TemplateRefusal: the template takes a conversation in no form.
        """
        if not self.tokenizer.has_chat_template:
            raise InvalidParameterError(
                "messages", "a prompt: the model has no chat template", messages
            )
        chats = conversations_of(messages)
        names = ["messages"] if len(chats) == 1 else [f"messages[{i}]" for i in range(len(chats))]
        io = self.engine.config.media_options.io
        texts = [
            self._chats.render(messages_of(chat, name, io)) for chat, name in zip(chats, names)
        ]
        return [
            TextWithMedia(each.text, each.sources)
            if each.sources
            else self._chats.tokens(each.text)
            for each in texts
        ]

    @cached_property
    def _chats(self) -> ChatRenderer:
        return ChatRenderer.of(self.engine)

    def _prepared(self, prompt: TextWithMedia, name: str) -> PreparedMedia:
        """Loads the media of a prompt, and makes its tokens."""
        model, sources = media_model_of(self.engine), prompt.sources
        check_kinds(sources, model, self.engine.media_reason)
        if self._media is None:
            self._media = loader_of(self.engine)
        return prepare(model, prompt.text, self._media.load(sources), name)

    def _add(
        self,
        call: _Call,
        prompts: list[str | list[int] | TextWithMedia],
        params: SamplingParams | Sequence[SamplingParams] | None,
        sink: _Inbox | None,
    ) -> None:
        check_process()
        self._end_left()
        each = params_for(params, len(prompts))
        for i, (prompt, p) in enumerate(zip(prompts, each)):
            media: dict[str, Any] = {}
            text: str | None
            if isinstance(prompt, TextWithMedia):
                prepared = self._prepared(prompt, f"prompts[{i}]")
                text, media = unmarked(prompt.text), {"media": prepared}
                tokens = prepared.prompt.token_ids
            else:
                text = prompt if isinstance(prompt, str) else None
                tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            request_id = str(next(self._ids))
            call.request_ids.append(request_id)  # (before: it may be added, and then interrupted)
            with self._turn:
                output = self.engine.add_request(
                    request_id, tokens, p, prompt=text, sink=sink, **media
                )
            call.outputs.append(output)

    def _pool(
        self, prompts: list[str | list[int]], params: PoolingParams
    ) -> list[EmbeddingRequestOutput]:
        call = _Call()
        try:
            self._add_to_pool(call, prompts, params)
            while not call.finished:
                self._step()
        finally:
            self._end(call)
        return [EmbeddingRequestOutput.of(output) for output in call.outputs]

    def _add_to_pool(
        self, call: _Call, prompts: list[str | list[int]], params: PoolingParams
    ) -> None:
        check_process()
        self._end_left()
        for prompt in prompts:
            text = prompt if isinstance(prompt, str) else None
            tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            tokens = params.truncated(tokens, self.engine.max_request_len)
            request_id = str(next(self._ids))
            call.request_ids.append(request_id)  # (as in `_add`)
            with self._turn:
                output = self.engine.add_request(request_id, tokens, params, prompt=text)
            call.outputs.append(output)

    def _step(self) -> None:
        """Steps the engine, unless another thread does: its steps serve all calls.

        Calls of one thread may overlap too (a `generate` inside a `stream`): whichever steps the
        engine, the updates of each are put in its own inbox.
        """
        if self.engine.is_busy:
            time.sleep(_TURN)
            return
        with self._turn:  # others that wait to add a request come first
            pass
        with gc_pause.gc_paused():
            self.engine.step()

    def _end(self, call: _Call) -> None:
        """Ends those requests of a call that are unfinished, and forgets them."""
        self._left.append(call)
        gc_pause.resume_gc()  # (an exception from outside may have come before its step's own end)
        with suppress(ForkedProcessError):  # (a child drops the stream that it inherited)
            self._end_left()
        for output in call.outputs:
            output.settle()

    def _end_left(self) -> None:
        """Ends what calls have left; here and not in `_end`, as that may be interrupted too."""
        for call in list(self._left):
            if not call.finished:
                for request_id in call.request_ids:
                    self.engine.abort(request_id)
            if not self.engine.is_busy:  # (another thread's steps leave nothing behind, either)
                self.engine.settle()
            with suppress(ValueError):  # (another thread did the same)
                self._left.remove(call)


class _Call:
    """The requests of one call.

    Attributes:
        request_ids: Of all that may have been added.
        outputs: Of those that are known to have been.
    """

    def __init__(self) -> None:
        self.request_ids: list[str] = []
        self.outputs: list[RequestOutput] = []

    @property
    def finished(self) -> bool:
        """True if all its requests have ended."""
        return len(self.outputs) == len(self.request_ids) and all(
            output.finished for output in self.outputs
        )


class _Inbox(deque[SequenceUpdate]):
    """Updates of one call that have not been read yet."""

    def __init__(self) -> None:
        super().__init__()
        self._ended: set[tuple[str, int]] = set()

    def put(self, update: SequenceUpdate) -> None:
        if update.finish_reason is not None:
            sequence = update.request_id, update.index
            if sequence in self._ended:
                return  # (see `UpdateSink.put`)
            self._ended.add(sequence)
        self.append(update)
