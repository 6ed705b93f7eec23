"""Placement: chooses the replica of a model that answers a request.

The first rule that finds a replica decides:

1. **stored**: the replica that holds the response which the request continues; see `replicas`.
2. **session**: the replica that had the session before.
3. **prefix**: the replica with the longest cached prefix.
4. **load**: the replica with the fewest requests; among these the one with the longest cached
   prefix, then the one that has cached least.

A prefix counts if it is at least `MIN_SHARE` of the text. The second and the third rule pass over
an overloaded replica: one that has more than `OVERLOAD_FACTOR` times the requests of the least
loaded one and `OVERLOAD_REQUESTS` on top.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from mlx_paged.server.router.prefixes import Prefix, PrefixIndex, prefix_of

OVERLOAD_FACTOR = 1.5
OVERLOAD_REQUESTS = 4
MIN_SHARE = 0.25
#: The header that names a session.
SESSION_HEADER = "x-session-id"
# Fields of a body that name a session, the most specific one first.
_SESSION_FIELDS = ("prompt_cache_key", "user")
# Bytes of a body that take a millisecond to parse and hash.
_LONG_BODY = 1 << 18
_MAX_SESSIONS = 1 << 14
_MAX_NAME = 512


class Reason(StrEnum):
    """The rule that has chosen a replica."""

    STORED = "stored"
    SESSION = "session"
    PREFIX = "prefix"
    LOAD = "load"


@dataclass(eq=False)
class Replica:
    """A running process of a model.

    Attributes:
        socket: The Unix domain socket that it listens on.
        number: Its place among the model's processes. One that is started again keeps it.
        num_requests: Requests that were sent to it and have not ended.
        prefixes: What it has cached.
    """

    socket: Path
    number: int = 0
    num_requests: int = 0
    prefixes: PrefixIndex = field(default_factory=PrefixIndex)


class RoutedRequest:
    """A request, as far as it matters to placement. Its body is parsed when it is first needed.

    The event loop calls `prepare` before it reads anything else.

    Args:
        headers: With names in lower case.
        body: JSON, or empty.
    """

    def __init__(self, headers: Mapping[str, str], body: bytes) -> None:
        self._headers, self._bytes = headers, body

    async def prepare(self) -> None:
        """Parses and hashes a long body on a thread, so that other streams go on meanwhile."""
        if len(self._bytes) > _LONG_BODY:
            await asyncio.to_thread(getattr, self, "prefix")

    @cached_property
    def _body(self) -> dict[str, Any]:
        try:
            body = from_json(self._bytes)
        except ValueError:  # The process that gets it says what is wrong.
            return {}
        return body if isinstance(body, dict) else {}

    @cached_property
    def prefix(self) -> Prefix:
        """The beginnings of its text."""
        return prefix_of(self._body)

    @property
    def session(self) -> str | None:
        """The name of its session: a header, a cache key, or a user; None: it has none."""
        metadata = self._body.get("metadata")  # Anthropic's place for the user
        names = (
            self._headers.get(SESSION_HEADER),
            *(self._body.get(name) for name in _SESSION_FIELDS),
            metadata.get("user_id") if isinstance(metadata, dict) else None,
        )
        return next((name[:_MAX_NAME] for name in names if isinstance(name, str) and name), None)

    @property
    def previous_response_id(self) -> str | None:
        """The stored response that it continues; None: it continues none."""
        given = self._body.get("previous_response_id")
        return given if isinstance(given, str) and given else None


class Placement:
    """Chooses among replicas, and remembers the sessions.

    Attributes:
        counts: Number of requests that each rule has placed.
    """

    def __init__(self) -> None:
        self.counts: Counter[Reason] = Counter()
        self._sessions: OrderedDict[str, int] = OrderedDict()  # to the replica's number

    def choose(
        self, replicas: Sequence[Replica], request: RoutedRequest, owner: Replica | None = None
    ) -> Replica:
        """Returns the replica for a request, and notes that the request's text is cached there.

        Args:
            replicas: Those that run; at least one.
            owner: The replica that holds the state which the request needs; None: any will do.
        """
        chosen, reason = self._chosen(replicas, request, owner)
        self.counts[reason] += 1
        chosen.prefixes.add(request.prefix)
        if (session := request.session) is not None:
            self._sessions[session] = chosen.number
            self._sessions.move_to_end(session)
            if len(self._sessions) > _MAX_SESSIONS:
                self._sessions.popitem(last=False)
        return chosen

    def _chosen(
        self, replicas: Sequence[Replica], request: RoutedRequest, owner: Replica | None
    ) -> tuple[Replica, Reason]:
        if owner is not None:
            return owner, Reason.STORED
        least = min(replica.num_requests for replica in replicas)
        bound = OVERLOAD_FACTOR * least + OVERLOAD_REQUESTS
        free = [replica for replica in replicas if replica.num_requests <= bound]
        number = None if request.session is None else self._sessions.get(request.session)
        for replica in free:
            if replica.number == number:
                return replica, Reason.SESSION
        matches = {replica: _match(replica, request.prefix) for replica in replicas}
        longest = max(matches.values())
        if longest:
            holders = [replica for replica in free if matches[replica] == longest]
            if holders:
                return min(holders, key=lambda r: r.num_requests), Reason.PREFIX
        return (
            min(replicas, key=lambda r: (r.num_requests, -matches[r], len(r.prefixes))),
            Reason.LOAD,
        )


def _match(replica: Replica, prefix: Prefix) -> int:
    """Returns how many chunks of a text a replica has cached; 0 if they are a small part."""
    num_chunks = replica.prefixes.match(prefix)
    return num_chunks if prefix.share(num_chunks) >= MIN_SHARE else 0
