"""The state half alone, without arrays: costs of a prefix, a search, a blocked request and a step.

python bench/state_half.py              # writes bench/results/state_half.json
"""

from __future__ import annotations

import argparse
import gc
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

from harness import save

from mlx_paged.core import (
    KVManager,
    PrefixQuery,
    Request,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
    StopPolicy,
)

BLOCK_SIZE = 32


def tokens(count: int, stride: int = 7919) -> list[int]:
    return [i * stride % 150_000 for i in range(count)]


def least_us(run: Callable[[], object], repeat: int) -> float:
    """Minimum wall time of `run` in microseconds, its cost without interference."""
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return round(min(times) * 1e6, 1)


def prefix_tree(num_tokens: int, repeat: int) -> dict[str, Any]:
    """Bytes per node, and the time to match a prompt whose whole prefix is cached."""
    kv = KVManager(2 * num_tokens // BLOCK_SIZE, BLOCK_SIZE)
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    tables = kv.admit([int(str(token)) for token in tokens(num_tokens)])
    assert tables is not None
    kv.launch_step(1)
    kv.on_step_evaluated(1)
    kv.commit(tables, num_tokens)
    kv.free(tables)
    del tables
    gc.collect()
    num_bytes = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    request = Request("match", [*tokens(num_tokens), 1], StopPolicy(max_tokens=1))
    scheduler = Scheduler(SchedulerConfig(), kv)
    [sequence] = scheduler.add(request)
    query = PrefixQuery(sequence.tokens)
    assert kv.match(query).num_tokens(BLOCK_SIZE) == num_tokens
    return {
        "cached_tokens": num_tokens,
        "bytes_per_node": round(num_bytes / len(kv.tree)),
        "match_us": least_us(lambda: kv.match(PrefixQuery(sequence.tokens)), repeat),
        "match_again_us": least_us(lambda: kv.match(query), repeat),
    }


def commit(scheduler: Scheduler, output: SchedulerOutput) -> None:
    scheduler.update_from_output(
        output, [[7] if samples else [] for samples in output.batch.samples]
    )


def step(scheduler: Scheduler) -> SchedulerOutput:
    output = scheduler.schedule()
    assert output is not None
    commit(scheduler, output)
    return output


def blocked_head(repeat: int) -> dict[str, Any]:
    """A step with one decode while a 70,000-token prompt, mostly cached, has no room."""
    scheduler = Scheduler(SchedulerConfig(max_num_batched_tokens=4096), KVManager(2300, BLOCK_SIZE))
    prompt = tokens(70_000, 31)
    scheduler.add(Request("earlier", prompt[:64_000], StopPolicy(max_tokens=5)))
    while not step(scheduler).batch.samples[0]:
        pass
    scheduler.abort("earlier")
    scheduler.add(Request("running", [1] * 6000, StopPolicy(max_tokens=2000)))
    while step(scheduler).batch.num_tokens > 1:
        pass
    scheduler.add(Request("blocked", prompt, StopPolicy(max_tokens=10)))
    step(scheduler)
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        output = scheduler.schedule()
        times.append(time.perf_counter() - start)
        assert output is not None
        commit(scheduler, output)
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)
    return {"prompt_tokens": len(prompt), "schedule_us": round(min(times) * 1e6, 1)}


def decodes(num_seqs: int, repeat: int) -> dict[str, Any]:
    """`schedule` and `update_from_output` with `num_seqs` running sequences."""
    config = SchedulerConfig(max_num_seqs=num_seqs, max_num_batched_tokens=max(2048, num_seqs))
    scheduler = Scheduler(config, KVManager(200 + 40 * num_seqs, BLOCK_SIZE))
    for i in range(num_seqs):
        scheduler.add(Request(str(i), [i] * 40, StopPolicy(max_tokens=1000)))
    while step(scheduler).batch.num_tokens > num_seqs or scheduler.num_waiting:
        pass
    scheduling, committing = [], []
    for _ in range(repeat):
        start = time.perf_counter()
        output = scheduler.schedule()
        scheduling.append(time.perf_counter() - start)
        assert output is not None
        sampled = [[7] for _ in output.sequences]
        start = time.perf_counter()
        scheduler.update_from_output(output, sampled)
        committing.append(time.perf_counter() - start)
    return {
        "num_seqs": num_seqs,
        "schedule_us": round(min(scheduling) * 1e6),
        "update_from_output_us": round(min(committing) * 1e6),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=200)
    parser.add_argument("--no-save", action="store_true")
    options = parser.parse_args()
    results = {
        "prefix_tree": prefix_tree(32_768, options.repeat),
        "blocked_head_of_queue": blocked_head(options.repeat),
        "decodes": [decodes(n, options.repeat) for n in (1, 256, 1024)],
    }
    for name, found in results.items():
        print(name, found)
    if not options.no_save:
        print(save("state_half", results))


if __name__ == "__main__":
    main()
