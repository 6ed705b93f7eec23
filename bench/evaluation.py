"""Evaluates SmolLM2-135M-Instruct with this engine and with mlx-lm: the samples, and tool calls.

python bench/evaluation.py             # all questions, a quarter of an hour; writes
                                       # bench/results/evaluation-cpu.json
python bench/evaluation.py --limit 10  # the first questions of each task, writes nothing

mlx-lm's own class for lm_eval gets the same weights in float32, because MLX's products of 4-bit
weights are scalar code on x86. It has no tool calls. Every option of quantization that this engine
has is a further column.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import mlx_paged  # before mlx.core, so that its BLAS takes effect

# isort: split
from harness import print_table, save
from mlx_lm.utils import save_config, save_model

from mlx_paged.demo.real_model import real_model_path
from mlx_paged.engine.loading import load
from mlx_paged.evals import samples
from mlx_paged.evals.run import run
from mlx_paged.evals.service import LocalService

TOOLS = "tool-calls:simple_python"
COLUMNS: dict[str, dict[str, str]] = {
    "mlx-paged": {},
    "int8 KV": {"kv_cache_dtype": "int8"},
    "int4 KV": {"kv_cache_dtype": "int4"},
    "int8 activations": {"cpu_activations": "int8"},
}

Results = dict[str, dict[str, float]]


def ours(limit: int | None, options: dict[str, str]) -> Results:
    service = LocalService(str(real_model_path()), tool_template=True, **options)
    try:
        found = run(service, samples.NAMES, limit=limit)
        found |= run(service, [TOOLS], limit=limit or 50)
    finally:
        service.close()
    return {name: each["metrics"] for name, each in found.items()}


def mlx_lm(limit: int | None) -> Results:
    from lm_eval import simple_evaluate
    from mlx_lm.evaluate import MLXLM

    loaded = load(real_model_path(), dtype="float32")
    config = {key: value for key, value in loaded.config.items() if "quantization" not in key}
    with tempfile.TemporaryDirectory() as directory:
        save_model(directory, loaded.model)
        save_config(config, Path(directory, "config.json"))
        loaded.tokenizer.save_pretrained(directory)
        model = MLXLM(directory, max_tokens=256, use_chat_template=False)
    results: Results = {}
    for name in samples.NAMES:
        found: Any = simple_evaluate(
            model, tasks=[samples.task(name)], limit=limit, bootstrap_iters=0
        )
        metrics = found["results"][name].items()
        results[name] = {
            key.removesuffix(",none"): value
            for key, value in metrics
            if isinstance(value, float) and "stderr" not in key
        }
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", type=int, help="questions of each task; no file")
    limit = parser.parse_args().limit
    mlx_paged.unpatch()  # mlx-lm is compared as it is
    columns: dict[str, Results] = {name: ours(limit, given) for name, given in COLUMNS.items()}
    columns["mlx-lm"] = mlx_lm(limit)
    rows = [
        [
            f"{task} {metric}",
            *(_shown(found.get(task, {}).get(metric)) for found in columns.values()),
        ]
        for task, metrics in columns["mlx-paged"].items()
        for metric in metrics
    ]
    print_table(["", *columns], rows)
    if limit is None:
        save("evaluation-cpu", {"benchmark": "evaluation", "results": columns})


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


if __name__ == "__main__":
    main()
