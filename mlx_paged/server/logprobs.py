"""Log-probabilities as the two endpoints report them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_paged.engine.outputs import Logprob, PositionReport


def _name(token: int, entry: Logprob, as_ids: bool) -> str:
    return f"token_id:{token}" if as_ids else entry.decoded_token


def chat_logprobs(
    tokens: Sequence[int], reports: Sequence[PositionReport], num_top: int, *, as_ids: bool
) -> dict[str, Any]:
    """`logprobs` of a chat's choice: an entry for each token, with its likeliest alternatives."""

    def entry(token: int, found: Logprob) -> dict[str, Any]:
        name = _name(token, found, as_ids)
        return {
            "token": name,
            "logprob": _finite(found.logprob),
            "bytes": list(found.decoded_token.encode()),
        }

    content = []
    for token, report in zip(tokens, reports, strict=True):
        top = _likeliest(report, num_top)
        content.append(
            {
                **entry(token, report[token]),
                "top_logprobs": [entry(other, found) for other, found in top],
            }
        )
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """`logprobs` of a plain completion's choice, in pieces whose offsets go on.

    Args:
        num_top: alternatives of each token.
        as_ids: name tokens by their ids.
        first: text of the prompt's first token, of which nothing is reported.
    """

    def __init__(self, num_top: int, *, as_ids: bool, first: str = "") -> None:
        self._first = first
        self._num_top = num_top
        self._as_ids = as_ids
        self._offset = 0

    def piece(
        self, tokens: Sequence[int], reports: Sequence[PositionReport | None]
    ) -> dict[str, Any]:
        """The next tokens; None reports the first token of a prompt, which follows nothing."""
        names: list[str] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for token, report in zip(tokens, reports, strict=True):
            offsets.append(self._offset)
            if report is None:
                names.append(f"token_id:{token}" if self._as_ids else self._first)
                self._offset += len(self._first)
                values.append(None)
                tops.append(None)
                continue
            found = report[token]
            names.append(_name(token, found, self._as_ids))
            values.append(_finite(found.logprob))
            top = [(token, found), *_likeliest(report, self._num_top)]
            tops.append({_name(t, f, self._as_ids): _finite(f.logprob) for t, f in top})
            self._offset += len(found.decoded_token)
        return {
            "tokens": names,
            "token_logprobs": values,
            "top_logprobs": tops,
            "text_offset": offsets,
        }


def prompt_logprobs(reports: Sequence[PositionReport | None] | None) -> list[Any] | None:
    """vLLM's `prompt_logprobs`: by token id, null for the first token."""
    if reports is None:
        return None
    return [
        None
        if report is None
        else {
            str(token): {
                "logprob": _finite(found.logprob),
                "rank": found.rank,
                "decoded_token": found.decoded_token,
            }
            for token, found in report.items()
        }
        for report in reports
    ]


def _likeliest(report: PositionReport, count: int) -> list[tuple[int, Logprob]]:
    ordered = sorted(report.items(), key=lambda item: item[1].rank)
    return [item for item in ordered if item[1].rank <= count][:count]


def _finite(logprob: float) -> float:
    """JSON has no infinity; -9999 stands for it, as in OpenAI's API."""
    return max(logprob, -9999.0)
