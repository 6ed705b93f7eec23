"""ProcessEngine: an `EngineClient` whose engine runs in a process of its own."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import logging
import signal
import socket
import subprocess
import sys
import threading
from array import array
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from mlx_paged.engine.client import EngineInfo, EngineRequest
from mlx_paged.engine.config import EngineConfig
from mlx_paged.engine.detokenizer import IncrementalDetokenizer
from mlx_paged.engine.grammar.compiler import GrammarCompiler
from mlx_paged.engine.lora.request import LoRARequest
from mlx_paged.engine.media import MediaPrompts
from mlx_paged.engine.outputs import DeferredText
from mlx_paged.engine.process.answers import RemoteAnswer, RemoteRequest
from mlx_paged.engine.process.messages import (
    Accepted,
    Call,
    Dead,
    Failed,
    Leave,
    Ready,
    Reply,
    Start,
    StepNews,
    Submit,
)
from mlx_paged.engine.process.pipe import Pipe
from mlx_paged.engine.request_stream import Channel, RequestStream, wake_readers
from mlx_paged.engine.sampling.logprobs import LogprobReport
from mlx_paged.engine.sampling_params import SamplingParams
from mlx_paged.engine.stats import EngineStats
from mlx_paged.errors import EngineDeadError, InvalidParameterError
from mlx_paged.kernels import OnKernel
from mlx_paged.parsing.lexer import special_token_ids

logger = logging.getLogger(__name__)

# Seconds for the process to end after its last message, before it is killed.
_GRACE = 10.0
_ENTRY = "mlx_paged.engine.process.entry"


class ProcessEngine:
    """Serves many callers from an engine in a child process, see `EngineClient`.

    The child ends when this process ends, however that happens. If the child ends by itself, every
    call and stream raises `EngineDeadError` with the reason.

    Args:
        start: The model, and the options of its engine. Their values are checked here.
        prepare: Called first in the child, by name. It configures its log, for example.

    Attributes:
        pid: The child's process id.
    """

    def __init__(self, start: Start, prepare: Callable[[], object] | None = None) -> None:
        EngineConfig(**start.options)
        ours, theirs = socket.socketpair()
        # Same sys.path as here, without the working directory.
        code = f"import sys; sys.path[:] = {sys.path!r}; from {_ENTRY} import main; main()"
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                # Ctrl-C is for this process. No session of its own, see `router.process`.
                process_group=0,
            )
        self.pid = self._process.pid
        self._pipe = Pipe(ours)
        self._ready: Future[Ready] = Future()
        self._dead: str | None = None
        self._is_gone = False  # the child, besides its engine
        self._refuses_requests = False
        self._observer: Callable[[int], None] = _ignore
        self._ids = itertools.count()
        self._lock = threading.Lock()
        self._next_number = 0
        self._replies: dict[int, Future[Any]] = {}  # by number
        self._answers: dict[int, RemoteAnswer] = {}  # by number, of unfinished requests
        self._requests: dict[int, RemoteRequest] = {}  # the same, by their first answer's number
        self._sleepers: list[Channel] = []  # whose readers must be woken; only for `_receive`
        self._pipe.send(prepare)
        self._pipe.send(start)
        self._thread = threading.Thread(target=self._receive, name="mlx-paged-news", daemon=True)
        self._thread.start()
        atexit.register(self._at_exit)

    @classmethod
    def from_model(
        cls,
        model: str | None = None,
        *,
        dtype: str = "auto",
        generation_config: Mapping[str, Any] | None = None,
        prepare: Callable[[], object] | None = None,
        make_on_kernel: Callable[[], OnKernel] | None = None,
        **options: Any,
    ) -> ProcessEngine:
        """Starts the process, which loads a model (None: the embedded one) and makes its engine.

        Args:
            model, dtype, generation_config: See `AsyncEngine.from_model`.
            prepare: See the class.
            make_on_kernel: See `Start`.
            options: Fields of `EngineConfig`.
        """
        return cls(Start(model, dtype, generation_config, options, make_on_kernel), prepare)

    async def ready(self) -> None:
        """Waits until the engine is ready. Raises the error if it could not be made."""
        await asyncio.shield(asyncio.wrap_future(self._ready))

    @property
    def is_alive(self) -> bool:
        """True if the engine takes requests."""
        return self._dead is None

    @property
    def refuses_requests(self) -> bool:
        """See `EngineClient.refuses_requests`."""
        return self._refuses_requests

    @property
    def info(self) -> EngineInfo:
        """Properties of the engine that never change; once it is `ready`."""
        return self._ready.result(0).info

    @property
    def tokenizer(self) -> Any:
        """A copy of the engine's tokenizer; once the engine is `ready`."""
        return self._ready.result(0).tokenizer

    @property
    def media(self) -> Any | None:
        """A copy of the engine's processor of media; once the engine is `ready`."""
        return self._ready.result(0).media

    @property
    def media_prompts(self) -> MediaPrompts:
        """Makes prompts with media, in this process."""
        return self._media_prompts

    @property
    def grammar_compiler(self) -> GrammarCompiler:
        """See `EngineClient.grammar_compiler`; it works in this process."""
        if self._compiler is None:
            expected = "'generate' for an engine that generates tokens"
            raise InvalidParameterError("runner", expected, self.info.config.runner)
        return self._compiler

    def observe_steps(self, observer: Callable[[int], None]) -> None:
        """See `EngineClient.observe_steps`; it is called on a thread of this process."""
        self._observer = observer

    async def submit(self, request: EngineRequest) -> RequestStream:
        """See `EngineClient.submit` and `AsyncEngine.submit`."""
        request_id = request.request_id
        if request_id is None:
            request_id = f"request-{next(self._ids)}"
        if not isinstance(request_id, str):
            raise InvalidParameterError("request_id", "a string", request_id)
        if request.token_mask is not None:
            expected = "None for an engine in a process of its own"
            raise InvalidParameterError("token_mask", expected, request.token_mask)
        if self._dead is not None:
            raise EngineDeadError(self._dead)
        await self.ready()
        remote = self._remote(request, request_id)
        number = remote.number
        stream = RequestStream(request_id, remote.channel, lambda: self._leave(number))
        stream.output = remote.output
        try:
            accepted: Accepted = await self._ask(Submit(number, request_id, request))
            remote.accept(accepted, request.prompt)
        except BaseException:
            stream.close()
            raise
        return stream

    def _remote(self, request: EngineRequest, request_id: str) -> RemoteRequest:
        """Makes this process's side of a request, which may get updates from now on."""
        params = request.params or SamplingParams()
        num_answers = params.n if isinstance(params, SamplingParams) else 1
        number = self._take_number(num_answers)
        channel = Channel(asyncio.get_running_loop(), num_answers, self._sleepers)
        remote = RemoteRequest(request_id, number, request.params, channel, self._report)
        text_params = params if isinstance(params, SamplingParams) else SamplingParams()
        remote.answers = [
            RemoteAnswer(
                remote,
                completion,
                DeferredText(
                    request_id,
                    IncrementalDetokenizer.of(self.tokenizer, text_params, self._special),
                    completion.token_ids,
                    0,
                ),
            )
            for completion in remote.output.outputs
        ]
        self._requests[number] = remote
        self._answers.update(enumerate(remote.answers, number))
        return remote

    def _forget(self, number: int) -> RemoteRequest | None:
        """Forgets a request that has ended, or whose reader has gone."""
        remote = self._requests.pop(number, None)
        for i in range(0 if remote is None else len(remote.answers)):
            self._answers.pop(number + i, None)
        return remote

    def _leave(self, number: int) -> None:
        """Ends a request whose reader has gone, if it is unfinished."""
        if self._forget(number) is not None:
            self._pipe.send(Leave(number))

    async def abort(self, request_id: str) -> bool:
        """Ends a request; its stream ends with "abort". Returns True if it was unfinished."""
        return bool(await self._call("abort", request_id))

    async def reset_prefix_cache(self) -> int:
        """Forgets every cached prefix; returns the number of blocks."""
        return int(await self._call("reset_prefix_cache"))

    async def add_lora(self, request: LoRARequest) -> None:
        """See `EngineClient.add_lora`."""
        await self._call("add_lora", request)

    async def remove_lora(self, request: LoRARequest) -> None:
        """See `EngineClient.remove_lora`."""
        await self._call("remove_lora", request)

    async def stats(self) -> EngineStats:
        """The engine's statistics, taken between two steps."""
        found: EngineStats = await self._call("stats")
        return found

    async def shutdown(self, drain_timeout: float = 0.0) -> None:
        """Takes no more requests, and ends when all are finished; after the timeout, aborts them.

        Args:
            drain_timeout: seconds.
        """
        with contextlib.suppress(EngineDeadError):  # It may have ended before, or be done first.
            await self._call("shutdown", drain_timeout)
        await asyncio.get_running_loop().run_in_executor(None, self._end)
        atexit.unregister(self._at_exit)
        if self._ready.done() and self._ready.exception() is None:
            self._media_prompts.close()

    def _end(self) -> None:
        """Waits for the child's end after its last message."""
        try:
            self._process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._thread.join()

    def _at_exit(self) -> None:
        self._pipe.close()  # It ends the child.
        self._thread.join(_GRACE)

    # Calls.

    def _take_number(self, count: int = 1) -> int:
        with self._lock:
            number = self._next_number
            self._next_number += count
            return number

    async def _call(self, method: str, *arguments: Any) -> Any:
        """Calls a method of the engine's `AsyncEngine`."""
        return await self._ask(Call(self._take_number(), method, arguments))

    async def _ask(self, message: Submit | Call) -> Any:
        """Sends a message and waits for its reply.

        Raises:
            EngineDeadError: The engine has ended.
        """
        future: Future[Any] = Future()
        is_end = isinstance(message, Call) and message.method == "shutdown"
        with self._lock:
            if self._dead is not None and (self._is_gone or not is_end):
                raise EngineDeadError(self._dead)
            self._replies[message.number] = future
        try:
            self._pipe.send(message)
        except Exception as error:
            self._replies.pop(message.number, None)
            expected = f"values that the engine's process can get ({error})"
            raise InvalidParameterError("request", expected, message[-1]) from error
        return await asyncio.wrap_future(future)

    # On the thread that receives.

    def _receive(self) -> None:
        try:
            while True:
                self._take(self._pipe.receive())
                if self._sleepers:
                    wake_readers(self._sleepers)
        except EOFError:
            pass
        finally:
            self._is_gone = True
            self._pipe.close()
            reason = self._dead
            if reason is None:
                reason = f"its process has ended ({self._how_it_ended()})"
                logger.critical("the engine has stopped: %s", reason)
            self._fail_all(reason)

    def _take(self, message: Any) -> None:
        if isinstance(message, StepNews):
            self._take_news(message)
        elif isinstance(message, Reply):
            future = self._replies.pop(message.number, None)
            if future is not None and future.set_running_or_notify_cancel():
                if message.error is None:
                    future.set_result(message.value)
                else:
                    future.set_exception(message.error)
        elif isinstance(message, Ready):
            if not self._ready.done():  # Otherwise the engine has died meanwhile.
                self._make_parts(message)
                self._ready.set_result(message)
        elif isinstance(message, Failed):
            self._ready.set_exception(message.error)
            self._fail_all(str(message.error))
        else:
            assert isinstance(message, Dead)
            self._fail_all(message.reason)

    def _take_news(self, news: StepNews) -> None:
        self._refuses_requests = news.refuses_requests
        for count in news.launched:
            self._observer(count)
        answers = self._answers
        for number, token in zip(array("Q", news.numbers), array("q", news.tokens)):
            answer = answers.get(number)
            if answer is not None:  # Otherwise its reader has gone.
                answer.take_token(token)
        for update in news.updates:
            answer = answers.get(update.number)
            if answer is None:
                continue
            answer.take(update)
            if update.finish_reason is not None and answer.request.output.finished:
                self._forget(answer.request.number)

    def _make_parts(self, ready: Ready) -> None:
        """Makes what works on copies of the engine's parts."""
        info, tokenizer = ready.info, ready.tokenizer
        config = info.config
        self._report = LogprobReport(tokenizer)
        self._special = special_token_ids(tokenizer)
        self._media_prompts = MediaPrompts(ready.media, config.media_options, info.media_reason)
        self._compiler = None
        if config.runner == "generate":
            self._compiler = GrammarCompiler(
                tokenizer,
                info.vocab_size,
                tokenizer.eos_token_ids,
                timeout=config.structured_outputs_timeout,
                cache_size=config.structured_outputs_cache_size,
            )

    def _fail_all(self, reason: str) -> None:
        """Ends all calls and streams, since the engine takes no more."""
        error = EngineDeadError(reason)
        with self._lock:
            self._dead = reason
            replies = list(self._replies.items())
        for number, future in replies:
            self._replies.pop(number, None)
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
        if not self._ready.done():
            self._ready.set_exception(error)
        for remote in list(self._requests.values()):
            remote.channel.fail(error)
        wake_readers(self._sleepers)

    def _how_it_ended(self) -> str:
        try:
            status = self._process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return "it closed its pipe"
        return signal.Signals(-status).name if status < 0 else f"exit status {status}"


def _ignore(_: int) -> None:
    pass
