"""Metrics of simulated requests."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from .replica import Request


def summary(requests: Sequence[Request], start: float, end: float) -> dict[str, Any]:
    """Returns the figures of the requests that arrived within [start, end), in seconds."""
    chosen = [request for request in requests if start <= request.arrival < end]
    if not chosen:
        return {"num_requests": 0}
    prompts = sum(request.num_prompt_tokens for request in chosen)
    cached = sum(request.num_cached_tokens or 0 for request in chosen)
    ttft = [(request.first_token or 0) - request.arrival for request in chosen]
    tpot = [
        ((request.end or 0) - (request.first_token or 0)) / (request.max_tokens - 1)
        for request in chosen
        if request.max_tokens > 1
    ]
    return {
        "num_requests": len(chosen),
        "num_retries": sum(request.num_retries for request in chosen),
        "prompt_tokens": statistics.fmean(request.num_prompt_tokens for request in chosen),
        "hit_rate": cached / prompts,
        "ttft_p50_ms": 1000 * float(np.percentile(ttft, 50)),
        "ttft_p99_ms": 1000 * float(np.percentile(ttft, 99)),
        "tpot_p50_ms": 1000 * float(np.percentile(tpot, 50)),
        "tpot_p99_ms": 1000 * float(np.percentile(tpot, 99)),
        "requests_per_second": len(chosen) / (end - start),
        "output_tokens_per_second": sum(r.max_tokens for r in chosen) / (end - start),
    }
