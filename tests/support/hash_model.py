"""A model without weights that computes each next token from a token and its position, on device.

It costs almost nothing, so an engine can run through many thousands of tokens, and it exposes
lost, repeated or misdirected tokens immediately.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache
from mlx_lm.utils import load_tokenizer

from mlx_paged.demo import model_path
from mlx_paged.model.caches import PagedLayerCache
from mlx_paged.model.families import register_family
from mlx_paged.model.loader import LoadedModel

VOCAB_SIZE = 61

# Its dense forward is not meaningful, so there is nothing to compare.
register_family("hash", verify=False)


def follows(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The oracle: the answer of `HashModel`."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append((tokens[-1] * 31 + (len(tokens) - 1) * 7 + 3) % VOCAB_SIZE)
    return tokens[len(prompt) :]


class _Head(nn.Module):
    def __call__(self, nexts: mx.array) -> mx.array:
        return mx.where(mx.arange(VOCAB_SIZE) == nexts[..., None], 1.0, 0.0)


class HashModel(nn.Module):
    """One attention layer that writes its cache and does not read it."""

    model_type = "hash"

    def __init__(self) -> None:
        super().__init__()
        self.lm_head = _Head()

    def make_cache(self) -> list[KVCache]:
        return [KVCache()]

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        kv = mx.zeros((tokens.shape[0], 1, 1, 8))
        cache[0].update_and_fetch(kv, kv)
        if not isinstance(cache[0], PagedLayerCache):  # the loader asks for the cache layout
            return tokens
        return self.lm_head((tokens * 31 + cache[0].offset[:, None] * 7 + 3) % VOCAB_SIZE)


@lru_cache(maxsize=1)
def _tokenizer() -> Any:
    return load_tokenizer(model_path())


def hash_model() -> LoadedModel:
    """Makes a model for one engine, with the embedded model's tokenizer."""
    config = {"model_type": "hash", "vocab_size": VOCAB_SIZE}
    return LoadedModel(HashModel(), _tokenizer(), config, "hash")
