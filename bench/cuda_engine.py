"""Time of a step in which all sequences decode: the engine and mlx-lm's BatchGenerator, in turn.

python bench/cuda_engine.py

The model has the shape of Llama-3.2-3B and random bfloat16 weights; both generate the same number
of tokens for the same random prompts.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from typing import Any

import mlx_paged.core  # noqa: F401  (before mlx.core)

# isort: split
import mlx.core as mx
import numpy as np
from harness import print_table, save
from mlx.utils import tree_map
from mlx_lm.generate import BatchGenerator
from mlx_lm.models import llama
from mlx_lm.utils import load_tokenizer

from mlx_paged.demo import model_path
from mlx_paged.engine.config import EngineConfig
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.sampling_params import SamplingParams
from mlx_paged.models.load import LoadedModel

CONFIG = {
    "model_type": "llama",
    "hidden_size": 3072,
    "num_hidden_layers": 28,
    "intermediate_size": 8192,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
}
SKEWED = (256,) * 28 + (8192,) * 4
WORKLOADS = {
    "1 x 1024": (1024,),
    "8 x 1024": (1024,) * 8,
    "32 x 1024": (1024,) * 32,
    "28 x 256 + 4 x 8192": SKEWED,
    "32 x 4096": (4096,) * 32,
}
OUTPUT_TOKENS = 128  # more than there are steps before the last prompt is in


def random_model() -> LoadedModel:
    model = llama.Model(llama.ModelArgs.from_dict(CONFIG))
    mx.random.seed(0)
    model.update(
        tree_map(
            lambda a: (0.02 * mx.random.normal(a.shape)).astype(mx.bfloat16), model.parameters()
        )
    )
    mx.eval(model.parameters())
    model.eval()
    return LoadedModel(model, load_tokenizer(model_path()), CONFIG, "random llama")


def prompts_of(lengths: tuple[int, ...]) -> list[list[int]]:
    rng = np.random.default_rng(len(lengths))
    return [rng.integers(3, 128000, n).tolist() for n in lengths]


def summary(stamps: list[float], start: float, full_from: float) -> dict[str, Any]:
    steps = np.diff([t for t in stamps if t >= full_from])[2:]
    return {
        "step_ms": statistics.median(steps) * 1e3,
        "steps": len(steps),
        "until_all_decode_s": full_from - start,
        "peak_gb": mx.get_peak_memory() / 1e9,
    }


def run_engine(model: LoadedModel, prompts: list[list[int]]) -> dict[str, Any]:
    blocks = sum(-(-(len(p) + OUTPUT_TOKENS) // 32) + 1 for p in prompts) + 8
    engine = Engine(model, EngineConfig(num_gpu_blocks_override=blocks, max_model_len=16384))
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    mx.reset_peak_memory()
    start = time.perf_counter()
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params)
    stamps: list[float] = []
    begun: set[str] = set()
    full_from = finished_at = None
    while engine.has_unfinished:
        updates = engine.step()
        now = time.perf_counter()
        begun |= {u.request_id for u in updates if u.token_id is not None}
        if len(begun) == len(prompts) and full_from is None:
            full_from = now
        if finished_at is None:
            stamps.append(now)
        if any(u.finish_reason for u in updates):
            finished_at = finished_at or now
    assert full_from is not None
    result = summary(stamps[:-1], start, full_from)
    engine.settle()
    return result


def run_batch_generator(model: LoadedModel, prompts: list[list[int]]) -> dict[str, Any]:
    generator = BatchGenerator(model.model, completion_batch_size=len(prompts))
    mx.reset_peak_memory()
    start = time.perf_counter()
    generator.insert(prompts, [OUTPUT_TOKENS] * len(prompts))
    stamps: list[float] = []
    begun: set[int] = set()
    full_from = finished = None
    while responses := generator.next_generated():
        now = time.perf_counter()
        begun |= {r.uid for r in responses}
        if len(begun) == len(prompts) and full_from is None:
            full_from = now
        finished = finished or any(r.finish_reason for r in responses)
        if not finished:
            stamps.append(now)
    generator.close()
    assert full_from is not None
    return summary(stamps, start, full_from)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=WORKLOADS)
    parser.add_argument("--name", default="engine-h200")
    parser.add_argument("--no-save", dest="save", action="store_false")
    options = parser.parse_args()
    mx.set_default_device(mx.gpu)
    model = random_model()
    runs = {"mlx_paged": run_engine, "mlx-lm": run_batch_generator}
    for run in runs.values():
        run(model, prompts_of((64, 64)))
    results, rows = [], []
    for name in options.workloads:
        found: dict[str, Any] = {"workload": name}
        for who, run in runs.items():
            gc.collect()
            mx.clear_cache()
            try:
                found[who] = run(model, prompts_of(WORKLOADS[name]))
            except Exception as error:  # one side out of memory: the other still counts
                found[who] = {"error": f"{type(error).__name__}: {error}"[:300]}
            print(name, who, found[who], flush=True)
        results.append(found)
        cells = [
            f"{found[who][field]:.1f}" if field in found[who] else "failed"
            for field in ("step_ms", "peak_gb", "until_all_decode_s")
            for who in runs
        ]
        rows.append([name, *cells])
    print()
    print_table(
        ["prompts", "step ms", "mlx-lm", "peak GB", "mlx-lm", "s until all decode", "mlx-lm"], rows
    )
    if options.save:
        print(save(options.name, {"model": CONFIG, "output_tokens": OUTPUT_TOKENS,
                                  "results": results}))  # fmt: skip


if __name__ == "__main__":
    main()
