"""Interpreters that tests start do not import torch, whether it is installed or not."""

from __future__ import annotations

import subprocess
import sys


def test_a_child_does_not_see_torch() -> None:
    code = "import sys, mlx_lm; print(sys.modules.get('torch', 'not hidden'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["None"]
