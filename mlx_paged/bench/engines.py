"""Runs two engines on the same work in turns: this package's and mlx-lm's `BatchGenerator`.

Both get the same weights in the same dtype, the same BLAS and the same token ids, all at once. With
`ignore_eos`, every answer has `max_tokens` tokens; without it, an answer ends at the model's first
end token, which counts as one of its tokens. Both read every token on the host as it arrives, and
detokenize all answers at the end.
"""

from __future__ import annotations

import contextlib
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from mlx_paged import extension  # noqa: F401  (its BLAS has to come before mlx.core)

# isort: split
import mlx.core as mx

from mlx_paged.bench.datasets import Prompt
from mlx_paged.bench.figures import Answer, EngineName, Run
from mlx_paged.bench.remote import Remote
from mlx_paged.engine.config import EngineConfig
from mlx_paged.engine.loading import load
from mlx_paged.engine.ranks.start import make_engine
from mlx_paged.engine.sampling_params import SamplingParams
from mlx_paged.errors import MlxPagedError
from mlx_paged.model.loader import LoadedModel


@dataclass(frozen=True)
class Settings:
    """Settings of both engines.

    Attributes:
        model: Directory, GGUF file or hub id; None means the embedded model.
        dtype: See `mlx_paged.load`.
        num_answers: Answers per prompt.
        temperature: 0 is greedy.
        ignore_eos: Generate answers of full length.
        detokenize: Make the text of the answers, and count its time.
        max_num_seqs: Maximum running sequences.
        seed: Seed of sampled answers.
        engine_options: Other fields of `EngineConfig`, for this package's engine.
    """

    model: str | None = None
    dtype: str = "auto"
    num_answers: int = 1
    temperature: float = 0.0
    ignore_eos: bool = True
    detokenize: bool = True
    max_num_seqs: int = 256
    seed: int = 0
    engine_options: dict[str, Any] = field(default_factory=dict)


class Runner:
    """An engine with a loaded model. Peak memory is counted from `reset_peak`."""

    def run(self, prompts: Sequence[Prompt], *, cold: bool = False) -> Run:
        """Runs all requests, which arrive at once.

        Args:
            cold: Forget cached prefixes first.
        """
        raise NotImplementedError

    def reset_peak(self) -> None:
        mx.reset_peak_memory()

    def footprint(self) -> Footprint:
        return measure_footprint()

    def close(self) -> None:
        """Releases resources that the garbage collector does not."""


def open_runner(name: EngineName, settings: Settings) -> Runner:
    """Loads the model and makes the engine in this process.

    Raises:
        ModelLoadError, UnsupportedModelError, InvalidParameterError: See `LLM`.
    """
    if name is EngineName.MLX_LM:
        return MlxLmRunner(load(settings.model, dtype=settings.dtype), settings)
    return PagedRunner(settings)


class PagedRunner(Runner):
    """This package's engine."""

    def __init__(self, settings: Settings) -> None:
        config = EngineConfig(max_num_seqs=settings.max_num_seqs, **settings.engine_options)
        self._engine = make_engine(settings.model, config, dtype=settings.dtype)
        self._settings = settings

    def run(self, prompts: Sequence[Prompt], *, cold: bool = False) -> Run:
        """See `Runner`."""
        engine = self._engine
        if cold:
            engine.reset_prefix_cache()
        times: list[list[list[float]]] = [
            [[] for _ in range(self._settings.num_answers)] for _ in prompts
        ]
        outputs = []
        start = time.perf_counter()
        try:
            for i, prompt in enumerate(prompts):
                params = self._params(prompt, i)
                outputs.append(engine.add_request(str(i), list(prompt.token_ids), params))
            while engine.has_unfinished:
                updates = engine.step()
                now = time.perf_counter() - start
                for update in updates:
                    if update.error is not None:
                        raise update.error
                    times[int(update.request_id)][update.index] += [now] * len(update.token_ids)
        finally:
            for output in outputs:
                engine.abort(output.request_id)
            engine.synchronize()
        if self._settings.detokenize:
            for output in outputs:
                output.decode_text()
        seconds = time.perf_counter() - start
        answers = [
            Answer(list(completion.token_ids), at, output.num_cached_tokens)
            for output, of_request in zip(outputs, times)
            for completion, at in zip(output.outputs, of_request)
        ]
        return Run(seconds, [prompt.num_tokens for prompt in prompts], answers)

    def footprint(self) -> Footprint:
        """Memory, including the engine's pool."""
        stats, size = self._engine.stats(), self._engine.pool_bytes
        share = stats.max_used_blocks / stats.usage.num_usable_blocks
        return measure_footprint(size, int(size * share))

    def _params(self, prompt: Prompt, index: int) -> SamplingParams:
        settings = self._settings
        return SamplingParams(
            n=settings.num_answers,
            temperature=settings.temperature,
            max_tokens=prompt.max_tokens,
            ignore_eos=settings.ignore_eos,
            seed=settings.seed + index,
        )


