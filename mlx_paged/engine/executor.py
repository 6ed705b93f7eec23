"""StepExecutor: runs steps so that a fault ends only the sequences that it affects.

The sequences of a step are independent: none writes what another reads, and writing the same keys
and values to the same slots twice changes nothing. So a step that failed is run again in parts. The
scheduler does not see this: it planned one step and gets that step's tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass

from mlx_paged import ops
from mlx_paged.core import (
    BlockCopy,
    ScheduledMedia,
    ScheduledSequence,
    SchedulerOutput,
    StateMove,
)
from mlx_paged.core.media import outside
from mlx_paged.engine.active_wait import ActiveWait
from mlx_paged.engine.faults import is_out_of_memory, reason_of
from mlx_paged.engine.media.encoder_cache import RejectedItem
from mlx_paged.engine.runner import LaunchedStep, ModelRunner, ModelRunnerOutput

logger = logging.getLogger(__name__)

# A part of a step: (place in the step, the sequence or a piece of its tokens).
Part = tuple[tuple[int, ScheduledSequence], ...]

# Steps without a fault after which a limit set by a lack of memory is doubled.
_STEPS_UNTIL_LARGER = 64


@dataclass
class PendingStep:
    """A step between launch and read; `launched` is None where it will run when it is read."""

    output: SchedulerOutput
    launched: LaunchedStep | None


class StepExecutor:
    """Launches and reads steps; neither raises for a fault of the device or the model.

    What a sequence's sampler raises is a fault of the step like any other. (A token mask that
    raises concerns its row only, see `apply_edits`.)

    Attributes:
        max_rows: Most rows of one launch, since memory ran out; None: any number.
        num_faults: Steps, or parts of them, that failed.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._wait_actively = ActiveWait(runner.model.platform)
        self._num_good_steps = 0
        self._rows_too_many = 0
        self.max_rows: int | None = None
        self.num_faults = 0

    def launch(self, output: SchedulerOutput, previous: PendingStep | None) -> PendingStep:
        """Starts a step on the device; returns at once.

        Args:
            previous: the step before, if it has not been read yet. It must have been launched: see
                `PendingStep`.
        """
        if self.max_rows is not None and output.num_tokens > self.max_rows:
            return PendingStep(output, None)
        before = None if previous is None else previous.launched
        try:
            return PendingStep(output, self._runner.launch(output, before))
        except Exception as error:
            if not isinstance(error, RejectedItem):  # (it is no fault of the device)
                self._note(error, output.num_tokens)
            _reset_samplers(output.sequences)
            return PendingStep(output, None)

    def read(self, step: PendingStep, following: PendingStep | None) -> ModelRunnerOutput:
        """Waits for a step and returns its results.

        Args:
            following: the step launched after it. If this step fails, so did that one: it will run
                when it is read.
        """
        num_faults = self.num_faults
        result = self._read_launched(step, following)
        if result is None:
            result = self._run_in_parts(step.output)
        if self.num_faults == num_faults:
            self._count_good_step()
        return result

    def _read_launched(
        self, step: PendingStep, following: PendingStep | None
    ) -> ModelRunnerOutput | None:
        if step.launched is None:
            return None
        try:
            self._wait_actively(step.launched.results[0])
            return self._runner.read(step.launched)
        except Exception as error:
            self._note(error, step.output.num_tokens)
            self._runner.abandon(step.launched)
            if following is not None:
                following.launched = None
            return None

    def wait(self, step: PendingStep) -> None:
        """Waits for a step that another thread launched; `read` finds out whether it failed."""
        if step.launched is not None:
            with suppress(Exception):
                self._runner.wait(step.launched)

    def reset(self) -> None:
        """Drops all steps that were launched, and waits until the device is idle."""
        self._runner.reset()

    # Steps that failed, or that are too large for the memory there is.

    def _run_in_parts(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Runs a step at once, cut in two wherever it fails, until what fails is one sequence's,
        twice."""
        result = ModelRunnerOutput([None] * len(output.sequences))
        parts = [_with_known_tokens(output)]
        tried_alone: set[int] = set()
        while parts:
            part = parts.pop()
            if not part:
                continue
            num_rows = sum(s.num_tokens for _, s in part)
            halves = _halves(part)
            if self.max_rows is not None and num_rows > self.max_rows and len(halves) > 1:
                parts += reversed(halves)
                continue
            place, first = part[0]
            try:
                _merge(result, part, self._run_now(output, part))
                continue
            except RejectedItem as error:
                logger.info("an item of a prompt was rejected: %s", error, exc_info=error.__cause__)
                _reset_samplers([s for _, s in part])
                rejected = {at for at, s in part if _has_item(s, error.key)} or {place}
                result.failures += [(at, error) for at in sorted(rejected)]
                parts = [_without(each, rejected) for each in (*parts, part)]
                continue
            except Exception as error:
                self._note(error, num_rows)
                _reset_samplers([s for _, s in part])
                if not _is_state_spent(first):
                    if len(part) > 1 or (len(halves) > 1 and is_out_of_memory(error)):
                        parts += reversed(halves)
                        continue
                    if place not in tried_alone:
                        tried_alone.add(place)
                        parts.append(part)
                        continue
                result.failures.append((place, reason_of(error)))
                parts = [p for p in parts if p[0][0] != place]
        return result

    def _run_now(self, output: SchedulerOutput, part: Part) -> ModelRunnerOutput:
        # A copy goes with the sequence that continues its target: made later, it would undo what
        # that sequence wrote.
        size = self._runner.block_size
        begun = [s for place, s in part if s.start == output.sequences[place].start]
        copies = tuple(
            _made_for(copies, [s.tables[group].blocks[s.start // size] for s in begun])
            for group, copies in enumerate(output.block_copies)
        )
        sequences = tuple(s for _, s in part)
        # (What the step gave up is gone by now.)
        media = None if output.media is None else ScheduledMedia((), output.media.encoded)
        again = SchedulerOutput(output.step, sequences, copies, media)
        launched = self._runner.launch(again, None)
        try:
            return self._runner.read(launched)
        except Exception:
            self._runner.abandon(launched)
            raise

    # Limits.

    def _note(self, error: Exception, num_rows: int) -> None:
        self.num_faults += 1
        self._num_good_steps = 0
        logger.warning("a step of %d rows failed: %s", num_rows, reason_of(error))
        logger.debug("where it failed", exc_info=error)
        ops.make_room()
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
                self.max_rows = None  # there may be more memory by now


def _has_item(scheduled: ScheduledSequence, key: bytes) -> bool:
    media = scheduled.sequence.media
    return media is not None and key in media.keys


def _without(part: Part, places: Collection[int]) -> Part:
    return tuple(each for each in part if each[0] not in places)


def _reset_samplers(sequences: Iterable[ScheduledSequence]) -> None:
    """Recounts tokens: a sampler may have raised in the middle of counting."""
    for s in sequences:
        s.sequence.sampler.start_over()


def _with_known_tokens(output: SchedulerOutput) -> Part:
    """A whole step, with the tokens that were in flight when it was planned.

    (The step before it has been read and committed.)
    """
    part = []
    for place, s in enumerate(output.sequences):
        if s.sequence.is_finished:
            continue  # its token would be discarded
        if s.awaits_token:
            s = s._replace(token_ids=(s.sequence.tokens[s.start],), input_from=-1)
        tables = tuple(table._replace(dirty_from=0) for table in s.tables)
        part.append((place, s._replace(tables=tables)))
    return tuple(part)


def _merge(result: ModelRunnerOutput, part: Part, found: ModelRunnerOutput) -> None:
    """Adds the results of a part of a step to those of the step."""
    for (place, _), token in zip(part, found.sampled_token_ids):
        if token is not None:
            result.sampled_token_ids[place] = token
    result.failures += [(part[i][0], reason) for i, reason in found.failures]
    result.logprobs += [(part[i][0], position) for i, position in found.logprobs]
    result.prompt_logprobs += found.prompt_logprobs
    result.pooled += found.pooled


def _made_for(copies: tuple[BlockCopy, ...], targets: Collection[int]) -> tuple[BlockCopy, ...]:
    return tuple(copy for copy in copies if copy.dst in targets)


def _is_state_spent(scheduled: ScheduledSequence) -> bool:
    """True if the state that it begins with may be overwritten: that of a second part."""
    state = scheduled.state
    return state is not None and state.read == state.write


def _halves(part: Part) -> list[Part]:
    """Two parts, to be run in this order: by sequences, or one sequence by its tokens.

    What cannot be cut is returned whole: one token, or a media item whose positions see each other.
    """
    if len(part) > 1:
        middle = len(part) // 2
        return [part[:middle], part[middle:]]
    [(place, s)] = part
    middle = _middle(s)
    if middle == 0:
        return [part]
    head = s._replace(token_ids=s.token_ids[:middle], samples=False)
    tail = s._replace(token_ids=s.token_ids[middle:], start=s.start + middle)
    if s.state is not None:
        # The second part begins where the first one ends.
        tail = tail._replace(state=StateMove(s.state.write, s.state.write))
    return [((place, head),), ((place, tail),)]


def _middle(scheduled: ScheduledSequence) -> int:
    """How many of a sequence's tokens the first of two parts has; 0: it cannot be cut."""
    middle = scheduled.num_tokens // 2
    media = scheduled.sequence.request.prompt_media
    if media is None or not media.atomic:
        return middle
    start = scheduled.start
    before = outside(media.atomic, start + middle)
    if before > start:
        return before - start
    after = next((end for _, end in media.atomic if start + middle < end), start)
    return after - start if after < scheduled.context_len else 0
