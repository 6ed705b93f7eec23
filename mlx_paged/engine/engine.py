"""The engine: continuous batching over one prefix-sharing KV store."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, fields, replace
from functools import partial

from mlx_paged import ops
from mlx_paged.core import (
    EncoderCacheStats,
    KVCounters,
    KVManager,
    KVUsage,
    Request,
    Scheduler,
    SchedulerOutput,
    Sequence,
)
from mlx_paged.engine import memory, request_options, warm_up
from mlx_paged.engine.config import EngineConfig
from mlx_paged.engine.detokenizer import DeferredText, IncrementalDetokenizer, special_token_ids
from mlx_paged.engine.executor import Executor, InProcessExecutor
from mlx_paged.engine.faults import reason_of
from mlx_paged.engine.grammar.compiler import CompiledGrammar, GrammarCompiler
from mlx_paged.engine.guard import EngineGuard
from mlx_paged.engine.kv_cache_config import KVCacheConfig
from mlx_paged.engine.media.step_media import (
    Prepared,
    SequenceMedia,
    StepMediaBuilder,
    check_prepared,
)
from mlx_paged.engine.output_processor import (
    AnswerState,
    OutputProcessor,
    RequestState,
    UpdateSink,
)
from mlx_paged.engine.outputs import (
    CompletionOutput,
    RequestMetrics,
    RequestOutput,
    SequenceUpdate,
)
from mlx_paged.engine.pooling.params import PoolingParams, prompts_of
from mlx_paged.engine.pooling.runner import Classifier, PooledPrompt, PoolingRunner
from mlx_paged.engine.runner import ModelRunner
from mlx_paged.engine.sampling.logprobs import LogprobReport, PromptReport
from mlx_paged.engine.sampling.masks import MaskSource, SequenceMasks
from mlx_paged.engine.sampling.sequence_sampler import RequestSampling, SequenceSampler, TokenMask
from mlx_paged.engine.sampling_params import SamplingParams
from mlx_paged.engine.step_columns import StepColumns
from mlx_paged.errors import (
    InvalidParameterError,
    MlxPagedError,
    RequestTooLargeError,
    UnsupportedModelError,
)
from mlx_paged.model.classification import ClassificationHead
from mlx_paged.model.loader import LoadedModel, model_directory
from mlx_paged.model.paged_model import PagedModel
from mlx_paged.model.prepare import prepare_kernels
from mlx_paged.model.wrap import build_paged_model
from mlx_paged.parsing.reasoning import format_of
from mlx_paged.platform import Platform

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineStats:
    """The engine's statistics at one moment.

    Attributes:
        usage: Where the blocks are now.
        group_usage: The same for the blocks of each window group, then for the state slots.
        counters: What happened to the KV store since the engine was made.
        num_running: Sequences that run.
        num_waiting: Sequences that wait.
        num_preemptions: Times a sequence lost its blocks to others.
        num_steps: Steps launched.
        max_used_blocks: Most blocks that sequences held at once.
        max_shared_blocks: Most blocks that more than one sequence held at once.
        memory: MLX's memory.
        num_faults: Steps that failed and were run again in parts.
        pool_copies: Whole-pool copies in this process; anything but 0 is a fault.
        num_recoveries: Times the engine was repaired after an exception out of a call.
        encoder_cache: Features of pictures, videos and sounds.
    """

    usage: KVUsage
    group_usage: tuple[KVUsage, ...]
    counters: KVCounters
    num_running: int
    num_waiting: int
    num_preemptions: int
    num_steps: int
    max_used_blocks: int
    max_shared_blocks: int
    memory: memory.MemoryUsage
    num_faults: int
    pool_copies: int
    num_recoveries: int = 0
    encoder_cache: EncoderCacheStats = field(default_factory=EncoderCacheStats)


class Engine:
    """Takes requests, runs steps, returns tokens and text.

    Any thread may call it; a call waits for the one that runs. A step that follows one of another
    thread does not overlap with it.

    An exception out of a call, of whatever kind and from wherever (Ctrl-C, `MemoryError`, a
    callback), leaves an engine that goes on: the next call repairs it first (`recover`).

    A child process made by `fork` cannot use it: every method raises `ForkedProcessError` there.

    Args:
        model: as `mlx_paged.load` returns it; it belongs to this engine from now on.
        config: options.
        on_kernel: on a GPU, called before each kernel that is compiled (Metal), and then before
            each kind of step of the warm-up, with how many are done and how many there are, and
            after the last.

    Attributes:
        max_model_len: Most tokens of prompt and answer together; None where only the pool limits.
        vocab_size: Token ids are below this.
        generation_config: The model's default sampling settings; the engine does not apply them.
        reasoning_format: How the model reasons; None: it does not, or in no known way.
        media: What the model takes besides text; None: nothing.
        media_reason: Why a multimodal model takes nothing else.
        on_launch: Called with the number of tokens of each step that is launched, by the thread
            that steps (for metrics; it must be quick).
    """

    def __init__(
        self,
        model: LoadedModel,
        config: EngineConfig | None = None,
        *,
        on_kernel: ops.OnKernel | None = None,
    ) -> None:
        self._guard = EngineGuard()
        platform = Platform.current()
        self.config = memory.with_step_tokens(
            (config or EngineConfig()).for_model(
                model_directory(model.name), model.config, classifies=model.head is not None
            ),
            platform,
        )
        self.tokenizer = model.tokenizer
        self.generation_config = model.generation_config
        self.media, self.media_reason = model.media, model.media_reason
        if self.media is not None and self.config.mm_processor_kwargs:
            self.media = self.media.with_options(self.config.mm_processor_kwargs)
        self._grammar_compiler: GrammarCompiler | None = None
        if self.config.runner == "generate":
            self._grammar_compiler = GrammarCompiler(  # (begins while the pools are made)
                self.tokenizer,
                model.vocab_size,
                self.tokenizer.eos_token_ids,
                timeout=self.config.structured_outputs_timeout,
                cache_size=self.config.structured_outputs_cache_size,
            )
        self.reasoning_format = format_of(self.config.reasoning_parser, self.tokenizer)
        paged = build_paged_model(
            model.model, model.config, block_size=self.config.block_size, platform=platform
        )
        _quantise(paged, self.config)
        paged.round_activations(self.config.cpu_activations)
        paged.repeats_steps = not self.config.enforce_eager
        limits = [model.max_model_len, paged.layout.max_context_len]
        model_limit = min((n for n in limits if n is not None), default=None)
        self.max_model_len = self.config.model_len(model_limit)
        paged.limit_contexts(self.max_model_len)
        kv_config = KVCacheConfig(paged.layout, self.config, self.max_model_len)
        # (A tokenizer may have more tokens than its model.)
        compiler = self._grammar_compiler
        masks = SequenceMasks(0 if compiler is None else compiler.num_words)
        self._runner = _runner(paged, self.config, kv_config, model, masks)
        #: Numbers of an embedding before `dimensions` cuts it; None where the engine generates.
        self.hidden_size = getattr(self._runner, "hidden_size", None)
        sizes, activations = memory.allocate_pools(
            self._runner, kv_config, self.config, model_limit, model.media
        )
        self._cache_limit = memory.limit_buffer_cache(
            activations, self.pool_bytes, 4 * self.config.max_num_seqs * model.vocab_size
        )
        prepare_kernels(paged, on_kernel)
        memory.limit_run_ahead(platform)
        if warm_up.is_needed(self.config, platform):
            warm_up.warm_up(self._runner, self.config, self.max_model_len, on_kernel)
        self._make_kv = partial(
            KVManager,
            sizes.num_blocks,
            self.config.block_size,
            enable_prefix_caching=self.config.enable_prefix_caching,
            windows=kv_config.window_specs(sizes),
            states=kv_config.state_spec(sizes),
        )
        self._kv = self._make_kv()
        self._scheduler = Scheduler(
            self.config.scheduler_config(
                model_limit,
                _feature_bytes(model),
                encodes_slowly=platform.on_cpu,
            ),
            self._kv,
        )
        self._executor: Executor = InProcessExecutor(self._runner)
        self._columns = StepColumns(
            masks,
            samples=self.config.runner == "generate",
            has_media=self._runner.media is not None,
        )
        self.vocab_size = model.vocab_size
        self._classifier = self._make_classifier(paged, model.head)
        #: Prompts that the model was trained to see before texts, by the name of their use.
        self.prompts = prompts_of(model_directory(model.name))
        self._eos_token_ids = frozenset(self.tokenizer.eos_token_ids)
        self._special_token_ids = special_token_ids(self.tokenizer)
        self._no_text = self._detokenizer(SamplingParams())  # of all embeddings
        self._report = LogprobReport(self.tokenizer)
        self._output_processor = OutputProcessor(self._scheduler, self._report)
        self._in_flight: SchedulerOutput | None = None
        self.on_launch: Callable[[int], None] | None = None
        self._num_steps = 0
        self._max_used_blocks = 0
        self._max_shared_blocks = 0
        self._left: deque[str] = deque()  # requests that were aborted in the middle of a call
        # Recovery.
        self._is_whole = True  # false while a call changes the engine, and after one that raised
        self._failed: Exception | None = None  # what the step before raised
        self._num_failed_steps = 0  # in a row
        self._num_recoveries = 0
        self._past = KVCounters()  # of KV stores that were given up,
        self._past_preemptions = 0  # and of their schedulers,
        self._past_encoder = EncoderCacheStats()  # and encoder caches

    # Requests.

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        priority: int = 0,
        background: bool = False,
        timeout: float | None = None,
        cache_salt: str | None = None,
        token_mask: TokenMask | None = None,
        sink: UpdateSink | None = None,
        sampling: RequestSampling | None = None,
        media: Prepared | None = None,
    ) -> RequestOutput:
        """Takes a request. Its output object is filled as the engine steps.

        Args:
            request_id: unique among unfinished requests.
            prompt_token_ids: at least one token; a list, or an array of integers.
            params: how to choose tokens, and when to stop.
            prompt: the text of the tokens, for the output.
            priority: lower is served first under the priority policy.
            background: served with what other requests leave, under either policy.
            timeout: seconds until the request ends with "timeout".
            cache_salt: requests of different salts share no cached blocks.
            token_mask: gives before each token those that may follow. (A grammar of
                `structured_outputs` takes much less time.)
            sink: takes the request's updates as they are made, on the engine's thread.
            sampling: `sampling_of` these arguments, where it was made before.
            media: the pictures, videos and sounds of the prompt, whose tokens are
                `media.prompt.token_ids`.

        Raises:
            InvalidParameterError: an option that is not of its kind; an empty prompt; a token that
                the model does not have, in the prompt or in `params`; a grammar that is invalid or
                cannot be enforced; params that leave no token; the engine's runner is "pooling";
                media that the model does not take, or that are not this prompt's; an item that has
                to be computed in one step, and no step is so large.
            RequestTooLargeError: prompt and answer could never fit.
            DuplicateRequestError: an unfinished request has this id.
            EngineOverloadedError: too many sequences wait.
        """
        self._enter()
        self._require_runner("generate")
        if media is not None:
            prompt_token_ids = self._media_token_ids(prompt_token_ids, media)
        prompt_token_ids, prompt_tokens = request_options.token_ids_of(
            "prompt_token_ids", prompt_token_ids, self.vocab_size
        )
        params = request_options.params_of(params)
        request_options.check_callables(token_mask, sink, prompt)
        if sampling is None:
            sampling = self.sampling_of(params, prompt_tokens, token_mask)
        request = Request(
            request_id,
            prompt_tokens,
            params.stop_policy(self._eos_token_ids),
            n=params.n,
            priority=priority,
            background=background,
            timeout=timeout,
            cache_salt=self.config.salted(cache_salt),
            read_prefix_cache=params.prompt_logprobs is None,
            media=() if media is None else media.spans,
        )
        output = RequestOutput(
            request_id,
            prompt,
            prompt_token_ids,
            [CompletionOutput(i) for i in range(params.n)],
            RequestMetrics(arrival_time=time.monotonic()),
            relaxed=() if sampling.grammar is None else sampling.grammar.relaxed,
        )
        state = RequestState(params, request, output, sink)
        self._submit(state, lambda: self._prepare(state, params, sampling, media))
        return output

    def _media_token_ids(self, prompt_token_ids: list[int], media: Prepared) -> list[int]:
        """The tokens of a prompt with media, which is checked, as far as the model has them."""
        if self.media is None:
            raise InvalidParameterError("media", "None for a model that takes text only", media)
        # (A placeholder's id may be beyond the vocabulary, where no logit is.)
        check_prepared(
            media, prompt_token_ids, self.media.kinds, rope=self.media.uses_rope_positions
        )
        known = list(prompt_token_ids)
        for span in media.prompt.spans:
            for row in span.rows:
                known[row] = min(known[row], self.vocab_size - 1)
        return known

    def add_pooling_request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: PoolingParams | None = None,
        *,
        prompt: str | None = None,
        priority: int = 0,
        background: bool = False,
        timeout: float | None = None,
        cache_salt: str | None = None,
        sink: UpdateSink | None = None,
    ) -> RequestOutput:
        """Takes a text to embed; `RequestOutput.pooled` is there when the request has ended.

        Args:
            params: what the request chooses; a prompt is cut by the caller.
            request_id, prompt_token_ids, prompt, priority, background, timeout, cache_salt, sink:
                see `add_request`.

        Raises:
            InvalidParameterError: the engine's runner is "generate"; an option that is not of its
                kind; an empty prompt; a token that the model does not have; more dimensions than
                the model's hidden states have.
            RequestTooLargeError: the prompt could never fit.
            DuplicateRequestError: an unfinished request has this id.
            EngineOverloadedError: too many sequences wait.
        """
        self._enter()
        self._require_runner("pooling")
        prompt_token_ids, prompt_tokens = request_options.token_ids_of(
            "prompt_token_ids", prompt_token_ids, self.vocab_size
        )
        params = request_options.pooling_params_of(params)
        request_options.check_callables(None, sink, prompt)
        assert self.config.pooler is not None and self.hidden_size is not None
        _check_dimensions("dimensions", params.dimensions, self.hidden_size)
        if self._classifier is not None and params.dimensions is not None:
            expected = "None for a model that classifies texts or scores pairs of them"
            raise InvalidParameterError("dimensions", expected, params.dimensions)
        num_tokens, limit = len(prompt_token_ids), self.max_request_len
        if num_tokens > limit:
            raise RequestTooLargeError(
                request_id,
                num_prompt_tokens=num_tokens,
                max_tokens=0,
                limit=limit,
                limited_by="max_model_len" if limit == self.max_model_len else "kv_cache",
            )
        request = Request(
            request_id,
            prompt_tokens,
            params.stop_policy(),
            priority=priority,
            background=background,
            timeout=timeout,
            cache_salt=self.config.salted(cache_salt),
        )
        output = RequestOutput(
            request_id,
            prompt,
            prompt_token_ids,
            [CompletionOutput(0)],
            RequestMetrics(arrival_time=time.monotonic()),
        )
        pooled = PooledPrompt(num_tokens, self.config.pooler, params, self._classifier)
        state = RequestState(params, request, output, sink)

        def prepare() -> None:
            [sequence] = request.sequences
            request.state = state
            sequence.sampler = sequence.prompt_report = pooled
            sequence.answer = AnswerState(state, output.outputs[0], self._no_text)

        self._submit(state, prepare)
        return output

    def _make_classifier(
        self, paged: PagedModel, head: ClassificationHead | None
    ) -> Classifier | None:
        if head is not None:
            return Classifier(head)
        pooler = self.config.pooler
        if pooler is None or pooler.classifier_from_token is None:
            return None
        vocabulary = self.tokenizer.get_vocab()
        ids = []
        for token in pooler.classifier_from_token:
            if vocabulary.get(token, self.vocab_size) >= self.vocab_size:
                expected = "tokens of the model's vocabulary"
                raise InvalidParameterError("pooler_config.classifier_from_token", expected, token)
            ids.append(vocabulary[token])
        return Classifier.of(paged, ids)

    @property
    def labels(self) -> tuple[str, ...]:
        """The classes of a model that classifies texts; empty: it makes embeddings of them."""
        return () if self._classifier is None else self._classifier.head.labels

    @property
    def scores_pairs(self) -> bool:
        """True if it scores pairs of texts and makes no embeddings."""
        return len(self.labels) == 1

    @property
    def grammar_compiler(self) -> GrammarCompiler:
        """Makes the grammars of structured outputs; any thread may use it.

        Raises:
            InvalidParameterError: the engine's runner is "pooling".
        """
        self._require_runner("generate")
        assert self._grammar_compiler is not None
        return self._grammar_compiler

    def _require_runner(self, runner: str) -> None:
        if self.config.runner != runner:
            purpose = {"generate": "generates tokens", "pooling": "embeds texts"}[runner]
            raise InvalidParameterError(
                "runner", f"{runner!r} for an engine that {purpose}", self.config.runner
            )

    def _submit(self, state: RequestState, prepare: Callable[[], None]) -> None:
        """Adds a request to the scheduler, then has its sequences prepared."""
        with self._guard.lock:
            self._refuse_within_call()
            with self._guard.busy:
                self._begin()
                if not self._has_work:
                    # Other parts of the process may have taken memory since.
                    memory.limit_run_ahead(self._runner.model.platform)
                self._is_whole = False
                try:
                    self._scheduler.add(state.request)
                except MlxPagedError:  # refused, and nothing has changed
                    self._is_whole = True
                    raise
                prepare()
                request_id = state.request.request_id
                self._output_processor.request_states[request_id] = state  # (from here on it is in)
                self._is_whole = True

    def _prepare(
        self,
        state: RequestState,
        params: SamplingParams,
        sampling: RequestSampling,
        media: Prepared | None,
    ) -> None:
        """Adds to a request's sequences how their tokens are chosen, and where they go."""
        request, output = state.request, state.output
        prompt_report = None
        if params.prompt_logprobs is not None:
            prompt_report = PromptReport(
                output.prompt_token_ids, params.prompt_logprobs, self._report
            )
            output.prompt_logprobs = prompt_report.positions
        request.state = state
        of_media = None
        if media is not None and request.prompt_media is not None:
            parts = getattr(media, "parts", ())
            of_media = SequenceMedia(media.prompt, request.prompt_media, parts)
        for sequence, completion in zip(request.sequences, output.outputs):
            sequence.media = of_media
            if params.logprobs is not None:
                completion.logprobs, completion.cumulative_logprob = [], 0.0
            sampler = sequence.sampler = SequenceSampler(sampling, sequence.index)
            sequence.prompt_report = prompt_report
            text = self._detokenizer(params)
            if not params.stop_strings:
                # The engine does not need its text: it is decoded when it is read.
                tokens, start = sequence.tokens, request.num_prompt_tokens
                deferred = DeferredText(request.request_id, text, tokens, start)
            sequence.answer = AnswerState(
                state,
                completion,
                text if params.stop_strings else deferred,
                sampler if sampler.has_grammar else None,
            )
            sequence.stop_checker = sequence.answer.stop_checker

    def sampling_of(
        self,
        params: SamplingParams,
        prompt_token_ids: SequenceOf[int],
        token_mask: TokenMask | None,
        grammar: CompiledGrammar | None = None,
    ) -> RequestSampling:
        """Resolves parameters for this model. Any thread may call it, as it may take long.

        It waits until the grammar of `structured_outputs` is compiled, unless it is given.

        Raises:
            InvalidParameterError: a token in `params` that the model does not have, a grammar that
                is invalid or cannot be enforced, or params that leave no token.
        """
        return RequestSampling(
            params,
            prompt_token_ids,
            seed=secrets.randbits(64) if params.seed is None else params.seed,
            tokenizer=self.tokenizer,
            vocab_size=self.vocab_size,
            token_mask=token_mask,
            compiler=self.grammar_compiler,
            grammar=grammar,
            reasoning=self.reasoning_format,
        )

    def _detokenizer(self, params: SamplingParams) -> IncrementalDetokenizer:
        return IncrementalDetokenizer(
            self.tokenizer,
            params.stop_strings,
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
            skip=self._special_token_ids if params.skip_special_tokens else (),
        )

    def request_state(self, request_id: str) -> RequestState | None:
        """Returns the engine's state of an unfinished request."""
        return self._output_processor.request_states.get(request_id)

    def request_states(self) -> list[RequestState]:
        """The unfinished requests, in order of arrival."""
        return list(self._output_processor.request_states.values())

    def abort(self, request_id: str) -> bool:
        """Ends a request; what it computed stays cached. Returns whether it was there.

        While a step runs, of another thread or of this one (a garbage collection may close a stream
        there), this does not wait for it: the request ends before the next one.
        """
        self._enter()
        if self.is_busy:
            self._left.append(request_id)
            return self.request_state(request_id) is not None
        with self._guard.lock, self._guard.busy:
            self._begin()
            return self._abort(request_id)

    def _abort(self, request_id: str) -> bool:
        state = self.request_state(request_id)
        if state is None:
            return False
        self._is_whole = False
        self._output_processor.abort(state)
        self._is_whole = True
        return True

    def settle(self) -> None:
        """Waits for a step in flight that no request needs any more, so that it holds no blocks."""
        self._enter()
        with self._guard.lock:
            if self.is_busy:
                return  # (within a step)
            with self._guard.busy:
                self._begin()
                while self._in_flight is not None and not self._scheduler.has_unfinished:
                    self._run_step()

    @property
    def has_unfinished(self) -> bool:
        """True if another `step` has anything to do."""
        return self._has_work or not self._is_whole

    @property
    def _has_work(self) -> bool:
        return self._scheduler.has_unfinished or self._in_flight is not None

    @property
    def is_busy(self) -> bool:
        """True if a thread is in a call at this moment."""
        return self._guard.busy.locked()

    # Recovery.

    @property
    def needs_recovery(self) -> bool:
        """True if a call raised in the middle of a change, so that the next one repairs."""
        return not self._is_whole and not self.is_busy

    def recover(self) -> bool:
        """Repairs the engine after an exception out of a call; every later call does so itself.

        Steps in flight are given up. Scheduler, block tables and prefix cache are made anew, and
        the unfinished requests wait in them with the tokens that their answers have: they go on,
        and their tokens are computed again. The one whose answer was just being changed ends with
        `finish_reason` "error"; and so do all that have run, where a second step in a row raised an
        `Exception`. The pools keep their memory.

        Returns:
            Whether there was anything to repair.
        """
        self._enter()
        with self._guard.lock:
            self._refuse_within_call()
            with self._guard.busy:
                return self._recover()

    def _enter(self) -> None:
        guard = self._guard
        if guard.is_closed or os.getpid() != guard.pid:
            guard.refuse()

    def _refuse_within_call(self) -> None:
        """Refuses a call from within a call: a sink, a token mask or `on_launch` made it."""
        if self.is_busy:  # (by this thread, as it has the lock)
            raise RuntimeError("an engine was called from within its own step")

    def _begin(self) -> None:
        """At the beginning of every call that changes the engine."""
        if not self._is_whole:
            self._recover()
        while self._left:
            self._abort(self._left[0])
            self._left.popleft()

    def _recover(self) -> bool:
        if self._is_whole:
            return False
        failed, num_failed_steps = self._failed, self._num_failed_steps + (self._failed is not None)
        logger.warning(
            "recovering from %s",
            "an interrupted call" if failed is None else f"a failed step: {reason_of(failed)}",
        )
        self._executor.reset()
        self._columns.reset()
        self._in_flight = None
        kv = self._make_kv()
        scheduler = Scheduler(self._scheduler.config, kv)

        def end(sequence: Sequence) -> str | None:
            has_run = sequence.first_admission is not None
            return reason_of(failed) if failed and has_run and num_failed_steps > 1 else None

        past_encoder = _sum_encoder(self._past_encoder, self._scheduler.encoder_cache.stats)
        self._output_processor.restore(scheduler, end)
        self._past, self._past_preemptions, self._kv, self._scheduler = (
            _sum(self._past, self._kv.counters),
            self._past_preemptions + self._scheduler.num_preemptions,
            kv,
            scheduler,
        )
        self._past_encoder = past_encoder
        self._num_failed_steps, self._failed = num_failed_steps, None
        self._num_recoveries += 1
        self._is_whole = True
        return True

    # Steps.

    def step(self) -> list[SequenceUpdate]:
        """Runs one step; returns what the sequences gained.

        With overlap, the next step is planned and launched before the tokens of the one in flight
        are read, so the device does not wait for the host.

        A fault of the model or the device ends only the sequences it affects (`InProcessExecutor`).
        See `recover` for what any other exception does.
        """
        self._enter()
        with self._guard.lock:
            self._refuse_within_call()
            with self._guard.busy:
                self._begin()
                return self._run_step()

    def _run_step(self) -> list[SequenceUpdate]:
        # An exception in between leaves `_is_whole` false, and no handler that could be interrupted
        # in its turn has to see to it.
        self._is_whole = False
        try:
            updates = self._step()
        except Exception as error:
            self._failed = error
            raise
        self._num_failed_steps = 0
        self._is_whole = True
        return updates

    def _step(self) -> list[SequenceUpdate]:
        launched = self._launch_next()
        if self.config.async_scheduling:
            launched, self._in_flight = self._in_flight, launched
        if launched is None:
            return self._output_processor.end_expired(self._scheduler.take_expired())
        result = self._executor.read()
        for key, num_bytes in result.feature_sizes:
            self._scheduler.encoder_cache.resize(key, num_bytes)
        updates: list[SequenceUpdate] = []
        if result.failures or result.logprobs or result.prompt_logprobs or result.pooled:
            updates += self._output_processor.end_failed(launched.sequences, result)
            updates += self._output_processor.record_reports(launched.sequences, result)
        if result.is_poisoned:
            # NaNs spread through shared keys and values, and cached blocks cannot be checked.
            self._scheduler.reset_prefix_cache()
            self._scheduler.encoder_cache.clear()
        if expired := self._scheduler.take_expired():
            updates += self._output_processor.end_expired(expired)
        self._scheduler.update_from_output(launched, result.token_ids)
        return updates + self._output_processor.process_outputs(
            launched.sequences, result.token_ids
        )

    def _launch_next(self) -> SchedulerOutput | None:
        output = self._scheduler.schedule()
        if output is None:
            return None
        self._num_steps += 1
        if self.on_launch is not None:
            self.on_launch(len(output.batch.token_ids))
        pool = self._kv.pool
        self._max_used_blocks = max(self._max_used_blocks, pool.num_used)
        self._max_shared_blocks = max(self._max_shared_blocks, pool.num_shared)
        self._columns.add_to(output)
        self._executor.launch(output.batch)
        return output

    # Numbers.

    def stats(self) -> EngineStats:
        """The engine's statistics."""
        self._enter()
        with self._guard.lock:
            if self.needs_recovery:
                self.recover()
            return self._stats()

    def _stats(self) -> EngineStats:
        return EngineStats(
            usage=self._kv.usage,
            group_usage=self._kv.group_usage,
            counters=_sum(self._past, self._kv.counters),
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            num_preemptions=self._past_preemptions + self._scheduler.num_preemptions,
            num_steps=self._num_steps,
            max_used_blocks=self._max_used_blocks,
            max_shared_blocks=self._max_shared_blocks,
            memory=memory.usage(self._cache_limit),
            num_faults=self._executor.num_faults,
            pool_copies=ops.pool_copies(),
            num_recoveries=self._num_recoveries,
            encoder_cache=_sum_encoder(self._past_encoder, self._scheduler.encoder_cache.stats),
        )

    @property
    def max_request_len(self) -> int:
        """Most tokens of prompt and answer that can be served: by the model and by the pool."""
        # (The token that ends a prompt to be pooled is no part of it.)
        return self._scheduler.max_total_tokens - (self.config.runner == "pooling")

    @property
    def pool_bytes(self) -> int:
        """Bytes of all pools; parts that were never written may take no physical memory."""
        return sum(pool.nbytes for pool in self._runner.model.pools())

    def reset_prefix_cache(self) -> int:
        """Forgets every cached prefix; returns how many blocks that were."""
        self._enter()
        with self._guard.lock:
            self._refuse_within_call()
            with self._guard.busy:
                self._begin()
                self._is_whole = False
                num_blocks = self._scheduler.reset_prefix_cache()
                self._is_whole = True
                return num_blocks

    def check_integrity(self) -> None:
        """Checks the KV store and the scheduler against each other; raises `IntegrityError`."""
        self._enter()
        with self._guard.lock:
            if self.needs_recovery:
                self.recover()
            self._scheduler.check_integrity()