class MlxLmRunner(Runner):
    """mlx-lm's `BatchGenerator`, unchanged."""

    def __init__(self, model: LoadedModel, settings: Settings) -> None:
        self._model = model
        self._settings = settings

    def run(self, prompts: Sequence[Prompt], *, cold: bool = False) -> Run:
        """See `Runner`. The engine caches nothing between runs, so every run is cold."""
        from mlx_lm.generate import BatchGenerator  # here, because it must be unpatched first
        from mlx_lm.sample_utils import make_sampler

        settings, tokenizer = self._settings, self._model.tokenizer
        asked = [prompt for prompt in prompts for _ in range(settings.num_answers)]
        mx.random.seed(settings.seed)
        start = time.perf_counter()
        generator = BatchGenerator(
            self._model.model,
            stop_tokens=None if settings.ignore_eos else [[t] for t in tokenizer.eos_token_ids],
            sampler=make_sampler(settings.temperature),
            completion_batch_size=min(settings.max_num_seqs, len(asked)),
        )
        try:
            ids = generator.insert(
                [list(prompt.token_ids) for prompt in asked],
                [prompt.max_tokens for prompt in asked],
            )
            answers = {i: Answer([], []) for i in ids}
            while responses := generator.next_generated():
                now = time.perf_counter() - start
                for response in responses:
                    answer = answers[response.uid]
                    answer.token_ids.append(int(response.token))
                    answer.times.append(now)
        finally:
            generator.close()
        if settings.detokenize:
            for answer in answers.values():
                tokenizer.decode(answer.token_ids)
        seconds = time.perf_counter() - start
        if not all(answer.token_ids for answer in answers.values()):
            raise MlxPagedError("mlx-lm left a request without an answer")
        lens = [prompt.num_tokens for prompt in prompts]
        return Run(seconds, lens, [answers[i] for i in ids])


# --- Memory ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Footprint:
    """Memory in bytes.

    Attributes:
        process_peak: Peak resident memory of this process, including loading.
        mlx_peak: Peak of MLX's arrays since `mx.reset_peak_memory`: weights, activations, and the
            whole pool, touched or not.
        mlx_cache: Freed buffers that MLX keeps.
        pool: The KV pool; None for an engine without one.
        pool_used: Peak of the pool's bytes that held tokens, by the blocks of full attention; None
            likewise.
        system_used: Memory of the machine in use by all processes.
        system_total: Memory of the machine.
    """

    process_peak: int
    mlx_peak: int
    mlx_cache: int
    pool: int | None
    pool_used: int | None
    system_used: int
    system_total: int


def measure_footprint(pool: int | None = None, pool_used: int | None = None) -> Footprint:
    """Returns the memory in use by this process now."""
    system = psutil.virtual_memory()
    return Footprint(
        process_peak=peak_resident_bytes(),
        mlx_peak=mx.get_peak_memory(),
        mlx_cache=mx.get_cache_memory(),
        pool=pool,
        pool_used=pool_used,
        system_used=system.total - system.available,
        system_total=system.total,
    )


def peak_resident_bytes() -> int:
    """Returns the peak resident memory of this process."""
    try:
        # `getrusage` returns the parent's peak if that is higher, because it survives `exec`.
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


# --- Turns ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def opened(names: Sequence[EngineName], settings: Settings) -> Iterator[dict[str, Runner]]:
    """Yields the runners by engine name and closes them at the end."""
    runners: dict[str, Runner] = {}
    try:
        for name in names:
            make = open_runner if len(names) == 1 else RemoteRunner
            runners[name.value] = make(name, settings)
        yield runners
    finally:
        for runner in runners.values():
            runner.close()


def take_turns(
    runners: Mapping[str, Runner],
    prompts: Sequence[Prompt],
    num_iters: int,
    *,
    cold: bool = False,
    on_done: Callable[[], None] = lambda: None,
) -> dict[str, list[Run]]:
    """Each engine runs all prompts `num_iters` times; every other round in reverse order."""
    runs: dict[str, list[Run]] = {name: [] for name in runners}
    for number in range(num_iters):
        order = list(runners.items())
        for name, runner in order if number % 2 == 0 else reversed(order):
            runs[name].append(runner.run(prompts, cold=cold))
            on_done()
    return runs


class RemoteRunner(Runner):
    """A runner in another process.

    Raises:
        MlxPagedError: The other process raised an error, or ended.
    """

    def __init__(self, name: EngineName, settings: Settings) -> None:
        self._remote = Remote(name.value, open_runner, name, settings)

    def run(self, prompts: Sequence[Prompt], *, cold: bool = False) -> Run:
        """See `Runner`."""
        return self._remote.ask("run", list(prompts), cold=cold)  # type: ignore[no-any-return]

    def reset_peak(self) -> None:
        """See `Runner`."""
        self._remote.ask("reset_peak")

    def footprint(self) -> Footprint:
        """See `Runner`."""
        return self._remote.ask("footprint")  # type: ignore[no-any-return]

    def close(self) -> None:
        """See `Runner`."""
        self._remote.close()
