"""Options that benchmarks share with those of vLLM, under its names."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from mlx_paged.cli import options as common
from mlx_paged.cli.bench.datasets import Dataset


def _option(panel: str, *names: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


# What is asked.

_DATA = "Data set"

DatasetName = Annotated[
    Dataset,
    _option(
        _DATA,
        "--dataset-name",
        help="random: tokens by chance; prefix_repetition: each prompt begins with one of a few "
        "prefixes; sharegpt: a file of conversations; embedded: requests to the embedded model.",
    ),
]
NumPrompts = Annotated[int, _option(_DATA, "--num-prompts", help="Requests.", min=1)]
DatasetPath = Annotated[
    Path | None, _option(_DATA, "--dataset-path", help="sharegpt: file in ShareGPT's JSON format.")
]
InputLen = Annotated[
    int | None,
    _option(_DATA, "--input-len", "--random-input-len", help="random: tokens of a prompt.", min=1,
            show_default="128"),
]  # fmt: skip
OutputLen = Annotated[
    int | None,
    _option(_DATA, "--output-len", "--random-output-len", "--sharegpt-output-len",
            "--prefix-repetition-output-len", help="Tokens of an answer.", min=1,
            show_default="64; sharegpt: those of the conversation"),
]  # fmt: skip
PrefixLen = Annotated[
    int | None,
    _option(_DATA, "--prefix-len", "--random-prefix-len",
            help="random: tokens that all prompts begin with, beside the others.", min=0,
            show_default="0"),
]  # fmt: skip
RangeRatio = Annotated[
    float | None,
    _option(_DATA, "--random-range-ratio", min=0.0, show_default="0",
            help="random: lengths vary by this share, up and down, uniformly."),
]  # fmt: skip
RepeatedPrefixLen = Annotated[
    int | None,
    _option(_DATA, "--prefix-repetition-prefix-len", min=1, show_default="256",
            help="prefix_repetition: tokens of a prefix."),
]  # fmt: skip
RepeatedSuffixLen = Annotated[
    int | None,
    _option(_DATA, "--prefix-repetition-suffix-len", min=1, show_default="256",
            help="prefix_repetition: tokens after it."),
]  # fmt: skip
NumPrefixes = Annotated[
    int | None,
    _option(_DATA, "--prefix-repetition-num-prefixes", min=1, show_default="10",
            help="prefix_repetition: how many prefixes there are."),
]  # fmt: skip
SystemPrompt = Annotated[
    bool | None,
    _option(_DATA, "--system-prompt/--no-system-prompt", show_default="with it",
            help="embedded: all chats begin with the same long system message."),
]  # fmt: skip
Seed = Annotated[int, _option(_DATA, "--seed", help="Of all that is by chance.")]

# What is told.

_REPORT = "Report"

MetricPercentiles = Annotated[
    str, _option(_REPORT, "--metric-percentiles", help="Percentiles of latencies, by commas.")
]
OutputJson = Annotated[
    Path | None, _option(_REPORT, "--output-json", help="Write figures and environment here.")
]

# Who does it, and how.

_ENGINE = "Model and engine"


class EngineName(StrEnum):
    """Who generates."""

    MLX_PAGED = "mlx-paged"
    MLX_LM = "mlx-lm"


class DType(StrEnum):
    """Of weights and activations."""

    AUTO = "auto"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


Engines = Annotated[
    list[EngineName],
    _option(
        _ENGINE,
        "--engine",
        help="Who generates. Give it twice to compare: each works in a process of its own, and "
        "they take turns.",
    ),
]
Model = common.Model
ModelDType = Annotated[
    DType, _option(_ENGINE, "--dtype", help="auto: as the weights are, float32 on the CPU.")
]
NumAnswers = Annotated[int, _option(_ENGINE, "--n", min=1, help="Answers for each prompt.")]
Temperature = Annotated[float, _option(_ENGINE, "--temperature", min=0.0, help="0 is greedy.")]
IgnoreEos = Annotated[
    bool,
    _option(_ENGINE, "--ignore-eos/--no-ignore-eos", help="Every answer has its full length."),
]
DisableDetokenize = Annotated[
    bool, _option(_ENGINE, "--disable-detokenize", help="Leave making text out of the time.")
]
MaxNumSeqs = Annotated[
    int, _option(_ENGINE, "--max-num-seqs", min=1, help="Most sequences that run at once.")
]
MaxNumBatchedTokens = Annotated[
    int,
    _option(_ENGINE, "--max-num-batched-tokens", min=1, help="mlx-paged: most tokens of a step."),
]
MaxModelLen = Annotated[
    int | None,
    _option(_ENGINE, "--max-model-len", min=1, show_default="the longest request",
            help="mlx-paged: most tokens of prompt and answer. With --max-num-seqs it bounds the "
            "KV pool."),
]  # fmt: skip
BlockSize = Annotated[
    int, _option(_ENGINE, "--block-size", help="mlx-paged: tokens of a KV block.")
]
KVCacheMemory = common.KVCacheMemory
GPUMemoryUtilization = Annotated[
    float | None,
    _option(_ENGINE, "--gpu-memory-utilization", show_default="0.9 on a GPU",
            help="mlx-paged: most of the device's memory, as a share."),
]  # fmt: skip
PrefixCaching = Annotated[
    bool,
    _option(_ENGINE, "--enable-prefix-caching/--no-enable-prefix-caching",
            help="mlx-paged: share equal beginnings of prompts."),
]  # fmt: skip
AsyncScheduling = common.AsyncScheduling
