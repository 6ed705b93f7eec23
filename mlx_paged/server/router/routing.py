"""Placement: chooses the replica that answers a request.

The first rule that finds a replica decides:

1. **stored**: it holds the response that the request continues; see `replicas`.
2. **session**: it served the session before.
3. **prefix**: it has the longest cached prefix.
4. **load**: it has the fewest requests; ties go to the longest cached prefix, then to the replica
   that has cached least.

A prefix counts if it covers at least `MIN_SHARE` of the text. Rules 2 and 3 skip overloaded
replicas: those with more than `OVERLOAD_FACTOR` times the requests of the least loaded one, plus
`OVERLOAD_REQUESTS`.
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
# Body fields that name a session, most specific first.
_SESSION_FIELDS = ("prompt_cache_key", "user")
# Bytes of a body that take about a millisecond to parse and hash.
_LONG_BODY = 1 << 18
_MAX_SESSIONS = 1 << 14
_MAX_NAME = 512


class Reason(StrEnum):
    """The rule that chose a replica."""

    STORED = "stored"
    SESSION = "session"
    PREFIX = "prefix"
    LOAD = "load"


@dataclass(eq=False)
class Replica:
    """A running process of a model.

    Attributes:
        socket: The Unix domain socket that it listens on.
        number: Its index among the model's processes, kept across restarts.
        num_requests: Its unfinished requests.
        prefixes: Estimate of what it has cached.
    """

    socket: Path
    number: int = 0
    num_requests: int = 0
    prefixes: PrefixIndex = field(default_factory=PrefixIndex)


class RoutedRequest:
    """The parts of a request that matter to placement. Parses the body lazily.

    Await `prepare` before using any property.

    Args:
        headers: With names in lower case.
        body: JSON, or empty.
    """

    def __init__(self, headers: Mapping[str, str], body: bytes) -> None:
        self._headers, self._bytes = headers, body

    async def prepare(self) -> None:
        """Parses and hashes a long body on a thread, so that other streams continue meanwhile."""
        if len(self._bytes) > _LONG_BODY:
            await asyncio.to_thread(getattr, self, "prefix")

    @cached_property
    def _body(self) -> dict[str, Any]:
        try:
            body = from_json(self._bytes)
        except ValueError:  # The model's process reports what is wrong.
            return {}
        return body if isinstance(body, dict) else {}

    @cached_property
    def prefix(self) -> Prefix:
        """Its chunked text."""
        return prefix_of(self._body)

    @property
    def session(self) -> str | None:
        """The name of its session: from a header, a cache key or a user; None if it has none."""
        metadata = self._body.get("metadata")  # Anthropic's place for the user
        names = (
            self._headers.get(SESSION_HEADER),
            *(self._body.get(name) for name in _SESSION_FIELDS),
            metadata.get("user_id") if isinstance(metadata, dict) else None,
        )
        return next((name[:_MAX_NAME] for name in names if isinstance(name, str) and name), None)

    @property
    def previous_response_id(self) -> str | None:
        """Id of the stored response that it continues, or None."""
        given = self._body.get("previous_response_id")
        return given if isinstance(given, str) and given else None


class Placement:
    """Chooses among replicas, and remembers the sessions.

    Attributes:
        counts: Number of requests placed by each rule.
    """

    def __init__(self) -> None:
        self.counts: Counter[Reason] = Counter()
        self._sessions: OrderedDict[str, int] = OrderedDict()  # session -> replica number

    def choose(
        self, replicas: Sequence[Replica], request: RoutedRequest, owner: Replica | None = None
    ) -> Replica:
        """Returns the replica for a request, and records that it will cache the request's text.

        Args:
            replicas: The running ones; at least one.
            owner: The replica that holds state the request needs; None: any will do.
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
        fewest = min(replica.num_requests for replica in replicas)
        bound = OVERLOAD_FACTOR * fewest + OVERLOAD_REQUESTS
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
    """Returns the number of chunks that a replica has cached; 0 if they are too small a share."""
    num_chunks = replica.prefixes.match(prefix)
    return num_chunks if prefix.share(num_chunks) >= MIN_SHARE else 0
