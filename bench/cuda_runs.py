"""One workload on the engine or on mlx-lm's BatchGenerator, each as its defaults have it."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import BatchGenerator

from mlx_paged import ops
from mlx_paged.engine.config import EngineConfig
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.sampling_params import SamplingParams
from mlx_paged.model import patches
from mlx_paged.model.loader import LoadedModel

Prompts = list[list[int]]
WHO = ("mlx_paged", "mlx-lm")
BLOCK = 32


def prompts_of(lengths: tuple[int, ...], seed: int = 0) -> Prompts:
    rng = np.random.default_rng((seed, len(lengths)))
    return [rng.integers(3, 128000, n).tolist() for n in lengths]


def engine_for(model: LoadedModel, prompts: Prompts, output_tokens: int) -> Engine:
    """An engine whose pool is what the workload needs."""
    blocks = sum(-(-(len(p) + output_tokens) // BLOCK) + 1 for p in prompts) + 8
    return Engine(model, EngineConfig(num_gpu_blocks_override=blocks, max_model_len=16384))


def add_all(engine: Engine, prompts: Prompts, max_tokens: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params)


@contextmanager
def plain_mlx() -> Any:
    """MLX as it is without this package."""
    patches.uninstall()
    limits = [(f, f(1 << 62)) for f in (mx.set_cache_limit, mx.set_memory_limit)]
    total = int(mx.device_info()["memory_size"]) if "memory_size" in mx.device_info() else 140 << 30
    for set_limit, _ in limits:
        set_limit(int(total * 0.95))  # MLX's own defaults
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
    """Step time while all rows decode, time until they do, and peak memory."""
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
        begun |= {u.request_id for u in updates if u.token_id is not None}
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
        raise RuntimeError("the first rows ended before the last prompt was in")
    steps = np.diff([t for t in stamps if t >= full_from])[2:]
    return {
        "step_ms": round(float(np.median(steps)) * 1e3, 3),
        "steps": len(steps),
        "until_all_decode_s": round(full_from - start, 4),
        "peak_gb": round(mx.get_peak_memory() / 1e9, 2),
    }


def prefill(who: str, model: LoadedModel, lengths: tuple[int, ...], repeat: int) -> dict[str, Any]:
    """Prompt tokens per second up to the last first token; other prompts each time."""
    seconds = []
    for i in range(1 + repeat):  # (the first prepares cuDNN for the shapes)
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
    """Time to the first token of a prompt that is new, and of one whose prefix is cached."""
    rest()
    engine = Engine(model, EngineConfig(num_gpu_blocks_override=1024, max_model_len=16384))
    cold, warm = [], []
    for i in range(1 + repeat):
        [prefix] = prompts_of((prefix_len,), seed=100 + i)
        for tail, seconds in zip(prompts_of((tail_len,) * 2, seed=200 + i), (cold, warm)):
            add_all(engine, [prefix + tail], 1)
            seconds.append(_timed(lambda: _drain(engine)))
            gc.collect()  # between the figures, not within
    ms = [round(statistics.median(s[1:]) * 1e3, 2) for s in (cold, warm)]
    return {"cold_ms": ms[0], "warm_ms": ms[1], "share": round(ms[1] / ms[0], 4)}


def _drain(engine: Engine) -> None:
    while engine.has_unfinished:
        engine.step()


def _timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
