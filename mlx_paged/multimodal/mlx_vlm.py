"""mlx-vlm as an optional package: its version, and its import."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from types import ModuleType

from mlx_paged.environment import kept_environment

#: The version that the tables of families were verified with.
MLX_VLM_VERSION = "0.7.10"

#: The message if mlx-vlm is missing.
INSTALL = (
    "pictures, videos and sounds need mlx-vlm: run pip install 'mlx-paged[vision]' && "
    f"pip install --no-deps mlx-vlm=={MLX_VLM_VERSION}"
)


# Packages that mlx-vlm imports for any model; the extra `vision` has these.
_IMPORTED = ("PIL", "requests", "sentencepiece", "tqdm")


def installed_version() -> str | None:
    """Version of mlx-vlm, without importing it; None: it, or a package it needs, is missing."""
    if any(importlib.util.find_spec(name) is None for name in _IMPORTED):
        return None
    try:
        return importlib.metadata.version("mlx-vlm")
    except importlib.metadata.PackageNotFoundError:
        return None


def import_mlx_vlm() -> ModuleType:
    """Imports mlx-vlm without its side effects on this process and its children.

    It sets variables that silence transformers, and would do so in every child process, too.

    Raises:
        ImportError: mlx-vlm is not installed.
    """
    from transformers.utils import logging

    logging.get_verbosity()  # This reads the variables, once for the process.
    with kept_environment(("TRANSFORMERS_VERBOSITY", "TRANSFORMERS_NO_ADVISORY_WARNINGS")):
        return importlib.import_module("mlx_vlm")
