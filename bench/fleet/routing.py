"""Routing policies: which replica gets a prompt."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from .replica import Replica, Request

#: A replica that holds the longest prefix is passed over if it has more unfinished requests than
#: this many times those of the least loaded one, and this many more (as sglang's router does).
RELATIVE_IMBALANCE, ABSOLUTE_IMBALANCE = 1.5, 8
#: Replicas whose load is compared where all are alike.
SAMPLES = 8
_LOAD_REPORT = 64  # prompts after which the upper router of a tree learns the mean load


class Policy(Protocol):
    """Chooses among the replicas that are alive."""

    def choose(self, request: Request, alive: Sequence[Replica]) -> Replica: ...


class Random:
    """Any replica."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def choose(self, request: Request, alive: Sequence[Replica]) -> Replica:
        return self._rng.choice(alive)


class RoundRobin:
    """One after another."""

    def __init__(self, seed: int) -> None:
        self._next = 0

    def choose(self, request: Request, alive: Sequence[Replica]) -> Replica:
        self._next += 1
        return alive[self._next % len(alive)]


class LeastLoaded:
    """The replica with the fewest unfinished requests, of some that are drawn."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def choose(self, request: Request, alive: Sequence[Replica]) -> Replica:
        drawn = self._rng.sample(alive, min(SAMPLES, len(alive)))
        return min(drawn, key=lambda replica: replica.load)


class Sticky:
    """The replica that had the session before; a new session goes to a least loaded one."""

    def __init__(self, seed: int) -> None:
        self._least = LeastLoaded(seed)
        self._homes: dict[int, Replica] = {}

    def choose(self, request: Request, alive: Sequence[Replica]) -> Replica:
        home = self._homes.get(request.session.key)
        if home is None or not home.is_alive:
            home = self._homes[request.session.key] = self._least.choose(request, alive)
        return home


class CacheAware:
    """The replica with the longest cached prefix, then the least loaded.

    It asks the replicas themselves, as a router can that gets events of their caches. Of those that
    hold the prefix of a group only, it asks the ones it sent the group to most recently.

    Args:
        only_own: Ignores prefixes that several sessions have in common.
    """

    def __init__(self, seed: int, only_own: bool = False) -> None:
        self._only_own = only_own
        self._least = LeastLoaded(seed)
        self._sessions: dict[int, list[Replica]] = {}
        self._groups: dict[int, list[Replica]] = {}

    def choose(self, request: Request, alive: Sequence[Replica]) -> Replica:
        session = request.session
        least = self._least.choose(request, alive)
        homes = self._sessions.setdefault(session.key, [])
        group = self._groups.setdefault(session.recording.group, [])
        if self._only_own:
            group.clear()
        asked = [least, *(each for each in [*homes, *group] if each.is_alive)]
        limit = max(least.load * RELATIVE_IMBALANCE, least.load + ABSOLUTE_IMBALANCE)
        asked = [each for each in asked if each.load <= limit]
        found = max(
            asked,
            key=lambda each: (each.cache.match(session, request.num_prompt_tokens), -each.load),
        )
        for recent in (homes, group):
            if found in recent:
                recent.remove(found)
            recent.append(found)
            del recent[:-SAMPLES]
        return found


class Tree:
    """Two levels: sessions are hashed to racks, and a rack's router follows their own prefixes.

    The upper router keeps no state but the load of each rack. A rack that is dead, or has a quarter
    more than the mean load, is skipped for the next one in the order of the session's hashes.

    Args:
        rack: Replicas of a rack: consecutive numbers.
    """

    def __init__(self, seed: int, rack: int = 8) -> None:
        self._seed, self._rack = seed, rack
        self._lower: dict[int, CacheAware] = {}
        self._alive: Sequence[Replica] = ()
        self._racks: dict[int, list[Replica]] = {}
        self._num_chosen = 0
        self._limit = 0.0

    def choose(self, request: Request, alive: Sequence[Replica]) -> Replica:
        self._note_alive(alive)
        if self._num_chosen % _LOAD_REPORT == 0:
            mean = sum(replica.load for replica in alive) / len(alive)
            self._limit = 1.25 * mean + ABSOLUTE_IMBALANCE
        self._num_chosen += 1
        key = request.session.key
        order = sorted(self._racks, key=lambda rack: hash((key, rack)))
        rack = next((rack for rack in order if self._load(rack) <= self._limit), order[0])
        return self._within(rack, request)

    def _note_alive(self, alive: Sequence[Replica]) -> None:
        if alive is self._alive:
            return
        self._alive, self._racks = alive, {}
        for replica in alive:
            self._racks.setdefault(replica.number // self._rack, []).append(replica)

    def _within(self, rack: int, request: Request) -> Replica:
        if rack not in self._lower:
            self._lower[rack] = CacheAware(self._seed + rack, only_own=True)
        return self._lower[rack].choose(request, self._racks[rack])

    def _load(self, rack: int) -> float:
        members = self._racks[rack]
        return sum(each.load for each in members) / len(members)


class CountingTree(Tree):
    """A tree whose upper router counts live sessions.

    A new session goes to one of two racks, chosen by its hashes: the one with fewer sessions for
    each replica. It stays there until it ends or the rack is lost.
    """

    def __init__(self, seed: int, rack: int = 8) -> None:
        super().__init__(seed, rack)
        self._homes: dict[int, int] = {}
        self._num_sessions: dict[int, int] = {}

    def choose(self, request: Request, alive: Sequence[Replica]) -> Replica:
        self._note_alive(alive)
        session = request.session
        rack = self._homes.get(session.key)
        if rack not in self._racks:
            if rack is not None:
                self._num_sessions[rack] -= 1
            order = sorted(self._racks, key=lambda rack: hash((session.key, rack)))
            rack = min(order[:2], key=self._sessions_of_a_replica)
            self._homes[session.key] = rack
            self._num_sessions[rack] = self._num_sessions.get(rack, 0) + 1
        if request.turn == len(session.recording.turns) - 1:
            del self._homes[session.key]
            self._num_sessions[rack] -= 1
        return self._within(rack, request)

    def _sessions_of_a_replica(self, rack: int) -> float:
        return self._num_sessions.get(rack, 0) / len(self._racks[rack])


POLICIES: dict[str, Callable[[int], Policy]] = {
    "random": Random,
    "round robin": RoundRobin,
    "least loaded": LeastLoaded,
    "sticky": Sticky,
    "cache-aware": CacheAware,
    "own prefix": partial(CacheAware, only_own=True),
    "tree": Tree,
    "counting tree": CountingTree,
}
