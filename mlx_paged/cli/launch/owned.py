"""Runs a verb in a process that ends when its owner does.

Run as ``python -m mlx_paged.cli.launch.owned DESCRIPTOR VERB ...``, with the reading end of a pipe
whose other end only the owner has. When the owner ends, however that happens, the pipe is at its
end, and this process gets SIGTERM.
"""

from __future__ import annotations

import os
import signal
import sys
import threading


def end_with_owner(descriptor: int) -> None:
    """Watches the pipe on a separate thread."""

    def watch() -> None:
        while os.read(descriptor, 1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="owner", daemon=True).start()


if __name__ == "__main__":
    end_with_owner(int(sys.argv.pop(1)))
    from mlx_paged.cli.main import main

    main()
