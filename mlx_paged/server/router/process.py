"""ModelProcess: a child process that serves one model on a Unix domain socket."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mlx_paged.server.child_process import PIPE, ChildProcess, reader_of
from mlx_paged.server.router.metrics import Families, parsed
from mlx_paged.server.router.routing import Replica, RoutedRequest
from mlx_paged.server.router.spec import ModelSpec

logger = logging.getLogger(__name__)

#: Called with an account number and the tokens that it used.
OnUsed = Callable[[int, int], None]
#: Called with a process and its number of background responses whenever that changes.
OnBackground = Callable[[Replica, int], None]

#: Environment variable: the replica's number, for its log lines.
REPLICA = "MLX_PAGED_REPLICA"

_BEGIN = Path(__file__).with_name("begin.py")
_STDERR = 2  # file descriptor
# Seconds for a process to exit after its requests have finished, before it is killed.
_EXIT_TIMEOUT = 10.0
# Seconds to read the last reports of a process that has exited. Only a process that it forked can
# still hold the pipe open then.
_REPORTS_TIMEOUT = 1.0
# Maximum bytes of a report, which names every adapter.
_MAX_REPORT = 16 << 20


@dataclass(frozen=True)
class LoadedModel:
    """A process's report about its loaded model.

    Attributes:
        memory: Bytes of its processes: weights, the whole KV cache, and the interpreters.
        max_model_len: Maximum tokens of prompt and answer; None: no limit.
        input_modalities: "text", and the kinds of media that the model accepts.
        adapters: Names of its LoRA adapters.
    """

    memory: int
    max_model_len: int | None = None
    input_modalities: tuple[str, ...] = ("text",)
    adapters: tuple[str, ...] = ()


class ProcessFailedError(Exception):
    """A process could not load its model. The message says why."""


class ServingProcess(Protocol):
    """A process that serves one model, or several that share it (`ReplicaSet`)."""

    @property
    def replicas(self) -> Sequence[Replica]:
        """The processes that accept requests now."""

    async def choose(self, request: RoutedRequest) -> Replica:
        """Returns the process that answers a request.

        Raises:
            ApiError: 503, none is running.
        """

    def metrics(self, texts: Mapping[Replica, str]) -> Families:
        """Combines the metrics of processes, which are in Prometheus's text format."""

    async def loaded(self) -> LoadedModel:
        """Waits until the model is loaded.

        Raises:
            ProcessFailedError: Loading failed; the message says why.
        """

    async def ended(self) -> str:
        """Waits for the process to exit; returns a description of how it ended."""

    async def stop(self, drain_timeout: float) -> None:
        """Ends the process and waits for it. A process that is still loading ends immediately.

        Args:
            drain_timeout: Seconds for running requests to finish.
        """

    def kill(self) -> None:
        """Kills the process without waiting."""


