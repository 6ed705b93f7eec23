"""The engine on an NVIDIA GPU against mlx-lm's BatchGenerator, in turns, on random weights.

python bench/cuda_engine.py                         # everything, ten minutes on an H200
python bench/cuda_engine.py --only decode prefill   # some parts; keeps the others' results

Step time is the median while all sequences decode; memory is MLX's peak, engine included.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

os.environ["MLX_PAGED_DISABLE"] = "1"  # unpatched mlx-lm's BatchGenerator
import mlx_paged.extension  # noqa: F401  (before mlx.core)

# isort: split
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from harness import RESULTS, environment, print_table, save
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from mlx_lm.generate import BatchGenerator
from mlx_lm.models import llama, qwen3, qwen3_moe
from mlx_lm.utils import load_tokenizer

from mlx_paged import ops
from mlx_paged.demo import model_path
from mlx_paged.engine.config import EngineConfig
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.sampling_params import SamplingParams
from mlx_paged.model import patches
from mlx_paged.model.loader import LoadedModel

DECODE = {
    "1 x 1024": (1024,),
    "8 x 1024": (1024,) * 8,
    "32 x 1024": (1024,) * 32,
    "28 x 256 + 4 x 8192": (256,) * 28 + (8192,) * 4,
}
DECODE_MORE = {"32 x 4096": (4096,) * 32, "256 x 1024": (1024,) * 256}
OTHER_MODELS = {name: DECODE[name] for name in ("1 x 1024", "8 x 1024", "32 x 1024")}
PREFILL = {"1 x 8192": (8192,), "16 x 1024": (1024,) * 16}
# More steps than it takes to admit the last prompt.
OUTPUT_TOKENS = {"32 x 4096": 160, "256 x 1024": 320}
Prompts = list[list[int]]
WHO = ("mlx_paged", "mlx-lm")
BLOCK = 32


# --- Models of well-known shapes, with random bfloat16 weights ------------------------------------


_COMMON = {"head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5}

CONFIGS: dict[str, dict[str, Any]] = {
    "Llama-3.2-3B": {
        **_COMMON,
        "model_type": "llama",
        "hidden_size": 3072,
        "num_hidden_layers": 28,
        "intermediate_size": 8192,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    },
    "Qwen3-0.6B": {
        **_COMMON,
        "model_type": "qwen3",
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "vocab_size": 151936,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
    "Qwen3-30B-A3B": {
        **_COMMON,
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "vocab_size": 151936,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
    },
    "Llama-3.1-8B, 4 bits": {
        **_COMMON,
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    },
}
_MODULES = {"llama": llama, "qwen3": qwen3, "qwen3_moe": qwen3_moe}


def random_model(name: str = "Llama-3.2-3B") -> LoadedModel:
    """Makes a model of `CONFIGS`; "4 bits" in its name quantizes its layers."""
    config = CONFIGS[name]
    module = _MODULES[config["model_type"]]
    model = module.Model(module.ModelArgs.from_dict(config))
    mx.random.seed(0)

    def filled(module: nn.Module) -> nn.Module:
        # One at a time: the random numbers are float32, and some models fit only in 4 bits.
        weights = [
            (path, (0.02 * mx.random.normal(array.shape)).astype(mx.bfloat16))
            for path, array in tree_flatten(module.parameters())
        ]
        module.update(tree_unflatten(weights))
        if "4 bits" not in name or not hasattr(module, "to_quantized"):
            mx.eval(module.parameters())
            return module
        quantized = module.to_quantized(group_size=64, bits=4)
        mx.eval(quantized.parameters())
        module.update({"weight": mx.zeros(0)})
        return quantized

    leaves = tree_map(filled, model.leaf_modules(), is_leaf=nn.Module.is_module)
    model.update_modules(leaves)
    mx.eval(model.parameters())
    model.eval()
    mx.clear_cache()
    return LoadedModel(model, load_tokenizer(model_path()), config, f"random {name}")


# --- One workload on either engine with its defaults ----------------------------------------------


def prompts_of(lengths: tuple[int, ...], seed: int = 0) -> Prompts:
    rng = np.random.default_rng((seed, len(lengths)))
    return [rng.integers(3, 128000, n).tolist() for n in lengths]


def engine_for(model: LoadedModel, prompts: Prompts, output_tokens: int) -> Engine:
    """Makes an engine with a pool sized for the workload."""
    blocks = sum(-(-(len(p) + output_tokens) // BLOCK) + 1 for p in prompts) + 8
    return Engine(model, EngineConfig(num_gpu_blocks_override=blocks, max_model_len=16384))


def add_all(engine: Engine, prompts: Prompts, max_tokens: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params)


@contextmanager
def plain_mlx() -> Any:
    """Runs MLX without this package's settings."""
    patches.uninstall()
    limits = [(f, f(1 << 62)) for f in (mx.set_cache_limit, mx.set_memory_limit)]
    total = int(mx.device_info()["memory_size"]) if "memory_size" in mx.device_info() else 140 << 30
    for set_limit, _ in limits:
        set_limit(int(total * 0.95))  # MLX's default
    try:
        yield
    finally:
        for set_limit, limit in limits:
            set_limit(limit)


