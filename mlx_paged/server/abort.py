"""`POST /abort_requests`: ends requests of other connections, by their ids."""

from __future__ import annotations

import asyncio
import re
from typing import Annotated

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12.

from mlx_paged.server.bodies import Body
from mlx_paged.server.context import context_of
from mlx_paged.server.requests import read_body

# An answer's id is its request's id after one of these prefixes.
_PREFIX = re.compile(r"^(chatcmpl-|cmpl-|msg_|embd-|pool-|score-|rerank-|classify-)")


class AbortBody(Body):
    """`POST /abort_requests`."""

    request_ids: Annotated[list[str], Field(max_length=1024, fail_fast=True)] = Field(
        description="Ids of requests (X-Request-Id or request_id) or of their answers."
    )


class Aborted(TypedDict):
    """The ids of the aborted requests."""

    aborted: list[str]


async def abort_requests(request: Request) -> Response:
    """Ends requests; their clients get 499."""
    body = await read_body(request, AbortBody)
    context = context_of(request)
    asked = {_PREFIX.sub("", given): given for given in body.request_ids}
    asked |= {given: given for given in body.request_ids}
    found = [work for work in context.underway if work.trace.request_id in asked]
    await asyncio.gather(*(work.abort() for work in found))
    ids = dict.fromkeys(asked[work.trace.request_id] for work in found)
    return JSONResponse(Aborted(aborted=list(ids)))
