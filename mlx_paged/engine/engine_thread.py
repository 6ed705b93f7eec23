"""EngineThread: the one thread that owns an engine, MLX's streams and all arrays."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from mlx_paged.engine import gc_pause
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.faults import reason_of
from mlx_paged.engine.output_processor import UpdateSink
from mlx_paged.engine.request_stream import Channel, wake_readers
from mlx_paged.errors import EngineDeadError, ForkedProcessError, MlxPagedError

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Consecutive steps that may raise before the engine stops.
_MAX_FAILURES = 3
# Seconds for calls between two steps. The rest, as in a burst of requests, wait for the next step.
_MAX_CALL_SECONDS = 0.005


class EngineThread:
    """Runs other threads' calls between an engine's steps, and delivers the steps' updates.

    Args:
        make_engine: Called on the thread.
        on_updates: Called after sinks may have got updates, and when the thread ends; on another
            thread if a step is stuck forever.

    Attributes:
        ready: Done once the engine has been created, or could not be.
        dead: Why the engine accepts no more calls; None while it does.
    """

    def __init__(
        self, make_engine: Callable[[], Engine], on_updates: Callable[[], object] = lambda: None
    ) -> None:
        self.ready: Future[None] = Future()
        self.dead: str | None = None
        self.engine: Engine  # once `ready` is done; other threads only read its config
        self._make_engine = make_engine
        self._on_updates = on_updates
        self._calls: deque[tuple[Callable[[Engine], Any], Future[Any]]] = deque()
        self._begun: Future[Any] | None = None  # of the running or interrupted call
        self._num_failures = 0  # in a row
        self._pid = os.getpid()
        # Reentrant: a stream aborts itself if it is garbage-collected while this thread holds the
        # lock. Always `with self._lock`, not `with self._changed`: the interpreter's own locks stay
        # correct when an exception such as Ctrl-C interrupts them.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._stop_at: float | None = None
        self._sleepers: list[Channel] = []  # readers to wake; only this thread uses it
        self._thread = threading.Thread(target=self._run, name="mlx-paged-engine", daemon=True)

    # From any thread.

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def submit(self, function: Callable[[Engine], T]) -> Future[T]:
        """Schedules a function to run before the next step.

        Raises:
            EngineDeadError: The engine has stopped, or is stopping.
            ForkedProcessError: This is a child of the process that made the engine.
        """
        future: Future[T] = Future()
        self._check_process()
        with self._lock:
            if self.dead is not None:
                raise EngineDeadError(self.dead)
            if self._stop_at is not None:
                raise EngineDeadError("it is being shut down")
            self._calls.append((function, future))
            self._changed.notify()
        return future

    def abort(self, request_id: str, sink: UpdateSink) -> None:
        """Ends a request whose reader is gone. Never blocks."""

        def leave(engine: Engine) -> None:
            state = engine.request_state(request_id)
            if state is not None and state.sink is sink:  # Another request may use the id now.
                engine.abort(request_id)

        if os.getpid() != self._pid:
            return  # A forked child drops an inherited stream.
        with self._lock:
            if self.dead is None:
                self._calls.append((leave, Future()))
                self._changed.notify()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedProcessError(self._pid)

    def stop(self, drain_timeout: float) -> None:
        """Accepts no more calls; ends when all requests have, or aborts them after the timeout."""
        self._check_process()
        with self._lock:
            stop_at = time.monotonic() + drain_timeout
            self._stop_at = stop_at if self._stop_at is None else min(stop_at, self._stop_at)
            self._changed.notify()

    def join(self, timeout: float | None = None) -> None:
        """Waits for the thread to end."""
        self._thread.join(timeout)
        if not self._thread.is_alive():
            _await_system_thread(self._thread.native_id)

    def new_channel(self, loop: asyncio.AbstractEventLoop, num_sequences: int) -> Channel:
        """Returns a channel from this thread to a reader on `loop`."""
        return Channel(loop, num_sequences, self._sleepers)

    def _notify(self) -> None:
        """Wakes the thread to check whether the engine has work."""
        with self._lock:
            self._changed.notify()

    # On the engine's thread.

    def _run(self) -> None:
        reason = "it was shut down"
        failure: BaseException | None = None
        try:
            self.engine = self._make_engine()
            self.engine.when_stuck(self._fail_all)  # This thread runs no Python then.
            self.engine.when_woken(self._notify)
            # The model, its tokenizer and all modules live until the end, so the collector must not
            # walk them again and again, which cost some steps of 256 sequences 40 ms.
            gc.collect()
            gc.freeze()
            self.ready.set_result(None)
            self._serve()
            for state in self.engine.request_states():
                self.engine.abort(state.output.request_id)
            self._wake_readers()
            self.engine.synchronize()
        except BaseException as error:
            reason, failure = reason_of(error), error
            if isinstance(error, EngineDeadError):
                reason = error.reason
            expected = isinstance(error, MlxPagedError)
            if expected and not self.ready.done():  # An unusable model's error says it all.
                logger.critical("%s", error)
            else:
                traceback = None if expected else error
                logger.critical("the engine has stopped: %s", reason, exc_info=traceback)
        finally:
            gc_pause.resume_gc()
            try:
                self._fail_all(reason)
                if hasattr(self, "engine"):
                    self.engine.hang_up()
            finally:
                gc.unfreeze()  # Otherwise a dropped engine in a reference cycle keeps its memory.
                # Last: callers waiting for `ready` must find the engine dead.
                if failure is not None and not self.ready.done():
                    self.ready.set_exception(failure)

    def _serve(self) -> None:
        """Steps until the engine is stopped, or `_MAX_FAILURES` consecutive steps raise."""
        while True:
            try:
                while self._take_calls():
                    if self.engine.has_unfinished:
                        with gc_pause.gc_paused():
                            self.engine.step()
                        self._num_failures = 0
                    else:
                        self.engine.on_idle()
                    self._wake_readers()
                return
            except BaseException as error:
                gc_pause.resume_gc()  # The exception may have skipped the step's own call.
                self._num_failures += 1
                is_end = isinstance(error, EngineDeadError)  # Another rank has ended.
                if is_end or self._num_failures >= _MAX_FAILURES:
                    raise
                logger.exception("the engine continues after %s", reason_of(error))

    def _take_calls(self) -> bool:
        """Runs pending calls. Waits while there is nothing to do, up to `Engine.idle_interval`.

        An interrupted call runs once more, so every call must tolerate that.

        Returns:
            False to stop.
        """
        with self._lock:
            while not (
                self._calls
                or self._sleepers
                or self.engine.has_unfinished
                or self._stop_at is not None
            ):
                if not self._changed.wait(self.engine.idle_interval):
                    break  # for `Engine.on_idle`
        until = time.monotonic() + _MAX_CALL_SECONDS
        for _ in range(len(self._calls)):
            function, future = self._calls[0]
            is_second_time, self._begun = future is self._begun, future
            if is_second_time or future.set_running_or_notify_cancel():
                try:
                    result = function(self.engine)
                except BaseException as error:
                    if not is_second_time and not isinstance(error, Exception):
                        raise
                    if not future.done():
                        future.set_exception(error)
                else:
                    if not future.done():
                        future.set_result(result)
            self._calls.popleft()
            self._begun = None
            if time.monotonic() >= until and self.engine.has_unfinished:
                break
        if self._stop_at is None:
            return True
        return self.engine.has_unfinished and time.monotonic() < self._stop_at

    def _wake_readers(self) -> None:
        """Wakes readers with one call into each event loop, however many of them wait."""
        self._on_updates()
        if not self._sleepers:
            return
        if closed := wake_readers(self._sleepers):
            for state in self.engine.request_states():
                # Nothing will ever read these.
                if isinstance(state.sink, Channel) and state.sink.loop in closed:
                    self.engine.abort(state.output.request_id)

    def _fail_all(self, reason: str) -> None:
        with self._lock:
            self.dead = reason
            calls = list(self._calls)
            self._calls.clear()
        for _, future in calls:
            if future.set_running_or_notify_cancel():
                future.set_exception(EngineDeadError(reason))
        for state in self.engine.request_states() if hasattr(self, "engine") else ():
            if isinstance(state.sink, Channel):
                state.sink.fail(EngineDeadError(reason))
        self._wake_readers()


def _await_system_thread(native_id: int | None) -> None:
    """Waits until the operating system's thread has ended, slightly later than Python's.

    Until then, it destroys MLX's thread-local objects, for which it takes the GIL. During
    interpreter shutdown, that would abort the process.
    """
    if not sys.platform.startswith("linux"):
        time.sleep(0.02)
        return
    task = Path(f"/proc/self/task/{native_id}")
    deadline = time.monotonic() + 1.0
    while task.exists() and time.monotonic() < deadline:
        time.sleep(0.0005)
