"""Evaluates SmolLM2-135M-Instruct with this engine, mlx-lm and llama.cpp: samples and tool calls.

python bench/evaluation.py             # all questions, a quarter of an hour; writes
                                       # bench/results/evaluation-cpu.json
python bench/evaluation.py --limit 10  # the first questions of each task, writes nothing
python bench/evaluation.py --llama     # llama.cpp, built once; adds its column to that file

mlx-lm's own class for lm_eval gets the same weights in float32, because MLX's products of 4-bit
weights are scalar code on x86. It has no tool calls. Every option of quantization that this engine
has is a further column.

llama-server answers what is generated, from the same GGUF file. It gives no probabilities of a
prompt, so llama-perplexity scores HellaSwag. It divides an ending's log-probability by its tokens,
lm_eval by its characters; the metric is called acc_per_token.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import mlx_paged  # before mlx.core, so that its BLAS takes effect

# isort: split
import llama_peer
from harness import RESULTS, free_port, print_table, save, server_process
from mlx_lm.utils import save_config, save_model

from mlx_paged.demo.real_model import real_model_path
from mlx_paged.engine.loading import load
from mlx_paged.evals import samples
from mlx_paged.evals.run import run
from mlx_paged.evals.service import LocalService, RemoteService

TOOLS = "tool-calls:simple_python"
_NAME = "evaluation-cpu"
_HELLASWAG = "hellaswag-sample"
_GENERATED = ("gsm8k-sample", "humaneval-sample")
_LLAMA_TOKENS = 4096  # of a slot
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


def llama_cpp(limit: int | None, cache: Path) -> Results:
    programs, cores = llama_peer.build(cache, "native"), os.cpu_count() or 1
    port = free_port()
    command = llama_peer.server_command(
        programs, real_model_path(), cores, "8 slots", _LLAMA_TOKENS, port
    )
    with server_process("llama-server", [*command, "--jinja"], port) as url:
        service = RemoteService(url, None, concurrency=8)
        try:
            found = run(service, _GENERATED, limit=limit)
            found |= run(service, [TOOLS], limit=limit or 50)
        finally:
            service.close()
    results = {name: each["metrics"] for name, each in found.items()}
    results[_HELLASWAG] = {"acc_per_token": _llama_hellaswag(programs, cores, limit)}
    return results


def _llama_hellaswag(programs: Path, cores: int, limit: int | None) -> float:
    """The share of HellaSwag's questions whose right ending llama-perplexity finds likeliest."""
    path = samples.task(_HELLASWAG)["dataset_kwargs"]["data_files"]
    questions = [json.loads(line) for line in Path(path).read_text().splitlines()][:limit]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        for question in questions:
            context = f"{question['activity_label']}: {question['ctx']}"
            texts = [context, str(question["expected_index"]), *question["endings"]]
            file.writelines(" ".join(text.split()) + "\n" for text in texts)
        file.flush()
        done = llama_peer.run(
            [str(programs / "llama-perplexity"), "-m", str(real_model_path()), "-f", file.name,
             "--hellaswag", "--hellaswag-tasks", str(len(questions)), "-t", str(cores)],
            set(range(cores)),
        )  # fmt: skip
    last = re.findall(rf"^{len(questions)}\t([0-9.]+)%", done.out + done.err, re.MULTILINE)
    return float(last[-1]) / 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", type=int, help="questions of each task; no file")
    parser.add_argument("--llama", action="store_true", help="only llama.cpp")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache/mlx_paged-bench")
    options = parser.parse_args()
    limit = options.limit
    if options.llama:
        columns: dict[str, Results] = {}
        if limit is None:
            columns = json.loads((RESULTS / f"{_NAME}.json").read_text())["results"]
        columns["llama.cpp"] = llama_cpp(limit, options.cache)
    else:
        mlx_paged.unpatch()  # mlx-lm is compared as it is
        columns = {name: ours(limit, given) for name, given in COLUMNS.items()}
        columns["mlx-lm"] = mlx_lm(limit)
    measured = dict.fromkeys(
        (task, metric)
        for found in columns.values()
        for task, metrics in found.items()
        for metric in metrics
    )
    rows = [
        [
            f"{task} {metric}",
            *(_shown(found.get(task, {}).get(metric)) for found in columns.values()),
        ]
        for task, metric in measured
    ]
    print_table(["", *columns], rows)
    if limit is None:
        save(_NAME, {"benchmark": "evaluation", "results": columns})


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


if __name__ == "__main__":
    main()
