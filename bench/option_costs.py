"""Speed of all combinations of --dtype, weight format, --cpu-activations and --kv-cache-dtype.

python bench/option_costs.py           # some 100 combinations, ten minutes on two cores; writes
                                       # bench/results/option_costs-cpu.json
python bench/option_costs.py --quick   # without formats of the KV cache, writes nothing

SmolLM2-135M-Instruct, with its own weights in each format. For each combination: tokens per second
of one prompt and of one answer, and the warnings at start. A combination is a cliff if it takes
more than twice as long as the default for these weights; each must be refused, or warn.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import logging
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import mlx.nn as nn
from harness import print_table, save
from mlx_lm.utils import save_config, save_model

from mlx_paged import LLM, SamplingParams
from mlx_paged.demo.real_model import real_model_path
from mlx_paged.engine.config import CPU_ACTIVATIONS
from mlx_paged.engine.loading import load
from mlx_paged.errors import MlxPagedError
from mlx_paged.model.kv_formats import FORMATS
from mlx_paged.model.loader import DTYPES

WEIGHTS = ("float32", "bfloat16", "float16", "8 bits", "4 bits")
PROMPT_LEN, NUM_TOKENS = 128, 8
CLIFF = 2.0


@dataclass
class Speed:
    """One combination.

    Attributes:
        prefill, decode: Tokens per second; 0 if it was refused.
        said: The warnings at start, or the reason of the refusal.
    """

    weights: str
    dtype: str
    cpu_activations: str
    kv_cache_dtype: str
    prefill: float = 0.0
    decode: float = 0.0
    said: list[str] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.weights, self.dtype, self.cpu_activations, self.kv_cache_dtype


def checkpoints(directory: Path) -> dict[str, Path]:
    """The model in each format of weights."""
    found = {}
    for name in WEIGHTS:
        loaded = load(real_model_path(), dtype="float32")
        config = {key: value for key, value in loaded.config.items() if "quantization" not in key}
        if name.endswith("bits"):
            settings = {"group_size": 64, "bits": int(name[0])}
            nn.quantize(loaded.model, **settings)
            config["quantization"] = settings
        else:
            loaded.model.set_dtype(DTYPES[name])
        path = directory / name.replace(" ", "")
        path.mkdir()
        save_model(path, loaded.model)
        save_config(config, path / "config.json")
        loaded.tokenizer.save_pretrained(path)
        found[name] = path
    return found


@contextmanager
def warnings_to(said: list[str]) -> Iterator[None]:
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("mlx_paged")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def measure(path: Path, speed: Speed) -> None:
    try:
        with warnings_to(speed.said):
            llm = LLM(
                path,
                dtype=speed.dtype,
                cpu_activations=speed.cpu_activations,
                kv_cache_dtype=speed.kv_cache_dtype,
                kv_cache_memory=1 << 26,
            )
    except MlxPagedError as error:
        speed.said.append(f"refused: {error}")
        return
    llm.generate([[7] * 16], SamplingParams(temperature=0, max_tokens=2))
    prompt = [11 + i * 7 % 1000 for i in range(PROMPT_LEN)]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    start = time.perf_counter()
    stamps = [time.perf_counter() for _ in llm.stream(prompt, params)]
    speed.prefill = PROMPT_LEN / (stamps[0] - start)
    speed.decode = (len(stamps) - 1) / (stamps[-1] - stamps[0])


def combinations(quick: bool) -> list[Speed]:
    formats = ("auto",) if quick else ("auto", *FORMATS)
    found = [
        Speed(*each)
        for each in itertools.product(WEIGHTS, ("auto", *DTYPES), CPU_ACTIVATIONS, formats)
    ]
    # A format of the KV cache with each dtype and with each kind of activations, not with both.
    return [
        s for s in found
        if s.kv_cache_dtype == "auto" or s.dtype == "auto" or s.cpu_activations == "float32"
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="only --kv-cache-dtype auto, no file")
    quick = parser.parse_args().quick
    mx.set_default_device(mx.cpu)
    speeds = combinations(quick)
    with tempfile.TemporaryDirectory() as directory:
        paths = checkpoints(Path(directory))
        for speed in speeds:
            measure(paths[speed.weights], speed)
            gc.collect()
            mx.clear_cache()
            print(
                *speed.key,
                f"{speed.prefill:.0f} {speed.decode:.1f}",
                *speed.said,
                sep=" | ",
                flush=True,
            )
    defaults = {s.weights: s for s in speeds if s.key[1:] == ("auto", "float32", "auto")}
    rows, silent = [], []
    for speed in speeds:
        default = defaults[speed.weights]
        is_cliff = (
            speed.prefill > 0
            and max(default.prefill / speed.prefill, default.decode / speed.decode) > CLIFF
        )
        told = "yes" if speed.said else ""
        rows.append([" / ".join(speed.key), f"{speed.prefill:.0f}", f"{speed.decode:.1f}", told])
        if is_cliff and not speed.said:
            silent.append(" / ".join(speed.key))
    print_table(
        ["weights / dtype / activations / KV", "prompt tok/s", "answer tok/s", "says"], rows
    )
    if not quick:
        save(
            "option_costs-cpu",
            {"benchmark": "option_costs", "results": [asdict(s) for s in speeds]},
        )
    if silent:
        raise SystemExit(f"more than {CLIFF:g} times as slow, without a word: {'; '.join(silent)}")


if __name__ == "__main__":
    main()
