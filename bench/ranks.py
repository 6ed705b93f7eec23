"""Decode steps and prefill of one model on one, two and four ranks, with random weights.

python bench/ranks.py                                   # on a machine with two or four GPUs
python bench/ranks.py --models tiny --ranks 1 2         # smoke test on two CPU cores
python bench/ranks.py --models 70B --ranks 1 2 4 --layers 20
python bench/ranks.py --pipeline                        # pipeline instead of tensor parallelism
MLX_PAGED_PEER_SUMS=0 python bench/ranks.py             # all sums over NCCL
python bench/ranks.py --vllm-env PYTHONPATH=DIR         # also vLLM, which is in DIR

Every rank reads its part of a checkpoint that is written first (`--folder`, by default in main
memory). `--layers` caps the number of layers, because the 70B shape in bfloat16 does not fit on one
GPU, and shrinks the vocabulary in proportion; the results record both. Goals for 70B at 32 x 1024:
steps 1.7 times as fast on two GPUs, 2.9 times on four. Each measurement runs in its own process.

vLLM's steps are measured as in `vllm_steps.py`, on the same shapes and numbers of GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import mlx_paged.extension  # noqa: F401  (before mlx.core)

# isort: split
import mlx.core as mx
import numpy as np
from engine_process import START_SECONDS, Process, WorkerError
from harness import environment, print_table, save
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes, load_tokenizer, save_config

from mlx_paged.demo import model_path
from mlx_paged.engine.config import EngineConfig
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.ranks.peers import PEER_SUMS
from mlx_paged.engine.ranks.start import make_engine
from mlx_paged.engine.sampling_params import SamplingParams

_LLAMA = {
    "model_type": "llama", "head_dim": 128, "num_key_value_heads": 8, "vocab_size": 128256,
    "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "3B": {
        **_LLAMA, "hidden_size": 3072, "num_hidden_layers": 28, "intermediate_size": 8192,
        "num_attention_heads": 24, "tie_word_embeddings": True,
    },
    "30B-A3B": {
        **_LLAMA, "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
        "num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "norm_topk_prob": True, "num_attention_heads": 32, "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
    "70B": {
        **_LLAMA, "hidden_size": 8192, "num_hidden_layers": 80, "intermediate_size": 28672,
        "num_attention_heads": 64, "tie_word_embeddings": False,
    },
    "tiny": {
        **_LLAMA, "hidden_size": 256, "num_hidden_layers": 2, "intermediate_size": 512,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1280,
        "tie_word_embeddings": True,
    },
}  # fmt: skip
GROUP_SIZE = 64
_LEAST_VOCAB = 8192
BLOCK_TOKENS = 32
OUTPUT_TOKENS = 64


def layers_of(name: str, most: int | None) -> int:
    """Returns the number of layers to measure: all, or at most `most`."""
    whole = int(CONFIGS[name]["num_hidden_layers"])
    return whole if most is None else min(whole, most)


def config_of(name: str, num_layers: int) -> dict[str, Any]:
    """Returns a model's config.json with fewer layers.

    The vocabulary shrinks in proportion, so that the output projection, which every rank holds
    whole, keeps its share of a step.
    """
    config = CONFIGS[name]
    share = num_layers / config["num_hidden_layers"]
    vocab_size = config["vocab_size"]
    if share < 1:
        vocab_size = max(_LEAST_VOCAB, int(vocab_size * share) // 64 * 64)
    return {**config, "num_hidden_layers": num_layers, "vocab_size": vocab_size}


def write_model(folder: Path, name: str, bits: int, num_layers: int) -> Path:
    """Writes a model with random weights, the same in every layer; returns its directory."""
    path = folder / f"{name}-{bits}"
    path.mkdir(parents=True)
    config = config_of(name, num_layers)
    model_class, args_class = _get_classes(config=config)
    mx.random.seed(0)
    model = model_class(args_class.from_dict({**config, "num_hidden_layers": 1}))
    linear = {place for place, m in model.named_modules() if hasattr(m, "to_quantized")}
    tensors: dict[str, mx.array] = {}
    for place, array in tree_flatten(model.parameters()):
        values = (0.02 * mx.random.normal(array.shape)).astype(mx.bfloat16)
        owner, _, kind = place.rpartition(".")
        if bits == 4 and kind == "weight" and owner in linear:
            parts = mx.quantize(values, GROUP_SIZE, bits)
            tensors |= zip((f"{owner}.{s}" for s in ("weight", "scales", "biases")), parts)
        else:
            tensors[place] = 1 + values if "norm" in place else values
    # Written once per layer, because readers refuse tensors that share bytes.
    layers = {
        place.replace(".layers.0.", f".layers.{i}."): array
        for place, array in tensors.items()
        for i in range(num_layers if ".layers.0." in place else 1)
    }
    mx.save_safetensors(str(path / "model.safetensors"), layers, metadata={"format": "mlx"})
    if bits == 4:
        config["quantization"] = {"group_size": GROUP_SIZE, "bits": bits}
    load_tokenizer(model_path()).save_pretrained(path)
    save_config(config, path / "config.json")
    return path


# --- In a separate process ------------------------------------------------------------------------


def prompts_of(count: int, length: int, vocab_size: int) -> list[list[int]]:
    rng = np.random.default_rng((count, length))
    return [rng.integers(3, vocab_size, length).tolist() for _ in range(count)]


def decode(engine: Engine, num_rows: int, length: int) -> dict[str, float]:
    """Returns the median milliseconds of a pure decode step, and prompt tokens per second."""
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS + num_rows, ignore_eos=True)
    prompts = prompts_of(num_rows, length, engine.vocab_size)
    start = time.perf_counter()
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params)
    begun: set[str] = set()
    while len(begun) < num_rows:
        begun |= {update.request_id for update in engine.step() if update.token_ids}
    prefilled = time.perf_counter()
    stamps = []
    for _ in range(OUTPUT_TOKENS):
        engine.step()
        stamps.append(time.perf_counter())
    for i in range(num_rows):
        engine.abort(str(i))
    engine.synchronize()
    engine.reset_prefix_cache()
    return {
        "step_ms": round(float(np.median(np.diff(stamps)[4:])) * 1e3, 3),
        "prefill_tokens_per_s": round(num_rows * length / (prefilled - start)),
    }


def measure(
    model: Path,
    ranks: int,
    rows: list[int],
    length: int,
    *,
    step_tokens: int | None,
    pipeline: bool,
) -> dict[str, Any]:
    blocks = max(rows) * (-(-(length + OUTPUT_TOKENS + max(rows)) // BLOCK_TOKENS) + 1) + 8
    start = time.perf_counter()
    option = "pipeline_parallel_size" if pipeline else "tensor_parallel_size"
    config = EngineConfig(
        num_gpu_blocks_override=blocks,
        max_num_seqs=max(rows),
        max_num_batched_tokens=step_tokens,
        **{option: ranks},
    )
    engine = make_engine(model, config)
    found: dict[str, Any] = {"start_s": round(time.perf_counter() - start, 1)}
    for num_rows in rows:
        found[f"{num_rows} x {length}"] = decode(engine, num_rows, length)
    found["weights_and_pools_gb"] = round(mx.get_active_memory() / 1e9, 2)
    compilation = engine.stats().compilation
    found["foreign"], found["not_compiled"] = dict(compilation.foreign), compilation.refused
    return found


# --- All measurements -----------------------------------------------------------------------------


def measured(model: Path, ranks: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measures in a new process; returns its results, or ``{"error": ...}``."""
    command = [sys.executable, __file__, "--measure", str(model), "--ranks", str(ranks)]
    command += ["--rows", *map(str, options.rows), "--length", str(options.length)]
    command += ["--pipeline"] if options.pipeline else []
    command += ["--step-tokens", str(options.step_tokens)] if options.step_tokens else []
    ended = subprocess.run(command, capture_output=True, text=True)
    lines = [line for line in ended.stdout.splitlines() if line.startswith("RESULT ")]
    if ended.returncode or not lines:
        return {"error": ended.stderr.strip()[-500:]}
    result: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    return result


