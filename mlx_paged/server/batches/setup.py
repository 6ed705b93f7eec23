"""Adds batches to a server: the folder, and an inner application that answers the lines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import BaseRoute

from mlx_paged.server.batches.folder import Folder
from mlx_paged.server.batches.in_process import InProcess
from mlx_paged.server.batches.manager import BatchManager
from mlx_paged.server.body_bounds import MAX_TOKEN_IDS, BodyBounds
from mlx_paged.server.context import Phase, ServerContext
from mlx_paged.server.middleware import RequestMiddleware


def add_batches(
    context: ServerContext,
    routes: Sequence[BaseRoute],
    exception_handlers: Mapping[Any, Callable[..., Any]],
) -> None:
    """Adds batches, stored in the configured folder, to a server.

    The same routes answer the lines, without authentication and rate limits, which the creator of a
    batch has passed. Lines are neither logged nor counted in the server's load.

    Raises:
        InvalidParameterError: The folder is unusable.
    """
    assert context.config.files_dir is not None
    inner = Starlette(
        routes=routes,
        middleware=[
            Middleware(
                RequestMiddleware, context.metrics,
                log=False, paths=(), generating=(), on_end=context.release_body,
            )
        ],
        exception_handlers=dict(exception_handlers),
    )  # fmt: skip
    inner.state.context = context

    def has_ended() -> bool:
        return context.phase is not Phase.READY

    folder = Folder(Path(context.config.files_dir))
    try:
        context.batches = BatchManager(folder, InProcess(inner, has_ended, background=True).post)
    except BaseException:
        folder.close()
        raise


def start_batches(context: ServerContext, max_lines: int) -> None:
    """Resumes unfinished batches, once the server accepts requests.

    Args:
        max_lines: Maximum lines in flight, unless the configuration has one.
    """
    if context.batches is None:
        return
    configured, limit = context.config.max_batch_lines, context.max_model_len
    context.batches.start(
        max_lines if configured is None else configured,
        context.max_body_size,
        partial(BodyBounds, max(MAX_TOKEN_IDS, limit or 0), limit, is_in_line=True),
    )
