"""What an endpoint finds beside its request."""

from __future__ import annotations

from starlette.requests import Request

from mlx_paged.server.context import Context
from mlx_paged.server.trace import Trace


def context_of(request: Request) -> Context:
    """What all requests share."""
    context: Context = request.app.state.context
    return context


def trace_of(request: Request) -> Trace:
    """What will be told of this one."""
    trace: Trace = request.scope["state"]["trace"]
    return trace
