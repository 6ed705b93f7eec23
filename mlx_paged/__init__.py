"""Paged attention, prefix sharing and continuous batching for MLX.

Importing the package makes mlx-lm paged (`mlx_paged.drop_in`); ``unpatch`` undoes that.
``LLM`` and ``AsyncEngine`` generate text, ``load`` loads models, ``ops`` has the native primitives.
Names are imported on first use, so the state half (``mlx_paged.core``) never needs MLX.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any


def _exit_interrupted(*_: object) -> None:
    with contextlib.suppress(OSError):
        os.write(2, b"mlx-paged: interrupted\n")
    os._exit(130)


def _is_program() -> bool:
    """True if this process is ``mlx-paged`` or ``python -m mlx_paged``."""
    arguments: list[str] = getattr(sys, "argv", [""])
    if arguments[0] == "-m":  # Python is looking for the module that it will run
        return sys.orig_argv[-len(arguments)] == "mlx_paged"
    return os.path.basename(arguments[0]).removesuffix(".exe") == "mlx-paged"


if _is_program() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # Runs before any other import of the CLI. Until `cli.entry.run` takes over, Ctrl-C exits
    # without a traceback from the middle of an import.
    signal.signal(signal.SIGINT, _exit_interrupted)

from mlx_paged import blas, descriptors  # noqa: E402
from mlx_paged.drop_in import arrange, patch, unpatch  # noqa: E402

if TYPE_CHECKING:
    from mlx_paged.engine.async_engine import AsyncEngine
    from mlx_paged.engine.llm import LLM, RequestOutput
    from mlx_paged.engine.loading import load
    from mlx_paged.engine.lora.request import LoRARequest
    from mlx_paged.engine.pooling.params import PoolingParams
    from mlx_paged.engine.sampling_params import SamplingParams
    from mlx_paged.extension import build_info
    from mlx_paged.model.families import register_family
    from mlx_paged.model.loader import LoadedModel

__version__ = "0.1.0"
__all__ = [
    "AsyncEngine",
    "LLM",
    "LoRARequest",
    "LoadedModel",
    "PoolingParams",
    "RequestOutput",
    "SamplingParams",
    "build_info",
    "load",
    "patch",
    "unpatch",
    "register_family",
]

_HOMES = {
    "AsyncEngine": "mlx_paged.engine.async_engine",
    "LLM": "mlx_paged.engine.llm",
    "LoRARequest": "mlx_paged.engine.lora.request",
    "LoadedModel": "mlx_paged.model.loader",
    "PoolingParams": "mlx_paged.engine.pooling.params",
    "RequestOutput": "mlx_paged.engine.llm",
    "SamplingParams": "mlx_paged.engine.sampling_params",
    "build_info": "mlx_paged.extension",
    "load": "mlx_paged.engine.loading",
    "register_family": "mlx_paged.model.families",
}

# Must run before the program's own import of mlx.core.
blas.preload()
descriptors.keep_limit()
arrange()


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'mlx_paged' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
