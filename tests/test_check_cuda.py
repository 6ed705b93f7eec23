"""scripts/check_cuda.py: the test files that it names exist."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parent.parent / "scripts/check_cuda.py"


def test_every_stage_finds_its_files() -> None:
    spec = importlib.util.spec_from_file_location("check_cuda", SCRIPT)
    assert spec is not None and spec.loader is not None
    script = sys.modules["check_cuda"] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(script)
        stages = script.checks()  # asserts that each name matches exactly one test file
    finally:
        del sys.modules["check_cuda"]
    assert len(stages) > 10
