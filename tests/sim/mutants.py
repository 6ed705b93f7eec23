"""Planted faults: a mutant is one change of the kernels' text, and some check must notice it."""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .checks import CAUGHT, INVALID
from .library import METAL
from .toolchain import CACHE, make_cache

TESTS = Path(__file__).resolve().parents[1]
TIMEOUT_S = 120


@dataclass(frozen=True)
class Mutant:
    """`old` of a file of the kernels, which is there exactly once, replaced by `new`."""

    file: str
    old: str
    new: str
    what: str  # the fault planted
    checks: tuple[str, ...] = ()  # to try, in this order; none: all of the module


@dataclass(frozen=True)
class Verdict:
    mutant: Mutant
    caught: bool
    valid: bool
    said: str

    def __str__(self) -> str:
        state = "caught" if self.caught else "SURVIVED" if self.valid else "INVALID"
        return f"{state:9}{self.mutant.file}: {self.mutant.what}  [{self.said}]"


def plant(mutant: Mutant, source: Path, target: Path) -> None:
    """Copies the kernels of `source` to `target` with the fault in them."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    path = target / mutant.file
    text = path.read_text()
    if text.count(mutant.old) != 1:
        raise ValueError(
            f"{mutant.file} has {text.count(mutant.old)} times {mutant.old!r}, "
            "and must have it once"
        )
    path.write_text(text.replace(mutant.old, mutant.new))


class _Judge:
    """A process that has imported the checks of a module, and forks for each mutant."""

    def __init__(self, module: str) -> None:
        path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "sim.checks", module],
            env={
                **os.environ,
                "PYTHONPATH": path,
                "OPENBLAS_NUM_THREADS": "1",
                "MLX_PAGED_SIM_OPTIMISATION": "-O0",
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        atexit.register(self._process.communicate)  # it ends when its input does

    def ask(self, root: Path, names: Sequence[str], timeout: int) -> dict[str, Any]:
        request = json.dumps({"root": str(root), "names": names, "timeout": timeout})
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(request + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the process of the checks ended with {self._process.wait()}")
        return dict(json.loads(answer))


@functools.cache
def _judge_of(module: str) -> _Judge:
    return _Judge(module)


def judge(mutant: Mutant, module: str, source: Path = METAL) -> Verdict:
    """In a process of its own: a mutant may crash or never end, and both give it away."""
    root = _folder(mutant, source)
    plant(mutant, source, root)
    result = _judge_of(module).ask(root, mutant.checks, TIMEOUT_S)
    if "signal" in result:
        ended = result["signal"] == signal.SIGALRM
        said = (
            f"did not end in {TIMEOUT_S} s" if ended else f"crashed with signal {result['signal']}"
        )
        return Verdict(mutant, True, True, said)
    verdict = result["verdict"]
    return Verdict(mutant, verdict == CAUGHT, verdict != INVALID, result["said"])


def _folder(mutant: Mutant, source: Path) -> Path:
    """The same for the same text, so that its compiled kernels are found again."""
    digest = hashlib.sha256(repr((mutant.file, mutant.old, mutant.new)).encode())
    for path in sorted(p for p in source.iterdir() if p.is_file()):
        digest.update(path.name.encode() + path.read_bytes())
    make_cache()
    return CACHE / "mutants" / digest.hexdigest()[:24] / "metal"


def run_mutants(mutants: Sequence[Mutant], module: str, source: Path = METAL) -> list[Verdict]:
    """Verdicts in the order given."""
    return [judge(mutant, module, source) for mutant in mutants]


def score(verdicts: Sequence[Verdict]) -> str:
    caught = sum(v.caught for v in verdicts)
    return "\n".join([f"{caught} of {len(verdicts)} mutants caught", *map(str, verdicts)])
