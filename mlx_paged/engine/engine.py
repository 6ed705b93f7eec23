"""The engine: continuous batching over one prefix-sharing KV store."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from mlx_paged import ops
from mlx_paged.core import KVCounters, KVManager, KVUsage, Request, Scheduler
from mlx_paged.engine import memory
from mlx_paged.engine.config import EngineConfig
from mlx_paged.engine.detokenizer import DeferredText, IncrementalDetokenizer, special_token_ids
from mlx_paged.engine.executor import PendingStep, StepExecutor
from mlx_paged.engine.kv_cache_config import KVCacheConfig
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
from mlx_paged.engine.runner import ModelRunner
from mlx_paged.engine.sampling.logprobs import LogprobReport, PromptReport
from mlx_paged.engine.sampling.sequence_sampler import RequestSampling, SequenceSampler, TokenMask
from mlx_paged.engine.sampling_params import SamplingParams
from mlx_paged.errors import InvalidParameterError
from mlx_paged.model.loader import LoadedModel
from mlx_paged.model.prepare import prepare_kernels
from mlx_paged.model.wrap import serve


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


class Engine:
    """Takes requests, runs steps, returns tokens and text.

    Not thread-safe: MLX's streams belong to threads, so one thread makes the engine and calls it.

    Args:
        model: as `mlx_paged.load` returns it; it belongs to this engine from now on.
        config: options.
        on_kernel: where GPU kernels are compiled (Metal), called before each with how many are done
            and how many there are, and after the last.

    Attributes:
        max_model_len: Most tokens of prompt and answer together; None where only the pool limits.
        vocab_size: Token ids are below this.
        generation_config: The model's default sampling settings; the engine does not apply them.
        on_launch: Called with the number of tokens of each step that is launched, on the engine's
            thread (for metrics; it must be quick).
    """

    def __init__(
        self,
        model: LoadedModel,
        config: EngineConfig | None = None,
        *,
        on_kernel: ops.OnKernel | None = None,
    ) -> None:
        self.config = config or EngineConfig()
        self.tokenizer = model.tokenizer
        self.generation_config = model.generation_config
        paged = serve(model.model, model.config, block_size=self.config.block_size)
        limits = [model.max_model_len, paged.layout.max_context_len]
        model_limit = min((n for n in limits if n is not None), default=None)
        self.max_model_len = self.config.model_len(model_limit)
        kv_config = KVCacheConfig(paged.layout, self.config, self.max_model_len)
        self._runner = ModelRunner(paged, windows=kv_config.windows)
        sizes, activations = memory.allocate_pools(
            self._runner, kv_config, self.config, model_limit
        )
        self._cache_limit = memory.limit_buffer_cache(activations)
        prepare_kernels(paged, on_kernel)
        memory.limit_run_ahead()
        self._kv = KVManager(
            sizes.num_blocks,
            self.config.block_size,
            enable_prefix_caching=self.config.enable_prefix_caching,
            windows=kv_config.window_specs(sizes),
            states=kv_config.state_spec(sizes),
        )
        self._scheduler = Scheduler(self.config.scheduler_config(model_limit), self._kv)
        self._executor = StepExecutor(self._runner)
        self.vocab_size = model.vocab_size
        self._eos_token_ids = frozenset(self.tokenizer.eos_token_ids)
        self._special_token_ids = special_token_ids(self.tokenizer)
        self._report = LogprobReport(self.tokenizer)
        self._output_processor = OutputProcessor(self._scheduler, self._report)
        self._in_flight: PendingStep | None = None
        self.on_launch: Callable[[int], None] | None = None
        self._num_steps = 0
        self._max_used_blocks = 0
        self._max_shared_blocks = 0

    # Requests.

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        cache_salt: str | None = None,
        token_mask: TokenMask | None = None,
        sink: UpdateSink | None = None,
        sampling: RequestSampling | None = None,
    ) -> RequestOutput:
        """Takes a request. Its output object is filled as the engine steps.

        Args:
            request_id: unique among unfinished requests.
            prompt_token_ids: at least one token.
            params: how to choose tokens, and when to stop.
            prompt: the text of the tokens, for the output.
            priority: lower is served first under the priority policy.
            timeout: seconds until the request ends with "timeout".
            cache_salt: requests of different salts share no cached blocks.
            token_mask: gives before each token those that may follow (grammars).
            sink: takes the request's updates as they are made, on the engine's thread.
            sampling: `sampling_of` these arguments, where it was made before.

        Raises:
            InvalidParameterError: an empty prompt, or a token that the model does not have,
                in the prompt or in `params`.
            RequestTooLargeError: prompt and answer could never fit.
            DuplicateRequestError: an unfinished request has this id.
            EngineOverloadedError: too many sequences wait.
        """
        for token in prompt_token_ids:
            if type(token) is not int or not 0 <= token < self.vocab_size:
                raise InvalidParameterError(
                    "prompt_token_ids", f"integers in [0, {self.vocab_size})", token
                )
        if not self.has_unfinished:
            memory.limit_run_ahead()  # other parts of the process may have taken memory since
        if sampling is None:
            sampling = self.sampling_of(params, prompt_token_ids, token_mask)
        request = Request(
            request_id,
            prompt_token_ids,
            params.stop_policy(self._eos_token_ids),
            n=params.n,
            priority=priority,
            timeout=timeout,
            cache_salt=cache_salt,
            read_prefix_cache=params.prompt_logprobs is None,
        )
        self._scheduler.add(request)
        output = RequestOutput(
            request_id,
            prompt,
            list(prompt_token_ids),
            [CompletionOutput(i) for i in range(params.n)],
            RequestMetrics(arrival_time=time.monotonic()),
        )
        prompt_report = None
        if params.prompt_logprobs is not None:
            prompt_report = PromptReport(prompt_token_ids, params.prompt_logprobs, self._report)
            output.prompt_logprobs = prompt_report.positions
        request.state = state = RequestState(params, request, output, sink)
        for sequence, completion in zip(request.sequences, output.outputs):
            if params.logprobs is not None:
                completion.logprobs, completion.cumulative_logprob = [], 0.0
            sequence.sampler = SequenceSampler(sampling, sequence.index)
            sequence.prompt_report = prompt_report
            text = self._detokenizer(params)
            if not params.stop_strings:
                # The engine does not need its text: it is decoded when it is read.
                tokens, start = sequence.tokens, request.num_prompt_tokens
                deferred = DeferredText(request_id, text, tokens, start)
            sequence.answer = AnswerState(
                state, completion, text if params.stop_strings else deferred
            )
        return output

    def sampling_of(
        self, params: SamplingParams, prompt_token_ids: list[int], token_mask: TokenMask | None
    ) -> RequestSampling:
        """What parameters mean for this model; any thread may ask, as it may take long.

        Raises:
            InvalidParameterError: a token in `params` that the model does not have.
        """
        return RequestSampling(
            params,
            prompt_token_ids,
            seed=secrets.randbits(32) if params.seed is None else params.seed,
            tokenizer=self.tokenizer,
            vocab_size=self.vocab_size,
            token_mask=token_mask,
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
        """What the engine keeps of an unfinished request."""
        request = self._scheduler.request(request_id)
        return None if request is None else request.state

    def request_states(self) -> list[RequestState]:
        """The unfinished requests, in order of arrival."""
        return [request.state for request in self._scheduler.requests()]

    def abort(self, request_id: str) -> bool:
        """Ends a request now; what it computed stays cached. Returns whether it was there."""
        state = self.request_state(request_id)
        if state is None:
            return False
        self._output_processor.abort(state)
        return True

    def settle(self) -> None:
        """Waits for a step in flight that no request needs any more, so that it holds no blocks."""
        while self._in_flight is not None and not self._scheduler.has_unfinished:
            self.step()

    @property
    def has_unfinished(self) -> bool:
        """Whether another `step` has anything to do."""
        return self._scheduler.has_unfinished or self._in_flight is not None

    # Steps.

    def step(self) -> list[SequenceUpdate]:
        """Runs one step; returns what the sequences gained.

        With overlap, the next step is planned and launched before the tokens of the one in flight
        are read, so the device does not wait for the host.

        A fault of the model or the device ends only the sequences it affects (`StepExecutor`).
        """
        launched = self._launch_next()
        if self.config.async_scheduling:
            launched, self._in_flight = self._in_flight, launched
        if launched is None:
            return self._output_processor.process_outputs(self._scheduler.take_outcomes())
        result = self._executor.read(launched, self._in_flight)
        updates: list[SequenceUpdate] = []
        if result.failures or result.logprobs or result.prompt_logprobs:
            sequences = [s.sequence for s in launched.output.sequences]
            updates += self._output_processor.end_failed(sequences, result)
            updates += self._output_processor.record_logprobs(sequences, result)
        if result.poisoned:
            # NaNs spread through shared keys and values, and cached blocks cannot be checked.
            self._scheduler.reset_prefix_cache()
        outcomes = self._scheduler.update_from_output(launched.output, result.sampled_token_ids)
        return updates + self._output_processor.process_outputs(outcomes)

    def _launch_next(self) -> PendingStep | None:
        if self._in_flight is not None and self._in_flight.launched is None:
            return None  # it runs when it is read: there is nothing to overlap with
        output = self._scheduler.schedule()
        if output is None:
            return None
        self._num_steps += 1
        if self.on_launch is not None:
            self.on_launch(output.num_tokens)
        pool = self._kv.pool
        self._max_used_blocks = max(self._max_used_blocks, pool.num_used)
        self._max_shared_blocks = max(self._max_shared_blocks, pool.num_shared)
        return self._executor.launch(output, self._in_flight)

    # Numbers.

    def stats(self) -> EngineStats:
        """The engine's statistics."""
        return EngineStats(
            usage=self._kv.usage,
            group_usage=self._kv.group_usage,
            counters=self._kv.counters,
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            num_preemptions=self._scheduler.num_preemptions,
            num_steps=self._num_steps,
            max_used_blocks=self._max_used_blocks,
            max_shared_blocks=self._max_shared_blocks,
            memory=memory.usage(self._cache_limit),
            num_faults=self._executor.num_faults,
            pool_copies=ops.pool_copies(),
        )

    @property
    def max_request_len(self) -> int:
        """Most tokens of prompt and answer that can be served: by the model and by the pool."""
        return self._scheduler.max_total_tokens

    @property
    def pool_bytes(self) -> int:
        """Bytes of all pools; parts that were never written may take no physical memory."""
        return sum(pool.nbytes for pool in self._runner.model.pools())

    def reset_prefix_cache(self) -> int:
        """Forgets every cached prefix; returns how many blocks that were."""
        return self._scheduler.reset_prefix_cache()

    def check_integrity(self) -> None:
        """Checks the KV store and the scheduler against each other; raises `IntegrityError`."""
        self._scheduler.check_integrity()
