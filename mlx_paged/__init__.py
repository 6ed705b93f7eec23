"""Paged attention, prefix sharing and continuous batching for MLX.

Importing it makes mlx-lm paged (`mlx_paged.drop_in`); ``unpatch`` undoes that.
``LLM`` generates, ``load`` loads, ``ops`` holds the native primitives. Everything is imported when
first used, so that the state half (``mlx_paged.core``) never needs MLX.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mlx_paged import blas, descriptors
from mlx_paged.drop_in import arrange, patch, unpatch

if TYPE_CHECKING:
    from mlx_paged.engine.llm import LLM, RequestOutput
    from mlx_paged.engine.sampling_params import SamplingParams
    from mlx_paged.extension import build_info
    from mlx_paged.model.families import register_family
    from mlx_paged.model.loader import LoadedModel, load

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "LoadedModel",
    "RequestOutput",
    "SamplingParams",
    "build_info",
    "load",
    "patch",
    "unpatch",
    "register_family",
]

_HOMES = {
    "LLM": "mlx_paged.engine.llm",
    "LoadedModel": "mlx_paged.model.loader",
    "RequestOutput": "mlx_paged.engine.llm",
    "SamplingParams": "mlx_paged.engine.sampling_params",
    "build_info": "mlx_paged.extension",
    "load": "mlx_paged.model.loader",
    "register_family": "mlx_paged.model.families",
}

# Now, not when MLX is first needed: a program that imports mlx_paged and then mlx.core means both.
blas.preload()
descriptors.keep_limit()
arrange()


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'mlx_paged' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
