"""Plays chats on a real engine and compares with the simulator.

Both have the same sessions, pauses and cache, and clocks that advance by the same model of a step's
seconds, so that nothing depends on what else the machine does. Beside it, the CPU seconds of the
engine's steps are compared with those of the model, which is fitted to steps measured before and
after.
"""

from __future__ import annotations

import heapq
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import count
from typing import Any

from mlx_paged import LLM, SamplingParams
from mlx_paged.core import SchedulerOutput

from . import metrics
from .arrivals import sessions
from .real import seconds_of
from .replica import Limits, Replica, Request
from .routing import RoundRobin
from .simulation import Simulation, pause
from .step_times import StepTimes, fitted
from .traffic import BLOCK, Recording, Session, Turn

LONGEST = 1000  # tokens of a chat
THINK = 2.0  # mean seconds between an answer and the next prompt
ANSWER_SECONDS = 2.0  # expected
SECONDS = 30.0
LIVE = 8  # sessions
LIMITS = Limits(cache_tokens=3200, max_num_seqs=64, max_num_batched_tokens=512)


def compared(chats: Sequence[Recording]) -> list[dict[str, Any]]:
    """Returns the figures of the engine and the simulator, and how many prompts are equal."""
    llm = _engine()
    times = measured_times(llm)
    played = sessions(
        short(chats),
        live=LIVE,
        turn_seconds=THINK + ANSWER_SECONDS,
        seconds=SECONDS,
        bursts=False,
        seed=0,
    )
    real, steps = play(_engine(), played, times)
    again = measured_times(llm)
    replica = Replica(0, LIMITS, times)
    simulation = Simulation(
        [replica], RoundRobin(0), played, think_seconds=THINK, seconds=SECONDS, seed=0
    )
    simulated = simulation.run()
    prompts = {(each.session.key, each.turn): each for each in simulated}
    pairs = [(each, prompts[each.session.key, each.turn]) for each in real]
    fitted_seconds = [(seconds_of(times, each) + seconds_of(again, each)) / 2 for each, _ in steps]
    measured = [seconds for _, seconds in steps]
    ratios = sorted(seconds / model for seconds, model in zip(measured, fitted_seconds))
    rows: list[dict[str, Any]] = [
        {"what": "step times before", **asdict(times)},
        {"what": "step times after", **asdict(again)},
        {"what": "engine", **metrics.summary(real, 0.0, SECONDS)},
        {"what": "simulator", **metrics.summary(simulated, 0.0, SECONDS)},
        {
            "what": "prompts",
            "engine": len(real),
            "simulator": len(simulated),
            "equal_hits": sum(a.num_cached_tokens == b.num_cached_tokens for a, b in pairs),
            "evicted_blocks": replica.cache.num_evicted,
            "largest_difference_ms": max(1000 * abs((a.end or 0) - (b.end or 0)) for a, b in pairs),
        },
        {
            "what": "CPU seconds of the engine's steps",
            "num_steps": len(steps),
            "measured": sum(measured),
            "fitted": sum(fitted_seconds),
            "ratio_p10_p50_p90": [ratios[len(ratios) * part // 10] for part in (1, 5, 9)],
        },
    ]
    for row in rows:
        print(row, flush=True)
    return rows


def short(chats: Sequence[Recording]) -> list[Recording]:
    """Chats that fit in the embedded model's context, or their first turns."""
    found = []
    for chat in chats:
        turns: list[Turn] = []
        total = 0
        for turn in chat.turns:
            total += turn.new_tokens + turn.answer_tokens
            if total > LONGEST:
                break
            turns.append(turn)
        if turns and not chat.shared_tokens:
            found.append(Recording(chat.group, 0, tuple(turns)))
    return found


def _engine() -> LLM:
    return LLM(
        num_gpu_blocks_override=1 + LIMITS.cache_tokens // BLOCK,
        max_num_seqs=LIMITS.max_num_seqs,
        max_num_batched_tokens=LIMITS.max_num_batched_tokens,
        long_prefill_token_threshold=0,
        block_size=BLOCK,
        async_scheduling=False,
    )


def measured_times(llm: LLM) -> StepTimes:
    """Measures steps of an engine: decodes of some rows and contexts, and prompts."""
    rng = random.Random(0)

    def prompts(rows: int, length: int) -> list[list[int]]:
        return [[rng.randrange(5, 4000) for _ in range(length)] for _ in range(rows)]

    def timed(rows: int, length: int, steps: int) -> tuple[float, float]:
        """Seconds until all prompts are computed, and of a step of decodes after that."""
        params = SamplingParams(temperature=0, max_tokens=steps + 2, ignore_eos=True)
        engine = llm.engine
        start = time.process_time()
        outputs = [
            engine.add_request(f"{number}", prompt, params)
            for number, prompt in enumerate(prompts(rows, length))
        ]
        while not all(output.outputs[0].token_ids for output in outputs):
            engine.step()
        computed = time.process_time() - start
        durations = []
        while engine.has_unfinished:
            start = time.process_time()
            engine.step()
            durations.append(time.process_time() - start)
        return computed, statistics.median(durations)

    timed(4, 64, 8)
    decodes, computed = [], []
    for rows, length in ((1, 64), (1, 1500), (4, 256), (4, 1200), (12, 64), (12, 400)):
        decodes.append((rows, rows * (length + 16), timed(rows, length, 32)[1]))
    for rows, length in ((1, 128), (1, 480), (1, 1500), (4, 120), (2, 1000)):
        runs = [timed(rows, length, 4)[0] for _ in range(3)]
        computed.append((rows, length, statistics.median(runs)))
    return fitted(decodes, computed)


def play(
    llm: LLM, played: Sequence[Session], times: StepTimes
) -> tuple[list[Request], list[tuple[SchedulerOutput, float]]]:
    """Plays sessions on an engine.

    Returns:
        The requests in order of arrival, and the steps with their CPU seconds.
    """
    engine = llm.engine
    steps: list[tuple[SchedulerOutput, float]] = []
    schedule = engine._scheduler.schedule

    def noted() -> SchedulerOutput | None:
        output = schedule()
        if output is not None:
            steps.append((output, 0.0))
        return output

    engine._scheduler.schedule = noted  # type: ignore[method-assign]
    numbers = count()
    events = [(each.start, next(numbers), each, each.first_turn) for each in played]
    heapq.heapify(events)
    tokens: dict[int, list[int]] = {}
    running: dict[str, tuple[Request, Any]] = {}
    requests: list[Request] = []
    now = 0.0
    while events or running:
        if not running:
            now = max(now, events[0][0])
        while events and events[0][0] <= now:
            arrival, _, session, turn = heapq.heappop(events)
            if arrival > SECONDS:
                continue
            made = session.recording.turns[turn]
            prompt = tokens.setdefault(session.key, [])
            missing = session.recording.prompts[turn] - len(prompt)
            prompt += _text(session.key, len(prompt), missing)
            params = SamplingParams(temperature=0, max_tokens=made.answer_tokens, ignore_eos=True)
            request = Request(session, turn, arrival, len(prompt), made.answer_tokens)
            name = f"{session.key} {turn}"
            running[name] = (request, engine.add_request(name, prompt, params))
            requests.append(request)
        start = time.process_time()
        engine.step()
        output, _ = steps[-1]
        steps[-1] = (output, time.process_time() - start)
        now += seconds_of(times, output)
        for name, (request, result) in list(running.items()):
            answer = result.outputs[0]
            if answer.token_ids and request.first_token is None:
                request.first_token = now
            if not answer.finish_reason:
                continue
            request.end, request.num_cached_tokens = now, result.num_cached_tokens
            session, turn = request.session, request.turn + 1
            tokens[session.key] += answer.token_ids
            del running[name]
            if turn < len(session.recording.turns):
                then = now + pause(0, session, turn, THINK)
                heapq.heappush(events, (then, next(numbers), session, turn))
    return requests, steps


def _text(key: int, start: int, length: int) -> list[int]:
    """Tokens that a user says. The first one is the session's own, so that no two begin alike."""
    rng = random.Random(f"{key} {start}")
    first = [5 + key % 4000] if not start else []
    return first + [rng.randrange(5, 4000) for _ in range(length - len(first))]
