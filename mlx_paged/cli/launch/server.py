"""Server: finds the server for an agent; `own_server` starts one."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import httpx

from mlx_paged.cli.entry import print_line
from mlx_paged.cli.launch.agents import KEY_VARIABLE, Target
from mlx_paged.errors import InvalidParameterError, MlxPagedError

_TIMEOUT = 10.0  # seconds for an answer
_POLL = 0.2  # seconds between two queries while a server loads
_EXIT_TIMEOUT = 40.0  # seconds for a server to end: more than its --shutdown-timeout
_LAST_LINES = 5


class Server:
    """A server with OpenAI's API.

    Args:
        url: URL of the server, with or without ``/v1``.
        api_key: API key, if the server requires one.

    Raises:
        InvalidParameterError: The URL is invalid.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidParameterError("server", "a URL like http://127.0.0.1:8000", url)
        self.url = url.rstrip("/").removesuffix("/v1")
        self.host, self.port = (
            parts.hostname,
            parts.port or (443 if parts.scheme == "https" else 80),
        )
        self.is_local = parts.scheme == "http" and self.host in ("127.0.0.1", "localhost", "::1")
        self._api_key = api_key
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.Client(base_url=self.url, headers=headers, timeout=_TIMEOUT)

    def is_up(self) -> bool:
        """Returns True if a server listens at the URL."""
        with contextlib.suppress(httpx.ConnectError, httpx.ConnectTimeout):
            self._get("/v1/models")
            return True
        return False

    def is_ready(self) -> bool:
        """Returns True if the server accepts requests. Servers without /ready always do."""
        return self._get("/ready").status_code in (200, 404)

    def target(self, model: str | None) -> Target:
        """Returns a model of the server; waits until it is loaded.

        Args:
            model: A served name; None: the first one.

        Raises:
            MlxPagedError: The server does not have the model, cannot load it, or requires a key.
        """
        response = self._get("/v1/models")
        if response.status_code == 401:
            raise MlxPagedError(f"{self.url} requires a key: give --api-key")
        try:
            listed = {str(each["id"]): each for each in response.json()["data"]}
        except (ValueError, LookupError, TypeError):
            raise MlxPagedError(f"{self.url} lists no models, so agents cannot use it") from None
        name = next(iter(listed), None) if model is None else model
        if name is None or name not in listed:
            raise MlxPagedError(
                f"{self.url} does not serve {name!r}, only: {', '.join(listed)}; stop it, or give "
                "another --server, to start one with that model"
            )
        context = self._loaded(name, listed[name]).get("max_model_len")
        return Target(
            self.url, name, context if isinstance(context, int) else None, self._api_key,
            self._takes_tools(name),
        )  # fmt: skip

    def _loaded(self, name: str, entry: Any) -> Any:
        """Loads a model if necessary; returns its entry in the list once it is loaded.

        Raises:
            MlxPagedError: The model cannot be loaded.
        """
        if not _is_waiting(entry):
            return entry
        print_line(f"{self.url} loads {name}")
        begun = self._client.post("/models/load", json={"model": name})
        if begun.status_code != 200:
            raise MlxPagedError(f"{self.url} cannot load {name}: {begun.text[:200]}")
        while _is_waiting(entry):
            time.sleep(_POLL)
            response = self._get(f"/v1/models/{quote(name)}")
            if response.status_code != 200:
                raise MlxPagedError(f"{self.url} cannot load {name}: {response.text[:200]}")
            entry = response.json()
            if entry["status"].get("failed"):
                reason = entry["status"].get("reason") or "it does not say why"
                raise MlxPagedError(f"{self.url} cannot load {name}: {reason}")
        return entry

    def _takes_tools(self, name: str) -> bool:
        """Returns True unless the server reports that the model does not support tools."""
        with contextlib.suppress(MlxPagedError, httpx.HTTPError, ValueError):
            parsing = self._get(f"/server_info?model={quote(name, safe='')}").json().get("parsing")
            return not parsing or parsing.get("tool_calls") is not None
        return True

    def _get(self, path: str) -> httpx.Response:
        try:
            return self._client.get(path)
        except (httpx.ConnectError, httpx.ConnectTimeout):
            raise
        except httpx.HTTPError as error:
            raise MlxPagedError(f"{self.url} does not answer: {error}") from error


def _is_waiting(entry: Any) -> bool:
    """Returns True if an entry of the model list shows that the model is not loaded yet."""
    status = entry.get("status")
    return isinstance(status, dict) and status.get("value") in ("unloaded", "loading")


def command_of(server: Server, model: str | None, config: Path | None) -> list[str]:
    """Returns the arguments of `mlx-paged` that start the server."""
    return [
        "serve", *([model] if model is not None else []),
        *(["--config", str(config)] if config is not None else []),
        "--host", server.host, "--port", str(server.port),
    ]  # fmt: skip


@contextlib.contextmanager
def own_server(
    server: Server, arguments: Sequence[str], api_key: str | None, log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Starts a server, waits until it is ready, and ends it afterwards.

    The server has its own session, so that Ctrl-C only reaches the agent. It ends with this
    process, even if that is killed.

    Args:
        arguments: See `command_of`.
        log: The file for its output.

    Raises:
        MlxPagedError: The server does not start; the message has the end of its output.
    """
    theirs, ours = os.pipe()
    environment: Mapping[str, str] = os.environ | ({KEY_VARIABLE: api_key} if api_key else {})
    try:
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "mlx_paged.cli.launch.owned", str(theirs), *arguments],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=[theirs],
                start_new_session=True, env=environment,
            )  # fmt: skip
    except BaseException:
        os.close(ours)
        raise
    finally:
        os.close(theirs)
    try:
        _wait(server, process, log)
        yield process
        if process.poll() is not None:
            print_line(f"the server has ended: {last_lines(log)}")
    finally:
        process.terminate()
        try:
            process.wait(_EXIT_TIMEOUT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(ours)


def _wait(server: Server, process: subprocess.Popen[bytes], log: Path) -> None:
    while True:
        if process.poll() is not None:
            raise MlxPagedError(f"the server did not start: {last_lines(log)}")
        with contextlib.suppress(MlxPagedError, httpx.TransportError):
            if server.is_ready():
                return
        time.sleep(_POLL)


def last_lines(log: Path) -> str:
    """Returns the last lines of a server's output, as one line."""
    lines = log.read_text(errors="replace").strip().splitlines()
    return " | ".join(lines[-_LAST_LINES:]) or "it printed nothing"
