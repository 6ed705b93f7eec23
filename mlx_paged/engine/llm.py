"""`LLM`: the engine for scripts. Prompts in, answers out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from mlx_paged.engine.chat.messages import messages_of
from mlx_paged.engine.chat.renderer import ChatRenderer
from mlx_paged.engine.client import EngineRequest
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.local_client import Batch, LocalClient
from mlx_paged.engine.lora.request import LoRARequest
from mlx_paged.engine.media import TextWithMedia
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
    conversations_of,
    lora_requests_for,
    media_prompts_of,
    params_for,
    pooling_params_of,
    prompts_of,
)
from mlx_paged.engine.sampling_params import SamplingParams
from mlx_paged.engine.stats import EngineStats
from mlx_paged.errors import InvalidParameterError
from mlx_paged.kernels import OnKernel
from mlx_paged.model.loader import LoadedModel

Prompt = str | Sequence[int] | Mapping[str, Any] | TextWithMedia
Message = Mapping[str, Any]
LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None

__all__ = ["LLM", "RequestOutput", "SamplingParams"]


class LLM:
    """A model with its engine, for scripts.

    Several threads may call it; their requests share steps. Ctrl-C, or any other exception, ends
    the requests of its call, and the next call works (`Engine.recover`). A child process made by
    `fork` cannot use it and gets `ForkedProcessError`.

    Example:
        >>> llm = LLM()
        >>> [output] = llm.chat([{"role": "user", "content": "Return the n-th Fibonacci number"}])
        >>> print(output.outputs[0].text)

    Args:
        model: A directory in mlx-lm's format, a GGUF file, a Hugging Face id, or a loaded model.
            None means the model embedded in this package.
        dtype: See `mlx_paged.load`.
        on_kernel: See `Engine`.
        options: Fields of `EngineConfig`.

    Raises:
        ModelLoadError, UnsupportedModelError: See `mlx_paged.load`.
    """

    def __init__(
        self,
        model: str | Path | LoadedModel | None = None,
        *,
        dtype: str = "auto",
        on_kernel: OnKernel | None = None,
        **options: Any,
    ) -> None:
        self._client = LocalClient.from_model(model, dtype=dtype, on_kernel=on_kernel, **options)

    @property
    def engine(self) -> Engine:
        """The engine that runs the requests."""
        return self._client.engine

    @property
    def tokenizer(self) -> Any:
        """mlx-lm's tokenizer of the model."""
        return self.engine.tokenizer

    def stats(self) -> EngineStats:
        """Returns the engine's statistics."""
        return self.engine.stats()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: LoRARequests = None,
    ) -> list[RequestOutput]:
        """Completes prompts, all in one batch.

        Args:
            prompts: A text, a list or array of token ids, vLLM's mapping with `prompt` and
                `multi_modal_data` ({"image": an image or a list of them}), or a sequence of these.
                A text contains the model's placeholder for each item.
            params: For all prompts, or one for each.
            lora_request: One adapter for all prompts, or one for each; None: the base model.

        Returns:
            One output for each prompt, in order.

        Raises:
            AdapterError: An adapter cannot be read, or its kind is not supported.
            InvalidMediaError: An item is unusable, or the model does not support its kind.
        """
        with self._client.batch() as batch:
            self._submit(batch, prompts, params, lora_request)
            return batch.run()

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: LoRARequests = None,
    ) -> list[RequestOutput]:
        """Answers conversations, all in one batch.

        Args:
            messages: One conversation (messages with `role` and `content`), or a sequence of them.
                A content is a text, or a list of parts: OpenAI's (`text`, `image_url`, `video_url`,
                `input_audio`), or `{"type": "image", "image": ...}` (also video, audio) with a
                Pillow image, an array, bytes, a `pathlib.Path` or a URL. Answers may have
                `tool_calls` and `reasoning`. Content that the chat template does not take is
                rewritten, as on the server; a warning names anything lost.
            params: For all conversations, or one for each.
            lora_request: One adapter for all conversations, or one for each; None: the base model.

        Raises:
            InvalidMediaError: An item is unusable, or the model does not support its kind.
            InvalidParameterError: An invalid message, or a model without a chat template.
            TemplateRefusal: The template refuses a conversation in every form.
        """
        return self.generate(self.chat_prompts(messages), params, lora_request=lora_request)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: LoRARequests = None,
    ) -> Iterator[SequenceUpdate]:
        """Completes prompts, all in one batch, and yields every token as it arrives.

        `SequenceUpdate.request_id` is the index of the prompt, from "0". Leaving the loop early
        aborts all unfinished requests.
        """
        with self._client.batch(streams=True) as batch:
            self._submit(batch, prompts, params, lora_request)
            for updates in batch.steps():
                yield from updates

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: PoolingParams | None = None,
        *,
        lora_request: LoRARequests = None,
    ) -> list[EmbeddingRequestOutput]:
        """Returns the vectors of texts, all in one batch; for `LLM(runner="pooling")`.

        Args:
            prompts: A text, a list or array of token ids, or a sequence of these.
            params: For all prompts.
            lora_request: One adapter for all prompts, or one for each; None: the base model.

        Returns:
            One output for each prompt, in order.

        Raises:
            AdapterError: An adapter that cannot be read, or is of a kind that is not served.
            InvalidParameterError: The runner is "generate", or the model classifies; see also
                `PoolingParams`.
            StepError: The model failed on one of them.
        """
        given = self.engine.config.pooler_config
        if getattr(given, "classifier_from_token", None) is not None:
            expected = "None to embed texts; `score` has what this model makes of pairs,"
            raise InvalidParameterError("classifier_from_token", expected, given)
        if self.engine.labels:
            expected = "one that makes embeddings; `classify` has what this one makes of texts,"
            raise InvalidParameterError("model", expected, self.engine.labels)
        return self._pool(prompts_of(prompts), pooling_params_of(params), lora_request)

    def classify(
        self, prompts: Prompt | Sequence[Prompt], params: PoolingParams | None = None
    ) -> list[ClassificationRequestOutput]:
        """Classifies texts, all in one batch; for a model with a classification layer.

        Args:
            prompts: See `embed`.
            params: For all prompts. With `normalize=False`, the result is the layer's outputs
                instead of probabilities.

        Returns:
            One output for each prompt, in order.

        Raises:
            InvalidParameterError: The model has no such layer; see also `embed`.
            StepError: The model failed on one of them.
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
        """Scores text pairs by the cosine of their embeddings; for `LLM(runner="pooling")`.

        With `classifier_from_token` (see `PoolerConfig`), the model scores each pair itself.

        Args:
            text_1: One text to compare with each of `text_2`, or as many texts as `text_2` has.
            text_2: One text, or several.
            params: For all texts; `normalize` has no effect.
            chat_template: Jinja source for a query and a document if the model scores pairs; None
                concatenates the two texts.

        Returns:
            One output for each of `text_2`.

        Raises:
            InvalidParameterError: The numbers of texts do not match; see also `embed`.
            StepError: The model failed on one of them.
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
        """Returns the tokens of conversations as the chat template renders them for an answer."""
        return [
            self.engine.intake.encode(prompt, "messages").token_ids
            for prompt in self.chat_prompts(messages)
        ]

    def chat_prompts(
        self, messages: Sequence[Message] | Sequence[Sequence[Message]]
    ) -> list[list[int] | TextWithMedia]:
        """Returns conversations as prompts for `generate` and `stream`: tokens, or text with media.

        Args:
            messages: See `chat`.

        Raises:
            InvalidMediaError, InvalidParameterError, TemplateRefusal: See `chat`.
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

    def _submit(
        self,
        batch: Batch,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        lora_request: LoRARequests,
    ) -> None:
        given = media_prompts_of(prompts)
        adapters = lora_requests_for(lora_request, len(given))
        for i, (prompt, each) in enumerate(zip(given, params_for(params, len(given)))):
            request = EngineRequest(prompt, each, lora_request=adapters[i])
            batch.submit(request, f"prompts[{i}]")

    def _pool(
        self,
        prompts: list[str | list[int]],
        params: PoolingParams,
        lora_request: LoRARequests = None,
    ) -> list[EmbeddingRequestOutput]:
        adapters = lora_requests_for(lora_request, len(prompts))
        with self._client.batch() as batch:
            for i, prompt in enumerate(prompts):
                request = EngineRequest(prompt, params, lora_request=adapters[i])
                batch.submit(request, f"prompts[{i}]")
            return [EmbeddingRequestOutput.of(output) for output in batch.run()]
