"""Deadlines: which requests have run out of time."""

from __future__ import annotations

import math

from mlx_paged.core.request import Request


class Deadlines:
    """The unfinished requests that have a deadline. Asking costs nothing until one is due."""

    def __init__(self) -> None:
        self._requests: dict[str, Request] = {}
        self._next = math.inf  # never later than the earliest deadline

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: Request) -> None:
        assert request.deadline is not None
        self._requests[request.request_id] = request
        self._next = min(self._next, request.deadline)

    def discard(self, request: Request) -> None:
        self._requests.pop(request.request_id, None)

    def pop_due(self, now: float) -> list[Request]:
        """Takes out the requests whose time is up, in order of arrival."""
        if now < self._next:
            return []
        by_deadline = [(_deadline(request), request) for request in self._requests.values()]
        due = [request for deadline, request in by_deadline if deadline <= now]
        for request in due:
            self.discard(request)
        self._next = min((d for d, _ in by_deadline if d > now), default=math.inf)
        return due


def _deadline(request: Request) -> float:
    return math.inf if request.deadline is None else request.deadline
