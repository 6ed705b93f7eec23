"""Masks that depend on a row's newest token: grammars and callers' token masks.

The host makes them after the newest token has arrived. A step names them by sequence and position
(`MaskKey`) and asks a `MaskSource` for them, so the step contains no grammar and no callable.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from mlx_paged.core import Sequence as CoreSequence
from mlx_paged.engine.grammar.matcher import GrammarMatcher, Words, fill_masks

#: Tokens that may follow: ``[vocab_size]`` booleans, or (u)int32 with 32 tokens each, lowest bit
#: first.
Mask = npt.NDArray[np.bool_] | npt.NDArray[np.integer]


class MaskKey(NamedTuple):
    """Names the mask of one token.

    Attributes:
        seq_id: The sequence.
        position: The position that the token will have.
        drafts: Drafts before it, after the newest token, which then is known.
    """

    seq_id: int
    position: int
    drafts: tuple[int, ...] = ()


class FilledMasks(NamedTuple):
    """Masks of several rows."""

    words: Words  # [num_rows, num_words of the tokenizer], until the next masks are made
    failed: dict[int, str]  # indices whose mask failed, with the reason; their mask is empty


class MaskSource(Protocol):
    """Makes the masks that a step names."""

    def grammar_masks(self, keys: Sequence[MaskKey], newest: Sequence[int | None]) -> FilledMasks:
        """Returns the tokens that grammars allow. Any thread may call it.

        Args:
            newest: The newest token of each sequence, if it was in flight when the step was built.
        """

    def token_mask(self, key: MaskKey, newest: int | None) -> Mask | None:
        """Returns the tokens that a caller's mask allows; None means all. Raises its exceptions."""


class SequenceMasks:
    """`MaskSource` over the engine's sequences.

    Args:
        num_words: int32 words of a grammar's mask.
    """

    def __init__(self, num_words: int = 0) -> None:
        # Reused, because new memory costs as much as the masks.
        self._words: Words = np.empty((0, num_words), np.int32)
        self._sequences: dict[int, CoreSequence] = {}

    def watch(self, sequences: Iterable[CoreSequence]) -> None:
        """Registers sequences whose masks later steps may name; drops finished ones."""
        kept = {i: seq for i, seq in self._sequences.items() if not seq.is_finished}
        self._sequences = kept | {seq.seq_id: seq for seq in sequences}

    def grammar_masks(self, keys: Sequence[MaskKey], newest: Sequence[int | None]) -> FilledMasks:
        """See `MaskSource`."""
        if len(self._words) < len(keys):
            self._words = np.empty((len(keys), self._words.shape[1]), np.int32)
        words = self._words[: len(keys)]
        # The others have finished, and their tokens are discarded.
        indices = [p for p, key in enumerate(keys) if key.seq_id in self._sequences]
        if len(indices) < len(keys):
            words.fill(-1)
        failed: dict[int, str] = {}
        try:
            # A sequence's matcher follows one draft after another.
            for depth in sorted({len(keys[index].drafts) for index in indices}):
                members = [index for index in indices if len(keys[index].drafts) == depth]
                failed |= self._fill(words, members, keys, newest)
        except BaseException:
            for index in indices:  # It may have stopped in the middle of a sequence.
                self._sequences[keys[index].seq_id].sampler.start_over()
            raise
        return FilledMasks(words, failed)

    def _fill(
        self,
        words: Words,
        indices: list[int],
        keys: Sequence[MaskKey],
        newest: Sequence[int | None],
    ) -> dict[int, str]:
        """Writes the masks of different sequences; returns the reasons of those that failed."""
        samplers = [self._sequences[keys[index].seq_id].sampler for index in indices]
        known = [self._known(keys[index], newest[index]) for index in indices]
        matchers: list[GrammarMatcher] = [
            sampler.follow(*each) for sampler, each in zip(samplers, known)
        ]
        own = words if len(indices) == len(words) else words[indices]
        fill_masks(matchers, own)
        for mask, index, sampler, each in zip(own, indices, samplers, known):
            if sampler.narrows:
                sampler.narrow(mask, *each, keys[index].position)
        if own is not words:
            words[indices] = own
        return {p: m.failed for p, m in zip(indices, matchers) if m.failed is not None}

    def token_mask(self, key: MaskKey, newest: int | None) -> Mask | None:
        """See `MaskSource`."""
        seq = self._sequences.get(key.seq_id)
        if seq is None:
            return None
        tokens, more = self._known(key, newest)
        mask: Mask | None = seq.sampler.token_mask(tokens, more)
        return mask

    def _known(self, key: MaskKey, newest: int | None) -> tuple[Sequence[int], tuple[int, ...]]:
        """Returns a sequence's tokens, and those after them: drafts, or the newest one.

        The newest one is among the tokens if a step runs again after the step before it was
        committed.
        """
        tokens = self._sequences[key.seq_id].tokens
        if key.drafts or newest is None or len(tokens) >= key.position:
            return tokens, key.drafts
        return tokens, (newest,)
