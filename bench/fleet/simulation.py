"""Simulation: runs sessions on replicas behind a router, event by event."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

from .replica import Replica, Request
from .routing import Policy
from .traffic import Session

RETRY_SECONDS = 1.0


@dataclass(frozen=True)
class Failure:
    """Replicas that die at the same time and come back with empty caches.

    Attributes:
        at: Seconds.
        seconds: Until they are back.
        replicas: Their numbers.
    """

    at: float
    seconds: float
    replicas: Sequence[int]


def pause(seed: int, session: Session, turn: int, mean: float) -> float:
    """Seconds before the prompt of a turn. They do not depend on what happens elsewhere."""
    return random.Random(f"{seed} {session.key} {turn}").expovariate(1 / mean)


class Simulation:
    """Sessions on replicas.

    The next prompt of a session arrives some time after the last token of its answer, drawn from an
    exponential distribution. A client whose replica dies sends its prompt again after a second.

    Args:
        think_seconds: Mean time between an answer and the next prompt.
        seconds: No prompt arrives after that.

    Attributes:
        requests: All that have arrived.
        busy: Share of the time until `seconds` in which each replica ran steps.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        policy: Policy,
        sessions: Sequence[Session],
        *,
        think_seconds: float,
        seconds: float,
        failures: Sequence[Failure] = (),
        seed: int = 0,
    ) -> None:
        self.replicas, self.requests = replicas, list[Request]()
        self.busy = list[float]()
        self._policy = policy
        self._think_seconds, self._seconds = think_seconds, seconds
        self._seed = seed
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = count()  # orders events of the same time
        self._alive = list(replicas)
        for session in sessions:
            self._at(session.start, partial(self._arrive, session, session.first_turn))
        self._at(seconds, self._note_busy)
        for failure in failures:
            self._at(failure.at, partial(self._fail, failure))
            self._at(failure.at + failure.seconds, partial(self._recover, failure))

    def run(self) -> list[Request]:
        """Runs until all requests have ended; returns them in order of arrival."""
        while self._events:
            now, _, event = heapq.heappop(self._events)
            event(now)
        assert all(request.end is not None for request in self.requests)
        return self.requests

    def _at(self, time: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), event))

    def _arrive(self, session: Session, turn: int, now: float) -> None:
        if now > self._seconds:
            return
        recording = session.recording
        request = Request(
            session, turn, now, recording.prompts[turn], recording.turns[turn].answer_tokens
        )
        self.requests.append(request)
        self._send(request, now)

    def _send(self, request: Request, now: float) -> None:
        if not self._alive:
            self._at(now + RETRY_SECONDS, partial(self._send, request))
            return
        replica = self._policy.choose(request, self._alive)
        phase = replica.phase
        replica.add(request, now)
        if phase is None:
            self._start(replica, now)
        else:  # perhaps shorter now; an event that comes too late finds another phase
            self._at(phase.start + phase.seconds, partial(self._end, replica, phase))

    def _start(self, replica: Replica, now: float) -> None:
        phase = replica.start(now)
        if phase is not None:
            self._at(now + phase.seconds, partial(self._end, replica, phase))

    def _end(self, replica: Replica, phase: object, now: float) -> None:
        if replica.phase is not phase:
            return
        for request in replica.end(now):
            turn = request.turn + 1
            if turn < len(request.session.recording.turns):
                self._think(request.session, turn, now)
        self._start(replica, now)

    def _think(self, session: Session, turn: int, now: float) -> None:
        then = now + pause(self._seed, session, turn, self._think_seconds)
        self._at(then, partial(self._arrive, session, turn))

    def _note_busy(self, now: float) -> None:
        for replica in self.replicas:
            current = 0.0 if replica.phase is None else now - replica.phase.start
            self.busy.append((replica.busy_seconds + current) / now)

    def _fail(self, failure: Failure, now: float) -> None:
        lost = []
        for number in failure.replicas:
            lost += self.replicas[number].fail()
        self._alive = [each for each in self.replicas if each.is_alive]
        for request in lost:
            request.num_retries += 1
            request.num_cached_tokens = None
            self._at(now + RETRY_SECONDS, partial(self._send, request))

    def _recover(self, failure: Failure, now: float) -> None:
        for number in failure.replicas:
            self.replicas[number].is_alive = True
        self._alive = [each for each in self.replicas if each.is_alive]
