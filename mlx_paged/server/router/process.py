"""ModelProcess: a child process that serves one model on a Unix domain socket."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from mlx_paged.server.child_process import PIPE, ChildProcess
from mlx_paged.server.router.routing import Replica, RoutedRequest
from mlx_paged.server.router.spec import ModelSpec

logger = logging.getLogger(__name__)

#: Called with an account number and the tokens that it used.
OnUsed = Callable[[int, int], None]
#: Called with a process and how many responses it generates without a request, when that changes.
OnBackground = Callable[[Replica, int], None]

#: Environment variable with a replica's number, which its log lines have.
REPLICA = "MLX_PAGED_REPLICA"

# Seconds to wait for a process to exit after its requests have finished, before it is killed.
_GRACE = 10.0


@dataclass(frozen=True)
class LoadedModel:
    """A process's report about the model that it has loaded.

    Attributes:
        memory: Bytes of the process: weights, the whole KV cache, and the interpreter.
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
    """A process that serves one model, or several that serve it together (`ReplicaSet`)."""

    @property
    def replicas(self) -> Sequence[Replica]:
        """The processes that take requests now."""

    async def choose(self, request: RoutedRequest) -> Replica:
        """Returns the process that answers a request.

        Raises:
            ApiError: 503, none runs now.
        """

    def metrics(self, texts: Mapping[Replica, str]) -> Iterable[Metric]:
        """Combines metrics that processes have answered, in Prometheus's text format."""

    async def loaded(self) -> LoadedModel:
        """Waits until the model is loaded.

        Raises:
            ProcessFailedError: It gives the reason.
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

    Attributes:
        socket: The Unix domain socket that it listens on.

    The child reads its options from stdin, whose end tells it that the router has ended. Its stdout
    is described in `link`.
    """

    def __init__(
        self, process: ChildProcess, socket: Path, on_used: OnUsed, on_background: OnBackground
    ) -> None:
        self.socket = socket
        self._replica = Replica(socket)
        self._process = process
        self._on_used = on_used
        self._on_background = on_background
        self._loaded: asyncio.Future[dict[str, Any] | None] = asyncio.Future()
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
        """Starts a process.

        Args:
            entry: The module whose `main` the child runs.
            socket: Path of the socket that it will listen on.
            on_used: See its type.
            on_background: See its type.
            environment: Variables that it has besides those of this process.
        """
        # Same sys.path as here, without the working directory.
        code = f"import sys; sys.path[:] = {sys.path!r}; from {entry} import main; main()"
        process = await ChildProcess.start(
            [sys.executable, "-c", code, str(socket)],
            environment={**os.environ, **environment},
            stdin=PIPE,
            stdout=PIPE,
            # Ctrl-C is for the router, which ends its children in order. No session of its own:
            # Linux divides processors between sessions, and let the router wait for seconds.
            process_group=0,
        )
        started = cls(process, socket, on_used, on_background)
        assert process.stdin is not None
        process.stdin.write(len(spec.launch).to_bytes(8, "little") + spec.launch)
        return started

    @property
    def replicas(self) -> Sequence[Replica]:
        """See `ServingProcess`."""
        return (self._replica,)

    async def choose(self, request: RoutedRequest) -> Replica:
        """See `ServingProcess`."""
        return self._replica

    def metrics(self, texts: Mapping[Replica, str]) -> Iterable[Metric]:
        """See `ServingProcess`."""
        for text in texts.values():
            yield from text_string_to_metric_families(text)

    async def loaded(self) -> LoadedModel:
        """See `ServingProcess`."""
        told = await asyncio.shield(self._loaded)
        if told is None:
            how = await self.ended()
            raise ProcessFailedError(f"its process ended while it was loading ({how})")
        if "failure" in told:
            raise ProcessFailedError(told["failure"])
        return LoadedModel(
            told["memory"],
            told["max_model_len"],
            tuple(told["input_modalities"]),
            tuple(told["adapters"]),
        )

    async def ended(self) -> str:
        """See `ServingProcess`."""
        status = await self._process.wait()
        if status >= 0:
            return f"exit status {status}"
        name = signal.Signals(-status).name
        # Nothing else of the system ends a process this way.
        return f"{name}: the system may be short of memory" if name == "SIGKILL" else name

    async def stop(self, drain_timeout: float) -> None:
        """See `ServingProcess`."""
        ending = asyncio.ensure_future(self.ended())
        self._process.send_signal(signal.SIGTERM)
        if drain_timeout == 0:  # The second signal ends running requests, too.
            self._process.send_signal(signal.SIGINT)
        done, _ = await asyncio.wait({ending}, timeout=drain_timeout + _GRACE)
        if not done:
            logger.warning("process %d does not end: it is killed", self._process.pid)
            self.kill()
        await ending
        self._listening.cancel()
        self.socket.unlink(missing_ok=True)

    def kill(self) -> None:
        """See `ServingProcess`."""
        self._process.kill()

    async def _listen(self) -> None:
        """Reads the process's reports until it exits."""
        assert self._process.stdout is not None
        try:
            async for line in self._process.stdout:
                told = json.loads(line)
                if not self._loaded.done():
                    self._loaded.set_result(told)
                for account, num_tokens in told.get("used", {}).items():
                    self._on_used(int(account), num_tokens)
                if "background" in told:
                    self._on_background(self._replica, told["background"])
        finally:  # `stop` may cancel this first.
            self._on_background(self._replica, 0)
        if not self._loaded.done():
            self._loaded.set_result(None)
