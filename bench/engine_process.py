"""An engine in a process of its own, which runs `step_worker.py`."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("step_worker.py")
START_SECONDS, CALL_SECONDS = 400.0, 120.0


class WorkerError(Exception):
    """An engine failed; the message says how."""


class Process:
    """An engine in a separate process.

    Args:
        command: The Python interpreter and its options.
        env: Environment variables to change.
        log: File for its output.
    """

    def __init__(self, name: str, command: list[str], env: dict[str, str], log: Path) -> None:
        self.log = log
        with log.open("a") as file:
            self._process = subprocess.Popen(
                [*command, str(WORKER), name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env={**os.environ, **env},
                text=True,
                start_new_session=True,  # so that an engine's own processes end with it
            )

    def send(self, method: str, **arguments: Any) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # It has ended; `receive` says so.
            self._process.stdin.write(json.dumps({"method": method, **arguments}) + "\n")
            self._process.stdin.flush()

    def receive(self, seconds: float) -> Any:
        """Returns the answer to a request.

        Raises:
            WorkerError: The engine raised an error, its process ended, or `seconds` passed.
        """
        out = self._process.stdout
        assert out is not None
        ends_at = time.monotonic() + seconds
        how = f"no answer in {seconds:.0f} s"
        # Only one line is ever outstanding, so none can hide in the file's buffer from `select`.
        while time.monotonic() <= ends_at:
            if not select.select([out], [], [], 1.0)[0]:
                if self._process.poll() is None:
                    continue
                how = "it ended"  # Its own processes may keep the pipe open.
                break
            line = out.readline()
            if not line:
                how = "it ended"
                break
            answer = json.loads(line)
            if "error" in answer:
                raise WorkerError(answer["error"])
            return answer["value"]
        with contextlib.suppress(ProcessLookupError):  # A late answer would pass for the next one.
            os.killpg(self._process.pid, signal.SIGKILL)
        raise WorkerError(f"{how}; its output ends with {self._tail()!r}")

    def ask(self, method: str, seconds: float = CALL_SECONDS, **arguments: Any) -> Any:
        self.send(method, **arguments)
        return self.receive(seconds)

    def close(self) -> None:
        """Ends the engine and every process that it started."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _tail(self) -> str:
        return " | ".join(self.log.read_text(errors="replace").split("\n")[-4:])[-400:]