class ModelProcess:
    """See `ServingProcess`.

    The child runs `begin`. It reads its model from stdin; end of file tells it that the router is
    gone.

    Args:
        process: The child process.
        reports: The pipe for its reports; see `link`.
        socket: The Unix domain socket that it listens on.
        on_used: Called with reported token usage; see `OnUsed`.
        on_background: Called with background responses; see `OnBackground`. Set by `launch`.

    Attributes:
        socket: The Unix domain socket that it listens on.
        has_imported: True once it has imported all modules ahead of its model (`begin`).
    """

    def __init__(
        self,
        process: ChildProcess,
        reports: asyncio.StreamReader,
        socket: Path,
        on_used: OnUsed,
        on_background: OnBackground = lambda replica, count: None,
    ) -> None:
        self.socket = socket
        self.has_imported = False
        self._replica = Replica(socket)
        self._process = process
        self._reports = reports
        self._on_used = on_used
        self._on_background = on_background
        self._loaded: asyncio.Future[LoadedModel | ProcessFailedError | None] = asyncio.Future()
        self._listening = asyncio.create_task(self._listen())

    @classmethod
    async def start(
        cls,
        entry: str,
        spec: ModelSpec,
        socket: Path,
        on_used: OnUsed,
        on_background: OnBackground,
        environment: Mapping[str, str],
    ) -> ModelProcess:
        """Starts a process and sends it a model; see `start_without_model` and `launch`."""
        started = await cls.start_without_model(entry, socket, on_used, environment)
        started.launch(spec, on_background)
        return started

    @classmethod
    async def start_without_model(
        cls, entry: str, socket: Path, on_used: OnUsed, environment: Mapping[str, str]
    ) -> ModelProcess:
        """Starts a process, which waits for `launch`.

        Args:
            entry: The module with the functions that `begin` calls.
            socket: Path of the socket that it will listen on.
            on_used: See `OnUsed`.
            environment: Variables to add to those of this process.
        """
        # Same sys.path as here, without the working directory.
        code = (
            f"import sys, runpy; sys.path[:] = {sys.path!r}; "
            f"runpy.run_path({str(_BEGIN)!r}, run_name='__main__')"
        )
        # Reports have a pipe of their own, because any library may print to stdout.
        reading, writing = os.pipe()
        try:
            reports = await reader_of(os.fdopen(reading, "rb", buffering=0), _MAX_REPORT)
            process = await ChildProcess.start(
                [sys.executable, "-c", code, entry, str(socket), str(writing)],
                environment={**os.environ, **environment},
                stdin=PIPE,
                stdout=_STDERR,
                # Ctrl-C is for the router, which shuts its children down. Not a new session: Linux
                # shares processors between sessions, which stalled the router for seconds.
                process_group=0,
                pass_fds=(writing,),
            )
        finally:
            os.close(writing)  # The reader closes its end then, unless a process has the other.
        return cls(process, reports, socket, on_used)

    def launch(self, spec: ModelSpec, on_background: OnBackground) -> None:
        """Sends the process its model.

        Args:
            on_background: See `OnBackground`.
        """
        self._on_background = on_background
        assert self._process.stdin is not None
        self._process.stdin.write(len(spec.launch).to_bytes(8, "little") + spec.launch)

    @property
    def has_ended(self) -> bool:
        """True if the process has exited."""
        return self._process.returncode is not None

    @property
    def replicas(self) -> Sequence[Replica]:
        """See `ServingProcess`."""
        return (self._replica,)

    async def choose(self, request: RoutedRequest) -> Replica:
        """See `ServingProcess`."""
        return self._replica

    def metrics(self, texts: Mapping[Replica, str]) -> Families:
        """See `ServingProcess`."""
        return parsed("".join(texts.values()))

    async def loaded(self) -> LoadedModel:
        """See `ServingProcess`."""
        loaded = await asyncio.shield(self._loaded)
        if loaded is None:
            how = await self.ended()
            raise ProcessFailedError(f"its process ended while it was loading ({how})")
        if isinstance(loaded, ProcessFailedError):
            raise loaded
        return loaded

    async def ended(self) -> str:
        """See `ServingProcess`."""
        status = await self._process.wait()
        if status >= 0:
            return f"exit status {status}"
        name = signal.Signals(-status).name
        # Otherwise only the kernel sends SIGKILL, when memory runs out.
        return f"{name}: the system may be short of memory" if name == "SIGKILL" else name

    async def stop(self, drain_timeout: float) -> None:
        """See `ServingProcess`."""
        ending = asyncio.ensure_future(self.ended())
        self._process.send_signal(signal.SIGTERM)
        if drain_timeout == 0:  # A second signal aborts running requests.
            self._process.send_signal(signal.SIGINT)
        done, _ = await asyncio.wait({ending}, timeout=drain_timeout + _EXIT_TIMEOUT)
        if not done:
            logger.warning("process %d does not exit and is killed", self._process.pid)
            self.kill()
        await ending
        self._listening.cancel()
        self.socket.unlink(missing_ok=True)

    def kill(self) -> None:
        """See `ServingProcess`."""
        self._process.kill()

    async def _listen(self) -> None:
        """Reads the process's reports until it closes their pipe, or exits."""
        reading = asyncio.ensure_future(self._read())
        ending = asyncio.ensure_future(self._process.wait())
        try:
            await asyncio.wait({reading, ending}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({reading}, timeout=_REPORTS_TIMEOUT)
        finally:  # Also when `stop` cancels this task.
            reading.cancel()
            ending.cancel()
            self._on_background(self._replica, 0)
            if not self._loaded.done():
                self._loaded.set_result(None)

    async def _read(self) -> None:
        try:
            async for line in self._reports:
                if line.endswith(b"\n"):  # Otherwise the process died while it was writing.
                    self._take(json.loads(line))
        except Exception as error:
            # Unread reports would block the process, and its tokens would not be counted.
            logger.exception("a report of process %d cannot be used", self._process.pid)
            if not self._loaded.done():
                failure = ProcessFailedError(f"a report of its process cannot be used: {error}")
                self._loaded.set_result(failure)
            self.kill()

    def _take(self, report: dict[str, Any]) -> None:
        if "imported" in report:
            self.has_imported = True
            return
        if not self._loaded.done():
            self._loaded.set_result(_loaded_of(report))
        for account, num_tokens in report.get("used", {}).items():
            self._on_used(int(account), num_tokens)
        if "background" in report:
            self._on_background(self._replica, report["background"])


def _loaded_of(report: dict[str, Any]) -> LoadedModel | ProcessFailedError:
    """Converts the first report of a process."""
    if "failure" in report:
        return ProcessFailedError(report["failure"])
    lists: dict[str, Any] = {n: tuple(v) for n, v in report.items() if isinstance(v, list)}
    return LoadedModel(**{**report, **lists})
