"""The engine: continuous batching over one prefix-sharing KV store."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, replace

from mlx_paged import ops
from mlx_paged.engine.config import EngineConfig
from mlx_paged.engine.outputs import (
    CompletionOutput,
    RequestMetrics,
    RequestOutput,
    SequenceUpdate,
)
from mlx_paged.engine.runner import LaunchedStep, ModelRunner
from mlx_paged.engine.sampler import SamplingRow
from mlx_paged.engine.sampling.logprobs import LogprobReport, PositionLogprobs
from mlx_paged.engine.sampling.prompt_report import PromptReport, PromptTargets
from mlx_paged.engine.sampling.request_sampler import RequestSampler, TokenMask
from mlx_paged.engine.sampling_params import SamplingParams
from mlx_paged.engine.text_stream import TextStream
from mlx_paged.errors import InvalidParameterError
from mlx_paged.kv import KVCounters, KVManager, KVUsage
from mlx_paged.models.families import layer_specs
from mlx_paged.models.load import LoadedModel
from mlx_paged.scheduling import (
    FinishReason,
    Request,
    ScheduledSequence,
    Scheduler,
    SequenceOutcome,
)


@dataclass(frozen=True)
class EngineStats:
    """Where the engine stands.

    Attributes:
        usage: Where the blocks are now.
        counters: What happened to the KV store since the engine was made.
        num_running: Sequences that run.
        num_waiting: Sequences that wait.
        num_preemptions: Times a sequence lost its blocks to others.
        num_steps: Steps launched.
        max_used_blocks: Most blocks that sequences held at once.
        max_shared_blocks: Most blocks that more than one sequence held at once.
        pool_copies: Whole-pool copies in this process; anything but 0 is a fault.
    """

    usage: KVUsage
    counters: KVCounters
    num_running: int
    num_waiting: int
    num_preemptions: int
    num_steps: int
    max_used_blocks: int
    max_shared_blocks: int
    pool_copies: int


@dataclass
class _Generation:
    """A request on its way."""

    params: SamplingParams
    sampler: RequestSampler
    request: Request
    output: RequestOutput
    streams: list[TextStream]
    prompt_report: PromptReport | None

    def owns(self, seq_id: int) -> bool:
        return any(sequence.seq_id == seq_id for sequence in self.request.sequences)


class Engine:
    """Takes requests, runs steps, gives back tokens and text.

    Not thread-safe: MLX's streams belong to threads, so one thread makes the engine and calls it.

    Args:
        model: as `mlx_paged.load` returns it; it belongs to this engine from now on.
        config: options.
    """

    def __init__(self, model: LoadedModel, config: EngineConfig | None = None) -> None:
        self.config = config or EngineConfig()
        self.tokenizer = model.tokenizer
        self.max_model_len = self.config.model_len(model.max_model_len)
        specs = layer_specs(model.model, model.model_type)
        num_blocks = self.config.num_blocks(
            [spec.bytes_per_token for spec in specs], model.max_model_len
        )
        self._kv = KVManager(
            num_blocks,
            self.config.block_size,
            enable_prefix_caching=self.config.enable_prefix_caching,
        )
        self._scheduler = Scheduler(self.config.scheduler_config(model.max_model_len), self._kv)
        self._runner = ModelRunner(
            model.model, specs, num_blocks=num_blocks, block_size=self.config.block_size
        )
        self._vocab_size = model.vocab_size
        self._eos_token_ids = frozenset(self.tokenizer.eos_token_ids)
        self._report = LogprobReport(self.tokenizer)
        self._generations: dict[str, _Generation] = {}
        self._in_flight: LaunchedStep | None = None
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
        token_mask: TokenMask | None = None,
    ) -> RequestOutput:
        """Takes a request. Its output object is filled as the engine steps.

        Args:
            token_mask: says before each token which ones may follow (grammars).

        Raises:
            InvalidParameterError: an empty prompt, or a token that the model does not have, be it
                in the prompt or in `params`.
            RequestTooLargeError: prompt and answer could never fit.
            DuplicateRequestError: an unfinished request has this id.
        """
        for token in prompt_token_ids:
            if type(token) is not int or not 0 <= token < self._vocab_size:
                raise InvalidParameterError(
                    "prompt_token_ids", f"integers in [0, {self._vocab_size})", token
                )
        sampler = RequestSampler(
            params,
            prompt_token_ids,
            seed=secrets.randbits(32) if params.seed is None else params.seed,
            tokenizer=self.tokenizer,
            vocab_size=self._vocab_size,
            token_mask=token_mask,
        )
        request = Request(
            request_id,
            prompt_token_ids,
            params.stop_policy(self._eos_token_ids),
            n=params.n,
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
        if params.logprobs is not None:
            for completion in output.outputs:
                completion.logprobs, completion.cumulative_logprob = [], 0.0
        prompt_report = None
        if params.prompt_logprobs is not None:
            prompt_report = PromptReport(prompt_token_ids, params.prompt_logprobs, self._report)
            output.prompt_logprobs = prompt_report.positions
        streams = [
            TextStream(
                self.tokenizer,
                params.stop_strings,
                include_stop=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
            )
            for _ in range(params.n)
        ]
        self._generations[request_id] = _Generation(
            params, sampler, request, output, streams, prompt_report
        )
        return output

    def abort(self, request_id: str) -> bool:
        """Ends a request now; what it computed stays cached. Returns whether it was there."""
        generation = self._generations.pop(request_id, None)
        if generation is None:
            return False
        self._scheduler.abort(request_id)
        for output in generation.output.outputs:
            output.finish_reason = output.finish_reason or FinishReason.ABORT
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

        An exception leaves the engine as it was before the step: its sequences compute it again.
        """
        try:
            return self._step()
        except Exception:
            self._runner.rest()
            self._in_flight = None
            self._scheduler.requeue_in_flight()
            raise

    def _step(self) -> list[SequenceUpdate]:
        launched = self._launch_next()
        if self.config.async_scheduling:
            launched, self._in_flight = self._in_flight, launched
        reports: dict[int, list[PositionLogprobs]] = {}
        if launched is None:
            outcomes = self._scheduler.take_outcomes()
        else:
            outcomes = self._scheduler.commit(launched.batch, self._runner.read(launched))
            self._record_prompts(launched)
            if launched.logprobs is not None:
                reports = launched.logprobs.read()
        return [update for outcome in outcomes if (update := self._publish(outcome, reports))]

    def _launch_next(self) -> LaunchedStep | None:
        batch = self._scheduler.schedule()
        if batch is None:
            return None
        self._num_steps += 1
        usage = self._kv.usage
        self._max_used_blocks = max(self._max_used_blocks, usage.num_used_blocks)
        self._max_shared_blocks = max(self._max_shared_blocks, usage.num_shared_blocks)
        return self._runner.launch(batch, self._sampling_row, self._in_flight, self._prompt_targets)

    def _sampling_row(self, row: ScheduledSequence) -> SamplingRow:
        generation = self._generations.get(row.request_id)
        sequence = self._scheduler.sequence(row.seq_id)
        if generation is None or sequence is None:  # ended in flight: its token is discarded
            return SamplingRow(0, 0, 0)
        return generation.sampler.row(sequence.index, sequence.tokens, row.context_len)

    def _prompt_targets(self, row: ScheduledSequence) -> PromptTargets | None:
        generation = self._generations.get(row.request_id)
        if generation is None or generation.prompt_report is None:
            return None
        return generation.prompt_report.targets(row.start, row.context_len)

    def _record_prompts(self, launched: LaunchedStep) -> None:
        if launched.prompt_logprobs is None:
            return
        found = launched.prompt_logprobs.read()
        for row in launched.batch.sequences:
            generation = self._generations.get(row.request_id)
            # (Its id may have been aborted, and taken by another request, since the launch.)
            if row.seq_id in found and generation is not None and generation.owns(row.seq_id):
                assert generation.prompt_report is not None
                generation.prompt_report.record(row.start, found[row.seq_id])

    def _publish(
        self, outcome: SequenceOutcome, reports: dict[int, list[PositionLogprobs]]
    ) -> SequenceUpdate | None:
        """Turns a token into text, and ends its sequence at a stop string."""
        generation = self._generations.get(outcome.request_id)
        if generation is None:
            return None
        stream = generation.streams[outcome.index]
        update = self._to_text(outcome, stream, generation.params)
        if outcome.seq_id in reports and outcome.token_id is not None:
            [position] = reports[outcome.seq_id]
            count = generation.params.logprobs or 0
            update = replace(update, logprobs=self._report(position, count))
        if update.finish_reason is not None and outcome.finish_reason is None:
            self._scheduler.finish(outcome.request_id, update.finish_reason, index=outcome.index)
        self._record(update, generation)
        return update

    @staticmethod
    def _to_text(
        outcome: SequenceOutcome, stream: TextStream, params: SamplingParams
    ) -> SequenceUpdate:
        token, reason = outcome.token_id, outcome.finish_reason
        update = SequenceUpdate(outcome.request_id, outcome.index, token, "", reason)
        ends_text = reason is FinishReason.STOP
        stop_token = token if ends_text and token in (params.stop_token_ids or ()) else None
        # A stop token is part of the text if asked for; the model's own end token never is.
        is_text = not ends_text or (params.include_stop_str_in_output and stop_token is not None)
        text = stream.add(token) if token is not None and is_text else ""
        if reason is not None:
            text += stream.finish()
        if stream.matched_stop is not None:
            return replace(
                update,
                text=text,
                finish_reason=FinishReason.STOP,
                stop_reason=stream.matched_stop,
            )
        return replace(update, text=text, stop_reason=stop_token)

    def _record(self, update: SequenceUpdate, generation: _Generation) -> None:
        output, now = generation.output, time.monotonic()
        completion = output.outputs[update.index]
        completion.text += update.text
        if update.token_id is not None:
            completion.token_ids.append(update.token_id)
            if completion.logprobs is not None and update.logprobs is not None:
                assert completion.cumulative_logprob is not None
                completion.logprobs.append(update.logprobs)
                completion.cumulative_logprob += update.logprobs[update.token_id].logprob
            output.metrics.first_token_time = output.metrics.first_token_time or now
            output.num_cached_tokens = generation.request.sequences[0].num_cached_tokens or 0
        completion.finish_reason = update.finish_reason
        completion.stop_reason = update.stop_reason
        if output.finished:
            output.metrics.finished_time = now
            del self._generations[update.request_id]

    # Numbers.

    def stats(self) -> EngineStats:
        """Where the engine stands."""
        return EngineStats(
            usage=self._kv.usage,
            counters=self._kv.counters,
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            num_preemptions=self._scheduler.num_preemptions,
            num_steps=self._num_steps,
            max_used_blocks=self._max_used_blocks,
            max_shared_blocks=self._max_shared_blocks,
            pool_copies=ops.pool_copies(),
        )

    def reset_prefix_cache(self) -> int:
        """Forgets every cached prefix; returns how many blocks that were."""
        return self._scheduler.reset_prefix_cache()

    def check_integrity(self) -> None:
        """Checks the KV store and the scheduler against each other; raises `IntegrityError`."""
        self._scheduler.check_integrity()