def rest() -> None:
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    mx.reset_peak_memory()


def decode(who: str, model: LoadedModel, prompts: Prompts, output_tokens: int) -> dict[str, Any]:
    """Step time while all sequences decode, time until they do, and peak memory."""
    rest()
    if who == "mlx-lm":
        with plain_mlx():
            return _decode_batch_generator(model, prompts, output_tokens)
    copies = ops.pool_copies()
    engine = engine_for(model, prompts, output_tokens)
    add_all(engine, prompts, output_tokens)
    stamps: list[float] = []
    begun: set[str] = set()
    full_from = None
    start = time.perf_counter()
    while True:
        updates = engine.step()
        now = time.perf_counter()
        if any(u.finish_reason for u in updates):
            break
        begun |= {u.request_id for u in updates if u.token_ids}
        if full_from is None and len(begun) == len(prompts):
            full_from = now
        stamps.append(now)
    result = _summary(stamps, start, full_from)
    result["pool_copies"] = ops.pool_copies() - copies
    while engine.has_unfinished:
        engine.step()
    return result


def _decode_batch_generator(
    model: LoadedModel, prompts: Prompts, output_tokens: int
) -> dict[str, Any]:
    generator = BatchGenerator(model.model, completion_batch_size=len(prompts))
    start = time.perf_counter()
    generator.insert(prompts, [output_tokens] * len(prompts))
    stamps: list[float] = []
    begun: set[int] = set()
    full_from = None
    while responses := generator.next_generated():
        now = time.perf_counter()
        if any(r.finish_reason for r in responses):
            break
        begun |= {r.uid for r in responses}
        if full_from is None and len(begun) == len(prompts):
            full_from = now
        stamps.append(now)
    result = _summary(stamps, start, full_from)
    generator.close()
    return result


def _summary(stamps: list[float], start: float, full_from: float | None) -> dict[str, Any]:
    if full_from is None:
        raise RuntimeError("the first sequences ended before the last prompt was in")
    steps = np.diff([t for t in stamps if t >= full_from])[2:]
    return {
        "step_ms": round(float(np.median(steps)) * 1e3, 3),
        "steps": len(steps),
        "until_all_decode_s": round(full_from - start, 4),
        "peak_gb": round(mx.get_peak_memory() / 1e9, 2),
    }


def prefill(who: str, model: LoadedModel, lengths: tuple[int, ...], repeat: int) -> dict[str, Any]:
    """Prompt tokens per second up to the last first token, with new prompts each time."""
    seconds = []
    for i in range(1 + repeat):  # the first prepares cuDNN for the shapes
        prompts = prompts_of(lengths, seed=i)
        rest()
        if who == "mlx-lm":
            with plain_mlx():
                seconds.append(_prefill_batch_generator(model, prompts))
            continue
        engine = engine_for(model, prompts, 1)
        add_all(engine, prompts, 1)
        seconds.append(_timed(lambda engine=engine: _drain(engine)))
    median = statistics.median(seconds[1:])
    return {
        "tokens_per_s": round(sum(lengths) / median),
        "seconds": round(median, 4),
        "first_run_s": round(seconds[0], 4),
        "peak_gb": round(mx.get_peak_memory() / 1e9, 2),
    }


def _prefill_batch_generator(model: LoadedModel, prompts: Prompts) -> float:
    generator = BatchGenerator(model.model, completion_batch_size=len(prompts))

    def run() -> None:
        generator.insert(prompts, [1] * len(prompts))
        ended = 0
        while ended < len(prompts) and (responses := generator.next_generated()):
            ended += len(responses)

    seconds = _timed(run)
    generator.close()
    return seconds


