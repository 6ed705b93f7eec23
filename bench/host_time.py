"""Host time of a step: what Python spends on 256 running sequences, with no forward to hide it.

The model computes nothing, so a step is the scheduler, the plan, the sampler's rows, the commit and
the text. Time inside `mx.eval` and `mx.async_eval` is taken out and shown apart.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from harness import save
from mlx_lm.models.cache import KVCache
from mlx_lm.utils import load_tokenizer

from mlx_paged.attention.cache import PagedLayerCache
from mlx_paged.demo import model_path
from mlx_paged.engine.config import EngineConfig
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.sampling_params import SamplingParams
from mlx_paged.models.families import register_family
from mlx_paged.models.load import LoadedModel

VOCAB_SIZE = 64


class _Head(nn.Module):
    def __call__(self, rows: mx.array) -> mx.array:
        return mx.zeros((rows.shape[0], 1, VOCAB_SIZE))


# Its logits depend on nothing that could be compared.
register_family("null", verify=False)


class NullModel(nn.Module):
    """One attention layer by its cache, and no arithmetic."""

    model_type = "null"

    def __init__(self) -> None:
        super().__init__()
        self.lm_head = _Head()

    def make_cache(self) -> list[KVCache]:
        return [KVCache()]

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        if not isinstance(cache[0], PagedLayerCache):  # asked what its layers store
            kv = mx.zeros((1, 1, 1, 8))
            cache[0].update_and_fetch(kv, kv)
        return self.lm_head(tokens)


def null_engine(**options: Any) -> Engine:
    """An engine whose steps cost the device next to nothing."""
    tokenizer = load_tokenizer(model_path())
    model = LoadedModel(
        NullModel(), tokenizer, {"model_type": "null", "vocab_size": VOCAB_SIZE}, "null"
    )
    return Engine(model, EngineConfig(kv_cache_memory=64 << 20, **options))


@contextmanager
def time_in_mlx(spent: list[float]) -> Iterator[None]:
    """Adds the time inside evaluations to `spent[0]`."""
    originals = {name: getattr(mx, name) for name in ("eval", "async_eval")}

    def timed(function: Any) -> Any:
        def call(*args: Any) -> None:
            start = time.perf_counter()
            function(*args)
            spent[0] += time.perf_counter() - start

        return call

    for name, function in originals.items():
        setattr(mx, name, timed(function))
    try:
        yield
    finally:
        for name, function in originals.items():
            setattr(mx, name, function)


def fill(engine: Engine, num_seqs: int, prompt_len: int, temperature: float) -> None:
    """Adds the requests and steps until all of them decode."""
    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=temperature, max_tokens=None, ignore_eos=True, seed=0)
    for i in range(num_seqs):
        engine.add_request(str(i), rng.integers(0, VOCAB_SIZE, prompt_len).tolist(), params)
    while engine.stats().num_waiting:
        engine.step()
    for _ in range(20):
        engine.step()


def measure(
    num_seqs: int, *, prompt_len: int, steps: int, temperature: float, profile: bool
) -> dict[str, Any]:
    """Times `steps` decode steps of `num_seqs` sequences."""
    engine = null_engine(max_num_seqs=num_seqs, max_model_len=4096)
    fill(engine, num_seqs, prompt_len, temperature)
    host, device = [], []
    profiler = cProfile.Profile()
    spent = [0.0]
    gc.collect()
    gc.freeze()  # as the engine's thread does
    with time_in_mlx(spent):
        if profile:
            profiler.enable()
        for _ in range(steps):
            spent[0] = 0.0
            start = time.perf_counter()
            engine.step()
            host.append(time.perf_counter() - start - spent[0])
            device.append(spent[0])
        profiler.disable()
    if profile:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(25)
    assert engine.stats().num_running == num_seqs
    result = {
        "num_seqs": num_seqs,
        "prompt_len": prompt_len,
        "temperature": temperature,
        "host_ms_median": round(float(np.median(host)) * 1e3, 3),
        "host_ms_p99": round(float(np.percentile(host, 99)) * 1e3, 3),
        "host_ms_max": round(max(host) * 1e3, 3),
        "evaluation_ms_median": round(float(np.median(device)) * 1e3, 3),
    }
    print(result)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-seqs", type=int, nargs="*", default=[1, 32, 256])
    parser.add_argument("--prompt-len", type=int, default=256)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--no-save", action="store_true")
    args = parser.parse_args()
    mx.set_default_device(mx.cpu)
    results = [
        measure(
            n, prompt_len=args.prompt_len, steps=args.steps, temperature=t, profile=args.profile
        )
        for n in args.num_seqs
        for t in (0.0, 1.0)
    ]
    if not args.no_save:
        print(save("host_time", {"steps": results}))


if __name__ == "__main__":
    main()
