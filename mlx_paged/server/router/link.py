"""RouterLink: connects a model's process to the router that started it.

The router marks requests with two headers. The process writes reports to a pipe, as lines of JSON.
The first line has the fields of `LoadedModel` or the reason for a failure; later lines report the
tokens used by rate-limited clients, and the number of background responses.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import asdict
from typing import IO

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_paged.engine.memory import served_memory
from mlx_paged.server.router.process import LoadedModel
from mlx_paged.server.served_model import ServedModel

#: Request header that marks a line of a batch.
BACKGROUND = b"x-mlx-paged-background"
#: Request header with the client's account number (`ledger`), if its tokens are limited.
ACCOUNT = b"x-mlx-paged-account"
# Maximum seconds before used tokens are reported.
_DELAY = 0.1


class RouterLink:
    """The process's end of the link.

    Args:
        pipe: The router reads it.
    """

    def __init__(self, pipe: IO[str]) -> None:
        self._pipe = pipe
        self._used: Counter[int] = Counter()
        self._timer: asyncio.TimerHandle | None = None

    async def started(self, model: ServedModel) -> None:
        """Reports that the model is loaded, or why it failed."""
        if model.failure is not None:
            self.failed(model.failure)
            return
        stats = await model.engine.stats()
        loaded = LoadedModel(
            served_memory(stats.memory, model.info.config.num_ranks, model.num_processes),
            model.renderer.max_model_len,
            model.input_modalities,
            model.lora_modules.names,
        )
        self._send(asdict(loaded))

    def failed(self, error: Exception) -> None:
        """Reports why the model cannot be served."""
        self._send({"failure": str(error) or type(error).__name__})

    def around(self, app: ASGIApp) -> ASGIApp:
        """Wraps an application: copies the router's headers into the state of each request."""

        async def marked(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] not in ("http", "websocket"):
                await app(scope, receive, send)
                return
            headers = dict(scope["headers"])
            state = scope.setdefault("state", {})
            state["background"] = BACKGROUND in headers
            account = headers.get(ACCOUNT)
            if account is None:
                await app(scope, receive, send)
                return
            state["budget"] = _ReportedBudget(self, int(account))

            async def send_after_report(message: Message) -> None:
                # The router must charge the tokens before the client can send its next request.
                is_between = message["type"] == "http.response.body" and message.get("more_body")
                if not is_between:
                    self._report()
                await send(message)

            await app(scope, receive, send_after_report)

        return marked

    def use(self, account: int, num_tokens: int) -> None:
        """Schedules a report of used tokens."""
        self._used[account] += num_tokens
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_DELAY, self._report)

    def count_background(self, count: int) -> None:
        """Reports the number of responses that run without a request."""
        self._send({"background": count})

    def _report(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._used:
            self._send({"used": self._used})
            self._used = Counter()

    def _send(self, report: dict[str, object]) -> None:
        print(json.dumps(report), file=self._pipe, flush=True)


class _ReportedBudget:
    """Stands in for the router's `Budget`. The router has already admitted the request."""

    def __init__(self, link: RouterLink, account: int) -> None:
        self._link, self._account = link, account

    def admit(self) -> None:
        """Does nothing."""

    def charge(self, num_tokens: int) -> None:
        """Reports used tokens."""
        self._link.use(self._account, num_tokens)
