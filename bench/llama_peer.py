"""llama.cpp as a peer: builds it once from the sdist of llama-cpp-python, and runs its programs.

Uses its programs, not its library: `llama-batched-bench` (which neither samples nor detokenizes),
`llama-completion`, `llama-server` and `llama-perplexity`.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VERSION = "0.3.36"
OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DGGML_OPENMP=ON", "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_OPENSSL=OFF",
)  # fmt: skip
# Programs of each build. "no-amx", for machines with AMX, shows processors without it; "avx2" those
# that have no AVX-512 either.
BUILDS = {
    "native": ("llama-batched-bench", "llama-completion", "llama-server", "llama-perplexity"),
    "no-amx": ("llama-batched-bench",),
    "avx2": ("llama-batched-bench",),
}
_NO_AMX = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
BUILD_OPTIONS = {
    "native": (),
    "no-amx": (f"-DCMAKE_C_FLAGS={_NO_AMX}", f"-DCMAKE_CXX_FLAGS={_NO_AMX}"),
    "avx2": ("-DGGML_NATIVE=OFF",),  # which leaves AVX2, FMA, F16C, and BMI2
}
# GCC before 13 takes the tile configuration for eight bytes and drops the stores of the rest.
_TILES = "    _tile_loadconfig(&tc);"
_TILES_MENDED = f'    asm volatile("" : : "m"(tc));\n{_TILES}'


def processor_kind() -> str:
    """Names what decides speed: "amx" (8-bit matrix tiles), "avx2" (no AVX-512), or ""."""
    try:
        flags = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return ""
    if "amx_int8" in flags:
        return "amx"
    return "avx2" if "avx2" in flags and "avx512f" not in flags else ""


def source(cache: Path) -> Path:
    """llama.cpp's sources; downloads and unpacks the sdist if needed."""
    folder = cache / f"llama_cpp_python-{VERSION}"
    tree = folder / "vendor" / "llama.cpp"
    if not tree.exists():
        archive = cache / f"llama_cpp_python-{VERSION}.tar.gz"
        if not archive.exists():
            cache.mkdir(parents=True, exist_ok=True)
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary",
                       "llama-cpp-python", f"llama-cpp-python=={VERSION}",
                       "-d", str(cache)]  # fmt: skip
            subprocess.run(command, check=True)
        with tarfile.open(archive) as tar:
            # (Python 3.11 has the filter since 3.11.4.)
            safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
            tar.extractall(cache, **safely)  # type: ignore[arg-type]
    mend(tree / "ggml" / "src" / "ggml-cpu" / "amx" / "mmq.cpp")
    return tree


def mend(file: Path) -> None:
    """Patches the AMX code so that GCC 12 compiles it correctly; without this it crashes."""
    text = file.read_text()
    if _TILES_MENDED not in text:
        file.write_text(text.replace(_TILES, _TILES_MENDED))


def build(cache: Path, name: str, *programs: str) -> Path:
    """Folder of a build's programs; compiles them if needed, which takes minutes.

    Args:
        programs: Those that are needed; all of the build's if none is named.
    """
    tree, folder = source(cache), cache / f"build-{VERSION}-{name}"
    programs = programs or BUILDS[name]
    if all((folder / "bin" / program).exists() for program in programs):
        return folder / "bin"
    generator = ["-GNinja"] if shutil.which("ninja") else []
    subprocess.run(
        ["cmake", *generator, "-S", str(tree), "-B", str(folder), *OPTIONS, *BUILD_OPTIONS[name]],
        check=True,
    )
    subprocess.run(
        ["cmake", "--build", str(folder), "-j", str(os.cpu_count()), "--target", *programs],
        check=True,
    )
    return folder / "bin"


@dataclass(frozen=True)
class Done:
    """A finished process."""

    out: str
    err: str
    seconds: float
    first_byte: float  # seconds until the first byte on stdout
    peak_rss: int  # bytes, including mapped files


