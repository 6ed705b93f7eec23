"""LocalClient: runs requests on an engine in this process, stepped by the callers' threads.

The synchronous counterpart of `AsyncEngine`, for `LLM` and the terminal chat.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from mlx_paged.engine import gc_pause
from mlx_paged.engine.client import EngineRequest
from mlx_paged.engine.config import EngineConfig
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.guard import check_process
from mlx_paged.engine.outputs import RequestOutput, SequenceUpdate
from mlx_paged.engine.ranks.start import make_engine
from mlx_paged.errors import ForkedProcessError, InvalidParameterError, MlxPagedError
from mlx_paged.kernels import OnKernel
from mlx_paged.model.loader import LoadedModel

# Seconds between checks whether another thread's steps have finished this batch.
_TURN = 0.001


class LocalClient:
    """Runs batches of requests. Several threads may call it; their requests share steps.

    An exception inside a batch, such as Ctrl-C, ends its requests; the next batch works
    (`Engine.recover`). A forked child process gets `ForkedProcessError`.

    Attributes:
        engine: The engine.
    """

    def __init__(self, engine: Engine) -> None:
        # No `gc.freeze` as on `AsyncEngine`'s thread: it would affect the whole process and keep a
        # dropped engine alive. `gc_pause` keeps collections out of steps.
        self.engine = engine
        self.request_ids = map(str, itertools.count())
        self.turn = threading.RLock()  # held by a thread that waits to add a request
        self._abandoned: deque[Batch] = deque()  # batches whose requests must be ended
        self._is_finalizing = sys.is_finalizing  # bound now, because `end` may run without globals

    @classmethod
    def from_model(
        cls,
        model: str | Path | LoadedModel | None = None,
        *,
        dtype: str = "auto",
        on_kernel: OnKernel | None = None,
        **options: Any,
    ) -> LocalClient:
        """Loads a model and makes its engine; see `LLM`."""
        check_process()
        config = EngineConfig(**options)
        if config.role == "prefill":
            expected = "None or 'decode' (only a server's engine runs by itself)"
            raise InvalidParameterError("role", expected, config.role)
        return cls(make_engine(model, config, dtype=dtype, on_kernel=on_kernel))

    def batch(self, *, streams: bool = False) -> Batch:
        """Returns an empty batch, a context manager that ends its unfinished requests.

        Args:
            streams: Keep the updates of its requests for `Batch.steps`.
        """
        check_process()
        self._end_abandoned()
        return Batch(self, _Inbox() if streams else None)

    def step(self) -> None:
        """Steps the engine, unless another thread is doing so: any step serves all batches.

        Batches of one thread may overlap too (a `generate` inside a `stream`). Each gets its
        updates in its own inbox, whichever of them steps.
        """
        if self.engine.is_busy:
            time.sleep(_TURN)
            return
        with self.turn:  # Threads that wait to add a request go first.
            pass
        with gc_pause.gc_paused():
            self.engine.step()

    def end(self, batch: Batch) -> None:
        """Ends the unfinished requests of a batch.

        Does nothing for a stream that is still open when the interpreter drops all objects.
        """
        if self._is_finalizing():
            return
        self._abandoned.append(batch)
        gc_pause.resume_gc()  # An exception from outside may have skipped the step's own call.
        with suppress(ForkedProcessError):  # A child drops a stream that it inherited.
            self._end_abandoned()
        for output in batch.outputs:
            output.decode_text()

    def _end_abandoned(self) -> None:
        """Ends the requests of abandoned batches. Separate from `end`, which may be interrupted."""
        for batch in list(self._abandoned):
            if not batch.finished:
                for request_id in batch.request_ids:
                    self.engine.abort(request_id)
            if not self.engine.is_busy:  # Otherwise the stepping thread cleans up.
                self.engine.synchronize()
            with suppress(ValueError):  # Another thread removed it.
                self._abandoned.remove(batch)


class Batch:
    """The requests of one call, see `LocalClient.batch`.

    Attributes:
        request_ids: Ids of all requests that may have been added.
        outputs: Outputs of the requests known to have been added.
    """

    def __init__(self, client: LocalClient, inbox: _Inbox | None) -> None:
        self._client = client
        self._inbox = inbox
        self.request_ids: list[str] = []
        self.outputs: list[RequestOutput] = []

    def submit(self, request: EngineRequest, field: str = "prompt") -> RequestOutput:
        """Adds a request; returns its output, which later steps fill.

        Args:
            field: Name of the prompt in errors.

        Raises:
            MlxPagedError: See `EngineClient.submit`.
        """
        client, request_id = self._client, request.request_id
        if request_id is None:
            request_id = next(client.request_ids)
        checked = client.engine.intake.process(request, request_id, self._inbox, field=field)
        self.request_ids.append(request_id)  # First, in case an interrupt follows the add.
        try:
            with client.turn:
                output = client.engine.add(checked)
        except MlxPagedError:  # Refused; its id may belong to another request.
            self.request_ids.pop()
            raise
        self.outputs.append(output)
        return output

    @property
    def finished(self) -> bool:
        """True if all its requests have ended."""
        return len(self.outputs) == len(self.request_ids) and all(
            output.finished for output in self.outputs
        )

    def run(self) -> list[RequestOutput]:
        """Steps the engine until all requests have ended; returns their outputs."""
        while not self.finished:
            self._client.step()
        return self.outputs

    def steps(self) -> Iterator[list[SequenceUpdate]]:
        """Steps the engine until all requests have ended; yields the new updates after each step.

        `SequenceUpdate.request_id` is the index of the request in the batch, from "0".
        """
        assert self._inbox is not None
        index_of = {request_id: str(i) for i, request_id in enumerate(self.request_ids)}
        while self._inbox or not self.finished:
            yield [u._replace(request_id=index_of[u.request_id]) for u in self._inbox.take()]
            if not self.finished:
                self._client.step()

    def close(self) -> None:
        """Ends the unfinished requests; leaving the ``with`` block does the same."""
        self._client.end(self)

    def __enter__(self) -> Batch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._client.end(self)


class _Inbox(deque[SequenceUpdate]):
    """Unread updates of one batch."""

    def __init__(self) -> None:
        super().__init__()
        self._ended: set[tuple[str, int]] = set()

    def put(self, update: SequenceUpdate) -> None:
        if update.finish_reason is not None:
            sequence = update.request_id, update.index
            if sequence in self._ended:
                return  # See `UpdateSink.put`.
            self._ended.add(sequence)
        self.append(update)

    def take(self) -> Iterator[SequenceUpdate]:
        """Removes and yields the updates."""
        while self:
            yield self.popleft()
