"""The KV operations on several threads, whatever this process has."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.simd_processes import instruction_sets, run_in_process_of

HERE = Path(__file__).parent


@pytest.mark.parametrize("name", ["write_kv", "copy_blocks", "gather_kv", "plan_layout"])
def test_a_file_passes_on_four_threads(name: str) -> None:
    run_in_process_of(instruction_sets()[0], 4, str(HERE / f"test_{name}.py"), "")
