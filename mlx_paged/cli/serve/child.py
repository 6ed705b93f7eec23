"""Entry point of a model's process behind the router (`server.router.process` starts it)."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path

from mlx_paged import unpatch
from mlx_paged.cli import transformers_import
from mlx_paged.cli.serve.one_model import OneModel
from mlx_paged.errors import MlxPagedError


def main() -> None:
    """Serves the model that the router describes until a signal arrives or the router exits."""
    transformers_import.arrange()
    unpatch()
    reports = int(sys.argv[2])
    os.set_inheritable(reports, False)
    pipe = os.fdopen(reports, "w")
    given = sys.stdin.buffer.read(int.from_bytes(sys.stdin.buffer.read(8), "little"))
    uds = Path(sys.argv[1])
    threading.Thread(target=_end_with_router, args=(uds,), daemon=True).start()
    model, options, server = pickle.loads(given)

    from mlx_paged.server import logs
    from mlx_paged.server.router.link import RouterLink
    from mlx_paged.server.router.process import REPLICA

    link = RouterLink(pipe)
    logs.configure(server.log_level, server.log_format, server.log_config)
    try:
        server = replace(server, uds=uds)
        one = OneModel.of(model, options, server)
        logs.add_field("model", one.config.model_name)
        if REPLICA in os.environ:
            logs.add_field("replica", os.environ[REPLICA])
        sys.exit(one.run(server, link))
    except MlxPagedError as error:
        link.failed(error)
        sys.exit(1)


def _end_with_router(uds: Path) -> None:
    """Ends this process when stdin, which the router holds open, is closed."""
    # os.read, because a thread blocked in sys.stdin aborts the interpreter at exit.
    while os.read(0, 1):
        pass
    # A router that was killed left its folder. The last process to get here removes it.
    uds.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        uds.parent.rmdir()
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)
