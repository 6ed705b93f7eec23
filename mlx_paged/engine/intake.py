"""Intake: the path of every request into the engine.

`Intake.process` loads the media of a client's request, makes its tokens and calls `Intake.check`,
on any thread, because media, bad words and grammars may take longer than a step. `check` copies
data that the caller could change later; nothing after it checks a request again. `Intake.attach`
runs on the engine's thread, and gives the sequences of an admitted request their samplers and
outputs.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from array import array
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from mlx_paged.core import Request
from mlx_paged.engine import request_options
from mlx_paged.engine.client import EngineRequest
from mlx_paged.engine.config import EngineConfig
from mlx_paged.engine.detokenizer import IncrementalDetokenizer
from mlx_paged.engine.grammar import StructuredOutputs
from mlx_paged.engine.grammar.compiler import CompiledGrammar, GrammarCompiler
from mlx_paged.engine.lora.files import Adapter
from mlx_paged.engine.lora.request import LoRARequest, checked_request
from mlx_paged.engine.lora.store import AdapterStore, salted
from mlx_paged.engine.media import (
    MediaPrompts,
    PreparedMedia,
    SequenceMedia,
    TextWithMedia,
    check_prepared,
)
from mlx_paged.engine.output_processor import AnswerState, RequestState, UpdateSink
from mlx_paged.engine.outputs import CompletionOutput, DeferredText, RequestMetrics, RequestOutput
from mlx_paged.engine.pooling.params import PoolingParams, check_dimensions_fit
from mlx_paged.engine.pooling.runner import Classifier, PooledPrompt
from mlx_paged.engine.request_options import media_prompt_of
from mlx_paged.engine.sampling.logprobs import LogprobReport, PromptReport
from mlx_paged.engine.sampling.sequence_sampler import RequestSampling, SequenceSampler, TokenMask
from mlx_paged.engine.sampling_params import SamplingParams
from mlx_paged.errors import InvalidParameterError, RequestTooLargeError
from mlx_paged.parsing.reasoning import ReasoningFormat
from mlx_paged.parsing.special_tokens import special_token_ids


@dataclass(frozen=True, kw_only=True)
class CheckedRequest:
    """A request whose options are valid for this engine's model.

    Attributes:
        prompt_token_ids: For the output.
        tokens: The same as an array of `core.kv.tree.TOKEN_TYPE`, for the scheduler.
        prompt: The text of the tokens, for the output.
        sampling: Sampling settings; None if the request pools.
        media: The media of the prompt.
        adapter: The LoRA adapter; None for the base model.
        sink: Receives the request's updates as they are made, on the engine's thread.
    """

    request_id: str
    prompt_token_ids: list[int]
    tokens: array[int]
    params: SamplingParams | PoolingParams
    prompt: str | None
    priority: int
    background: bool
    timeout: float | None
    cache_salt: str | None
    sampling: RequestSampling | None
    media: PreparedMedia | None
    adapter: Adapter | None
    sink: UpdateSink | None


class EncodedPrompt(NamedTuple):
    """The tokens of a prompt; `text` and `media` are None if it has none."""

    token_ids: list[int]
    text: str | None = None
    media: PreparedMedia | None = None


class Intake:
    """Checks and prepares the requests of an engine's clients. Any thread may call it.

    Args:
        config: The engine's options, resolved for the model.
        tokenizer: mlx-lm's wrapper.
        vocab_size: Token ids are below this.
        reasoning_format: The model's reasoning format; None if it has none.
        media: The model's media processor; None if it takes only text.
        media_reason: Why it takes only text, if the checkpoint is multimodal.
        compiler: Compiles grammars; None if the engine pools.
        classifier: Classifies texts or scores pairs of them; None for other models.
        hidden_size: Size of an embedding; None if the engine generates.
        max_request_len: Maximum tokens of a prompt to be pooled.
        max_model_len: Maximum tokens that the model allows, whatever the pool holds.
        report: Adds token texts to log-probabilities.
        adapters: Reads adapters; None if the engine accepts none.
        default_adapter: The adapter of requests that name none.
    """

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Any,
        vocab_size: int,
        *,
        reasoning_format: ReasoningFormat | None,
        media: Any | None,
        media_reason: str | None,
        compiler: GrammarCompiler | None,
        classifier: Classifier | None,
        hidden_size: int | None,
        max_request_len: int,
        max_model_len: int | None,
        report: LogprobReport,
        adapters: AdapterStore | None = None,
        default_adapter: Adapter | None = None,
    ) -> None:
        self.config = config
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._reasoning_format = reasoning_format
        self.media_prompts = MediaPrompts(media, config.media_options, media_reason)
        self._compiler = compiler
        self._classifier = classifier
        self._hidden_size = hidden_size
        self._max_request_len = max_request_len
        self._max_model_len = max_model_len
        self._report = report
        self._adapters = adapters
        self._default_adapter = default_adapter
        self._eos_token_ids = frozenset(tokenizer.eos_token_ids)
        self._special_token_ids = special_token_ids(tokenizer)
        self._no_text = self._detokenizer(SamplingParams())  # of all pooled prompts

    @property
    def grammar_compiler(self) -> GrammarCompiler:
        """Compiles the grammars of structured outputs; any thread may use it.

        Raises:
            InvalidParameterError: The engine's runner is "pooling".
        """
        self._require_runner("generate")
        assert self._compiler is not None
        return self._compiler

    # Preparation.

    def close(self) -> None:
        """Ends the threads and processes that load media."""
        self.media_prompts.close()

    def process(
        self,
        request: EngineRequest,
        request_id: str,
        sink: UpdateSink | None = None,
        *,
        field: str = "prompt",
    ) -> CheckedRequest:
        """Loads the media of a request, makes its tokens, and checks it.

        Args:
            sink: Takes the request's updates on the thread that steps the engine.
            field: Name of the prompt in errors.

        Raises:
            MlxPagedError: See `EngineClient.submit`.
        """
        prompt = self.encode(media_prompt_of(field, request.prompt), field)
        return self._check_encoded(request, request_id, prompt, sink)

    async def process_async(
        self, request: EngineRequest, request_id: str, sink: UpdateSink | None = None
    ) -> CheckedRequest:
        """Like `process`, but other threads do everything that may take longer than a step."""
        given, params = media_prompt_of("prompt", request.prompt), request.params
        in_thread = partial(asyncio.get_running_loop().run_in_executor, None)
        if isinstance(given, TextWithMedia):
            media = await self.media_prompts.prepare_async(*given, "prompt")
            prompt = EncodedPrompt(media.prompt.token_ids, given.unmarked, media)
        elif isinstance(given, str):
            prompt = await in_thread(self.encode, given, "prompt")
        else:
            prompt = self.encode(given, "prompt")
        check = partial(self._check_encoded, request, request_id, prompt, sink)
        if not isinstance(params, SamplingParams):
            return check() if request.lora_request is None else await in_thread(check)
        if isinstance(params.structured_outputs, StructuredOutputs):
            # No thread waits for the compiler.
            compiler = self.grammar_compiler
            grammar = await compiler.compile_async(params.structured_outputs)
            return await in_thread(partial(check, grammar=grammar))
        # Tokenizing bad words or a prediction, or reading an adapter, can take longer than a step.
        is_slow = params.bad_words or params.prediction or request.lora_request is not None
        return await in_thread(check) if is_slow else check()

    def encode(self, prompt: str | list[int] | TextWithMedia, field: str) -> EncodedPrompt:
        """Returns the tokens of a prompt; loads its media on other threads and waits for them.

        Raises:
            InvalidMediaError: An item that cannot be used, or that the model does not take.
        """
        if isinstance(prompt, TextWithMedia):
            media = self.media_prompts.prepare(*prompt, field)
            return EncodedPrompt(media.prompt.token_ids, prompt.unmarked, media)
        if isinstance(prompt, str):
            return EncodedPrompt(self._tokenizer.encode(prompt), prompt)
        return EncodedPrompt(prompt)

    def _check_encoded(
        self,
        request: EngineRequest,
        request_id: str,
        prompt: EncodedPrompt,
        sink: UpdateSink | None,
        grammar: CompiledGrammar | None = None,
    ) -> CheckedRequest:
        token_ids = prompt.token_ids
        if isinstance(request.params, PoolingParams):
            token_ids = request.params.truncated(token_ids, self._max_request_len)
        return self.check(
            request_id,
            token_ids,
            request.params,
            prompt=prompt.text,
            priority=request.priority,
            background=request.background,
            timeout=request.timeout,
            cache_salt=request.cache_salt,
            token_mask=request.token_mask,
            media=prompt.media or request.media,
            grammar=grammar,
            lora_request=request.lora_request,
            sink=sink,
        )

    # Checks.

    def check(
        self,
        request_id: str,
        prompt_token_ids: SequenceOf[int],
        params: SamplingParams | PoolingParams | None = None,
        *,
        prompt: str | None = None,
        priority: int = 0,
        background: bool = False,
        timeout: float | None = None,
        cache_salt: str | None = None,
        token_mask: TokenMask | None = None,
        media: PreparedMedia | None = None,
        grammar: CompiledGrammar | None = None,
        lora_request: LoRARequest | None = None,
        sink: UpdateSink | None = None,
    ) -> CheckedRequest:
        """Checks a request, and copies its tokens. Any thread may call it; it may take a while.

        Args:
            request_id: Unique among unfinished requests.
            prompt_token_ids: At least one token; a list, or an array of integers. A prompt to be
                pooled is truncated by the caller.
            params: How to choose tokens and when to stop, or how to pool; None: the defaults of the
                engine's runner.
            prompt: The text of the tokens, for the output.
            priority, background, timeout, cache_salt, token_mask: See `EngineRequest`.
            media: The images, video and audio of the prompt, whose tokens are
                `media.prompt.token_ids`.
            grammar: The grammar of `params.structured_outputs`, if it was compiled before.
            lora_request: See `EngineRequest`.
            sink: Takes the request's updates as they are made, on the engine's thread.

        Raises:
            InvalidParameterError: An option of the wrong kind; parameters for the other runner; a
                token that the model does not have, in the prompt or in `params`; a grammar that is
                invalid or cannot be enforced; params that leave no token; media that the model does
                not take, or that are not this prompt's; more dimensions than the model's hidden
                states have; an adapter for an engine without them. (`state_of` checks the options
                that the scheduler works with.)
            AdapterError: See `AdapterStore.get`.
            RequestTooLargeError: A prompt to be pooled could never fit.
        """
        params = request_options.params_for_runner(params, self.config.runner)
        pools = isinstance(params, PoolingParams)
        self._require_runner("pooling" if pools else "generate")
        if media is not None:
            prompt_token_ids = self._known_token_ids(prompt_token_ids, media)
        ids, tokens = request_options.token_ids_of(
            "prompt_token_ids", prompt_token_ids, self._vocab_size
        )
        request_options.check_callables(token_mask, sink, prompt)
        adapter = self.adapter_of(lora_request)
        sampling = None
        if isinstance(params, PoolingParams):
            self._check_pooling(request_id, len(ids), params)
        else:
            sampling = self.sampling_of(params, tokens, token_mask, grammar)
        return CheckedRequest(
            request_id=request_id,
            prompt_token_ids=ids,
            tokens=tokens,
            params=params,
            prompt=prompt,
            priority=priority,
            background=background,
            timeout=timeout,
            cache_salt=self.config.salted(salted(adapter, cache_salt)),
            sampling=sampling,
            media=media,
            adapter=adapter,
            sink=sink,
        )

    def adapter_of(self, request: LoRARequest | None) -> Adapter | None:
        """Returns the adapter of a request, and reads its files if needed.

        Raises:
            AdapterError: See `AdapterStore.get`.
            InvalidParameterError: The engine takes no adapters.
        """
        request = checked_request(request)
        if request is None:
            return self._default_adapter
        return self._store_for(request).get(request)

    def add_lora(self, request: LoRARequest) -> None:
        """See `EngineClient.add_lora`."""
        self._store_for(request).load(request)

    def remove_lora(self, request: LoRARequest) -> None:
        """See `EngineClient.remove_lora`."""
        self._store_for(request).discard(request)

    def _store_for(self, request: LoRARequest) -> AdapterStore:
        if self._adapters is None:
            expected = "None for an engine without enable_lora"
            raise InvalidParameterError("lora_request", expected, request)
        return self._adapters

    def sampling_of(
        self,
        params: SamplingParams,
        prompt_token_ids: SequenceOf[int],
        token_mask: TokenMask | None = None,
        grammar: CompiledGrammar | None = None,
    ) -> RequestSampling:
        """Resolves parameters for this model.

        Compiles the grammar of `structured_outputs`, unless `grammar` is given.

        Raises:
            InvalidParameterError: A token in `params` that the model does not have, a grammar that
                is invalid or cannot be enforced, or parameters that leave no token.
        """
        return RequestSampling(
            params,
            prompt_token_ids,
            seed=secrets.randbits(64) if params.seed is None else params.seed,
            tokenizer=self._tokenizer,
            vocab_size=self._vocab_size,
            token_mask=token_mask,
            compiler=self.grammar_compiler,
            grammar=grammar,
            reasoning=self._reasoning_format,
        )

    def _require_runner(self, runner: str) -> None:
        if self.config.runner != runner:
            purpose = {"generate": "generates tokens", "pooling": "embeds texts"}[runner]
            raise InvalidParameterError(
                "runner", f"{runner!r} for an engine that {purpose}", self.config.runner
            )

    def _known_token_ids(
        self, prompt_token_ids: SequenceOf[int], media: PreparedMedia
    ) -> list[int]:
        """Validates a prompt's media; returns its token ids, all within the vocabulary.

        The id of a placeholder may lie beyond the vocabulary, where there is no logit.
        """
        model = self.media_prompts.processor
        if model is None:
            raise InvalidParameterError("media", "None for a model that takes text only", media)
        check_prepared(media, prompt_token_ids, model.kinds, rope=model.uses_rope_positions)
        known = list(prompt_token_ids)
        for span in media.prompt.spans:
            for row in span.rows:
                known[row] = min(known[row], self._vocab_size - 1)
        return known

    def _check_pooling(self, request_id: str, num_tokens: int, params: PoolingParams) -> None:
        assert self._hidden_size is not None
        check_dimensions_fit("dimensions", params.dimensions, self._hidden_size)
        if self._classifier is not None and params.dimensions is not None:
            expected = "None for a model that classifies texts or scores pairs of them"
            raise InvalidParameterError("dimensions", expected, params.dimensions)
        limit = self._max_request_len
        if num_tokens > limit:
            raise RequestTooLargeError(
                request_id,
                num_prompt_tokens=num_tokens,
                max_tokens=0,
                limit=limit,
                limited_by="max_model_len" if limit == self._max_model_len else "kv_cache",
            )

    # On the engine's thread.

    def state_of(self, checked: CheckedRequest) -> RequestState:
        """Makes the scheduler's request and the caller's output.

        Raises:
            InvalidParameterError: An empty prompt, or an invalid option of the scheduler's.
        """
        params, n = checked.params, 1
        if isinstance(params, SamplingParams):
            stop, n = params.stop_policy(self._eos_token_ids), params.n
        else:
            stop = params.stop_policy()
        request = Request(
            checked.request_id,
            checked.tokens,
            stop,
            n=n,
            priority=checked.priority,
            background=checked.background,
            timeout=checked.timeout,
            cache_salt=checked.cache_salt,
            read_prefix_cache=getattr(params, "prompt_logprobs", None) is None,
            media=() if checked.media is None else checked.media.spans,
            adapter=checked.adapter,
        )
        grammar = None if checked.sampling is None else checked.sampling.grammar
        output = RequestOutput(
            checked.request_id,
            checked.prompt,
            checked.prompt_token_ids,
            [CompletionOutput(i) for i in range(n)],
            RequestMetrics(arrival_time=time.monotonic()),
            relaxed=() if grammar is None else grammar.relaxed,
        )
        return RequestState(params, request, output, checked.sink)

    def attach(self, state: RequestState, checked: CheckedRequest) -> None:
        """Gives the sequences of an admitted request their samplers and their outputs."""
        state.request.state = state
        if isinstance(state.params, SamplingParams):
            self._attach_answers(state, state.params, checked)
        else:
            self._attach_pooling(state, state.params)

    def _attach_pooling(self, state: RequestState, params: PoolingParams) -> None:
        assert self.config.pooler is not None
        [sequence] = state.request.sequences
        sequence.sampler = sequence.prompt_report = PooledPrompt(
            state.request.num_prompt_tokens, self.config.pooler, params, self._classifier
        )
        sequence.answer = AnswerState(state, state.output.outputs[0], self._no_text)

    def _attach_answers(
        self, state: RequestState, params: SamplingParams, checked: CheckedRequest
    ) -> None:
        request, output = state.request, state.output
        assert checked.sampling is not None
        prompt_report = None
        if params.prompt_logprobs is not None:
            prompt_report = PromptReport(
                output.prompt_token_ids, params.prompt_logprobs, self._report
            )
            output.prompt_logprobs = prompt_report.positions
        of_media = None
        if checked.media is not None and request.prompt_media is not None:
            parts = getattr(checked.media, "parts", ())
            of_media = SequenceMedia(checked.media.prompt, request.prompt_media, parts)
        for sequence, completion in zip(request.sequences, output.outputs):
            sequence.media = of_media
            if params.logprobs is not None:
                completion.logprobs, completion.cumulative_logprob = [], 0.0
            sampler = sequence.sampler = SequenceSampler(checked.sampling, sequence.index)
            sequence.prompt_report = prompt_report
            detokenizer = self._detokenizer(params)
            text: IncrementalDetokenizer | DeferredText = detokenizer
            if not params.stop_strings:
                # The engine does not need the text, so it is decoded when it is read.
                tokens, start = sequence.tokens, request.num_prompt_tokens
                text = DeferredText(request.request_id, detokenizer, tokens, start)
            grammar = sampler if sampler.has_grammar else None
            sequence.answer = AnswerState(state, completion, text, grammar)
            sequence.stop_checker = sequence.answer.stop_checker

    def _detokenizer(self, params: SamplingParams) -> IncrementalDetokenizer:
        return IncrementalDetokenizer.of(self._tokenizer, params, self._special_token_ids)
