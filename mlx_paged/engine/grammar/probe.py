"""Probes a grammar with random answers, to find out in advance if it exceeds the limits."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterable
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from mlx_paged.engine.grammar.subschemas import subschemas

#: Tokens of each probe of a grammar.
LENGTHS = (32, 16, 16)

# If masks take long, states may grow without bounds; such answers are followed further.
_SLOW_MASK = 0.01
_MAX_TOKENS = 192
# Seconds of this thread's work for all probes of a grammar, for grammars with slow masks, and for
# grammars whose masks keep getting slower: any long answer would exceed the limits.
_SECONDS, _SECONDS_IF_SLOW, _SECONDS_IF_GROWING = 0.1, 1.0, 3.0
# Minimum number of masks to compare with as many earlier ones; the ratio of their times that counts
# as slower (three if the work grows with each token; noise is far less); and seconds of one mask.
_WINDOW, _GROWTH, _GROWING_MASK = 12, 1.5, 0.002
_COUNTS = re.compile(r"\{\d*,?\d*\}")
_MAX_PATTERNS = 64


class Prober:
    """Writes the beginnings of random answers. A grammar that fails on one must not be accepted.

    Attributes:
        is_endless: True if masks were slow and still getting slower when time ran out.
    """

    def __init__(self) -> None:
        self.is_endless = False
        self._began = time.thread_time()

    def run(
        self, matcher: LLMatcher, first_mask: npt.NDArray[np.int32], seed: int, length: int
    ) -> LLMatcher:
        """Returns a matcher after the beginning of an answer; it may have failed.

        Args:
            matcher: A matcher at the beginning of an answer, which is returned.
            first_mask: ``[num_words]``; tokens that may come first.
            length: Number of tokens to follow.
        """
        words, rng = first_mask.copy(), random.Random(seed)
        times: list[float] = []
        for num_tokens in range(1, _MAX_TOKENS):
            taken = np.flatnonzero(words)
            word = int(taken[rng.randrange(len(taken))])
            bits = int(words[word]) & 0xFFFFFFFF
            token = rng.choice([32 * word + bit for bit in range(32) if bits >> bit & 1])
            before = time.thread_time()
            if not matcher.consume_token(token) or matcher.is_stopped():
                break
            matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            now = time.thread_time()
            times.append(now - before)
            typical = _typical(times[-_WINDOW:])
            is_slow = typical > _SLOW_MASK
            # Growth shows after a window of masks, which takes over `_SECONDS` on a slow machine.
            may_grow = len(times) <= _WINDOW and typical > _GROWING_MASK
            limit = _SECONDS_IF_SLOW if is_slow or may_grow else _SECONDS
            if is_growing := _is_growing(times):
                limit = _SECONDS_IF_GROWING
            is_late = now - self._began > limit
            self.is_endless = is_growing and is_slow and is_late
            is_done = num_tokens >= length and not (is_slow or is_growing)
            if matcher.is_error() or is_done or is_late:
                break
        return matcher


def _is_growing(times: list[float]) -> bool:
    """True if masks are getting slower, by more than noise."""
    if len(times) <= _WINDOW or _typical(times[-_WINDOW:]) <= _GROWING_MASK:
        return False
    half = len(times) // 2
    return half < _WINDOW or _typical(times[half:]) > _GROWTH * _typical(times[:half])


def _typical(times: list[float]) -> float:
    """Returns the median of masks, without those between the bytes of a character, which take no
    time. Some may take far longer than the others: when memory is given to the process, say."""
    long = sorted(times)[int(0.8 * len(times))]
    return median(each for each in times if each >= 0.1 * long)


def counting_patterns(schemas: Iterable[Any]) -> list[str]:
    """Returns the patterns in schemas that count repetitions, which may have many states."""
    found: dict[str, None] = {}
    for schema in schemas:
        for _, each in subschemas(schema):
            by_pattern = each.get("patternProperties")
            given = [each.get("pattern"), *(by_pattern if isinstance(by_pattern, dict) else ())]
            found |= {p: None for p in given if isinstance(p, str) and _COUNTS.search(p)}
    return list(found)[:_MAX_PATTERNS]