def _quantise(paged: PagedModel, config: EngineConfig) -> None:
    """Has a model keep its keys and values in the format that the options name."""
    if config.kv_format is None:
        return
    layout = paged.layout.with_kv_format(config.kv_format, config.kv_cache_dtype_skip_layers)
    paged.layout = layout
    name, kept = config.kv_format.name, [spec for spec in layout.attention if not spec.kv_format]
    if any(spec.latent for spec in kept):
        logger.warning("kv_cache_dtype %r: latents (MLA) are kept as the model computes", name)
    if layout.has_states:
        logger.info("kv_cache_dtype %r: recurrent states are kept as the model computes", name)


def _runner(
    paged: PagedModel,
    config: EngineConfig,
    kv_config: KVCacheConfig,
    model: LoadedModel,
    masks: MaskSource,
) -> ModelRunner:
    pooler, model_type = config.pooler, model.model_type
    if pooler is None:
        media = None
        if model.media is not None:
            rope = model.media.uses_rope_positions
            media = StepMediaBuilder(paged.encode, uses_rope_positions=rope)
        return ModelRunner(paged, windows=kv_config.windows, media=media, masks=masks)
    assert pooler.pooling_type is not None
    try:
        runner = PoolingRunner(paged, pooler.pooling_type, windows=kv_config.windows)
    except ValueError as error:
        raise UnsupportedModelError(model_type, str(error)) from error
    _check_dimensions("pooler_config.dimensions", pooler.dimensions, runner.hidden_size)
    return runner


