"""AsyncEngine: one thread that owns MLX, and asyncio in front of it."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from mlx_paged.engine.config import EngineConfig
from mlx_paged.engine.engine import Engine, EngineStats
from mlx_paged.engine.engine_thread import EngineThread
from mlx_paged.engine.grammar import StructuredOutputs
from mlx_paged.engine.guard import check_process
from mlx_paged.engine.media.loader import MediaLoader, loader_of
from mlx_paged.engine.media.prompt import PreparedMedia, check_kinds, media_model_of, prepare
from mlx_paged.engine.outputs import RequestOutput
from mlx_paged.engine.pooling.params import PoolingParams
from mlx_paged.engine.request_options import (
    TextWithMedia,
    media_prompt_of,
    params_of,
    token_ids_of,
)
from mlx_paged.engine.request_stream import RequestStream, SequenceDelta
from mlx_paged.engine.sampling.sequence_sampler import TokenMask
from mlx_paged.engine.sampling_params import SamplingParams
from mlx_paged.errors import (
    EngineDeadError,
    EngineOverloadedError,
    ForkedProcessError,
    InvalidParameterError,
)
from mlx_paged.model.loader import load
from mlx_paged.model.media_text import unmarked
from mlx_paged.ops import OnKernel

T = TypeVar("T")

# Seconds that the interpreter's exit waits for the engine's thread.
_EXIT_TIMEOUT = 60.0

__all__ = ["AsyncEngine", "RequestStream", "SequenceDelta"]


class AsyncEngine:
    """Serves many callers from one engine.

    Every method may be called from any event loop of any thread; a `RequestStream` belongs to the
    loop that asked for it.

    Args:
        make_engine: called on the engine's thread, which is the only one to touch an array: MLX's
            streams belong to threads, so the model must be loaded there too. See `from_model`.
    """

    def __init__(self, make_engine: Callable[[], Engine]) -> None:
        check_process()
        self._thread = EngineThread(make_engine)
        self._ids = itertools.count()
        self._lock = threading.Lock()
        self._num_adding = {False: 0, True: 0}  # by whether they are background requests
        self._media: MediaLoader | None = None
        self._thread.start()
        atexit.register(self._at_exit)

    @classmethod
    def from_model(
        cls,
        model: str | Path | None = None,
        *,
        dtype: str = "auto",
        generation_config: Mapping[str, Any] | None = None,
        on_kernel: OnKernel | None = None,
        **options: Any,
    ) -> AsyncEngine:
        """Loads a model (None: the embedded one) and makes its engine, in the background.

        Args:
            model: a directory in mlx-lm's format, or a Hugging Face id.
            dtype, generation_config: see `mlx_paged.load`.
            on_kernel: see `Engine`; called on the engine's thread.
            options: fields of `EngineConfig`.
        """
        config = EngineConfig(**options)
        return cls(
            lambda: Engine(
                load(model, dtype=dtype, generation_config=generation_config),
                config,
                on_kernel=on_kernel,
            )
        )

    async def ready(self) -> None:
        """Waits until the engine is ready; raises what went wrong if it could not be made."""
        # Shielded: cancelling one caller must not cancel what all wait for.
        await asyncio.shield(asyncio.wrap_future(self._thread.ready))

    @property
    def is_alive(self) -> bool:
        """True if the engine takes requests."""
        return self._thread.dead is None

    @property
    def engine(self) -> Engine:
        """The engine, once `ready`. Other threads may read only its configuration and tokenizer:
        everything else belongs to the engine's thread.
        """
        return self._thread.engine

    @property
    def media_loader(self) -> MediaLoader:
        """Loads the media of prompts; once the engine is `ready`."""
        with self._lock:
            if self._media is None:
                self._media = loader_of(self.engine)
            return self._media

    async def add_request(
        self,
        prompt: str | Sequence[int] | Mapping[str, Any],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        background: bool = False,
        timeout: float | None = None,
        cache_salt: str | None = None,
        token_mask: TokenMask | None = None,
        media: PreparedMedia | None = None,
    ) -> RequestStream:
        """Takes a request; returns the stream of its deltas once the engine has accepted it.

        Cancelling the task, here or while it reads, ends the request within a step; what was
        computed stays in the prefix cache.

        Args:
            prompt: a text, token ids (a list, or an array of integers), or vLLM's mapping with
                `prompt` and `multi_modal_data` (see `LLM.generate`).
            params: how to choose tokens, and when to stop.
            request_id: unique among unfinished requests; None generates one.
            priority: lower is served first under the priority policy.
            background: served with what other requests leave, under either policy.
            timeout: seconds until the request ends with "timeout".
            cache_salt: requests of different salts share no cached blocks.
            token_mask: gives before each token those that may follow; called on the engine's
                thread, which waits for it. (A grammar of `structured_outputs` takes much less.)
            media: of token ids, where they were prepared before.

        Raises:
            InvalidParameterError: see `Engine.add_request`.
            InvalidMediaError: an item that cannot be used, or that the model does not take.
            RequestTooLargeError: prompt and answer could never fit.
            DuplicateRequestError: an unfinished request has this id.
            EngineOverloadedError: too many requests wait.
            EngineDeadError: the engine stopped.
        """
        params, given = params_of(params), media_prompt_of("prompt", prompt)
        request_id = f"request-{next(self._ids)}" if request_id is None else request_id
        if not isinstance(request_id, str):
            raise InvalidParameterError("request_id", "a string", request_id)
        if self._thread.dead is not None:
            raise EngineDeadError(self._thread.dead)
        await self.ready()
        text = given if isinstance(given, str) else None
        loop = asyncio.get_running_loop()
        if isinstance(given, TextWithMedia):
            media = await self._prepared(given)
            text, tokens = unmarked(given.text), media.prompt.token_ids
        elif isinstance(given, str):
            encode = self._thread.engine.tokenizer.encode
            tokens = await loop.run_in_executor(None, encode, given)
        else:
            tokens, _ = token_ids_of("prompt", given, self._thread.engine.vocab_size)
        # (Text pays nothing for media.)
        with_media: dict[str, Any] = {} if media is None else {"media": media}

        sampling = None
        if params.bad_words or params.structured_outputs is not None:
            # Hundreds of bad words take longer to tokenize than a step, for which others wait; and
            # so may a grammar, for which no thread waits.
            engine, grammar = self._thread.engine, None
            if isinstance(params.structured_outputs, StructuredOutputs):
                grammar = await engine.grammar_compiler.compile_async(params.structured_outputs)
            make = engine.sampling_of
            sampling = await loop.run_in_executor(None, make, params, tokens, token_mask, grammar)

        thread = self._thread
        channel = thread.new_channel(loop, params.n)
        stream = RequestStream(request_id, channel, lambda: thread.abort(request_id, channel))

        def add(engine: Engine) -> None:
            state = engine.request_state(request_id)
            if state is not None and state.sink is channel:  # (broken off, and run again)
                stream.output = state.output
                return
            stream.output = engine.add_request(
                request_id,
                tokens,
                params,
                prompt=text,
                priority=priority,
                background=background,
                timeout=timeout,
                cache_salt=cache_salt,
                token_mask=token_mask,
                sink=channel,
                sampling=sampling,
                **with_media,
            )

        with self._counted_as_adding(background):
            try:
                await self._call(add)
            except BaseException:
                stream.close()  # it may have been added a moment before the caller was cancelled
                raise
        return stream

    async def add_pooling_request(
        self,
        prompt: Sequence[int],
        params: PoolingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        background: bool = False,
        timeout: float | None = None,
        cache_salt: str | None = None,
    ) -> RequestStream:
        """Takes a text to embed; `RequestStream.result` waits for `RequestOutput.pooled`.

        Cancelling the task ends the request, as in `add_request`.

        Args:
            prompt: token ids.
            params, request_id, priority, background, timeout, cache_salt: see
                `Engine.add_pooling_request`.

        Raises:
            InvalidParameterError, RequestTooLargeError, DuplicateRequestError,
            EngineOverloadedError, EngineDeadError: see `Engine.add_pooling_request`.
        """
        request_id = f"request-{next(self._ids)}" if request_id is None else request_id
        if not isinstance(request_id, str):
            raise InvalidParameterError("request_id", "a string", request_id)
        if self._thread.dead is not None:
            raise EngineDeadError(self._thread.dead)
        await self.ready()
        thread = self._thread
        tokens, _ = token_ids_of("prompt", prompt, thread.engine.vocab_size)
        channel = thread.new_channel(asyncio.get_running_loop(), 1)
        stream = RequestStream(request_id, channel, lambda: thread.abort(request_id, channel))

        def add(engine: Engine) -> None:
            state = engine.request_state(request_id)
            if state is not None and state.sink is channel:  # (broken off, and run again)
                stream.output = state.output
                return
            stream.output = engine.add_pooling_request(
                request_id,
                tokens,
                params,
                priority=priority,
                background=background,
                timeout=timeout,
                cache_salt=cache_salt,
                sink=channel,
            )

        with self._counted_as_adding(background):
            try:
                await self._call(add)
            except BaseException:
                stream.close()  # (as in `add_request`)
                raise
        return stream

    async def generate(
        self,
        prompt: str | Sequence[int] | Mapping[str, Any],
        params: SamplingParams | None = None,
        **options: Any,
    ) -> RequestOutput:
        """The whole answer of a request; see `add_request`."""
        stream = await self.add_request(prompt, params, **options)
        return await stream.result()

    async def abort(self, request_id: str) -> bool:
        """Ends a request; its stream ends with "abort". Returns whether it was there."""
        return await self._call(lambda engine: engine.abort(request_id))

    async def reset_prefix_cache(self) -> int:
        """Forgets every cached prefix; returns how many blocks that were."""
        return await self._call(lambda engine: engine.reset_prefix_cache())

    async def stats(self) -> EngineStats:
        """The engine's statistics, taken between two steps."""
        return await self._call(lambda engine: engine.stats())

    async def shutdown(self, drain_timeout: float = 0.0) -> None:
        """Takes no more requests, and ends when all are finished; after the timeout, aborts them.

        Args:
            drain_timeout: seconds.
        """
        self._thread.stop(drain_timeout)
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join)
        atexit.unregister(self._at_exit)
        if self._media is not None:
            self._media.close()

    async def __aenter__(self) -> AsyncEngine:
        await self.ready()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        await self.shutdown()

    # Parts.

    async def _prepared(self, prompt: TextWithMedia) -> PreparedMedia:
        """Loads the media of a prompt, and makes its tokens, on threads of their own."""
        model = media_model_of(self.engine)
        check_kinds(prompt.sources, model, self.engine.media_reason)
        items = await self.media_loader.load_async(prompt.sources)
        return await self.media_loader.run(lambda: prepare(model, prompt.text, items, "prompt"))

    async def _call(self, function: Callable[[Engine], T]) -> T:
        """Runs a function on the engine's thread, between two steps."""
        future: Future[T] = self._thread.submit(function)
        return await asyncio.wrap_future(future)

    @contextlib.contextmanager
    def _counted_as_adding(self, background: bool) -> Iterator[None]:
        """Limits the requests that the engine's thread has not taken yet: a step may be long."""
        limit = self._thread.engine.config.max_num_waiting
        with self._lock:
            count = self._num_adding[background]
            if limit is not None and count >= limit:
                raise EngineOverloadedError(count, limit)
            self._num_adding[background] += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_adding[background] -= 1

    def _at_exit(self) -> None:
        # A thread inside MLX while the interpreter is taken down would crash.
        with contextlib.suppress(ForkedProcessError):
            self._thread.stop(0.0)
            self._thread.join(timeout=_EXIT_TIMEOUT)
