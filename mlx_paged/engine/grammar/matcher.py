"""GrammarMatcher: one answer's position in its grammar, and the tokens that may follow."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import Enum
from functools import cache

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher

from mlx_paged.engine.grammar.compiler import CompiledGrammar
from mlx_paged.engine.grammar.schema_errors import one_line
from mlx_paged.parsing.reasoning import Reasoning, ReasoningTokens

Words = npt.NDArray[np.int32]

# Fewer masks than this are computed on the calling thread, because waking others takes longer.
_MIN_PARALLEL_MASKS = 4


class _Phase(Enum):
    BEGINNING = 0  # The answer may begin with reasoning, or not.
    REASONING = 1
    ENDING = 2  # the budget is spent: the end of the reasoning is forced
    ANSWER = 3


class GrammarRules:
    """State shared by the matchers of a request's answers.

    Args:
        grammar: None allows any answer; then there is a budget for its reasoning.
        reasoning: The model's reasoning markers; None applies the grammar from the first token on.
        begins: How the prompt lets an answer begin.
        budget: Maximum tokens of reasoning; None means no limit.
        eos_token_ids: The model's tokens that end a text.
        stop_token_ids: The request's tokens that end the answer. They may follow when the grammar
            is complete.
        min_tokens: `stop_token_ids` are ignored before the answer has this many tokens.
        ignore_eos: Do not end if the grammar lets the answer continue.
        num_words: int32 words of a mask.
    """

    def __init__(
        self,
        grammar: CompiledGrammar | None,
        *,
        reasoning: ReasoningTokens | None = None,
        begins: Reasoning = Reasoning.OVER,
        budget: int | None = None,
        eos_token_ids: Collection[int] = (),
        stop_token_ids: Collection[int] = (),
        min_tokens: int = 0,
        ignore_eos: bool = False,
        num_words: int,
    ) -> None:
        self.grammar = grammar
        self.reasoning = reasoning
        self.begins = Reasoning.OVER if reasoning is None else begins
        self.budget = budget
        self.min_tokens = min_tokens
        self.ignore_eos = ignore_eos
        num_tokens = 32 * num_words
        self.eos = [token for token in eos_token_ids if 0 <= token < num_tokens]
        self.stops = [
            token for token in stop_token_ids if 0 <= token < num_tokens and token not in self.eos
        ]
        self._all = frozenset((*self.eos, *self.stops))
        self._eos = frozenset(self.eos)
        # While a grammar waits for the end of reasoning, the answer must not end.
        self.any_but_ends = np.full(num_words, -1, np.int32)
        _clear(self.any_but_ends, self._all)

    def is_end(self, token: int, num_tokens: int) -> bool:
        """True if a token ends an answer of `num_tokens` tokens, this one included."""
        return token in (self._all if num_tokens >= self.min_tokens else self._eos)


class GrammarMatcher:
    """Follows the tokens of one answer.

    Its state is a function of these tokens. It compares them with the answer and rolls back if the
    answer has others, because a step that runs again may sample another token.

    Attributes:
        failed: Why no mask can be computed; None if one can.
    """

    __slots__ = (
        "_ended",
        "_forced",
        "_is_stopped",
        "_matcher",
        "_num_known",
        "_num_matched",
        "_num_reasoning",
        "_phase",
        "_rules",
        "_seen",
        "_start",
        "_start_at",
        "_tail",
        "failed",
    )

    def __init__(self, rules: GrammarRules, start: int) -> None:
        """Args:
        rules: State shared with the request's other answers.
        start: Number of prompt tokens.
        """
        self._rules = rules
        self._start = start
        self.start_over()

    def start_over(self) -> None:
        """Forgets all tokens, because an exception may have interrupted an update."""
        rules = self._rules
        self._matcher: LLMatcher | None = None
        self._is_stopped = False  # True if the matcher allows nothing more
        self._seen: list[int] = []
        self._num_known = 0  # number of these that were in `tokens` of `follow`, not in `newest`
        self._num_matched = 0  # number of the last ones that the matcher consumed
        self._num_reasoning = 0
        self._forced = 0  # tokens of the forced end that have come
        self._start_at: int | None = None  # tokens of the start marker that have come; None: not it
        self._tail = ""  # end of the reasoning, if its end marker is text
        self._ended = False  # by a token that ends answers
        self.failed: str | None = None
        self._phase = _Phase.ANSWER
        if rules.begins is Reasoning.INSIDE:
            self._phase = _Phase.REASONING
            self._enforce_budget()
        elif rules.begins is Reasoning.MAY_FOLLOW:
            self._phase, self._start_at = _Phase.BEGINNING, 0

    # Following.

    def follow(self, tokens: Sequence[int], newest: Sequence[int] = ()) -> None:
        """Follows the new tokens of the answer.

        Args:
            tokens: Prompt and answer.
            newest: Tokens after these that may turn out to be others: drafts, or one in flight.
        """
        start, seen = self._start, self._seen
        known = len(tokens) - start
        end = known + len(newest)
        # Earlier ones were compared when they came, unless the answer has lost tokens since.
        same = self._num_known - 1 if 0 < self._num_known <= known else 0
        while same < min(len(seen), end):
            token = tokens[start + same] if same < known else newest[same - known]
            if seen[same] != token:
                break
            same += 1
        self._num_known = 0  # until all is done
        self._rollback(len(seen) - same)
        for i in range(len(self._seen), end):
            self._take(tokens[start + i] if i < known else newest[i - known])
        self._num_known = known

    def _rollback(self, count: int) -> None:
        if count == 0:
            return
        kept = self._seen[: len(self._seen) - count]
        if not self._ended and self.failed is None and count <= self._num_matched:
            assert self._matcher is not None
            if self._matcher.rollback(count):
                self._is_stopped = self._matcher.is_stopped()
                self._seen = kept
                self._num_matched -= count
                return
        self.start_over()
        for token in kept:
            self._take(token)

    def _take(self, token: int) -> None:
        self._seen.append(token)
        match self._phase:
            case _Phase.ANSWER:
                self._match(token)
            case _Phase.REASONING:
                self._reason(token)
            case _Phase.ENDING:
                self._forced += 1
                assert self._rules.reasoning is not None
                if self._forced >= len(self._rules.reasoning.forced_end):
                    self._begin_answer()
            case _Phase.BEGINNING:
                self._begin(token)

    def _begin(self, token: int) -> None:
        """Follows the first token: of the start marker, of the answer, or of both."""
        reasoning = self._rules.reasoning
        assert reasoning is not None and self._start_at is not None
        self._match(token)
        if token == reasoning.start[self._start_at]:
            self._start_at += 1
            if self._start_at == len(reasoning.start):
                self._begin_reasoning()
            return
        self._start_at = None
        self._phase = _Phase.ANSWER

    def _begin_reasoning(self) -> None:
        self._phase = _Phase.REASONING
        self._matcher, self._num_matched, self._start_at = None, 0, None
        self._ended, self.failed = False, None
        self._enforce_budget()

    def _reason(self, token: int) -> None:
        reasoning = self._rules.reasoning
        assert reasoning is not None
        if reasoning.end_token is not None:
            if token == reasoning.end_token:
                self._begin_answer()
                return
        else:
            self._tail = (self._tail + reasoning.spelled((token,)))[-reasoning.longest_end :]
            if found := reasoning.end_pattern.search(self._tail):
                self._begin_answer(self._tail[found.end() :].lstrip())
                return
        self._num_reasoning += 1
        self._enforce_budget()

    def _enforce_budget(self) -> None:
        if self._rules.budget is None or self._num_reasoning < self._rules.budget:
            return
        assert self._rules.reasoning is not None
        forced = self._rules.reasoning.forced_end
        self._phase = _Phase.ENDING
        # The part of the end that the model has written already is not written again.
        self._forced = max(
            (k for k in range(1, len(forced)) if tuple(self._seen[-k:]) == forced[:k]), default=0
        )

    def _begin_answer(self, prefix: str = "") -> None:
        """Begins the answer. `prefix` is its text in the last token of the reasoning."""
        self._phase = _Phase.ANSWER
        self._matcher, self._num_matched, self._tail = None, 0, ""
        if prefix and (matcher := self._active_matcher()) is not None:
            tokens = self._rules.grammar.tokenize(prefix)  # type: ignore[union-attr]
            if matcher.try_consume_tokens(tokens) != len(tokens):
                self.failed = f"its reasoning ended with {prefix!r}, with which no answer begins"
            self._is_stopped = matcher.is_stopped()

    def _match(self, token: int) -> None:
        matcher = self._active_matcher()
        if matcher is None or self._ended or self.failed is not None:
            self._num_matched = 0  # Anything after an end is discarded.
            return
        if self._is_stopped or (
            self._rules.is_end(token, len(self._seen))
            and not (token in self._rules.eos and matcher.is_accepting())
        ):
            self._ended = True
        elif matcher.consume_token(token):
            self._num_matched += 1
            self._is_stopped = matcher.is_stopped()
        elif self._phase is not _Phase.BEGINNING:
            self.failed = f"its grammar does not allow a token: {why(matcher)}"
        else:
            self.failed = why(matcher)  # unless it is the start marker's

    def _active_matcher(self) -> LLMatcher | None:
        if self._matcher is None and self._rules.grammar is not None:
            self._matcher = self._rules.grammar.matcher()
            self._is_stopped = self._matcher.is_stopped()
        return self._matcher

    @property
    def num_words(self) -> int:
        """int32 words of its masks."""
        return len(self._rules.any_but_ends)

    @property
    def is_complete(self) -> bool:
        """True if nothing can follow, so the answer ends."""
        if self._phase is not _Phase.ANSWER or self.failed is not None:
            return False
        return self._active_matcher() is not None and (
            self._ended or (self._is_stopped and bool(self._seen))
        )

    # Drafts.

    def forced(self) -> tuple[int, ...]:
        """Returns the tokens that must follow, as far as the grammar leaves no choice.

        Text that must follow has its usual tokens here, though others may spell it, too.
        """
        if self._phase is _Phase.ENDING:
            assert self._rules.reasoning is not None
            return tuple(self._rules.reasoning.forced_end[self._forced :])
        matcher = self._answering()
        return () if matcher is None else tuple(matcher.compute_ff_tokens())

    def num_legal(self, tokens: Sequence[int]) -> int:
        """Returns how many of these tokens may follow. Within reasoning, all do up to a token that
        ends the answer."""
        if self._phase is _Phase.REASONING:
            return next(
                (i for i, t in enumerate(tokens) if self._rules.is_end(t, 1 << 31)), len(tokens)
            )
        matcher = self._answering()
        return 0 if matcher is None else matcher.validate_tokens(list(tokens))

    def _answering(self) -> LLMatcher | None:
        """Returns the matcher, if the answer has prefix and is unfinished."""
        if self._phase is not _Phase.ANSWER or self.failed is not None or self._ended:
            return None
        matcher = self._active_matcher()
        return None if self._is_stopped else matcher

    # Masks.

    def may_limit(self, num_in_flight: int) -> bool:
        """Returns True if the next token may need a mask.

        Args:
            num_in_flight: Number of tokens after those it has followed, 0 or 1.
        """
        rules = self._rules
        if rules.grammar is not None:
            return True
        if self._phase is _Phase.ANSWER or rules.budget is None:
            return False
        if self._phase is _Phase.ENDING:
            return True
        return self._num_reasoning + num_in_flight >= rules.budget

    def begin_mask(self, words: Words) -> LLMatcher | None:
        """Writes the mask of the next token, unless that needs the grammar.

        Args:
            words: ``[num_words]``; untouched if a matcher is returned.

        Returns:
            The matcher that must fill `words` before `end_mask` is called; None if it is written.
        """
        rules = self._rules
        if self._phase is _Phase.ENDING:
            words.fill(0)
            _set(words, (rules.reasoning.forced_end[self._forced],))  # type: ignore[union-attr]
        elif rules.grammar is None:
            words.fill(-1)
        elif self._phase is _Phase.REASONING:
            words[:] = rules.any_but_ends
        elif self.failed is not None:
            words.fill(0)
            if self._phase is _Phase.BEGINNING:  # only the start marker can follow
                self._allow_start(words)
        elif not self._seen:
            words[:] = rules.grammar.first_mask
            self.end_mask(words)
        else:
            matcher = self._active_matcher()
            assert matcher is not None
            if not self._ended and not self._is_stopped:
                return matcher
            words.fill(-1)  # the answer ends: this token is discarded
        return None

    def end_mask(self, words: Words) -> None:
        """Adds tokens to a mask that the grammar does not know."""
        rules, matcher = self._rules, self._active_matcher()
        assert matcher is not None
        if matcher.is_error():
            assert rules.grammar is not None
            rules.grammar.is_spent = True
            self.failed = f"its grammar failed: {why(matcher)}"
            words.fill(0)
            return
        if self._phase is _Phase.BEGINNING:
            self._allow_start(words)
        if (rules.stops or rules.ignore_eos) and matcher.is_accepting():
            if rules.ignore_eos:
                going_on = words.copy()
                _clear(going_on, rules.eos)
                if going_on.any():
                    words[:] = going_on
            _set(words, rules.stops)

    def _allow_start(self, words: Words) -> None:
        assert self._rules.reasoning is not None and self._start_at is not None
        _set(words, (self._rules.reasoning.start[self._start_at],))


def fill_masks(matchers: Sequence[GrammarMatcher], words: Words) -> None:
    """Writes the masks of the next tokens of some answers, in parallel.

    A matcher that `failed` afterwards has an empty mask.

    Args:
        words: ``[len(matchers), num_words]``, contiguous.
    """
    filled: list[tuple[LLMatcher, int]] = []
    for i, matcher in enumerate(matchers):
        backend = matcher.begin_mask(words[i])
        if backend is not None:
            filled.append((backend, i))
    num_bytes = words.shape[1] * words.itemsize
    if len(filled) < _MIN_PARALLEL_MASKS:
        for backend, i in filled:
            backend.unsafe_compute_mask_ptr(words[i].ctypes.data, num_bytes)
    else:
        _executor().unsafe_compute_mask_ptr(filled, words.ctypes.data, num_bytes, len(words))
    for _, i in filled:
        matchers[i].end_mask(words[i])


@cache
def _executor() -> LLExecutor:
    return LLExecutor()


def why(matcher: LLMatcher) -> str:
    """Returns why a matcher is in an error state, in one line."""
    return one_line(matcher.get_error().partition("<state>")[0]) or matcher.stop_reason()


def _set(words: Words, tokens: Collection[int]) -> None:
    bits = words.view(np.uint32)
    for token in tokens:
        bits[token >> 5] |= np.uint32(1 << (token & 31))


def without(words: Words, tokens: Collection[int]) -> Words:
    """Returns a mask without some of its tokens."""
    left = words.copy()
    _clear(left, tokens)
    return left


def _clear(words: Words, tokens: Collection[int]) -> None:
    bits = words.view(np.uint32)
    for token in tokens:
        bits[token >> 5] &= np.uint32(~(1 << (token & 31)) & 0xFFFFFFFF)
