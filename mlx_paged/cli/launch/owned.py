"""Runs a verb in a process that ends when its owner does.

Run as ``python -m mlx_paged.cli.launch.owned DESCRIPTOR VERB ...``. DESCRIPTOR is the read end of a
pipe whose write end only the owner has. When the owner ends, for any reason, the pipe is closed
and this process sends itself SIGTERM.
"""

from __future__ import annotations

import os
import signal
import sys
import threading


def end_with_owner(descriptor: int) -> None:
    """Sends this process SIGTERM once the pipe is closed. Watches it on a thread."""

    def watch() -> None:
        while os.read(descriptor, 1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="owner", daemon=True).start()


if __name__ == "__main__":
    end_with_owner(int(sys.argv.pop(1)))
    from mlx_paged.cli.main import main

    main()
