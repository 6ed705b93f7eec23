"""Imports transformers in little more than half the time, for the command line.

transformers reads every file of its `models` folder (some 1,600) to learn its possible imports, and
does so twice: the function is cached, but its `lru_cache` holds 128 folders and there are 550. Here
the cache has no limit. With another version of transformers, this does nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType

from mlx_paged.import_hooks import around_import

MODULE = "transformers.utils.import_utils"
FUNCTION = "create_import_structure_from_path"


def arrange() -> None:
    """Lets transformers, when it is first imported, scan its files once."""
    around_import(MODULE, _import_once)


def _import_once(module: ModuleType, execute: Callable[[], None]) -> None:
    execute()
    plain = getattr(getattr(module, FUNCTION, None), "__wrapped__", None)
    if plain is not None:
        setattr(module, FUNCTION, functools.cache(plain))
