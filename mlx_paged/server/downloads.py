"""Downloads: fetches models from the Hugging Face hub, one process per download.

The library downloads on threads that cannot be stopped; a process can be killed when the client
leaves. Fetched parts stay in the cache, and the next download resumes there.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from huggingface_hub import constants
from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

from mlx_paged import hub
from mlx_paged.errors import InvalidParameterError, ModelLoadError
from mlx_paged.server.child_process import DEVNULL, PIPE, ChildProcess
from mlx_paged.server.errors import RETRY_AFTER, ApiError, bad_request, unavailable

#: Maximum downloads at once.
MAX_DOWNLOADS = 4
# Seconds between two looks at the cache, and so between two lines of progress: only by sending does
# a server notice that a client has gone (`connection`).
_INTERVAL = 0.25
# Ends when its stdin does, which the server holds.
_CHILD = """
import os, sys, threading
sys.path[:] = {path!r}
def end_with_server():
    while os.read(0, 1):
        pass
    os._exit(1)
threading.Thread(target=end_with_server, daemon=True).start()
from mlx_paged import errors, hub
try:
    hub.pull(sys.argv[1], include=sys.argv[2:])
except errors.MlxPagedError as error:
    sys.exit(str(error))
"""


class Downloads:
    """The downloads of a server."""

    def __init__(self) -> None:
        self._running: list[str] = []

    def is_running(self, name: str) -> bool:
        """True while a model is being fetched."""
        return name in self._running

    async def plan(self, name: str) -> hub.Download:
        """Asks the hub what a download would fetch.

        Args:
            name: A hub id.

        Raises:
            ApiError: 400, it is no hub id; 404, there is no such model; 503, the hub does not
                answer; 507, the disk has no room for it.
        """
        try:
            return await asyncio.to_thread(hub.plan, name)
        except InvalidParameterError as error:
            raise bad_request("model", str(error)) from error
        except ModelLoadError as error:
            cause = error.__cause__
            if cause is None:
                raise ApiError(507, str(error), code="disk_full") from error
            while cause is not None:
                if isinstance(cause, (RepositoryNotFoundError, RevisionNotFoundError)):
                    raise ApiError(404, str(error), code="model_not_found") from error
                cause = cause.__cause__
            raise unavailable(str(error), "hub_unavailable") from error

    def check_room(self) -> None:
        """Refuses another download if there are too many.

        Raises:
            ApiError: 429.
        """
        if len(self._running) >= MAX_DOWNLOADS:
            message = f"{MAX_DOWNLOADS} models are being fetched, which is the most"
            headers = {"Retry-After": str(RETRY_AFTER)}
            raise ApiError(429, message, code="too_many_downloads", headers=headers)

    async def fetch(self, name: str, wanted: hub.Download) -> AsyncIterator[int]:
        """Fetches a model; yields the bytes of it that are here, several times a second.

        Leaving the iteration ends the download.

        Raises:
            ApiError: 429, there are too many; 503, the hub did not give all of it.
        """
        self.check_room()
        self._running.append(name)
        process = None
        try:
            process = await ChildProcess.start(
                [sys.executable, "-c", _CHILD.format(path=sys.path), name, *wanted.include],
                environment=_environment(),
                stdin=PIPE,
                stdout=DEVNULL,
                stderr=PIPE,
                process_group=0,  # Ctrl-C is for the server.
            )
            assert process.stderr is not None
            before = hub.stored_bytes(name, whole=True)
            present = wanted.size - wanted.missing
            telling = asyncio.ensure_future(process.stderr.read())
            while not telling.done():
                await asyncio.wait({telling}, timeout=_INTERVAL)
                grown = await asyncio.to_thread(hub.stored_bytes, name) - before
                yield min(present + max(0, grown), wanted.size)
            if await process.wait():
                lines = telling.result().decode(errors="replace").strip().splitlines()
                reason = lines[-1] if lines else f"exit status {process.returncode}"
                raise unavailable(reason, "hub_unavailable")
        finally:
            self._running.remove(name)
            if process is not None and process.returncode is None:
                process.kill()
                await process.wait()


def _environment() -> dict[str, str]:
    return {
        **os.environ,
        "HF_HUB_CACHE": str(constants.HF_HUB_CACHE),
        "HF_ENDPOINT": constants.ENDPOINT,
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }


def hub_id_of(path: str | None) -> str | None:
    """Returns the hub id of a served model's path; None for files of another place."""
    return path if path is not None and not Path(path).exists() else None
