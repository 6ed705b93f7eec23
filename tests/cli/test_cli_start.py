"""How the program starts: what transformers does only once, or not at all."""

from __future__ import annotations

import os
import subprocess
import sys


def run(script: str) -> str:
    """Runs a script in an interpreter as users have it; those of other tests know the folders."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        check=False, capture_output=True, text=True, timeout=300, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_transformers_reads_its_folders_once() -> None:
    script = """
import os, sys
from collections import Counter
from mlx_paged.cli import transformers_import

scanned = Counter()
def count(event, arguments):
    if event == "os.scandir" and "transformers" in str(arguments[0]):
        scanned[os.path.realpath(arguments[0])] += 1
sys.addaudithook(count)
transformers_import.arrange()
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import import_utils
assert import_utils.__spec__.loader.__class__.__name__ == "SourceFileLoader"
models = [n for name, n in scanned.items() if f"{os.sep}models{os.sep}" in name]
print(len(models), sum(models))
"""
    num_folders, num_scans = map(int, run(script).split())
    # (The few that are imported are scanned again, each on its own.)
    assert num_folders > 100 and num_scans < 1.1 * num_folders


def test_transformers_does_not_import_torch() -> None:
    script = """
import importlib.util, sys
from mlx_paged.cli import transformers_import

transformers_import.arrange()
from transformers import AutoImageProcessor, AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import is_torch_available, is_torchvision_available
print(is_torch_available(), is_torchvision_available(), "torch" in sys.modules)
print(importlib.util.find_spec("torch") is not None)
"""
    given, is_installed = run(script).split("\n")[:2]
    assert given == "False False False"
    assert is_installed == "True", "this shows something only where torch is installed"


def test_a_transformers_without_the_function_is_left_alone() -> None:
    from types import ModuleType

    from mlx_paged.cli import transformers_import

    module = ModuleType("changed")
    transformers_import._import_lightly(module, lambda: None)
    assert not hasattr(module, transformers_import.SCAN)
    setattr(module, transformers_import.SCAN, len)  # not cached: nothing to lift
    transformers_import._import_lightly(module, lambda: None)
    assert getattr(module, transformers_import.SCAN) is len
