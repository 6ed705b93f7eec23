"""Helpers that make requests and engines on a fake device, for the scheduler's tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from mlx_paged.core import (
    KVManager,
    Request,
    Scheduler,
    SchedulerConfig,
    StateGroupSpec,
    StopPolicy,
    WindowGroupSpec,
)
from support.fake_model import FakeEngine, contents, generate

OVERLAP = pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def make(
    num_blocks: int = 65,
    block_size: int = 4,
    *,
    overlap: bool = False,
    caching: bool = True,
    windows: Sequence[WindowGroupSpec] = (),
    states: StateGroupSpec | None = None,
    **config: Any,
) -> FakeEngine:
    config = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "watermark": 0.0, **config}
    kv = KVManager(
        num_blocks, block_size, enable_prefix_caching=caching, windows=windows, states=states
    )
    scheduler = Scheduler(SchedulerConfig(**config), kv, clock=Clock())
    return FakeEngine(scheduler, overlap=overlap)


def request(name: str, prompt: list[int], max_tokens: int | None = 4, **options: Any) -> Request:
    stop = StopPolicy(max_tokens=max_tokens, **options.pop("stop", {}))
    return Request(name, prompt, stop, **options)


def check_outputs(engine: FakeEngine, *requests: Request) -> None:
    for r in requests:
        for seq in r.sequences:
            expected = generate(contents(r), r.max_output_tokens, r.stop.eos_token_ids, seq.index)
            assert engine.outputs[seq.seq_id] == list(seq.tokens[r.num_prompt_tokens :]) == expected
            assert engine.reasons[seq.seq_id] is seq.finish_reason
    usage = engine.scheduler.kv.usage
    assert usage.num_used_blocks == usage.num_quarantined_blocks == 0
    engine.scheduler.check_integrity()


def rows(engine: FakeEngine, step: int = -1) -> list[tuple[str, int]]:
    return [(row.request_id, row.num_tokens) for row in engine.batches[step].sequences]
