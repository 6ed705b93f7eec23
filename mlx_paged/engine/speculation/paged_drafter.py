"""PagedDrafter: a drafter whose keys and values use the block ids of the model.

Its pools follow every change of the model's full-attention blocks (`engine.pool_memory.Companion`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mlx_paged.core import BlockCopy, StepBatch
from mlx_paged.core import Sequence as CoreSequence
from mlx_paged.engine.runner import ModelRunner
from mlx_paged.engine.sampling.masks import SequenceMasks
from mlx_paged.engine.speculation.acceptance import Draft, Source, kind_of
from mlx_paged.engine.speculation.costs import StepCosts
from mlx_paged.engine.speculation.drafter import Drafter, StartedDrafts, Wanted
from mlx_paged.engine.speculation.rounds import DraftRounds

_GREEDY, _SAMPLED = kind_of(Source.MODEL, 1), kind_of(Source.MODEL, 2)


def kind_of_model(seq: CoreSequence) -> int:
    """Returns the kind of a model's drafts for a sequence, see `acceptance.kind_of`."""
    return _GREEDY if seq.sampler.row.temperature == 0 else _SAMPLED


class PagedDrafter(Drafter):
    """Drafts with a model or a head.

    Args:
        runner: Runs it. The drafter owns it from now on.
        masks: Makes the masks of grammars for the runner.
        max_model_len: Maximum tokens of a sequence that it drafts for; None: no limit.
        num_tokens: Size of its vocabulary; it does not have larger token ids.
        more: Run further heads, whose pools have the same block ids.

    Attributes:
        rounds: See `Price`.
        num_tokens: See above.
    """

    drafts_at_once = False

    def __init__(
        self,
        runner: ModelRunner,
        masks: SequenceMasks,
        *,
        max_model_len: int | None,
        num_tokens: int,
        more: Sequence[ModelRunner] = (),
    ) -> None:
        self.runner = runner
        self.rounds: StepCosts | None = None
        self.num_tokens = num_tokens
        self.max_model_len = max_model_len
        self._runs = [DraftRounds(each, masks, num_tokens=num_tokens) for each in (runner, *more)]
        self._run = self._runs[0]

    def kind(self, seq: CoreSequence) -> int:
        """See `Price`."""
        return kind_of_model(seq)

    def draft(self, wanted: Sequence[Wanted]) -> list[Draft | None]:
        """See `Drafter`."""
        return self.begin(wanted).finish()

    def begin(self, wanted: Sequence[Wanted]) -> StartedDrafts:
        """See `Drafter`."""
        raise NotImplementedError

    def launched(self, batch: StepBatch) -> None:
        """See `Drafter`. A block that the model copies is copied before the next draft."""
        self.copied(batch.block_copies[0])

    def reset(self) -> None:
        """See `Drafter`."""
        for run in self._runs:
            run.reset()

    # Its pools.

    @property
    def runners(self) -> list[ModelRunner]:
        """All of its runners."""
        return [run.runner for run in self._runs]

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token in its pools."""
        return sum(runner.model.layout.bytes_per_token() for runner in self.runners)

    def copied(self, copies: Iterable[BlockCopy]) -> None:
        """Records copies of blocks that the model makes."""
        made = list(copies)
        for run in self._runs:
            run.copy_later(made)

    def allocate(self, num_blocks: int) -> None:
        """Allocates new pools."""
        for runner in self.runners:
            runner.allocate(num_blocks)

    def resize(self, num_blocks: int) -> None:
        """Changes the number of blocks; keeps the first ones."""
        for run in self._runs:
            run.make_copies()
            model = run.runner.model
            for group_spec in model.layout.group_specs:
                model.resize(num_blocks, group_spec)

    def discard_blocks(self, runs: Sequence[tuple[int, int]]) -> None:
        """Gives the memory of free blocks back to the system."""
        for run in self._runs:
            run.make_copies()
            model = run.runner.model
            for group_spec in model.layout.group_specs:
                model.discard_blocks(runs, group_spec)
