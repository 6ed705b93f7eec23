"""The engine on an NVIDIA GPU against mlx-lm's BatchGenerator, in turn, on random weights.

python bench/cuda_engine.py                         # everything, ten minutes on an H200
python bench/cuda_engine.py --only decode prefill   # some parts; the others' results are kept

Step time is the median while all rows decode; memory is MLX's peak, from before the engine is made.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
from collections.abc import Callable
from typing import Any

os.environ["MLX_PAGED_DISABLE"] = "1"  # mlx-lm's BatchGenerator as it is
import mlx_paged.extension  # noqa: F401  (before mlx.core)

# isort: split
import mlx.core as mx
from cuda_models import random_model
from cuda_runs import WHO, decode, prefill, prompts_of, shared_prefix
from harness import RESULTS, environment, print_table, save

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
# More than there are steps before the last prompt is in.
OUTPUT_TOKENS = {"32 x 4096": 160, "256 x 1024": 320}


def attempt(run: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """What a run gives, or why it gave nothing: the other side still counts."""
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
