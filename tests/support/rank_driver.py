"""Rank 0 of an engine in a process of its own, which a test can kill.

``python rank_driver.py '{"model": ..., "adapters": [...], "options": {...}, "requests": ...}'``
makes the engine, prints a line with its other processes and a line with the answers of a workload,
and then does what its stdin says: "generate" without an end, or nothing more.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import numpy as np

from mlx_paged.engine.config import EngineConfig
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.lora.request import LoRARequest
from mlx_paged.engine.outputs import RequestOutput
from mlx_paged.engine.ranks.start import make_engine
from mlx_paged.engine.sampling_params import SamplingParams

_ABORTED_AFTER = 9  # steps
_FAILS_AT = 5


class Planted(Exception):
    """Raised in the middle of a step, by code that is no part of the engine."""


def workload(vocab_size: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts with a common beginning and all kinds of settings; more than run at once."""
    rng = np.random.default_rng(3)
    stem = rng.integers(10, vocab_size, 21).tolist()
    settings: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8, "seed": 1, "top_p": 0.9},
        {"temperature": 0.7, "seed": 2, "top_k": 20, "n": 3},
        {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.4},
        {"temperature": 0.0, "logit_bias": {7: 5.0}, "logprobs": 2, "prompt_logprobs": 1},
        {"temperature": 0.0, "structured_outputs": {"regex": "[a-z]{3} [0-9]+"}},
        {"temperature": 0.9, "seed": 4, "max_tokens": 30},  # aborted
        {"temperature": 0.6, "seed": 5, "min_tokens": 4},
        {"temperature": 0.0, "allowed_token_ids": [15, 16, 17, 18]},
    ]
    return [
        (
            [*stem, *rng.integers(10, vocab_size, 9 * i).tolist()],
            SamplingParams(**{"max_tokens": 8, **given}),
        )
        for i, given in enumerate(settings)
    ]


def answers(
    engine: Engine, adapters: Sequence[str] = (), num_requests: int | None = None
) -> dict[str, Any]:
    """Runs the workload; returns its tokens, its reports, and the numbers of the engine.

    Args:
        adapters: Directories of adapters. Every third request has one of them in turn.
        num_requests: Requests of the workload; None: all.
    """
    loras = itertools.cycle(
        LoRARequest(Path(path).name, i, path) for i, path in enumerate(adapters, 1)
    )
    outputs = [
        engine.add_request(
            str(i), tokens, params, lora_request=next(loras, None) if i % 3 == 1 else None
        )
        for i, (tokens, params) in enumerate(workload(engine.vocab_size)[:num_requests])
    ]
    count = 0

    def fail_once(num_tokens: int) -> None:
        if count == _FAILS_AT:
            engine.on_launch = None
            raise Planted

    engine.on_launch = fail_once
    while engine.has_unfinished:
        with contextlib.suppress(Planted):  # The next call recovers, on all ranks.
            engine.step()
        engine.check_integrity()
        count += 1
        if count == _ABORTED_AFTER:
            engine.abort("6")
    stats = engine.stats()
    drafting = stats.spec_decoding
    return {
        "tokens": {
            output.request_id: [list(a.token_ids) for a in output.outputs]
            for output in outputs
            if output.request_id != "6"
        },
        "finish_reasons": [a.finish_reason for output in outputs for a in output.outputs],
        "logprobs": _logprobs(outputs[4]) if len(outputs) > 4 else [],
        "hits": stats.counters.num_cached_tokens,
        "preemptions": stats.num_preemptions,
        "adapter_evictions": engine._scheduler.adapters.num_evictions,
        "recoveries": stats.num_recoveries,
        "foreign": dict(stats.compilation.foreign),
        "num_kv_heads": engine._runner.model.layout.attention[0].num_kv_heads,
        "num_pools": len(engine._runner.model.pools()),
        "accepted": 0 if drafting is None else drafting.num_accepted_tokens,
        "drafts": 0 if drafting is None else drafting.num_draft_tokens,
    }


def _logprobs(output: RequestOutput) -> list[float]:
    reports = [*(output.prompt_logprobs or ()), *(output.outputs[0].logprobs or ())]
    return [report.logprob for report in reports if report is not None]


def main() -> None:
    logging.basicConfig(level=logging.WARNING)
    given = json.loads(sys.argv[1])
    engine = make_engine(given["model"], EngineConfig(**given["options"]))
    followers = engine._ranks.followers._followers if engine._ranks is not None else ()
    print("PIDS", json.dumps([f.process.pid for f in followers if f.process]), flush=True)
    print("ANSWERS", json.dumps(answers(engine, given["adapters"], given["requests"])), flush=True)
    for line in sys.stdin:
        if line.strip() == "generate":
            params = SamplingParams(max_tokens=100, ignore_eos=True)
            for i in itertools.count():
                engine.add_request(f"endless-{i}", [1, 2, 3], params)
                engine.step()
                print("RUNS" if i == 0 else "", flush=True)
                while engine.has_unfinished:
                    engine.step()
        elif line.strip() == "fail":
            engine._executor.launch(None)  # type: ignore[arg-type]
    print("END", flush=True)


if __name__ == "__main__":
    main()
