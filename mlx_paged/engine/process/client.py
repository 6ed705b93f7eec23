"""ProcessEngine: an `EngineClient` whose engine runs in a separate process."""

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
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from mlx_paged.engine.client import EngineInfo, EngineRequest
from mlx_paged.engine.config import EngineConfig
from mlx_paged.engine.detokenizer import IncrementalDetokenizer
from mlx_paged.engine.faults import reason_of
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
    StepUpdates,
    Submit,
    not_for_two_processes,
)
from mlx_paged.engine.process.pipe import Pipe
from mlx_paged.engine.request_stream import Channel, RequestStream, wake_readers
from mlx_paged.engine.sampling.logprobs import LogprobReport
from mlx_paged.engine.sampling_params import SamplingParams
from mlx_paged.engine.stats import EngineStats
from mlx_paged.errors import EngineDeadError, InvalidParameterError
from mlx_paged.kernels import OnKernel
from mlx_paged.parsing.special_tokens import special_token_ids

logger = logging.getLogger(__name__)

# Seconds for the process to exit after its last message before it is killed.
_EXIT_TIMEOUT = 10.0
# Seconds to read the last messages of a process that has exited. Only a process that it forked can
# still hold the pipe open then.
_MESSAGES_TIMEOUT = 1.0
_ENTRY = "mlx_paged.engine.process.entry"


