"""A quantized mixture of experts on a CPU: load time, memory, prefill and decode steps.

python bench/cpu_moe.py                                 # this version
python bench/cpu_moe.py --against OTHER_VENV/bin/python # in turns with another version

The model has random 4-bit weights: 8 layers, 32 experts with 4 active per token, hidden size 1024.
Each measurement runs in its own process; the versions alternate.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CONFIG = {
    "model_type": "qwen3_moe",
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "vocab_size": 32000,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}
QUANTIZATION = {"bits": 4, "group_size": 64, "mode": "affine"}
PROMPT_TOKENS = 128
LONG_PROMPT = 1024


def make(path: Path) -> None:
    """Writes a directory in mlx-lm's format; holds only one unquantized layer at a time."""
    import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

    # isort: split
    import mlx.core as mx
    import mlx.nn as nn
    from mlx_lm.models import qwen3_moe
    from mlx_lm.utils import load_tokenizer, save_config, save_model

    from mlx_paged.demo import model_path

    mx.random.seed(0)
    model = qwen3_moe.Model(qwen3_moe.ModelArgs.from_dict(CONFIG))
    model.set_dtype(mx.bfloat16)
    for layer in model.layers:
        nn.quantize(layer, **QUANTIZATION)
        mx.eval(layer.parameters())
    nn.quantize(model, **QUANTIZATION)
    save_model(path, model)
    save_config(CONFIG | {"quantization": QUANTIZATION}, path / "config.json")
    load_tokenizer(model_path()).save_pretrained(path)


def rss_mb(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"no {field}")


def measure(path: str, rows: list[int], num_steps: int) -> dict[str, Any]:
    """Measures in this process, with the version that it imports."""
    start = time.perf_counter()
    from mlx_paged.engine.config import EngineConfig
    from mlx_paged.engine.engine import Engine
    from mlx_paged.engine.loading import load
    from mlx_paged.engine.sampling_params import SamplingParams

    imported = time.perf_counter()
    # isort: split
    import numpy as np

    base = rss_mb("VmRSS")
    model = load(path)
    loaded = time.perf_counter()
    found: dict[str, Any] = {
        "import_s": imported - start,
        "load_s": loaded - imported,
        "base_mb": base,
        "rss_mb": rss_mb("VmRSS"),
        "steps_ms": {},
    }
    engine = Engine(model, EngineConfig(kv_cache_memory=512 << 20, enable_prefix_caching=False))
    rng = np.random.default_rng(0)

    def run(count: int, prompt: int, steps: int) -> list[float]:
        params = SamplingParams(temperature=0, max_tokens=steps + 8, ignore_eos=True)
        for i in range(count):
            tokens = rng.integers(0, 300, prompt).tolist()
            engine.add_request(f"{prompt}-{count}-{i}", tokens, params)
        first = time.perf_counter()
        while engine.stats().num_waiting or engine.stats().num_running < count:
            engine.step()
        times = [time.perf_counter() - first]
        for _ in range(4):
            engine.step()
        for _ in range(steps):
            begin = time.perf_counter()
            engine.step()
            times.append(time.perf_counter() - begin)
        while engine.has_unfinished:
            engine.step()
        return times

    run(1, 16, 2)
    begin = time.perf_counter()
    engine.add_request("long", rng.integers(0, 300, LONG_PROMPT).tolist(),
                       SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))  # fmt: skip
    while engine.has_unfinished:
        engine.step()
    found["prompt_tokens_per_s"] = LONG_PROMPT / (time.perf_counter() - begin)
    for count in rows:
        times = run(count, PROMPT_TOKENS, num_steps)[1:]
        found["steps_ms"][count] = statistics.median(times) * 1e3
    found["peak_mb"] = rss_mb("VmHWM")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", help="python of an environment with another version")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--model", help="directory to keep the model in")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--no-save", dest="save", action="store_false")
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(options.child, options.rows, options.steps)))
        return
    from harness import print_table, save

    with tempfile.TemporaryDirectory() as temporary:
        path = Path(options.model or temporary)
        if not (path / "config.json").is_file():
            make(path)
        size = sum(f.stat().st_size for f in path.glob("*.safetensors")) / 2**20
        pythons = {"before": options.against} if options.against else {}
        pythons["after" if options.against else "now"] = sys.executable
        rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in pythons}
        for _ in range(options.rounds):
            for name, python in pythons.items():
                arguments = ["--child", str(path), "--steps", str(options.steps)]
                arguments += ["--rows", *map(str, options.rows)]
                run = subprocess.run(
                    [python, __file__, *arguments],
                    check=True, capture_output=True, text=True, env=os.environ,
                )  # fmt: skip
                rounds[name].append(json.loads(run.stdout.splitlines()[-1]))
                print(name, rounds[name][-1], flush=True)

    def median(name: str, *keys: str) -> float:
        def value(found: Any) -> float:
            for key in keys:
                found = found[key]
            return float(found)

        return statistics.median(value(found) for found in rounds[name])

    what = {"load, s": ("load_s",), "RSS after it, MB": ("rss_mb",), "peak, MB": ("peak_mb",)}
    what["prompt tokens/s"] = ("prompt_tokens_per_s",)
    what |= {f"step of {rows}, ms": ("steps_ms", str(rows)) for rows in options.rows}
    print_table(
        [f"weights: {size:.0f} MB", *rounds],
        [
            [label, *(f"{median(name, *keys):.1f}" for name in rounds)]
            for label, keys in what.items()
        ],
    )
    if options.save:
        print(save("cpu_moe", {"weights_mb": size, "config": CONFIG, "rounds": rounds}))


if __name__ == "__main__":
    main()
