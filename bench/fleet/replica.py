"""Replica: an engine with continuous batching, chunked prefill and a prefix cache.

Consecutive steps of the same decodes are one *phase*, because nothing else can happen within it. A
step with a prompt's chunk is a phase of its own. As in `core.scheduler`: decodes come first, then
the chunks of running prompts, then waiting requests in order of arrival while there is room for all
their tokens; who needs a shared prefix that another one computes lets others pass.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from .cache import Lease, PrefixCache
from .step_times import StepTimes
from .traffic import BLOCK, Session


@dataclass(frozen=True)
class Limits:
    """Limits of an engine; see `core.config.SchedulerConfig`.

    Attributes:
        cache_tokens: Capacity of its KV cache.
    """

    cache_tokens: int
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    watermark: float = 0.01


@dataclass(eq=False)
class Request:
    """A turn of a session.

    Attributes:
        arrival: Seconds.
        num_prompt_tokens: Tokens of the prompt.
        max_tokens: Tokens of the answer.
        num_cached_tokens: Tokens that its first admission found cached; None before.
        first_token, end: Seconds; None until then.
        num_retries: How often its replica was lost.
    """

    session: Session
    turn: int
    arrival: float
    num_prompt_tokens: int
    max_tokens: int
    num_cached_tokens: int | None = None
    first_token: float | None = None
    end: float | None = None
    num_retries: int = 0
    # State of its sequence.
    num_answered: int = 0
    num_computed: int = 0
    lease: Lease | None = field(default=None, repr=False)

    @property
    def num_tokens(self) -> int:
        """Known tokens."""
        return self.num_prompt_tokens + self.num_answered

    def start_over(self) -> None:
        """Forgets the answer so far: the client sends it again."""
        self.num_answered = self.num_computed = 0
        self.first_token = self.lease = None


@dataclass
class Phase:
    """Steps of the same sequences.

    Attributes:
        chunks: (request, tokens of its prompt)
    """

    start: float
    num_steps: int
    decodes: list[Request]
    chunks: list[tuple[Request, int]]
    context: int  # tokens before the first step, of all decodes
    seconds: float


class Replica:
    """One engine.

    Attributes:
        phase: The steps that run; None when idle.
        waiting, running: Unfinished requests.
        is_alive: False while it restarts.
        num_computed_tokens: Tokens of all steps so far.
        num_preemptions: Preemptions so far.
        busy_seconds: Duration of all phases so far.
    """

    def __init__(self, number: int, limits: Limits, times: StepTimes) -> None:
        self.number = number
        self.limits = limits
        self.times = times
        self.cache = PrefixCache(limits.cache_tokens)
        self.phase: Phase | None = None
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.is_alive = True
        self.num_computed_tokens = 0
        self.num_preemptions = 0
        self.busy_seconds = 0.0

    @property
    def load(self) -> int:
        """Unfinished requests."""
        return len(self.waiting) + len(self.running)

    def add(self, request: Request, now: float) -> None:
        """Queues a request. A phase that runs ends with its current step."""
        assert self.is_alive
        self.waiting.append(request)
        phase = self.phase
        if phase is not None and phase.num_steps > 1:
            phase.num_steps = self._steps_until(phase, now)
            phase.seconds = self._seconds(phase)

    def fail(self) -> list[Request]:
        """Ends all requests and returns them; the cache is lost."""
        lost = [*self.running, *self.waiting]
        for request in lost:
            request.start_over()
        self.running, self.phase = [], None
        self.waiting.clear()
        self.cache.clear()
        self.is_alive = False
        return lost

    def start(self, now: float) -> Phase | None:
        """Begins the next phase; returns None if there is nothing to run."""
        assert self.phase is None
        chunks: list[tuple[Request, int]] = []
        decodes = [each for each in self.running if each.num_computed == each.num_tokens - 1]
        decodes = self._secure(decodes)
        self._grow(decodes, 1)
        budget = self.limits.max_num_batched_tokens - len(decodes)
        for request in self.running:
            if request.num_computed < request.num_tokens - 1 and budget > 0:
                tokens = min(request.num_tokens - request.num_computed, budget)
                chunks.append((request, tokens))
                budget -= tokens
        self._admit(chunks, budget)
        if not decodes and not chunks:
            return None
        context = sum(request.num_computed + 1 for request in decodes)
        phase = Phase(now, 1, decodes, chunks, context, 0.0)
        if not chunks:
            phase.num_steps = self._most_steps(decodes)
        phase.seconds = self._seconds(phase)
        self.phase = phase
        return phase

    def end(self, now: float) -> list[Request]:
        """Ends the phase; returns the requests that have their whole answer."""
        phase = self.phase
        assert phase is not None
        self.phase = None
        self.busy_seconds += phase.seconds
        finished: list[Request] = []
        self._grow(phase.decodes, phase.num_steps)
        for request, tokens in phase.chunks:
            self.num_computed_tokens += tokens
            request.num_computed += tokens
            assert request.lease is not None
            self.cache.computed(request.lease, request.num_computed)
            if request.num_computed == request.num_tokens:
                self._answer(request, 1, now, finished)
        for request in phase.decodes:
            self.num_computed_tokens += phase.num_steps
            request.num_computed += phase.num_steps
            self._answer(request, phase.num_steps, now, finished)
        return finished

    def _answer(self, request: Request, tokens: int, now: float, finished: list[Request]) -> None:
        request.num_answered += tokens
        if request.first_token is None:
            request.first_token = now
        if request.num_answered >= request.max_tokens:
            request.end = now
            self._release(request)
            finished.append(request)

    def _release(self, request: Request) -> None:
        assert request.lease is not None
        self.cache.end(request.lease, request.num_computed)
        request.lease = None
        self.running.remove(request)

    def _admit(self, chunks: list[tuple[Request, int]], budget: int) -> None:
        passed: list[Request] = []
        while budget > 0 and self.waiting and len(self.running) < self.limits.max_num_seqs:
            request = self.waiting.popleft()
            if self.cache.awaits(request.session):
                passed.append(request)
                continue
            headroom = int(self.limits.watermark * self.cache.capacity) if self.running else 0
            lease = self.cache.begin(request.session, request.num_tokens, headroom)
            if lease is None:
                assert self.running, f"a prompt of {request.num_tokens} tokens fits nowhere"
                passed.append(request)
                break
            request.lease = lease
            request.num_computed = lease.cached_tokens
            if request.num_cached_tokens is None:
                request.num_cached_tokens = lease.cached_tokens
            tokens = min(request.num_tokens - request.num_computed, budget)
            self.running.append(request)
            chunks.append((request, tokens))
            budget -= tokens
        self.waiting.extendleft(reversed(passed))

    def _secure(self, decodes: list[Request]) -> list[Request]:
        """Preempts the last running requests until each decode has a block for one more token."""
        while True:
            crossing = sum(request.num_computed % BLOCK == 0 for request in decodes)
            if crossing <= self.cache.num_available() or len(self.running) == 1:
                return decodes
            last = self.running[-1]
            if last in decodes:
                decodes.remove(last)
            self._release(last)
            self.num_preemptions += 1
            self.waiting.appendleft(last)

    def _grow(self, decodes: list[Request], num_steps: int) -> None:
        for request in decodes:
            assert request.lease is not None
            self.cache.grow(request.lease, request.num_computed + num_steps)

    def _most_steps(self, decodes: list[Request]) -> int:
        """Steps until a decode ends, or until the blocks may not suffice."""
        steps = min(request.max_tokens - request.num_answered for request in decodes)
        available = self.cache.num_available()
        while steps > 1 and len(decodes) * (steps // BLOCK + 1) > available:
            steps //= 2
        return steps

    def _seconds(self, phase: Phase) -> float:
        seconds = self.times.decodes(len(phase.decodes), phase.context, phase.num_steps)
        for request, tokens in phase.chunks:
            seconds += self.times.chunk(request.num_computed, tokens)
        return seconds

    def _steps_until(self, phase: Phase, now: float) -> int:
        """Steps of a phase that have begun by now; at least one."""
        rows, context = len(phase.decodes), phase.context
        low, high = 1, phase.num_steps
        while low < high:
            middle = (low + high) // 2
            if phase.start + self.times.decodes(rows, context, middle) >= now:
                high = middle
            else:
                low = middle + 1
        return low
