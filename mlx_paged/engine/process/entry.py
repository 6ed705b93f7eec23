"""Entry point of an engine process, which `ProcessEngine` starts with an inherited socket.

It imports the engine only after `prepare` has run, because that may affect imports.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import sys

from mlx_paged.engine.process.pipe import Pipe

# As in `server.run`: the engine's thread must not wait long while another thread checks a request.
_SWITCH_INTERVAL = 0.0005


def main() -> None:
    """Runs an engine until the server shuts it down or exits."""
    # The server gets these signals too, and drains its requests.
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
