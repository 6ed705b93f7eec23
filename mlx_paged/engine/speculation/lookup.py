"""LookupDrafter: drafts the tokens that followed an earlier occurrence of the latest tokens.

An index maps pairs of adjacent tokens to the positions where they end. A prompt's pairs are sorted
once, which takes 12 bytes and some 0.1 us a token. Those of an answer are added one by one.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence

import numpy as np

from mlx_paged.core import Sequence as CoreSequence
from mlx_paged.engine.speculation.acceptance import Draft, Source, kind_of
from mlx_paged.engine.speculation.config import SpeculativeConfig
from mlx_paged.engine.speculation.drafter import Drafter, Wanted
from mlx_paged.engine.speculation.matches import Match, common_length

# Maximum occurrences to compare, latest first. Further ones rarely match longer.
_MAX_CANDIDATES = 16
# Tokens of finished answers that are kept for each salt, and salts.
_MAX_SHARED_TOKENS = 1 << 17
_MAX_SALTS = 16
_NO_TOKEN = 0xFFFFFFFF  # separates texts
# Shorter matches are too often wrong.
_MIN_SUFFIX_MATCH = 2


class SequenceIndex:
    """The pairs of one sequence.

    Args:
        tokens: Prompt and answer, which only grow.
        num_prompt_tokens: Number of tokens that do not change.
    """

    def __init__(self, tokens: array[int], num_prompt_tokens: int) -> None:
        self._tokens = tokens
        prompt = np.array(tokens[:num_prompt_tokens], dtype=np.uint64)
        pairs = (prompt[:-1] << np.uint64(32)) | prompt[1:]
        order = np.argsort(pairs, kind="stable")
        self._prompt_pairs = pairs[order]
        self._prompt_ends = (order + 1).astype(np.int32)
        self._answer_ends: dict[int, list[int]] = {}
        self._num_indexed = num_prompt_tokens

    def update(self) -> None:
        """Adds the new tokens of the answer."""
        tokens, ends = self._tokens, self._answer_ends
        for end in range(max(1, self._num_indexed), len(tokens)):
            ends.setdefault(tokens[end - 1] << 32 | tokens[end], []).append(end)
        self._num_indexed = len(tokens)

    def find(self, *, min_match: int, max_match: int, max_drafts: int) -> Match | None:
        """Returns the longest match of the latest tokens, and the latest of several; or None.

        A draft that reaches the end of the tokens continues with its own beginning, like a text
        that repeats itself.
        """
        tokens = self._tokens
        last = len(tokens) - 1
        if last < 1:
            return None
        best_length, best_end = min_match - 1, -1
        for end in self._ends(tokens[last - 1] << 32 | tokens[last], last):
            length = common_length(tokens, end, tokens, last, max_match)
            if length > best_length:
                best_length, best_end = length, end
                if length >= max_match:
                    break
        if best_end < 0:
            return None
        drafts = list(tokens[best_end + 1 : best_end + 1 + max_drafts])
        while len(drafts) < max_drafts:
            drafts.append(drafts[len(drafts) - (last - best_end)])
        return Match(best_length, tuple(drafts))

    def _ends(self, pair: int, before: int) -> Iterator[int]:
        """The ends of a pair's latest occurrences before a position, the latest first."""
        found = self._answer_ends.get(pair, [])
        left = _MAX_CANDIDATES
        for end in reversed(found):
            if end < before:
                yield end
                left -= 1
                if not left:
                    return
        key = np.uint64(pair)
        stop = int(np.searchsorted(self._prompt_pairs, key, side="right"))
        start = int(np.searchsorted(self._prompt_pairs, key, side="left"))
        for end in self._prompt_ends[max(start, stop - left) : stop][::-1].tolist():
            if end < before:
                yield end


