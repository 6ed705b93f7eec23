"""Life: all ranks of an engine end when one of them ends, whatever it was doing.

A rank may be inside a collective, where it waits for the others and runs no Python. So threads of
their own wait for the end of a socket between rank 0 and each other rank: the system closes it when
a process ends, however that happens. It carries nothing but the last words of a rank that failed.

    a rank fails     its last words, then its end ──> rank 0 ends all others and itself
    rank 0 ends      every other rank ends itself
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
from typing import Any, TypeVar

from mlx_paged.engine.faults import reason_of
from mlx_paged.engine.ranks.channel import Channel
from mlx_paged.engine.ranks.messages import JOIN, Message
from mlx_paged.errors import EngineDeadError

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_WORDS = 4096  # bytes
# Seconds that rank 0 has to notice the end of another rank. MLX's ring fails the collective that
# runs, and the ones behind it in the same step never end. Then requests get their errors, and some
# seconds later the process ends.
_TO_NOTICE = 2.0
_TO_ANSWER = 3.0
# Seconds that the other processes have to end by themselves.
_TO_END = 5.0
# Seconds between two looks at whether the parent lives. The socket tells at once, except where a
# forked child of rank 0 holds the other end.
_PARENT_INTERVAL = 1.0
# Seconds that ranks have to connect when all of them are ready.
_TO_CONNECT = 60.0
# Seconds for the system to report the end of a process whose socket it has closed.
_TO_REPORT = 2.0


@dataclass
class Follower:
    """Another rank, seen from rank 0.

    Attributes:
        channel: For messages to it.
        life: A socket that ends with it.
        process: Its process, if rank 0 has started it.
    """

    rank: int
    channel: Channel
    life: socket.socket
    process: subprocess.Popen[bytes] | None = None


class Group:
    """Rank 0 and the others: ends all of them when one ends.

    Attributes:
        size: Number of ranks.
        failure: Why the ranks run no more steps; None while they do.
        on_stuck: Called with the reason before the process ends, because a step of rank 0 waits for
            a rank that has ended.
    """

    def __init__(self, followers: Sequence[Follower]) -> None:
        self.size = 1 + len(followers)
        self.failure: str | None = None
        self.on_stuck: Callable[[str], object] = lambda reason: None
        self._followers = followers
        self._lock = threading.Lock()
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
        """Waits until all other ranks are ready, and has them join.

        Raises:
            EngineDeadError: One of the ranks has ended.
        """
        try:
            for follower in self._followers:
                follower.channel.receive()
        except EOFError as error:
            raise self.failed(error) from error
        self.send(Message(JOIN).encode())

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
        """Returns the result of a function that waits for other ranks, without the interpreter's
        lock, and on a thread of its own.

        Raises:
            EngineDeadError: One of the ranks has ended, or the function failed or takes too long.
                Its thread may go on waiting, which nothing can end.
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
            return result.result(_TO_CONNECT)
        except TimeoutError as error:
            seconds = f"the ranks did not connect within {_TO_CONNECT:g} seconds"
            raise self.failed(TimeoutError(seconds)) from error
        except Exception as error:
            raise self.failed(error) from error

    @contextlib.contextmanager
    def operation(self) -> Iterator[None]:
        """Rank 0 may wait for other ranks meanwhile. If one ends, and rank 0 does not notice, the
        process ends."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """An operation before the first request: if it is stuck, no request waits for an error,
        and the process ends at once."""
        self._is_loading = True
        try:
            with self.operation():
                yield
        finally:
            self._is_loading = False

    def failed(self, error: BaseException) -> EngineDeadError:
        """Ends all ranks after an error on rank 0; returns the error to raise.

        The end of another rank may have caused it; then that is the reason.
        """
        if isinstance(error, EngineDeadError):
            return error
        if not self._failed.wait(_TO_REPORT):
            self._fail(f"rank 0 of {self.size} failed: {reason_of(error)}")
        return EngineDeadError(str(self.failure))

    def close(self) -> None:
        """Ends the other ranks and waits for their processes. They must have nothing to do."""
        if os.getpid() != self._pid:
            return  # A forked child does not own them.
        with self._lock:
            self._is_closed = True
            self.failure = self.failure or "the other ranks were ended"
        self._end_others()
        deadline = time.monotonic() + _TO_END
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

    # On a thread for each other rank.

    def _watch(self, follower: Follower) -> None:
        words = _until_end(follower.life)
        follower.life.close()
        if self._is_closed or self._failed.is_set():
            return
        how = words or _how_it_ended(follower.process)
        self._fail(f"rank {follower.rank} of {self.size} {how}")

    def _fail(self, reason: str) -> None:
        with self._lock:
            if self._is_closed or self._failed.is_set():
                return
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

    def _end_if_stuck(self) -> None:
        if not self._is_stuck(_TO_NOTICE):
            return
        reason = str(self.failure)
        if not self._is_loading:
            try:
                self.on_stuck(reason)
            except Exception:
                logger.exception("the end of a rank could not be told")
            if not self._is_stuck(_TO_ANSWER):
                return
        print(f"mlx-paged: {reason}; rank 0 ends, too", file=sys.stderr, flush=True)
        os._exit(1)

    def _is_stuck(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self._depth and time.monotonic() < deadline:
            time.sleep(0.05)
        return self._depth > 0


def _settle(future: Future[T], outcome: T | Exception) -> None:
    """Gives a future its result or its error, unless it has one."""
    with contextlib.suppress(InvalidStateError):
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


def close_with(owner: object, group: Group) -> None:
    """Closes a group when its owner is dropped, or at the interpreter's exit."""
    weakref.finalize(owner, group.close)


def follow_life(life: socket.socket, parent: int | None) -> None:
    """On another rank: ends this process when rank 0 ends, from now on.

    Args:
        parent: The process of rank 0, if it has started this one.
    """
    threading.Thread(
        target=_end_with_rank_0, args=(life, parent), name="mlx-paged-life", daemon=True
    ).start()


def last_words(life: socket.socket, error: BaseException) -> None:
    """Tells rank 0 why this rank ends."""
    words = f"failed: {reason_of(error)}".encode()[:_MAX_WORDS]
    with contextlib.suppress(OSError):
        life.sendall(words)


def _end_with_rank_0(life: socket.socket, parent: int | None) -> None:
    poll = select.poll()
    poll.register(life, select.POLLIN)
    while not poll.poll(1000 * _PARENT_INTERVAL):
        if parent is not None and os.getppid() != parent:
            break
    os._exit(1)


def _until_end(life: socket.socket) -> str:
    words = b""
    with contextlib.suppress(OSError):
        while got := life.recv(_MAX_WORDS):
            words = (words + got)[:_MAX_WORDS]
    return " ".join(words.decode(errors="replace").split())


def _how_it_ended(process: subprocess.Popen[bytes] | None) -> str:
    """Says how a process ended that left no words."""
    if process is None:
        return "ended"
    try:
        status = process.wait(_TO_REPORT)
    except subprocess.TimeoutExpired:
        return "closed its connection"
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"
