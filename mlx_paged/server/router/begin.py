"""Entry point of a model's process: imports modules, waits for a model, and serves it.

Without a model, the process is a spare (`spare`). It then imports in short bursts, because other
processes stream tokens on the same cores: at full speed, its imports would double their largest
gap. The router runs this file by its path, since importing the package itself takes 0.1 s.
"""

from __future__ import annotations

import importlib
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

_ROUTER = 0  # stdin: the router holds its other end open
# Seconds of a burst and of the pause after it. A burst ends between two bytecodes.
_BURST, _PAUSE = 0.002, 0.008


def main() -> None:
    """Runs in a new process. Arguments: the entry's name, the socket, the pipe for reports.

    The entry has `import_ahead()` and `main(model, socket, reports)`. The model arrives as bytes,
    after 8 bytes that give their number.
    """
    name, socket, reports = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    os.set_inheritable(reports, False)
    with _bursts_without_model(lambda: _leave(socket)):
        entry = importlib.import_module(name)
        if not select.select([_ROUTER], [], [], 0)[0]:
            entry.import_ahead()
            os.write(reports, b'{"imported": true}\n')
    size = int.from_bytes(_read(8, socket), "little")
    entry.main(_read(size, socket), socket, reports)


@contextmanager
def _bursts_without_model(on_end: Callable[[], object]) -> Iterator[None]:
    """Lets the main thread run in bursts until the router sends a model.

    Args:
        on_end: Called if the router ends instead.
    """
    router = select.poll()
    router.register(_ROUTER, select.POLLIN)
    is_on = True

    def pause(_: int, __: FrameType | None) -> None:
        if not is_on:
            return
        found = router.poll(_PAUSE * 1000)
        if not found:
            signal.setitimer(signal.ITIMER_REAL, _BURST)
        elif not found[0][1] & select.POLLIN:
            on_end()

    # The handler stays: a last signal may come after the timer is off.
    signal.signal(signal.SIGALRM, pause)
    signal.siginterrupt(signal.SIGALRM, False)
    signal.setitimer(signal.ITIMER_REAL, _BURST)
    try:
        yield
    finally:
        is_on = False
        signal.setitimer(signal.ITIMER_REAL, 0)


def _read(size: int, socket: Path) -> bytes:
    """Reads bytes from the router, and no more; ends this process if the router ends."""
    found = b""
    while len(found) < size:
        more = os.read(_ROUTER, size - len(found))
        if not more:
            _leave(socket)
        found += more
    return found


def _leave(socket: Path) -> NoReturn:
    """Ends this process because its router has ended. The last one removes their folder."""
    with suppress(OSError):  # Another process still has its socket there.
        socket.parent.rmdir()
    os._exit(0)


if __name__ == "__main__":
    main()
