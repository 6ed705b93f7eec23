"""Tokenizers with the markers of reasoning formats, and a small model that has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
from mlx_lm.utils import load_tokenizer

from mlx_paged.demo import model_path
from mlx_paged.model.loader import LoadedModel
from support.models import tiny_config, tiny_model

VOCAB_SIZE = 4128  # the embedded model's plus markers; not a whole number of mask words


def tokenizer_with(
    added: Sequence[str] = (), special: Sequence[str] = (), template: str = ""
) -> Any:
    """The embedded model's tokenizer with more added tokens, and a chat template."""
    tokenizer = load_tokenizer(model_path())
    inner = tokenizer._tokenizer
    inner.add_tokens(list(added))
    inner.add_tokens(list(special), special_tokens=True)
    inner.chat_template = template
    return tokenizer


def thinking_model() -> LoadedModel:
    """A model with random weights whose tokenizer has ``<think>`` and ``</think>``."""
    config = tiny_config("llama", vocab_size=VOCAB_SIZE - 9, num_hidden_layers=2)
    tokenizer = tokenizer_with(["<think>", "</think>"])
    return LoadedModel(tiny_model(config), tokenizer, config, "thinking")
