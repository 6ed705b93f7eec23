"""Entry point of an engine's process (`ProcessEngine` starts it, with an inherited socket).

It imports nothing of the engine before the process is prepared, because that may be about imports.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import sys

from mlx_paged.engine.process.pipe import Pipe

# As in `server.run`: the engine's thread should not wait long while a request is checked.
_SWITCH_INTERVAL = 0.0005


def main() -> None:
    """Runs an engine until the server's process ends it, or ends itself."""
    # The server gets these signals, too, and ends its requests in order.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    sys.setswitchinterval(_SWITCH_INTERVAL)
    pipe = Pipe(socket.socket(fileno=int(sys.argv[1])))
    try:
        prepare = pipe.receive()
        if prepare is not None:
            prepare()
        from mlx_paged.engine.process.child import EngineProcess

        start = pipe.receive()
    except EOFError:
        sys.exit(1)
    asyncio.run(EngineProcess(pipe, start).run())
