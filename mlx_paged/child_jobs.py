"""Jobs in a child process, named by strings; a crash or a hang ends one job, not the caller.

The child runs jobs one after the other (`serve`) and writes a line before and after each. If it
crashes or hangs, the running job has failed, and a new child runs the rest (`run_in_child`). The
machine's doctor and the calibration of kernels use it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import IO, Any

# Prefix of the child's lines; code at interpreter start (sitecustomize) may print others.
_MARK = "mlx-paged-job:"
_BEGIN, _END = "begin", "end"


@dataclass(frozen=True)
class Outcome:
    """The outcome of a job.

    Attributes:
        value: The job's answer; None if it failed.
        error: "<type>: <message>", or "Crash: <cause>"; None if it succeeded.
    """

    value: Any = None
    error: str | None = None

    @property
    def is_crash(self) -> bool:
        """True if the job ended its process, or did not end."""
        return self.error is not None and self.error.startswith("Crash: ")


# --- In the calling process -----------------------------------------------------------------------

OnBegin = Callable[[str, Any], object]  # (job, what it announced)
OnEnd = Callable[[str, Outcome], object]


def run_in_child(
    module: str,
    names: Sequence[str],
    *,
    seconds_per_job: float,
    seconds: float | None = None,
    seconds_to_start: float | None = None,
    first: Callable[[], Sequence[str]] = tuple,
    on_begin: OnBegin = lambda name, about: None,
    on_end: OnEnd = lambda name, outcome: None,
) -> dict[str, Outcome]:
    """Runs jobs in a child process; after a crash, runs the rest in a new one.

    Args:
        module: Run with ``python -m``; it calls `serve`.
        seconds_per_job: A job that takes longer is a crash.
        seconds: Limit for all jobs; those that do not fit have no outcome. None: no limit.
        seconds_to_start: Limit for the interpreter and its imports; None: `seconds_per_job`.
        first: Returns jobs that a child runs first, to prepare itself. They have no outcome.
        on_begin: Called when a job begins with None, and again with each `announce` of the job.
        on_end: Called with each outcome when it is known.
    """
    outcomes: dict[str, Outcome] = {}
    deadline = None if seconds is None else time.monotonic() + seconds
    while rest := [name for name in names if name not in outcomes]:
        start = seconds_per_job if seconds_to_start is None else seconds_to_start
        child = _Child(module, seconds_per_job, start, deadline, first())
        with contextlib.closing(child.outcomes(rest, on_begin)) as found:
            for name, outcome in found:
                outcomes[name] = outcome
                on_end(name, outcome)
        if child.is_out_of_time:
            break
    return outcomes


@dataclass
class _Child:
    module: str
    seconds_per_job: float
    seconds_to_start: float
    deadline: float | None
    first: Sequence[str]
    is_out_of_time: bool = field(default=False, init=False)
    _running: str | None = field(default=None, init=False)  # the job
    _began: float = field(default=0.0, init=False)  # it, or the wait for the next one

    def outcomes(
        self, names: Sequence[str], on_begin: OnBegin
    ) -> Generator[tuple[str, Outcome], None, None]:
        """Yields the outcome of each job until one ends the child. Yields at least one outcome,
        unless the time is over."""
        left = None if self.deadline is None else self.deadline - time.monotonic()
        if left is not None and left <= 0:
            self.is_out_of_time = True
            return
        limits = [str(self.seconds_per_job), "" if left is None else str(left)]
        command = [sys.executable, "-m", self.module, *limits, *self.first, "--", *names]
        num_done = 0
        self._running, self._began = None, time.monotonic()
        with tempfile.TemporaryFile() as errors:
            # In a session of its own, so that Ctrl-C reaches the caller alone, which ends it.
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
            try:
                assert process.stdout is not None
                for line in _lines(process.stdout, self._patience):
                    kind, name, *rest = line
                    if kind == _BEGIN:
                        if self._running != name:
                            self._running, self._began = name, time.monotonic()
                        if name in names:
                            on_begin(name, rest[0])
                    else:
                        self._running, self._began = None, time.monotonic()
                        if name in names:
                            num_done += 1
                            yield name, Outcome(*rest)
                is_silent = process.poll() is None and not _ends(process)
            finally:
                _kill(process)
            if num_done == len(names):
                return
            took = time.monotonic() - self._began
            late = self.deadline is not None and time.monotonic() >= self.deadline - 0.01
            if late and (self._running is None or took < self.seconds_per_job):
                self.is_out_of_time = True
                return
            errors.seek(0)
            said = errors.read().decode(errors="replace").strip().splitlines()
        cause = f"no answer within {self.seconds_per_job:.0f} s"
        timed_out = any(line.startswith("Timeout (") for line in said)  # printed by faulthandler
        if not (is_silent or timed_out):
            cause = _ending(process.returncode, said)
        yield names[num_done], Outcome(error=f"Crash: {cause}")

    def _patience(self) -> float:
        """Seconds to wait for the next line. The child enforces the limit itself if it can."""
        extra = self.seconds_to_start if self._running is None else 1.0
        left = self._began + self.seconds_per_job + extra - time.monotonic()
        if self.deadline is not None:
            left = min(left, self.deadline - time.monotonic())
        return max(0.0, left)


def _lines(stream: IO[bytes], patience: Callable[[], float]) -> Iterator[list[Any]]:
    """Yields the child's lines until it closes the stream, or says nothing for too long."""
    pending = b""
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while selector.select(patience()):
            read = os.read(stream.fileno(), 1 << 16)
            if not read:
                return
            *whole, pending = (pending + read).split(b"\n")
            for line in whole:
                _, mark, text = line.decode(errors="replace").partition(_MARK)
                if mark:
                    yield json.loads(text)


