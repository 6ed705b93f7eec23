"""Everything that needs an NVIDIA GPU to be checked, with a table of the outcomes last.

python scripts/check_cuda.py                      # build, tests on the GPU, compute-sanitizer
python scripts/check_cuda.py --only ops parity    # some of it
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
OPS = ["plan", "write_kv", "copy_blocks", "gather_kv", "paged_attention", "pool_contract",
       "validation"]  # fmt: skip
ENGINE = ["cuda", "dense_prefill", "engine_faults", "engine_memory"]
PLANTED = "memcheck of a planted fault"


def pytest(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider",
            *arguments]  # fmt: skip


def sanitizer(tool: str, *arguments: str) -> list[str]:
    return [
        *("compute-sanitizer", "--tool", tool, "--kernel-name", "kernel_substring=_entry"),
        *("--error-exitcode", "1", "--print-limit", "20"),
        *(sys.executable, "tests/exercise_kernels.py", *arguments),
    ]


def stages(architectures: str) -> dict[str, list[str]]:
    build = f"-Ccmake.define.CMAKE_CUDA_ARCHITECTURES={architectures}"
    return {
        "build": [
            *(sys.executable, "-m", "pip", "install", "-q", "--no-build-isolation", "--no-deps"),
            *("-e", ".", build, "-Ccmake.define.MLX_PAGED_CUDA=ON", "-Cbuild-dir=/tmp/paged-build"),
        ],
        # Instruction sets of the CPU have their own run.
        "ops": pytest(*(f"tests/test_{name}.py" for name in OPS), "-k", "not this_file"),
        "interleaving": pytest("tests/test_interleaving.py"),
        "parity": pytest("tests/test_parity.py", "tests/test_compiled_step.py"),
        "engine": pytest(*(f"tests/test_{name}.py" for name in ENGINE)),
        # That the tool sees these kernels at all: here it has to report errors.
        PLANTED: sanitizer("memcheck", "--fault"),
        **{
            f"{tool} {dtype}": sanitizer(tool, "--dtype", dtype)
            for tool in ("memcheck", "racecheck", "synccheck")
            for dtype in ("bfloat16", "float16", "float32")
        },
    }


def summary(output: str) -> str:
    """The last line that says how it went."""
    lines = [line.strip("= \n") for line in output.splitlines() if line.strip("= \n")]
    told = [line for line in lines if re.search(r"SUMMARY|passed|failed|rror", line)]
    return (told or lines or [""])[-1][:100]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--architectures", default="native", help="of CMAKE_CUDA_ARCHITECTURES")
    parser.add_argument("--only", nargs="+", help="stages whose names begin so")
    parser.add_argument("--logs", type=Path, default=Path("/tmp/paged-check"))
    parser.add_argument("--timeout", type=float, default=500, help="seconds for one stage")
    options = parser.parse_args()
    options.logs.mkdir(exist_ok=True, parents=True)
    # Exact products in fp32: the tests compare greedy tokens and small errors.
    env = {**os.environ, "MLX_PAGED_TEST_DEVICE": "gpu", "MLX_ENABLE_TF32": "0"}
    rows = []
    for name, command in stages(options.architectures).items():
        if options.only and not any(name.startswith(only) for only in options.only):
            continue
        start = time.perf_counter()
        log = options.logs / f"{name.replace(' ', '-')}.txt"
        with log.open("w") as file:
            try:
                status = subprocess.run(
                    command, cwd=ROOT, env=env, check=False, stdout=file,
                    stderr=subprocess.STDOUT, timeout=options.timeout,
                ).returncode  # fmt: skip
            except (subprocess.TimeoutExpired, FileNotFoundError) as error:
                status = f"{type(error).__name__}"
        told = summary(log.read_text())
        if name == PLANTED:
            found = log.read_text().count("Invalid __global__ read")
            status = 0 if found else f"nothing found, {status}"
            told = f"{found} invalid reads, as it must be"
        outcome = "ok" if status == 0 else f"FAILED ({status})"
        rows.append((name, outcome, time.perf_counter() - start, told))
        print(*rows[-1], flush=True)
    print()
    for name, outcome, seconds, told in rows:
        print(f"{name:28} {outcome:12} {seconds:6.0f} s  {told}")
    return int(any(outcome != "ok" for _, outcome, _, _ in rows))


if __name__ == "__main__":
    sys.exit(main())
