"""Reruns a file's tests in a process with another instruction set, chosen once per process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import cache

import pytest

# Other installed plugins take two seconds to import.
ONLY_HYPOTHESIS = {
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    "PYTEST_PLUGINS": "_hypothesis_pytestplugin",
}


@cache
def instruction_sets() -> tuple[str, ...]:
    """Instruction sets of this processor, best first, parsed from the error for an unknown name."""
    code = "from mlx_paged.extension import build_info; build_info()"
    env = {**os.environ, "MLX_PAGED_SIMD": "unknown"}
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, env=env, check=False, capture_output=True, text=True)
    refusal = r"MLX_PAGED_SIMD must be one of (.*) on this processor but got unknown"
    match = re.search(refusal, run.stderr)
    assert match, run.stderr
    return tuple(match[1].split(", "))


def run_in_process_of(simd: str, num_threads: int, files: Sequence[str], expression: str) -> None:
    """Runs the tests of `files` that `expression` (``pytest -k``) selects; all must pass.

    By default one case in eight: the tests themselves run in this process with all cases.
    """
    if simd not in instruction_sets():
        pytest.skip(f"this processor has {', '.join(instruction_sets())}")
    inherited = {k: v for k, v in os.environ.items() if k != "MLX_PAGED_TEST_SHARD"}
    env = {
        **inherited,
        "MLX_PAGED_SIMD": simd,
        "MLX_PAGED_NUM_THREADS": str(num_threads),
        "EXPECTED_SIMD": simd,
        "MLX_PAGED_TEST_SAMPLE": "8",
        **ONLY_HYPOTHESIS,
    }
    options = ["-q", "--tb=line", "-p", "no:cacheprovider", "--hypothesis-profile=quick"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-k", expression, *files],
        env=env,
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stdout[-4000:]
