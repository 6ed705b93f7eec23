"""Drafters: they guess the next tokens of a sequence.

A drafter may guess anything: a wrong draft costs time and never changes an answer.
"""

from __future__ import annotations

from typing import Protocol

from mlx_paged.core import Sequence
from mlx_paged.engine.speculation.acceptance import Counts, Draft, Source, kind_of, new_counts
from mlx_paged.engine.speculation.config import SpeculativeConfig
from mlx_paged.engine.speculation.lookup import SequenceIndex, SharedTexts

# Shorter matches are right too seldom.
_MIN_SUFFIX_MATCH = 2


class DraftState:
    """The state of speculation for one sequence.

    Attributes:
        index: Its own tokens, for lookups; None until the first one.
        counts: Its drafts and the accepted ones.
        pending: Drafts whose tokens are not all known yet.
    """

    __slots__ = ("counts", "index", "pending")

    def __init__(self) -> None:
        self.index: SequenceIndex | None = None
        self.counts: Counts = new_counts()
        self.pending: Draft | None = None


class Drafter(Protocol):
    """Guesses the next tokens of sequences whose newest token is known."""

    def draft(self, seq: Sequence, state: DraftState, max_drafts: int) -> Draft | None:
        """Returns at most `max_drafts` tokens (at least 1), or None."""

    def finish(self, seq: Sequence) -> None:
        """Notes that a sequence has ended."""


class LookupDrafter:
    """Drafts what a grammar forces, or what followed when the latest tokens occurred before."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._config = config
        self._is_suffix = config.method == "suffix"
        self._shared = SharedTexts(config.suffix_decoding_max_cached_requests)
        if self._is_suffix:
            least, most = _MIN_SUFFIX_MATCH, config.suffix_decoding_max_tree_depth
        else:
            assert config.prompt_lookup_min is not None and config.prompt_lookup_max is not None
            least, most = config.prompt_lookup_min, config.prompt_lookup_max
        self._min_match, self._max_match = least, max(least, most)

    def draft(self, seq: Sequence, state: DraftState, max_drafts: int) -> Draft | None:
        """See `Drafter`."""
        sampler, tokens, begin = seq.sampler, seq.tokens, len(seq.tokens)
        forced: tuple[int, ...] = sampler.forced(tokens)[:max_drafts]
        if forced:
            return Draft(begin, forced, kind_of(Source.GRAMMAR, 1))
        if state.index is None:
            state.index = SequenceIndex(tokens, seq.request.num_prompt_tokens)
        state.index.update()
        source, least, most = Source.SEQUENCE, self._min_match, self._max_match
        match = state.index.find(min_match=least, max_match=most, max_drafts=max_drafts)
        if self._is_suffix and (match is None or match.length < most):
            least = least if match is None else match.length + 1
            shared = self._shared.of(seq.request.cache_salt).find(
                tokens, min_match=least, max_match=most, max_drafts=max_drafts
            )
            if shared is not None:
                match, source = shared, Source.SHARED
        if match is None:
            return None
        drafts = match.drafts
        if self._is_suffix:
            most = int(self._config.suffix_decoding_max_spec_factor * match.length)
            drafts = drafts[: max(1, most)]
        drafts = sampler.legal(tokens, drafts)
        return Draft(begin, drafts, kind_of(source, match.length)) if drafts else None

    def finish(self, seq: Sequence) -> None:
        """Keeps the answer for later lookups."""
        if self._is_suffix:
            answer = seq.tokens[seq.request.num_prompt_tokens :]
            self._shared.of(seq.request.cache_salt).add(answer)
