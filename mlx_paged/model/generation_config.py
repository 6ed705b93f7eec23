"""`generation_config.json`: how a model's makers would sample from it, and where it ends."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_paged.errors import InvalidParameterError

NAME = "generation_config.json"


def read_generation_config(directory: Path) -> dict[str, Any]:
    """What the file of a model directory says; nothing where there is none.

    Raises:
        InvalidParameterError: it is not a JSON object, or names no end tokens by their ids.
    """
    path = directory / NAME
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise InvalidParameterError("generation_config", f"JSON ({error})", str(path)) from error
    if not isinstance(found, dict):
        raise InvalidParameterError("generation_config", "a JSON object", str(path))
    eos_token_ids(found)
    return found


def eos_token_ids(config: Mapping[str, Any]) -> frozenset[int]:
    """The end tokens it names: one id, or several.

    Raises:
        InvalidParameterError: they are no ids.
    """
    given = config.get("eos_token_id")
    ids = [] if given is None else given if isinstance(given, list) else [given]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise InvalidParameterError("eos_token_id", "token ids of at least 0", given)
    return frozenset(ids)
