"""Service: asks a model through the server's API, in this process or at a URL."""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx

from mlx_paged.engine.async_engine import AsyncEngine
from mlx_paged.errors import MlxPagedError
from mlx_paged.server.app import create_app
from mlx_paged.server.batches.in_process import InProcess
from mlx_paged.server.config import ServerConfig, default_model_name
from mlx_paged.server.context import Context

Body = dict[str, Any]
#: Called after each reply.
OnReply = Callable[[], object]

_TIMEOUT = 3600.0  # seconds for one reply; a CPU may be slow, and requests wait for each other


class Service(ABC):
    """A model behind an API. It is used by one thread, and closed at the end.

    Attributes:
        model: The name under which it is served.
        max_model_len: Tokens of its context; None if unknown.
        concurrency: Requests at once.
    """

    model: str
    max_model_len: int | None = None

    def __init__(self, concurrency: int) -> None:
        self.concurrency = concurrency
        self._runner = asyncio.Runner()

    def ask(
        self, path: str, bodies: Sequence[Mapping[str, Any]], on_reply: OnReply | None = None
    ) -> list[Body]:
        """Posts bodies, several at a time; returns the replies in the same order.

        Raises:
            MlxPagedError: A request failed; it gives the server's message.
        """
        return self._runner.run(self._ask(path, bodies, on_reply))

    async def _ask(
        self, path: str, bodies: Sequence[Mapping[str, Any]], on_reply: OnReply | None
    ) -> list[Body]:
        room = asyncio.Semaphore(self.concurrency)

        async def one(body: Mapping[str, Any]) -> Body:
            async with room:
                status, text = await self._post(path, json.dumps({"model": self.model, **body}))
            if status != 200:
                raise MlxPagedError(f"{path} answered {status}: {_message(text)}")
            if on_reply is not None:
                on_reply()
            reply: Body = json.loads(text)
            return reply

        tasks = [asyncio.ensure_future(one(body)) for body in bodies]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    @abstractmethod
    async def _post(self, path: str, body: str) -> tuple[int, bytes]:
        """Returns the status and body of a reply."""

    @abstractmethod
    async def _close(self) -> None: ...

    def close(self) -> None:
        """Ends the service."""
        try:
            self._runner.run(self._close())
        finally:
            self._runner.close()


class LocalService(Service):
    """The server's application in this process, with its own engine.

    Args:
        model: See `mlx_paged.load`.
        dtype: See `mlx_paged.load`.
        tool_template: See `ServerConfig`.
        options: Fields of `EngineConfig`.
    """

    def __init__(
        self,
        model: str | None,
        *,
        dtype: str = "auto",
        tool_template: bool = False,
        concurrency: int = 256,
        **options: Any,
    ) -> None:
        super().__init__(concurrency)
        self._tool_template = tool_template
        self.model = default_model_name(model)
        try:
            self._runner.run(self._open(model, dtype, options))
        except BaseException:
            self._runner.close()
            raise

    async def _open(self, model: str | None, dtype: str, options: Mapping[str, Any]) -> None:
        self._engine = AsyncEngine.from_model(model, dtype=dtype, **options)
        config = ServerConfig(
            served_model_names=(self.model,),
            log_requests=False,
            serve_page=False,
            tool_template=self._tool_template,
        )
        app = create_app(self._engine, config)
        context: Context = app.state.context
        self._served = context.models.default
        await self._served.start(context.metrics)
        if self._served.failure is not None:
            raise self._served.failure
        self._client = InProcess(app)
        self.max_model_len = self._engine.info.max_request_len

    async def _post(self, path: str, body: str) -> tuple[int, bytes]:
        reply = await self._client.post(path, body.encode(), "eval")
        return reply.status_code, reply.body

    async def _close(self) -> None:
        self._served.close()
        if self._engine.is_alive:
            await self._engine.shutdown()


class RemoteService(Service):
    """A server at a URL: `mlx-paged serve`, or another one with vLLM's `/tokenize`.

    Args:
        url: With or without ``/v1`` at its end.
        model: Its name there; None: the first that the server lists.
    """

    def __init__(
        self, url: str, model: str | None, *, api_key: str | None = None, concurrency: int = 32
    ) -> None:
        super().__init__(concurrency)
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.AsyncClient(
            base_url=url.rstrip("/").removesuffix("/v1"), headers=headers, timeout=_TIMEOUT
        )
        try:
            self._runner.run(self._open(url, model))
        except BaseException:
            self.close()
            raise

    async def _open(self, url: str, model: str | None) -> None:
        try:
            reply = await self._client.get("/v1/models")
            reply.raise_for_status()
            served = reply.json()["data"]
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError) as error:
            raise MlxPagedError(f"{url} does not list its models: {error}") from error
        found = [each for each in served if model is None or each["id"] == model]
        if not found:
            raise MlxPagedError(f"{url} serves {[each['id'] for each in served]}, not {model!r}")
        self.model = found[0]["id"]
        self.max_model_len = found[0].get("max_model_len")

    async def _post(self, path: str, body: str) -> tuple[int, bytes]:
        try:
            reply = await self._client.post(
                path, content=body, headers={"Content-Type": "application/json"}
            )
        except httpx.HTTPError as error:
            raise MlxPagedError(f"{path} could not be asked: {error!r}") from error
        return reply.status_code, reply.content

    async def _close(self) -> None:
        await self._client.aclose()


def _message(text: bytes) -> str:
    try:
        found = json.loads(text)
        return str(found.get("error", found).get("message", found))
    except (ValueError, AttributeError):
        return text[:200].decode(errors="replace")
