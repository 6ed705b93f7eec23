"""The process of one model in a server of several: `server.router.process` starts it."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import sys
import threading
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING

from mlx_paged import unpatch
from mlx_paged.cli import transformers_scan
from mlx_paged.cli.serve.one_model import OneModel
from mlx_paged.errors import MlxPagedError

if TYPE_CHECKING:
    from mlx_paged.server.served_model import ServedModel


def main() -> None:
    """Serves the model that the router describes, until a signal comes or the router ends."""
    transformers_scan.arrange()
    unpatch()
    # Whatever prints must not reach the router, which reads one line.
    teller = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    given = sys.stdin.buffer.read(int.from_bytes(sys.stdin.buffer.read(8), "little"))
    uds = Path(sys.argv[1])
    threading.Thread(target=_end_with_router, args=(uds,), daemon=True).start()
    model, options, server = pickle.loads(given)

    from mlx_paged.server import logs

    async def on_started(model: ServedModel) -> None:
        _tell(teller, await _description(model) if model.failure is None else model.failure)

    logs.configure(server.log_level, server.log_format, server.log_config)
    try:
        server = replace(server, uds=uds)
        one = OneModel.of(model, options, server)
        logs.add_field("model", one.config.model_name)
        sys.exit(one.run(server, on_started))
    except MlxPagedError as error:
        _tell(teller, error)
        sys.exit(1)


def _tell(teller: IO[str], told: dict[str, object] | Exception) -> None:
    if isinstance(told, Exception):
        told = {"failure": str(told) or type(told).__name__}
    print(json.dumps(told), file=teller, flush=True)


async def _description(model: ServedModel) -> dict[str, object]:
    """Returns the fields of `LoadedModel`."""
    from mlx_paged.engine.memory import process_memory
    from mlx_paged.server.router.process import LoadedModel

    stats = await model.engine.stats()
    return asdict(
        LoadedModel(
            process_memory(stats.memory),
            model.renderer.max_model_len,
            model.input_modalities,
            model.lora_modules.names,
        )
    )


def _end_with_router(uds: Path) -> None:
    """Waits for the end of stdin, which the router keeps open, and ends this process."""
    # Not through sys.stdin: a thread in one of its methods aborts the interpreter's end.
    while os.read(0, 1):
        pass
    # A router that was killed left its folder. The last process to get here removes it.
    uds.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        uds.parent.rmdir()
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)
