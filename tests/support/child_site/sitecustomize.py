"""Hides torch from interpreters that tests start; see `children_without_torch` in conftest.py."""

import sys

sys.modules["torch"] = None  # type: ignore[assignment]
