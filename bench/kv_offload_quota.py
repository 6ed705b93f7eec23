"""Checks that files of KV blocks stay within their quota, under random load, as `du` counts them.

    python bench/kv_offload_quota.py --minutes 60   # writes results/kv_offload_quota-cpu.json

One process runs all the time. A second one shares the folder and restarts again and again; half of
its runs end by SIGKILL. Both compute random prompts, repeat some of them, and write many times the
quota. They work a quarter of the time, to leave the machine to others.

`du` runs under the folder's lock, because it would count a file twice that is renamed meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import harness
import kv_offload

from mlx_paged import SamplingParams
from mlx_paged.offload.folder import OffloadFolder

_WIDE = {
    **kv_offload._RANDOM,
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "num_hidden_layers": 1,
    "vocab_size": 4096,
}
_GIB = 1 << 30
_SAMPLE_SECONDS = 0.3
_REPORT_SECONDS = 60.0


def load(folder: str, until: float, seed: int) -> None:
    """Computes random prompts until `until` (Unix time), and for at most 90 s if `seed` is not 0.

    Prints counts at the end. A process with a `seed` other than 0 may end with SIGKILL instead.
    """
    rng = random.Random(seed)
    if seed:
        until = min(until, time.time() + rng.uniform(20, 90))
    kv_offload.CONFIGS["wide"] = _WIDE
    llm = kv_offload.load(
        "wide",
        kv_offload_dir=folder,
        kv_offload_gib=1,
        kv_offloading_size=0.05,
        num_gpu_blocks_override=400,
        max_model_len=16000,
    )
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    num_requests = 0
    while time.time() < until:
        start = time.perf_counter()
        stem = kv_offload.prompt_of(rng.choice([300, 2100, 4000, 8000]), seed=rng.randrange(60))
        llm.generate([stem + [rng.randrange(5, 500)] * rng.randrange(1, 600)], params)
        num_requests += 1
        time.sleep(3 * (time.perf_counter() - start))
    stats = llm.stats().offloading
    assert stats is not None
    counts = {
        "num_requests": num_requests,
        "num_written_bytes": stats.num_written_bytes,
        "num_read_bytes": stats.num_read_bytes,
        "disk_warnings": dict(stats.disk_warnings),
    }
    print(json.dumps(counts), flush=True)
    if seed % 2:
        os.kill(os.getpid(), signal.SIGKILL)


def watch(folder: Path, minutes: float) -> dict[str, Any]:
    """Runs the load; returns the largest size of the folder in bytes, and what was done."""
    quota, started = _GIB, time.time()
    until = started + 60 * minutes
    files = OffloadFolder(folder, quota)
    total = {"num_requests": 0, "num_written_bytes": 0, "num_read_bytes": 0}
    warnings: dict[str, int] = {}
    largest = num_samples = num_over = num_killed = 0
    reported = started

    def start(seed: int) -> subprocess.Popen[str]:
        command: Sequence[object] = (sys.executable, __file__, "load", folder, until, seed)
        return subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, text=True)

    def count(process: subprocess.Popen[str]) -> None:
        lines = process.communicate()[0].splitlines()
        if process.returncode not in (0, -signal.SIGKILL) or not lines:
            raise SystemExit(f"a process of the load ended with {process.returncode}")
        found = json.loads(lines[-1])
        for kind, number in found.pop("disk_warnings").items():
            warnings[kind] = warnings.get(kind, 0) + number
        for name in total:
            total[name] += found[name]

    main, seed = start(0), 1
    other = start(seed)
    while main.poll() is None:
        if other.poll() is not None:
            num_killed += other.returncode != 0
            count(other)
            seed += 1
            other = start(seed)
        with files.locked():
            size = _du(folder)
        num_samples += 1
        num_over += size > quota
        largest = max(largest, size)
        if time.time() - reported > _REPORT_SECONDS:
            reported = time.time()
            row = {"seconds": reported - started, "largest": largest, "num_over": num_over}
            print(json.dumps(row), flush=True)
        time.sleep(_SAMPLE_SECONDS)
    count(main)
    count(other)
    return {
        "seconds": time.time() - started,
        "quota_bytes": quota,
        "largest_bytes": largest,
        "num_samples": num_samples,
        "num_samples_over": num_over,
        "num_processes": 1 + seed,
        "num_killed": num_killed,
        **total,
        "disk_warnings": warnings,
    }


def _du(folder: Path) -> int:
    """Bytes that the folder takes, directories included."""
    command = ["du", "-s", "--block-size=1", str(folder)]
    while True:
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.stdout:  # a file may be deleted meanwhile, which `du` complains about
            return int(run.stdout.split()[0])


def main() -> None:
    if sys.argv[1:2] == ["load"]:
        _, _, folder, until, seed = sys.argv
        load(folder, float(until), int(seed))
        return
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    arguments = parser.parse_args()
    environment = harness.environment()
    with tempfile.TemporaryDirectory() as folder:
        found = watch(Path(folder), arguments.minutes)
    print(json.dumps(found), flush=True)
    harness.save("kv_offload_quota-cpu", {"environment": environment, "quota": [found]})


if __name__ == "__main__":
    main()
