"""AsyncEngine: an asyncio interface to an engine on a thread that owns MLX."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeVar

from mlx_paged.engine.client import EngineInfo, EngineRequest
from mlx_paged.engine.config import EngineConfig
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.engine_thread import EngineThread
from mlx_paged.engine.grammar.compiler import GrammarCompiler
from mlx_paged.engine.guard import check_process
from mlx_paged.engine.lora.request import LoRARequest
from mlx_paged.engine.media import MediaPrompts
from mlx_paged.engine.output_processor import UpdateSink
from mlx_paged.engine.outputs import RequestOutput
from mlx_paged.engine.ranks.start import make_engine
from mlx_paged.engine.request_options import params_of
from mlx_paged.engine.request_stream import RequestStream, SequenceDelta
from mlx_paged.engine.sampling_params import SamplingParams
from mlx_paged.engine.stats import EngineStats
from mlx_paged.errors import EngineDeadError, EngineOverloadedError, ForkedProcessError
from mlx_paged.kernels import OnKernel

T = TypeVar("T")

# Seconds that interpreter exit waits for the engine's thread.
_EXIT_TIMEOUT = 60.0

__all__ = ["AsyncEngine", "RequestStream", "SequenceDelta"]


class HasOutput(Protocol):
    """A request's reader or sink."""

    output: RequestOutput


