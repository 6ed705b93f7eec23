"""What one run of an engine was, and the figures of it."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlx_paged.cli.bench.percentiles import latency_figures


@dataclass(frozen=True)
class Answer:
    """What one answer was.

    Attributes:
        token_ids: its tokens; an end token that the model said is one of them.
        times: seconds from the start of the run, when all requests came, to each of the tokens.
        num_cached_tokens: of the prompt, that were not computed.
    """

    token_ids: list[int]
    times: list[float]
    num_cached_tokens: int = 0

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.times[0]

    @property
    def latency(self) -> float:
        """Seconds to the last token."""
        return self.times[-1]

    @property
    def itl(self) -> list[float]:
        """Seconds between a token and the next."""
        return [after - before for before, after in itertools.pairwise(self.times)]

    @property
    def tpot(self) -> float | None:
        """Mean time of the tokens after the first; None where there are none."""
        if len(self.times) < 2:
            return None
        return (self.latency - self.ttft) / (len(self.times) - 1)


@dataclass(frozen=True)
class Run:
    """All requests of a benchmark, done once.

    Attributes:
        seconds: from the first request to the last answer, its text included.
        prompt_lens: tokens of each prompt.
        answers: those of the first prompt, then those of the next.
    """

    seconds: float
    prompt_lens: list[int]
    answers: list[Answer]

    @property
    def num_prompt_tokens(self) -> int:
        """Each prompt counts once, however many answers it has."""
        return sum(self.prompt_lens)

    @property
    def num_output_tokens(self) -> int:
        """Of all answers."""
        return sum(len(answer.token_ids) for answer in self.answers)

    @property
    def num_cached_tokens(self) -> int:
        """Of the prompts, that were not computed."""
        per_prompt = len(self.answers) // len(self.prompt_lens)
        return sum(answer.num_cached_tokens for answer in self.answers[::per_prompt])


def median_run(runs: Sequence[Run]) -> Run:
    """The one whose time is in the middle (of two, the slower one)."""
    return sorted(runs, key=lambda run: run.seconds)[len(runs) // 2]


def rates(run: Run) -> dict[str, Any]:
    """Throughput, under the keys of ``vllm bench throughput``, and what it has beside them."""
    total = run.num_prompt_tokens + run.num_output_tokens
    return {
        "elapsed_time": run.seconds,
        "num_requests": len(run.prompt_lens),
        "total_num_tokens": total,
        "requests_per_second": len(run.prompt_lens) / run.seconds,
        "tokens_per_second": total / run.seconds,
        "total_prompt_tokens": run.num_prompt_tokens,
        "total_output_tokens": run.num_output_tokens,
        "total_cached_tokens": run.num_cached_tokens,
        "output_tokens_per_second": run.num_output_tokens / run.seconds,
    }


def token_latencies(runs: Sequence[Run], shares: Sequence[float]) -> dict[str, float]:
    """TTFT, TPOT, ITL and end-to-end latency over all answers of some runs."""
    answers = [answer for run in runs for answer in run.answers]
    return latency_figures(
        {
            "ttft": [answer.ttft for answer in answers],
            "tpot": [answer.tpot for answer in answers if answer.tpot is not None],
            "itl": [gap for answer in answers for gap in answer.itl],
            "e2el": [answer.latency for answer in answers],
        },
        shares,
    )


def compare(ours: Sequence[Run], theirs: Sequence[Run]) -> dict[str, Any]:
    """One engine beside another, turn by turn.

    Returns:
        ``ratios`` (their seconds over ours, of each turn), ``speedup`` (the median of those),
        ``same_answers`` and ``num_answers`` (of the first turn).
    """
    ratios = [their.seconds / our.seconds for our, their in zip(ours, theirs)]
    pairs = list(zip(ours[0].answers, theirs[0].answers))
    return {
        "ratios": ratios,
        "speedup": statistics.median(ratios),
        "same_answers": sum(our.token_ids == their.token_ids for our, their in pairs),
        "num_answers": len(pairs),
    }
