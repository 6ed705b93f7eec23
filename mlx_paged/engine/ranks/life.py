"""Ends all ranks of an engine when one of them ends, whatever the others are doing.

A rank inside a collective waits for the others and runs no Python. So a separate thread watches a
"life" socket between rank 0 and each other rank, which the system closes however a process ends. It
carries only the last words of a rank that failed.

    a rank fails     sends its last words, exits ──> rank 0 ends all others and itself
    rank 0 exits     every other rank exits
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from mlx_paged import runtime
from mlx_paged.engine.faults import reason_of
from mlx_paged.engine.ranks.channel import Channel
from mlx_paged.engine.ranks.messages import JOIN, Message
from mlx_paged.errors import EngineDeadError

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_WORDS = 4096  # bytes
# Seconds for rank 0 to notice that another rank ended. MLX's ring fails the running collective, but
# later ones in the same step never return. Then requests get errors, and `_ANSWER_TIMEOUT` seconds
# later the process exits.
_NOTICE_TIMEOUT = 2.0
_ANSWER_TIMEOUT = 3.0
# Seconds for the other processes to exit before they are killed.
_EXIT_TIMEOUT = 5.0
# Seconds after which rank 0 counts as hung once another rank ended, and between its signs of life.
_HUNG_TIMEOUT = 6.0
_SIGN_INTERVAL = 0.5
# Seconds between checks that the parent is alive. The socket tells at once, unless a forked child
# of rank 0 holds the other end.
_PARENT_INTERVAL = 1.0
# Seconds for ranks to connect once all of them are ready.
_CONNECT_TIMEOUT = 60.0
# Seconds for rank 0, after an error, to notice that another rank ended and may have caused it.
_CAUSE_TIMEOUT = 2.0
# Seconds for the system to report the exit of a process whose socket it has closed. Only a driver
# that hangs takes long.
_REPORT_TIMEOUT = 30.0


@dataclass
class Follower:
    """Another rank, seen from rank 0.

    Attributes:
        channel: Carries messages to it.
        life: A socket that closes when it ends.
        process: Its process, if rank 0 started it.
    """

    rank: int
    channel: Channel
    life: socket.socket
    process: subprocess.Popen[bytes] | None = None


class Followers:
    """All other ranks, seen from rank 0. When one ends, this ends every rank.

    Attributes:
        size: Number of ranks, including rank 0.
        failure: Why no more steps can run; None while they can.
        on_stuck: Called with the reason before this process exits because a step of rank 0 is
            waiting for a rank that has ended.
    """

    def __init__(self, followers: Sequence[Follower]) -> None:
        self.size = 1 + len(followers)
        self.failure: str | None = None
        self.on_stuck: Callable[[str], object] = lambda reason: None
        self._followers = followers
        self._lock = threading.Lock()
        self._has_ended = (
            threading.Event()
        )  # set once another rank ends, before its reason is known
        self._failed = threading.Event()
        self._waiting: Future[Any] | None = None  # the result of `wait`
        self._depth = 0  # of operations that rank 0 is in
        self._is_loading = False
        self._is_closed = False
        self._pid = os.getpid()
        for follower in followers:
            threading.Thread(
                target=self._watch, args=(follower,), name="mlx-paged-rank", daemon=True
            ).start()

    def gather(self) -> None:
        """Waits until all other ranks are ready, then tells them to join.

        Raises:
            EngineDeadError: One of the ranks has ended.
        """
        self.await_ready()
        self.send(Message(JOIN).encode())

    def await_ready(self) -> None:
        """Waits until all other ranks are ready for the next collective, which would take a whole
        core while it waits.

        Raises:
            EngineDeadError: One of the ranks has ended.
        """
        try:
            for follower in self._followers:
                follower.channel.receive()
        except EOFError as error:
            raise self.failed(error) from error

    def send(self, data: bytes) -> None:
        """Sends a message to all other ranks.

        Raises:
            EngineDeadError: One of the ranks has ended.
        """
        self.check()
        try:
            for follower in self._followers:
                follower.channel.send(data)
        except OSError as error:
            raise self.failed(error) from error

    def check(self) -> None:
        """Raises `EngineDeadError` if a rank has ended."""
        if self.failure is not None:
            raise EngineDeadError(self.failure)

    def wait(self, function: Callable[[], T]) -> T:
        """Runs a function that waits for other ranks on a thread; returns its result.

        Args:
            function: Must release the interpreter's lock while it waits.

        Raises:
            EngineDeadError: A rank ended, or the function failed or took too long. Its thread may
                wait forever: nothing can interrupt it.
        """
        result: Future[T] = Future()

        def run() -> None:
            try:
                _settle(result, function())
            except Exception as error:
                _settle(result, error)

        with self._lock:
            self._waiting = result
        self.check()
        threading.Thread(target=run, name="mlx-paged-join", daemon=True).start()
        try:
            return result.result(_CONNECT_TIMEOUT)
        except TimeoutError as error:
            seconds = f"the ranks did not connect within {_CONNECT_TIMEOUT:g} seconds"
            raise self.failed(TimeoutError(seconds)) from error
        except Exception as error:
            raise self.failed(error) from error

    @contextlib.contextmanager
    def operation(self) -> Iterator[None]:
        """Marks code that may wait for other ranks. If one ends and rank 0 stays stuck here, the
        process exits."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Like `operation`, before the first request: no request waits for an error, so a stuck
        process exits at once."""
        self._is_loading = True
        try:
            with self.operation():
                yield
        finally:
            self._is_loading = False

    def failed(self, error: BaseException) -> EngineDeadError:
        """Ends all ranks after an error on rank 0; returns the error to raise.

        If another rank ended first, that becomes the reason.
        """
        if isinstance(error, EngineDeadError):
            return error
        if self._has_ended.wait(_CAUSE_TIMEOUT):
            self._failed.wait(_REPORT_TIMEOUT)
        self._fail(f"rank 0 of {self.size} failed: {reason_of(error)}")
        return EngineDeadError(str(self.failure))

    def close(self) -> None:
        """Ends the other ranks and waits for their processes. They must be idle."""
        if os.getpid() != self._pid:
            return  # A forked child does not own them.
        with self._lock:
            self._is_closed = True
            self.failure = self.failure or "the other ranks were ended"
        self._end_others()
        deadline = time.monotonic() + _EXIT_TIMEOUT
        for follower in self._followers:
            if follower.process is not None:
                try:
                    follower.process.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    follower.process.kill()
                    follower.process.wait()

    def _end_others(self) -> None:
        for follower in self._followers:
            follower.channel.close()
            with contextlib.suppress(OSError):
                follower.life.shutdown(socket.SHUT_RDWR)

    # On one thread per follower.

    def _watch(self, follower: Follower) -> None:
        words = _read_last_words(follower.life)
        follower.life.close()
        if self._is_closed or self._failed.is_set():
            return
        self._has_ended.set()
        how = words or _how_it_ended(follower.process)
        self._fail(f"rank {follower.rank} of {self.size} {how}")

    def _fail(self, reason: str) -> None:
        with self._lock:
            if self._is_closed or self._failed.is_set():
                return
            words = f"mlx-paged: {reason}; rank 0 hung and exits too"
            runtime.exit_unless_extended(_HUNG_TIMEOUT, words)  # Soon, no thread may get the GIL.
            self.failure = reason
            self._failed.set()
            waiting = self._waiting
        if waiting is not None:
            _settle(waiting, EngineDeadError(reason))
        logger.critical("%s; all ranks end", reason)
        self._end_others()
        for follower in self._followers:
            if follower.process is not None:
                follower.process.kill()
        threading.Thread(target=self._end_if_stuck, daemon=True).start()
        threading.Thread(target=_exit_if_hung, args=(words,), daemon=True).start()

    def _end_if_stuck(self) -> None:
        if not self._is_stuck(_NOTICE_TIMEOUT):
            return
        reason = str(self.failure)
        if not self._is_loading:
            try:
                self.on_stuck(reason)
            except Exception:
                logger.exception("requests could not be told that a rank ended")
            if not self._is_stuck(_ANSWER_TIMEOUT):
                return
        print(f"mlx-paged: {reason}; rank 0 exits too", file=sys.stderr, flush=True)
        os._exit(1)

    def _is_stuck(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self._depth and time.monotonic() < deadline:
            time.sleep(0.05)
        return self._depth > 0


def _settle(future: Future[T], outcome: T | Exception) -> None:
    """Sets a future's result or error, unless it has one."""
    with contextlib.suppress(InvalidStateError):
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