class AsyncEngine:
    """Serves many callers from one engine; see `EngineClient`.

    Any event loop of any thread may call any method. A `RequestStream` belongs to the loop that
    submitted its request.

    Args:
        make_engine: Called on the engine's thread, which must also load the model: MLX's streams
            belong to threads, so only this thread touches arrays. See `from_model`.
        on_updates: See `EngineThread`. Gets this object, because the thread may call it before the
            constructor returns.
    """

    def __init__(
        self,
        make_engine: Callable[[], Engine],
        on_updates: Callable[[AsyncEngine], object] = lambda _: None,
    ) -> None:
        check_process()
        self._thread = EngineThread(make_engine, lambda: on_updates(self))
        self._ids = itertools.count()
        self._lock = threading.Lock()
        self._num_adding = {False: 0, True: 0}  # by `EngineRequest.background`
        self._info: EngineInfo | None = None
        self._thread.start()
        atexit.register(self._at_exit)

    @classmethod
    def from_model(
        cls,
        model: str | Path | None = None,
        *,
        dtype: str = "auto",
        generation_config: Mapping[str, Any] | None = None,
        make_on_kernel: Callable[[], AbstractContextManager[OnKernel | None]] = nullcontext,
        **options: Any,
    ) -> AsyncEngine:
        """Loads a model (None: the embedded one) and creates its engine, in the background.

        Args:
            model: A directory in mlx-lm's format, a GGUF file, or a Hugging Face id.
            dtype, generation_config: See `mlx_paged.load`.
            make_on_kernel: Returns a context manager that yields the `on_kernel` of `Engine`.
                Entered on the engine's thread while the engine is created.
            options: Fields of `EngineConfig`.
        """
        config = EngineConfig(**options)

        def make() -> Engine:
            with make_on_kernel() as on_kernel:
                return make_engine(
                    model,
                    config,
                    dtype=dtype,
                    generation_config=generation_config,
                    on_kernel=on_kernel,
                )

        return cls(make)

    async def ready(self) -> None:
        """Waits until the engine is ready. Raises the error if it could not be created."""
        # Shielded: all callers share the future, and one of them may be canceled.
        await asyncio.shield(asyncio.wrap_future(self._thread.ready))

    @property
    def is_alive(self) -> bool:
        """True if the engine accepts requests."""
        return self._thread.dead is None

    @property
    def is_ready(self) -> bool:
        """True once the engine has been created, even if it has ended since."""
        return hasattr(self._thread, "engine")

    @property
    def reason_of_death(self) -> str | None:
        """Why the engine accepts no requests; None while it does."""
        return self._thread.dead

    @property
    def refuses_requests(self) -> bool:
        """See `EngineClient.refuses_requests`."""
        return self.engine.refuses_requests

    @property
    def engine(self) -> Engine:
        """The engine, once it is `ready`.

        Other threads may read only its configuration and tokenizer; everything else belongs to the
        engine's thread.
        """
        return self._thread.engine

    @property
    def info(self) -> EngineInfo:
        """Properties of the engine that never change; once it is `ready`."""
        if self._info is None:
            self._info = self.engine.info
        return self._info

    @property
    def tokenizer(self) -> Any:
        """mlx-lm's wrapper of the model's tokenizer; once the engine is `ready`."""
        return self.engine.tokenizer

    @property
    def media(self) -> Any | None:
        """See `EngineClient.media`."""
        return self.engine.media

    @property
    def media_prompts(self) -> MediaPrompts:
        """Prepares prompts with media; once the engine is `ready`."""
        return self.engine.intake.media_prompts

    @property
    def grammar_compiler(self) -> GrammarCompiler:
        """See `EngineClient.grammar_compiler`."""
        return self.engine.intake.grammar_compiler

    def observe_steps(self, observer: Callable[[int], None]) -> None:
        """See `EngineClient.observe_steps`."""
        self.engine.on_launch = observer

    async def add_request(
        self,
        prompt: str | Sequence[int] | Mapping[str, Any],
        params: SamplingParams | None = None,
        **options: Any,
    ) -> RequestStream:
        """Submits a request for tokens and text.

        Args:
            prompt: A text, token ids (a list, or an array of integers), or vLLM's mapping with
                `prompt` and `multi_modal_data` (see `LLM.generate`).
            params: How to choose tokens, and when to stop.
            options: Other fields of `EngineRequest`.

        Raises:
            MlxPagedError: See `submit`.
        """
        return await self.submit(EngineRequest(prompt, params_of(params), **options))

    async def submit(self, request: EngineRequest) -> RequestStream:
        """See `EngineClient.submit`.

        Canceling the task, here or while it reads, ends the request within a step. The prefix cache
        keeps the computed blocks.
        """
        request_id = request.id_or(self._ids)
        if self._thread.dead is not None:
            raise EngineDeadError(self._thread.dead)
        await self.ready()
        channel = self._thread.new_channel(asyncio.get_running_loop(), request.num_answers)
        stream = RequestStream(request_id, channel, lambda: self.leave(request_id, channel))
        await self.admit(request, request_id, channel, stream)
        return stream

    async def admit(
        self, request: EngineRequest, request_id: str, sink: UpdateSink, owner: HasOutput
    ) -> None:
        """Adds a request to the engine, once it is `ready`. Canceling this ends the request.

        Args:
            sink: Receives the request's updates, on the engine's thread.
            owner: Its `output` is set before the sink gets an update.

        Raises:
            MlxPagedError: See `submit`.
        """
        checked = await self.engine.intake.process_async(request, request_id, sink)

        def add(engine: Engine) -> None:
            state = engine.request_state(request_id)
            if state is not None and state.sink is sink:
                owner.output = state.output  # The call was interrupted and runs again.
                return
            owner.output = engine.add(checked)

        with self._counted_as_adding(checked.background):
            try:
                await self._call(add)
            except BaseException:
                self.leave(request_id, sink)  # It may already have been added.
                raise

    def leave(self, request_id: str, sink: UpdateSink) -> None:
        """Ends the request of a sink if it is unfinished. Never waits."""
        self._thread.abort(request_id, sink)

    async def generate(
        self,
        prompt: str | Sequence[int] | Mapping[str, Any],
        params: SamplingParams | None = None,
        **options: Any,
    ) -> RequestOutput:
        """Returns the whole answer of a request; see `add_request`."""
        stream = await self.add_request(prompt, params, **options)
        return await stream.result()

    async def abort(self, request_id: str) -> bool:
        """Ends a request; its stream ends with "abort". Returns True if it was unfinished."""
        return await self._call(lambda engine: engine.abort(request_id))

    async def reset_prefix_cache(self) -> int:
        """Empties the prefix cache; returns the number of blocks that it held."""
        return await self._call(lambda engine: engine.reset_prefix_cache())

    async def add_lora(self, request: LoRARequest) -> None:
        """See `EngineClient.add_lora`."""
        add = self.engine.intake.add_lora
        await asyncio.get_running_loop().run_in_executor(None, add, request)

    async def remove_lora(self, request: LoRARequest) -> None:
        """See `EngineClient.remove_lora`."""
        self.engine.intake.remove_lora(request)

    async def stats(self) -> EngineStats:
        """Returns the engine's statistics, taken between two steps."""
        return await self._call(lambda engine: engine.stats())

    async def shutdown(self, drain_timeout: float = 0.0) -> None:
        """See `EngineClient.shutdown`."""
        self._thread.stop(drain_timeout)
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join)
        atexit.unregister(self._at_exit)
        if self.is_ready:
            self.engine.intake.close()

    async def __aenter__(self) -> AsyncEngine:
        await self.ready()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        await self.shutdown()

    # Parts.

    async def _call(self, function: Callable[[Engine], T]) -> T:
        """Runs a function on the engine's thread, between two steps."""
        future: Future[T] = self._thread.submit(function)
        return await asyncio.wrap_future(future)

    @contextlib.contextmanager
    def _counted_as_adding(self, background: bool) -> Iterator[None]:
        """Counts a request until the engine's thread accepts it, which a long step may delay.

        Raises:
            EngineOverloadedError: `max_num_waiting` requests are already on their way.
        """
        limit = self.info.config.max_num_waiting
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
        # A thread inside MLX during interpreter shutdown would crash.
        with contextlib.suppress(ForkedProcessError):
            self._thread.stop(0.0)
            self._thread.join(timeout=_EXIT_TIMEOUT)
