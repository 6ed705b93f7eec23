"""RealReplica: a replica whose steps the engine's own scheduler and KV store plan.

It stands in for `Replica` where the simulator is checked: only the seconds of a step are simulated.
"""

from __future__ import annotations

from array import array

from mlx_paged.core import (
    KVManager,
    PrefixQuery,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
    StopPolicy,
)
from mlx_paged.core import Request as CoreRequest

from .replica import Limits, Phase, Request
from .step_times import StepTimes
from .traffic import BLOCK, Session

_STRIDE = 1 << 20  # tokens of a session


def tokens_of(session: Session, end: int, start: int = 0) -> array[int]:
    """Tokens of a session, which no other one has outside of the group's shared prefix."""
    shared = session.recording.shared_tokens
    group = session.recording.group * _STRIDE
    own = (1024 + session.key) * _STRIDE
    positions = range(start, end)
    return array("I", [(group if i < shared else own) + i for i in positions])


def seconds_of(times: StepTimes, output: SchedulerOutput) -> float:
    """Seconds of a step that a scheduler has planned."""
    seconds, rows, context = 0.0, 0, 0
    batch = output.batch
    for seq, start, length in zip(output.sequences, batch.starts, batch.query_lens):
        if start + length > seq.request.num_prompt_tokens or length == 1:
            rows += 1
            context += start + 1
        else:
            seconds += times.chunk(start, length)
    return seconds + times.decodes(rows, context, 1)


class _Cache:
    """The part of a cache that routing policies read."""

    def __init__(self, kv: KVManager) -> None:
        self._kv = kv

    def match(self, session: Session, num_tokens: int) -> int:
        query = PrefixQuery(tokens_of(session, num_tokens))
        return self._kv.match(query).num_tokens(BLOCK)


class RealReplica:
    """See `Replica`, whose interface it has."""

    def __init__(self, number: int, limits: Limits, times: StepTimes) -> None:
        self.number, self.limits, self.times = number, limits, times
        self.is_alive = True
        self.phase: Phase | None = None
        self.num_computed_tokens, self.busy_seconds = 0, 0.0
        self._restart()

    def _restart(self) -> None:
        limits = self.limits
        self._kv = KVManager(1 + limits.cache_tokens // BLOCK, BLOCK)
        config = SchedulerConfig(
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            long_prefill_token_threshold=0,
            watermark=limits.watermark,
        )
        self._scheduler = Scheduler(config, self._kv, clock=lambda: 0.0)
        self.cache = _Cache(self._kv)
        self._requests: dict[str, Request] = {}
        self._output: SchedulerOutput | None = None

    @property
    def load(self) -> int:
        return len(self._requests)

    @property
    def num_preemptions(self) -> int:
        return self._scheduler.num_preemptions

    def add(self, request: Request, now: float) -> None:
        prompt = tokens_of(request.session, request.num_prompt_tokens)
        name = f"{request.session.key} {request.turn}"
        self._requests[name] = request
        stop = StopPolicy(max_tokens=request.max_tokens)
        self._scheduler.add(CoreRequest(name, prompt, stop=stop))

    def fail(self) -> list[Request]:
        lost = list(self._requests.values())
        for request in lost:
            request.start_over()
        self._restart()
        self.phase, self.is_alive = None, False
        return lost

    def start(self, now: float) -> Phase | None:
        output = self._scheduler.schedule()
        if output is None:
            return None
        self._output = output
        self.phase = Phase(now, 1, [], [], 0, seconds_of(self.times, output))
        return self.phase

    def end(self, now: float) -> list[Request]:
        output, phase = self._output, self.phase
        assert output is not None and phase is not None
        self._output = self.phase = None
        self.busy_seconds += phase.seconds
        sampled: list[list[int]] = []
        batch = output.batch
        for seq, start, length in zip(output.sequences, batch.starts, batch.query_lens):
            self.num_computed_tokens += length
            request = self._requests[seq.request.request_id]
            is_last = start + length == len(seq.tokens)
            position = len(seq.tokens)
            next_token = tokens_of(request.session, position + 1, position)
            sampled.append(list(next_token) if is_last else [])
        gained = [bool(tokens) for tokens in sampled]
        self._scheduler.update_from_output(output, sampled)
        finished = []
        for seq, has_token in zip(output.sequences, gained):
            request = self._requests[seq.request.request_id]
            request.num_cached_tokens = seq.num_cached_tokens
            if has_token and request.first_token is None:
                request.first_token = now
            if seq.is_finished:
                request.end = now
                finished.append(self._requests.pop(seq.request.request_id))
        return finished

    def check(self) -> None:
        """Raises an error if the KV store is inconsistent."""
        self._kv.check_integrity()
