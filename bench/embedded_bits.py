"""Measures the effects of the embedded model's 8-bit format: KL, answers, bytes, speed.

python bench/embedded_bits.py          # a quarter of an hour; writes
                                       # bench/results/embedded_bits-cpu.json
python bench/embedded_bits.py --quick  # fewer tokens and turns, writes nothing

The original weights no longer exist, but each is known to within half a quantization step. So each
draw picks every weight at random among the values that round to the shipped one. Formats are made
from a draw and compared with it in the engine, on source files outside the training data (this
package's own) and by greedy answers to the demo's chats. For bytes and speed, every format is a
directory that is loaded like any other; engines take turns in one process, and the best turn
counts. mlx-lm is timed twice: with this package's products, as in the demo, and alone, as
installed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx_paged  # before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import psutil
from activation_quality import kl, logits, loss
from harness import print_table, save
from kv_quality import log_softmax, sources
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.generate import generate_step
from mlx_lm.utils import load as load_mlx_lm
from mlx_lm.utils import save_config, save_model

from mlx_paged import LLM, SamplingParams
from mlx_paged.cli.demo import NUM_CHATS, one_by_one
from mlx_paged.demo import model_path
from mlx_paged.demo.prompts import CHATS, SYSTEM_PROMPT
from mlx_paged.engine.config import EngineConfig
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.loading import load

FORMATS: dict[str, tuple[int, int]] = {  # (bits, group size); a group size of 0 means none
    "float32": (32, 0),
    "float16": (16, 0),
    "8 bits, groups of 64": (8, 64),
    "8 bits, groups of 32": (8, 32),
    "4 bits, groups of 64": (4, 64),
}
SHIPPED = "8 bits, groups of 64"
ROWS = (1, 8, 32)
ALONE_TOKENS = 8
PROMPT_TOKENS = 128
TURN_STEPS = 8


@dataclass(frozen=True)
class Quality:
    """A format compared with the weights it was made from; means over draws.

    Attributes:
        kl: KL of the next-token distributions, mean over all positions, in nats.
        perplexity_change: Relative change.
        top1: Share of positions with the same most likely token.
        equal_answers: Number of equal answers over all draws.
        answers: Number of answers.
        first_difference: Median number of equal tokens before the first difference, over answers
            that differ; None if all are equal.
    """

    format: str
    kl: float
    perplexity: float
    perplexity_change: float
    top1: float
    equal_answers: int
    answers: int
    first_difference: float | None


# --- Models ---------------------------------------------------------------------------------------


def drawn(shipped: nn.Module, dequantized: nn.Module, seed: int) -> nn.Module:
    """A float32 model whose weights round to those of `shipped`."""
    mx.random.seed(seed)
    steps = {
        f"{path}.weight": mx.repeat(module.scales.astype(mx.float32), module.group_size, axis=-1)
        for path, module in shipped.named_modules()
        if hasattr(module, "scales")
    }

    def moved(path: str, weight: mx.array) -> mx.array:
        if path not in steps:
            return weight
        return weight + steps[path] * mx.random.uniform(-0.5, 0.5, weight.shape)

    model = deepcopy(dequantized)
    model.update(tree_map_with_path(moved, model.parameters()))
    mx.eval(model.parameters())
    return model


def in_format(model: nn.Module, name: str) -> nn.Module:
    bits, group_size = FORMATS[name]
    model = deepcopy(model)
    if bits == 16:
        model.set_dtype(mx.float16)
    elif group_size:
        # Like `scripts/demo_model/convert.py`: from float16, with float16 scales.
        model.set_dtype(mx.float16)
        nn.quantize(model, group_size=group_size, bits=bits)
    mx.eval(model.parameters())
    return model


def write(model: nn.Module, name: str, config: dict[str, Any], folder: Path) -> Path:
    """Writes a directory like `mlx_lm.convert`."""
    bits, group_size = FORMATS[name]
    shutil.copytree(
        model_path(), folder, ignore=shutil.ignore_patterns("model.safetensors", "*.md")
    )
    config = {k: v for k, v in config.items() if not k.startswith("quantization")}
    if group_size:
        config["quantization"] = {"group_size": group_size, "bits": bits}
    save_model(folder, model)
    save_config(config, folder / "config.json")
    return folder


# --- Quality --------------------------------------------------------------------------------------


def answers(path: Path, num_chats: int) -> list[list[int]]:
    """Greedy answers to the demo's chats, with its system prompt and without."""
    system = {"role": "system", "content": SYSTEM_PROMPT}
    chats: list[Any] = []
    for chat in CHATS[:num_chats]:
        user = {"role": "user", "content": chat}
        chats += [[user], [system, user]]
    outputs = LLM(str(path)).chat(chats, SamplingParams(temperature=0, max_tokens=256))
    return [output.outputs[0].token_ids for output in outputs]


def num_equal(a: list[int], b: list[int]) -> int | None:
    """Length of the common prefix; None if the answers are equal."""
    return None if a == b else next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), len(a))


