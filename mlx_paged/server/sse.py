"""Server-sent events: chunks as bytes, the end, and what goes wrong in between."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from typing import Any

import anyio
from pydantic_core import to_json
from sse_starlette.sse import AppStatus, EventSourceResponse
from starlette.types import Message, Receive, Scope, Send

from mlx_paged.server.errors import ApiError, failed
from mlx_paged.server.trace import Trace

logger = logging.getLogger(__name__)

# Streams are drained at shutdown (see `run`), not cut.
AppStatus.enable_automatic_graceful_drain = False

DONE = b"data: [DONE]\n\n"
#: Seconds between comments that keep an idle connection open, for proxies.
_PING_INTERVAL = 15


def event(body: dict[str, Any]) -> bytes:
    """One event."""
    return b"data: " + to_json(body) + b"\n\n"


class TextEvent:
    """An event that is sent again and again with another text: the rest of it is made once.

    Args:
        body: of the event; `TextEvent.TEXT` stands for the text.
    """

    TEXT = "\x00the text\x00"

    def __init__(self, body: dict[str, Any]) -> None:
        self._before, self._after = event(body).split(to_json(self.TEXT))

    def __call__(self, text: str) -> bytes:
        """The event with a text."""
        return self._before + to_json(text) + self._after


class EventStream(EventSourceResponse):
    """A stream of events; an error in it is its last event but `[DONE]`.

    Args:
        events: ends, or raises `ApiError`.
        trace: learns of errors.
        patience: seconds a client has to take a chunk before it is given up.
    """

    def __init__(self, events: AsyncIterator[bytes], trace: Trace, patience: float) -> None:
        self._trace = trace
        self._patience = patience
        self._sending_since: float | None = None
        super().__init__(
            _guarded(events, trace), ping=_PING_INTERVAL, sep="\n",
            headers={"Cache-Control": "no-store"},
        )  # fmt: skip

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def noted_send(message: Message) -> None:
            if self._sending_since is None:  # (a ping may wait beside a chunk)
                self._sending_since = time.monotonic()
            await send(message)
            self._sending_since = None

        async with anyio.create_task_group() as group:
            group.start_soon(self._watch, group.cancel_scope)
            await super().__call__(scope, receive, noted_send)
            group.cancel_scope.cancel()

    async def _send_with_timeout(self, send: Send, message: Message) -> None:
        # A timeout for each chunk cost more than making the chunk: `_watch` looks now and then.
        await send(message)

    async def _watch(self, stream: anyio.CancelScope) -> None:
        while True:
            await anyio.sleep(self._patience / 4)
            since = self._sending_since
            if since is not None and time.monotonic() - since > self._patience:
                self._trace.fields["error"] = "the client did not read"
                request_id = self._trace.request_id
                logger.warning("a client did not read", extra={"request_id": request_id})
                stream.cancel()
                return


async def _guarded(events: AsyncIterator[bytes], trace: Trace) -> AsyncIterator[bytes]:
    try:
        async for chunk in events:
            yield chunk
    except ApiError as error:
        trace.fields["error"] = error.message
        yield event(error.body)
    except Exception:
        logger.exception("a stream failed", extra={"request_id": trace.request_id})
        trace.fields["error"] = "internal error"
        yield event(failed(trace.request_id).body)
    finally:
        await events.aclose()  # type: ignore[attr-defined]
    yield DONE
