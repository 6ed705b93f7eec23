"""The engine: continuous batching over one prefix-sharing KV store."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from mlx_paged import ops
from mlx_paged.core import KVManager, Scheduler, SchedulerOutput
from mlx_paged.engine import build, memory, request_options, warm_up
from mlx_paged.engine.client import EngineInfo
from mlx_paged.engine.config import EngineConfig
from mlx_paged.engine.executor import Executor, InProcessExecutor
from mlx_paged.engine.grammar.compiler import GrammarCompiler
from mlx_paged.engine.guard import EngineGuard
from mlx_paged.engine.intake import CheckedRequest, Intake
from mlx_paged.engine.kv_cache_config import KVCacheConfig
from mlx_paged.engine.media.step_media import Prepared
from mlx_paged.engine.output_processor import OutputProcessor, RequestState, UpdateSink
from mlx_paged.engine.outputs import RequestOutput, SequenceUpdate
from mlx_paged.engine.pooling.params import PoolingParams, prompts_of
from mlx_paged.engine.recovery import Recovery
from mlx_paged.engine.sampling.logprobs import LogprobReport
from mlx_paged.engine.sampling.masks import SequenceMasks
from mlx_paged.engine.sampling.sequence_sampler import TokenMask
from mlx_paged.engine.sampling_params import SamplingParams
from mlx_paged.engine.stats import EngineStats, sum_counters, sum_encoder_stats
from mlx_paged.engine.step_columns import StepColumns
from mlx_paged.errors import MlxPagedError
from mlx_paged.model.loader import LoadedModel, model_directory
from mlx_paged.model.prepare import prepare_kernels
from mlx_paged.parsing.reasoning import format_of
from mlx_paged.platform import Platform

logger = logging.getLogger(__name__)


class Engine:
    """Takes requests, runs steps, returns tokens and text.

    Any thread may call it; a call waits for the one that runs. A step that follows one of another
    thread does not overlap with it.

    An exception out of a call, of whatever kind and from wherever (Ctrl-C, `MemoryError`, a
    callback), leaves an engine that goes on: the next call repairs it first (`recover`).

    A child process made by `fork` cannot use it: every method raises `ForkedProcessError` there.

    Args:
        model: From `mlx_paged.load`; it belongs to this engine from now on.
        config: Options.
        on_kernel: On a GPU, called before each kernel that is compiled (Metal), then before each
            kind of step of the warm-up, with the number done and the total, and after the last.

    Attributes:
        config: The options, resolved for the model.
        tokenizer: mlx-lm's wrapper.
        max_model_len, vocab_size, generation_config, reasoning_format, hidden_size, labels,
            prompts, media_reason: See `EngineInfo`.
        media: The processor of the model's media; None: it takes text only.
        on_launch: Called with the number of tokens of each step that is launched, by the thread
            that steps. It is for metrics and must be quick.
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
        self.vocab_size = model.vocab_size
        self.media, self.media_reason = model.media, model.media_reason
        if self.media is not None and self.config.mm_processor_kwargs:
            self.media = self.media.with_options(self.config.mm_processor_kwargs)
        generates = self.config.runner == "generate"
        compiler: GrammarCompiler | None = None
        if generates:  # It begins while the pools are made.
            compiler = GrammarCompiler(
                self.tokenizer,
                model.vocab_size,
                self.tokenizer.eos_token_ids,
                timeout=self.config.structured_outputs_timeout,
                cache_size=self.config.structured_outputs_cache_size,
            )
        self.reasoning_format = format_of(self.config.reasoning_parser, self.tokenizer)
        paged = build.make_paged_model(model, self.config, platform)
        limits = [model.max_model_len, paged.layout.max_context_len]
        model_limit = min((n for n in limits if n is not None), default=None)
        self.max_model_len = self.config.model_len(model_limit)
        paged.limit_contexts(self.max_model_len)
        kv_config = KVCacheConfig(paged.layout, self.config, self.max_model_len)
        # A tokenizer may have more tokens than its model.
        masks = SequenceMasks(0 if compiler is None else compiler.num_words)
        self._runner = build.make_runner(paged, self.config, kv_config, model, masks)
        self.hidden_size: int | None = getattr(self._runner, "hidden_size", None)
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
                build.feature_bytes(model),
                encodes_slowly=platform.on_cpu,
            ),
            self._kv,
        )
        self._executor: Executor = InProcessExecutor(self._runner)
        self._columns = StepColumns(
            masks, samples=generates, has_media=self._runner.media is not None
        )
        classifier = build.make_classifier(paged, model, self.config, self.tokenizer)
        self.labels = () if classifier is None else classifier.head.labels
        self.prompts = prompts_of(model_directory(model.name))
        report = LogprobReport(self.tokenizer)
        self._intake = Intake(
            self.config,
            self.tokenizer,
            self.vocab_size,
            reasoning_format=self.reasoning_format,
            media=self.media,
            compiler=compiler,
            classifier=classifier,
            hidden_size=self.hidden_size,
            max_request_len=self.max_request_len,
            max_model_len=self.max_model_len,
            report=report,
        )
        self._output_processor = OutputProcessor(self._scheduler, report)
        self._recovery = Recovery()
        self._in_flight: SchedulerOutput | None = None
        self.on_launch: Callable[[int], None] | None = None
        self._num_steps = 0
        self._max_used_blocks = 0
        self._max_shared_blocks = 0
        self._left: deque[str] = deque()  # requests that were aborted in the middle of a call

    @property
    def info(self) -> EngineInfo:
        """Properties of the engine that never change."""
        return EngineInfo(
            config=self.config,
            vocab_size=self.vocab_size,
            max_request_len=self.max_request_len,
            max_model_len=self.max_model_len,
            generation_config=self.generation_config,
            reasoning_format=self.reasoning_format,
            hidden_size=self.hidden_size,
            labels=self.labels,
            prompts=self.prompts,
            media_reason=self.media_reason,
        )

    # Requests.

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None,
        *,
        prompt: str | None = None,
        priority: int = 0,
        background: bool = False,
        timeout: float | None = None,
        cache_salt: str | None = None,
        token_mask: TokenMask | None = None,
        sink: UpdateSink | None = None,
        media: Prepared | None = None,
    ) -> RequestOutput:
        """Takes a request. Its output object is filled as the engine steps.

        Args:
            request_id: Unique among unfinished requests.
            prompt_token_ids: At least one token; a list, or an array of integers.
            params: How to choose tokens, and when to stop.
            prompt: The text of the tokens, for the output.
            priority, background, timeout, cache_salt, token_mask: See `EngineRequest`.
            sink: Takes the request's updates as they are made, on the engine's thread.
            media: The pictures, videos and sounds of the prompt, whose tokens are
                `media.prompt.token_ids`.

        Raises:
            InvalidParameterError: An option of the wrong kind; an empty prompt; a token that the
                model does not have, in the prompt or in `params`; a grammar that is invalid or
                cannot be enforced; params that leave no token; the engine's runner is "pooling";
                media that the model does not take, or that are not this prompt's; an item that must
                be computed in one step, and no step is so large.
            RequestTooLargeError: Prompt and answer could never fit.
            DuplicateRequestError: An unfinished request has this id.
            EngineOverloadedError: Too many sequences wait.
        """
        self._enter()
        return self.add(
            self._intake.check(
                request_id,
                prompt_token_ids,
                request_options.params_of(params),
                prompt=prompt,
                priority=priority,
                background=background,
                timeout=timeout,
                cache_salt=cache_salt,
                token_mask=token_mask,
                media=media,
                sink=sink,
            )
        )

    def add_pooling_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
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
            params: How to pool. The caller truncates the prompt.
            request_id, prompt_token_ids, prompt, priority, background, timeout, cache_salt, sink:
                See `add_request`.

        Raises:
            InvalidParameterError: The engine's runner is "generate"; an option of the wrong kind;
                an empty prompt; a token that the model does not have; more dimensions than the
                model's hidden states have.
            RequestTooLargeError: The prompt could never fit.
            DuplicateRequestError: An unfinished request has this id.
            EngineOverloadedError: Too many sequences wait.
        """
        self._enter()
        return self.add(
            self._intake.check(
                request_id,
                prompt_token_ids,
                request_options.pooling_params_of(params),
                prompt=prompt,
                priority=priority,
                background=background,
                timeout=timeout,
                cache_salt=cache_salt,
                sink=sink,
            )
        )

    def add(self, checked: CheckedRequest) -> RequestOutput:
        """Takes a request that `intake` has checked.

        Raises:
            InvalidParameterError, RequestTooLargeError, DuplicateRequestError,
            EngineOverloadedError: See `add_request`.
        """
        self._enter()
        state = self._intake.state_of(checked)
        with self._guard.lock:
            self._refuse_within_call()
            with self._guard.busy:
                self._begin()
                if not self._has_work:
                    # Other parts of the process may have taken memory since.
                    memory.limit_run_ahead(self._runner.model.platform)
                self._recovery.is_whole = False
                try:
                    self._scheduler.add(state.request)
                except MlxPagedError:  # refused, and nothing has changed
                    self._recovery.is_whole = True
                    raise
                self._intake.attach(state, checked)
                # From here on the request is in.
                self._output_processor.request_states[checked.request_id] = state
                self._recovery.is_whole = True
        return state.output

    @property
    def intake(self) -> Intake:
        """Checks requests before they are added; any thread may use it."""
        return self._intake

    @property
    def grammar_compiler(self) -> GrammarCompiler:
        """See `Intake.grammar_compiler`."""
        return self._intake.grammar_compiler

    @property
    def scores_pairs(self) -> bool:
        """True if it scores pairs of texts and makes no embeddings."""
        return len(self.labels) == 1

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
        self._recovery.is_whole = False
        self._output_processor.abort(state)
        self._recovery.is_whole = True
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
        return self._has_work or not self._recovery.is_whole

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
        return not self._recovery.is_whole and not self.is_busy

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
        if not self._recovery.is_whole:
            self._recover()
        while self._left:
            self._abort(self._left[0])
            self._left.popleft()

    def _recover(self) -> bool:
        recovery = self._recovery
        if recovery.is_whole:
            return False
        logger.warning("recovering from %s", recovery.cause)
        self._executor.reset()
        self._columns.reset()
        self._in_flight = None
        kv = self._make_kv()
        scheduler = Scheduler(self._scheduler.config, kv)
        self._output_processor.restore(scheduler, recovery.reason_to_end)
        lost = self._kv, self._scheduler
        self._kv, self._scheduler = kv, scheduler
        recovery.complete(*lost)
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
        recovery = self._recovery
        recovery.is_whole = False
        try:
            updates = self._step()
        except Exception as error:
            recovery.failed = error
            raise
        recovery.num_failed_steps = 0
        recovery.is_whole = True
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
        past, encoder_cache = self._recovery, self._scheduler.encoder_cache
        return EngineStats(
            usage=self._kv.usage,
            group_usage=self._kv.group_usage,
            counters=sum_counters(past.counters, self._kv.counters),
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            num_preemptions=past.num_preemptions + self._scheduler.num_preemptions,
            num_steps=self._num_steps,
            max_used_blocks=self._max_used_blocks,
            max_shared_blocks=self._max_shared_blocks,
            memory=memory.usage(self._cache_limit),
            num_faults=self._executor.num_faults,
            pool_copies=ops.pool_copies(),
            num_recoveries=past.num_recoveries,
            encoder_cache=sum_encoder_stats(past.encoder_cache, encoder_cache.stats),
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
                self._recovery.is_whole = False
                num_blocks = self._scheduler.reset_prefix_cache()
                self._recovery.is_whole = True
                return num_blocks

    def check_integrity(self) -> None:
        """Checks the KV store and the scheduler against each other; raises `IntegrityError`."""
        self._enter()
        with self._guard.lock:
            if self.needs_recovery:
                self.recover()
            self._scheduler.check_integrity()
