"""Calls the methods of an object that lives in another process."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from mlx_paged.errors import MlxPagedError

_SECONDS_TO_END = 10.0


class Remote:
    """An object in a new process.

    Args:
        name: Name of the process, for errors.
        make: Makes the object there from `arguments`; both must be picklable.

    Raises:
        MlxPagedError: The other process raised an error, or ended.
    """

    def __init__(self, name: str, make: Callable[..., Any], *arguments: Any) -> None:
        self._name = name
        # Forking a process with running compute threads would hang.
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, make, arguments), daemon=True)
        self._process.start()
        theirs.close()
        self._receive()

    def ask(self, method: str, *args: Any, **options: Any) -> Any:
        """Calls a method of the object."""
        with contextlib.suppress(BrokenPipeError):  # The process ended; `_receive` raises how.
            self._ours.send((method, args, options))
        return self._receive()

    def close(self) -> None:
        """Ends the process."""
        self._ours.close()  # the process ends when the pipe is closed
        self._process.join(_SECONDS_TO_END)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _receive(self) -> Any:
        try:
            error, value = self._ours.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            status = self._process.exitcode
            raise MlxPagedError(
                f"the process of engine {self._name} ended with status {status}"
            ) from None
        if error is not None:
            raise MlxPagedError(f"engine {self._name}: {error}")
        return value


def _work(pipe: Connection, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Runs in the other process: calls methods of the object until the pipe is closed."""
    import mlx_paged

    mlx_paged.unpatch()  # Other engines must run unmodified.
    made = None
    try:
        while True:
            try:
                if made is None:
                    made, value = make(*arguments), None
                else:
                    method, args, options = pipe.recv()
                    value = getattr(made, method)(*args, **options)
            except (EOFError, KeyboardInterrupt):
                return
            except MlxPagedError as error:
                pipe.send((str(error), None))
            except Exception as error:
                pipe.send((f"{type(error).__name__}: {error}", None))
            else:
                pipe.send((None, value))
                continue
            if made is None:
                return
    except (BrokenPipeError, KeyboardInterrupt):
        pass