class ProcessEngine:
    """Serves many callers from an engine in a child process; see `EngineClient`.

    The child exits when this process does, however that happens. If the child dies, every call and
    stream raises `EngineDeadError` with the reason.

    Args:
        start: The model and the options of its engine, which are checked here.
        prepare: Called first in the child, for example to configure logging. Pickled by name.

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
                # Ctrl-C is for this process. Not a new session; see `router.process`.
                process_group=0,
            )
        self.pid = self._process.pid
        self._pipe = Pipe(ours)
        self._ready: Future[Ready] = Future()
        self._dead: str | None = None
        self._has_exited = False  # the child, not only its engine
        self._refuses_requests = False
        self._observer: Callable[[int], None] = _ignore
        self._ids = itertools.count()
        self._lock = threading.Lock()
        self._next_number = 0
        self._replies: dict[int, Future[Any]] = {}  # by number
        self._answers: dict[int, RemoteAnswer] = {}  # of unfinished requests, by number
        self._requests: dict[int, RemoteRequest] = {}  # by their first answer's number
        self._sleepers: list[Channel] = []  # readers to wake; only `_receive` uses it
        try:
            self._pipe.send(prepare)
            self._pipe.send(start)
        except BaseException:  # Not every option can be pickled. The child would wait for it.
            self._pipe.close()
            self._process.kill()
            self._process.wait()
            raise
        self._thread = threading.Thread(target=self._receive, name="mlx-paged-pipe", daemon=True)
        self._thread.start()
        self._exited = threading.Event()
        threading.Thread(target=self._watch_exit, name="mlx-paged-exit", daemon=True).start()
        atexit.register(self._at_exit)

    @classmethod
    def from_model(
        cls,
        model: str | None = None,
        *,
        dtype: str = "auto",
        generation_config: Mapping[str, Any] | None = None,
        prepare: Callable[[], object] | None = None,
        make_on_kernel: Callable[[], AbstractContextManager[OnKernel | None]] = nullcontext,
        **options: Any,
    ) -> ProcessEngine:
        """Starts the process, which loads a model (None: the embedded one) into its engine.

        Args:
            model, dtype, generation_config, make_on_kernel: See `AsyncEngine.from_model`; the last
                one is pickled by name.
            prepare: See the class.
            options: Fields of `EngineConfig`.
        """
        return cls(Start(model, dtype, generation_config, options, make_on_kernel), prepare)

    async def ready(self) -> None:
        """Waits until the engine is ready. Raises the error if it could not be created."""
        await asyncio.shield(asyncio.wrap_future(self._ready))

    @property
    def is_alive(self) -> bool:
        """True if the engine accepts requests."""
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
        """A copy of the engine's media processor; once the engine is `ready`."""
        return self._ready.result(0).media

    @property
    def media_prompts(self) -> MediaPrompts:
        """Prepares prompts with media, in this process."""
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
        request_id = request.id_or(self._ids)
        if request.token_mask is not None:
            expected = "None for an engine in a separate process"
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
        """Creates this process's copy of a request, which may get updates from now on."""
        num_answers = request.num_answers
        number = self._take_number(num_answers)
        channel = Channel(asyncio.get_running_loop(), num_answers, self._sleepers)
        remote = RemoteRequest(request_id, number, request, channel, self._report)
        params = request.params
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
        """Drops a request that has ended, or whose reader is gone."""
        remote = self._requests.pop(number, None)
        for i in range(0 if remote is None else len(remote.answers)):
            self._answers.pop(number + i, None)
        return remote

    def _leave(self, number: int) -> None:
        """Ends a request whose reader is gone, if it is unfinished."""
        if self._forget(number) is not None:
            self._pipe.send(Leave(number))

    async def abort(self, request_id: str) -> bool:
        """Ends a request; its stream ends with "abort". Returns True if it was unfinished."""
        return bool(await self._call("abort", request_id))

    async def reset_prefix_cache(self) -> int:
        """Empties the prefix cache; returns the number of blocks that it held."""
        return int(await self._call("reset_prefix_cache"))

    async def add_lora(self, request: LoRARequest) -> None:
        """See `EngineClient.add_lora`."""
        await self._call("add_lora", request)

    async def remove_lora(self, request: LoRARequest) -> None:
        """See `EngineClient.remove_lora`."""
        await self._call("remove_lora", request)

    async def stats(self) -> EngineStats:
        """Returns the engine's statistics, taken between two steps."""
        found: EngineStats = await self._call("stats")
        return found

    async def shutdown(self, drain_timeout: float = 0.0) -> None:
        """See `EngineClient.shutdown`."""
        with contextlib.suppress(EngineDeadError):  # It may already be dead, or die first.
            await self._call("shutdown", drain_timeout)
        await asyncio.get_running_loop().run_in_executor(None, self._end)
        atexit.unregister(self._at_exit)
        if self._ready.done() and self._ready.exception() is None:
            self._media_prompts.close()

    def _end(self) -> None:
        """Waits for the child to exit after its last message."""
        if not self._exited.wait(_EXIT_TIMEOUT):
            self._process.kill()
        self._thread.join()

    def _at_exit(self) -> None:
        self._pipe.close()  # This makes the child exit.
        self._thread.join(_EXIT_TIMEOUT)

    # Calls.

    def _take_number(self, count: int = 1) -> int:
        with self._lock:
            number = self._next_number
            self._next_number += count
            return number

    async def _call(self, method: str, *arguments: Any) -> Any:
        """Calls a method of the child's `AsyncEngine`."""
        return await self._ask(Call(self._take_number(), method, arguments))

    async def _ask(self, message: Submit | Call) -> Any:
        """Sends a message and waits for its reply.

        Raises:
            EngineDeadError: The engine has ended.
        """
        future: Future[Any] = Future()
        is_shutdown = isinstance(message, Call) and message.method == "shutdown"
        with self._lock:
            if self._dead is not None and (self._has_exited or not is_shutdown):
                raise EngineDeadError(self._dead)
            self._replies[message.number] = future
        try:
            try:
                self._pipe.send(message)
            except Exception as error:
                expected = f"values that can be sent to the engine's process ({error})"
                raise InvalidParameterError("request", expected, message[-1]) from error
            return await asyncio.wrap_future(future)
        finally:  # A canceled request may get no reply.
            self._replies.pop(message.number, None)

    # On the receiving thread.

    def _receive(self) -> None:
        try:
            while True:
                self._handle(self._pipe.receive())
                if self._sleepers:
                    wake_readers(self._sleepers)
        except EOFError:
            unusable = None
        except Exception as error:  # Such as a tokenizer whose class cannot be imported here.
            unusable = f"a message of its process cannot be used: {reason_of(error)}"
            if not self._ready.done():
                self._ready.set_exception(not_for_two_processes(error))
        self._has_exited = True
        self._pipe.close()
        reason = self._dead
        if reason is None:
            reason = unusable or f"its process has ended ({self._how_it_ended()})"
            logger.critical("the engine has stopped: %s", reason)
        self._fail_all(reason)

    def _handle(self, message: Any) -> None:
        if isinstance(message, StepUpdates):
            self._apply(message)
        elif isinstance(message, Reply):
            future = self._replies.pop(message.number, None)
            if future is not None and future.set_running_or_notify_cancel():
                if message.error is None:
                    future.set_result(message.value)
                else:
                    future.set_exception(message.error)
        elif isinstance(message, Ready):
            if not self._ready.done():  # Otherwise the engine has died in the meantime.
                self._make_parts(message)
                self._ready.set_result(message)
        elif isinstance(message, Failed):
            if not self._ready.done():
                self._ready.set_exception(message.error)
            self._fail_all(str(message.error))
        else:
            assert isinstance(message, Dead)
            self._fail_all(message.reason)

    def _apply(self, step: StepUpdates) -> None:
        self._refuses_requests = step.refuses_requests
        for count in step.launched:
            self._observer(count)
        answers = self._answers
        for number, token in zip(array("Q", step.numbers), array("q", step.tokens)):
            answer = answers.get(number)
            if answer is not None:  # Otherwise its reader is gone.
                answer.take_token(token)
        for update in step.updates:
            answer = answers.get(update.number)
            if answer is None:
                continue
            answer.take(update)
            if update.finish_reason is not None and answer.request.output.finished:
                self._forget(answer.request.number)

    def _make_parts(self, ready: Ready) -> None:
        """Creates the parts of this process that need the engine's tokenizer and options."""
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
        """Fails all calls and streams."""
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
        if not self._exited.wait(_EXIT_TIMEOUT):
            self._process.kill()
            return "it closed its pipe"
        status: int = self._process.returncode
        return signal.Signals(-status).name if status < 0 else f"exit status {status}"

    # On a thread of its own.

    def _watch_exit(self) -> None:
        """Closes the pipe once the child has exited, so that `_receive` ends in any case."""
        self._process.wait()
        self._exited.set()
        self._thread.join(_MESSAGES_TIMEOUT)
        self._pipe.close()


def _ignore(_: int) -> None:
    pass
