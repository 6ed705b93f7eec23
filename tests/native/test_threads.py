"""The KV operations on several threads, whatever this process has."""

from __future__ import annotations

from pathlib import Path

from support.simd_processes import instruction_sets, run_in_process_of

HERE = Path(__file__).parent


FILES = [
    str(HERE / f"test_{n}.py") for n in ("write_kv", "copy_blocks", "gather_kv", "plan_layout")
]


def test_files_pass_on_four_threads() -> None:
    run_in_process_of(instruction_sets()[0], 4, FILES, "")