def close_with(owner: object, followers: Followers) -> None:
    """Closes followers when their owner is garbage-collected, or at the interpreter's exit."""
    weakref.finalize(owner, followers.close)


def follow_life(life: socket.socket, parent: int | None) -> None:
    """On any other rank: exits this process when rank 0 ends, from now on.

    Args:
        parent: Process id of rank 0, if it started this process.
    """
    threading.Thread(
        target=_end_with_rank_0, args=(life, parent), name="mlx-paged-life", daemon=True
    ).start()


def last_words(life: socket.socket, error: BaseException) -> None:
    """Tells rank 0 why this rank ends."""
    words = f"failed: {reason_of(error)}".encode()[:_MAX_WORDS]
    with contextlib.suppress(OSError):
        life.sendall(words)


def _exit_if_hung(message: str) -> NoReturn:
    """Ends this process once its threads cannot run Python, or its interpreter exits, for long.

    Work that rank 0 launched on a GPU may wait for the lost rank forever, and a thread that waits
    for that GPU hangs with it.
    """
    while True:
        runtime.exit_unless_extended(_HUNG_TIMEOUT, message)
        time.sleep(_SIGN_INTERVAL)


def _end_with_rank_0(life: socket.socket, parent: int | None) -> None:
    poll = select.poll()
    poll.register(life, select.POLLIN)
    while not poll.poll(1000 * _PARENT_INTERVAL):
        if parent is not None and os.getppid() != parent:
            break
    os._exit(1)


def _read_last_words(life: socket.socket) -> str:
    words = b""
    with contextlib.suppress(OSError):
        while got := life.recv(_MAX_WORDS):
            words = (words + got)[:_MAX_WORDS]
    return " ".join(words.decode(errors="replace").split())


def _how_it_ended(process: subprocess.Popen[bytes] | None) -> str:
    """Describes how a process ended that sent no last words."""
    if process is None:
        return "ended"
    # On a thread, because `Popen.wait` polls if it has a timeout.
    reaping = threading.Thread(target=process.wait, name="mlx-paged-reap", daemon=True)
    reaping.start()
    reaping.join(_REPORT_TIMEOUT)
    status = process.returncode
    if status is None:
        return "closed its connection"
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"
