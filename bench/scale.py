"""Simulates many servers behind a router: hit rates and tails, by policy, size and failure.

    python bench/scale.py               # all parts; writes results/scale.json
    python bench/scale.py --only check  # some parts; keeps the others
    python bench/scale.py --traffic     # makes fleet/recordings.json anew, see recorded.py

- `check`: a real engine with the embedded model plays chats, and the simulator plays the same ones,
  see fleet/on_engine.py.
- `chats`, `agents`, `crowded`, `thousand`: each replica is an H200 with Llama-3.2-3B, whose
  step times were measured.
- `macs`: the same with assumed times; no Mac has been measured.
- `failures`: a rack of 8 of 64 replicas is lost for a minute.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import harness
from fleet import arrivals, metrics, step_times
from fleet.replica import Limits, Replica
from fleet.routing import POLICIES
from fleet.simulation import Failure, Simulation
from fleet.traffic import Recording, grouped, load, save

RECORDINGS = Path(__file__).parent / "fleet/recordings.json"
NUM_CHATS = 2000
WARM_UP, END = 120.0, 300.0  # seconds; prompts that arrive between them are measured
THINK = {"chats": 30.0, "agents": 5.0}  # mean seconds between an answer and the next prompt
#: Llama-3.2-3B has 114,688 bytes of KV cache a token: 115 GB of an H200.
H200 = Limits(cache_tokens=1_000_000)
#: 57 GB of a Mac with 96 GB.
MAC = Limits(cache_tokens=500_000, max_num_batched_tokens=2048)
#: 4.8 TB/s to 819 GB/s (M3 Ultra), and 990 dense TFLOPS to an assumed 25.
MAC_DECODE, MAC_PREFILL = 5.9, 40.0
FEW = ("random", "sticky", "cache-aware", "own prefix", "tree")


def simulated(
    recordings: Sequence[Recording],
    policy: str,
    replicas: int,
    live: int,
    *,
    think: float,
    limits: Limits = H200,
    times: step_times.StepTimes | None = None,
    bursts: bool = False,
    failures: Sequence[Failure] = (),
    windows: Sequence[tuple[float, float]] = ((WARM_UP, END),),
    end: float = END,
    seed: int = 0,
) -> dict[str, Any]:
    """Runs one simulation; returns its figures.

    Args:
        live: Sessions for each replica.
        windows: The figures are of the prompts that arrive within each, in seconds.
    """
    started = time.perf_counter()
    times = step_times.h200_3b() if times is None else times
    made = [Replica(number, limits, times) for number in range(replicas)]
    sessions = arrivals.sessions(
        recordings, live=live * replicas, turn_seconds=1.3 * think, seconds=end, bursts=bursts,
        seed=seed,
    )  # fmt: skip
    simulation = Simulation(
        made, POLICIES[policy](seed), sessions, think_seconds=think, seconds=end,
        failures=failures, seed=seed,
    )  # fmt: skip
    requests = simulation.run()
    busy = simulation.busy
    found = {
        "policy": policy,
        "replicas": replicas,
        "live_sessions_per_replica": live,
        "arrivals": "bursts" if bursts else "Poisson",
        "busy_mean": sum(busy) / replicas,
        "busy_max": max(busy),
        "num_preemptions": sum(replica.num_preemptions for replica in made),
        "windows": [{"from": a, "to": b, **metrics.summary(requests, a, b)} for a, b in windows],
        "seed": seed,
        "wall_seconds": time.perf_counter() - started,
    }
    print(json.dumps(found), flush=True)
    return found


def chats(traffic: dict[str, list[Recording]]) -> list[dict[str, Any]]:
    return [
        simulated(traffic["chats"], policy, 8, 300, think=THINK["chats"], bursts=bursts)
        for bursts in (False, True)
        for policy in POLICIES
    ]


def agents(traffic: dict[str, list[Recording]]) -> list[dict[str, Any]]:
    cases = [(replicas, live, False, policy) for replicas in (8, 64) for live in (4, 8)
             for policy in POLICIES]  # fmt: skip
    cases += [(64, 4, True, policy) for policy in FEW]
    return [
        simulated(
            traffic["agents"], policy, replicas, live, think=THINK["agents"], bursts=bursts
        )
        for replicas, live, bursts, policy in cases
    ]  # fmt: skip


def crowded(traffic: dict[str, list[Recording]]) -> list[dict[str, Any]]:
    """Full caches, which trees fill more or less evenly."""
    return [
        simulated(traffic["agents"], policy, 64, 8, think=THINK["agents"], seed=seed)
        for policy in ("own prefix", "tree", "counting tree")
        for seed in range(3)
    ]


def thousand(traffic: dict[str, list[Recording]]) -> list[dict[str, Any]]:
    return [
        simulated(
            traffic["agents"], policy, 1000, 4, think=THINK["agents"], windows=[(90, 180)], end=180
        )
        for policy in FEW
    ]  # fmt: skip


def macs(traffic: dict[str, list[Recording]]) -> list[dict[str, Any]]:
    times = step_times.h200_3b().scaled(MAC_DECODE, MAC_PREFILL)
    return [
        {"traffic": kind} | simulated(
            traffic[kind], policy, 40, live, think=THINK[kind], limits=MAC, times=times, end=900,
            windows=[(300, 900)],
        )
        for kind, live in (("agents", 1), ("chats", 20))
        for policy in POLICIES
    ]  # fmt: skip


def failures(traffic: dict[str, list[Recording]]) -> list[dict[str, Any]]:
    lost = Failure(180.0, 60.0, range(8))
    return [
        simulated(
            traffic["agents"], policy, 64, live, think=THINK["agents"], failures=[lost],
            windows=[(120, 178), (178, 210), (210, 240), (240, 300)],
        )
        for live in (2, 4)
        for policy in FEW
    ]  # fmt: skip


def check(traffic: dict[str, list[Recording]]) -> list[dict[str, Any]]:
    from fleet.on_engine import compared

    return compared(traffic["chats"])


PARTS: dict[str, Callable[[dict[str, list[Recording]]], list[dict[str, Any]]]] = {
    "check": check, "chats": chats, "agents": agents, "thousand": thousand,
    "crowded": crowded,
    "macs": macs, "failures": failures,
}  # fmt: skip


def make_recordings() -> None:
    """Writes the lengths of the recorded conversations."""
    import recorded

    def lengths(conversations: Sequence[recorded.Conversation]) -> list[Recording]:
        return grouped([[tokens for _, tokens in each] for each in conversations])

    found = {"agents": lengths(recorded.agents()), "chats": lengths(recorded.chats(NUM_CHATS))}
    save(RECORDINGS, found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--traffic", action="store_true", help="make recordings.json anew, and end")
    arguments = parser.parse_args()
    if arguments.traffic:
        make_recordings()
        return
    traffic = load(RECORDINGS)
    path = harness.RESULTS / "scale.json"
    times = step_times.h200_3b()
    for name in arguments.only:
        environment = harness.environment()
        rows = PARTS[name](traffic)
        parts = json.loads(path.read_text())["parts"] if path.exists() else {}
        parts[name] = {"environment": environment, "results": rows}
        results = {"environment": environment, "step_times": asdict(times), "parts": parts}
        harness.save("scale", results)


if __name__ == "__main__":
    main()
