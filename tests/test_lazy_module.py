"""Modules that tests import on first use."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import pytest
from support.lazy_module import LazyModule


def test_a_look_at_a_file_of_tests_imports_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "imported_late.py").write_text("FOUND = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = LazyModule("imported_late")
    assert getattr(module, "_mock_name", None) is None and inspect.unwrap(module) is module  # type: ignore[arg-type]
    assert "imported_late" not in sys.modules
    assert module.FOUND == 3
    monkeypatch.delitem(sys.modules, "imported_late")