def _ends(process: subprocess.Popen[bytes]) -> bool:
    """True if a child that has closed its output ends by itself."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(1.0)
        return True
    return False


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _ending(status: int, said: Sequence[str]) -> str:
    how = f"the process ended with status {status}"
    if status < 0:
        known = -status in set(signal.Signals)
        how = f"the process was killed by {signal.Signals(-status).name if known else -status}"
    return how + (f" ({said[-1].strip()})" if said else "")


# --- In the child ---------------------------------------------------------------------------------

_announce: Callable[[Any], object] = lambda about: None  # noqa: E731
_announced: Any = None


def announce(about: Any) -> None:
    """Tells the calling process something about the running job before it can crash."""
    global _announced
    _announced = about
    _announce(about)


def announced() -> Any:
    """Returns what the running job announced last; None if it has announced nothing."""
    return _announced


def serve(run: Callable[[str], Any], arguments: Sequence[str]) -> None:
    """Runs jobs and writes lines for each; redirects all other output to standard error.

    Args:
        run: Runs a job and returns its answer, of JSON's types. An exception becomes its error.
        arguments: Of the command line: seconds for each job, seconds for all or "", jobs.
    """
    global _announce
    per_job, total, *names = arguments
    deadline = time.monotonic() + float(total) if total else None
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def write(*line: Any) -> None:
        lines.write(f"{_MARK}{json.dumps(line)}\n")

    for name in names:
        if name == "--":
            continue
        left = float(per_job)
        if deadline is not None:
            left = min(left, deadline - time.monotonic())
            if left <= 0:
                break
        faulthandler.dump_traceback_later(left, exit=True)
        _announce = partial(write, _BEGIN, name)
        announce(None)
        outcome = attempt(run, name)
        write(_END, name, outcome.value, outcome.error)
    faulthandler.cancel_dump_traceback_later()


def attempt(run: Callable[[str], Any], name: str) -> Outcome:
    """Runs a job in this process; an exception becomes the outcome's error."""
    try:
        return Outcome(run(name))
    except Exception as error:
        return Outcome(error=" ".join(f"{type(error).__name__}: {error}".split()))
