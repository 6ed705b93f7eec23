"""The CPU kernels, and what calls them, under AddressSanitizer and UndefinedBehaviorSanitizer, and
the pool of workers under ThreadSanitizer.

``mlx_paged._asan`` is the extension with that part compiled for them (-DMLX_PAGED_SANITIZE=ON, as
.ci/run has it). Tests of the operations run on it in processes that load the sanitizer first, as it
must be. MLX's buffers come from malloc, so that the sanitizer sees where each ends.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from support.simd_processes import ONLY_HYPOTHESIS, instruction_sets

HERE = Path(__file__).parent
FOUND = importlib.util.find_spec("mlx_paged._asan")
needs_sanitizers = pytest.mark.skipif(
    FOUND is None,
    reason="mlx_paged._asan is not built: install with -Ccmake.define.MLX_PAGED_SANITIZE=ON, as "
    ".ci/run does (GCC on Linux)",
)

# Shapes of every kind; what only repeats them is left out.
SELECTED = (
    "not this_file and not in_a_process and not many_large and not explicit_stream "
    "and not more_pieces and not every_ratio and not nan_in_a_query and not simulated"
)

STEPS = (
    "mlxs_own or outlives or many_axes or lookups or gemma3_text or mixtral or int4 or they_round"
)

OPERATIONS = (
    *("paged_attention", "write_kv", "copy_blocks", "gather_kv", "format_pairs", "layer_ops"),
    *("rounded_products", "token_bitmask", "experts", "program_rows"),
)

# Reads outside of a pool of two blocks, by an id that nothing checks here.
FAULT = """
import support.sanitized_plugin, mlx.core as mx
from mlx_paged import ops
mx.set_default_device(mx.cpu)
pools = [mx.zeros((2, 8, 1, 8)) for _ in range(2)]
mx.eval(pools)
mx.eval(ops.gather_kv(*pools, mx.array([[2]]), mx.array([1]), 1))
print("not seen")
"""


@cache
def libraries() -> str:
    """Those that the module names, for LD_PRELOAD: they have to be there before all others."""
    assert FOUND and FOUND.origin
    text = subprocess.run(["ldd", FOUND.origin], capture_output=True, text=True, check=True).stdout
    found = re.findall(r"lib(?:a|ub)san\.so\S* => (\S+)", text)
    assert len(found) == 2, text
    return " ".join(found)


def run_sanitized(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    options = {"LD_PRELOAD": libraries(), "ASAN_OPTIONS": "detect_leaks=0", "PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **options, **env},
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )


@cache
def sanitizes_all() -> bool:
    """False if only the kernels for this processor's best instruction set are sanitized."""
    code = "import support.sanitized_plugin as plugin; print(plugin._asan.sanitizes_all)"
    run = run_sanitized("-c", code)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip() == "True"


def test_ci_has_the_sanitized_extension() -> None:
    if not os.environ.get("CI") or sys.platform != "linux":
        pytest.skip("for CI on Linux; elsewhere these tests are skipped where it is not built")
    assert FOUND


@pytest.mark.one_in(16)
@needs_sanitizers
@pytest.mark.parametrize("which", ["widest", "narrowest", "amx_emulated"])
def test_the_operations_pass_under_sanitizers(which: str) -> None:
    if which != "widest" and not sanitizes_all():
        pytest.skip("these kernels are sanitized with MLX_PAGED_SANITIZE=ALL only")
    names, simd = OPERATIONS, which
    if which == "amx_emulated":  # has kernels of its own for products and bfloat16 attention
        names = ("rounded_products", "amx_attention")
        if simd not in instruction_sets():
            pytest.skip(f"this processor has {', '.join(instruction_sets())}")
    else:
        # (Not AMX: the sanitizers do not see what its instructions read, so it is built without.)
        others = [name for name in instruction_sets() if name != "amx"]
        simd = others[0 if which == "widest" else -1]
    run = run_sanitized(
        *("-m", "pytest", "-q", "-s", "--tb=short", "-p", "no:cacheprovider"),
        *("-p", "support.sanitized_plugin", "--hypothesis-profile=sanitized", "-k", SELECTED),
        *(str(HERE / f"test_{name}.py") for name in names),
        MLX_PAGED_SIMD=simd,
        MLX_PAGED_NUM_THREADS="2",
        MLX_PAGED_TEST_SAMPLE="8",  # unless all cases are asked for, as by `make test-long`
        **ONLY_HYPOTHESIS,
    )
    report = re.search(r"ERROR: AddressSanitizer.*|.*runtime error:.*", run.stderr + run.stdout)
    assert run.returncode == 0, (report and report[0], run.stdout[-3000:], run.stderr[-3000:])


@needs_sanitizers
def test_cpu_executables_pass_under_sanitizers() -> None:
    run = run_sanitized(
        *("-m", "pytest", "-q", "-s", "--tb=short", "-p", "no:cacheprovider"),
        *("-p", "support.sanitized_plugin"),
        *("-k", STEPS),
        str(HERE.parent / "model" / "test_cpu_executable.py"),
        MLX_PAGED_NUM_THREADS="2",
    )
    report = re.search(r"ERROR: AddressSanitizer.*|.*runtime error:.*", run.stderr + run.stdout)
    assert run.returncode == 0, (report and report[0], run.stdout[-3000:], run.stderr[-3000:])


@needs_sanitizers
def test_a_read_outside_of_a_pool_is_seen() -> None:
    run = run_sanitized("-c", FAULT)
    assert run.returncode != 0 and "not seen" not in run.stdout
    assert "AddressSanitizer: heap-buffer-overflow" in run.stderr
    # (An installed module has no names of its functions.)
    assert re.search(r"/_asan\.|csrc/cpu/eval\.cpp", run.stderr)


def test_the_pool_of_workers_passes_under_thread_sanitizer(tmp_path: Path) -> None:
    """As a program of its own, which takes seconds to compile."""
    compiler = os.environ.get("CXX", "g++")
    sources = [HERE / "sanitized" / "threads.cpp", HERE.parents[1] / "csrc/cpu/parallel_for.cpp"]
    program = tmp_path / "threads"
    options = ["-std=c++20", "-O1", "-g1", "-fsanitize=thread", "-pthread"]
    if shutil.which(compiler) is None or not sources[1].is_file():
        pytest.skip("there is no compiler, or the sources are not here")
    empty = tmp_path / "empty.cpp"
    empty.write_text("int main() {}")
    checked = subprocess.run(
        [compiler, *options, str(empty), "-o", str(program)], check=False, capture_output=True
    )
    if checked.returncode != 0 and not os.environ.get("CI"):
        pytest.skip("this compiler has no ThreadSanitizer")
    subprocess.run(
        [compiler, *options, *map(str, sources), "-o", str(program)], check=True, timeout=300
    )
    run = subprocess.run(
        [str(program), "400"],
        env={**os.environ, "MLX_PAGED_NUM_THREADS": "4", "TSAN_OPTIONS": "halt_on_error=1"},
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0 and run.stdout == "done\n", run.stderr[-3000:]
