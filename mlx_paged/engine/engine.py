"""Engine: continuous batching over one prefix-sharing KV store."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from mlx_paged import kernels, ops
from mlx_paged.core import (
    PromptHistory,
    Scheduler,
    SchedulerOutput,
    StepResult,
    StepTimeLimit,
)
from mlx_paged.engine import memory
from mlx_paged.engine.build import build_engine
from mlx_paged.engine.client import EngineInfo
from mlx_paged.engine.config import EngineConfig
from mlx_paged.engine.executor import Executor, InProcessExecutor
from mlx_paged.engine.guard import EngineGuard, protect_thread, this_thread
from mlx_paged.engine.intake import CheckedRequest
from mlx_paged.engine.lora.files import Adapter
from mlx_paged.engine.output_processor import OutputProcessor, RequestState
from mlx_paged.engine.outputs import RequestOutput, SequenceUpdate
from mlx_paged.engine.pooling.params import PoolingParams
from mlx_paged.engine.pressure import POLL_SECONDS
from mlx_paged.engine.ranks.lead import CHECK_SECONDS, Ranks, RanksExecutor
from mlx_paged.engine.recovery import Recovery
from mlx_paged.engine.roles.prefill import Prefilling
from mlx_paged.engine.sampling_params import SamplingParams
from mlx_paged.engine.speculation.speculator import Speculator
from mlx_paged.engine.stats import EngineStats, LoraStats, sum_counters, sum_encoder_stats
from mlx_paged.errors import MlxPagedError
from mlx_paged.model.loader import LoadedModel

logger = logging.getLogger(__name__)


class Engine:
    """Accepts requests, runs steps, returns tokens and text.

    Any thread may call it; calls are serialized. A step does not overlap with the previous one if
    another thread ran that one.

    After any exception inside a call (Ctrl-C, `MemoryError`, an error in a callback), the next call
    first repairs the engine; see `recover`.

    In a forked child process, every method raises `ForkedProcessError`.

    Args:
        model: From `mlx_paged.load`. The engine takes ownership.
        config: Options.
        on_kernel: On a GPU, called with (done, total) before each kernel to compile (Metal), then
            before each kind of warm-up step, and after the last one.
        ranks: The ranks, if this is rank 0 of several; see `make_engine`.

    Attributes:
        config: The options, resolved for the model.
        tokenizer: mlx-lm's wrapper.
        max_model_len, vocab_size, generation_config, reasoning_format, hidden_size, labels,
            prompts, media_reason: See `EngineInfo`.
        intake: Checks requests before they are added; any thread may use it.
        media: The model's media processor; None if it takes only text.
        on_launch: Called with the number of tokens of each launched step, on the stepping thread.
            For metrics; must be quick.
    """

    def __init__(
        self,
        model: LoadedModel,
        config: EngineConfig | None = None,
        *,
        on_kernel: kernels.OnKernel | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self._guard = EngineGuard()
        parts = build_engine(model, config or EngineConfig(), on_kernel, ranks)
        self.config = parts.config
        self.tokenizer = model.tokenizer
        self.vocab_size = model.vocab_size
        self.max_model_len = parts.max_model_len
        self.generation_config = model.generation_config
        self.reasoning_format = parts.reasoning_format
        self.media, self.media_reason = parts.media, model.media_reason
        self.hidden_size, self.labels, self.prompts = parts.hidden_size, parts.labels, parts.prompts
        self._runner = parts.runner
        self._relief = parts.relief
        self._offloading = parts.offloading
        self._kv = self._relief.pools.make_kv()
        limit = self.config.max_step_time_ms
        # Outlives the schedulers, which `recover` replaces.
        self._step_time = StepTimeLimit(limit / 1000) if limit else None
        self._history = PromptHistory()
        if self._offloading is not None:
            self._history.has_other_formats = self._offloading.has_other_formats
        self._scheduler = Scheduler(
            parts.scheduler_config, self._kv, step_time=self._step_time, history=self._history
        )
        times_prompts = self._step_time is not None
        self._executor: Executor = (
            InProcessExecutor(self._runner, times_prompts=times_prompts)
            if ranks is None
            else RanksExecutor(self._runner, ranks, times_prompts=times_prompts)
        )
        self._ranks = ranks
        self._columns = parts.columns
        self._speculator: Speculator | None = parts.speculator
        self.intake = parts.make_intake(self.max_request_len)
        self._output_processor = OutputProcessor(self._scheduler, parts.report)
        self._recovery = Recovery()
        self._in_flight: SchedulerOutput | None = None
        self.on_launch: Callable[[int], None] | None = None
        self._cache_limit = parts.cache_limit
        self._num_steps = 0
        self._pending_aborts: deque[str] = deque()  # requests aborted during a call
        self._prefilling = None if self._offloading is None else self._offloading.prefilling
        if self._prefilling is not None:
            self._prefilling.start(self.intake, self.max_request_len)

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
        params: SamplingParams | PoolingParams | None = None,
        **options: Any,
    ) -> RequestOutput:
        """Adds a request. Steps fill its output.

        Args:
            request_id, prompt_token_ids, params, options: See `Intake.check`.

        Raises:
            InvalidParameterError: See `Intake.check`.
            RequestTooLargeError: Prompt and answer could never fit.
            DuplicateRequestError: An unfinished request has this id.
            EngineOverloadedError: Too many sequences wait.
            MemoryPressureError: The system is critically short of memory.
        """
        self._enter()
        return self.add(self.intake.check(request_id, prompt_token_ids, params, **options))

    def add(self, checked: CheckedRequest) -> RequestOutput:
        """Adds a request that `intake` has checked.

        Raises:
            InvalidParameterError, RequestTooLargeError, DuplicateRequestError,
            EngineOverloadedError: See `add_request`.
        """
        self._enter()
        state = self.intake.state_of(checked)
        with self._guard.lock:
            self._refuse_within_call()
            with self._guard.busy:
                self._begin()
                if not self._has_work:
                    # Other code in the process may have taken memory in the meantime.
                    memory.limit_run_ahead(self._runner.model.platform, self._cache_limit or 0)
                self._follow_pressure()
                self._relief.check_admission()
                self._add(state, checked)
        return state.output

    def _add(self, state: RequestState, checked: CheckedRequest) -> None:
        self._recovery.is_whole = False
        try:
            self._scheduler.add(state.request)
        except MlxPagedError:  # Refused: nothing has changed.
            self._recovery.is_whole = True
            raise
        self.intake.attach(state, checked)
        # From here on, the request counts as added.
        self._output_processor.request_states[checked.request_id] = state
        if self._offloading is not None:
            self._offloading.on_added(state.request)
        self._recovery.is_whole = True

    def _take_prompts(self, prefilling: Prefilling) -> None:
        """Adds the prompts of decode engines, and ends those that are no longer wanted."""
        for request_id in prefilling.take_gone():
            self._abort(request_id)
        while (new := prefilling.take_new()) is not None:
            try:
                self._relief.check_admission()
                state = self.intake.state_of(new.checked)
                self._add(state, new.checked)
            except BaseException as error:
                new.outgoing.end(str(error) or type(error).__name__)
                if not isinstance(error, MlxPagedError):
                    raise
            else:
                prefilling.add(new.outgoing, state.request)

    def request_state(self, request_id: str) -> RequestState | None:
        """Returns the engine's state of an unfinished request."""
        return self._output_processor.request_states.get(request_id)

    def request_states(self) -> list[RequestState]:
        """Returns the unfinished requests, in order of arrival."""
        return list(self._output_processor.request_states.values())

    def abort(self, request_id: str) -> bool:
        """Ends a request; the prefix cache keeps its blocks. Returns True if it was unfinished.

        Never waits for a running step. During one, on this thread (garbage collection may close a
        stream) or another, it only marks the request, which then ends before the next step.
        """
        self._enter()
        if self.is_busy:
            self._pending_aborts.append(request_id)
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

    def synchronize(self) -> None:
        """Waits for a step in flight that no request needs, so that it holds no blocks.

        If the engine is idle, also copies pending blocks to host memory and to the disk writer.
        """
        self._enter()
        with self._guard.lock:
            if self.is_busy:
                return  # called within a step
            with self._guard.busy:
                self._begin()
                while self._in_flight is not None and not self._scheduler.has_unfinished:
                    self._run_step()
                if self._offloading is not None and not self._has_work:
                    self._offloading.drain()

    @property
    def refuses_requests(self) -> bool:
        """True while the system is critically short of memory. Thread-safe."""
        return self._relief.refuses_requests

    @property
    def idle_interval(self) -> float | None:
        """Seconds after which an idle engine needs an `on_idle` call; None means never."""
        if self._offloading is not None and self._offloading.has_idle_work:
            return 0.0
        return CHECK_SECONDS if self._ranks is not None else self.pressure_interval

    def on_idle(self) -> None:
        """Does the work of an idle engine: follows memory pressure, and copies some blocks to host
        memory and to the disk writer.

        Raises:
            EngineDeadError: Another rank has ended.
        """
        self._executor.check()
        self.follow_pressure()
        if self._offloading is None or not self._offloading.has_idle_work:
            return
        with self._guard.lock:
            self._refuse_within_call()
            with self._guard.busy:
                self._begin()
                if not self._has_work:
                    self._offloading.advance_idle()

    def when_stuck(self, call: Callable[[str], object]) -> None:
        """Sets a function to call, on another thread, when the running step can never end because
        another rank has ended. It gets the reason; the process exits seconds later."""
        if self._ranks is not None:
            self._ranks.followers.on_stuck = call

    def when_woken(self, call: Callable[[], object]) -> None:
        """Sets a function to call, on any thread, when another engine sends this one work."""
        if self._prefilling is not None:
            self._prefilling.wakes = call

    def hang_up(self) -> None:
        """Closes the connections of other engines, because this one has stopped."""
        if self._prefilling is not None:
            self._prefilling.server.close()

    @property
    def pressure_interval(self) -> float | None:
        """Seconds after which an idle engine needs a `follow_pressure` call; None means never."""
        return POLL_SECONDS if self._relief.pressure.is_on else None

    def follow_pressure(self) -> None:
        """Reacts to the system's memory pressure, as steps and `add` do."""
        self._enter()
        if not self._relief.is_due:
            return
        with self._guard.lock:
            self._refuse_within_call()
            with self._guard.busy:
                self._begin()
                self._follow_pressure()

    def _follow_pressure(self) -> None:
        if self._relief.is_due:
            self._recovery.is_whole = False
            self._relief.follow(self._scheduler, in_flight=self._in_flight is not None)
            self._recovery.is_whole = True

    @property
    def has_unfinished(self) -> bool:
        """True if another `step` would do anything."""
        return self._has_work or not self._recovery.is_whole

    @property
    def _has_work(self) -> bool:
        if self._prefilling is not None and self._prefilling.has_new:
            return True
        return self._scheduler.has_unfinished or self._in_flight is not None

    @property
    def is_busy(self) -> bool:
        """True while a thread is inside a call."""
        return self._guard.busy.locked()

    # Recovery.

    @property
    def needs_recovery(self) -> bool:
        """True if a call raised in the middle of a change, so the next one must repair it."""
        return not self._recovery.is_whole and not self.is_busy

    def recover(self) -> bool:
        """Repairs the engine after an exception inside a call. Later calls do so automatically.

        Abandons steps in flight; rebuilds the scheduler, block tables and prefix cache. Unfinished
        requests keep the tokens of their answers and are recomputed. The request whose answer was
        being changed ends with `finish_reason` "error"; if two consecutive steps raised an
        `Exception`, so do all requests that have run. The pools keep their memory.

        Returns:
            True if there was something to repair.
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
        """Raises `RuntimeError` for a nested call from a sink, a token mask or `on_launch`."""
        if self.is_busy:  # by this thread, because it holds the lock
            raise RuntimeError("an engine was called from within its own step")

    def _begin(self) -> None:
        """Starts every call that changes the engine: repairs it, and handles pending work."""
        if not this_thread.is_protected:
            protect_thread()
        if not self._recovery.is_whole:
            self._recover()
        while self._pending_aborts:
            self._abort(self._pending_aborts[0])
            self._pending_aborts.popleft()
        if self._prefilling is not None and self._prefilling.has_new:
            self._take_prompts(self._prefilling)

    def _recover(self) -> bool:
        recovery = self._recovery
        if recovery.is_whole:
            return False
        logger.warning("recovering from %s", recovery.cause)
        self._executor.reset()
        self._columns.reset()
        if self._speculator is not None:
            self._speculator.reset()
        self._in_flight = None
        kv = self._relief.pools.make_kv()
        scheduler = Scheduler(
            self._scheduler.config, kv, step_time=self._step_time, history=self._history
        )
        scheduler.holds_admission = self._scheduler.holds_admission
        self._output_processor.restore(scheduler, recovery.reason_to_end)
        lost = self._kv, self._scheduler
        self._kv, self._scheduler = kv, scheduler
        recovery.complete(*lost)
        return True

    # Steps.

    def step(self) -> list[SequenceUpdate]:
        """Runs one step; returns the new output of its sequences.

        With async scheduling, the next step is planned and launched before the tokens of the one in
        flight are read, so the device does not wait for the host. Drafts continue a known token, so
        while speculation pays off, the step in flight is read first. Drafts of a model stay on the
        device.

        A fault of the model or the device ends only the affected sequences; see
        `InProcessExecutor`. For other exceptions, see `recover`.
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
        launched: SchedulerOutput | None
        if self._in_flight is not None and self._reads_first:
            launched, self._in_flight = self._in_flight, None
            updates, result = self._commit(launched)
            self._in_flight = self._launch_next()
        else:
            launched = self._launch_next()
            if self.config.async_scheduling:
                launched, self._in_flight = self._in_flight, launched
            if launched is None:
                return self._output_processor.end_expired(self._scheduler.take_expired())
            updates, result = self._commit(launched)
        return updates + self._output_processor.process_outputs(
            launched.sequences, result.token_ids
        )

    @property
    def _reads_first(self) -> bool:
        """True if the next step may have drafts, or the one in flight has.

        Sequences with drafts in flight would miss a step that is planned before theirs ends, and
        would alternate with the others from then on.
        """
        if self._speculator is None or self._in_flight is None:
            return False
        return self._speculator.is_active or self._in_flight.batch.has_drafts

    def _commit(self, launched: SchedulerOutput) -> tuple[list[SequenceUpdate], StepResult]:
        """Reads the oldest step and commits its tokens; returns the updates of ended sequences."""
        result = self._executor.read()
        if self._step_time is not None and result.time is not None:
            self._step_time.learn(launched.batch, result.time)
        if self._offloading is not None:
            self._offloading.note_step(launched.batch, result.seconds)
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
            if self._offloading is not None:
                self._offloading.distrust()
        if expired := self._scheduler.take_expired():
            updates += self._output_processor.end_expired(expired)
        self._scheduler.update_from_output(launched, result.token_ids)
        if self._speculator is not None:
            self._speculator.observe(launched, result.token_ids, result.hidden)
        return updates, result

    def _launch_next(self) -> SchedulerOutput | None:
        relief, in_flight = self._relief, self._in_flight is not None
        if relief.is_due and relief.follow(self._scheduler, in_flight=in_flight):
            return None
        speculator = self._speculator
        if speculator is not None and speculator.is_active and self._in_flight is None:
            speculator.propose(self._scheduler)
        if self._offloading is not None:
            is_idle = not in_flight and len(self._kv.restorations) == self._scheduler.num_running
            self._offloading.advance(self._kv, is_idle=is_idle)
        output = self._scheduler.schedule()
        if self._offloading is not None:
            self._offloading.begin_reads(self._kv.pool.launched_step)
        if output is None:
            return None
        self._num_steps += 1
        if self.on_launch is not None:
            self.on_launch(len(output.batch.token_ids))
        if speculator is not None:
            output.batch.drafts_in_flight = speculator.take_in_flight()
        self._columns.add_to(output)
        self._executor.launch(output.batch)
        if speculator is not None:
            speculator.launched(output.batch)
        return output

    # Statistics.

    def stats(self) -> EngineStats:
        """Returns the engine's statistics."""
        self._enter()
        with self._guard.lock:
            if self.needs_recovery:
                self.recover()
            return self._stats()

    def _stats(self) -> EngineStats:
        past, pool = self._recovery, self._kv.pool
        encoder_cache = self._scheduler.encoder_cache
        return EngineStats(
            usage=self._kv.usage,
            group_usage=self._kv.group_usage,
            counters=sum_counters(past.counters, self._kv.counters),
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            num_preemptions=past.num_preemptions + self._scheduler.num_preemptions,
            num_steps=self._num_steps,
            max_used_blocks=max(past.max_used_blocks, pool.max_used),
            max_shared_blocks=max(past.max_shared_blocks, pool.max_shared),
            memory=memory.usage(self._cache_limit),
            num_faults=self._executor.num_faults,
            pool_copies=ops.pool_copies(),
            num_recoveries=past.num_recoveries,
            encoder_cache=sum_encoder_stats(past.encoder_cache, encoder_cache.stats),
            compilation=self._runner.model.compilation,
            pressure=self._relief.pressure.stats,
            spec_decoding=None if self._speculator is None else self._speculator.stats,
            offloading=None if self._offloading is None else self._offloading.stats,
            lora=self._lora_stats() if self.config.num_adapter_slots else None,
            cache_misses=dict(self._history.counts),
        )

    def _lora_stats(self) -> LoraStats:
        running, waiting = (
            {seq.request.adapter.name for seq in queue if isinstance(seq.request.adapter, Adapter)}
            for queue in (self._scheduler.running, self._scheduler.waiting)
        )
        slots = self.config.num_adapter_slots
        return LoraStats(slots, tuple(sorted(running)), tuple(sorted(waiting)))

    @property
    def max_request_len(self) -> int:
        """Maximum tokens of prompt and answer together, limited by the model and by the pool."""
        # The extra token that ends a pooled prompt does not count.
        return self._scheduler.max_total_tokens - (self.config.runner == "pooling")

    @property
    def pool_bytes(self) -> int:
        """Bytes of all pools. Parts never written may take no physical memory."""
        return self._relief.pools.num_bytes

    def reset_prefix_cache(self) -> int:
        """Empties the prefix cache; returns the number of blocks that it held."""
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
