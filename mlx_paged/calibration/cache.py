"""The cache file: outcomes of calibration on one machine, in the user's cache directory.

Its name has a hash of all that can change an outcome: chip, OS, MLX and this package's build. It is
replaced as a whole, so readers see an old file or a new one. A file that cannot be read counts as
empty, and a directory that cannot be written is reported once.

Before a job runs, the file names it and its kernels. If the process and the machine end there, the
next start finds the job and does not run it again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mlx_paged.wheels import cache_directory

logger = logging.getLogger(__name__)

# Raised when names of jobs or fields change their meaning.
_VERSION = 2


@dataclass(frozen=True)
class Result:
    """The outcome of a job.

    Attributes:
        kernels: The kernels that it ran, as far as it said before it ended.
        error: Why they are rejected; None: they are right.
        seconds: The time that a job of `timing` measured; None: not measured.
    """

    kernels: tuple[str, ...] = ()
    error: str | None = None
    seconds: float | None = None


@dataclass
class Cache:
    """The file of one machine.

    Args:
        machine: What identifies it; see `machine.key`.
        directory: None: the user's cache directory.
    """

    machine: Mapping[str, str]
    directory: Path | None = None
    _warned: bool = field(default=False, init=False)

    @property
    def path(self) -> Path:
        """The file, which need not exist yet."""
        directory = self.directory or cache_directory() / "calibration"
        text = json.dumps([_VERSION, sorted(self.machine.items())])
        return directory / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"

    def load(self) -> dict[str, Result]:
        """Returns the outcomes by job. A job that no process finished has failed."""
        try:
            data = json.loads(self.path.read_text())
            if data["version"] != _VERSION:
                return {}
            results = {name: _result_of(value) for name, value in data["results"].items()}
            running = data.get("running")
            if running is not None and not _is_alive(running["pid"]):
                name, kernels = running["job"], tuple(map(str, running["kernels"]))
                results[str(name)] = Result(kernels, "the process or the machine ended during it")
            return results
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}

    def save(
        self, results: Mapping[str, Result], running: tuple[str, Sequence[str]] | None = None
    ) -> None:
        """Replaces the file.

        Args:
            running: The job that is about to run, and its kernels.
        """
        data: dict[str, Any] = {
            "version": _VERSION,
            "machine": dict(self.machine),
            "results": {name: asdict(result) for name, result in results.items()},
        }
        if running is not None:
            job, kernels = running
            data["running"] = {"job": job, "kernels": list(kernels), "pid": os.getpid()}
        path = self.path
        part: str | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, part = tempfile.mkstemp(dir=path.parent, prefix=f"{path.stem}.")
            with os.fdopen(handle, "w") as file:
                json.dump(data, file, indent=1)
            os.replace(part, path)
        except OSError as error:
            if part is not None:
                with contextlib.suppress(OSError):
                    os.unlink(part)
            if not self._warned:
                self._warned = True
                logger.warning(
                    "calibration cannot be kept and will run again at the next start: %s", error
                )

    @contextlib.contextmanager
    def locked(
        self,
        seconds: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> Iterator[None]:
        """Lets one process at a time calibrate. Others wait up to `seconds`, then continue."""
        lock = None
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            deadline = clock() + seconds
            while lock is not None:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except OSError:
                    if clock() >= deadline:
                        break
                    sleep(0.1)
            yield
        finally:
            if lock is not None:
                os.close(lock)  # and with it the lock


def _result_of(value: Mapping[str, Any]) -> Result:
    error, seconds = value["error"], value["seconds"]
    return Result(
        tuple(map(str, value["kernels"])),
        None if error is None else str(error),
        None if seconds is None else float(seconds),
    )


def _is_alive(pid: int) -> bool:
    """True if another process has this number: it may be calibrating now."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
