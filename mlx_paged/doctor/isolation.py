"""Runs jobs in a child process, so that a crash or a hang is an outcome with a name.

The child reads a JSON list of jobs and writes a line before and after each. When it dies, the job
it was at gets the blame and a new child takes the rest.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO, Any

from mlx_paged.doctor import jobs

# The first kernels on a GPU are compiled when they are first used: up to ten seconds of NVRTC.
SECONDS_PER_JOB = 60.0
# Begins the child's lines: whatever starts with the interpreter may print too (sitecustomize).
_MARK = "mlx-paged-doctor:"
_TAIL = 600  # characters of the child's stderr that are kept


@dataclass(frozen=True)
class Outcome:
    """What came of a job.

    Attributes:
        value: Its answer; None where it failed.
        error: "<type>: <message>"; None where it did not fail.
        crashed: Whether it took its process along.
    """

    value: Any = None
    error: str | None = None
    crashed: bool = False


Runner = Callable[[Sequence[str]], dict[str, Outcome]]


def run_here(names: Sequence[str]) -> dict[str, Outcome]:
    """Runs jobs in this process: for a program that asks about itself."""
    return {name: _attempt(name) for name in names}


def run_in_child(
    names: Sequence[str], *, seconds_per_job: float = SECONDS_PER_JOB
) -> dict[str, Outcome]:
    """Runs jobs in a child, and what a crash leaves over in another one."""
    outcomes: dict[str, Outcome] = {}
    while rest := [name for name in names if name not in outcomes]:
        outcomes.update(_one_child(rest, seconds_per_job))
    return outcomes


def _one_child(names: Sequence[str], seconds_per_job: float) -> dict[str, Outcome]:
    """Outcomes of the jobs up to the first that takes the child along; of one at least."""
    child = subprocess.Popen(
        [sys.executable, "-m", "mlx_paged.doctor.isolation"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdin and child.stdout and child.stderr
    lines: queue.Queue[str | None] = queue.Queue()
    errors: list[str] = []
    readers = [
        threading.Thread(target=_read, args=(child.stdout, lines.put), daemon=True),
        threading.Thread(target=_read, args=(child.stderr, _keep(errors)), daemon=True),
    ]
    for reader in readers:
        reader.start()
    try:
        child.stdin.write(json.dumps(list(names)))
        child.stdin.close()
    except OSError:  # it died before it read them; the exit status says how
        pass

    outcomes: dict[str, Outcome] = {}
    current, reason = names[0], ""
    while len(outcomes) < len(names):
        try:
            line = lines.get(timeout=seconds_per_job)
        except queue.Empty:
            reason = f"no answer within {seconds_per_job:.0f} s"
            break
        if line is None:
            break
        _, mark, told = line.partition(_MARK)
        if not mark:
            continue
        name, phase, value, error = json.loads(told)
        current = name
        if phase == "end":
            outcomes[name] = Outcome(value, error)
    if len(outcomes) < len(names):
        if reason:
            child.kill()
        status = child.wait()
        for reader in readers:
            reader.join(timeout=5)
        words = reason or _exit_words(status)
        tail = "".join(errors).strip()[-_TAIL:]
        outcomes[current] = Outcome(
            error=f"Crash: {words}" + (f" ({_last_line(tail)})" if tail else ""), crashed=True
        )
    child.wait()
    for stream in (child.stdout, child.stderr):
        stream.close()
    return outcomes


def _read(stream: IO[str], take: Callable[[str | None], object]) -> None:
    for line in stream:
        take(line)
    take(None)


def _keep(lines: list[str]) -> Callable[[str | None], object]:
    return lambda line: None if line is None else lines.append(line)


def _exit_words(status: int) -> str:
    if status >= 0:
        return f"the process ended with status {status}"
    try:
        return f"the process was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"the process was killed by signal {-status}"


def _last_line(text: str) -> str:
    return text.splitlines()[-1].strip()


def _attempt(name: str) -> Outcome:
    try:
        return Outcome(jobs.run(name))
    except Exception as error:
        message = " ".join(str(error).split()) or traceback.format_exc().splitlines()[-1]
        return Outcome(error=f"{type(error).__name__}: {message}")


def main() -> None:
    """The child: its own standard output is for outcomes only."""
    outcomes = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    names = json.loads(sys.stdin.read())

    def tell(*line: Any) -> None:
        outcomes.write(f"{_MARK}{json.dumps(line)}\n")
        outcomes.flush()

    for name in names:
        tell(name, "begin", None, None)
        outcome = _attempt(name)
        tell(name, "end", outcome.value, outcome.error)


if __name__ == "__main__":
    main()
