"""Sends a model's calls with paged caches to its store.

Only the class of the one model changes, to a subclass of itself. With any other cache, or none, the
model is as mlx-lm made it.
"""

from __future__ import annotations

import inspect
from functools import wraps
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_paged.drop_in.caches import sequence_of


def reroute(model: nn.Module) -> None:
    """Makes ``model(tokens, cache=caches)`` a step of the store. Twice is as good as once."""
    base: Any = type(model)
    if getattr(base, "mlx_paged_reroutes", False):
        return  # (copies of a model have its class)
    signature = inspect.signature(base.__call__)

    @wraps(base.__call__)  # mlx-lm reads off its parameters what a model can do
    def __call__(self: Any, *args: Any, **kwargs: Any) -> mx.array:
        caches = kwargs.get("cache")
        if caches is None and len(args) > 1:
            caches = signature.bind(self, *args, **kwargs).arguments.get("cache")
        sequence = sequence_of(caches) if caches else None
        if sequence is None:
            return base.__call__(self, *args, **kwargs)
        if not sequence.store.flat.is_of(self):
            raise ValueError("[paged prompt cache] this cache belongs to another model")
        arguments = signature.bind(self, *args, **kwargs).arguments
        (_, tokens), *others = ((k, v) for k, v in arguments.items() if v is not self)
        options = {k: v for k, v in others if k != "cache" and v is not None}
        embeddings = options.pop("input_embeddings", None)
        if options:
            raise TypeError(
                f"[paged prompt cache] {sorted(options)} must be None: a paged step makes its own. "
                "Set MLX_PAGED_DISABLE=1 to run this model with mlx-lm's own caches"
            )
        return sequence.forward(tokens, embeddings)

    members = {"__call__": __call__, "__module__": base.__module__, "mlx_paged_reroutes": True}
    model.__class__ = type(base.__name__, (base,), members)
