"""The one place where mlx-lm's model code meets paged attention.

Every mlx-lm model (and ``mlx_lm.models.base``) looks up ``mx.fast.scaled_dot_product_attention``
when it is called, so one rebinding serves them all. Dispatch is on the type of the keys, never on
a cache: layers that share their KV with another layer pass none. Dense calls go where they always
went.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from mlx_paged.model import layer_ops
from mlx_paged.model.handles import KVHandle, Scores

_dense_attention = mx.fast.scaled_dot_product_attention


def scaled_dot_product_attention(
    q: mx.array, k: mx.array, v: mx.array, *, scale: float, **kwargs: Any
) -> mx.array:
    """``mx.fast.scaled_dot_product_attention`` that also takes KV handles."""
    if not isinstance(k, KVHandle):
        return _dense_attention(q, k, v, scale=scale, **kwargs)
    mask = kwargs.pop("mask", None)
    sinks = kwargs.pop("sinks", None)
    if mask is not None and not isinstance(mask, Scores):
        raise TypeError(
            "[paged_attention] mask must be None but got "
            f"{mask if isinstance(mask, str) else type(mask).__name__}: "
            "this model asks for a mask that the paged cache did not make"
        )
    if kwargs:
        raise TypeError(f"[paged_attention] unexpected arguments {sorted(kwargs)}")
    cache = k.cache
    # Latent attention takes its values from the keys; what came as values went into the scores.
    values = cache.values if mask is None else k
    if (
        k is not cache.keys
        or v is not values
        or (mask is not None and mask.handle.cache is not cache)
    ):
        raise TypeError(
            "[paged_attention] keys and values must be the two handles of one layer, in that order"
        )
    return cache.attend(q, scale=scale, sinks=sinks, scores=mask)


def install() -> None:
    """Rebinds MLX's attention, and what `layer_ops` serves. Doing it twice changes nothing."""
    mx.fast.scaled_dot_product_attention = scaled_dot_product_attention
    layer_ops.install()


def ensure_installed() -> None:
    """For every step: another part of the program may have taken it out since the last one."""
    if mx.fast.scaled_dot_product_attention is not scaled_dot_product_attention:
        install()


def uninstall() -> None:
    """Puts back what was there."""
    mx.fast.scaled_dot_product_attention = _dense_attention
    layer_ops.uninstall()
