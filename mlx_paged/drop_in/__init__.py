"""Makes mlx-lm paged: ``import mlx_paged`` is the only change that a program needs.

Prompt caches of mlx-lm then live in a paged store, one for each model; prompts that begin like one
seen before are computed from where they differ; batches share what their prompts share. Interfaces
and results stay mlx-lm's. ``mlx_paged.unpatch()`` undoes it, ``MLX_PAGED_DISABLE=1`` prevents it.

`seams` lists every symbol that is replaced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlx_paged.drop_in.patching import (
    MlxLmMismatchError,
    arrange,
    is_disabled,
    is_patched,
    patch,
    unpatch,
)

if TYPE_CHECKING:
    from mlx_paged.drop_in.model_store import ModelStore
    from mlx_paged.drop_in.paged_store import StoreStats

__all__ = [
    "MlxLmMismatchError",
    "arrange",
    "is_disabled",
    "is_patched",
    "patch",
    "stats",
    "store",
    "unpatch",
    "weights_changed",
]


def store(model: Any) -> ModelStore:
    """The paged memory of a model: its size, its limit, and `clear`.

    Raises:
        InvalidParameterError: `model` is no model.
        NoStoreError: (a `RuntimeError`) the model has no store; the message says why.
    """
    from mlx_paged.drop_in.model_store import ModelStore

    return ModelStore(model)


def stats(model: Any) -> StoreStats | None:
    """Numbers of a model's newest store; None where it has none (yet)."""
    from mlx_paged.drop_in.registry import stores_of

    stores = stores_of(model)
    return stores[-1].stats() if stores else None


def weights_changed(model: Any) -> None:
    """Makes the next call begin with an empty store; live prompt caches keep what they have.

    MLX's own updates are noticed without it: new arrays, `w -= x`, `w *= s`, `w[...] = y`. Call
    this after other code has written to a weight's memory, for example through a NumPy view.

    Raises:
        InvalidParameterError: `model` is no model.
    """
    import mlx.nn as nn

    from mlx_paged.drop_in.registry import entry_of
    from mlx_paged.errors import InvalidParameterError

    if not isinstance(model, nn.Module):
        raise InvalidParameterError("model", "a model as mlx_lm.load returns it", model)
    entry = entry_of(model)
    if entry is not None:
        entry.forget_weights()
