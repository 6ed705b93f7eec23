"""Entry point of a model's process behind the router (`server.router.begin` calls it)."""

from __future__ import annotations

import contextlib
import gc
import importlib
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

# Modules that loading and serving a model imports; a test keeps the list complete.
_AHEAD = (
    "mlx_paged.cli.progress",
    "mlx_paged.engine.async_engine",
    "mlx_paged.engine.process.client",
    "mlx_paged.server.engine_service",
    "mlx_paged.server.logs",
    "mlx_paged.server.run",
    "rich.progress",
    "uvicorn.lifespan.on",
    "uvloop",
)


def import_ahead() -> None:
    """Imports what every model needs, before the model is known."""
    transformers_import.arrange()
    unpatch()
    for name in _AHEAD:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # Modules stay; collections while a model loads need not visit them.


def main(given: bytes, uds: Path, reports: int) -> None:
    """Serves a model until a signal arrives or the router exits.

    Args:
        given: The router's `ModelSpec.launch`.
        uds: Path of the Unix domain socket to listen on.
        reports: File descriptor of the pipe for reports.
    """
    transformers_import.arrange()
    unpatch()
    threading.Thread(target=_end_with_router, args=(uds,), daemon=True).start()
    model, options, server = pickle.loads(given)

    from mlx_paged.server import logs
    from mlx_paged.server.router.link import RouterLink
    from mlx_paged.server.router.process import REPLICA

    link = RouterLink(os.fdopen(reports, "w"))
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
