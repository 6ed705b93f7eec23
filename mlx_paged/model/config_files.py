"""Reads a model's `config.json` and `generation_config.json`. Imports no mlx."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_paged.errors import InvalidParameterError

#: Recommended sampling settings and end tokens of a model.
GENERATION_CONFIG = "generation_config.json"
# Names of one field of config.json, by family.
_VOCAB_SIZE = ("vocab_size", "num_vocab")
_TEXT_SECTIONS = ("text_config", "llm_config", "language_config")
#: Names of the context limit.
LENGTH_FIELDS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "model_max_length",
    "n_ctx",
)


def vocab_size(config: Mapping[str, Any]) -> int:
    """Token ids are below this.

    Raises:
        KeyError: The config does not give it.
    """
    size = _find(config, _VOCAB_SIZE)
    if size is None:
        raise KeyError(f"config.json names no vocabulary size ({' or '.join(_VOCAB_SIZE)})")
    return size


def has_vocab_size(config: Mapping[str, Any]) -> bool:
    """True if the config gives the vocabulary size."""
    return _find(config, _VOCAB_SIZE) is not None


def model_len(config: Mapping[str, Any]) -> int | None:
    """Returns the model's context limit in tokens, or None if its config has none."""
    return _find(config, LENGTH_FIELDS)


def _find(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    # A multimodal model's text model has its own config, under a name that depends on the family.
    thinker = config.get("thinker_config")
    inner = thinker if isinstance(thinker, Mapping) else config
    for part in (*(inner.get(name) for name in _TEXT_SECTIONS), config):
        for name in names:
            if isinstance(part, Mapping) and part.get(name):
                return int(part[name])
    return None


def read_generation_config(directory: Path) -> dict[str, Any]:
    """Returns the contents of the file in a model directory; empty if there is none.

    Raises:
        InvalidParameterError: It is not a JSON object, or names end tokens other than by ids.
    """
    path = directory / GENERATION_CONFIG
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
    """Returns the end tokens it names: one id, or several.

    Raises:
        InvalidParameterError: They are not ids.
    """
    given = config.get("eos_token_id")
    ids = [] if given is None else given if isinstance(given, list) else [given]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise InvalidParameterError("eos_token_id", "token ids of at least 0", given)
    return frozenset(ids)
