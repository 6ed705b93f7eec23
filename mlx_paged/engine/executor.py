"""Executor: runs the batches of steps. InProcessExecutor runs them on this process's device.

A fault ends only the sequences that it affects. The sequences of a step are independent: none
writes what another one reads, and writing the same keys and values to the same slots twice is
harmless. So a failed step runs again in parts (`engine.step_parts`). The scheduler does not notice:
it planned one step and gets that step's tokens.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
import numpy as np

from mlx_paged import runtime
from mlx_paged.core import StepBatch, StepResult, StepTime
from mlx_paged.core.media import RejectedItem
from mlx_paged.engine.active_wait import ActiveWait
from mlx_paged.engine.faults import reason_of
from mlx_paged.engine.input_tokens import KnownTokens
from mlx_paged.engine.runner import LaunchedStep, ModelRunner
from mlx_paged.engine.step_parts import Part, add_results, cut, halves, is_state_spent, whole
from mlx_paged.platform import is_out_of_memory

logger = logging.getLogger(__name__)

# Number of good steps after which a limit set by a lack of memory doubles.
_STEPS_UNTIL_LARGER = 64
# The measured end of a step is exact if the host waited for it at least this long (seconds), or
# looked at it within this fraction of its time after the launch.
_MIN_WAIT = 0.0002
_SOON = 0.1


class Executor(Protocol):
    """Runs batches in the order of their launches.

    Attributes:
        num_faults: Steps, or parts of steps, that failed.
    """

    num_faults: int

    def launch(self, batch: StepBatch) -> None:
        """Starts a step and returns immediately. It may use tokens of the step before."""

    def read(self) -> StepResult:
        """Waits for the oldest step that has not been read, and returns its results.

        Does not raise for a fault of the device or the model: that ends the sequences it affects.
        """

    def reset(self) -> None:
        """Drops all steps that were launched, and waits until the device is idle."""

    def check(self) -> None:
        """Raises `EngineDeadError` if it can run no more steps. Called about once a second."""


@dataclass(slots=True)
class PendingStep:
    """A step that has not been read.

    Attributes:
        launched: The step on the device; None if it failed or was too large, and must run in parts.
        result: Its results, if it ran in parts before it was read.
        launched_at, returned_at: Times when its launch began and ended.
        time: The time that it took, if it is over and was measured.
    """

    batch: StepBatch
    launched: LaunchedStep | None = None
    result: StepResult | None = None
    launched_at: float = 0.0
    returned_at: float = 0.0
    time: StepTime | None = None


class InProcessExecutor:
    """Runs batches with a `ModelRunner`, on the calling thread.

    Args:
        times_prompts: True if steps with prompts are measured. They then overlap with no others.
        clock: Returns the time in seconds.

    Attributes:
        max_rows: Maximum rows of one launch after memory ran out; None means no limit.
        num_faults: Steps, or parts of steps, that failed.
    """

    def __init__(
        self,
        runner: ModelRunner,
        *,
        times_prompts: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._runner = runner
        self._times_prompts = times_prompts
        self._clock = clock
        self._wait_actively = ActiveWait.on(runner.model.platform)
        self._thread = threading.current_thread()  # the one that launched the pending steps
        self._pending: deque[PendingStep] = deque()
        self._read: PendingStep | None = None  # the step read last
        self._read_at = 0.0  # when that was
        self._num_good_steps = 0
        self._rows_too_many = 0
        self.max_rows: int | None = None
        self.num_faults = 0

    def launch(self, batch: StepBatch) -> None:
        """See `Executor`."""
        self._enter_thread()
        step = PendingStep(batch)
        before = self._pending[-1] if self._pending else None
        if before is not None and before.launched is not None and before.launched.choose:
            self._choose(before)
        if before is not None and before.launched is None and before.result is None:
            # The step before must run in parts first, because this step's inputs are its tokens.
            before.result = self._run_in_parts(before)
        self._pending.append(step)
        if self.max_rows is not None and batch.num_tokens > self.max_rows:
            return
        if before is not None and before.result is not None and before.result.failures:
            return  # it has sequences that ended there, and runs without them
        if before is not None and not (before.batch.is_decode and batch.is_decode):
            self._time(before)
        try:
            previous: LaunchedStep | KnownTokens | None = None
            if before is not None:
                previous = before.launched or _known_tokens(before)
            step.launched_at = self._clock()
            step.launched = self._runner.launch(batch, previous)
            step.returned_at = self._clock()
        except Exception as error:
            if not isinstance(error, RejectedItem):  # not a fault of the device
                self._record_fault(error, batch.num_tokens)

    def read(self) -> StepResult:
        """See `Executor`."""
        self._enter_thread()
        step = self._pending[0]
        num_faults = self.num_faults
        if not step.batch.is_decode:
            self._time(step)
        result = step.result or self._read_launched(step)
        if result is None:
            result = self._run_in_parts(step)
        elif step.launched is not None:
            result.time = step.time
        if self.num_faults == num_faults:
            self._count_good_step()
        if self._runner.media is not None:
            result.feature_sizes = self._runner.media.store.take_sizes()
        now = self._clock()
        result.seconds, self._read_at = now - max(step.launched_at, self._read_at), now
        step.result, step.launched = result, None
        self._read = self._pending.popleft()
        return result

    def reset(self) -> None:
        """See `Executor`."""
        self._pending.clear()
        self._read = None
        self._runner.reset()

    def check(self) -> None:
        """See `Executor`. A fault of this device ends only the sequences it affects."""

    def _choose(self, step: PendingStep) -> None:
        """Samples the tokens of a step, if that has waited for masks from the host."""
        if step.launched is None:
            return
        try:
            step.launched.chosen  # noqa: B018
        except Exception as error:
            self._abandon(step, error)

    def _enter_thread(self) -> None:
        """Waits for steps that another thread launched.

        MLX's streams belong to threads. An operation on this thread's stream must not wait for
        work in flight on another thread's. `read` finds out whether those steps failed.
        """
        thread = threading.current_thread()
        if thread is self._thread:
            return
        for step in self._pending:
            if step.launched is not None:
                with suppress(Exception):
                    self._runner.wait(step.launched)
        self._thread = thread

    def _time(self, step: PendingStep) -> None:
        """Waits for a step and measures it.

        MLX blocks a launch while too much is in flight. If the next step were launched meanwhile,
        the host would learn too late that this one has ended.
        """
        if not self._times_prompts or step.launched is None or step.time is not None:
            return
        began = self._clock()
        try:
            self._runner.wait(step.launched)
        except Exception:
            return  # `read` finds the error again.
        ended = self._clock()
        seconds = ended - step.launched_at
        is_soon = began - step.returned_at <= _SOON * seconds
        step.time = StepTime(seconds, is_exact=is_soon or ended - began >= _MIN_WAIT)

    def _read_launched(self, step: PendingStep) -> StepResult | None:
        if step.launched is None:
            return None
        try:
            if self._wait_actively is not None:
                self._wait_actively(step.launched.chosen.reported)
            return self._runner.read(step.launched)
        except Exception as error:
            self._abandon(step, error)
            return None

    def _abandon(self, step: PendingStep, error: Exception) -> None:
        """Drops the oldest step, which failed, and those that use its tokens. They run again when
        they are read."""
        assert step.launched is not None
        self._record_fault(error, step.batch.num_tokens)
        self._runner.abandon(step.launched)
        for pending in self._pending:
            pending.launched = None

    # Steps that failed, or that are too large for the memory.

    def _run_in_parts(self, step: PendingStep) -> StepResult:
        """Runs a step synchronously, and halves each part that fails, until one sequence has failed
        alone twice."""
        batch = step.batch
        _fill_drafts(batch)
        result = StepResult([[] for _ in batch.seq_ids])
        parts = [whole(batch, set() if self._read is None else _ended(self._read, batch))]
        tried_alone: set[int] = set()
        while parts:
            part = parts.pop()
            if not part:
                continue
            num_rows = sum(piece.num_tokens for piece in part)
            two = halves(batch, part)
            if self.max_rows is not None and num_rows > self.max_rows and len(two) > 1:
                parts += reversed(two)
                continue
            first = part[0]
            try:
                found = self._run_now(cut(batch, part, self._runner.block_size))
                add_results(result, part, found)
                continue
            except RejectedItem as error:
                logger.info("an item of a prompt was rejected: %s", error, exc_info=error.__cause__)
                rejected = {p.seq_index for p in part if _has_item(batch, p.seq_index, error.key)}
                rejected = rejected or {first.seq_index}
                result.failures += [(index, error) for index in sorted(rejected)]
                parts = [_without(each, rejected) for each in (*parts, part)]
                continue
            except Exception as error:
                self._record_fault(error, num_rows)
                if not is_state_spent(batch, first):
                    if len(part) > 1 or (len(two) > 1 and is_out_of_memory(error)):
                        parts += reversed(two)
                        continue
                    if first.seq_index not in tried_alone:
                        tried_alone.add(first.seq_index)
                        parts.append(part)
                        continue
                result.failures.append((first.seq_index, reason_of(error)))
                parts = [p for p in parts if p[0].seq_index != first.seq_index]
        return result

    def _run_now(self, batch: StepBatch) -> StepResult:
        previous = None if self._read is None else _known_tokens(self._read)
        launched = self._runner.launch(batch, previous)
        try:
            return self._runner.read(launched)
        except Exception:
            self._runner.abandon(launched)
            raise

    # Limits.

    def _record_fault(self, error: Exception, num_rows: int) -> None:
        self.num_faults += 1
        self._num_good_steps = 0
        logger.warning("a step of %d rows failed: %s", num_rows, reason_of(error))
        logger.debug("where it failed", exc_info=error)
        runtime.make_room()
        if is_out_of_memory(error):
            self._rows_too_many = num_rows
            self.max_rows = max(1, num_rows // 2)

    def _count_good_step(self) -> None:
        if self.max_rows is None:
            return
        self._num_good_steps += 1
        if self._num_good_steps >= _STEPS_UNTIL_LARGER:
            self._num_good_steps = 0
            self.max_rows *= 2
            if self.max_rows >= self._rows_too_many:
                self.max_rows = None  # There may be more memory by now.


def _fill_drafts(batch: StepBatch) -> None:
    """Waits for drafts in flight. If they failed, the step verifies the placeholders in the batch,
    which are valid guesses."""
    if batch.drafts_in_flight is not None:
        try:
            batch.drafts_in_flight.fill(batch)
        except Exception:
            logger.debug("drafts in flight failed", exc_info=True)
            batch.drafts_in_flight = None


def _known_tokens(step: PendingStep) -> KnownTokens:
    """Returns the tokens of a step with results; 0 for a sequence that has ended.

    A sequence with drafts has as many tokens as it sampled, but they are not needed.
    """
    assert step.result is not None
    found = [
        tokens[-1] if tokens else 0
        for tokens, count in zip(step.result.token_ids, step.batch.num_samples())
        for _ in range(count)
    ]
    tokens = mx.array(np.array(found, dtype=np.int32))
    return KnownTokens(tokens, tokens)


def _ended(before: PendingStep, batch: StepBatch) -> set[int]:
    """Indices of the sequences that ended with an error in the step before."""
    assert before.result is not None
    failed = {before.batch.seq_ids[seq_index] for seq_index, _ in before.result.failures}
    return {i for i, seq_id in enumerate(batch.seq_ids) if seq_id in failed}


def _has_item(batch: StepBatch, index: int, key: bytes) -> bool:
    media = batch.media_inputs[index] if batch.media_inputs else None
    return media is not None and key in media.keys


def _without(part: Part, indices: Collection[int]) -> Part:
    return tuple(piece for piece in part if piece.seq_index not in indices)
