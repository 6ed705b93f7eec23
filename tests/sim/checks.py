"""Checks of kernels: plain functions of a SimLibrary, so that the same ones run on metal/, on
mutants of it, and before the line coverage is read.

`python -m sim.checks ROOT MODULE [NAME ...]` runs them on the kernels under ROOT and prints the
first that fails, as JSON.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from .abi import SimFault, SimLaunchError
from .library import SimCompileError, SimLibrary

Check = Callable[[SimLibrary], None]
SURVIVED, CAUGHT, INVALID = 0, 1, 2


def check(function: Check) -> Check:
    """Marks a function of a module as a check."""
    function.__dict__["is_check"] = True
    return function


def checks_of(module: str) -> dict[str, Check]:
    """Name -> check, in the order in which they are written."""
    found = vars(importlib.import_module(module))
    return {name: f for name, f in found.items() if getattr(f, "is_check", False)}


def library(root: Path | str) -> SimLibrary:
    """All kernels of a folder."""
    root = Path(root).resolve()
    return SimLibrary(files=sorted(root.glob("*.metal")), root=root)


def first_failure(root: Path, module: str, names: Iterable[str] = ()) -> tuple[int, str]:
    """Verdict and what was said."""
    checks = checks_of(module)
    wanted = list(names) or list(checks)
    name = ""
    try:
        kernels = library(root)
        for name in wanted:
            checks[name](kernels)
    except SimCompileError as error:
        return INVALID, f"does not compile: {error}"
    except (AssertionError, SimFault, SimLaunchError, RuntimeError) as error:
        # A primitive of the extension reports what the simulator refused as a RuntimeError.
        verdict = INVALID if "error:" in str(error) else CAUGHT
        return verdict, f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return SURVIVED, ""


if __name__ == "__main__":
    verdict, said = first_failure(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
    print(json.dumps({"verdict": verdict, "said": said}))
