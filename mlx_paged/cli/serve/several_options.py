"""Options of `mlx-paged serve` for several models: names, lifetimes and memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from mlx_paged.cli.options import option

_SEVERAL = "Several models"


@dataclass(frozen=True)
class SeveralOptions:
    """Further models and their lifetimes (docs/several-models.md)."""

    models: Annotated[
        list[str] | None,
        option(
            _SEVERAL,
            "A further model: PATH or NAME=PATH. Repeatable. It is loaded when a request names it, "
            "and options about models apply to all. docs/several-models.md",
            "--model",
            envvar="MLX_PAGED_MODELS",
            show_envvar=False,
            show_default="none",
        ),
    ] = None
    models_config: Annotated[
        Path | None,
        option(
            _SEVERAL,
            "YAML file with further models: a list of {model, name, aliases, pinned, preload, ttl, "
            "options}.",
            exists=True,
            dir_okay=False,
        ),
    ] = None
    memory_budget: Annotated[
        float | None,
        option(
            _SEVERAL,
            "GiB for all loaded models together. To make room, the least recently used is unloaded "
            "if no request runs on it.",
            min=0.001,
            show_default="80% of main memory, or 90% of the GPU's",
        ),
    ] = None
    model_ttl: Annotated[
        float | None,
        option(
            _SEVERAL,
            "Seconds without requests after which a model is unloaded.",
            min=0,
            show_default="no limit",
        ),
    ] = None
    pin_models: Annotated[
        list[str] | None,
        option(
            _SEVERAL,
            "Name of a model that stays loaded. Repeatable.",
            "--pin-model",
            show_default="none",
        ),
    ] = None
    preload_models: Annotated[
        list[str] | None,
        option(
            _SEVERAL,
            "Name of a model that is loaded at the start. Repeatable.",
            "--preload-model",
            show_default="the first",
        ),
    ] = None
    spare_process: Annotated[
        bool | None,
        option(
            _SEVERAL,
            "Keep a process of 100 MB ready to load the next model.",
            "--spare-process/--no-spare-process",
            show_default="off on NVIDIA GPUs",
        ),
    ] = None
