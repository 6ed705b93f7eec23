"""Gives transformers the table of its modules from a file, in tests and interpreters they start.

It makes the table by reading 1,600 files, often twice: a second of each worker, and a quarter of
the start of an interpreter.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pickle
import sys
from typing import Any

MODULE = "transformers.utils.import_utils"
CACHE = os.path.join(os.path.dirname(__file__), "__pycache__")


class _Finder:
    """Changes the module when it is first imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != MODULE:
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            _arrange(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _arrange(module: Any) -> None:
    make = module.define_import_structure
    models = os.path.join(os.path.dirname(os.path.dirname(module.__file__)), "models")
    # An installation of another version makes the folder and its __init__.py anew.
    times = [os.stat(path).st_mtime_ns for path in (models, os.path.join(models, "__init__.py"))]
    file = os.path.join(CACHE, f"transformers-{times[0]:x}-{times[1]:x}.pickle")

    def define_import_structure(module_path: Any, prefix: str | None = None) -> Any:
        if str(module_path) not in (models, os.path.join(models, "__init__.py")):
            return make(module_path, prefix)
        try:
            with open(file, "rb") as saved:
                table = pickle.load(saved)
        except OSError:
            table = make(models)
            _save(table, file)
        if prefix is None:
            return table
        return {
            backends: {f"{prefix}.{name}": names for name, names in modules.items()}
            for backends, modules in table.items()
        }

    module.define_import_structure = define_import_structure


def _save(table: Any, file: str) -> None:
    """Writes the file whole, as other interpreters may write and read it now."""
    with contextlib.suppress(OSError):
        os.makedirs(CACHE, exist_ok=True)
        part = f"{file}.{os.getpid()}"
        with open(part, "wb") as new:
            pickle.dump(table, new)
        os.replace(part, file)


if MODULE not in sys.modules:
    sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]
