"""Builds, tests and benchmarks on an NVIDIA GPU; ends with a table of outcomes.

python scripts/check_cuda.py                      # build, tests on the GPU, compute-sanitizer
python scripts/check_cuda.py --only ops parity    # some checks
python scripts/check_cuda.py --only build media   # images: parity with mlx-vlm, bounds of rows
python scripts/check_cuda.py --only build formats # quantized pools: their tests, and their speed
python scripts/check_cuda.py --bench kernels      # also benchmark; or the engine, or a MoE model
python scripts/check_cuda.py --only --bench engine moe    # benchmark only

Several checks share the GPU; a benchmark has it to itself.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
OPS = ["plan", "write_kv", "copy_blocks", "gather_kv", "paged_attention", "attention_bounds",
       "pool_contract", "quantized_pools", "validation", "numeric_edges", "big_pools",
       "token_bitmask", "logit_edits"]  # fmt: skip
ENGINE = [
    "cuda",
    "cuda_executable",
    "cuda_quantized",
    "bounds",
    "dense_prefill",
    "add_in_product",
    "selected_rows",
    "active_wait",
    "engine_faults",
    "engine_memory",
    "graph_runner",
]
# The media tests that compute: parity with mlx-vlm, and images in engine steps.
MEDIA = "mixed_steps or used_again or sounds"
MEDIA_ENGINE = "with_pictures or mixed_batches or every_way or previous or second_turn or preempt"
PLANTED = "memcheck of a planted fault"
ALL_ARCHITECTURES = "80;86;89;90;100;120"  # same as in csrc/cuda/cuda.cmake
SANITIZED = ("float32", "bfloat16", "float16")
ON_TEST_PATH = {  # for scripts in tests/ that run without pytest
    "PYTHONPATH": os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
}
NOT_THE_MOE = ["decode", "decode-more", "prefill", "prefix", "qwen3-0.6b", "llama-8b-4bit"]


@dataclass(frozen=True)
class Stage:
    name: str
    command: list[str]
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    name: str
    status: str
    seconds: float
    detail: str

    def __str__(self) -> str:
        return f"{self.name:28} {self.status:12} {self.seconds:6.0f} s  {self.detail}"


def python(*arguments: str) -> list[str]:
    return [sys.executable, *arguments]


def pytest(name: str, *files: str, shards: int = 1, only: str = "not this_file") -> list[Stage]:
    """Runs test files from any folder, divided among as many processes.

    Args:
        only: Expression for pytest's -k; the default excludes tests with a run of their own, which
            check the CPU's instruction sets.
    """
    tests = [str(path) for file in files for path in sorted(TESTS.rglob(f"test_{file}.py"))]
    assert len(tests) == len(files), f"there is not one test file for each of {files}"
    command = python("-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider",
                     "-k", only, *tests)  # fmt: skip
    # Full fp32 precision: the tests compare greedy tokens and small errors.
    env = {"MLX_PAGED_TEST_DEVICE": "gpu", "MLX_ENABLE_TF32": "0"}
    if shards == 1:
        return [Stage(name, command, env)]
    return [
        Stage(f"{name} {i}/{shards}", command, {**env, "MLX_PAGED_TEST_SHARD": f"{i}/{shards}"})
        for i in range(1, shards + 1)
    ]


def sanitizer(tool: str, *arguments: str) -> list[str]:
    return [
        *("compute-sanitizer", "--tool", tool, "--kernel-name", "kernel_substring=_entry"),
        *("--error-exitcode", "1", "--print-limit", "20"),
        *python("tests/support/exercise_kernels.py", *arguments),
    ]


def build(name: str, architectures: str | None, folder: str) -> Stage:
    """Builds for this machine's GPU, or with None for all architectures of the package."""
    install = ["install", "-e", "."] if architectures else ["wheel", "-w", folder, "."]
    options = [f"-Ccmake.define.CMAKE_CUDA_ARCHITECTURES={architectures or ALL_ARCHITECTURES}"]
    return Stage(name, [
        *python("-m", "pip", *install, "-q", "--no-build-isolation", "--no-deps"), *options,
        "-Ccmake.define.MLX_PAGED_CUDA=ON", f"-Cbuild-dir={folder}",
    ])  # fmt: skip


