"""Imports transformers in a third of the time, for the command line.

- transformers reads every file of its `models` folder (some 1,600) to learn its possible imports,
  and does so twice: the function is cached, but its `lru_cache` holds 128 folders and there are
  550. Here the cache has no limit.
- It imports torch if that is installed, which takes 200 MB. Nothing here needs torch, so
  transformers is told that it is missing; other code may still import it.

With another version of transformers, this does nothing.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from mlx_paged.import_hooks import around_import

MODULE = "transformers.utils.import_utils"
SCAN = "create_import_structure_from_path"
LOOK_UP = "_is_package_available"


def arrange() -> None:
    """Makes transformers, when it is first imported, scan its files once and find no torch."""
    around_import(MODULE, _import_lightly)


def _import_lightly(module: ModuleType, execute: Callable[[], None]) -> None:
    execute()
    plain = getattr(getattr(module, SCAN, None), "__wrapped__", None)
    if plain is not None:
        setattr(module, SCAN, functools.cache(plain))
    look_up = getattr(module, LOOK_UP, None)
    # A program that has already imported torch may want transformers to use it.
    if look_up is not None and "torch" not in sys.modules:
        setattr(module, LOOK_UP, _without_torch(look_up))


def _without_torch(look_up: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps transformers' look-up of a package, which returns (found, version or None)."""

    @functools.wraps(look_up)
    def found(name: str, return_version: bool = False) -> Any:
        if name == "torch":
            return False, "N/A" if return_version else None
        return look_up(name, return_version=return_version)

    return found
