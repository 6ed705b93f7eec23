"""Host time of scheduling when many sequences wait or arrive.

They wait for one long prompt, or for a sibling's; they arrive at once, in an empty and a full pool.

Needs no model and no MLX: it runs the scheduler and the KV store alone, with one step of overlap as
in the engine. Every sampled token is the same. Times are CPU times of the thread, so a busy machine
does not affect them.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections.abc import Iterator
from typing import Any

from harness import print_table, save

from mlx_paged.core import (
    KVManager,
    PromptHistory,
    Request,
    Scheduler,
    SchedulerConfig,
    StopPolicy,
)

LONG_PROMPT = 30_000


class Engine:
    """Schedules a step and commits the previous one; times both."""

    def __init__(self, num_blocks: int, **config: Any) -> None:
        self.scheduler = Scheduler(
            SchedulerConfig(**config), KVManager(num_blocks, 32), history=PromptHistory()
        )
        self.in_flight: Any = None
        self.schedule_ms: list[float] = []
        self.commit_ms: list[float] = []

    def step(self) -> None:
        start = time.thread_time()
        output = self.scheduler.schedule()
        scheduled = time.thread_time()
        if self.in_flight is not None:
            tokens = [[5] if samples else [] for samples in self.in_flight.batch.samples]
            self.scheduler.update_from_output(self.in_flight, tokens)
        self.in_flight = output
        self.schedule_ms.append((scheduled - start) * 1e3)
        self.commit_ms.append((time.thread_time() - scheduled) * 1e3)

    def run(self) -> Iterator[int]:
        freeze()
        while self.scheduler.has_unfinished or self.in_flight is not None:
            self.step()
            yield len(self.schedule_ms)


def freeze() -> None:
    """Excludes existing objects from garbage collection, like the engine's thread."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def waiting(num_waiting: int, timeout: float | None, distinct: int) -> dict[str, Any]:
    """Requests that wait for one of `distinct` long prompts.

    Only the steps that compute those prompts count.
    """
    engine = Engine(40_000 + 940 * distinct)
    scheduler = engine.scheduler
    stems = [[1 + d, *range(10, 10 + LONG_PROMPT)] for d in range(distinct)]
    owners = [Request(f"owner{d}", stem, StopPolicy(8)) for d, stem in enumerate(stems)]
    for owner in owners:
        scheduler.add(owner)
    engine.step()
    for i in range(num_waiting):
        prompt = [*stems[i % distinct], 50_000 + i, 1, 2, 3]
        scheduler.add(Request(str(i), prompt, StopPolicy(4), timeout=timeout))
    first = len(engine.schedule_ms)
    freeze()
    while any(owner.sequences[0].num_output_tokens == 0 for owner in owners):
        engine.step()
    ms = sorted(engine.schedule_ms[first:])
    return {
        "num_waiting": num_waiting,
        "prompts_awaited": distinct,
        "timeouts": timeout is not None,
        "steps": len(ms),
        "schedule_ms_median": round(ms[len(ms) // 2], 3),
        "schedule_ms_max": round(ms[-1], 3),
    }


def answers(n: int, prompt_len: int = 100, max_tokens: int = 8) -> dict[str, Any]:
    """One request with `n` answers, and `n` requests with one answer each."""
    result: dict[str, Any] = {"n": n}
    for name, requests in (
        ("n", [Request("a", list(range(prompt_len)), StopPolicy(max_tokens), n=n)]),
        (
            "separate",
            [Request(str(i), list(range(prompt_len)), StopPolicy(max_tokens)) for i in range(n)],
        ),
    ):
        engine = Engine(40_000)
        for request in requests:
            engine.scheduler.add(request)
        steps = sum(1 for _ in engine.run())
        seconds = (sum(engine.schedule_ms) + sum(engine.commit_ms)) / 1e3
        result[f"{name}_steps"], result[f"{name}_seconds"] = steps, round(seconds, 3)
    return result


def bursts(num_prompts: int, prompt_len: int = 1024, answer_len: int = 128) -> Iterator[Any]:
    """Bursts of `num_prompts` prompts at once, in a pool with room for 600 / 256 times as many.

    The third one is the first to evict, and it evicts a block for every block that it takes.
    """
    num_blocks = num_prompts * (prompt_len + answer_len) // 32
    engine = Engine(num_blocks * 600 // 256, max_num_seqs=num_prompts)
    scheduler, rng = engine.scheduler, random.Random(0)
    for burst in range(4):
        for i in range(num_prompts):
            prompt = [rng.randrange(100_000) for _ in range(prompt_len)]
            scheduler.add(Request(f"{burst} {i}", prompt, StopPolicy(answer_len)))
        freeze()
        first, before = len(engine.schedule_ms), scheduler.kv.counters.num_evictions
        while scheduler.num_waiting:
            engine.step()
        steps = slice(first, len(engine.schedule_ms))
        schedule, commit = engine.schedule_ms[steps], engine.commit_ms[steps]
        yield {
            "burst": burst + 1,
            "prompts": num_prompts,
            "evicted_per_prompt": (scheduler.kv.counters.num_evictions - before) // num_prompts,
            "schedule_us_per_prompt": round(sum(schedule) / num_prompts * 1e3, 1),
            "commit_us_per_prompt": round(sum(commit) / num_prompts * 1e3, 1),
            "longest_step_ms": round(max(map(sum, zip(schedule, commit))), 2),
        }
        for _ in engine.run():
            pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--waiting", type=int, nargs="*", default=[0, 1000, 5000])
    parser.add_argument("--answers", type=int, nargs="*", default=[32, 256, 1024])
    parser.add_argument("--bursts", type=int, nargs="*", default=[256])
    parser.add_argument("--no-save", action="store_true")
    args = parser.parse_args()
    results = {
        "waiting": [
            waiting(num, timeout, distinct)
            for num in args.waiting
            for timeout, distinct in ((None, 1), (1000.0, 1), (None, 4))
        ],
        "answers": [answers(n) for n in args.answers],
        "bursts": [each for n in args.bursts for each in bursts(n)],
    }
    for rows in results.values():
        if rows:
            print_table(list(rows[0]), [[str(value) for value in row.values()] for row in rows])
    if not args.no_save:
        print(save("scheduling", results))


if __name__ == "__main__":
    main()
