"""Latencies and rates of a benchmark, under vLLM's names."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from mlx_paged.errors import InvalidParameterError

WIDTH = 50
_TITLES = {
    "ttft": ("Time to First Token", "TTFT"),
    "tpot": ("Time per Output Token (excl. 1st token)", "TPOT"),
    "itl": ("Inter-token Latency", "ITL"),
    "e2el": ("End-to-end Latency", "E2EL"),
}


def parse_percentiles(given: str) -> list[float]:
    """Parses comma-separated percentiles, the value of `--metric-percentiles`."""
    try:
        shares = [float(part) for part in given.split(",")]
    except ValueError:
        shares = [-1.0]
    if not all(0 <= share <= 100 for share in shares):
        raise InvalidParameterError("metric_percentiles", "numbers in [0, 100] by commas", given)
    return shares


def percentile(values: Sequence[float], share: float) -> float:
    """Returns a percentile with linear interpolation, like NumPy; 0 without values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = (len(ordered) - 1) * share / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def latency_figures(
    kinds: Mapping[str, Sequence[float]], shares: Sequence[float]
) -> dict[str, float]:
    """Returns mean, median, standard deviation and percentiles in milliseconds, with vLLM's keys.

    Args:
        kinds: Seconds under ``ttft``, ``tpot``, ``itl`` and ``e2el``.
        shares: The percentiles.
    """
    made = {}
    for name, seconds in kinds.items():
        values = [1000 * s for s in seconds]
        made[f"mean_{name}_ms"] = statistics.fmean(values) if values else 0.0
        made[f"median_{name}_ms"] = statistics.median(values) if values else 0.0
        made[f"std_{name}_ms"] = statistics.pstdev(values) if values else 0.0
        for share in shares:
            made[f"p{share:g}_{name}_ms"] = percentile(values, share)
    return made


def time_per_token(ttft: float, latency: float, num_tokens: int) -> float | None:
    """Returns the mean seconds per token after the first; None for a single token."""
    return (latency - ttft) / (num_tokens - 1) if num_tokens > 1 else None


def answer_latencies(answers: Sequence[Any], shares: Sequence[float]) -> dict[str, float]:
    """`latency_figures` of objects that have ``ttft``, ``tpot``, ``itl`` and ``latency``."""
    return latency_figures(
        {
            "ttft": [answer.ttft for answer in answers],
            "tpot": [answer.tpot for answer in answers if answer.tpot is not None],
            "itl": [gap for answer in answers for gap in answer.itl],
            "e2el": [answer.latency for answer in answers],
        },
        shares,
    )


def line(name: str, value: float | int | str) -> str:
    """A line of a table, in the format of vLLM."""
    shown = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{name:<40} {shown:<10}".rstrip()


def latency_lines(made: Mapping[str, Any], shares: Sequence[float]) -> list[str]:
    """Formats the result of `latency_figures` like vLLM."""
    lines = []
    for name, (title, short) in _TITLES.items():
        lines.append(f"{title:-^{WIDTH}}")
        lines.append(line(f"Mean {short} (ms):", made[f"mean_{name}_ms"]))
        lines.append(line(f"Median {short} (ms):", made[f"median_{name}_ms"]))
        lines += [
            line(f"P{share:g} {short} (ms):", made[f"p{share:g}_{name}_ms"]) for share in shares
        ]
    return lines


# --- Runs of an engine ----------------------------------------------------------------------------


class EngineName(StrEnum):
    """The engine that generated the answers."""

    MLX_PAGED = "mlx-paged"
    MLX_LM = "mlx-lm"


@dataclass(frozen=True)
class Answer:
    """One answer.

    Attributes:
        token_ids: Its tokens, including the end token if the model sampled one.
        times: Seconds of each token since the start of the run, when all requests arrived.
        num_cached_tokens: Prompt tokens from the prefix cache.
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
        """Seconds between consecutive tokens."""
        return [after - before for before, after in itertools.pairwise(self.times)]

    @property
    def tpot(self) -> float | None:
        """See `time_per_token`."""
        return time_per_token(self.ttft, self.latency, len(self.times))


@dataclass(frozen=True)
class Run:
    """One run of all requests of a benchmark.

    Attributes:
        seconds: From the first request to the last answer, including its text.
        prompt_lens: Tokens of each prompt.
        answers: Answers in the order of their prompts.
    """

    seconds: float
    prompt_lens: list[int]
    answers: list[Answer]

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens; a prompt counts once, however many answers it has."""
        return sum(self.prompt_lens)

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(len(answer.token_ids) for answer in self.answers)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that were not computed."""
        per_prompt = len(self.answers) // len(self.prompt_lens)
        return sum(answer.num_cached_tokens for answer in self.answers[::per_prompt])


def median_run(runs: Sequence[Run]) -> Run:
    """Returns the run with the median time (the slower of two)."""
    return sorted(runs, key=lambda run: run.seconds)[len(runs) // 2]


def rates(run: Run) -> dict[str, Any]:
    """Throughput under the keys of ``vllm bench throughput``, with a few more figures."""
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
    """TTFT, TPOT, ITL and end-to-end latency over all answers of the runs."""
    return answer_latencies([answer for run in runs for answer in run.answers], shares)


def compare(ours: Sequence[Run], theirs: Sequence[Run]) -> dict[str, Any]:
    """Compares two engines, turn by turn.

    Returns:
        ``ratios`` (their seconds over ours, for each turn), ``speedup`` (the median ratio),
        ``same_answers`` and ``num_answers`` (both of the first turn).
    """
    ratios = [their.seconds / our.seconds for our, their in zip(ours, theirs)]
    pairs = list(zip(ours[0].answers, theirs[0].answers))
    return {
        "ratios": ratios,
        "speedup": statistics.median(ratios),
        "same_answers": sum(our.token_ids == their.token_ids for our, their in pairs),
        "num_answers": len(pairs),
    }
