"""EngineProcess: the engine process's side of a `ProcessEngine`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from typing import Any, NoReturn

from mlx_paged.engine.async_engine import AsyncEngine
from mlx_paged.engine.client import EngineRequest
from mlx_paged.engine.config import EngineConfig
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.faults import reason_of
from mlx_paged.engine.process.messages import (
    Accepted,
    Call,
    Dead,
    Failed,
    Leave,
    Ready,
    Reply,
    Start,
    Submit,
    not_for_two_processes,
)
from mlx_paged.engine.process.outbox import Outbox, RemoteSink
from mlx_paged.engine.process.pipe import Pipe
from mlx_paged.engine.ranks.start import make_engine
from mlx_paged.errors import MlxPagedError

logger = logging.getLogger(__name__)

# Seconds for the server to read the last messages.
_FLUSH_TIMEOUT = 5.0
# Seconds for logging to end.
_LOGGING_TIMEOUT = 1.0


class EngineProcess:
    """Answers the messages of a `ProcessEngine`.

    Args:
        pipe: Connects to the server process.
        start: The model and the engine's options.
    """

    def __init__(self, pipe: Pipe, start: Start) -> None:
        self._pipe = pipe
        self._outbox = Outbox()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._has_sent_death = False
        config = EngineConfig(**start.options)

        def make() -> Engine:
            with start.make_on_kernel() as on_kernel:
                engine = make_engine(
                    start.model,
                    config,
                    dtype=start.dtype,
                    generation_config=start.generation_config,
                    on_kernel=on_kernel,
                )
            engine.on_launch = self._outbox.launched.append
            return engine

        self.engine = AsyncEngine(make, self._send_updates)

    async def run(self) -> None:
        """Serves until the engine is shut down or fails."""
        self._loop = asyncio.get_running_loop()
        self._ended = self._loop.create_future()
        threading.Thread(target=self._receive, name="mlx-paged-calls", daemon=True).start()
        engine = self.engine
        try:
            await engine.ready()
        except Exception as error:
            self._pipe.send(Failed(_sendable(error)))
        else:
            if self._send_ready():
                await self._ended
        self._pipe.flush(_FLUSH_TIMEOUT)

    def _send_ready(self) -> bool:
        engine = self.engine
        try:
            self._pipe.send(Ready(engine.info, engine.tokenizer, engine.media))
        except Exception as error:  # Not every tokenizer or media processor can be pickled.
            failure = not_for_two_processes(error)
            logger.critical("%s", failure)
            self._pipe.send(Failed(failure))
            return False
        return True

    # On the engine's thread.

    def _send_updates(self, engine: AsyncEngine) -> None:
        """Sends the updates of a step, and once the reason why the engine died."""
        if not engine.is_ready:  # `run` reports why.
            return
        updates = self._outbox.take(refuses_requests=engine.refuses_requests)
        if updates is not None:
            self._pipe.send(updates)
        if engine.reason_of_death is not None and not self._has_sent_death:
            self._has_sent_death = True
            self._pipe.send(Dead(engine.reason_of_death))

    # On the receiving thread.

    def _receive(self) -> None:
        while True:
            try:
                message = self._pipe.receive()
            except EOFError:
                _end_process()  # The server is gone, and a running step may take any time.
            except Exception:  # Without this, the server's calls would wait forever.
                logger.critical("a message of the server cannot be read", exc_info=True)
                _end_process()
            self._loop.call_soon_threadsafe(self._handle, message)

    # On the event loop.

    def _handle(self, message: Submit | Leave | Call) -> None:
        if isinstance(message, Leave):
            self._leave(message.number)
            return
        work = self._submit(*message) if isinstance(message, Submit) else self._call(*message)
        task = self._tasks[message.number] = self._loop.create_task(work)
        task.add_done_callback(lambda _: self._tasks.pop(message.number, None))

    def _leave(self, number: int) -> None:
        if (task := self._tasks.get(number)) is not None:
            task.cancel()
        if (sink := self._outbox.sinks.get(number)) is not None:
            self.engine.leave(sink.request_id, sink)

    async def _submit(self, number: int, request_id: str, request: EngineRequest) -> None:
        sink = RemoteSink(request_id, number, request.num_answers, self._outbox)
        try:
            await self.engine.admit(request, request_id, sink, sink)
        except BaseException as error:
            self._outbox.sinks.pop(number, None)
            if not isinstance(error, Exception):
                raise
            self._pipe.send(Reply(number, None, _sendable(error)))
            return
        output = sink.output
        token_ids = output.prompt_token_ids
        accepted = Accepted(
            output.prompt,
            None if isinstance(request.prompt, list) and request.prompt == token_ids else token_ids,
            output.metrics.arrival_time,
            output.relaxed,
        )
        self._pipe.send(Reply(number, accepted))

    async def _call(self, number: int, method: str, arguments: tuple[Any, ...]) -> None:
        try:
            reply = Reply(number, await getattr(self.engine, method)(*arguments))
        except Exception as error:
            reply = Reply(number, None, _sendable(error))
        self._pipe.send(reply)
        if method == "shutdown":
            with contextlib.suppress(asyncio.InvalidStateError):
                self._ended.set_result(None)


def _end_process() -> NoReturn:
    """Ends the process while its engine computes, which cannot be interrupted."""
    # Also ends progress bars. It may wait for a terminal that takes no output.
    closing = threading.Thread(target=logging.shutdown, daemon=True)
    closing.start()
    closing.join(_LOGGING_TIMEOUT)
    os._exit(1)


def _sendable(error: Exception) -> Exception:
    """Returns the error itself, or a plain one if the server may lack its class."""
    return error if isinstance(error, MlxPagedError) else RuntimeError(reason_of(error))
