"""Arrivals: when sessions start."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import count

from .traffic import Recording, Session

BURST = 16  # sessions
BURST_SECONDS = 2.0


def sessions(
    recordings: Sequence[Recording],
    *,
    live: int,
    turn_seconds: float,
    seconds: float,
    bursts: bool,
    seed: int,
) -> list[Session]:
    """Returns sessions that keep about `live` of them going for `seconds`.

    At the start, `live` sessions are somewhere in their recordings; their first prompts arrive
    within 30 s. Others start as a Poisson process. With `bursts`, the starts of the process bring
    16 sessions of one group within 2 s each.

    Args:
        turn_seconds: Expected time from a prompt to the next one.
    """
    rng = random.Random(seed)
    keys = count()
    lengths = [len(each.turns) for each in recordings]
    found = []
    for recording in rng.choices(recordings, lengths, k=live):
        turn = rng.randrange(len(recording.turns))
        found.append(Session(next(keys), recording, rng.uniform(0, 30), turn))
    rate = live / (turn_seconds * sum(lengths) / len(lengths))
    groups: dict[int, list[Recording]] = {}
    for recording in recordings:
        groups.setdefault(recording.group, []).append(recording)
    now = 0.0
    while True:
        now += rng.expovariate(rate / BURST if bursts else rate)
        if now >= seconds:
            return found
        first = rng.choice(recordings)
        if not bursts:
            found.append(Session(next(keys), first, now))
            continue
        for recording in rng.choices(groups[first.group], k=BURST):
            found.append(Session(next(keys), recording, now + rng.uniform(0, BURST_SECONDS)))