def log_probabilities(path: Path, texts: list[np.ndarray]) -> list[np.ndarray]:

    loaded = load(path)
    return [log_softmax(logits(loaded.model, loaded.config, "float32", text)) for text in texts]


def qualities(folder: Path, num_draws: int, quick: bool) -> Iterator[Quality]:
    """One result per format; the first compares the shipped 8-bit weights with dequantized ones."""
    plain = load(dtype="float32")
    shipped = load().model
    texts = sources(plain, *((2, 256) if quick else (8, 1024)))
    num_chats = 4 if quick else len(CHATS)

    def seen(model: nn.Module, name: str) -> tuple[list[np.ndarray], list[list[int]]]:
        path = write(model, name, plain.config, folder / "drawn")
        try:
            return log_probabilities(path, texts), answers(path, num_chats)
        finally:
            shutil.rmtree(path)

    found: dict[str, list[tuple[Any, ...]]] = {}

    def compare(name: str, reference: Any, other: Any) -> None:
        pairs = list(zip(reference[0], other[0], strict=True))
        same = np.mean([(r.argmax(axis=-1) == x.argmax(axis=-1)).mean() for r, x in pairs])
        lost, before = loss(other[0], texts), loss(reference[0], texts)
        ends = [num_equal(a, b) for a, b in zip(reference[1], other[1], strict=True)]
        divergence = kl(reference[0], other[0])
        found.setdefault(name, []).append((divergence, lost, lost - before, same, ends))
        print(name, divergence, lost - before, same, ends, flush=True)

    dequantized = seen(plain.model, "float32")
    quantized = load().model
    quantized.set_dtype(mx.float16)
    compare("as shipped, not dequantized", dequantized, seen(quantized, SHIPPED))
    for seed in range(num_draws):
        original = drawn(shipped, plain.model, seed)
        reference = seen(original, "float32")
        for name in FORMATS:
            if name != "float32":
                compare(name, reference, seen(in_format(original, name), name))
    for name, runs in found.items():
        divergence, lost, change, same = (
            float(np.mean([run[i] for run in runs])) for i in range(4)
        )
        ends = [end for run in runs for end in run[4]]
        different = [end for end in ends if end is not None]
        yield Quality(
            name, divergence, float(np.exp(lost)), float(np.exp(change) - 1), same,
            ends.count(None), len(ends), statistics.median(different) if different else None,
        )  # fmt: skip


# --- Bytes and speed ------------------------------------------------------------------------------


def loading(path: Path) -> dict[str, float]:
    """Measures load seconds and bytes in this process."""
    process = psutil.Process()
    before = process.memory_info().rss
    start = time.perf_counter()
    loaded = load(path)
    seconds = time.perf_counter() - start
    rss = process.memory_info().rss - before
    weights = sum(a.nbytes for _, a in tree_flatten(loaded.model.parameters()))
    return {"load_seconds": seconds, "weights_bytes": weights, "rss_bytes": rss}


def alone(path: Path) -> dict[str, float]:
    """Seconds per token of mlx-lm as installed, in this process, after a short prompt."""
    mx.set_default_device(mx.cpu)
    model, tokenizer = load_mlx_lm(str(path))[:2]
    prompt = mx.array(tokenizer.encode("def fibonacci(n):\n"))
    times = []
    start = time.perf_counter()
    for _ in generate_step(prompt, model, max_tokens=ALONE_TOKENS):
        times.append(time.perf_counter() - start)
        start = time.perf_counter()
    return {"alone_seconds_per_token": statistics.median(times[1:])}


