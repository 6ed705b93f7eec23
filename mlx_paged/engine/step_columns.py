"""StepColumns: adds columns to a scheduled batch that the scheduler does not need.

These are sampling settings, prompt tokens to report, and media. They are plain data: nothing in a
batch refers to a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from itertools import compress

import numpy as np
import numpy.typing as npt

from mlx_paged.core import SchedulerOutput, Sequence, StepBatch
from mlx_paged.engine.faults import reason_of
from mlx_paged.engine.sampling.logits_processors import LogitEdits
from mlx_paged.engine.sampling.masks import MaskKey, SequenceMasks
from mlx_paged.engine.sampling.sampler import SamplingMetadata
from mlx_paged.engine.sampling.sequence_sampler import SequenceSampler


class StepColumns:
    """Completes batches.

    Args:
        masks: Makes the masks that the batches name.
        samples: False if a sequence's "token" only means that its prompt has been computed.
        has_media: True if sequences may have media.
    """

    def __init__(self, masks: SequenceMasks, *, samples: bool = True, has_media: bool) -> None:
        self._masks = masks
        self._metadata = MetadataCache(masks)
        self._samples = samples
        self._has_media = has_media

    def reset(self) -> None:
        """Forgets all steps, because an exception may have interrupted one, and ids restart."""
        self._metadata = MetadataCache(self._masks)

    def add_to(self, output: SchedulerOutput) -> None:
        """Fills the columns of a batch that follow from its sequences."""
        batch, sequences = output.batch, output.sequences
        if self._samples:
            positions = np.frombuffer(batch.starts, dtype=np.int64) + np.frombuffer(
                batch.query_lens, dtype=np.int64
            )
            sampled = sequences
            if False in batch.samples:
                sampled = list(compress(sequences, batch.samples))
                positions = positions[np.array(batch.samples)]
            if batch.has_drafts:
                batch.sampling = self._metadata(*_with_drafts(batch, sampled, positions))
            elif sampled:
                batch.sampling = self._metadata(sampled, positions)
            if not batch.is_decode:
                self._add_prompt_targets(output)
        if self._has_media:
            media = [seq.media for seq in sequences]
            if any(each is not None for each in media):
                batch.media_inputs = media

    def _add_prompt_targets(self, output: SchedulerOutput) -> None:
        batch = output.batch
        for index, seq in enumerate(output.sequences):
            length = batch.query_lens[index]
            if seq.prompt_report is None or (length == 1 and batch.samples[index]):
                continue
            start = batch.starts[index]
            found = seq.prompt_report.targets(start, start + length)
            if found is not None:
                batch.prompt_targets.append((index, found))


def _with_drafts(
    batch: StepBatch, sampled: SequenceOf[Sequence], positions: npt.NDArray[np.int64]
) -> tuple[list[Sequence], npt.NDArray[np.int64], list[tuple[int, ...]]]:
    """Returns what each sampled token needs: its sequence, its position, and the drafts before it.

    Args:
        positions: ``[len(sampled)]``, of the last token of each sequence.
    """
    sequences: list[Sequence] = []
    each: list[int] = []
    before: list[tuple[int, ...]] = []
    drafts = compress(batch.drafts(), batch.samples)
    for seq, last, own in zip(sampled, positions.tolist(), drafts):
        for count in range(len(own) + 1):
            sequences.append(seq)
            each.append(last - len(own) + count)
            before.append(own[:count])
    return sequences, np.array(each, dtype=np.int64), before


class MetadataCache:
    """Caches the sampling settings of running sequences between steps.

    For one sequence, only position and edits differ between two steps, so the columns are rebuilt
    only if other sequences are sampled.
    """

    def __init__(self, masks: SequenceMasks) -> None:
        self._masks = masks
        self._samplers: list[SequenceSampler] = []
        self._edited: list[int] = []  # indices of rows with edits
        self._columns = SamplingMetadata.of([])

    def __call__(
        self,
        sampled: SequenceOf[Sequence],
        positions: npt.NDArray[np.int64],
        drafts: SequenceOf[tuple[int, ...]] = (),
    ) -> SamplingMetadata:
        """Returns the metadata of a step that samples these sequences.

        Args:
            sampled: ``[num_sampled]``; a sequence with drafts is there once for each token.
            positions: ``[num_sampled]``, of the tokens to be chosen.
            drafts: ``[num_sampled]``, the drafts before these tokens; empty if there are none.
        """
        samplers = [seq.sampler for seq in sampled]
        if samplers != self._samplers:
            self._columns = SamplingMetadata.of([sampler.row for sampler in samplers])
            self._samplers = samplers
            self._edited = [i for i, sampler in enumerate(samplers) if sampler.has_edits]
            if self._edited:
                self._masks.watch(sampled[i] for i in self._edited)
        edits = []
        for i in self._edited:
            key = MaskKey(sampled[i].seq_id, int(positions[i]), drafts[i] if drafts else ())
            edit = edits_of(sampled[i], key)
            if edit is not None:
                edits.append((i, edit))
        return replace(self._columns, position=positions.astype(np.uint32), edits=edits)


def edits_of(seq: Sequence, key: MaskKey) -> LogitEdits | None:
    """Returns the edits of one token's logits. If making them fails twice, only this sequence
    ends."""
    sampler: SequenceSampler = seq.sampler
    for is_last in (False, True):
        try:
            return sampler.edits(seq.tokens, key)
        except Exception as error:
            sampler.start_over()  # It may have stopped in the middle of counting.
            if is_last:
                return LogitEdits(failure=reason_of(error))
    return None