def _check_dimensions(field: str, dimensions: int | None, hidden_size: int) -> None:
    if dimensions is not None and dimensions > hidden_size:
        expected = f"at most {hidden_size}, the size of this model's hidden states,"
        raise InvalidParameterError(field, expected, dimensions)


def _sum(one: KVCounters, other: KVCounters) -> KVCounters:
    return KVCounters(
        **{f.name: getattr(one, f.name) + getattr(other, f.name) for f in fields(KVCounters)}
    )


def _sum_encoder(past: EncoderCacheStats, now: EncoderCacheStats) -> EncoderCacheStats:
    """Adds the counters of both, and takes the current values of the later one."""
    counted = {
        f.name: getattr(past, f.name) + getattr(now, f.name) for f in fields(EncoderCacheStats)
    }
    return replace(
        EncoderCacheStats(**counted),
        num_items=now.num_items,
        num_bytes=now.num_bytes,
        max_bytes=max(past.max_bytes, now.max_bytes),
    )


def _feature_bytes(model: LoadedModel) -> int | None:
    """Bytes of the features of one row, about, before any are made; None: unknown."""
    if model.media is None:
        return None
    inner = model.config.get("text_config")
    config = inner if isinstance(inner, dict) and "hidden_size" in inner else model.config
    hidden_size = config.get("hidden_size")
    return hidden_size * 4 if isinstance(hidden_size, int) and hidden_size > 0 else None
