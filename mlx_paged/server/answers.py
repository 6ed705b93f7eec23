"""What the answers of both endpoints have in common."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.requests import Request

from mlx_paged import __version__
from mlx_paged.core import FinishReason
from mlx_paged.engine.async_engine import SequenceDelta
from mlx_paged.engine.outputs import PositionReport
from mlx_paged.server.errors import ApiError
from mlx_paged.server.job import Job

T = TypeVar("T")

FINGERPRINT = f"mlx-paged-{__version__}"


def usage(job: Job, num_completion_tokens: int) -> dict[str, Any]:
    """OpenAI's `usage`."""
    num_prompt_tokens = job.num_prompt_tokens
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": job.num_cached_tokens},
    }


def head(request_id: str, prefix: str, kind: str, model: str) -> dict[str, Any]:
    """The fields that an answer and each chunk of a stream begin with."""
    return {
        "id": f"{prefix}-{request_id}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": FINGERPRINT,
    }


@dataclass
class Gathered:
    """What a sequence gained that is not sent yet.

    Attributes:
        num_sent: Tokens that were sent before.
    """

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionReport] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    num_sent: int = 0

    def add(self, delta: SequenceDelta) -> None:
        """Takes a delta."""
        for update in delta.updates:
            self.texts.append(update.text)
            if update.token_id is not None:
                self.token_ids.append(update.token_id)
            if update.logprobs is not None:
                self.logprobs.append(update.logprobs)
        self.finish_reason, self.stop_reason = update.finish_reason, update.stop_reason

    def is_due(self, interval: int) -> bool:
        """Whether it is time to send: the first token, every `interval` tokens, the end."""
        count = len(self.token_ids)
        return self.num_sent == 0 or count >= interval or self.finish_reason is not None

    def take(self) -> Gathered:
        """Hands out what is there, and begins anew."""
        taken = Gathered(
            self.texts, self.token_ids, self.logprobs, self.finish_reason, self.stop_reason,
            self.num_sent,
        )  # fmt: skip
        self.num_sent += len(self.token_ids)
        self.texts, self.token_ids, self.logprobs = [], [], []
        return taken

    @property
    def text(self) -> str:
        """All of the text."""
        return "".join(self.texts)

    @property
    def is_plain(self) -> bool:
        """Whether there is text, and nothing else to tell but token ids."""
        return self.num_sent > 0 and self.finish_reason is None and not self.logprobs


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The work's result; if the client goes away, the work is cancelled.

    Raises:
        ApiError: 499; nobody will read it, but the log.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ApiError(499, "the client has gone", code="client_closed")
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
