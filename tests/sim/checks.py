"""Checks of kernels: plain functions of a SimLibrary, so that the same ones run on metal/, on
mutants of it, and before the line coverage is read.

`python -m sim.checks MODULE` imports the checks of a module once, and then runs those of each line
of its input, `{"root": ..., "names": [...], "timeout": seconds}`, in a fork of its own: kernels may
crash or never end, and an import costs as much as the checks. The answer is a line
`{"verdict": ..., "said": ...}`, or `{"signal": ...}` of a fork that a signal ended; SIGALRM ends
what takes longer than the time given.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import traceback
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


def library_for(module: str, root: Path | str) -> SimLibrary:
    """The kernels that the checks of a module run on: `library_of(root)` if the module has it."""
    make = getattr(importlib.import_module(module), "library_of", library)
    return make(Path(root).resolve())


def first_failure(root: Path, module: str, names: Iterable[str] = ()) -> tuple[int, str]:
    """Verdict and what was said."""
    checks = checks_of(module)
    wanted = list(names) or list(checks)
    name = ""
    try:
        kernels = library_for(module, root)
        for name in wanted:
            checks[name](kernels)
    except SimCompileError as error:
        return INVALID, f"does not compile: {error}"
    except (AssertionError, SimFault, SimLaunchError, RuntimeError) as error:
        # A primitive of the extension reports what the simulator refused as a RuntimeError.
        verdict = INVALID if "error:" in str(error) else CAUGHT
        return verdict, f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return SURVIVED, ""


def serve(module: str) -> None:
    """Nothing is computed here, only imported: a fork has no threads but its own."""
    checks_of(module)
    for line in sys.stdin:
        request = json.loads(line)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(request["timeout"])
            try:
                verdict, said = first_failure(request["root"], module, request["names"])
            except BaseException:  # a fault of the checks, not of the kernels
                verdict, said = INVALID, traceback.format_exc()[-600:]
            os.write(writer, json.dumps({"verdict": verdict, "said": said[-3000:]}).encode())
            os._exit(0)
        os.close(writer)
        with open(reader) as pipe:
            answer = pipe.read()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(json.dumps({"signal": -code}) if code < 0 else answer, flush=True)


if __name__ == "__main__":
    serve(sys.argv[1])
