"""Log-probabilities in the forms of chats, of plain completions, and of vLLM's prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mlx_paged.engine.outputs import Logprob, PositionReport
from mlx_paged.server.lazy_json import Lazy
from mlx_paged.server.responses import (
    CompletionLogprobsAnswer,
    ContentLogprob,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
)


def chat_logprobs(
    reports: Sequence[PositionReport], num_top: int, *, as_ids: bool
) -> Iterator[ContentLogprob]:
    """Yields an entry for each token, with its `num_top` likeliest alternatives.

    Args:
        as_ids: Names tokens "token_id:7".
    """

    def entry(token: int, found: Logprob) -> TokenLogprob:
        return {
            "token": _name(token, found, as_ids),
            "logprob": _finite(found.logprob),
            "bytes": list(found.token_bytes),
        }

    for report in reports:
        entries = list(report.entries())
        yield {
            **entry(*entries[0]),
            "top_logprobs": [entry(*top) for top in _alternatives(report, entries, num_top)],
        }


class CompletionLogprobs:
    """Log-probabilities of a plain completion's choice, in pieces with continuing offsets.

    Args:
        num_top: Alternatives of each token.
        as_ids: Names tokens "token_id:7".
        first: The prompt's first token, which has no report, and its text.
    """

    def __init__(self, num_top: int, *, as_ids: bool, first: tuple[int, str]) -> None:
        self._first = f"token_id:{first[0]}" if as_ids else first[1]
        self._first_text = first[1]
        self._num_top = num_top
        self._as_ids = as_ids
        self._offset = 0

    def piece(self, reports: Sequence[PositionReport | None]) -> CompletionLogprobsAnswer:
        """Returns those of the next tokens; None reports a prompt's first token. Lists are lazy."""
        return {
            "tokens": Lazy.list(self._token(report) for report in reports),
            "token_logprobs": Lazy.list(
                None if report is None else _finite(report.logprob) for report in reports
            ),
            "top_logprobs": Lazy.list(
                None if report is None else self._top(report) for report in reports
            ),
            "text_offset": Lazy.list(map(self._advance, reports)),
        }

    def _token(self, report: PositionReport | None) -> str:
        if report is None:
            return self._first
        return f"token_id:{report.token_id}" if self._as_ids else report.decoded_token

    def _top(self, report: PositionReport) -> dict[str, float]:
        entries = list(report.entries())
        top = [entries[0], *_alternatives(report, entries, self._num_top)]
        return {_name(token, found, self._as_ids): _finite(found.logprob) for token, found in top}

    def _advance(self, report: PositionReport | None) -> int:
        offset = self._offset
        self._offset += len(self._first_text if report is None else report.decoded_token)
        return offset


def prompt_logprobs(reports: Sequence[PositionReport | None] | None) -> PromptLogprobs | None:
    """Returns vLLM's `prompt_logprobs`, lazily."""
    if reports is None:
        return None
    return Lazy.list(map(_prompt_logprob, reports))


def _prompt_logprob(report: PositionReport | None) -> dict[str, PromptLogprob] | None:
    if report is None:
        return None
    return {
        str(token): {"logprob": _finite(logprob), "rank": rank, "decoded_token": text}
        for token, logprob, rank, text in report.ranked()
    }


def _name(token: int, entry: Logprob, as_ids: bool) -> str:
    return f"token_id:{token}" if as_ids else entry.decoded_token


def _alternatives(
    report: PositionReport, entries: list[tuple[int, Logprob]], count: int
) -> list[tuple[int, Logprob]]:
    """Returns the tokens that the request listed, or else the most likely ones."""
    if (listed := report.listed) is None:
        return _likeliest(entries, count)
    by_id = dict(entries)
    return [(token, by_id[token]) for token in listed]


def _likeliest(entries: list[tuple[int, Logprob]], count: int) -> list[tuple[int, Logprob]]:
    """Returns the alternatives of a report by rank. In the report, the token itself comes first."""
    ordered = sorted(entries, key=lambda entry: entry[1].rank)
    return [entry for entry in ordered if entry[1].rank <= count][:count]


def _finite(logprob: float) -> float:
    """Replaces infinity, which JSON lacks, with -9999, as in OpenAI's API."""
    return max(logprob, -9999.0)