def checks() -> list[Stage]:
    """The checks, longest first."""
    return [
        *(
            Stage(f"{tool} {dtype}", sanitizer(tool, "--dtype", dtype), ON_TEST_PATH)
            for tool in ("racecheck", "memcheck", "synccheck")
            for dtype in SANITIZED
        ),
        *pytest("parity", "parity", shards=4),
        *pytest("ops", *OPS, shards=2),
        *pytest("engine", *ENGINE, shards=5),
        *pytest("company", "company", shards=3),
        *pytest("interleaving", "interleaving"),
        *pytest("speculation", "speculation"),
        *pytest("offloading", "block_bytes", "kv_offload_staged"),
        # Kernels of this GPU are right, and planted faults are found: less than a minute.
        *pytest("calibration", "planted_faults"),
        # Without mlx-vlm this fails, because no test runs.
        *pytest("media parity", "media_families", shards=2, only=MEDIA),
        *pytest("media engine", "media_families_engine", "media_engine", only=MEDIA_ENGINE),
        *(
            Stage(
                f"media bounds {tool}",
                sanitizer(tool, "--dtype", "bfloat16", "--only", "bounds"),
                ON_TEST_PATH,
            )
            for tool in ("racecheck", "memcheck", "synccheck")
        ),
        # Verifies that the tool sees these kernels: this run must report errors.
        Stage(PLANTED, sanitizer("memcheck", "--fault"), ON_TEST_PATH),
    ]


def timed_checks() -> list[Stage]:
    """Checks that run only if --only names them, because they need the whole GPU."""
    formats = python("bench/cuda_kv_formats.py", "--check")
    return [Stage("formats", formats, ON_TEST_PATH)]


def benchmarks() -> dict[str, Stage]:
    engine = python("bench/cuda_engine.py", "--only")
    return {
        "kernels": Stage("bench kernels", python("bench/cuda_kernels.py")),
        "quantized": Stage("bench quantized", python("bench/cuda_quantized.py")),
        "steps": Stage("bench steps", python("bench/cuda_steps.py")),
        "engine": Stage("bench engine", [*engine, *NOT_THE_MOE]),
        "media": Stage("bench media", python("bench/media.py", "--gpu")),
        "moe": Stage("bench moe", [*engine, "qwen3-30b-a3b"]),
    }


def summary(output: str) -> str:
    """The last line of the output with a result."""
    lines = [line.strip("= \n") for line in output.splitlines() if line.strip("= \n")]
    detail = [line for line in lines if re.search(r"SUMMARY|passed|failed|rror", line)]
    return (detail or lines or [""])[-1][:100]


def run(stage: Stage, logs: Path, timeout: float) -> Outcome:
    start = time.perf_counter()
    log = logs / f"{re.sub('[ /]', '-', stage.name)}.txt"
    status: int | str
    with log.open("w") as file:
        try:
            status = subprocess.run(
                stage.command, cwd=ROOT, env={**os.environ, **stage.env}, check=False, stdout=file,
                stderr=subprocess.STDOUT, timeout=timeout,
            ).returncode  # fmt: skip
        except (subprocess.TimeoutExpired, FileNotFoundError) as error:
            status = type(error).__name__
    output = log.read_text()
    detail = summary(output)
    if stage.name == PLANTED:
        found = output.count("Invalid __global__ read")
        status = 0 if found else f"nothing found, {status}"
        detail = f"{found} invalid reads, as it must be"
    result = "ok" if status == 0 else f"FAILED ({status})"
    outcome = Outcome(stage.name, result, time.perf_counter() - start, detail)
    print(outcome, flush=True)
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--architectures", default="native", help="of CMAKE_CUDA_ARCHITECTURES")
    parser.add_argument("--all-architectures", action="store_true",
                        help="beside the checks, compile the whole default list")  # fmt: skip
    parser.add_argument("--only", nargs="*", help="stages whose names begin so; nothing: none")
    parser.add_argument("--bench", nargs="+", default=[], choices=benchmarks())
    parser.add_argument("--logs", type=Path, default=Path("/tmp/paged-check"))
    parser.add_argument("--timeout", type=float, default=540, help="seconds for one stage")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="checks at a time")
    options = parser.parse_args()
    options.logs.mkdir(exist_ok=True, parents=True)

    def wanted(stage: Stage) -> bool:
        return options.only is None or any(stage.name.startswith(o) for o in options.only)

    def perform(stages: list[Stage], jobs: int) -> list[Outcome]:
        with ThreadPoolExecutor(jobs) as pool:
            return list(pool.map(lambda s: run(s, options.logs, options.timeout), stages))

    first = build("build", options.architectures, "/tmp/paged-build")
    outcomes = perform([first], 1) if wanted(first) else []
    if all(outcome.status == "ok" for outcome in outcomes):
        stages = [stage for stage in checks() if wanted(stage)]
        if options.all_architectures:
            whole = build("all architectures", None, "/tmp/paged-build-all")
            stages.insert(0, Stage(whole.name, ["nice", "-n", "19", *whole.command]))
        outcomes += perform(stages, options.jobs)
        outcomes += perform([s for s in timed_checks() if options.only and wanted(s)], 1)
        outcomes += perform([benchmarks()[name] for name in options.bench], 1)
    print()
    print(*outcomes, sep="\n")
    return int(any(outcome.status != "ok" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
