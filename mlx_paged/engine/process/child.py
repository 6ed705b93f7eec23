"""EngineProcess: the engine's side of a `ProcessEngine`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from typing import Any

from mlx_paged.engine.async_engine import AsyncEngine
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
)
from mlx_paged.engine.process.outbox import Outbox, RemoteSink
from mlx_paged.engine.process.pipe import Pipe
from mlx_paged.engine.ranks.start import make_engine
from mlx_paged.errors import InvalidParameterError, MlxPagedError

logger = logging.getLogger(__name__)

# Seconds for the last messages to be read.
_LAST_WORDS = 5.0


class EngineProcess:
    """Answers the messages of a `ProcessEngine`.

    Args:
        pipe: To the server's process.
        start: Options of the engine.
    """

    def __init__(self, pipe: Pipe, start: Start) -> None:
        self._pipe = pipe
        self._outbox = Outbox()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._has_said_dead = False
        config = EngineConfig(**start.options)
        on_kernel = None if start.make_on_kernel is None else start.make_on_kernel()

        def make() -> Engine:
            engine = make_engine(
                start.model,
                config,
                dtype=start.dtype,
                generation_config=start.generation_config,
                on_kernel=on_kernel,
            )
            engine.on_launch = self._outbox.launched.append
            return engine

        self.engine = AsyncEngine(make, self._tell)

    async def run(self) -> None:
        """Returns when the engine has been shut down, or has failed."""
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
        self._pipe.flush(_LAST_WORDS)

    def _send_ready(self) -> bool:
        engine = self.engine
        try:
            self._pipe.send(Ready(engine.info, engine.tokenizer, engine.media))
        except Exception as error:  # Some model's tokenizer or processor cannot be pickled.
            expected = f"off for this model, which the server's process cannot read ({error})"
            failure = InvalidParameterError("frontend_multiprocessing", expected, True)
            logger.critical("%s", failure)
            self._pipe.send(Failed(failure))
            return False
        return True

    # On the engine's thread.

    def _tell(self, engine: AsyncEngine) -> None:
        """Sends the news of a step."""
        if not engine.is_ready:  # `run` tells why.
            return
        news = self._outbox.take(refuses_requests=engine.refuses_requests)
        if news is not None:
            self._pipe.send(news)
        if engine.reason_of_death is not None and not self._has_said_dead:
            self._has_said_dead = True
            self._pipe.send(Dead(engine.reason_of_death))

    # On a thread of its own.

    def _receive(self) -> None:
        while True:
            try:
                message = self._pipe.receive()
            except EOFError:
                os._exit(1)  # The server's process is gone; a step may run for any time.
            self._loop.call_soon_threadsafe(self._handle, message)

    # On the loop.

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

    async def _submit(self, number: int, request_id: str, request: Any) -> None:
        num_answers = getattr(request.params, "n", 1)
        sink = RemoteSink(request_id, number, num_answers, self._outbox)
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


def _sendable(error: Exception) -> Exception:
    """Returns an error that the other process can read."""
    return error if isinstance(error, MlxPagedError) else RuntimeError(reason_of(error))