def spawned(what: str, path: Path, env: dict[str, str]) -> dict[str, float]:
    command = [sys.executable, __file__, what, str(path)]
    done = subprocess.run(command, env={**os.environ, **env}, stdout=subprocess.PIPE, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def decode_speeds(engines: dict[str, Engine], rows: int, num_turns: int) -> dict[str, float]:
    """Tokens per second while `rows` sequences decode; the best turn of each."""
    params = SamplingParams(temperature=0, max_tokens=(num_turns + 2) * TURN_STEPS, ignore_eos=True)
    rng = np.random.default_rng(0)
    prompts = rng.integers(3, 4000, (rows, PROMPT_TOKENS)).tolist()
    for engine in engines.values():
        for i, prompt in enumerate(prompts):
            engine.add_request(str(i), prompt, params)
        while engine.stats().num_waiting or engine.stats().num_running < rows:
            engine.step()
    best = dict.fromkeys(engines, 0.0)
    for turn in range(num_turns):
        for name in list(engines) if turn % 2 else reversed(engines):
            start = time.perf_counter()
            for _ in range(TURN_STEPS):
                engines[name].step()
            speed = rows * TURN_STEPS / (time.perf_counter() - start)
            best[name] = max(best[name], speed)
    for engine in engines.values():
        for i in range(rows):
            engine.abort(str(i))
        engine.synchronize()
    return best


def speeds(paths: dict[str, Path], rounds: int) -> dict[str, dict[str, float]]:
    """Tokens per second; the best turn of each engine."""
    models = {name: load(path) for name, path in paths.items()}
    llms = {name: LLM(load(path), kv_cache_memory=128 << 20) for name, path in paths.items()}
    # A step in flight would otherwise run during another engine's turn.
    config = EngineConfig(kv_cache_memory=128 << 20, async_scheduling=False)
    engines = {name: Engine(load(path), config) for name, path in paths.items()}
    best: dict[str, dict[str, float]] = {name: {} for name in paths}
    for rows in ROWS:
        decode_speeds(engines, rows, 1)
        for name, speed in decode_speeds(engines, rows, 4 * rounds).items():
            best[name][f"{rows} rows"] = speed

    def keep(name: str, what: str, count: int, start: float) -> None:
        speed = count / (time.perf_counter() - start)
        best[name][what] = max(speed, best[name].get(what, 0.0))

    system = {"role": "system", "content": SYSTEM_PROMPT}
    chats: list[Any] = [[system, {"role": "user", "content": c}] for c in CHATS[:NUM_CHATS]]
    rng = np.random.default_rng(0)
    for turn in range(rounds):
        for name in list(paths) if turn % 2 else reversed(paths):
            llm = llms[name]
            prompts = [rng.integers(3, 4000, 1024).tolist()]
            start = time.perf_counter()
            llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1))
            keep(name, "prefill", 1024, start)
            llm.engine.reset_prefix_cache()
            start = time.perf_counter()
            outputs = llm.chat(chats, SamplingParams(temperature=0, max_tokens=160))
            keep(name, "demo", sum(len(o.outputs[0].token_ids) for o in outputs), start)
            start = time.perf_counter()
            [answer], _ = one_by_one(models[name], llm.render_chats(chats[:1]), 160)
            keep(name, "mlx-lm", len(answer), start)
    return best


def measured(folder: Path, rounds: int) -> list[dict[str, Any]]:

    plain = load(dtype="float32")
    paths = {}
    for name in FORMATS:
        if name == SHIPPED:
            paths[name] = Path(model_path())
        else:
            paths[name] = write(in_format(plain.model, name), name, plain.config, folder / name)
    results: dict[str, dict[str, Any]] = {}
    for name, path in paths.items():
        results[name] = {
            "format": name,
            "disk_bytes": sum(f.stat().st_size for f in path.iterdir() if f.suffix != ".md"),
            **spawned("alone", path, {"MLX_PAGED_DISABLE": "1", "MLX_PAGED_BLAS": "off"}),
        }
    for _ in range(rounds):
        for name, path in paths.items():
            for what, value in spawned("loading", path, {}).items():
                results[name][what] = min(value, results[name].get(what, value))
    for name, tokens in speeds(paths, rounds).items():
        results[name]["tokens_per_second"] = tokens
    return list(results.values())


def main() -> None:

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer tokens and turns, no file")
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    rounds, draws = (2, 1) if options.quick else (options.rounds, options.draws)
    mlx_paged.unpatch()  # mlx-lm must use its own caches
    mx.set_default_device(mx.cpu)
    with tempfile.TemporaryDirectory() as folder:
        speed = measured(Path(folder), rounds)
        quality = list(qualities(Path(folder), draws, options.quick))
    print_table(
        ["", "KL", "perplexity", "change", "same top-1", "equal answers", "differ after"],
        [
            [
                q.format,
                f"{q.kl:.2g}",
                f"{q.perplexity:.3f}",
                f"{100 * q.perplexity_change:+.3f}%",
                f"{100 * q.top1:.2f}%",
                f"{q.equal_answers} of {q.answers}",
                "" if q.first_difference is None else f"{q.first_difference:.0f} tokens",
            ]
            for q in quality
        ],
    )
    columns = [*(f"{rows} rows" for rows in ROWS), "prefill", "demo", "mlx-lm"]
    print_table(
        ["", "MB on disk", "in memory", "load s", *columns, "mlx-lm alone"],
        [
            [
                r["format"],
                f"{r['disk_bytes'] / 1e6:.1f}",
                f"{r['weights_bytes'] / 1e6:.1f}",
                f"{r['load_seconds']:.2f}",
                *(f"{r['tokens_per_second'][what]:.0f}" for what in columns),
                f"{1 / r['alone_seconds_per_token']:.1f}",
            ]
            for r in speed
        ],
    )
    if not options.quick:
        save(
            "embedded_bits-cpu",
            {
                "benchmark": "embedded_bits",
                "draws": draws,
                "rounds": rounds,
                "quality": [asdict(q) for q in quality],
                "speed": speed,
            },
        )


if __name__ == "__main__":
    if sys.argv[1:2] in (["alone"], ["loading"]):
        mode = {"alone": alone, "loading": loading}[sys.argv[1]]
        print(json.dumps(mode(Path(sys.argv[2]))))
    else:
        main()