def measured_vllm(name: str, bits: int, ranks: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measures vLLM's decode steps with the same shape; returns them, or ``{"error": ...}``."""
    log = Path(tempfile.mkstemp(prefix="ranks-vllm-", suffix=".log")[1])
    env = dict(each.split("=", 1) for each in options.vllm_env)
    process = Process("vllm", [options.vllm_python, "-P"], env, log)
    most, room = max(options.rows), options.length + 2 * OUTPUT_TOKENS
    try:
        process.ask("load", START_SECONDS)
        found: dict[str, Any] = process.ask(
            *("start", START_SECONDS),
            name=name if bits == 16 else f"{name}, {bits} bits",
            config=config_of(name, layers_of(name, options.layers)),
            rows=options.rows,
            max_len=room,
            pool_tokens=most * (room + BLOCK_TOKENS),
            tensor_parallel_size=ranks,
        )
        for num_rows in options.rows:
            lengths = [options.length] * num_rows
            process.ask("prompts", lengths=lengths, vocab_size=_LEAST_VOCAB)
            steps = []
            for _ in range(3):  # the first computes the prompts
                short, long = (
                    process.ask("call", max_tokens=tokens, params={"temperature": 0.0})["seconds"]
                    for tokens in (1, 1 + OUTPUT_TOKENS)
                )
                steps.append((long - short) / OUTPUT_TOKENS)
            found[f"{num_rows} x {options.length}"] = {"step_ms": round(min(steps[1:]) * 1e3, 3)}
        return found
    except WorkerError as error:
        return {"error": str(error)}
    finally:
        process.close()


def report(results: dict[str, dict[str, Any]], options: argparse.Namespace) -> None:
    for num_rows in options.rows:
        workload = f"{num_rows} x {options.length}"
        rows = []
        for name, by_ranks in results.items():
            steps = [by_ranks[str(n)].get(workload, {}).get("step_ms") for n in options.ranks]
            alone = steps[0]
            shown = ["-" if ms is None else f"{ms:.2f}" for ms in steps]
            gains = ["-" if None in (ms, alone) else f"{alone / ms:.2f}" for ms in steps[1:]]
            rows.append([name, *shown, *gains])
        ranks = [f"{n} (ms)" for n in options.ranks]
        gains = [f"gain on {n}" for n in options.ranks[1:]]
        print_table([f"step of {workload}", *ranks, *gains], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=CONFIGS, default=list(CONFIGS)[:3])
    parser.add_argument("--bits", nargs="+", type=int, choices=(4, 16), default=[16, 4])
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--layers", type=int, help="maximum number of layers")
    parser.add_argument(
        "--pipeline", action="store_true", help="pipeline instead of tensor parallelism"
    )
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32, 128])
    parser.add_argument("--length", type=int, default=1024, help="tokens of a prompt")
    parser.add_argument(
        "--step-tokens", type=int, help="max_num_batched_tokens; fewer make startup faster"
    )
    parser.add_argument("--vllm-python", default=sys.executable, help="vLLM's interpreter")
    parser.add_argument("--vllm-env", nargs="+", default=[], metavar="NAME=VALUE",
                        help="variables of its process; measures vLLM too")  # fmt: skip
    parser.add_argument("--folder", type=Path, help="folder for the checkpoints")
    parser.add_argument("--name", default="ranks", help="name of the file in bench/results")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure is not None:
        found = measure(
            *(options.measure, options.ranks[0], options.rows, options.length),
            step_tokens=options.step_tokens,
            pipeline=options.pipeline,
        )
        print("RESULT", json.dumps(found), flush=True)
        return
    memory = Path("/dev/shm")
    base = options.folder or (memory if memory.is_dir() else None)
    results: dict[str, dict[str, Any]] = {}
    layers = {name: layers_of(name, options.layers) for name in options.models}
    for name in options.models:
        for bits in options.bits:
            with tempfile.TemporaryDirectory(dir=base) as folder:
                model = write_model(Path(folder), name, bits, layers[name])
                key = f"{name}, {bits} bits"
                results[key] = {str(n): measured(model, n, options) for n in options.ranks}
            if options.vllm_env:
                results[f"{key}, vLLM"] = {
                    str(n): measured_vllm(name, bits, n, options) for n in options.ranks
                }
            report(results, options)
    found = {"environment": environment(), "length": options.length, "models": results}
    found["layers"] = {
        name: {
            "measured": count,
            "whole": CONFIGS[name]["num_hidden_layers"],
            "vocab_size": config_of(name, count)["vocab_size"],
        }
        for name, count in layers.items()
    }
    found["pipeline"], found["peer_sums"] = options.pipeline, os.environ.get(PEER_SUMS) != "0"
    print(save(options.name, found))


if __name__ == "__main__":
    main()
