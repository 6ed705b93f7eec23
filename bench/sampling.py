"""Time of one sampling step by settings: penalties, filters, the draw, log-probabilities.

python bench/sampling.py
"""

from __future__ import annotations

import mlx_paged.extension  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import numpy as np
from harness import median_seconds, print_table, save

from mlx_paged.engine.sampling.logits_processors import (
    InFlight,
    LogitEdits,
    Penalties,
    TokenHistory,
    apply_edits,
)
from mlx_paged.engine.sampling.logprobs import logprobs_of
from mlx_paged.engine.sampling.sampler import SamplingMetadata, sample
from mlx_paged.engine.sampling.sequence_sampler import SamplingRow

SHAPES = [(8, 4096), (256, 4096), (8, 151_936), (256, 151_936)]
NUM_SEEN = 400  # tokens of the prompt, and as many of the answer


def penalized(num_rows: int, vocab_size: int, rng: np.random.Generator) -> list[SamplingRow]:
    rows = []
    for _ in range(num_rows):
        prompt, answer = rng.integers(0, vocab_size, (2, NUM_SEEN)).tolist()
        history = TokenHistory(prompt)
        history.update(answer, 0)
        penalties = Penalties(history.ids, history.counts, 1.1, 0.2, 0.2)
        rows.append(SamplingRow(0.0, 0, 1, edits=LogitEdits(penalties=penalties)))
    return rows


def measure(num_rows: int, vocab_size: int) -> dict[str, float]:
    """Seconds per step, by setting."""
    rng = np.random.default_rng(0)
    logits = mx.random.normal((num_rows, vocab_size)) * 3
    newest = mx.array(rng.integers(0, vocab_size, num_rows).astype(np.int32))
    mx.eval(logits, newest)
    in_flight = InFlight(newest, np.arange(num_rows, dtype=np.int32), newest)

    def rows(temperature: float = 1.0, **filters: float) -> list[SamplingRow]:
        return [SamplingRow(temperature, i, 100, **filters) for i in range(num_rows)]  # type: ignore[arg-type]

    def seconds(rows: list[SamplingRow], logprobs: bool = False) -> float:
        def step() -> None:
            metadata = SamplingMetadata.of(rows)
            edited, _ = apply_edits(logits, metadata.edits, in_flight)
            tokens = sample(edited, metadata).tokens
            found = logprobs_of(logits, tokens, likeliest=True).arrays if logprobs else []
            mx.eval(tokens, *found)

        return median_seconds(step, repeat=3)

    return {
        "greedy": seconds(rows(0.0)),
        "temperature": seconds(rows()),
        "min_p": seconds(rows(min_p=0.05)),
        "top_k 50": seconds(rows(top_k=50)),
        "top_k 50, top_p 0.9": seconds(rows(top_k=50, top_p=0.9)),
        "top_p 0.9": seconds(rows(top_p=0.9)),
        "penalties, greedy": seconds(penalized(num_rows, vocab_size, rng)),
        "logprobs 20, greedy": seconds(rows(0.0), logprobs=True),
    }


def main() -> None:
    mx.set_default_device(mx.cpu)
    results = [{"rows": n, "vocab_size": v, "seconds": measure(n, v)} for n, v in SHAPES]
    settings = list(results[0]["seconds"])  # type: ignore[call-overload]
    print_table(
        ["ms", *settings],
        [
            [
                f"{r['rows']} x {r['vocab_size']}",
                *(f"{r['seconds'][s] * 1e3:.2f}" for s in settings),
            ]  # type: ignore[index]
            for r in results
        ],
    )
    print("\n", save("sampling", {"results": results, "num_seen_tokens": 2 * NUM_SEEN}))


if __name__ == "__main__":
    main()
