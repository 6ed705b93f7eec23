"""The drop-in makes mlx-lm paged. A program only needs ``import mlx_paged``.

mlx-lm's prompt caches then live in one paged store per model. A prompt is computed from the point
where it differs from earlier ones, and batches share their common prefixes. Interfaces and results
stay those of mlx-lm. ``mlx_paged.unpatch()`` undoes the patch; ``MLX_PAGED_DISABLE=1`` prevents it.

`seams` lists every replaced symbol.
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
    """Returns the paged memory of a model, to read its size, set its limit or clear it.

    Raises:
        InvalidParameterError: `model` is not a model.
        NoStoreError: The model has no store; the message says why. A `RuntimeError`.
    """
    from mlx_paged.drop_in.model_store import ModelStore

    return ModelStore(model)


def stats(model: Any) -> StoreStats | None:
    """Statistics of a model's newest store; None if it has no store yet."""
    from mlx_paged.drop_in.registry import stores_of

    stores = stores_of(model)
    return stores[-1].stats() if stores else None


def weights_changed(model: Any) -> None:
    """Makes the next call start with an empty store. Live prompt caches keep their contents.

    Updates through MLX are detected without it: new arrays, `w -= x`, `w *= s`, `w[...] = y`. Call
    this after other code has written to a weight's memory, for example through a NumPy view.

    Raises:
        InvalidParameterError: `model` is not a model.
    """
    import mlx.nn as nn

    from mlx_paged.drop_in.registry import entry_of
    from mlx_paged.errors import InvalidParameterError

    if not isinstance(model, nn.Module):
        raise InvalidParameterError("model", "a model as mlx_lm.load returns it", model)
    entry = entry_of(model)
    if entry is not None:
        entry.forget_weights()
