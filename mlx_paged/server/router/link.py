"""RouterLink: connects the process of a model to the router that has started it.

The router marks its requests with two headers, and reads lines of JSON from the process: first the
fields of `LoadedModel`, or why there is none, then the tokens that limited clients have used.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import asdict
from typing import IO

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_paged.engine.memory import process_memory
from mlx_paged.server.router.process import LoadedModel
from mlx_paged.server.served_model import ServedModel

#: Header of a line of a batch.
BACKGROUND = b"x-mlx-paged-background"
#: Header with the number of the client's budget, if its tokens are limited (`ledger`).
ACCOUNT = b"x-mlx-paged-account"
# Maximum seconds between the use of a token and its report.
_DELAY = 0.1


class RouterLink:
    """The end of the link in the process of a model.

    Args:
        pipe: The router reads it.
    """

    def __init__(self, pipe: IO[str]) -> None:
        self._pipe = pipe
        self._used: Counter[int] = Counter()
        self._timer: asyncio.TimerHandle | None = None

    async def started(self, model: ServedModel) -> None:
        """Reports a model that is loaded, or why it is not."""
        if model.failure is not None:
            self.failed(model.failure)
            return
        stats = await model.engine.stats()
        loaded = LoadedModel(
            process_memory(stats.memory),
            model.renderer.max_model_len,
            model.input_modalities,
            model.lora_modules.names,
        )
        self._tell(asdict(loaded))

    def failed(self, error: Exception) -> None:
        """Reports why the model cannot be served."""
        self._tell({"failure": str(error) or type(error).__name__})

    def around(self, app: ASGIApp) -> ASGIApp:
        """Returns an application with the router's marks in the state of each request."""

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
                # The router knows the tokens before the client can send its next request.
                is_between = message["type"] == "http.response.body" and message.get("more_body")
                if not is_between:
                    self._report()
                await send(message)

            await app(scope, receive, send_after_report)

        return marked

    def use(self, account: int, num_tokens: int) -> None:
        """Reports used tokens, soon."""
        self._used[account] += num_tokens
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_DELAY, self._report)

    def _report(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._used:
            self._tell({"used": self._used})
            self._used = Counter()

    def _tell(self, told: dict[str, object]) -> None:
        print(json.dumps(told), file=self._pipe, flush=True)


class _ReportedBudget:
    """A client's budget, which the router keeps: it has admitted the request (see `Budget`)."""

    def __init__(self, link: RouterLink, account: int) -> None:
        self._link, self._account = link, account

    def admit(self) -> None:
        """Does nothing."""

    def charge(self, num_tokens: int) -> None:
        """Reports tokens that were used."""
        self._link.use(self._account, num_tokens)