def shared_prefix(
    model: LoadedModel, prefix_len: int, tail_len: int, repeat: int
) -> dict[str, Any]:
    """Time to first token of a new prompt, and of one with a cached prefix."""
    rest()
    engine = Engine(model, EngineConfig(num_gpu_blocks_override=1024, max_model_len=16384))
    cold, warm = [], []
    for i in range(1 + repeat):
        [prefix] = prompts_of((prefix_len,), seed=100 + i)
        for tail, seconds in zip(prompts_of((tail_len,) * 2, seed=200 + i), (cold, warm)):
            add_all(engine, [prefix + tail], 1)
            seconds.append(_timed(lambda: _drain(engine)))
            gc.collect()  # between measurements, not during one
    ms = [round(statistics.median(s[1:]) * 1e3, 2) for s in (cold, warm)]
    return {"cold_ms": ms[0], "warm_ms": ms[1], "share": round(ms[1] / ms[0], 4)}


def _drain(engine: Engine) -> None:
    while engine.has_unfinished:
        engine.step()


def _timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


# --- Parts of the report --------------------------------------------------------------------------


def attempt(run: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """Returns the result of a run, or its failure; the other engine's result still counts."""
    try:
        return run(*args)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:300]}


def decode_part(model: LoadedModel, workloads: dict[str, tuple[int, ...]]) -> list[dict[str, Any]]:
    for who in WHO:
        attempt(decode, who, model, prompts_of((64, 64)), 16)
    results = []
    for name, lengths in workloads.items():
        found: dict[str, Any] = {"workload": name}
        for who in WHO:
            tokens = OUTPUT_TOKENS.get(name, 96)
            found[who] = attempt(decode, who, model, prompts_of(lengths), tokens)
            print(name, who, found[who], flush=True)
        results.append(found)
    cells = [
        [r["workload"], *(str(r[w].get(f, "failed")) for f in ("step_ms", "peak_gb") for w in WHO)]
        for r in results
    ]
    print_table(["prompts", "step ms", "mlx-lm", "peak GB", "mlx-lm"], cells)
    return results


def prefill_part(model: LoadedModel) -> list[dict[str, Any]]:
    results = []
    for name, lengths in PREFILL.items():
        found: dict[str, Any] = {"workload": name}
        for who in WHO:
            found[who] = attempt(prefill, who, model, lengths, 3)
            print("prefill", name, who, found[who], flush=True)
        results.append(found)
    return results


def prefix_part(model: LoadedModel) -> list[dict[str, Any]]:
    found = attempt(shared_prefix, model, 4096, 64, 5)
    print("shared prefix", found, flush=True)
    return [{"workload": "4096 shared + 64", "mlx_paged": found}]


PARTS: dict[str, tuple[str, Callable[[LoadedModel], list[dict[str, Any]]]]] = {
    "decode": ("Llama-3.2-3B", lambda m: decode_part(m, DECODE)),
    "decode-more": ("Llama-3.2-3B", lambda m: decode_part(m, DECODE_MORE)),
    "prefill": ("Llama-3.2-3B", prefill_part),
    "prefix": ("Llama-3.2-3B", prefix_part),
    "qwen3-0.6b": ("Qwen3-0.6B", lambda m: decode_part(m, OTHER_MODELS)),
    "llama-8b-4bit": ("Llama-3.1-8B, 4 bits", lambda m: decode_part(m, OTHER_MODELS)),
    "qwen3-30b-a3b": ("Qwen3-30B-A3B", lambda m: decode_part(m, OTHER_MODELS)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=list(PARTS), choices=PARTS, metavar="PART",
                        help=", ".join(PARTS))  # fmt: skip
    parser.add_argument("--name", default="engine-h200", help="of the file in bench/results")
    parser.add_argument("--no-save", dest="save", action="store_false")
    options = parser.parse_args()
    mx.set_default_device(mx.gpu)
    path = RESULTS / f"{options.name}.json"
    parts = json.loads(path.read_text()).get("parts", {}) if path.exists() else {}
    name, model = "", None
    for part in options.only:
        wanted, run = PARTS[part]
        if wanted != name:
            del model
            gc.collect()
            mx.clear_cache()
            name, model = wanted, random_model(wanted)
        assert model is not None
        print(f"== {part}: {name}", flush=True)
        parts[part] = {"model": name, "results": run(model), "environment": environment()}
        if options.save:
            save(options.name, {"parts": parts})


if __name__ == "__main__":
    main()
