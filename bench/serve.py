"""The server against mlx_lm.server and vllm-mlx: same machine, weights, BLAS and load, in turns.

    python bench/serve.py --vllm-mlx /path/to/an/environment/bin/vllm-mlx

All three serve one directory with the embedded model's weights in float32, and use the same
OpenBLAS through LD_PRELOAD (Debian: libopenblas0). All stay up, and the others idle while one is
measured, workload by workload, round by round; figures are medians over the rounds. A bias against
the end tokens gives answers their full length.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes.util
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import free_port, print_table, save, server_process

from mlx_paged.bench.client import Target, run
from mlx_paged.bench.datasets import Prompt, random_prompts
from mlx_paged.cli.bench.serve import figures


@dataclass(frozen=True)
class Server:
    """Starts one kind of server; fills in ``{model}`` and ``{port}``."""

    name: str
    command: list[str]
    extra: dict[str, Any]  # additional fields of each request
    served_name: str | None = None  # None: the model's directory


@dataclass(frozen=True)
class Workload:
    """The workload."""

    name: str
    concurrency: int | None
    rate: float = float("inf")
    input_len: int = 128
    prefix_len: int = 0
    output_len: int = 64
    num_prompts: int = 48


WORKLOADS = [
    Workload("random 128 + 64", 1, num_prompts=4),
    Workload("random 128 + 64", 16, num_prompts=32),
    Workload("random 128 + 64", 32, num_prompts=64),
    Workload("shared 256 of 288 + 64", 16, input_len=32, prefix_len=256, num_prompts=32),
    Workload("random 128 + 64 at 2/s", None, rate=2.0, num_prompts=24),
]


def export_float32(target: Path) -> None:
    """Writes the dequantized embedded model, which every server loads."""
    import mlx_paged.extension  # noqa: F401  (BLAS before mlx)

    # isort: split
    from mlx_lm.utils import save_config, save_model

    from mlx_paged.demo import model_path
    from mlx_paged.engine.loading import load

    model = load(dtype="float32")
    save_model(target, model.model)
    config = {k: v for k, v in model.config.items() if not k.startswith("quantization")}
    save_config({**config, "torch_dtype": "float32"}, target / "config.json")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(Path(model_path()) / name, target / name)


@contextlib.contextmanager
def started(server: Server, model: Path, blas: str) -> Iterator[str]:
    """A running server's address."""
    port = free_port()
    command = [part.format(model=model, port=port) for part in server.command]
    env = {**os.environ, "LD_PRELOAD": blas, "MLX_PAGED_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
    with server_process(server.name, command, port, env=env) as url:
        yield url


def measure(
    url: str, server: Server, model: Path, tokenizer: Any, workload: Workload, seed: int
) -> Any:
    prompts = random_prompts(
        tokenizer, workload.num_prompts, workload.input_len, workload.output_len,
        prefix_len=workload.prefix_len, seed=seed + 1,
    )  # fmt: skip
    return measure_prompts(url, server, model, prompts, workload)


def measure_prompts(
    url: str, server: Server, model: Path, prompts: list[Prompt], workload: Workload
) -> Any:
    """Sends the prompts as the workload says; returns the figures of `mlx-paged bench serve`."""
    target = Target(
        f"{url}/v1/completions",
        server.served_name or str(model),
        False,
        {"temperature": 0, **server.extra},
    )
    results, duration = asyncio.run(
        run(target, prompts, rate=workload.rate, concurrency=workload.concurrency, seed=1)
    )
    made = figures(results, duration, [50, 99])
    if made["failed"]:
        print(f"{server.name}: {made['failed']} failed: {next(e for e in made['errors'] if e)}")
    long = ("ttfts", "itls", "generated_texts", "errors", "input_lens", "output_lens")
    return {key: value for key, value in made.items() if key not in long}


def servers(vllm_mlx: str | None, no_end: dict[str, float]) -> list[Server]:
    ours = [sys.executable, "-m", "mlx_paged.cli.main", "serve", "{model}", "--port", "{port}",
            "--served-model-name", "m", "--disable-log-requests"]  # fmt: skip
    theirs = [sys.executable, "-m", "mlx_lm", "server", "--model", "{model}", "--port", "{port}",
              "--log-level", "ERROR"]  # fmt: skip
    found = [
        Server("mlx-paged", ours, {"logit_bias": no_end}, "m"),
        Server("mlx_lm.server", theirs, {"logit_bias": no_end}),
    ]
    if vllm_mlx is not None:
        command = [vllm_mlx, "serve", "{model}", "--continuous-batching", "--port", "{port}"]
        found.append(Server("vllm-mlx", command, {"logit_bias": no_end}))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--vllm-mlx", help="its command, in its own environment")
    parser.add_argument("--blas", default=ctypes.util.find_library("openblas"))
    parser.add_argument("--no-save", dest="save", action="store_false")
    options = parser.parse_args()
    if options.blas is None:
        raise SystemExit("no OpenBLAS that all servers could share (Debian: libopenblas0)")
    from mlx_lm.utils import load_tokenizer

    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        export_float32(model)
        tokenizer = load_tokenizer(model)
        no_end = {str(token): -100.0 for token in tokenizer.eos_token_ids}
        runs: dict[tuple[int, str], list[Any]] = {}
        with contextlib.ExitStack() as stack:
            running = [
                (server, stack.enter_context(started(server, model, options.blas)))
                for server in servers(options.vllm_mlx, no_end)
            ]
            warm = Workload("warm", 4, num_prompts=4, output_len=8)
            for server, url in running:
                measure(url, server, model, tokenizer, warm, seed=0)
            for number in range(options.rounds):
                for i, workload in enumerate(WORKLOADS):
                    for server, url in running:
                        # A new seed each time, so that no prefix is cached.
                        made = measure(url, server, model, tokenizer, workload, 100 * number + i)
                        runs.setdefault((i, server.name), []).append(made)
                        print(server.name, workload.name, workload.concurrency,
                              f"{made['output_throughput']:.0f} tok/s,",
                              f"TTFT {made['median_ttft_ms']:.0f} ms", flush=True)  # fmt: skip
    report(runs, options)


#: Columns of `latencies`.
LATENCIES = ["TTFT ms 50/99", "TPOT ms", "ITL p99", "done+failed"]


def latencies(figures: dict[str, float]) -> list[str]:
    """Formats a server's latencies and numbers of requests."""
    return [
        f"{figures['median_ttft_ms']:.0f} / {figures['p99_ttft_ms']:.0f}",
        f"{figures['median_tpot_ms']:.1f}",
        f"{figures['p99_itl_ms']:.0f}",
        f"{figures['completed']:.0f}+{figures['failed']:.0f}",
    ]


def names_of(runs: dict[tuple[int, str], list[Any]]) -> list[str]:
    """Returns the names of the servers in the order in which they ran."""
    return list(dict.fromkeys(name for _, name in runs))


def medians(workloads: list[Workload], runs: dict[tuple[int, str], list[Any]]) -> list[Any]:
    """Returns an entry for each workload: by name of the server, the medians of its rounds.

    Args:
        runs: Figures of the rounds, by index of the workload and name of the server.
    """
    results = []
    for i, workload in enumerate(workloads):
        entry: dict[str, Any] = {"workload": workload.name, "concurrency": workload.concurrency}
        for name in names_of(runs):
            rounds = runs[i, name]
            entry[name] = {key: statistics.median(r[key] for r in rounds) for key in rounds[0]}
        results.append(entry)
    return results


def report(runs: dict[tuple[int, str], list[Any]], options: argparse.Namespace) -> None:
    results, rows, names = medians(WORKLOADS, runs), [], names_of(runs)
    for workload, entry in zip(WORKLOADS, results, strict=True):
        ours = entry["mlx-paged"]
        peers = [entry[name] for name in names if name != "mlx-paged"]
        best = max(peer["output_throughput"] for peer in peers)
        entry["speedup_over_best_peer"] = ours["output_throughput"] / best
        at_once = str(workload.concurrency or "-")
        for name in names:
            f = entry[name]
            rows.append([
                workload.name, at_once, name, f"{f['output_throughput']:.0f}",
                f"{ours['output_throughput'] / f['output_throughput']:.2f}x", *latencies(f),
            ])  # fmt: skip
    print_table(["workload", "at once", "server", "tokens/s", "ours is", *LATENCIES], rows)
    if options.save:
        load = os.getloadavg()
        print(save("serve-cpu", {"rounds": options.rounds, "load": load, "results": results}))


if __name__ == "__main__":
    main()
