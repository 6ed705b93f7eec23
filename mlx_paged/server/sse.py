"""Server-sent events: chunks as bytes, the end, and what goes wrong in between."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

from pydantic_core import to_json
from sse_starlette.sse import AppStatus, EventSourceResponse, SendTimeoutError
from starlette.types import Receive, Scope, Send

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


class EventStream(EventSourceResponse):
    """A stream of events; an error in it is its last event but `[DONE]`.

    Args:
        events: ends, or raises `ApiError`.
        trace: learns of errors.
        send_timeout: seconds a client has to take a chunk before it is given up.
    """

    def __init__(self, events: AsyncIterator[bytes], trace: Trace, send_timeout: float) -> None:
        self._trace = trace
        super().__init__(
            _guarded(events, trace), ping=_PING_INTERVAL, sep="\n", send_timeout=send_timeout,
            headers={"Cache-Control": "no-store"},
        )  # fmt: skip

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except SendTimeoutError:
            self._trace.fields["error"] = "the client did not read"
            logger.warning("a client did not read", extra={"request_id": self._trace.request_id})


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
