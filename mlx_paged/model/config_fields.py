"""What a ``config.json`` says under the names that the families have for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_VOCAB_SIZE = ("vocab_size", "num_vocab")
_MODEL_LEN = ("max_position_embeddings", "n_positions", "max_seq_len", "model_max_length", "n_ctx")


def vocab_size(config: Mapping[str, Any]) -> int:
    """Token ids are below this.

    Raises:
        KeyError: the config does not say.
    """
    size = _find(config, _VOCAB_SIZE)
    if size is None:
        raise KeyError(f"config.json names no vocabulary size ({' or '.join(_VOCAB_SIZE)})")
    return size


def model_len(config: Mapping[str, Any]) -> int | None:
    """Most tokens of context the model was made for; None where its config does not say."""
    return _find(config, _MODEL_LEN)


def _find(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    # A multimodal model's text model has a config of its own.
    for part in (config.get("text_config"), config):
        for name in names:
            if isinstance(part, Mapping) and part.get(name):
                return int(part[name])
    return None