def run(
    command: list[str], cores: set[int], env: dict[str, str] | None = None, asked: str = ""
) -> Done:
    """Runs a program on some cores; measures its memory and times.

    Args:
        asked: Input on stdin.

    Raises:
        SystemExit: The program failed.
    """
    with tempfile.TemporaryFile("w+") as err:
        start = time.perf_counter()
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=err,
            env={**os.environ, **(env or {})}, preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(asked.encode())
        process.stdin.close()
        first = os.read(process.stdout.fileno(), 1)
        first_byte = time.perf_counter() - start
        out = (first + process.stdout.read()).decode(errors="replace")
        _, status, used = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        err.seek(0)
        said = err.read()
    if process.returncode:
        raise SystemExit(
            f"{' '.join(command)} ended with status {process.returncode}:\n{said[-3000:]}"
        )
    return Done(out, said, seconds, first_byte, peak_bytes(used))


def peak_bytes(used: resource.struct_rusage) -> int:
    return used.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def parse_bench(out: str) -> dict[str, Any]:
    """Parses the line of figures that llama-batched-bench prints.

    Raises:
        ValueError: There is no such line, or more than one.
    """
    found = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    if len(found) != 1:
        raise ValueError(f"expected one line of JSON from llama-batched-bench but got {out!r}")
    return found[0]


def bench_command(
    programs: Path, model: Path, threads: int, prompt: int, tokens: int, rows: int
) -> list[str]:
    """Rows that continue one prompt, computed once and copied, so each row has its own keys."""
    # Needs room for one more token; contexts come in units of 256.
    context = rows * (-(-(prompt + tokens + 1) // 256) * 256)
    return [
        str(programs / "llama-batched-bench"), "-m", str(model), "-c", str(context),
        "-npp", str(prompt), "-ntg", str(tokens), "-npl", str(rows), "-pps", *common(threads),
        "--output-format", "jsonl",
    ]  # fmt: skip


def common(threads: int) -> list[str]:
    """Options of all programs: flash attention, and the fastest batch sizes."""
    number = str(threads)
    return ["-t", number, "-tb", number, "-fa", "on", "-b", "2048", "-ub", "512"]


def completion_command(programs: Path, model: Path, threads: int, text: str) -> list[str]:
    """Generates one greedy token after a prompt, on stdout."""
    return [
        str(programs / "llama-completion"), "-m", str(model), "-p", text, "-n", "1", "-c", "2048",
        *common(threads), "-no-cnv", "--no-warmup", "--no-display-prompt", "--ignore-eos",
        "--temp", "0",
    ]  # fmt: skip


_LOADED = re.compile(r"^(\d+)\.(\d\d)\.(\d{3})\.(\d{3}) I .*threadpool init", re.MULTILINE)


def parse_load_seconds(err: str) -> float:
    """Seconds until llama-completion had its model and its context.

    Its own figure "load time" includes the prompt and excludes the model.

    Raises:
        ValueError: The log has no such line.
    """
    found = _LOADED.search(err)
    if not found:
        raise ValueError(f"no time of loading in {err[-2000:]!r}")
    minutes, seconds, milli, micro = map(int, found.groups())
    return minutes * 60 + seconds + milli / 1e3 + micro / 1e6


# Configurations to serve 32 requests. The best one depends on the model, so a run tries all of
# them, each for at most twice the best time. Slots keep their prompts, a request gets the slot with
# its longest prefix, and idle slots can be saved to the cache in RAM: with few slots, each computes
# a shared prompt once.
SERVER_WAYS: dict[str, list[str]] = {
    "1 slot": ["-np", "1", "-no-kvu"],
    "4 slots": ["-np", "4", "-no-kvu"],
    "8 slots": ["-np", "8", "-no-kvu"],
    "32 slots": ["-np", "32", "-no-kvu"],
    "32 slots, one KV buffer": ["-np", "32", "-kvu"],
}


def server_command(
    programs: Path, model: Path, threads: int, way: str, length: int, port: int
) -> list[str]:
    """A server with `length` tokens per slot."""
    slots = int(SERVER_WAYS[way][1])
    return [
        str(programs / "llama-server"), "-m", str(model), "--port", str(port), *common(threads),
        "-c", str(slots * (-(-length // 256) * 256)), *SERVER_WAYS[way], "--no-ui",
    ]  # fmt: skip
