"""LearnedCosts: the time of steps with drafts, learned from steps of requests.

Measurements at start apply until steps of a size have been observed. Without a measurement, one
more row is initially expected to take most of the average time per row, as it does where rows cost
most: with quantized weights on a CPU. So only likely drafts are verified at first; if they turn out
cheaper, others follow. Times are relative to steps without drafts around the same time, so they
hold for other contexts.
"""

from __future__ import annotations

from collections import Counter

from mlx_paged.engine.speculation.costs import StepCosts

# Time of a further row, as a share of the average time of a step's rows.
_UNKNOWN = 0.6
_MAX_SHARE = 16.0
_WEIGHT = 0.1
_MAX_RATIO = 3.0
# Steps of a number of rows among which the time of compiling it is divided.
_NUM_REPEATS = 8


class LearnedCosts:
    """See `StepCosts`, whose methods it has.

    Args:
        measured: Costs measured at start; None if that failed.
    """

    def __init__(self, measured: StepCosts | None = None) -> None:
        self._measured = measured
        self._plain: dict[int, float] = {}  # seconds by number of sequences
        # (size of the number of sequences, size of that of drafts) -> share
        self._shares: dict[tuple[int, int], float] = {}
        self._num_seen: Counter[tuple[int, int]] = Counter()  # likewise
        self._compiled = set[int]() if measured is None else set(measured.rows)  # rows
        self._found: dict[int, float] = {}  # seconds by number of sequences, until one is observed

    def seconds(self, num_rows: int, num_seqs: int, context_len: float) -> float:
        """Returns the expected seconds of a step; seconds of unknown length before the first one.

        Args:
            num_rows: Rows of all sequences.
            context_len: Ignored.
        """
        plain = self._found.get(num_seqs)
        if plain is None:
            plain = self._found[num_seqs] = self._plain_seconds(num_seqs)
        num_drafts = num_rows - num_seqs
        if num_drafts <= 0:
            return plain
        longer = self._share(num_seqs, num_drafts) * num_drafts / num_seqs
        measured = self._measured
        if measured is not None and num_rows not in self._compiled:
            before = measured.seconds(num_seqs, num_seqs, measured.context_len)
            longer += measured.compiling / before / _NUM_REPEATS
        return plain * (1 + longer)

    def observe(self, num_rows: int, num_seqs: int, context_len: float, seconds: float) -> None:
        """Learns from a step."""
        self._found.clear()
        size, num_drafts = _size(num_seqs), num_rows - num_seqs
        compiles = num_rows not in self._compiled
        self._compiled.add(num_rows)
        if num_drafts <= 0:
            known = self._plain.get(num_seqs)
            if known is not None:
                ratio = min(max(seconds / known, 1 / _MAX_RATIO), _MAX_RATIO)
                seconds = known * (1 + _WEIGHT * (ratio - 1))
            self._plain[num_seqs] = seconds
            return
        plain = self.seconds(num_seqs, num_seqs, context_len)
        if not self._plain or compiles:
            return
        found = (seconds / plain - 1) * num_seqs / num_drafts
        found = min(max(found, 0.0), _MAX_SHARE)
        key = size, _size(num_drafts)
        before = self._share(num_seqs, num_drafts)
        self._num_seen[key] += 1
        weight = max(_WEIGHT, 1 / (1 + self._num_seen[key]))
        self._shares[key] = before + weight * (found - before)

    def age(self) -> None:
        """Moves the learned times of drafts halfway back to their initial values."""
        self._shares = {
            key: (share + self._initial(*map(_smallest, key))) / 2
            for key, share in self._shares.items()
        }
        self._num_seen.clear()

    def _plain_seconds(self, num_seqs: int) -> float:
        """Seconds of a step without drafts. If none was observed, the guess is low, so that drafts
        end and some are."""
        below = max((n for n in self._plain if n <= num_seqs), default=None)
        above = min((n for n in self._plain if n >= num_seqs), default=None)
        if above is None:
            return 1.0 if below is None else self._plain[below]
        if below is None:
            return self._plain[above] * num_seqs / above
        if below == above:
            return self._plain[above]
        share = (num_seqs - below) / (above - below)
        return (1 - share) * self._plain[below] + share * self._plain[above]

    def _share(self, num_seqs: int, num_drafts: int) -> float:
        size = _size(num_seqs)
        if self._measured is not None:
            learned = self._shares.get((size, _size(num_drafts)))
            return self._initial(num_seqs, num_drafts) if learned is None else learned
        same = {drafts: share for (seqs, drafts), share in self._shares.items() if seqs == size}
        if not same:
            same = {drafts: share for (_, drafts), share in self._shares.items()}
        return _nearest(same, _size(num_drafts), _UNKNOWN)

    def _initial(self, num_seqs: int, num_drafts: int) -> float:
        """Returns the share before any steps of requests."""
        if self._measured is None:
            return _UNKNOWN
        context_len = self._measured.context_len
        plain = self._measured.seconds(num_seqs, num_seqs, context_len)
        drafted = self._measured.seconds(num_seqs + num_drafts, num_seqs, context_len)
        return max(0.0, drafted / plain - 1) * num_seqs / num_drafts


def _size(count: int) -> int:
    """Returns the size class of a number: 1, 2 to 3, 4 to 7, ..."""
    return count.bit_length()


def _smallest(size: int) -> int:
    """Returns the smallest number of a size class."""
    return 1 << (size - 1)


def _nearest(known: dict[int, float], size: int, default: float) -> float:
    """Returns the value of the nearest size class."""
    if not known:
        return default
    return known[min(known, key=lambda each: abs(each - size))]
