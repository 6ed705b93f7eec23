"""Engines that take turns: one in this process, several each in a process of its own.

Apart, none finds its memory, caches or compiled kernels changed by another, and all are there from
the first turn to the last, so that whatever else the machine does meets all of them alike.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import mlx_paged
from mlx_paged.cli.bench.datasets import Prompt
from mlx_paged.cli.bench.footprint import Footprint
from mlx_paged.cli.bench.runners import Runner, Settings, open_runner
from mlx_paged.cli.bench.runs import Run
from mlx_paged.cli.bench.vllm_options import EngineName
from mlx_paged.errors import MlxPagedError

_SECONDS_TO_END = 10.0


@contextlib.contextmanager
def opened(names: Sequence[EngineName], settings: Settings) -> Iterator[dict[str, Runner]]:
    """Runners by the names of their engines, for the time of a ``with`` block."""
    runners: dict[str, Runner] = {}
    try:
        for name in names:
            make = open_runner if len(names) == 1 else RemoteRunner
            runners[name.value] = make(name, settings)
        yield runners
    finally:
        for runner in runners.values():
            runner.close()


def take_turns(
    runners: Mapping[str, Runner],
    prompts: Sequence[Prompt],
    num_iters: int,
    *,
    cold: bool = False,
    on_done: Callable[[], None] = lambda: None,
) -> dict[str, list[Run]]:
    """Each engine does all prompts, `num_iters` times; every other round in reverse order."""
    runs: dict[str, list[Run]] = {name: [] for name in runners}
    for number in range(num_iters):
        order = list(runners.items())
        for name, runner in order if number % 2 == 0 else reversed(order):
            runs[name].append(runner.run(prompts, cold=cold))
            on_done()
    return runs


class RemoteRunner:
    """A runner in another process.

    Raises:
        MlxPagedError: what the other process raised, or that it died.
    """

    def __init__(self, name: EngineName, settings: Settings) -> None:
        self._name = name
        # (A fork of a process whose threads compute would hang.)
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, name, settings), daemon=True)
        self._process.start()
        theirs.close()
        self._receive()

    def run(self, prompts: Sequence[Prompt], *, cold: bool = False) -> Run:
        """See `Runner`."""
        return self._ask("run", list(prompts), cold=cold)

    def reset_peak(self) -> None:
        """See `Runner`."""
        self._ask("reset_peak")

    def footprint(self) -> Footprint:
        """See `Runner`."""
        return self._ask("footprint")

    def close(self) -> None:
        """See `Runner`."""
        self._ours.close()  # the process ends when nobody asks any more
        self._process.join(_SECONDS_TO_END)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _ask(self, method: str, *args: Any, **options: Any) -> Any:
        with contextlib.suppress(BrokenPipeError):  # it died; receiving tells how
            self._ours.send((method, args, options))
        return self._receive()

    def _receive(self) -> Any:
        try:
            error, value = self._ours.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            status = self._process.exitcode
            raise MlxPagedError(
                f"the process of engine {self._name.value} ended with status {status}"
            ) from None
        if error is not None:
            raise MlxPagedError(f"engine {self._name.value}: {error}")
        return value


def _work(pipe: Connection, name: EngineName, settings: Settings) -> None:
    """The other process: does what it is asked until nobody asks."""
    mlx_paged.unpatch()  # mlx-lm as it is
    try:
        runner = open_runner(name, settings)
        pipe.send((None, None))
        while True:
            method, args, options = pipe.recv()
            pipe.send((None, getattr(runner, method)(*args, **options)))
    except (EOFError, KeyboardInterrupt):
        pass
    except MlxPagedError as error:
        pipe.send((str(error), None))
    except Exception as error:
        pipe.send((f"{type(error).__name__}: {error}", None))
