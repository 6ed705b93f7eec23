"""StepExecutor: runs steps so that a fault ends the sequences that it belongs to, and no others.

The rows of a step are independent: none writes what another reads, and writing the same keys and
values to the same slots twice changes nothing. So a step that failed is run again in parts. The
scheduler never hears of it: it planned one step and gets that step's tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import mlx.core as mx

from mlx_paged.core import Batch, BlockCopy, ScheduledSequence, StateMove
from mlx_paged.engine.faults import NOT_A_NUMBER, is_out_of_memory, reason_of
from mlx_paged.engine.runner import LaunchedStep, ModelRunner
from mlx_paged.engine.sampler import SamplingRows
from mlx_paged.engine.sampling.prompt_report import PromptTargets

logger = logging.getLogger(__name__)

Rows = tuple[ScheduledSequence, ...]

# Steps without a fault after which a limit set by a lack of memory is doubled.
_STEPS_UNTIL_LARGER = 64


@dataclass
class PendingStep:
    """A step between launch and read; `launched` is None where it will run when it is read."""

    batch: Batch
    launched: LaunchedStep | None


@dataclass(frozen=True)
class StepResult:
    """What a step brought.

    Attributes:
        tokens: Sampled token by seq_id.
        failures: Why there is none, by seq_id. These sequences cannot go on.
        parts: The step, or its parts in the order in which they ran.
    """

    tokens: dict[int, int] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    parts: list[LaunchedStep] = field(default_factory=list)

    @property
    def poisoned(self) -> bool:
        """Whether NaNs were met, so that what is in the prefix cache is not to be trusted."""
        return NOT_A_NUMBER in self.failures.values()


class StepExecutor:
    """Launches and reads steps; neither raises for a fault of the device or the model.

    Args:
        sampling_rows, prompt_targets: see `ModelRunner.launch`. What they raise, or a token mask
            does, is a fault of the step like any other.
    """

    def __init__(
        self,
        runner: ModelRunner,
        sampling_rows: Callable[[list[ScheduledSequence]], SamplingRows],
        prompt_targets: Callable[[ScheduledSequence], PromptTargets | None] | None = None,
    ) -> None:
        self._runner = runner
        self._sampling_rows = sampling_rows
        self._prompt_targets = prompt_targets
        self._last_tokens: dict[int, int] = {}  # of the step read last
        self._num_good_steps = 0
        self._rows_too_many = 0
        self.max_rows: int | None = None  # of one launch, since memory ran out
        self.num_faults = 0

    def launch(self, batch: Batch, previous: PendingStep | None) -> PendingStep:
        """Sets the device to work on a step; returns at once.

        Args:
            previous: the step before, if it has not been read yet. It must have been launched: see
                `PendingStep`.
        """
        if self.max_rows is not None and batch.num_tokens > self.max_rows:
            return PendingStep(batch, None)
        before = None if previous is None else previous.launched
        try:
            return PendingStep(batch, self._launch(batch, before))
        except Exception as error:
            self._note(error, batch.num_tokens)
            return PendingStep(batch, None)

    def _launch(self, batch: Batch, previous: LaunchedStep | None) -> LaunchedStep:
        return self._runner.launch(batch, self._sampling_rows, previous, self._prompt_targets)

    def read(self, step: PendingStep, following: PendingStep | None) -> StepResult:
        """Waits for a step and returns what it brought.

        Args:
            following: the step launched after it. If this one fails, so did that one: it will run
                when it is read.
        """
        num_faults = self.num_faults
        result = self._read_launched(step, following)
        if result is None:
            result = StepResult()
            self._run_in_parts(step.batch, result)
        if self.num_faults == num_faults:
            self._count_good_step()
        self._last_tokens = result.tokens
        return result

    def _read_launched(self, step: PendingStep, following: PendingStep | None) -> StepResult | None:
        if step.launched is None:
            return None
        try:
            return _judge(step.launched, self._runner.read(step.launched))
        except Exception as error:
            self._note(error, step.batch.num_tokens)
            self._runner.abandon(step.launched)
            if following is not None:
                following.launched = None
            return None

    # Steps that failed, or that are too large for the memory there is.

    def _run_in_parts(self, batch: Batch, result: StepResult) -> None:
        """Runs a step at once, cut in two wherever it fails, until what fails is one row, twice."""
        parts = [self._with_known_tokens(batch)]
        tried_alone: set[int] = set()
        while parts:
            rows = parts.pop()
            if not rows:
                continue
            num_rows = sum(row.num_tokens for row in rows)
            if self.max_rows is not None and num_rows > self.max_rows:
                parts += reversed(_halves(rows))
                continue
            try:
                part = self._run_now(batch, rows)
            except Exception as error:
                self._note(error, num_rows)
                if _is_state_spent(rows):
                    result.failures[rows[0].seq_id] = reason_of(error)
                    parts = [p for p in parts if p[0].seq_id != rows[0].seq_id]
                elif len(rows) > 1 or (num_rows > 1 and is_out_of_memory(error)):
                    parts += reversed(_halves(rows))
                elif rows[0].seq_id not in tried_alone:
                    tried_alone.add(rows[0].seq_id)
                    parts.append(rows)
                else:
                    result.failures[rows[0].seq_id] = reason_of(error)
                    parts = [p for p in parts if p[0].seq_id != rows[0].seq_id]
            else:
                result.tokens.update(part.tokens)
                result.failures.update(part.failures)
                result.parts.extend(part.parts)

    def _with_known_tokens(self, batch: Batch) -> Rows:
        """The rows, with the tokens that were in flight when they were planned."""
        rows = []
        for row in batch.sequences:
            if row.awaits_token:
                if row.seq_id not in self._last_tokens:
                    continue  # it ended in the step before, for lack of a token
                row = row._replace(token_ids=(self._last_tokens[row.seq_id],))
            windows = tuple(window._replace(dirty_from=0) for window in row.groups.windows)
            rows.append(row._replace(dirty_from=0, groups=row.groups._replace(windows=windows)))
        return tuple(rows)

    def _run_now(self, batch: Batch, rows: Rows) -> StepResult:
        # A copy goes with the row that continues its target: made later, it would undo what that
        # row wrote.
        size = self._runner.block_size
        starts = {row.seq_id: row.start for row in batch.sequences}
        begun = [row for row in rows if row.start == starts[row.seq_id]]
        copies = _made_for(
            batch.block_copies, [row.block_table[row.start // size] for row in begun]
        )
        window_copies = tuple(
            _made_for(
                copies, [row.groups.windows[i].block_table[row.start // size] for row in begun]
            )
            for i, copies in enumerate(batch.window_copies)
        )
        launched = self._launch(Batch(batch.step, rows, copies, window_copies), None)
        try:
            return _judge(launched, self._runner.read(launched))
        except Exception:
            self._runner.abandon(launched)
            raise

    # Limits.

    def _note(self, error: Exception, num_rows: int) -> None:
        self.num_faults += 1
        self._num_good_steps = 0
        logger.warning("a step of %d rows failed: %s", num_rows, reason_of(error))
        logger.debug("where it failed", exc_info=error)
        if is_out_of_memory(error):
            mx.clear_cache()
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
                self.max_rows = None  # what was short then may be there now


def _judge(launched: LaunchedStep, tokens: dict[int, int]) -> StepResult:
    missing = [seq_id for seq_id in launched.sample_index if seq_id not in tokens]
    return StepResult(tokens, dict.fromkeys(missing, NOT_A_NUMBER), [launched])


def _made_for(copies: tuple[BlockCopy, ...], targets: Collection[int]) -> tuple[BlockCopy, ...]:
    return tuple(copy for copy in copies if copy.dst in targets)


def _is_state_spent(rows: Rows) -> bool:
    """Whether the state that these rows begin with may be overwritten: a second part's."""
    state = rows[0].groups.state
    return state is not None and state.read == state.write


def _halves(rows: Rows) -> list[Rows]:
    """Two parts of a step, to be run in this order: by sequences, or one sequence by its tokens."""
    if len(rows) > 1:
        middle = len(rows) // 2
        return [rows[:middle], rows[middle:]]
    [row] = rows
    middle = row.num_tokens // 2
    head = row._replace(token_ids=row.token_ids[:middle], samples=False)
    tail = row._replace(token_ids=row.token_ids[middle:], start=row.start + middle)
    if (state := row.groups.state) is not None:
        # What the first part leaves is where the second one begins.
        tail = tail._replace(groups=tail.groups._replace(state=StateMove(state.write, state.write)))
    return [(head,), (tail,)]
