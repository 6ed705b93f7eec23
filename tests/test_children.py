"""Interpreters that tests start import neither torch nor trio. These and tests read transformers'
table."""

from __future__ import annotations

import subprocess
import sys

from transformers.utils import import_utils


def output_of(code: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_a_child_sees_neither_torch_nor_trio() -> None:
    found = "[sys.modules.get(name, 'not hidden') for name in ('torch', 'trio')]"
    assert output_of(f"import sys, mlx_lm; print(*{found})").split() == ["None", "None"]


def test_a_child_imports_hypothesis_which_loads_the_plugin_of_trio() -> None:
    assert output_of("import hypothesis; print('imported')").split() == ["imported"]


TABLE = """
import sys, transformers
from transformers.utils import import_utils
print(f"ours: {import_utils.define_import_structure.__module__ == 'transformers_table'}")
for module in (transformers, transformers.models):
    names = {name: at for name, at in module._class_to_module.items()}
    print(sorted(names.items()), sorted(module._modules))
"""


def test_the_table_of_transformers_is_the_one_it_makes() -> None:
    theirs = f"import sys; sys.meta_path.pop(0){TABLE}"
    expected = output_of(theirs).splitlines()
    for _ in range(2):  # the first may make the file
        assert output_of(TABLE).splitlines() == ["ours: True", *expected[1:]]
    assert expected[0] == "ours: False" and "LlamaConfig" in expected[1]


def test_this_interpreter_gets_the_table_too() -> None:
    module = import_utils.define_import_structure.__module__
    assert module == "support.child_site.transformers_table"