class SharedText:
    """The latest finished answers.

    Args:
        max_answers: Maximum number of answers.
    """

    def __init__(self, max_answers: int) -> None:
        self._max_answers = max_answers
        self._answers: deque[array[int]] = deque()
        self._tokens = array("I")
        self._ends: dict[int, int] = {}  # pair -> end of its latest occurrence

    def add(self, answer: Sequence[int]) -> None:
        """Adds a finished answer."""
        if len(answer) < 3 or not self._max_answers:
            return
        kept = array("I", answer[:_MAX_SHARED_TOKENS])
        self._answers.append(kept)
        is_full = len(self._tokens) + len(kept) > 2 * _MAX_SHARED_TOKENS
        if is_full or len(self._answers) > 2 * self._max_answers:
            self._keep_latest()
        else:
            self._index(kept)

    def _keep_latest(self) -> None:
        num_tokens = 0
        latest: deque[array[int]] = deque()
        for answer in reversed(self._answers):
            num_tokens += len(answer)
            if latest and (num_tokens > _MAX_SHARED_TOKENS or len(latest) == self._max_answers):
                break
            latest.appendleft(answer)
        self._answers, self._tokens, self._ends = latest, array("I"), {}
        for answer in latest:
            self._index(answer)

    def _index(self, answer: array[int]) -> None:
        tokens = self._tokens
        start = len(tokens)
        tokens += answer
        tokens.append(_NO_TOKEN)
        for end in range(start + 1, len(tokens) - 1):
            self._ends[tokens[end - 1] << 32 | tokens[end]] = end

    def find(
        self, tokens: array[int], *, min_match: int, max_match: int, max_drafts: int
    ) -> Match | None:
        """Returns the latest occurrence of a sequence's latest tokens, or None."""
        last = len(tokens) - 1
        end = self._ends.get(tokens[last - 1] << 32 | tokens[last]) if last > 0 else None
        if end is None:
            return None
        length = common_length(self._tokens, end, tokens, last, max_match)
        if length < min_match:
            return None
        drafts = self._tokens[end + 1 : end + 1 + max_drafts].tolist()
        if _NO_TOKEN in drafts:
            del drafts[drafts.index(_NO_TOKEN) :]
        return Match(length, tuple(drafts)) if drafts else None


class SharedTexts:
    """The finished answers of each salt: a tenant's drafts never come from another's answers."""

    def __init__(self, max_answers: int) -> None:
        self._max_answers = max_answers
        self._texts: OrderedDict[str | None, SharedText] = OrderedDict()

    def of(self, salt: str | None) -> SharedText:
        """Returns the answers of a salt."""
        text = self._texts.get(salt)
        if text is None:
            text = self._texts[salt] = SharedText(self._max_answers)
            if len(self._texts) > _MAX_SALTS:
                self._texts.popitem(last=False)
        self._texts.move_to_end(salt)
        return text


class LookupDrafter(Drafter):
    """Drafts the tokens that followed an earlier occurrence of a sequence's latest tokens."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._config = config
        self._is_suffix = config.looks_up_all
        self._shared = SharedTexts(config.suffix_decoding_max_cached_requests)
        if self._is_suffix:
            min_match, max_match = _MIN_SUFFIX_MATCH, config.suffix_decoding_max_tree_depth
        else:
            assert config.prompt_lookup_min is not None and config.prompt_lookup_max is not None
            min_match, max_match = config.prompt_lookup_min, config.prompt_lookup_max
        self._min_match, self._max_match = min_match, max(min_match, max_match)

    def draft(self, wanted: Sequence[Wanted]) -> list[Draft | None]:
        """See `Drafter`."""
        return [self._draft(each) for each in wanted]

    def _draft(self, wanted: Wanted) -> Draft | None:
        seq, state, max_drafts = wanted
        tokens = seq.tokens
        if state.index is None:
            state.index = SequenceIndex(tokens, seq.request.num_prompt_tokens)
        index: SequenceIndex = state.index
        index.update()
        source, min_match, max_match = Source.SEQUENCE, self._min_match, self._max_match
        match = index.find(min_match=min_match, max_match=max_match, max_drafts=max_drafts)
        if self._is_suffix and (match is None or match.length < max_match):
            min_match = min_match if match is None else match.length + 1
            shared = self._shared.of(seq.request.cache_salt).find(
                tokens, min_match=min_match, max_match=max_match, max_drafts=max_drafts
            )
            if shared is not None:
                match, source = shared, Source.SHARED
        if match is None:
            return None
        drafts = match.drafts
        if self._is_suffix:
            limit = int(self._config.suffix_decoding_max_spec_factor * match.length)
            drafts = drafts[: max(1, limit)]
        drafts = seq.sampler.legal(tokens, drafts)
        return Draft(len(tokens), drafts, kind_of(source, match.length)) if drafts else None

    def forget(self) -> None:
        """Forgets all finished answers."""
        self._shared = SharedTexts(self._config.suffix_decoding_max_cached_requests)

    def finish(self, seq: CoreSequence) -> None:
        """Keeps the answer for later lookups."""
        if self._is_suffix:
            answer = seq.tokens[seq.request.num_prompt_tokens :]
            self._shared.of(seq.request.cache_salt).add(answer)
