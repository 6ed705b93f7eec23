"""Streams and long prompts: one engine with chunked prefill against a prefill and a decode engine.

python bench/roles.py --model 3B               # on a machine with two GPUs: one for each engine
python bench/roles.py --length 2048            # the embedded model, on the CPU's cores

Some streams run. Long prompts arrive at a fixed interval, by default twice the time that one engine
takes for a prompt alone. Measured are the time to each prompt's first token, and the gaps of the
streams between the first prompt's arrival and the last one's first token. One engine has one GPU,
or all cores; of the pair, each has a GPU, or half of the cores.

On a CPU, all answers must be the same. On a GPU, the bits of a prompt depend on the number of rows
in its step, and answers of random weights follow any bit, so the number that differ is only noted.

`transfer.py` measures the connection alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx_paged.extension  # noqa: F401  (before mlx.core)

# isort: split
import mlx.core as mx
import numpy as np
from harness import environment, free_port, print_table, save
from ranks import CONFIGS, write_model

from mlx_paged import AsyncEngine
from mlx_paged.engine.config import EngineConfig
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.loading import load
from mlx_paged.engine.sampling_params import SamplingParams

ANSWER = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
_THREADS = "MLX_PAGED_NUM_THREADS"


# --- In a process of its own ----------------------------------------------------------------------


def config_of(options: argparse.Namespace, role: str | None) -> EngineConfig:
    """The same options for all engines, so that the models' caches are the same."""
    blocks = (options.prompts + 2) * (options.length // 32 + 2) + options.streams * 64
    given: dict[str, Any] = {"num_gpu_blocks_override": blocks}
    if options.step_tokens:
        given["max_num_batched_tokens"] = options.step_tokens
    if role is not None:
        given |= {"role": role, "prefill_address": options.address, "prefill_min_tokens": 256}
        given["prefill_secret_file"] = options.secret
    return EngineConfig(**given)


def prefill(options: argparse.Namespace) -> None:
    """Computes prompts until the standard input is closed."""
    engine = AsyncEngine(lambda: Engine(load(options.path), config_of(options, "prefill")))
    asyncio.run(engine.ready())
    print("READY", flush=True)
    sys.stdin.read()
    asyncio.run(engine.shutdown(drain_timeout=0.0))


class Load:
    """Requests of one engine, and when their tokens came."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.added: dict[str, float] = {}
        self.stamps: dict[str, list[float]] = {}
        self.answers: dict[str, list[int]] = {}

    def add(self, name: str, prompt: list[int], params: SamplingParams) -> None:
        self.added[name], self.stamps[name] = time.perf_counter(), []
        self.answers[name] = []
        self.engine.add_request(name, prompt, params)

    def step(self) -> None:
        for update in self.engine.step():
            if update.token_ids:
                self.stamps[update.request_id].append(time.perf_counter())
                self.answers[update.request_id] += update.token_ids

    def first_token(self, name: str) -> float:
        """Seconds from the request to its first token."""
        return self.stamps[name][0] - self.added[name]


def prompts_of(options: argparse.Namespace, vocab_size: int, *, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    count = options.prompts
    return [rng.integers(3, vocab_size, options.length).tolist() for _ in range(count)]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Runs the load on an engine with or without a prefill engine."""
    role = "decode" if options.address else None
    engine = Engine(load(options.path), config_of(options, role))
    run = Load(engine)
    for name in ("warm-up", "alone"):  # each with its own prompt
        [prompt, *_] = prompts_of(options, engine.vocab_size, seed=len(name))
        run.add(name, prompt, ANSWER)
        while engine.has_unfinished:
            run.step()
    alone = run.first_token("alone")
    interval = options.interval or 2 * alone
    rng = np.random.default_rng(7)
    for i in range(options.streams):
        prompt = rng.integers(3, engine.vocab_size, 64).tolist()
        # They go on until they are aborted.
        run.add(f"s{i}", prompt, SamplingParams(temperature=0, max_tokens=1900, ignore_eos=True))
    while not all(len(run.stamps[f"s{i}"]) >= 8 for i in range(options.streams)):
        run.step()
    waiting = prompts_of(options, engine.vocab_size, seed=1)
    start, count = time.perf_counter(), 0
    while count < len(waiting) or not all(run.stamps[f"p{i}"] for i in range(count)):
        if count < len(waiting) and time.perf_counter() - start >= count * interval:
            run.add(f"p{count}", waiting[count], ANSWER)
            count += 1
        run.step()
    end = time.perf_counter()
    for i in range(options.streams):
        engine.abort(f"s{i}")
    while engine.has_unfinished:
        run.step()
    gaps = np.concatenate(
        [
            np.diff([t for t in run.stamps[f"s{i}"] if start <= t <= end])
            for i in range(options.streams)
        ]
    )
    first = sorted(run.first_token(f"p{i}") for i in range(count))
    stats = engine.stats()
    transfers = None if stats.offloading is None else stats.offloading.transfers
    return {
        "alone_ttft_ms": round(alone * 1e3, 1),
        "interval_ms": round(interval * 1e3, 1),
        "ttft_median_ms": round(float(np.median(first)) * 1e3, 1),
        "ttft_max_ms": round(first[-1] * 1e3, 1),
        "itl_median_ms": round(float(np.median(gaps)) * 1e3, 2),
        "itl_p99_ms": round(float(np.percentile(gaps, 99)) * 1e3, 2),
        "itl_max_ms": round(float(gaps.max()) * 1e3, 2),
        "num_gaps": len(gaps),
        "transfers": None if transfers is None else vars(transfers),
        "answers": [run.answers[f"p{i}"] for i in range(count)],
    }


# --- All measurements -----------------------------------------------------------------------------


def command(options: argparse.Namespace, *more: str) -> list[str]:
    names = ("length", "prompts", "streams", "step_tokens", "path", "secret")
    given = [(f"--{name.replace('_', '-')}", getattr(options, name)) for name in names]
    return [sys.executable, __file__, *more, *(str(part) for pair in given for part in pair)]


def runs_on_gpu() -> bool:
    return mx.default_device() == mx.gpu and mx.cuda.is_available()


def environment_of(index: int, count: int) -> dict[str, str]:
    """Gives one of `count` processes its GPU, or its share of the cores."""
    own = dict(os.environ)
    if runs_on_gpu():
        visible = own.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
        own["CUDA_VISIBLE_DEVICES"] = visible[index % len(visible)]
    else:
        own.setdefault(_THREADS, str(max(1, (os.cpu_count() or 1) // count)))
    return own


@contextmanager
def prefilling(options: argparse.Namespace, address: str) -> Iterator[None]:
    """A prefill engine at an address."""
    process = subprocess.Popen(
        command(options, "--prefill", "--address", address),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment_of(1, 2),
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        if process.stdout.readline().strip() != "READY":
            raise SystemExit("the prefill engine did not start")
        yield
    finally:
        process.stdin.close()
        process.wait(60)


def measured(options: argparse.Namespace, count: int, *more: str) -> dict[str, Any]:
    """Measures in a new process."""
    ended = subprocess.run(
        command(options, "--measure", *more),
        stdout=subprocess.PIPE,
        text=True,
        env=environment_of(0, count),
        check=True,
    )
    lines = [line for line in ended.stdout.splitlines() if line.startswith("RESULT ")]
    result: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="embedded", choices=["embedded", *CONFIGS])
    parser.add_argument("--bits", type=int, choices=(4, 16), default=16)
    parser.add_argument("--length", type=int, default=4096, help="tokens of a prompt")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--step-tokens", type=int, default=0, help="0: the engine's own")
    parser.add_argument("--interval", type=float, default=0.0, help="seconds between prompts")
    parser.add_argument("--name", default="roles", help="of the file of results")
    for name in ("--measure", "--prefill"):
        parser.add_argument(name, action="store_true", help=argparse.SUPPRESS)
    for name in ("--path", "--secret", "--address"):
        parser.add_argument(name, default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.path = options.path or None
    if options.prefill:
        prefill(options)
        return
    if options.measure:
        print("RESULT", json.dumps(measure(options)), flush=True)
        return
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        folder = Path(name)
        options.path, options.secret = "", folder / "secret"
        options.secret.write_text(os.urandom(32).hex())
        if options.model != "embedded":
            num_layers = CONFIGS[options.model]["num_hidden_layers"]
            options.path = write_model(folder, options.model, options.bits, num_layers)
        one = measured(options, 1, "--interval", str(options.interval))
        address = f"127.0.0.1:{free_port()}"
        interval = str(one["interval_ms"] / 1e3)
        with prefilling(options, address):
            two = measured(options, 2, "--address", address, "--interval", interval)
    pairs = list(zip(one.pop("answers"), two.pop("answers"), strict=True))
    num_others = sum(ours != theirs for ours, theirs in pairs)
    rows = [[key, str(one[key]), str(two[key])] for key in one if key.endswith("_ms")]
    print_table(["", "one engine", "prefill and decode"], rows)
    print(f"answers that differ: {num_others} of {len(pairs)}")
    load_of = {name: getattr(options, name) for name in ("model", "length", "prompts", "streams")}
    found = {"environment": environment(), "load": load_of, "answers_that_differ": num_others}
    print(save(options.name, found | {"one engine": one, "prefill and decode": two}))
    if num_others and not runs_on_gpu():
        raise SystemExit("the answers differ")


if __name__ == "__main__":
    main()
