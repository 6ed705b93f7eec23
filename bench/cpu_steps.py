"""Decode steps on a CPU: as one operation (`CpuExecutable`), and as the graph they come from.

python bench/cpu_steps.py                          # SmolLM2-135M's shape, and the embedded model
python bench/cpu_steps.py --only smollm-135m --rows 1 8

Measures whole engine steps with random float32 weights, while all sequences decode after prompts of
128 tokens. The two variants alternate in one process.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import numpy as np
from harness import print_table, save
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.utils import load_tokenizer

from mlx_paged.demo import model_path
from mlx_paged.engine.config import EngineConfig
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.loading import load
from mlx_paged.engine.sampling_params import SamplingParams
from mlx_paged.model.loader import LoadedModel

PROMPT_TOKENS = 128
SMOLLM_135M = {
    "model_type": "llama",
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-5,
    "vocab_size": 49152,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}


def shaped(config: dict[str, Any]) -> LoadedModel:
    """Makes a model with random weights and the embedded tokenizer, whose texts mean nothing."""
    mx.random.seed(0)
    model = llama.Model(llama.ModelArgs.from_dict(config))
    mx.eval(model.parameters())
    return LoadedModel(model, load_tokenizer(model_path()), config, "random")


MODELS = {"embedded": lambda: load(model_path()), "smollm-135m": lambda: shaped(SMOLLM_135M)}


def steps_ms(engine: Engine, rows: int, num_steps: int) -> float:
    """Median time of steps in which `rows` sequences decode and nothing else happens."""
    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=0, max_tokens=num_steps + 8, ignore_eos=True)
    for i in range(rows):
        engine.add_request(str(i), rng.integers(0, 300, PROMPT_TOKENS).tolist(), params)
    while engine.stats().num_waiting or engine.stats().num_running < rows:
        engine.step()
    for _ in range(4):
        engine.step()
    times = []
    for _ in range(num_steps):
        start = time.perf_counter()
        engine.step()
        times.append((time.perf_counter() - start) * 1e3)
    while engine.has_unfinished:
        engine.step()
    return statistics.median(times)


def measure(name: str, rows: list[int], rounds: int, num_steps: int) -> list[dict[str, Any]]:
    model = MODELS[name]()
    weights = sum(a.nbytes for _, a in tree_flatten(model.model.parameters()))
    memory = 2 * max(rows) * (PROMPT_TOKENS + num_steps + 64) * 2 * 4 * 30 * 192
    engine = Engine(
        model, EngineConfig(kv_cache_memory=max(memory, 64 << 20), enable_prefix_caching=False)
    )
    compiled = engine._executor._runner.model._graph_runner
    results = []
    for count in rows:
        ways: dict[str, list[float]] = {"graph": [], "program": []}
        for _ in range(rounds):
            for way, times in ways.items():
                compiled.refusals.steps = "graphs" if way == "graph" else None
                times.append(steps_ms(engine, count, num_steps))
        assert compiled._graphs or max(rows) > 64
        graph, program = (statistics.median(ways[way]) for way in ("graph", "program"))
        results.append(
            {"model": name, "rows": count, "weights_mb": round(weights / 1e6), "graph_ms": graph,
             "program_ms": program, "ratio": graph / program, "rounds": ways}
        )  # fmt: skip
        print(f"{name} {count}: {graph:.2f} -> {program:.2f} ms", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--no-save", dest="save", action="store_false")
    options = parser.parse_args()
    results = [
        row
        for name in options.only
        for row in measure(name, options.rows, options.rounds, options.steps)
    ]
    print_table(
        ["model", "rows", "graph ms", "program ms", "ratio"],
        [
            [r["model"], str(r["rows"]), f"{r['graph_ms']:.2f}", f"{r['program_ms']:.2f}",
             f"{r['ratio']:.2f}"]
            for r in results
        ],
    )  # fmt: skip
    if options.save:
        print(save("cpu_steps", {"steps": results}))


if __name__ == "__main__":
    main()
