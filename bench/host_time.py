"""Host time of a step: Python's work for 256 running sequences, with no forward pass to hide it.

The model computes nothing, so a step consists of the scheduler, the plan, the sampling metadata,
the commit and the updates. Time inside `mx.eval` and `mx.async_eval` is reported separately. So is
detokenization for requests without stop strings, which runs on the reader's thread after the step.

Also measures the host time of a call for one token after a cached prefix: the time until its step
is launched, and the time after its token has been read.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from harness import save
from mlx_lm.models.cache import KVCache
from mlx_lm.utils import load_tokenizer

from mlx_paged.demo import model_path
from mlx_paged.engine.config import EngineConfig
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.llm import LLM
from mlx_paged.engine.sampling_params import SamplingParams
from mlx_paged.model.caches import PagedLayerCache
from mlx_paged.model.families import register_family
from mlx_paged.model.loader import LoadedModel

VOCAB_SIZE = 320
TOKEN = 312  # " the" in the embedded tokenizer, the token of greedy requests
# Phases of a step in order, then those that do not count as its host time.
PHASES = ("schedule", "launch", "read", "commit", "publish", "evaluation", "reading text")


class Case(NamedTuple):
    """The settings of all sequences."""

    name: str
    temperature: float = 0.0
    stop: str | None = None


CASES = (
    Case("greedy"),
    Case("sampled", temperature=1.0),
    Case("greedy, stop strings", stop="never said"),
)


class _Head(nn.Module):
    def __call__(self, rows: mx.array) -> mx.array:
        logits = mx.arange(VOCAB_SIZE) == TOKEN
        return mx.broadcast_to(logits.astype(mx.float32), (rows.shape[0], 1, VOCAB_SIZE))


# The model's logits are constant, so there is nothing to compare.
register_family("null", verify=False)


class NullModel(nn.Module):
    """One attention layer that uses its cache but does no arithmetic."""

    model_type = "null"

    def __init__(self) -> None:
        super().__init__()
        self.lm_head = _Head()

    def make_cache(self) -> list[KVCache]:
        return [KVCache()]

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        if not isinstance(cache[0], PagedLayerCache):  # The loader asks for the cache layout.
            kv = mx.zeros((1, 1, 1, 8))
            cache[0].update_and_fetch(kv, kv)
        return self.lm_head(tokens)


def null_model() -> LoadedModel:
    """A model whose steps cost the device almost nothing."""
    config = {"model_type": "null", "vocab_size": VOCAB_SIZE}
    return LoadedModel(NullModel(), load_tokenizer(model_path()), config, "null")


def null_engine(**options: Any) -> Engine:
    """An engine for this model."""
    return Engine(null_model(), EngineConfig(kv_cache_memory=64 << 20, **options))


class Clock:
    """Seconds by phase since the last `reset`; MLX's evaluations are a phase of their own."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def reset(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)

    def timed(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps `function` to add its time, without evaluations, to a phase."""

        def call(*args: Any) -> Any:
            start, in_mlx = time.perf_counter(), self.seconds["evaluation"]
            result = function(*args)
            spent = time.perf_counter() - start
            if phase != "evaluation":
                spent -= self.seconds["evaluation"] - in_mlx
            self.seconds[phase] += spent
            return result

        return call

    @contextmanager
    def watching(self, engine: Engine) -> Iterator[None]:
        """Times the parts of an engine."""
        parts: list[tuple[object, str, str]] = [
            (mx, "eval", "evaluation"),
            (mx, "async_eval", "evaluation"),
            (engine._scheduler, "schedule", "schedule"),
            (engine._scheduler, "update_from_output", "commit"),
            (engine._executor, "launch", "launch"),
            (engine._executor, "read", "read"),
            (engine._output_processor, "process_outputs", "publish"),
        ]
        self.reset()
        originals = [getattr(part, name) for part, name, _ in parts]
        for (part, name, phase), function in zip(parts, originals):
            setattr(part, name, self.timed(phase, function))
        try:
            yield
        finally:
            for (part, name, _), function in zip(parts, originals):
                setattr(part, name, function)


def fill(engine: Engine, case: Case, num_seqs: int, prompt_len: int) -> None:
    """Adds the requests and steps until all of them decode."""
    rng = np.random.default_rng(0)
    params = SamplingParams(
        temperature=case.temperature, stop=case.stop, max_tokens=None, ignore_eos=True, seed=0
    )
    for i in range(num_seqs):
        engine.add_request(str(i), rng.integers(0, VOCAB_SIZE, prompt_len).tolist(), params)
    while engine.stats().num_waiting:
        engine.step()
    for _ in range(20):
        engine.step()


def measure(
    case: Case, num_seqs: int, *, prompt_len: int, steps: int, profile: bool
) -> dict[str, Any]:
    """Times `steps` decode steps of `num_seqs` sequences."""
    engine = null_engine(max_num_seqs=num_seqs, max_model_len=4096)
    fill(engine, case, num_seqs, prompt_len)
    samples: list[dict[str, float]] = []
    profiler = cProfile.Profile()
    clock = Clock()
    gc.collect()
    gc.freeze()  # like the engine's thread
    with clock.watching(engine):
        for _ in range(steps):
            clock.reset()
            start = time.perf_counter()
            if profile:
                profiler.enable()
            updates = engine.step()
            profiler.disable()
            clock.seconds["step"] = time.perf_counter() - start - clock.seconds["evaluation"]
            start = time.perf_counter()
            for update in updates:
                _ = update.text
            clock.seconds["reading text"] = time.perf_counter() - start
            samples.append(clock.seconds)
    gc.unfreeze()
    if profile:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(25)
    assert engine.stats().num_running == num_seqs
    steps_ms = np.array([sample["step"] for sample in samples]) * 1e3
    result = {
        "case": case.name,
        "num_seqs": num_seqs,
        "prompt_len": prompt_len,
        "host_ms_median": round(float(np.median(steps_ms)), 3),
        "host_ms_p99": round(float(np.percentile(steps_ms, 99)), 3),
        "host_ms_max": round(float(steps_ms.max()), 3),
        "median_ms": {
            phase: round(float(np.median([sample[phase] for sample in samples])) * 1e3, 3)
            for phase in PHASES
        },
    }
    print(f"{case.name}, {num_seqs} sequences: {result['host_ms_median']} ms a step")
    print("   ", ", ".join(f"{phase} {ms}" for phase, ms in result["median_ms"].items()))
    return result


def first_token(prefix_len: int, tail_len: int, *, calls: int) -> dict[str, Any]:
    """Times calls of `LLM.generate` for one token after a cached prefix."""
    llm = LLM(null_model(), kv_cache_memory=64 << 20, max_model_len=2 * (prefix_len + tail_len))
    rng = np.random.default_rng(0)
    prefix = rng.integers(0, VOCAB_SIZE, prefix_len).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=1)
    clock, launched, read = Clock(), [0.0], [0.0]

    def host_time() -> float:
        return time.perf_counter() - clock.seconds["evaluation"]

    def noting(place: list[float], function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            result = function(*args)
            place[0] = host_time()
            return result

        return call

    executor = llm.engine._executor
    executor.launch = noting(launched, executor.launch)  # type: ignore[method-assign]
    executor.read = noting(read, executor.read)  # type: ignore[method-assign]
    samples: list[tuple[float, float]] = []
    with clock.watching(llm.engine):
        for _ in range(calls):
            # Its first token is new, so that no block of an earlier prompt is copied on write.
            prompt = [*prefix, len(samples) % VOCAB_SIZE]
            prompt += rng.integers(0, VOCAB_SIZE, tail_len - 1).tolist()
            clock.reset()
            start = time.perf_counter()
            llm.generate([prompt], params)
            samples.append((launched[0] - start, host_time() - read[0]))
    before, after = np.median(np.array(samples) * 1e3, axis=0)
    print(f"{tail_len} tokens behind {prefix_len} cached ones: {before:.3f} ms before the launch,")
    print(f"    {after:.3f} after the token has been read")
    return {
        "prefix_len": prefix_len,
        "tail_len": tail_len,
        "median_ms": {"before launch": round(before, 3), "after read": round(after, 3)},
    }


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
        measure(case, n, prompt_len=args.prompt_len, steps=args.steps, profile=args.profile)
        for n in args.num_seqs
        for case in CASES
    ]
    first = first_token(4096, 64, calls=args.steps)
    if not args.no_save:
        print(save("host_time", {"steps": results, "first_token": first}))


if __name__ == "__main__":
    main()
